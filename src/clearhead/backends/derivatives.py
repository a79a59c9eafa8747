"""Derivatives that fused kernels don't have: of the backward pass, and forward-mode.

A fused kernel comes with one backward pass and no more. Where a graph of that backward is asked for
(``create_graph=True``), it is computed anew by plain torch, which autograd can go through as often as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.backends.inplace import watch
from clearhead.checks import Request

Run = Callable[[Request], Tensor]


def transforming() -> bool:
    """Whether a torch.func transform (vmap, jvp, hessian, ...) or forward-mode differentiation is at work."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def differentiable(fused: Run, plain: Run, request: Request) -> Tensor:
    """What `fused` computes, with its backward pass; a backward of that backward by `plain`.

    Args:
        fused: fast, differentiable once.
        plain: the same in plain torch.
        request: the call; its bias takes no gradient.
    """
    if not request.needs_grad or torch.compiler.is_compiling():
        return fused(request)
    apply = cast("Callable[..., Tensor]", _Fused.apply)
    return apply(fused, plain, request, request.query, request.key, request.value)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Run, plain: Run, request: Request, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.again = (fused, plain, request, watch(request.attn_bias, request.mask))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # Someone decides what is kept (activation checkpointing): a graph of our own would be out of their hands.
            ctx.once = None
            return fused(request)
        ctx.once = _, context = _once(fused, request, (query, key, value))
        return context.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        fused, plain, request, unchanged = ctx.again
        inputs = list(ctx.saved_tensors)
        unchanged()
        if torch.is_grad_enabled():
            inputs = [tensor.view_as(tensor) for tensor in inputs]  # one that is given twice gets a share for each
            context = plain(request.on(inputs, request.attn_bias))
        else:
            inputs, context = ctx.once or _once(fused, request, inputs)
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(
            torch.autograd.grad(context, asked, grads, retain_graph=True, create_graph=torch.is_grad_enabled())
        )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.once = None
        return (None, None, None, *(next(found) if tensor.requires_grad else None for tensor in inputs))


def _once(fused: Run, request: Request, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Leaves in the place of the inputs, and the graph of the fused kernel on them."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with torch.enable_grad():
        return leaves, fused(request.on(leaves, request.attn_bias))
