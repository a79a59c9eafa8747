"""Attention by tiles of rows in plain torch: everything, everywhere, in O(L) memory, with gradients.

A tile is a run of queries with all the keys they could see, so its softmax is an ordinary one. In training each
tile is recomputed in the backward pass (Chen et al. 2016, arXiv 1604.06174) instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.backends.base import Backend
from clearhead.backends.derivatives import transforming
from clearhead.backends.dropout import kept
from clearhead.backends.inplace import watch
from clearhead.checks import Request
from clearhead.masks import Tile
from clearhead.plan import tiles

T = TypeVar("T")


class Blockwise(Backend):
    """Plain torch, a tile at a time; does everything."""

    name = "blockwise"

    def reasons(self, request: Request) -> list[str]:
        """None."""
        return []

    def run(self, request: Request) -> Tensor:
        """Tile after tile."""
        return assemble(over_tiles(request, tiles(request), lambda tile: _context(request, tile)))


def over_tiles(request: Request, plan: list[Tile], compute: Callable[[Tile], T]) -> Iterator[tuple[Tile, T]]:
    """`compute` of every tile; where autograd listens, its inside is not kept but recomputed.

    A single tile is small by construction: it's kept. Inside torch.func nothing can be recomputed.
    """
    recompute = request.needs_grad and len(plan) > 1 and not transforming()
    unchanged = (
        watch(request.query, request.key, request.value, request.attn_bias, request.mask, request.sinks)
        if recompute
        else None
    )

    def again(tile: Tile) -> T:
        if unchanged is not None:
            unchanged()
        return compute(tile)

    for tile in plan:
        if recompute:
            yield tile, checkpoint(again, tile, use_reentrant=False, preserve_rng_state=False)
        else:
            yield tile, compute(tile)


def assemble(parts: Iterable[tuple[Tile, Tensor]]) -> Tensor:
    """Results of tiles, (b, H, rows, ...), put together to (B, H, L, ...)."""
    rows: dict[int, list[Tensor]] = {}
    for tile, part in parts:
        start = tile.batch.start if isinstance(tile.batch, slice) else 0
        rows.setdefault(start or 0, []).append(part)
    return _cat([_cat(run, dim=2) for run in rows.values()], dim=0)


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # torch copies a single part, too


def raw_scores(request: Request, tile: Tile) -> Tensor:
    """Scale * query key^T, capped, + bias of a tile, hidden pairs too: (b, h, q, k) in the accumulating dtype."""
    query = _at_queries(request.query[tile.batch], tile).to(request.acc_dtype)
    key = _of_heads(request, request.key[tile.batch, :, tile.keys], tile).to(request.acc_dtype)
    if abs(request.scale) <= 1:
        scores = _grouped_matmul(query * request.scale, key.transpose(-2, -1))
    else:  # a hidden query times that might overflow, and 0 x inf is NaN in the gradient of the keys
        scores = _grouped_matmul(query, key.transpose(-2, -1)) * request.scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    bias = bias_tile(request, tile)
    return scores if bias is None else scores + bias


class Weights(NamedTuple):
    """The weights of a tile and what they come from.

    Attributes:
        weights: (b, h, q, k), exactly 0 where hidden.
        scores: the same shape, -inf where hidden.
        visible: bool, broadcastable to them; None if nothing is hidden.
        sinks: (h, 1), the sinks of the heads; None if there are none.
        rest: (b, h, q), what the sink takes of each row, 0 in a dead one; None without sinks.
    """

    weights: Tensor
    scores: Tensor
    visible: Tensor | None
    sinks: Tensor | None = None
    rest: Tensor | None = None


def weights_of(request: Request, tile: Tile) -> Weights:
    """The weights of a tile."""
    scores = raw_scores(request, tile)
    visible = visible_tile(request, tile)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if request.sinks is not None:
        return _weights_beside_sinks(scores, visible, request.sinks[tile.heads, None].to(scores.dtype))
    if visible is None:
        return Weights(torch.softmax(scores, dim=-1), scores, None)
    # Dead rows come out of the softmax as NaN; hidden weights must be 0 beside a visible NaN, too.
    return Weights(torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0), scores, visible)


def _weights_beside_sinks(scores: Tensor, visible: Tensor | None, sinks: Tensor) -> Weights:
    """One more column in the softmax; what it takes goes to no value."""
    keys = scores.shape[-1]
    column = sinks.expand(scores.shape[:-1])[..., None]
    if keys == 0:
        dead = torch.ones_like(column, dtype=torch.bool)
    else:
        dead = torch.zeros_like(column, dtype=torch.bool) if visible is None else ~visible.any(dim=-1, keepdim=True)
    # All -inf, a sink of -inf too, would be NaN in a dead row, and so would the gradient of the sinks.
    column = column.masked_fill(dead, 0.0)
    weights, rest = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1).split([keys, 1], dim=-1)
    weights = weights if visible is None else weights.masked_fill(~visible, 0.0)
    return Weights(weights, scores, visible, sinks, rest.masked_fill(dead, 0.0)[..., 0])


def visible_tile(request: Request, tile: Tile) -> Tensor | None:
    """What the mask and the bias's -inf leave visible; None if they hide nothing here."""
    visible = None if request.mask is None else request.mask._tile(tile)
    bias = bias_tile(request, tile)
    if bias is not None:
        finite = bias != -torch.inf
        visible = finite if visible is None else visible & finite
    return visible


def bias_tile(request: Request, tile: Tile) -> Tensor | None:
    """The bias of a tile, its axes of size 1 left as they are."""
    bias = request.attn_bias
    if bias is None:
        return None
    for axis, index in enumerate((tile.batch, tile.heads, tile.queries, tile.keys)):
        if bias.shape[axis] != 1:  # one axis at a time: lists of indices of two would go by pairs
            cut: list[slice | Tensor] = [slice(None)] * 4
            cut[axis] = index
            bias = bias[tuple(cut)]
    return bias.to(request.acc_dtype)


def dropped(request: Request, tile: Tile, weights: Tensor) -> Tensor:
    """Weights after dropout: a share of p set to zero, the others divided by 1 - p."""
    if request.dropout_p == 0:
        return weights
    # With p = 1 nothing is kept, and the factor never counts.
    return torch.where(kept(request, tile), weights / (1 - request.dropout_p or 1.0), 0.0)


def _context(request: Request, tile: Tile) -> Tensor:
    weights = weights_of(request, tile).weights
    value = request.value[tile.batch, :, tile.keys].to(request.acc_dtype)
    return _grouped_matmul(dropped(request, tile, weights), value).to(request.query.dtype)


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """(b, H, m, n) @ (b, Hkv, n, p) -> (b, H, m, p): a group of H // Hkv heads shares its right side uncopied."""
    b, H, m, n = left.shape
    shared = right.shape[1]
    if shared == H:
        return left @ right
    return (left.reshape(b, shared, H // shared * m, n) @ right).reshape(b, H, m, right.shape[-1])


def _at_queries(query: Tensor, tile: Tile) -> Tensor:
    return query[:, tile.heads][:, :, tile.queries]


def _of_heads(request: Request, tensor: Tensor, tile: Tile) -> Tensor:
    """The key/value heads of the tile's query heads; all heads keep the grouped form."""
    if isinstance(tile.heads, Tensor):
        return tensor[:, tile.heads // request.group]
    return tensor
