"""The machine and the versions: what a number is worth without."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from clearhead.backends import BACKENDS
from clearhead.backends.native_library import library
from clearhead.cli.info import requests

PACKAGES = ("clearhead", "torch", "transformers", "x-transformers")


def facts() -> dict[str, str]:
    """What the table's head says."""
    plain = requests()["plain"]
    backend = next(name for name, backend in BACKENDS.items() if not backend.reasons(plain))
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "instructions": f"torch {torch.backends.cpu.get_cpu_capability()}, clearhead {isa() or 'no native kernels'}",
        "clearhead's choice": f"backend {backend} for a plain call",
        "threads": f"1 and {torch.get_num_threads()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
        + f", Python {platform.python_version()}",
    }


def native() -> ModuleType | None:
    """The compiled kernels, where they were built."""
    return library()


def isa() -> str | None:
    """The instruction set that our kernels run with; None where they were not built."""
    kernels = native()
    return None if kernels is None else str(kernels.isa())


def load() -> float:
    """Runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def busy(before: float, after: float) -> str:
    """A warning if others computed too; our own threads count in the load after."""
    others = max(before, after - torch.get_num_threads())
    note = f"load average {before:.1f} before, {after:.1f} after"
    return f"{note}: OTHERS WERE COMPUTING TOO, repeat it on an idle machine" if others > 0.5 else note


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
