"""One run of keys per query: what causal, window, padding, prefix and contiguous segments leave of a row.

Such a mask is two numbers and two small integer tensors. Kernels skip what lies outside of a run, and nothing of
size L x S exists. ``&`` of runs is a run; a run that is open on one side has one as its complement, and so by De
Morgan ``|`` of runs that are open on the same side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = 2**62  # further than any key, and still an int64 with a position added


class Intervals(NamedTuple):
    """Of each query q one run of keys: from max(q + left, first) up to and including q + right, and below behind.

    Cut to [0, S). A limit that is None does not limit; the numbers may be negative, and a run may be empty.

    Shapes:
        first, behind int64 (B|1, L|1).

    Example:
        >>> from clearhead.masks import Causal, KeyPadding
        >>> run, rest = (Causal() & KeyPadding(lengths=[3, 2]))._split(3, 3)
        >>> run.right, run.behind.tolist(), rest
        (0, [[3], [2]], None)
    """

    left: int | None  # the first visible key is at q + left or later
    right: int | None  # the last visible key is at q + right or before
    first: Tensor | None  # no key before this one
    behind: Tensor | None  # no key from this one on

    def to(self, device: torch.device | str) -> Intervals:
        """The same intervals with their tensors on `device`."""
        first, behind = (None if limit is None else limit.to(device) for limit in (self.first, self.behind))
        return self._replace(first=first, behind=behind)

    def ends(self, L: int, S: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """Of each query its first visible key and the one behind its last, the same where it sees none: (B|1, L)."""
        queries = torch.arange(L, device=device)[None]
        start, end = torch.zeros_like(queries), torch.full_like(queries, S)
        if self.left is not None:
            start = torch.maximum(start, queries + self.left)
        if self.first is not None:
            start = torch.maximum(start, self.first)
        if self.right is not None:
            end = torch.minimum(end, queries + (self.right + 1))
        if self.behind is not None:
            end = torch.minimum(end, self.behind)
        start, end = torch.broadcast_tensors(start.clamp(max=S), end)
        return start, torch.maximum(start, end)


EVERYTHING = Intervals(None, None, None, None)


def meet(one: Intervals, two: Intervals) -> Intervals:
    """The keys in both."""
    return Intervals(
        _closer(max, one.left, two.left),
        _closer(min, one.right, two.right),
        _closer(torch.maximum, one.first, two.first),
        _closer(torch.minimum, one.behind, two.behind),
    )


def union(runs: list[Intervals], L: int) -> Intervals | None:
    """The keys in any of them; None where these need not be one run."""
    if any(_is_open(run.left, run.right, run.first, run.behind) for run in runs):
        return EVERYTHING
    hidden = []
    for run in runs:
        if (outside := complement(run, L)) is None:
            return None
        hidden.append(outside)
    return complement(reduce(meet, hidden), L)


def complement(run: Intervals, L: int) -> Intervals | None:
    """The keys outside of it; None where they lie on both sides."""
    left, right, first, behind = run
    if _is_open(left, right, first, behind):
        return Intervals(None, -FAR, None, None)
    if _is_open(left, first):
        if behind is None:
            return Intervals(None if right is None else right + 1, None, None, None)
        end = behind if right is None else torch.minimum(_positions(right + 1, L, behind), behind)
        return Intervals(None, None, end, None)
    if _is_open(right, behind):
        if first is None:
            return Intervals(None, None if left is None else left - 1, None, None)
        start = first if left is None else torch.maximum(_positions(left, L, first), first)
        return Intervals(None, None, None, start)
    return None


def _is_open(*limits: int | Tensor | None) -> bool:
    return all(limit is None for limit in limits)


def _closer(join: Callable[[Any, Any], Any], one: Any, two: Any) -> Any:
    if one is None:
        return two
    return one if two is None else join(one, two)


def _positions(shift: int, L: int, like: Tensor) -> Tensor:
    """The key position q + shift of each query: (L,)."""
    return torch.arange(L, device=like.device) + shift
