"""Masks of relative position: causal and window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import Mask
from clearhead.masks.intervals import FAR, Intervals
from clearhead.masks.values import check_choice

Align = Literal["end", "start"]


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    r"""Each query sees the keys up to its own position: ``key <= query + (S - L)``.

    The last query is aligned with the last key, as with a key-value cache. With L > S the first L - S queries
    see nothing (dead rows).

    Args:
        align: ``"end"`` as above, ``"start"`` for ``key <= query`` whatever L and S are: torch's ``is_causal``.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.

    Example:
        >>> Causal().dense(2, 3).int()[0, 0].tolist()
        [[1, 1, 0], [1, 1, 1]]
        >>> Causal(align="start").dense(2, 3).int()[0, 0].tolist()
        [[1, 0, 0], [1, 1, 0]]
    """

    align: Align = "end"

    def __post_init__(self) -> None:
        check_choice("Causal", "align", self.align, ("end", "start"))

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return k <= q + _shift(self.align, L, S)

    def _reach(self, queries: range, L: int, S: int) -> range:
        return _clip(0, queries.stop + _shift(self.align, L, S), S)

    def _split(self, L: int, S: int) -> tuple[Intervals, None]:
        return Intervals(None, _shift(self.align, L, S), None, None), None

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        return _relative(q + _shift(self.align, L, S), k)


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """Each query sees its own position, `left` neighbours before it and `right` after it.

    The query's own position is not counted: ``Window(left=W - 1, right=0)`` is what other libraries call a
    causal sliding window of W.

    Args:
        left: how many keys before the query's position; None = all.
        right: how many keys after it; None = all.
        align: as in `Causal`: query i sits at key position ``i + S - L``, or at i with ``"start"``.

    Raises:
        MaskError: a negative width.

    References:
        Beltagy et al. 2020, "Longformer" (arXiv 2004.05150), section 3.1.

    Example:
        >>> Window(left=1, right=1).dense(3, 3).int()[0, 0].tolist()
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """

    left: int | None = None
    right: int | None = None
    align: Align = "end"

    def __post_init__(self) -> None:
        check_choice("Window", "align", self.align, ("end", "start"))
        for name, width in (("left", self.left), ("right", self.right)):
            if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 0):
                raise MaskError(f"Window: {name} must be a number of keys >= 0, or None for no limit, not {width!r}.")

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        before = q + _shift(self.align, L, S) - k  # how far the key lies before the query
        visible = torch.ones_like(before, dtype=torch.bool)
        if self.left is not None:
            visible = visible & (before <= min(self.left, FAR))
        if self.right is not None:
            visible = visible & (-before <= min(self.right, FAR))
        return visible

    def _reach(self, queries: range, L: int, S: int) -> range:
        shift = _shift(self.align, L, S)
        start = 0 if self.left is None else queries.start + shift - self.left
        stop = S if self.right is None else queries.stop + shift + self.right
        return _clip(start, stop, S)

    def _split(self, L: int, S: int) -> tuple[Intervals, None]:
        shift = _shift(self.align, L, S)
        left = None if self.left is None else shift - min(self.left, FAR)
        right = None if self.right is None else shift + min(self.right, FAR)
        return Intervals(left, right, None, None), None

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        left = "no limit" if self.left is None else self.left
        right = "no limit" if self.right is None else self.right
        where = _relative(q + _shift(self.align, L, S), k)
        return f"{where}; allowed before: {left}, after: {right}"


def _shift(align: Align, L: int, S: int) -> int:
    """Query i sits at key position i + shift."""
    return S - L if align == "end" else 0


def _clip(start: int, stop: int, S: int) -> range:
    start = min(max(start, 0), S)
    return range(start, min(max(stop, start), S))


def _relative(position: int, k: int) -> str:
    if k == position:
        return f"key {k} is at the query's own position"
    side = "after" if k > position else "before"
    return f"key {k} comes {abs(k - position)} {side} the query's position {position}"
