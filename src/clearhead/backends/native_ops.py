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
    context: Tensor
    context, _ = _attend(*tensors, *piece.parts, piece.scale, piece.dropout_p, piece.seed, list(piece.origin))
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
) -> tuple[Tensor, Tensor]:
    parts = Parts(left, right, first, behind, visible)
    batch, row, column = origin
    piece = Piece(query, key, value, bias, parts, scale, dropout_p, seed, (batch, row, column))
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
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = Parts(left, right, first, behind, visible)
    batch, row, column = origin
    piece = Piece(query, key, value, bias, parts, scale, dropout_p, seed, (batch, row, column))
    *most, dbias = backward(piece, context, lse, dcontext, bias_grad=bias_grad)
    dquery, dkey, dvalue = (grad.contiguous() for grad in most)
    return (
        dquery,
        dkey,
        dvalue,
        lse.new_empty(0) if dbias is None else dbias.contiguous(),
    )  # an operator gives no None


@_attend_backward.register_fake
def _(_dcontext: Tensor, _context: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *tensors, bias = inputs[:4]
    dbias = lse.new_empty(bias.shape if inputs[-1] else 0)
    return *(tensor.new_empty(tensor.shape) for tensor in tensors), dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, left, right, first, behind, visible, scale, dropout_p, seed, origin = inputs
    ctx.save_for_backward(*output, query, key, value, bias, first, behind, visible, seed)
    ctx.numbers = (left, right, scale, dropout_p, origin)


def _backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, bias, first, behind, visible, seed = ctx.saved_tensors
    left, right, scale, dropout_p, origin = ctx.numbers
    bias_grad = ctx.needs_input_grad[3]
    mask = (left, right, first, behind, visible)
    *most, dbias = _attend_backward(dcontext, *tensors, bias, *mask, scale, dropout_p, seed, origin, bias_grad)
    return *most, dbias.to(bias.dtype) if bias_grad else None, *(None,) * 9


_attend.register_autograd(_backward, setup_context=_keep)
