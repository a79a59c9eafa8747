"""Masks of tokens: padding, segments, prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import AXIS_NAMES, Mask, broadcast, frozen
from clearhead.masks.intervals import EVERYTHING, Intervals
from clearhead.masks.values import (
    Lengths,
    Rows,
    as_lengths,
    check_choice,
    extremes,
    id_rows,
    runs_of_ids,
    runs_of_ones,
    zero_one_rows,
)

Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False, repr=False)
class _Padding(Mask):
    """KeyPadding and QueryPadding: which tokens of one axis are real."""

    lengths: Tensor | None = None
    real: Tensor | None = None
    side: Side = "right"
    # Real tokens of all items lie in positions [first, last), known once on the host; None = unknown.
    _first: int | None = field(default=None, init=False, repr=False)
    _last: int | None = field(default=None, init=False, repr=False)
    # Of `real`: each item's tokens as one run; None = not one, or unknown.
    _run: Intervals | None = field(default=None, init=False, repr=False)

    _tensors: ClassVar[tuple[str, ...]] = ("lengths", "real")
    _axis: ClassVar[str]
    _noun: ClassVar[str]

    def __init__(self, lengths: Lengths | None = None, *, real: Rows | None = None, side: Side = "right") -> None:
        name = type(self).__name__
        check_choice(name, "side", side, ("right", "left"))
        if (lengths is None) == (real is None):
            raise MaskError(f"{name} takes either lengths=(B,) or real=(B, tokens): exactly one of them.")
        first: int | None = 0
        run: Intervals | None = None
        if lengths is not None:
            lengths = as_lengths(name, lengths)
            known = extremes(lengths)
            last = None if known is None else known[1]
        else:
            real = zero_one_rows(name, "real", real)
            if side != "right":
                raise MaskError(f"{name}: side goes with lengths=; real= already says where the padding is.")
            first, last, run = runs_of_ones(real)
        values = {"lengths": lengths, "real": real, "side": side, "_first": first, "_last": last, "_run": run}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_ids(cls, ids: Tensor, pad_id: int = 0) -> Self:
        """From padded token ids (B, L): every position that holds `pad_id` is padding, wherever it stands.

        Example:
            >>> KeyPadding.from_ids(torch.tensor([[5, 7, 0], [9, 0, 0]]), pad_id=0)
            KeyPadding(real=[[True, True, False], [True, False, False]])
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            got = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise MaskError(f"{cls.__name__}.from_ids takes integer token ids (B, L), not {got}.")
        return cls(real=ids != pad_id)

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        if self.real is not None:
            return {"b": self.real.shape[0], self._axis: self.real.shape[1]}
        assert self.lengths is not None  # one of the two is set by construction
        return {"b": self.lengths.shape[0]}

    def _check_values(self, L: int, S: int) -> None:
        size = S if self._axis == "k" else L
        if self.real is not None and self.real.shape[1] != size:
            # An axis of size 1 broadcasts in mask tensors, but one token can't stand for a padded row.
            raise MaskError(
                f"{self.brief()} is for {self.real.shape[1]} {AXIS_NAMES[self._axis]}, but the inputs have {size}."
            )
        if torch.compiler.is_compiling():
            return  # a program for any lengths
        if self.lengths is not None and self._last is not None and self._last > size:
            raise MaskError(
                f"{self.brief()}: a length of {self._last} is more than the {size} {AXIS_NAMES[self._axis]}."
            )

    def _is_real(self, b: Tensor, position: Tensor, size: int) -> Tensor:
        if self.real is not None:
            return self.real[broadcast(b, self.real), position]
        assert self.lengths is not None
        return self._within(self.lengths[broadcast(b, self.lengths)], position, size)

    def _within(self, lengths: Tensor, position: Tensor, size: int) -> Tensor:
        return position < lengths if self.side == "right" else position >= size - lengths

    def _span(self, size: int) -> range:
        """Positions that are real in some item; all of them in a program for any lengths."""
        if torch.compiler.is_compiling():
            return range(size)
        if self.real is not None or self.side == "right":
            return range(self._first or 0, size if self._last is None else self._last)
        return range(0 if self._last is None else size - self._last, size)

    def _why_token(self, b: int, position: int, size: int) -> str:
        b = b if self.axes["b"] > 1 else 0
        count = int(self.lengths[b] if self.lengths is not None else self.real[b].sum())  # type: ignore[index]
        item, token = (torch.tensor(i, device=self.device) for i in (b, position))
        word = "real" if bool(self._is_real(item, token, size)) else "padding"
        return f"{self._noun} {position} is {word}, item {b} has {count} real {AXIS_NAMES[self._axis]}"


@frozen
class KeyPadding(_Padding):
    """Hides padded keys: every query sees the real keys only.

    Args:
        lengths: (B,) integers, the number of real tokens of each item.
        real: (B, S) bool or 0/1 integers instead, True = a real token (a tokenizer's ``attention_mask``).
        side: where the padding is, with `lengths`: ``"right"`` (after the tokens) or ``"left"``.

    Raises:
        MaskError: neither or both given, wrong shape or dtype, a negative length; in a call, a length over S.

    Example:
        >>> KeyPadding(lengths=[2, 3]).dense(1, 3).int().tolist()
        [[[[1, 1, 0]]], [[[1, 1, 1]]]]
        >>> KeyPadding(lengths=[2, 3], side="left").dense(1, 3).int().tolist()
        [[[[0, 1, 1]]], [[[1, 1, 1]]]]
    """

    _axis = "k"
    _noun = "key"
    _same_for_all_queries = True

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return self._is_real(b, k, S)

    def _reach(self, queries: range, L: int, S: int) -> range:
        return self._span(S)

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        if self.lengths is not None:
            lengths = self.lengths.unsqueeze(1)
            return Intervals(None, None, *((None, lengths) if self.side == "right" else (S - lengths, None))), None
        if torch.compiler.is_compiling() or self._run is None:
            return EVERYTHING, self
        return self._run, None

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        return self._why_token(b, k, S)


@frozen
class QueryPadding(_Padding):
    """Makes padded queries dead rows: they see nothing, their context is zero, and no mean counts them.

    Args:
        lengths: (B,) integers, the number of real tokens of each item.
        real: (B, L) bool or 0/1 integers instead, True = a real token.
        side: where the padding is, with `lengths`: ``"right"`` (after the tokens) or ``"left"``.

    Raises:
        MaskError: as `KeyPadding`.

    Example:
        >>> QueryPadding(lengths=[1]).dense(2, 2).int().tolist()
        [[[[1, 1], [0, 0]]]]
    """

    _axis = "q"
    _noun = "query"

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return self._is_real(b, q, L)

    def _reach(self, queries: range, L: int, S: int) -> range:
        span = self._span(L)
        overlap = range(max(span.start, queries.start), min(span.stop, queries.stop))
        return range(S) if overlap else range(0)

    def _split(self, L: int, S: int) -> tuple[Intervals, None]:
        real = self.real
        if real is None:
            assert self.lengths is not None  # one of the two is set by construction
            real = self._within(self.lengths.unsqueeze(1), torch.arange(L, device=self.lengths.device), L)
        return Intervals(None, None, None, real * S), None  # a padded query's run ends before key 0

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        return self._why_token(b, q, L)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed documents: a query sees the keys that carry its own segment id.

    Args:
        query_ids: (B, L) or (L,) integers.
        key_ids: (B, S) or (S,) integers; None = the same as `query_ids`.

    Raises:
        MaskError: not integers, wrong number of axes, different batch sizes.

    References:
        Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination" (arXiv 2107.02027).

    Example:
        >>> Segments([[0, 0, 1]]).dense(3, 3).int()[0, 0].tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    query_ids: Tensor
    key_ids: Tensor | None = None
    # For each query the keys [first, behind) among which its segment lies, in any item; None = unknown.
    _spans: tuple[list[int], list[int]] | None = field(default=None, init=False, repr=False)
    # For each query of each item the keys of its segment as one run; None = not one, or unknown.
    _run: Intervals | None = field(default=None, init=False, repr=False)

    _tensors: ClassVar[tuple[str, ...]] = ("query_ids", "key_ids")

    def __init__(self, query_ids: Rows | Sequence[int], key_ids: Rows | Sequence[int] | None = None) -> None:
        query_ids = id_rows("query_ids", query_ids)
        if key_ids is not None:
            key_ids = id_rows("key_ids", key_ids)
            if 1 not in (query_ids.shape[0], key_ids.shape[0]) and query_ids.shape[0] != key_ids.shape[0]:
                raise MaskError(
                    f"Segments: query_ids {tuple(query_ids.shape)} and key_ids {tuple(key_ids.shape)} must have "
                    f"the same batch size, or 1."
                )
        object.__setattr__(self, "query_ids", query_ids)
        object.__setattr__(self, "key_ids", key_ids)
        spans, run = runs_of_ids(query_ids, query_ids if key_ids is None else key_ids)
        object.__setattr__(self, "_spans", spans)
        object.__setattr__(self, "_run", run)

    def _keys(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        queries, keys = self.query_ids.shape, self._keys().shape
        # One of them may be for all items; a batch may be empty.
        return {"b": queries[0] if keys[0] == 1 else keys[0], "q": queries[1], "k": keys[1]}

    def _check_values(self, L: int, S: int) -> None:
        if (self.query_ids.shape[1], self._keys().shape[1]) != (L, S):
            raise MaskError(
                f"Segments has ids for {self.query_ids.shape[1]} queries and {self._keys().shape[1]} keys, but the "
                f"inputs have L={L} and S={S}. Give key_ids of their own where L and S differ."
            )

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        queries, keys = self.query_ids, self._keys()
        return queries[broadcast(b, queries), q] == keys[broadcast(b, keys), k]

    def _reach(self, queries: range, L: int, S: int) -> range:
        if torch.compiler.is_compiling() or self._spans is None or not queries:
            return range(S)
        first, behind = (bounds[queries.start : queries.stop] for bounds in self._spans)
        return range(min(first), max(min(first), max(behind)))

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        return (EVERYTHING, self) if torch.compiler.is_compiling() or self._run is None else (self._run, None)

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        query, key = self.query_ids, self._keys()
        mine = int(query[min(b, query.shape[0] - 1), q])
        theirs = int(key[min(b, key.shape[0] - 1), k])
        return f"query {q} is in segment {mine}, key {k} in segment {theirs}"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `lengths` keys are open to every query: prefix-LM is ``Causal() | Prefix(n)``.

    With padding, close it again: ``(Causal() | Prefix(n)) & KeyPadding(...)``.

    Args:
        lengths: the number of keys, an int or (B,) integers.

    Raises:
        MaskError: not integers, negative; in a call, more than S.

    References:
        Raffel et al. 2020, "T5" (arXiv 1910.10683), section 3.2.1.

    Example:
        >>> (Causal() | Prefix(2)).dense(3, 3).int()[0, 0].tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    lengths: Tensor
    _last: int | None = field(default=None, init=False, repr=False)

    _tensors: ClassVar[tuple[str, ...]] = ("lengths",)
    _same_for_all_queries: ClassVar[bool] = True

    def __init__(self, lengths: Lengths) -> None:
        lengths = as_lengths("Prefix", lengths)
        object.__setattr__(self, "lengths", lengths)
        known = extremes(lengths)
        object.__setattr__(self, "_last", None if known is None else known[1])

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        return {"b": self.lengths.shape[0]}

    def _check_values(self, L: int, S: int) -> None:
        if not torch.compiler.is_compiling() and self._last is not None and self._last > S:
            raise MaskError(f"{self.brief()}: a prefix of {self._last} keys is longer than the {S} keys there are.")

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return k < self.lengths[broadcast(b, self.lengths)]

    def _reach(self, queries: range, L: int, S: int) -> range:
        return range(S if torch.compiler.is_compiling() or self._last is None else self._last)

    def _split(self, L: int, S: int) -> tuple[Intervals, None]:
        return Intervals(None, None, None, self.lengths.unsqueeze(1)), None

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        return f"the first {int(self.lengths[b if len(self.lengths) > 1 else 0])} keys are open to all queries"
