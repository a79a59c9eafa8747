"""Extra memory of a call: how far the process grows beyond its inputs, as the operating system counts it.

Counting torch's tensors would miss what kernels allocate by themselves, so each side runs once in a fresh process and
the kernel's high-water mark is read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import clearhead as ch
from benchmarks.fresh import fresh
from benchmarks.race import Row, UnavailableError

# Blocks of this size go back to the system when they are freed, instead of hiding what comes after (glibc).
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
SELF = Path("/proc/self")


def extra_memory(row: Row, threads: int) -> tuple[int, int]:
    """Bytes that ours and the peer need beyond the inputs."""
    if not SELF.exists():
        raise UnavailableError("needs Linux, where /proc tells a process's largest size")
    ours, theirs = (fresh(ALLOCATOR, _side, row, side, threads) for side in ("ours", "theirs"))
    return ours, theirs


def _side(row: Row, side: str, threads: int) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    race = row.build()
    _load_libraries()
    return growth(getattr(race, side))


def growth(work: Callable[[], object]) -> int:
    """Bytes by which this process outgrows its present size while the work is done."""
    gc.collect()
    # `ru_maxrss` would not do: it starts with the size of the process that started this one.
    (SELF / "clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (SELF / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _load_libraries() -> None:
    """What the first call of any size loads is no memory of the work."""
    mha = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()
    own = ch.MultiHeadAttention.from_torch(mha)
    x = torch.randn(2, 64, 64)
    with torch.no_grad():
        for _ in range(2):
            mha(x, x, x, need_weights=False)
            own(x)
            ch.attention(x, x, x, ch.Causal(), observe=ch.Observe(lse=True, received=True))
            F.scaled_dot_product_attention(x, x, x)
            (x @ x.mT).softmax(-1) @ x
