"""Parts of the (batch, heads, queries, keys) box that masks and backends look at."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Index = slice | Tensor
ALL = slice(None)


class Tile(NamedTuple):
    """A part of the (batch, heads, queries, keys) box: slices, or 1-D index tensors, in an L x S attention."""

    batch: Index
    heads: Index
    queries: Index
    keys: Index
    L: int
    S: int
    device: torch.device


def positions(index: Index, size: int, device: torch.device) -> Tensor:
    """The integers that an index selects from ``range(size)``; an axis of size 1 is never cut, it broadcasts."""
    if size == 1:
        return torch.zeros(1, dtype=torch.int64, device=device)
    if isinstance(index, slice):
        # Not slice.indices(): it would turn the symbolic sizes of an exported program into numbers.
        start = 0 if index.start is None else index.start
        return torch.arange(start, size if index.stop is None else index.stop, device=device)
    return index


def one_index(name: str, index: int, size: int) -> int:
    """An index counted from 0; IndexError with the numbers if out of range."""
    if not -size <= index < size:
        raise IndexError(f"{name} {index} is out of range: there are {size} ({name} -{size} to {size - 1}).")
    return index % size


def cells(size: int, most: int) -> list[range]:
    """0..size cut into at most `most` runs of nearly equal length."""
    n = min(size, most)
    return [range(i * size // n, (i + 1) * size // n) for i in range(n)]
