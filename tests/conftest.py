"""Settings of the whole suite."""

import re

import pytest
import torch

from clearhead.backends.native_library import why_missing
from compiler import COMPILER

# The inputs are tiny: threads would only wait for each other. Set before any test, for all of them.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Where nothing could build the kernels, the cases that name them are skipped; where a compiler is, they fail."""
    missing = why_missing()
    if missing is None or COMPILER is not None:
        return
    for item in items:
        if hasattr(item, "callspec") and re.search(r"\bnative\b", item.callspec.id):
            item.add_marker(pytest.mark.skip(reason=missing))
