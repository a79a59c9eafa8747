"""Settings of the whole suite."""

import os
import re
import shlex
import shutil

import pytest
import torch

from clearhead.backends.native_library import why_missing

# The inputs are tiny: threads would only wait for each other. Set before any test, for all of them.
torch.set_num_threads(1)

COMPILERS = [shlex.split(os.environ["CXX"])[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)


def pytest_collection_modifyitems(items):
    """Where nothing could build the kernels, the cases that name them are skipped; where a compiler is, they fail."""
    missing = why_missing()
    if missing is None or COMPILER is not None:
        return
    for item in items:
        if hasattr(item, "callspec") and re.search(r"\bnative\b", item.callspec.id):
            item.add_marker(pytest.mark.skip(reason=missing))
