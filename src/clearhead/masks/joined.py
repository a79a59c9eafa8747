"""Masks joined by ``& | ~``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import AXIS_NAMES, Mask, bare, frozen
from clearhead.masks.intervals import EVERYTHING, Intervals, complement, meet, union
from clearhead.masks.tiles import Tile


@dataclass(frozen=True, eq=False, repr=False)
class _Composite(Mask):
    """Parts combined pair by pair."""

    parts: tuple[Mask, ...]

    def to(self, device: torch.device | str) -> Self:
        """The same mask with the tensors of all its parts on `device`."""
        return cast("Self", bare(type(self), [("parts", tuple(part.to(device) for part in self.parts))]))

    def __post_init__(self) -> None:
        """Check that the parts fit together; here, so that the generated __init__ calls it in every subclass."""

    def _leaves(self) -> Iterator[Mask]:
        for part in self.parts:
            yield from part._leaves()

    def _is_at_hand(self) -> bool:
        # Of other axes the parts would broadcast: a (B, S) and an (L, S) tensor to (B, L, S).
        whole = self.axes
        return self._same_for_every_query() or all(part._is_at_hand() and part.axes == whole for part in self.parts)

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        merged: dict[str, int] = {}
        for leaf in self._leaves():
            for axis, size in leaf.axes.items():
                if merged.get(axis, 1) == 1:
                    merged[axis] = size
        return merged

    def _flatten(self) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
        return list(self.parts), ()

    @classmethod
    def _unflatten(cls, children: Any, static: Any) -> Self:
        return cast("Self", bare(cls, [("parts", tuple(children))]))


@frozen
class _Joined(_Composite):
    """And and Or: two or more parts, joined by a sign."""

    _sign: ClassVar[str]
    _needs: ClassVar[str]
    _join: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    def __post_init__(self) -> None:
        owners: dict[str, Mask] = {}
        for leaf in self._leaves():
            for axis, size in leaf.axes.items():
                other = owners.setdefault(axis, leaf)
                if other.axes[axis] == 1:
                    owners[axis] = leaf
                elif size not in (1, other.axes[axis]):
                    name = AXIS_NAMES[axis]
                    raise MaskError(
                        f"masks joined by {self._sign} must agree in {name}, or have 1: {other.brief()} is for "
                        f"{other.axes[axis]} {name}, {leaf.brief()} for {size}."
                    )
        devices = {leaf.device for leaf in self._leaves()} - {None}
        if len(devices) > 1:
            raise MaskError(
                f"masks joined by {self._sign} must be on one device, not on "
                f"{' and '.join(sorted(map(str, devices)))}: move one with mask.to(device)."
            )

    @classmethod
    def _of(cls, *masks: Mask) -> Self:
        # A chain of one sign is kept flat, so a mask of thousands of parts is not thousands of levels deep.
        flat: list[Mask] = []
        for mask in masks:
            flat.extend(mask.parts if isinstance(mask, cls) else [mask])
        return cls(tuple(flat))

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return reduce(type(self)._join, (part._rule(b, h, q, k, L, S) for part in self.parts))

    def _tile(self, tile: Tile) -> Tensor:
        return reduce(type(self)._join, (part._tile(tile) for part in self.parts))

    def _because(self, b: int, h: int, q: int, k: int, L: int, S: int) -> list[str]:
        at = (b, h, q, k, L, S)
        lines = [f"{'yes' if self._verdict(*at) else 'no '}  {self._sign} ({self._needs}):"]
        for part in self.parts:
            lines += ["  " + line for line in part._because(*at)]
        return lines

    def __repr__(self) -> str:
        shown = (f"({part!r})" if isinstance(part, _Joined) else repr(part) for part in self.parts)
        return f" {self._sign} ".join(shown)


@frozen
class And(_Joined):
    """Visible where every part says so. Built by ``&``."""

    _sign = "&"
    _needs = "every part must say yes"
    _join = operator.and_

    def explain(self, L: int, S: int, *, query: int, key: int, batch: int = 0, head: int = 0) -> str:
        """As `Mask.explain`; the parts of an outermost ``&`` stand below the verdict itself."""
        verdict, _, *parts = super().explain(L, S, query=query, key=key, batch=batch, head=head).split("\n")
        return "\n".join([verdict, *(part.removeprefix("  ") for part in parts)])

    def _reach(self, queries: range, L: int, S: int) -> range:
        reaches = [part._reach(queries, L, S) for part in self.parts]
        start = max(r.start for r in reaches)
        return range(start, max(start, min(r.stop for r in reaches)))

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        splits = [part._split(L, S) for part in self.parts]
        run = reduce(meet, (run for run, _ in splits))
        rests = [rest for _, rest in splits if rest is not None]
        if len(rests) < 2:
            return run, (rests[0] if rests else None)
        return run, cast("And", bare(And, [("parts", tuple(rests))]))  # they were checked with this mask


@frozen
class Or(_Joined):
    """Visible where some part says so. Built by ``|``."""

    _sign = "|"
    _needs = "one part must say yes"
    _join = operator.or_

    def _reach(self, queries: range, L: int, S: int) -> range:
        reaches = [part._reach(queries, L, S) for part in self.parts]
        reaches = [reach for reach in reaches if len(reach) > 0]
        if not reaches:
            return range(0)
        return range(min(r.start for r in reaches), max(r.stop for r in reaches))

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        runs = []
        for part in self.parts:
            run, rest = part._split(L, S)
            if rest is not None:
                return EVERYTHING, self
            runs.append(run)
        joined = union(runs, L)
        return (EVERYTHING, self) if joined is None else (joined, None)


@frozen
class Not(_Composite):
    """Visible where its one part is not. Built by ``~``; ``~~mask`` is ``mask``."""

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return ~self.parts[0]._rule(b, h, q, k, L, S)

    def _tile(self, tile: Tile) -> Tensor:
        return ~self.parts[0]._tile(tile)

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        run, rest = self.parts[0]._split(L, S)
        outside = complement(run, L) if rest is None else None
        return (EVERYTHING, self) if outside is None else (outside, None)

    def __invert__(self) -> Mask:
        return self.parts[0]

    def _because(self, b: int, h: int, q: int, k: int, L: int, S: int) -> list[str]:
        (part,) = self.parts
        at = (b, h, q, k, L, S)
        mark = "yes" if self._verdict(*at) else "no "
        if isinstance(part, _Composite):
            return [f"{mark}  ~ (the part must say no):", *("  " + line for line in part._because(*at))]
        return [f"{mark}  {self!r}: {part._why(*at)}"]

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if isinstance(part, _Joined) else f"~{part!r}"
