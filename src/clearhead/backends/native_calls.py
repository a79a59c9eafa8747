"""A call of the native kernels: a `Piece` in; its context, statistics and gradients out. No autograd here.

The kernels look at their inputs as they go. Where one holds a NaN or an infinity that a query could see they
stop, and the call is made again by the rules of `nonfinite`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.blockwise import visible_tile
from clearhead.backends.native_library import library
from clearhead.backends.nonfinite import SetAside, set_aside, visible_to
from clearhead.checks import Request
from clearhead.masks import Mask
from clearhead.observe import Observe
from clearhead.plan import tiles

FAR = 2**40  # beyond any key
# Of query, key, value, bias and sinks.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class Parts(NamedTuple):
    """What a call hides, as the kernels take it.

    Attributes:
        left: query q sees keys from q + left on ...
        right: ... up to q + right.
        first: int64 (B|1, L|1), no key before this; or None.
        behind: int64 (B|1, L|1), no key from this on; or None.
        visible: bool (B|1, Hq|1, L|1, S|1), or None.
    """

    left: int = -FAR
    right: int = FAR
    first: Tensor | None = None
    behind: Tensor | None = None
    visible: Tensor | None = None


EVERYTHING = Parts()


class Piece(NamedTuple):
    """What the kernels work on: a whole request, or a tile of one.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E).
        value: (B, Hkv, S, Ev).
        bias: (B|1, Hq|1, L|1, S|1), not float64; or None.
        parts: what is hidden.
        scale: the factor on the scores.
        dropout_p: the share of weights dropped.
        seed: (2,) int64, of the dropout; or None.
        origin: batch item, query and key of the whole at which the piece starts: dropout counts from there.
        softcap: what bounds the scores; or None.
        sinks: (Hq,), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    parts: Parts
    scale: float
    dropout_p: float = 0.0
    seed: Tensor | None = None
    origin: tuple[int, int, int] = (0, 0, 0)
    softcap: float | None = None
    sinks: Tensor | None = None

    def as_request(self) -> Request:
        """As any backend takes it; its dropout counts from the piece's own start."""
        mask = _PartsMask(self.parts.first, self.parts.behind, self.parts.visible, self.parts.left, self.parts.right)
        tensors = (self.query, self.key, self.value)
        rest = (self.scale, self.dropout_p, self.seed)
        return Request(*tensors, mask, self.bias, *rest, axes=4, softcap=self.softcap, sinks=self.sinks)

    def of(self, request: Request) -> Piece:
        """The same on the tensors of another request."""
        query, key, value, bias = request.query, request.key, request.value, request.attn_bias
        return self._replace(query=query, key=key, value=value, bias=bias, sinks=request.sinks)

    def packed(self) -> Piece:
        """The same with each row's features side by side."""
        query, key, value = (tensor.contiguous() for tensor in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    def rest(self) -> tuple[Any, ...]:
        """What the kernels take beside the tensors."""
        bias = None if self.bias is None else self.bias.resolve_neg()  # the kernels read memory as it is
        sinks = None if self.sinks is None else self.sinks.detach().resolve_neg().float().contiguous()
        more = (self.softcap or 0.0, sinks, self._dropping(), torch.get_num_threads())
        return (*self.parts, bias, self.scale, *more)

    def _dropping(self) -> tuple[Any, ...] | None:
        """Threshold, seeds, factor and origin of what `clearhead.backends.dropout` keeps; None without dropout."""
        if self.dropout_p == 0.0 or self.seed is None:
            return None
        threshold = min(round(self.dropout_p * 2**32), 2**32 - 1) - 2**31
        factor = 1 / (1 - self.dropout_p) if self.dropout_p < 1 else 0.0
        return (threshold, *self.seed.tolist(), factor, *self.origin)


def context_like(query: Tensor, value: Tensor) -> Tensor:
    """Room for a context: laid out as the query where it can be, so that merging heads is no copy."""
    if query.shape[3] == value.shape[3]:
        return room_like(query)
    return query.new_empty((*query.shape[:3], value.shape[3]))


def forward(
    piece: Piece, observe: Observe | None = None, *, need_lse: bool = True
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Context (B, Hq, L, Ev), lse if needed or seen on the way, and statistics that were asked for.

    The lse is (B, Hq, L, 2): the nearest float, and what it is short of. Beside a score of 1e38 a float has no room
    for the log of the sum, and weights computed from it would be that many times too large.
    """
    query, key, value = piece.query, piece.key, piece.value
    kernels = _kernels()
    B, H, L, _ = query.shape
    context = context_like(query, value)
    need_lse = need_lse or (observe is not None and (observe.lse or observe.received))
    lse = query.new_empty((B, H, L, 2), dtype=torch.float32) if need_lse else None
    room = None if observe is None else _room(query, key, observe)
    seen = None if room is None else room.as_tuple()
    outcome = kernels.forward(query, key, value, context, lse, *piece.rest(), False, seen)
    if outcome == kernels.UNREADABLE:
        return forward(piece.packed(), observe, need_lse=need_lse)
    aside = None
    if outcome == kernels.NON_FINITE:
        finite, aside = set_aside(piece.as_request())
        piece = piece.of(finite).packed()
        kernels.forward(piece.query, piece.key, piece.value, context, lse, *piece.rest(), True, seen)
        if aside is not None:
            context = aside.restore(context)
    if room is None or observe is None:
        return context, lse, {}
    found = room.found(lse, observe)
    return context, lse, found if aside is None else _spoil(found, aside)


def statistics(piece: Piece, observe: Observe, *, finite: bool = False) -> dict[str, Any]:
    """Statistics that were asked for, without a context; none if something is not finite.

    With `finite` the piece is known to be, though hidden scores of it may overflow.
    """
    room = _room(piece.query, piece.key, observe)
    if room is None:
        return {}
    B, H, L, _ = piece.query.shape
    lse = piece.query.new_empty((B, H, L, 2), dtype=torch.float32)
    kernels = _kernels()
    tensors = (piece.query, piece.key, piece.value, None, lse)
    outcome = kernels.forward(*tensors, *piece.rest(), False, room.as_tuple())
    if outcome == kernels.UNREADABLE:
        return statistics(piece.packed(), observe, finite=finite)
    if outcome == kernels.NON_FINITE and finite:
        piece = piece.packed()
        tensors = (piece.query, piece.key, piece.value, None, lse)
        outcome = kernels.forward(*tensors, *piece.rest(), True, room.as_tuple())
    return room.found(lse, observe) if outcome == kernels.DONE else {}


def backward(
    piece: Piece, context: Tensor, lse: Tensor, dcontext: Tensor, *, bias_grad: bool, sinks_grad: bool = False
) -> Gradients:
    """Gradients of query, key and value, each like its tensor, and of bias and sinks (float32) if asked for.

    Context and lse are `forward`'s.
    """
    dcontext = dcontext.resolve_neg()
    tensors = (piece.query, piece.key, piece.value)
    dbias = None if piece.bias is None or not bias_grad else torch.zeros_like(piece.bias, dtype=torch.float32)
    wanted = (room_like(piece.query), room_like(piece.key), room_like(piece.value), dbias)
    kernels = _kernels()
    outcome = kernels.backward(*tensors, context, lse, *piece.rest(), False, dcontext, *wanted)
    if outcome == kernels.UNREADABLE:
        given = (context.contiguous(), lse.contiguous(), dcontext.contiguous())
        return backward(piece.packed(), *given, bias_grad=bias_grad, sinks_grad=sinks_grad)
    if outcome == kernels.DONE:
        return *wanted, _of_sinks(piece, context, lse, dcontext) if sinks_grad else None
    return _backward_of_non_finite(piece, context, lse, dcontext, wanted, sinks_grad=sinks_grad)


def _of_sinks(piece: Piece, context: Tensor, lse: Tensor, dcontext: Tensor) -> Tensor:
    """A sink's gradient: its weight times what its value, 0, would give, less the mean; summed over the rows."""
    assert piece.sinks is not None
    rest = (piece.sinks.detach().float()[:, None] - lse[..., 0] - lse[..., 1]).exp()
    rest = rest.masked_fill(lse[..., 0] == -torch.inf, 0.0)
    return -(rest * (dcontext.float() * context.float()).sum(dim=-1)).sum(dim=(0, 2))


def _backward_of_non_finite(
    piece: Piece,
    context: Tensor,
    lse: Tensor,
    dcontext: Tensor,
    wanted: tuple[Tensor, Tensor, Tensor, Tensor | None],
    *,
    sinks_grad: bool,
) -> Gradients:
    """Rows that see something non-finite pass NaN to their query alone; rows whose own gradient is non-finite pass
    NaN to all that they see.
    """
    request = piece.as_request()
    finite, aside = set_aside(request)
    alive = lse[..., 0] != -torch.inf
    spoilt = torch.zeros_like(alive) if aside is None else aside.spoilt()
    non_finite = ~torch.isfinite(dcontext).all(dim=-1)
    broken = non_finite & ~spoilt & alive
    keep = ~(spoilt | non_finite)[..., None]
    piece = piece.of(finite).packed()
    given = (torch.where(keep, context, 0.0).contiguous(), lse)
    kernels = _kernels()
    dquery, dkey, dvalue, dbias = wanted
    if dbias is not None:
        dbias.zero_()
    dcontext = torch.where(keep, dcontext, 0.0).contiguous()
    kernels.backward(piece.query, piece.key, piece.value, *given, *piece.rest(), True, dcontext, *wanted)
    dsinks = _of_sinks(piece, *given, dcontext) if sinks_grad else None
    dquery.masked_fill_((spoilt | broken)[..., None], torch.nan)
    if bool(broken.any()):
        reached = visible_to(request, broken).unflatten(1, (-1, request.group)).any(dim=2)
        for grad in (dkey, dvalue):
            grad.masked_fill_(reached[..., None], torch.nan)
        if dbias is not None:
            _spoil_bias(dbias, request, broken)
        if dsinks is not None:
            dsinks.masked_fill_(broken.any(dim=2).any(dim=0), torch.nan)
    return dquery, dkey, dvalue, dbias, dsinks


def _spoil_bias(dbias: Tensor, request: Request, broken: Tensor) -> None:
    """NaN where the gradient of the bias sums over a pair that a broken row sees."""
    for tile in tiles(request):
        pairs = broken[tile.batch, :, tile.queries, None]
        visible = visible_tile(request, tile)
        pairs = pairs.expand(-1, -1, -1, request.key.shape[2])[..., tile.keys] if visible is None else pairs & visible
        cut: list[Any] = [tile.batch, tile.heads, tile.queries, tile.keys]
        for axis, size in enumerate(dbias.shape):
            if size == 1:
                pairs, cut[axis] = pairs.any(dim=axis, keepdim=True), slice(None)
        dbias[tuple(cut)] = dbias[tuple(cut)].masked_fill(pairs, torch.nan)


def room_like(tensor: Tensor) -> Tensor:
    """Room laid out as the tensor, where that leaves its features side by side."""
    room = torch.empty_like(tensor)
    return room if room.stride(3) == 1 or room.shape[3] <= 1 else room.contiguous()


def _kernels() -> ModuleType:
    kernels = library()
    assert kernels is not None  # else the backend declines
    return kernels


# -- statistics of the same pass -------------------------------------------------------------------------------

NAMES = ("lse", "entropy", "max_weight", "max_score", "distance", "received", "rest", "top_k", "mass", "offsets")
MAX_GROUPS, MAX_OFFSETS, MAX_TOP = 16, 64, 64


def in_one_pass(observe: Observe) -> list[str]:
    """Names of the statistics that the kernels can give beside the context."""
    names = [name for name in NAMES if observe.asks(name)]
    if observe.grad:
        return []  # a graph of them needs plain torch
    too_many = {
        "top_k": (observe.top_k or 0) > MAX_TOP,
        "mass": len(observe.mass or ()) > MAX_GROUPS,
        "offsets": len(observe.offsets or ()) > MAX_OFFSETS,
    }
    return [name for name in names if not too_many.get(name, False)]


@dataclass(frozen=True)
class _Room:
    """Tensors that a call writes its statistics into."""

    fields: dict[str, Tensor]
    groups: list[Tensor]
    offsets: list[int]

    def as_tuple(self) -> tuple[Any, ...]:
        """In the order of the kernels."""
        of = self.fields.get
        return (
            *(of(name) for name in ("entropy", "max_weight", "distance", "received", "top weights", "top keys")),
            *(self.groups, of("mass"), self.offsets, of("offsets"), of("rest"), of("max_score")),
        )

    def found(self, lse: Tensor | None, observe: Observe) -> dict[str, Any]:
        """By the names of `Observe`."""
        fields: dict[str, Any] = dict(self.fields)
        if observe.lse and lse is not None:
            fields["lse"] = lse[..., 0].contiguous()
        if "top weights" in fields:
            fields["top_k"] = (fields.pop("top weights"), fields.pop("top keys"))
        if "mass" in fields:
            fields["mass"] = dict(zip(observe.mass or (), fields["mass"].unbind(), strict=True))
        return {name: fields[name] for name in NAMES if name in fields}


def _room(query: Tensor, key: Tensor, observe: Observe) -> _Room | None:
    names = in_one_pass(observe)
    if not names:
        return None
    B, H, L, _ = query.shape
    S = key.shape[2]
    by_query = ("entropy", "max_weight", "max_score", "distance", "rest")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(by_query, (B, H, L))
    shapes["received"] = (B, H, S)
    groups: list[Tensor] = []
    offsets: list[int] = []
    if "top_k" in names and observe.top_k:
        shapes["top weights"] = (B, H, L, observe.top_k)
    if "mass" in names and observe.mass is not None:
        groups = [keys.to(query.device) for keys in observe.mass.values()]
        shapes["mass"] = (len(groups), B, H, L)
    if "offsets" in names and observe.offsets is not None:
        offsets = list(observe.offsets)
        shapes["offsets"] = (B, H, L, len(offsets))
    wanted = [*names, "top weights"]
    fields = {name: query.new_empty(shape, dtype=torch.float32) for name, shape in shapes.items() if name in wanted}
    if "top weights" in fields:
        fields["top keys"] = torch.empty_like(fields["top weights"], dtype=torch.int32)
    return _Room(fields, groups, offsets)


def _spoil(found: dict[str, Any], aside: SetAside) -> dict[str, Any]:
    """NaN where the weights are; what depends on single weights is left for plain torch to find."""
    rows = aside.spoilt(values=False)
    if not bool(rows.any()):
        return found
    found = {name: value for name, value in found.items() if name not in ("top_k", "offsets")}
    for name, value in found.items():
        if name == "received":
            found[name] = value.masked_fill(visible_to(aside.original, rows), torch.nan)
        elif name == "mass":
            found[name] = {group: part.masked_fill(rows, torch.nan) for group, part in value.items()}
        else:
            found[name] = value.masked_fill(rows, torch.nan)
    return found


# -- parts as a mask again -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class _PartsMask(Mask):
    """Parts as a mask again."""

    first: Tensor | None
    behind: Tensor | None
    visible: Tensor | None
    left: int
    right: int

    _tensors: ClassVar[tuple[str, ...]] = ("first", "behind", "visible")

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        sizes: dict[str, int] = {}
        for tensor, letters in ((self.first, "bq"), (self.behind, "bq"), (self.visible, "bhqk")):
            for letter, size in zip(letters, () if tensor is None else tensor.shape, strict=False):
                sizes[letter] = max(size, sizes.get(letter, 1))
        return {letter: size for letter, size in sizes.items() if size != 1}

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        seen = (k >= q + self.left) & (k <= q + self.right)
        if self.first is not None:
            seen = seen & (k >= _at(self.first, b, q))
        if self.behind is not None:
            seen = seen & (k < _at(self.behind, b, q))
        return seen if self.visible is None else seen & _at(self.visible, b, h, q, k)


def _at(table: Tensor, *indices: Tensor) -> Tensor:
    return table[tuple(i if size != 1 else torch.zeros_like(i) for i, size in zip(indices, table.shape, strict=True))]
