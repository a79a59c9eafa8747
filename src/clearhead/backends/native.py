"""Our kernels for the CPU (``native/`` in the sources): one pass for output and statistics, in O(L) memory.

What a mask leaves of each row as one interval of keys is neither computed nor read outside of it. What is left of
the mask goes along as a bool tensor where that exists already; else by tiles of rows, each with its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from clearhead.backends.base import Backend
from clearhead.backends.blockwise import assemble, bias_tile
from clearhead.backends.derivatives import transforming
from clearhead.backends.native_calls import EVERYTHING, Attend, Parts, as_mask, attention_op, forward
from clearhead.backends.native_library import library, why_missing
from clearhead.checks import Request
from clearhead.masks import ALL, Mask, Tile
from clearhead.observe import Observe
from clearhead.plan import tiles

FAR = EVERYTHING.right


class Native(Backend):
    """The kernels of this package, for the CPU."""

    name = "native"
    careful = True

    def reasons(self, request: Request) -> list[str]:
        """What the kernels were not made for."""
        found = []
        if library() is None:
            found.append(why_missing() or "")
        if request.query.device.type != "cpu":
            found.append(f"made for the CPU, not for {request.query.device.type}")
        if request.query.dtype == torch.float64:
            found.append("float64: the kernels compute in float32")
        if request.dropout_p > 0 and not _at_hand(request):
            found.append("dropout with a mask that goes by tiles")
        if transforming():
            found.append("inside torch.func or forward-mode differentiation: the kernels have no rules for them")
        return found

    def run(self, request: Request) -> Tensor:
        """The context."""
        return self.see(request, None)[0]

    def see(self, request: Request, observe: Observe | None) -> tuple[Tensor, dict[str, Any]]:
        """The context, and the statistics that come in the same pass."""
        if _at_hand(request):
            return _call(request, _parts(request), observe)
        return assemble((tile, _tile(request, tile)) for tile in tiles(request, maps=_maps(request))), {}


def _at_hand(request: Request) -> bool:
    """Whether no mask of size L x S has to be made for the call."""
    if request.mask is None:
        return True
    _, _, L, S = request.sizes
    _, rest = request.mask._split(L, S)
    return rest is None or rest._is_at_hand()


def _parts(request: Request) -> Parts:
    if request.mask is None:
        return EVERYTHING
    _, _, L, S = request.sizes
    intervals, rest = request.mask._split(L, S)
    left = -FAR if intervals.left is None else intervals.left
    right = FAR if intervals.right is None else intervals.right
    return Parts(left, right, intervals.first, intervals.behind, None if rest is None else _whole(rest, request))


def _whole(mask: Mask, request: Request) -> Tensor:
    _, _, L, S = request.sizes
    return mask._tile(Tile(ALL, ALL, slice(0, L), slice(0, S), L, S, request.query.device))


def _call(request: Request, parts: Parts, observe: Observe | None) -> tuple[Tensor, dict[str, Any]]:
    query, key, value, bias = request.query, request.key, request.value, request.attn_bias
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    of_call = (request.scale, request.dropout_p, request.seed)
    if not _plain(query, key, value):
        return attention_op(query, key, value, *parts, bias, *of_call)[0], {}
    if not request.needs_grad:
        context, _, found = forward(query, key, value, parts, bias, *of_call, observe)
        return context, found
    found = {}
    return Attend.apply(query, key, value, bias, request, parts, observe, found), found


def _plain(*tensors: Tensor) -> bool:
    """Whether the kernels may read the tensors' memory here and now: no tracing, no subclasses, no modes."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(tensor) is Tensor or type(tensor) is Parameter for tensor in tensors)


def _maps(request: Request) -> int:
    """How many L x S maps the mask is, for each batch item."""
    return 1 if request.mask is None else request.mask.axes.get("h", 1)


def _tile(request: Request, tile: Tile) -> Tensor:
    assert request.mask is not None  # without one all is at hand
    query = request.query[tile.batch, :, tile.queries]
    key, value = (tensor[tile.batch, :, tile.keys] for tensor in (request.key, request.value))
    parts = Parts(visible=request.mask._tile(tile))
    bias = bias_tile(request, tile)
    of_tile = Request(query, key, value, as_mask(parts), bias, request.scale, 0.0, None, request.axes)
    return _call(of_tile, parts, None)[0]
