"""The kinds of masks: causal, window, padding, segments, prefix, and any bool tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import AXIS_NAMES, Mask, Tile, _show, frozen

Align = Literal["end", "start"]
Side = Literal["right", "left"]
Lengths = Tensor | Sequence[int] | int
Rows = Tensor | Sequence[Sequence[int]]


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
        _check_choice("Causal", "align", self.align, ("end", "start"))

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return k <= q + _shift(self.align, L, S)

    def _reach(self, queries: range, L: int, S: int) -> range:
        return _clip(0, queries.stop + _shift(self.align, L, S), S)

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
        _check_choice("Window", "align", self.align, ("end", "start"))
        for name, width in (("left", self.left), ("right", self.right)):
            if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 0):
                raise MaskError(f"Window: {name} must be a number of keys >= 0, or None for no limit, not {width!r}.")

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        before = q + _shift(self.align, L, S) - k  # how far the key lies before the query
        visible = torch.ones_like(before, dtype=torch.bool)
        if self.left is not None:
            visible = visible & (before <= self.left)
        if self.right is not None:
            visible = visible & (-before <= self.right)
        return visible

    def _reach(self, queries: range, L: int, S: int) -> range:
        shift = _shift(self.align, L, S)
        start = 0 if self.left is None else queries.start + shift - self.left
        stop = S if self.right is None else queries.stop + shift + self.right
        return _clip(start, stop, S)

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        left = "no limit" if self.left is None else self.left
        right = "no limit" if self.right is None else self.right
        where = _relative(q + _shift(self.align, L, S), k)
        return f"{where}; allowed before: {left}, after: {right}"


@dataclass(frozen=True, eq=False, repr=False)
class _Padding(Mask):
    """KeyPadding and QueryPadding: which tokens of one axis are real."""

    lengths: Tensor | None = None
    real: Tensor | None = None
    side: Side = "right"
    # Real tokens lie in positions [first, last) of every item: known once, on the host.
    _first: int = field(default=0, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    _tensors: ClassVar[tuple[str, ...]] = ("lengths", "real")
    _axis: ClassVar[str]
    _noun: ClassVar[str]

    def __init__(self, lengths: Lengths | None = None, *, real: Rows | None = None, side: Side = "right") -> None:
        name = type(self).__name__
        _check_choice(name, "side", side, ("right", "left"))
        if (lengths is None) == (real is None):
            raise MaskError(
                f"{name} takes either lengths=(B,) or real=(B, {self._axis.upper()}): exactly one of them."
            )
        first, last = 0, 0
        if lengths is not None:
            lengths = _lengths(name, lengths)
            last = int(lengths.max()) if lengths.numel() else 0
        else:
            real = _zero_one_rows(name, "real", real)
            if side != "right":
                raise MaskError(f"{name}: side goes with lengths=; real= already says where the padding is.")
            used = real.any(dim=0).nonzero()
            first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        values = {"lengths": lengths, "real": real, "side": side, "_first": first, "_last": last}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_ids(cls, ids: Tensor, pad_id: int = 0) -> _Padding:
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
                f"{self!r} is for {self.real.shape[1]} {AXIS_NAMES[self._axis]}, but the inputs have {size}."
            )
        if self.lengths is not None and self._last > size:
            raise MaskError(
                f"{self!r}: a length of {self._last} is more than the {size} {AXIS_NAMES[self._axis]} there are."
            )

    def _is_real(self, b: Tensor, position: Tensor, size: int) -> Tensor:
        if self.real is not None:
            return self.real[_item(b, self.real), position]
        assert self.lengths is not None
        lengths = self.lengths[_item(b, self.lengths)]
        return position < lengths if self.side == "right" else position >= size - lengths

    def _span(self, size: int) -> range:
        """Positions that are real in some item."""
        if self.real is not None or self.side == "right":
            return range(self._first, self._last)
        return range(size - self._last, size)

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

    _tensors: ClassVar[tuple[str, ...]] = ("query_ids", "key_ids")

    def __init__(self, query_ids: Rows | Sequence[int], key_ids: Rows | Sequence[int] | None = None) -> None:
        query_ids = _id_rows("query_ids", query_ids)
        if key_ids is not None:
            key_ids = _id_rows("key_ids", key_ids)
            if 1 not in (query_ids.shape[0], key_ids.shape[0]) and query_ids.shape[0] != key_ids.shape[0]:
                raise MaskError(
                    f"Segments: query_ids {tuple(query_ids.shape)} and key_ids {tuple(key_ids.shape)} must have "
                    f"the same batch size, or 1."
                )
        object.__setattr__(self, "query_ids", query_ids)
        object.__setattr__(self, "key_ids", key_ids)

    def _keys(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        queries, keys = self.query_ids.shape, self._keys().shape
        return {"b": max(queries[0], keys[0]), "q": queries[1], "k": keys[1]}

    def _check_values(self, L: int, S: int) -> None:
        if (self.query_ids.shape[1], self._keys().shape[1]) != (L, S):
            raise MaskError(
                f"Segments has ids for {self.query_ids.shape[1]} queries and {self._keys().shape[1]} keys, but the "
                f"inputs have L={L} and S={S}. Give key_ids of their own where L and S differ."
            )

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        queries, keys = self.query_ids, self._keys()
        return queries[_item(b, queries), q] == keys[_item(b, keys), k]

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
    _last: int = field(default=0, init=False, repr=False)

    _tensors: ClassVar[tuple[str, ...]] = ("lengths",)
    _same_for_all_queries: ClassVar[bool] = True

    def __init__(self, lengths: Lengths) -> None:
        lengths = _lengths("Prefix", lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_last", int(lengths.max()) if lengths.numel() else 0)

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        return {"b": self.lengths.shape[0]}

    def _check_values(self, L: int, S: int) -> None:
        if self._last > S:
            raise MaskError(f"{self!r}: a prefix of {self._last} keys is longer than the {S} keys there are.")

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        return k < self.lengths[_item(b, self.lengths)]

    def _reach(self, queries: range, L: int, S: int) -> range:
        return range(self._last)

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        return f"the first {int(self.lengths[b if len(self.lengths) > 1 else 0])} keys are open to all queries"


@dataclass(frozen=True, eq=False, repr=False)
class Allowed(Mask):
    """Any bool tensor, its axes named; True = may attend.

    Args:
        tensor: bool, with an axis for each letter of `axes`; an axis of size 1 broadcasts.
        axes: letters of ``"bhqk"`` (batch, head, query, key) in the tensor's order, each at most once.

    Raises:
        MaskError: not bool (a 0/1 float mask may mean an additive one), unknown or repeated letters, wrong
            number of axes.

    Example:
        >>> Allowed(torch.tensor([[True, False], [True, True]]), axes="qk").dense(2, 2).shape
        torch.Size([1, 1, 2, 2])
        >>> Allowed([[True, False]], axes="bk").dense(3, 2).int()[0, 0].tolist()
        [[1, 0], [1, 0], [1, 0]]
    """

    tensor: Tensor
    letters: str

    _tensors: ClassVar[tuple[str, ...]] = ("tensor",)

    def __init__(self, tensor: Tensor | Sequence[object], axes: str) -> None:
        name = type(self).__name__
        if not isinstance(axes, str) or set(axes) - set(AXIS_NAMES) or len(set(axes)) != len(axes):
            raise MaskError(
                f"{name}: axes must be letters of 'bhqk' (batch, head, query, key), each at most once, not {axes!r}."
            )
        tensor = _as_tensor(name, tensor)
        if tensor.dtype != torch.bool:
            raise MaskError(
                f"{name} takes a bool tensor, not {tensor.dtype}: a number could mean a flag or a score to add. "
                f"Convert it ({name}(t.bool(), ...)), or pass scores as attn_bias=."
            )
        if tensor.ndim != len(axes):
            raise MaskError(
                f"{name}: axes={axes!r} names {len(axes)} axes, but the tensor {tuple(tensor.shape)} has "
                f"{tensor.ndim}."
            )
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "letters", axes)

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        return dict(zip(self.letters, self.tensor.shape, strict=True))

    def _four_axes(self) -> Tensor:
        """The tensor with its axes in the order (b, h, q, k), size 1 where it has none."""
        order = [self.letters.index(letter) for letter in AXIS_NAMES if letter in self.letters]
        index = tuple(slice(None) if letter in self.letters else None for letter in AXIS_NAMES)
        return self.tensor.permute(order)[index]

    def _read(self, visible: Tensor) -> Tensor:
        return visible

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        table = self._four_axes()
        return self._read(table[tuple(_item(i, table, axis) for axis, i in enumerate((b, h, q, k)))])

    def _tile(self, tile: Tile) -> Tensor:
        # The same as the rule on the tile's positions, but by cutting: slices are views, not gathers.
        table = self._four_axes()
        for axis, index in enumerate((tile.batch, tile.heads, tile.queries, tile.keys)):
            if table.shape[axis] != 1:
                cut: list[slice | Tensor] = [slice(None)] * 4
                cut[axis] = index
                table = table[tuple(cut)]
        return self._read(table)

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        at = dict(zip("bhqk", (b, h, q, k), strict=True))
        where = [at[letter] if self.axes[letter] != 1 else 0 for letter in self.letters]
        return f"the tensor holds {bool(self.tensor[tuple(where)])} at {where}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show(self.tensor)}, axes={self.letters!r})"


@frozen
class Blocked(Allowed):
    """Any bool tensor, its axes named; True = hidden (the polarity of ``nn.MultiheadAttention``).

    Args and errors as in `Allowed`.

    Example:
        >>> Blocked([[False, True]], axes="bk") == ~Allowed([[False, True]], axes="bk")
        False
        >>> Blocked([[False, True]], axes="bk").dense(1, 2).tolist()
        [[[[True, False]]]]
    """

    def _read(self, visible: Tensor) -> Tensor:
        return ~visible


# -- shared by the kinds ---------------------------------------------------------------------------------------


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


def _item(index: Tensor, table: Tensor, axis: int = 0) -> Tensor:
    """The index into an axis of a table; an axis of size 1 broadcasts."""
    return index if table.shape[axis] != 1 else torch.zeros_like(index)


def _check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise MaskError(f"{owner}: {name} must be {' or '.join(map(repr, choices))}, not {value!r}.")


def _as_tensor(owner: str, data: object) -> Tensor:
    if isinstance(data, Tensor):
        return data
    try:
        return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{owner} takes a tensor or nested lists of equal lengths: {error}.") from None


def _integers(owner: str, name: str, data: object) -> Tensor:
    tensor = _as_tensor(owner, data)
    if tensor.numel() == 0 and not isinstance(data, Tensor):
        tensor = tensor.long()  # an empty list carries no dtype of its own
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise MaskError(f"{owner}: {name} must be integers, not {tensor.dtype}.")
    return tensor.long()


def _lengths(owner: str, lengths: Lengths) -> Tensor:
    tensor = _integers(owner, "lengths", lengths)
    if tensor.ndim == 0:
        tensor = tensor[None]
    if tensor.ndim != 1:
        raise MaskError(f"{owner}: lengths must be an int or (B,), not {tuple(tensor.shape)}.")
    if tensor.numel() and int(tensor.min()) < 0:
        raise MaskError(f"{owner}: lengths must be >= 0, but one is {int(tensor.min())}.")
    return tensor


def _zero_one_rows(owner: str, name: str, data: object) -> Tensor:
    tensor = _as_tensor(owner, data)
    if tensor.ndim != 2:
        raise MaskError(f"{owner}: {name} must have two axes, (batch, tokens), not {tuple(tensor.shape)}.")
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        raise MaskError(f"{owner}: {name} must be bool or 0/1 integers, not {tensor.dtype}.")
    if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) <= 1:
        raise MaskError(
            f"{owner}: {name} must be bool or 0/1 integers, but it holds {int(tensor.min())} to "
            f"{int(tensor.max())}. From token ids: {owner}.from_ids(ids, pad_id=...)."
        )
    return tensor.bool()


def _id_rows(name: str, data: object) -> Tensor:
    tensor = _integers("Segments", name, data)
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.ndim != 2:
        raise MaskError(f"Segments: {name} must be (B, tokens) or (tokens,), not {tuple(tensor.shape)}.")
    return tensor


__all__ = ["Allowed", "Blocked", "Causal", "KeyPadding", "Prefix", "QueryPadding", "Segments", "Window"]
