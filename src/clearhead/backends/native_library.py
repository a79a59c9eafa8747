"""The compiled CPU kernels, ``clearhead._native``: imported where they were built, explained where they were not."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from types import ModuleType

import torch  # (before the kernels: they then share its OpenMP, instead of loading one of their own)

NAME = "clearhead._native"
TOOLS = {
    "linux": "a C++ compiler and Python's headers (on Debian and Ubuntu: apt install g++ python3-dev)",
    "darwin": "a C++ compiler (xcode-select --install)",
}


@cache
def library() -> ModuleType | None:
    """The kernels, or None without them; the first call sets the instruction set that ``CLEARHEAD_ISA`` names.

    Raises:
        ValueError: ``CLEARHEAD_ISA`` names one that was not built or that this processor does not have.
    """
    module, why = _load()
    isa = os.environ.get("CLEARHEAD_ISA")
    if isa:
        if module is None:
            raise ValueError(f"CLEARHEAD_ISA={isa!r} chooses among native kernels: unset it. There are none: {why}")
        if isa not in module.isas():
            raise ValueError(
                f"CLEARHEAD_ISA must be one of {', '.join(module.isas())}, which were built and which this processor "
                f"has, got {isa!r}: name one of these, or unset it for the best, {module.isas()[0]}"
            )
        module.set_isa(isa)
    return module


def why_missing() -> str | None:
    """Why there are no kernels and how to get them, as a sentence; None if they are there.

    Example:
        >>> (library() is None) == (why_missing() is not None)
        True
    """
    return _load()[1]


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        module = importlib.import_module(NAME)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != NAME:
            return None, f"the native kernels are there but do not load: {error}"
    else:
        try:  # how they read tensors without torch's headers
            module.use_exchange(torch.Tensor.__dlpack_c_exchange_api__)
        except (AttributeError, ValueError) as error:
            return None, f"the native kernels are there but cannot read this torch's tensors: {error}"
        return module, None
    if sys.platform not in TOOLS:
        return None, "the native kernels were not built: they are for Linux and macOS"
    return None, f"the native kernels were not built: install {TOOLS[sys.platform]} and reinstall clearhead"
