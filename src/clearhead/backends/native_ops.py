"""The native kernels as torch operators: what compiled and exported programs call.

`attend` and `attend_backward` are opaque to a compiler, which knows their shapes and gradients; within, they do
what an ordinary call does, NaN and infinity included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.backends.native_calls import Parts, Piece, backward, context_like, forward


def attend(piece: Piece) -> Tensor:
    """The context of a piece by the operator."""
    tensors = (piece.query, piece.key, piece.value, piece.bias)
    more = (piece.softcap, piece.sinks)
    context: Tensor
    context, _ = _attend(*tensors, *piece.parts, piece.scale, piece.dropout_p, piece.seed, list(piece.origin), *more)
    return context


@torch.library.custom_op("clearhead::attend", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    left: int,
    right: int,
    first: Tensor | None,
    behind: Tensor | None,
    visible: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    origin: list[int],
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    parts = Parts(left, right, first, behind, visible)
    batch, row, column = origin
    piece = Piece(query, key, value, bias, parts, scale, dropout_p, seed, (batch, row, column), softcap, sinks)
    context, lse, _ = forward(piece)
    assert lse is not None
    return context, lse


@_attend.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, L, _E = query.shape
    return context_like(query, value), query.new_empty((B, H, L, 2), dtype=torch.float32)


@torch.library.custom_op("clearhead::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    dcontext: Tensor,
    context: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    left: int,
    right: int,
    first: Tensor | None,
    behind: Tensor | None,
    visible: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    origin: list[int],
    softcap: float | None,
    sinks: Tensor | None,
    bias_grad: bool,
    sinks_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parts = Parts(left, right, first, behind, visible)
    batch, row, column = origin
    piece = Piece(query, key, value, bias, parts, scale, dropout_p, seed, (batch, row, column), softcap, sinks)
    flags = {"bias_grad": bias_grad, "sinks_grad": sinks_grad}
    *most, dbias, dsinks = backward(piece, context, lse, dcontext, **flags)
    dquery, dkey, dvalue = (grad.contiguous() for grad in most)
    nothing = lse.new_empty(0)  # an operator gives no None
    dbias = nothing if dbias is None else dbias.contiguous()
    return dquery, dkey, dvalue, dbias, nothing.clone() if dsinks is None else dsinks


@_attend_backward.register_fake
def _(_dcontext: Tensor, _context: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *tensors, bias = inputs[:4]
    sinks, bias_grad, sinks_grad = inputs[-3:]
    dbias, dsinks = lse.new_empty(bias.shape if bias_grad else 0), lse.new_empty(sinks.shape if sinks_grad else 0)
    return *(tensor.new_empty(tensor.shape) for tensor in tensors), dbias, dsinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, left, right, first, behind, visible, scale, dropout_p, seed, origin, softcap, sinks = inputs
    ctx.save_for_backward(*output, *tensors, first, behind, visible, seed, sinks)
    ctx.numbers = (left, right, scale, dropout_p, origin, softcap)


def _backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, bias, first, behind, visible, seed, sinks = ctx.saved_tensors
    left, right, scale, dropout_p, origin, softcap = ctx.numbers
    bias_grad, sinks_grad = ctx.needs_input_grad[3], ctx.needs_input_grad[-1]
    mask = (left, right, first, behind, visible)
    rest = (scale, dropout_p, seed, origin, softcap, sinks, bias_grad, sinks_grad)
    *most, dbias, dsinks = _attend_backward(dcontext, *tensors, bias, *mask, *rest)
    dbias, dsinks = dbias.to(bias.dtype) if bias_grad else None, dsinks.to(sinks.dtype) if sinks_grad else None
    return *most, dbias, *(None,) * 10, dsinks


_attend.register_autograd(_backward, setup_context=_keep)
