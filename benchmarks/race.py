"""What a line of the table compares: two ways to do the same work, and how much of the other's time ours may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Pairs = Iterable[tuple[Tensor, Tensor]]


class UnavailableError(RuntimeError):
    """What a line needs isn't here; the message says what, and how to get it."""


def pairwise(ours: Any, theirs: Any) -> Pairs:
    """Results that are a tensor each, or sequences of them."""
    one = isinstance(ours, Tensor)
    return zip([ours], [theirs], strict=True) if one else zip(ours, theirs, strict=True)


@dataclass(frozen=True)
class Race:
    """Ours against a peer on the same work; both take no arguments and return what they computed.

    Args:
        ours: the work, by clearhead.
        theirs: the work, by the peer.
        pairs: from both results, tensors that must be equal: (ours, the truth).
        tolerance: how far they may lie apart, relative to the largest value of the truth.
        stated: `theirs` returns the seconds that the work takes, instead of doing it.
    """

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    pairs: Callable[[Any, Any], Pairs] = pairwise
    tolerance: float = 2e-5
    stated: bool = False


@dataclass(frozen=True)
class Row:
    """A line of the table, not yet built. It goes to other processes: `build` is a function of a module.

    Args:
        group: what ``ROWS=`` calls it.
        work: what is done.
        peer: who else does it.
        build: makes the inputs and both ways.
        target: at most this share of the peer's time; None = for information.
        memory: at most this share of the peer's extra memory; None = not measured.
        share: the peer is a limit of the machine: shown is the share of it reached, at least the target.
        isa: the instruction set that our kernels are held to, in a process of its own.
        apart: takes minutes: it is measured only where its group is named.
    """

    group: str
    work: str
    peer: str
    build: Callable[[], Race]
    target: float | None = None
    memory: float | None = None
    share: bool = False
    isa: str | None = None
    apart: bool = False


Rows = Sequence[Row]
