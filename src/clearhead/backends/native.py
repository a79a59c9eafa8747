"""Our kernels for the CPU (``native/`` in the sources): one pass for output and statistics, in O(L) memory.

Where a mask leaves each query one interval of keys, what lies outside those of a block of queries is neither computed
nor read. What is left of the mask goes along as a bool tensor where that exists already; else by tiles of rows, each
with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from clearhead.backends.base import Backend
from clearhead.backends.blockwise import Blockwise, assemble, bias_tile
from clearhead.backends.derivatives import transforming
from clearhead.backends.inplace import watch
from clearhead.backends.native_calls import EVERYTHING, FAR, Parts, Piece, backward, forward, statistics
from clearhead.backends.native_library import why_missing
from clearhead.backends.native_ops import attend
from clearhead.backends.nonfinite import set_aside
from clearhead.checks import Request
from clearhead.masks import ALL, Tile
from clearhead.observe import Observe
from clearhead.plan import tiles

_PLAIN = (Tensor, Parameter)
_MISSING = why_missing()  # asked here: a compiler can't trace the import


class Native(Backend):
    """The kernels of this package, for the CPU."""

    name = "native"
    careful = True

    def reasons(self, request: Request) -> list[str]:
        """What the kernels were not made for."""
        query = request.query
        found: list[str] = []
        if _MISSING is not None:
            found.append(_MISSING)
        if query.device.type != "cpu":
            found.append(f"made for the CPU, not for {query.device.type}")
        if query.dtype == torch.float64:
            found.append("float64: the kernels compute in float32")
        if not torch.compiler.is_compiling() and (query.is_neg() or request.key.is_neg() or request.value.is_neg()):
            found.append("a tensor that is negated when read (.resolve_neg() writes it)")
        if max(request.sizes) >= 2**31:  # in one: of two comparisons an exported program would make limits
            found.append("2**31 queries or keys")
        if transforming():
            found.append("inside torch.func or forward-mode differentiation: the kernels have no rules for them")
        return found

    def run(self, request: Request) -> Tensor:
        """The context."""
        return self.see(request, None)[0]

    def see(self, request: Request, observe: Observe | None) -> tuple[Tensor, dict[str, Any]]:
        """The context, and the statistics that come in the same pass."""
        if not _plain(request):
            return _traced(request), {}
        if request.needs_grad:
            found: dict[str, Any] = {}
            inputs = (request.query, request.key, request.value, request.attn_bias, request.sinks)
            apply = cast("Callable[..., Tensor]", _Attend.apply)
            return apply(*inputs, request, observe, found), found
        context, _, found = _forward(request, observe, need_lse=False)
        return context, found

    def look(self, request: Request, observe: Observe) -> dict[str, Any]:
        """The statistics that the kernels can give of a call that somebody else computes."""
        if self.reasons(request) or not _plain(request) or (observe.grad and request.needs_grad):
            return {}
        piece = _whole(request)
        return {} if piece is None else statistics(piece, observe)

    def lse(self, request: Request) -> Tensor | None:
        """Log of the sum of exponentiated scores of a finite call, (B, Hq, L); None where the kernels decline."""
        if self.reasons(request) or not _plain(request):
            return None
        only = Observe(lse=True)
        piece = _whole(request)
        if piece is None:
            return assemble((tile, statistics(part, only, finite=True)["lse"]) for tile, part in _tiles(request))
        lse: Tensor = statistics(piece, only, finite=True)["lse"]
        return lse


def _plain(request: Request) -> bool:
    """Whether memory may be read here and now: no tracing, no subclasses of tensors, no modes that listen."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    return (  # no loop: half a microsecond is a lot here
        type(request.query) in _PLAIN
        and type(request.key) in _PLAIN
        and type(request.value) in _PLAIN
        and (request.attn_bias is None or type(request.attn_bias) in _PLAIN)
        and (request.sinks is None or type(request.sinks) in _PLAIN)
    )


def _whole(request: Request) -> Piece | None:
    """The call as one piece; None where a mask of size L x S would have to be made for it."""
    mask = request.mask
    parts = EVERYTHING
    if mask is not None:
        _, _, L, S = request.sizes
        (left, right, first, behind), rest = mask._split(L, S)
        if rest is not None and not rest._is_at_hand():
            return None
        left, right = -FAR if left is None else left, FAR if right is None else right
        everywhere = Tile(ALL, ALL, ALL, ALL, L, S, request.query.device)  # (a slice to L would fix L for a compiler)
        parts = Parts(left, right, first, behind, None if rest is None else rest._tile(everywhere))
    tensors = (request.query, request.key, request.value, request.attn_bias)
    numbers = (request.scale, request.dropout_p, request.seed)
    return Piece(*tensors, parts, *numbers, softcap=request.softcap, sinks=request.sinks)


def _tiles(request: Request) -> Iterator[tuple[Tile, Piece]]:
    """The call by tiles of rows, each with its own part of the mask."""
    mask = request.mask
    assert mask is not None
    for tile in tiles(request, maps=mask.axes.get("h", 1)):
        assert isinstance(tile.batch, slice)
        assert isinstance(tile.queries, slice)
        assert isinstance(tile.keys, slice)
        query = request.query[tile.batch, :, tile.queries]
        key, value = (tensor[tile.batch, :, tile.keys] for tensor in (request.key, request.value))
        origin = (tile.batch.start, tile.queries.start, tile.keys.start)
        parts = Parts(visible=mask._tile(tile))
        bias = bias_tile(request, tile)
        rest = (request.scale, request.dropout_p, request.seed, origin, request.softcap, request.sinks)
        yield tile, Piece(query, key, value, bias, parts, *rest)


def _traced(request: Request) -> Tensor:
    piece = _whole(request)
    return attend(piece) if piece is not None else assemble((tile, attend(part)) for tile, part in _tiles(request))


def _forward(
    request: Request, observe: Observe | None, *, need_lse: bool
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Context, lse if needed, and the statistics that come in the same pass; by tiles none do."""
    piece = _whole(request)
    if piece is not None:
        return forward(piece, observe, need_lse=need_lse)
    found = [(tile, *forward(part)) for tile, part in _tiles(request)]
    context = assemble((tile, part) for tile, part, _, _ in found)
    return context, assemble((tile, part) for tile, _, part, _ in found if part is not None), {}


class _Attend(torch.autograd.Function):
    """The kernels' forward and backward pass; a gradient of that gradient comes from plain torch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        request: Request,
        observe: Observe | None,
        found: dict[str, Any],
    ) -> Tensor:
        context, lse, seen = _forward(request, observe, need_lse=True)
        found |= seen
        ctx.save_for_backward(query, key, value, bias, sinks, context, lse)
        ctx.call = (request.scale, request.dropout_p, request.seed, request.mask, request.softcap)
        ctx.unchanged = watch(request.mask) if request.mask is not None else None
        return context

    @staticmethod
    def backward(ctx: Any, dcontext: Tensor) -> Any:
        query, key, value, bias, sinks, context, lse = ctx.saved_tensors
        if ctx.unchanged is not None:
            ctx.unchanged()
        scale, dropout_p, seed, mask, softcap = ctx.call
        request = Request(query, key, value, mask, bias, scale, dropout_p, seed, 4, softcap, sinks)
        if torch.is_grad_enabled() or transforming() or torch._C._functorch.is_legacy_batchedtensor(dcontext):
            found = _by_plain_torch(request, dcontext, ctx.needs_input_grad[:5])
        else:
            flags = {"bias_grad": ctx.needs_input_grad[3], "sinks_grad": ctx.needs_input_grad[4]}
            found = _backward(request, context, lse, dcontext, **flags)
        return *found, None, None, None


def _backward(
    request: Request, context: Tensor, lse: Tensor, dcontext: Tensor, *, bias_grad: bool, sinks_grad: bool
) -> list[Tensor | None]:
    bias, sinks = request.attn_bias, request.sinks
    whole = _whole(request)
    if whole is not None:
        *most, dbias, dsinks = backward(whole, context, lse, dcontext, bias_grad=bias_grad, sinks_grad=sinks_grad)
        return [*most, _like(dbias, bias), _like(dsinks, sinks)]
    # Summed over the tiles in float32.
    dquery, dkey, dvalue = (
        torch.zeros_like(t, dtype=torch.float32) for t in (request.query, request.key, request.value)
    )
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_grad else None
    dsinks = torch.zeros_like(sinks, dtype=torch.float32) if sinks is not None and sinks_grad else None
    for tile, piece in _tiles(request):
        rows = (tile.batch, ALL, tile.queries)
        given = (context[rows], lse[rows].contiguous(), dcontext[rows])
        own = backward(piece, *given, bias_grad=bias_grad, sinks_grad=sinks_grad)
        dquery[rows] = own[0]
        dkey[tile.batch, :, tile.keys] += own[1]
        dvalue[tile.batch, :, tile.keys] += own[2]
        if dbias is not None and own[3] is not None:
            cut = (tile.batch, ALL, tile.queries, tile.keys)
            part = dbias[tuple(index if size != 1 else ALL for index, size in zip(cut, dbias.shape, strict=True))]
            part += own[3]
        if dsinks is not None and own[4] is not None:
            dsinks += own[4]
    found = [grad.to(request.query.dtype) for grad in (dquery, dkey, dvalue)]
    return [*found, _like(dbias, bias), _like(dsinks, sinks)]


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if gradient is None or tensor is None else gradient.to(tensor.dtype)


def _by_plain_torch(request: Request, dcontext: Tensor, asked: Sequence[bool]) -> list[Tensor | None]:
    """Gradients that can be differentiated, or taken of many gradients at once."""
    inputs = (request.query, request.key, request.value, request.attn_bias, request.sinks)
    with_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        # Views: where one tensor is given twice, or made from another, each place gets its own share.
        given = [tensor if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        query, key, value, bias, sinks = given
        request = replace(request.on([query, key, value], bias), sinks=sinks)  # type: ignore[list-item]
        finite, aside = set_aside(request)
        context = Blockwise().run(finite)
        if aside is not None:
            context = aside.restore(context)
        wanted = [t for t, asks in zip(given, asked, strict=True) if asks and t is not None]
        grads = iter(torch.autograd.grad(context, wanted, dcontext, create_graph=with_graph, materialize_grads=True))
    return [next(grads) if asks and tensor is not None else None for tensor, asks in zip(inputs, asked, strict=True)]
