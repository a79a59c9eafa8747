"""Torch's fused kernels, `F.scaled_dot_product_attention`, kept to what they do right.

Where the mask is none, or plain causal with L = S, or the same for all queries, it is one call. Any other mask
goes by runs of queries, each with the keys they could see and a bool mask of that run: hidden keys are skipped
and nothing of size L x S exists.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.backends.base import Backend
from clearhead.backends.blockwise import Blockwise, assemble, bias_tile, over_tiles, visible_tile
from clearhead.backends.derivatives import differentiable, transforming
from clearhead.backends.nonfinite import set_aside
from clearhead.checks import Request
from clearhead.masks import ALL, Causal, Tile, at_hand
from clearhead.plan import tiles


class Sdpa(Backend):
    """Torch's fused kernels."""

    name = "sdpa"
    careful = True

    def reasons(self, request: Request) -> list[str]:
        """What torch's kernels get wrong, or would materialise an L x S matrix for."""
        B, _, L, S = request.sizes
        E, Ev = request.query.shape[-1], request.value.shape[-1]
        found = []
        if 0 in (B, L, S, E, Ev):
            found.append("empty inputs are left to plain torch")
        if Ev != E:
            found.append(f"head widths differ (E={E}, Ev={Ev}): torch would materialise L x S")
        if request.dropout_p > 0:
            found.append("dropout: torch would materialise L x S on the CPU, and its dropped weights can't be seen")
        if request.scale < torch.finfo(torch.float32).tiny:
            found.append(f"scale {request.scale:g} <= 0, or 0 in float32: NaN with causal on the CPU")
        if request.attn_bias is not None and request.attn_bias.requires_grad and torch.is_grad_enabled():
            found.append("the bias needs a gradient: torch would materialise L x S")
        if request.softcap is not None:
            found.append("softcap: torch's kernels have none")
        if request.sinks is not None:
            found.append("sinks: torch's kernels have none")
        if transforming():
            found.append("inside torch.func or forward-mode differentiation: torch's kernels have no rules for them")
        return found

    def run(self, request: Request) -> Tensor:
        """One call where one is enough, else a call for each run of queries; plain torch where scores overflow."""
        largest = _largest(request)
        tamed, aside = set_aside(request, largest)
        if aside is None:
            return _differentiable(request)
        if not all(at_hand(tensor) for tensor in (request.query, request.key, request.value)):
            return aside.restore(_differentiable(tamed))  # who sees large numbers gets NaN, without a look
        finite, aside = set_aside(request)
        tamed, large = set_aside(finite, largest)
        seen = large is not None and bool(large.spoilt().any())
        context = Blockwise().run(finite) if seen else _differentiable(tamed)
        return context if aside is None else aside.restore(context)


def _largest(request: Request) -> float:
    """Numbers up to this give no score, and no product of a value with a gradient, that overflows.

    Torch hides a score by adding -inf, and a weight's gradient by a weight of 0: beside an infinity both are NaN.
    """
    terms = max(1, request.query.shape[-1], request.value.shape[-1])
    return math.sqrt(torch.finfo(request.acc_dtype).max / (4 * terms * max(1.0, request.scale)))


def _differentiable(request: Request) -> Tensor:
    return differentiable(_run, Blockwise().run, request)


def _run(request: Request) -> Tensor:
    _, _, L, S = request.sizes
    if request.mask is None and request.attn_bias is None:
        return _fused(request, request.query, request.key, request.value)
    if isinstance(request.mask, Causal) and request.attn_bias is None and _equal(L, S):
        return _fused(request, request.query, request.key, request.value, is_causal=True)
    plan = _plan(request)
    return assemble(over_tiles(request, plan, lambda tile: _run_tile(request, tile)))


def _equal(L: int, S: int) -> bool:
    """Whether L == S; of an exported program, whether they are equal in every call."""
    if not torch.compiler.is_exporting():
        return L == S
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import, and there already

    return bool(statically_known_true(L == S))


def _plan(request: Request) -> list[Tile]:
    _, _, L, S = request.sizes
    mask, bias = request.mask, request.attn_bias
    if torch.compiler.is_exporting():
        return tiles(request)
    if (mask is None or mask._same_for_every_query()) and (bias is None or bias.shape[2] == 1):
        keys = range(S) if mask is None else mask._reach(range(L), L, S) or range(1)
        return [Tile(ALL, ALL, slice(0, L), slice(keys.start, keys.stop), L, S, request.query.device)]
    heads = [1 if mask is None else mask.axes.get("h", 1), 1 if bias is None else bias.shape[1]]
    return tiles(request, maps=max(heads))


def _run_tile(request: Request, tile: Tile) -> Tensor:
    query = request.query[tile.batch, :, tile.queries]
    key, value = (tensor[tile.batch, :, tile.keys] for tensor in (request.key, request.value))
    mask = bias_tile(request, tile)  # floats beside half inputs stay float32: rounding them would lose more
    if mask is None:
        mask = visible_tile(request, tile)
    elif request.mask is not None:
        mask = mask.masked_fill(~request.mask._tile(tile), -torch.inf)
    context = _fused(request, query, key, value, attn_mask=mask)
    if mask is None or query.device.type == "cpu":
        return context  # torch's CPU kernel gives a dead row zeros
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    return context.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def _fused(
    request: Request,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=request.scale,
        enable_gqa=request.group > 1,
    )
