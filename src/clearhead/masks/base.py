"""What a mask is: an immutable value that answers "may query q attend to key k?", combined by ``& | ~``.

A mask is defined by one rule on positions (`Mask._rule`). Everything else follows from it: a tile of it
(`_tile`), the whole of it (`dense`), a picture, an explanation, a FlexAttention ``mask_mod``. Beside the rule
a mask knows its `_reach`: the keys that a range of queries could see at all, from numbers kept on the host, so
that hidden work is skipped without looking at a tensor. And it can split itself (`_split`) into one run of keys
per query, which kernels skip by, and a rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
from torch import Tensor
from torch.utils import _pytree

from clearhead.errors import MaskError
from clearhead.masks.intervals import EVERYTHING, Intervals
from clearhead.masks.tiles import ALL, Tile, cells, one_index, positions

AXIS_NAMES = {"b": "batch items", "h": "heads", "q": "queries", "k": "keys"}
_SHOWN_ELEMENTS = 1024  # a repr is constructive up to this many tensor elements
_BRIEF = 120  # characters of a mask in an error message
_TILE_ELEMENTS = 2**20  # statistics over a mask look at about this many pairs at a time


# Frozen means frozen: a subclass of a frozen dataclass takes new attributes unless it is one itself.
frozen = dataclass(frozen=True, eq=False, repr=False, init=False)


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Base class of all masks. True always means *may attend*. Not instantiated itself.

    Masks are immutable and compare by structure: ``Causal() & Prefix(3) == Causal() & Prefix(3)``. They are
    pytrees with tensor leaves, so ``torch.compile``, ``vmap`` and ``torch.export`` take them as arguments.

    Shapes:
        B: batch, H: query heads, L: queries, S: keys. A mask that does not depend on an axis leaves it open.

    Example:
        >>> mask = Causal() & KeyPadding(lengths=[3, 2])
        >>> mask.dense(3, 3).int()[1, 0].tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """

    _tensors: ClassVar[tuple[str, ...]] = ()
    _same_for_all_queries: ClassVar[bool] = False  # one row of it says everything

    # -- what each kind of mask says of itself ---------------------------------------------------------------

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        """May query q of head h and batch item b attend to key k? Broadcastable integer tensors in, bool out."""
        raise NotImplementedError

    def _reach(self, queries: range, L: int, S: int) -> range:
        """Keys that any of these queries may see, or more: from host-side numbers only."""
        return range(S)

    def _split(self, L: int, S: int) -> tuple[Intervals, Mask | None]:
        """One run of keys per query and a rest: the mask is ``intervals & rest``; None = no rest.

        Cheap, as every call asks. What it takes depends on what was known when the mask was built: in a compiled
        program nothing is, and the run may have to go to the rest.
        """
        return EVERYTHING, self

    def _is_at_hand(self) -> bool:
        """Whether its tensor (`_tile`) takes no more memory than the tensors that the mask already holds, or O(S)."""
        return self._same_for_every_query()

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        """The reason for the verdict on one pair, in words with numbers."""
        raise NotImplementedError

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes: letters of ``"bhqk"``; size 1 broadcasts."""
        return {}

    def _check_values(self, L: int, S: int) -> None:
        """Raise MaskError if the mask's numbers (lengths) don't fit L queries and S keys."""

    # -- what follows -----------------------------------------------------------------------------------------

    def _tile(self, tile: Tile) -> Tensor:
        """The mask on a tile: bool, four axes, broadcastable to (batch, heads, queries, keys) of the tile."""
        device = tile.device
        b = positions(tile.batch, self.axes.get("b", 1), device)
        h = positions(tile.heads, self.axes.get("h", 1), device)
        q = positions(tile.queries, tile.L, device)
        k = positions(tile.keys, tile.S, device)
        visible = self._rule(b[:, None, None, None], h[:, None, None], q[:, None], k, tile.L, tile.S)
        return visible[(None,) * (4 - visible.ndim)]

    def _leaves(self) -> Iterator[Mask]:
        yield self

    def _same_for_every_query(self) -> bool:
        return all(leaf._same_for_all_queries for leaf in self._leaves())

    def _check(self, B: int, H: int, L: int, S: int) -> None:
        """Raise MaskError, with the numbers, if this mask does not fit (B, H, L, S)."""
        sizes = {"b": B, "h": H, "q": L, "k": S}
        for leaf in self._leaves():
            for axis, size in leaf.axes.items():
                if size not in (1, sizes[axis]):
                    name, expected = AXIS_NAMES[axis], sizes[axis]
                    raise MaskError(
                        f"{leaf.brief()} is for {size} {name}, but the inputs have {expected} {name} "
                        f"(B={B}, H={H}, L={L}, S={S}): build the mask for these."
                    )
            leaf._check_values(L, S)

    @property
    def device(self) -> torch.device | None:
        """The device of the mask's tensors; None where it has none (``Causal()`` fits every device)."""
        for leaf in self._leaves():
            for name in leaf._tensors:
                if (tensor := getattr(leaf, name)) is not None:
                    return cast("Tensor", tensor).device
        return None

    def to(self, device: torch.device | str) -> Self:
        """The same mask with its tensors on `device`.

        Example:
            >>> KeyPadding(lengths=[3, 2]).to("cpu")
            KeyPadding(lengths=[3, 2])
        """
        attributes = [(f.name, getattr(self, f.name)) for f in fields(self)]
        moved = [
            (name, value.to(device) if isinstance(value, Tensor | Intervals) else value) for name, value in attributes
        ]
        return cast("Self", bare(type(self), moved))

    def dense(self, L: int, S: int) -> Tensor:
        """The whole mask as a bool tensor, True = may attend; accepted back as a mask.

        Args:
            L: number of queries.
            S: number of keys.

        Shapes:
            returns (B|1, H|1, L, S): always four axes; size 1 where the mask doesn't depend on batch or head.

        Raises:
            MaskError: the mask does not fit L queries and S keys.

        Example:
            >>> Window(left=1, right=0).dense(3, 3).int()[0, 0].tolist()
            [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        B, H = self._own_sizes(L, S)
        tile = Tile(ALL, ALL, ALL, ALL, L, S, self.device or torch.device("cpu"))
        return self._tile(tile).expand(B, H, L, S)

    def visible_fraction(self, L: int, S: int) -> float:
        """The share of all (batch, head, query, key) combinations that may attend, in O(L + S) memory.

        Example:
            >>> Causal().visible_fraction(4, 4)
            0.625
        """
        B, H = self._own_sizes(L, S)
        total = B * H * L * S
        return int(self._visible_by_key(ALL, ALL, range(L), L, S).sum()) / total if total else 0.0

    def explain(self, L: int, S: int, *, query: int, key: int, batch: int = 0, head: int = 0) -> str:
        """Why one pair is visible or hidden: a line for the verdict, then one for each part of the mask.

        Parts of an ``&``, ``|`` or ``~`` inside the mask stand below it, indented.

        Args:
            L: number of queries.
            S: number of keys.
            query: the query's index; negative counts from the end.
            key: the key's index; negative counts from the end.
            batch: the batch item, for masks that differ over the batch.
            head: the head, for masks that differ over the heads.

        Raises:
            IndexError: an index outside the mask.

        Example:
            >>> print((Causal() & KeyPadding(lengths=[8, 5])).explain(8, 8, query=3, key=5, batch=1))
            query 3 may NOT attend to key 5 (batch 1, head 0)
              no   Causal(): key 5 comes 2 after the query's position 3
              no   KeyPadding(lengths=[8, 5]): key 5 is padding, item 1 has 5 real keys
        """
        B, H = self._own_sizes(L, S)
        q, k = one_index("query", query, L), one_index("key", key, S)
        # A mask that doesn't depend on the batch (or the heads) says the same for each item.
        b = one_index("batch", batch, B) if B != 1 else 0
        h = one_index("head", head, H) if H != 1 else 0

        at = (b, h, q, k, L, S)
        word = "may" if self._verdict(*at) else "may NOT"
        head_line = f"query {q} {word} attend to key {k} (batch {batch}, head {head})"
        return "\n".join([head_line, *("  " + line for line in self._because(*at))])

    def _verdict(self, b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        b_at, h_at, q_at, k_at = (torch.tensor(i, device=self.device) for i in (b, h, q, k))
        return bool(self._rule(b_at, h_at, q_at, k_at, L, S))

    def _because(self, b: int, h: int, q: int, k: int, L: int, S: int) -> list[str]:
        """The verdict of this part and its reason, a line; of a joined mask, its parts' lines below."""
        at = (b, h, q, k, L, S)
        return [f"{'yes' if self._verdict(*at) else 'no '}  {self!r}: {self._why(*at)}"]

    def draw(self, L: int, S: int, *, batch: int = 0, head: int = 0, max_cells: int = 64) -> str:
        """A picture in text: a row for each query, a column for each key; large masks are pooled.

        ``■`` may attend, ``·`` hidden, ``▒`` a cell of several pairs of which some may attend.

        Example:
            >>> print(Causal().draw(3, 5))
            ■ ■ ■ · ·
            ■ ■ ■ ■ ·
            ■ ■ ■ ■ ■
        """
        B, H = self._own_sizes(L, S)
        b = one_index("batch", batch, B) if B != 1 else 0
        h = one_index("head", head, H) if H != 1 else 0
        columns = cells(S, max_cells)
        lines = []
        for r in cells(L, max_cells):
            visible = self._visible_by_key(slice(b, b + 1), slice(h, h + 1), r, L, S)[0, 0]
            counts = [(int(visible[c.start : c.stop].sum()), len(r) * len(c)) for c in columns]
            lines.append(" ".join("■" if n == whole else "▒" if n else "·" for n, whole in counts))
        return "\n".join(lines)

    def _visible_by_key(self, batch: slice, heads: slice, queries: range, L: int, S: int) -> Tensor:
        """How many of the queries may attend to each key: (b, h, S) int64, looking at few pairs at a time."""
        B, H = (
            1 if size == 1 else len(range(size)[part]) for size, part in zip(self._sizes, (batch, heads), strict=True)
        )
        device = self.device or torch.device("cpu")
        counts = torch.zeros(B, H, S, dtype=torch.int64, device=device)
        step = max(1, _TILE_ELEMENTS // max(1, B * H * S))
        for start in range(queries.start, queries.stop, step):
            rows = slice(start, min(queries.stop, start + step))
            reach = self._reach(range(rows.start, rows.stop), L, S)
            keys = slice(reach.start, reach.stop)
            tile = self._tile(Tile(batch, heads, rows, keys, L, S, device))
            counts[..., keys] += tile.expand(-1, -1, rows.stop - start, len(reach)).sum(dim=2)
        return counts

    def mask_mod(self, L: int, S: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """This mask as a ``mask_mod`` of ``torch.nn.attention.flex_attention`` for L queries and S keys.

        Example:
            >>> from torch.nn.attention.flex_attention import create_mask
            >>> mod = Causal().mask_mod(2, 4)
            >>> create_mask(mod, None, None, 2, 4, device="cpu").int()[0, 0].tolist()
            [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        self._own_sizes(L, S)

        def may_attend(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self._rule(b, h, q, k, L, S)

        return may_attend

    def _own_sizes(self, L: int, S: int) -> tuple[int, int]:
        """(B|1, H|1) of the mask itself, after checking that it fits L and S."""
        if min(L, S) < 0:
            raise MaskError(f"the numbers of queries and keys must be >= 0, not L={L}, S={S}.")
        self._check(*self._sizes, L, S)
        return self._sizes

    @property
    def _sizes(self) -> tuple[int, int]:
        """(B|1, H|1)."""
        return self.axes.get("b", 1), self.axes.get("h", 1)

    # -- operators --------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        from clearhead.masks.joined import And

        _refuse_tensor(other)
        return And._of(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        from clearhead.masks.joined import Or

        _refuse_tensor(other)
        return Or._of(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        from clearhead.masks.joined import Not

        return Not((self,))

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask has no truth value: `and`, `or` and `not` would drop one of the masks. Use &, | and ~."
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, mine_spec = _pytree.tree_flatten(self)
        theirs, their_spec = _pytree.tree_flatten(other)
        return mine_spec == their_spec and all(
            a.device == b.device and torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        leaves, spec = _pytree.tree_flatten(self)
        return hash((type(self), str(spec), tuple(tuple(leaf.shape) for leaf in leaves)))

    def brief(self) -> str:
        """The repr, cut where it would fill a message."""
        text = repr(self)
        return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 20]} ... {text[-15:]}"

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.repr and value is not field.default and value != field.default:
                shown.append(f"{field.name}={show(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    # -- pytree: tensors are leaves, all else is static -------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls, Intervals])  # torch.load reads masks, of exported programs too
        _pytree.register_pytree_node(
            cls,
            lambda mask: mask._flatten(),
            cls._unflatten,
            serialized_type_name=f"clearhead.{cls.__name__}",
            flatten_with_keys_fn=lambda mask: mask._flatten_with_keys(),
            to_dumpable_context=lambda static: static,
            from_dumpable_context=_as_tuples,
        )

    def _flatten(self) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
        names = tuple(name for name in self._tensors if getattr(self, name) is not None)
        # Numbers read to the host (init=False) are left out: with other values it's still the same program.
        static = tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.init and f.name not in names)
        return [getattr(self, name) for name in names], (("tensors", names), *static)

    def _flatten_with_keys(self) -> tuple[list[Any], Any]:
        children, static = self._flatten()
        return [(_pytree.SequenceKey(i), child) for i, child in enumerate(children)], static

    @classmethod
    def _unflatten(cls, children: Any, static: Any) -> Self:
        # Values were checked when the mask was built; inside a transform the leaves may be batched or fake.
        (_, names), *rest = static
        unknown = [(f.name, f.default) for f in fields(cls) if not f.init]
        return cast("Self", bare(cls, [*zip(names, children, strict=True), *rest, *unknown]))


def _as_tuples(static: Any) -> Any:
    """What an exported program's file, JSON, has made lists of."""
    return tuple(_as_tuples(part) for part in static) if isinstance(static, list | tuple) else static


def bare(cls: type[Any], attributes: list[tuple[str, Any]]) -> Any:
    """An instance of a frozen class from attributes that were checked before."""
    instance = object.__new__(cls)
    for name, value in attributes:
        object.__setattr__(instance, name, value)
    return instance


def _refuse_tensor(other: object) -> None:
    if isinstance(other, Tensor):
        raise TypeError("a tensor joins a mask with its axes named: mask & Allowed(tensor, axes='qk'), for example.")


def show(value: Any) -> str:
    """A value as a repr writes it; small tensors as lists, so that the repr can be typed back."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() > _SHOWN_ELEMENTS:
        kind = str(value.dtype).removeprefix("torch.")
        return f"<{kind} tensor {tuple(value.shape)}>"
    return repr(value.tolist())


def broadcast(index: Tensor, table: Tensor, axis: int = 0) -> Tensor:
    """The index into an axis of a table; an axis of size 1 broadcasts."""
    return index if table.shape[axis] != 1 else torch.zeros_like(index)
