"""What the machine can do at most: multiply-adds and copied bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from benchmarks.machine import native

COPIED = 512 << 20  # bytes: beyond most caches
TRIES = 5


@dataclass(frozen=True)
class Product:
    """A matrix product of square float32 matrices."""

    name: str
    operations: int
    work: Callable[[], object]

    def rate(self) -> float:
        """Operations a second, measured once."""
        return _rate(self.operations, self.work)


def seconds_at_peak(operations: float) -> float:
    """How long so many take at the peak rate, measured now with torch's number of threads."""
    threads = torch.get_num_threads()
    return operations / (register_peak(threads) if native() else best_product(threads).rate())


def peak_name() -> str:
    """Which peak that is."""
    return "multiply-add peak" if native() else "best matrix product"


def register_peak(threads: int) -> float:
    """Operations a second on registers alone (a multiply-add is two); needs the native kernels."""
    kernels = native()
    if kernels is None:
        raise RuntimeError("register_peak needs clearhead's native kernels, which were not built.")
    return float(kernels.peak(threads)) * 1e9


@cache
def best_product(threads: int) -> Product:
    """The fastest that torch has, at this number of threads."""
    return max(_products(), key=lambda product: max(product.rate() for _ in range(TRIES)))


def _products() -> Iterator[Product]:
    for n in (512, 1024, 2048):
        x, y = torch.randn(2, n, n).unbind()
        yield Product(f"x @ y, n={n}", 2 * n**3, partial(torch.mm, x, y))
        if torch.backends.mkldnn.is_available():
            # oneDNN's, which torch keeps for compiled models, is faster than `mm` on some processors.
            onednn = partial(torch.ops.mkldnn._linear_pointwise, x, y, None, "none", [], "")
            yield Product(f"oneDNN, n={n}", 2 * n**3, onednn)


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPIED // 4)
    target = torch.zeros_like(source)
    return max(_rate(2 * COPIED, partial(target.copy_, source)) for _ in range(TRIES))


def _rate(amount: float, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return amount / (time.perf_counter() - start)


def limits(threads: Sequence[int]) -> dict[str, str]:
    """Each limit in words, at each number of threads."""
    peaks, products, copies = [], [], []
    before = torch.get_num_threads()
    for number in threads:
        torch.set_num_threads(number)
        if native():
            peaks.append(f"{max(register_peak(number) for _ in range(TRIES)) / 1e9:.0f}")
        product = best_product(number)
        products.append(f"{max(product.rate() for _ in range(TRIES)) / 1e9:.0f} ({product.name})")
        copies.append(f"{copy_rate() / 1e9:.1f}")
    torch.set_num_threads(before)
    return {
        "multiply-add peak": f"{', '.join(peaks)} GFLOP/s" if peaks else "unknown without the native kernels",
        "best matrix product": f"{', '.join(products)} GFLOP/s",
        "copy": f"{', '.join(copies)} GB/s, read and written",
    }
