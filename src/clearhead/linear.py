"""`Linear`: ``torch.nn.Linear`` by whichever of torch's two matrix products is the faster one here.

Torch multiplies float32 matrices on the CPU by MKL and carries oneDNN beside it. On some processors oneDNN takes
half of MKL's time, on others they are equal: so they are raced, once per process, where the first product comes
that is large enough to matter. ``CLEARHEAD_LINEAR=torch`` or ``onednn`` decides without a race.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from clearhead.backends.derivatives import transforming

# Below these many multiply-adds, or with a narrower side, oneDNN's 20 us a call and its reordering cost more than
# it gains.
WORK = 2**24
SIDE = 128

# Of F.linear's time; what oneDNN must stay below to be taken.
MARGIN = 0.85
PRODUCTS = ("output", "input grad", "weight grad")

_ratios: dict[str, float] = {}
_race = threading.Lock()


class Linear(nn.Linear):
    """``nn.Linear``, faster where the processor allows; in all else the same.

    A tool that looks for the very class and no subclass, as ``torch.ao.quantization.quantize_dynamic`` does, finds it
    after ``layer.__class__ = nn.Linear``.

    Shapes:
        (..., in_features) -> (..., out_features).

    Example:
        >>> Linear(3, 5)(torch.zeros(2, 7, 3)).shape
        torch.Size([2, 7, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """``F.linear(input, weight, bias)``."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, product: str = "output") -> Tensor:
    """``F.linear``, by oneDNN where it can do the call and won the race for products of this kind.

    The gradients of a product that torch does are torch's as well: they are raced only where oneDNN won the output.
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or not _worthwhile(input, weight, bias) or ratio(product) >= MARGIN:
        return F.linear(input, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        return cast("Callable[..., Tensor]", _OneDNN.apply)(input, weight, bias)
    return _onednn(input, weight, bias)


def ratio(product: str) -> float:
    """OneDNN's time as a share of F.linear's, measured when first asked for; 0 or infinite where it is decided.

    Raises:
        ValueError: ``CLEARHEAD_LINEAR`` is neither torch nor onednn.
    """
    if product not in _ratios:
        with _race:
            if product not in _ratios:
                _ratios[product] = _decided(product)
    return _ratios[product]


class _OneDNN(torch.autograd.Function):
    """The gradients of a product are products, so that they can be differentiated like it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _onednn(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            linear(grad, weight.t(), product="input grad") if of_input else None,
            linear(rows.t(), input.reshape(-1, input.shape[-1]).t(), product="weight grad") if of_weight else None,
            rows.sum(dim=0) if of_bias else None,
        )


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")
    # It comes as a view of its rows, and a view out of an autograd function can't be changed in place.
    return torch.ops.aten._unsafe_view(output, output.shape) if output.ndim != 2 else output


def available() -> bool:
    """Whether this torch carries oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _worthwhile(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the call is large, of plain float32 tensors that fit, and nobody transforms or counts it."""
    if input.numel() * weight.shape[0] < WORK:
        return False
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(type(t) in (Tensor, nn.Parameter) and _is_plain(t) for t in tensors):
        return False
    inner = input.shape[-1]
    return (
        weight.shape[1:] == (inner,)
        and min(input.numel() // inner, *weight.shape) >= SIDE
        # OneDNN reads a bias as if it had no strides.
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and not transforming()
        # The vmap of torch.autograd.grad(is_grads_batched=True), older than torch.func.
        and not any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
        and not is_in_torch_dispatch_mode()
        and not torch.overrides.has_torch_function(tensors)
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(tensor: Tensor) -> bool:
    plain = (
        tensor.dtype == torch.float32 and tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested
    )
    return plain and (tensor.is_contiguous() or not _overlaps(tensor))


def _overlaps(tensor: Tensor) -> bool:
    """Whether rows share memory, as those of `Tensor.unfold` do: oneDNN refuses them. An expanded axis it reads."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _decided(product: str) -> float:
    forced = os.environ.get("CLEARHEAD_LINEAR", "")
    if forced not in ("", "torch", "onednn"):
        raise ValueError(f"CLEARHEAD_LINEAR must be torch or onednn, or not set, not {forced!r}.")
    if forced == "torch" or not available():
        return float("inf")
    return 0.0 if forced == "onednn" else race(F.linear, _onednn, product)


def race(
    theirs: Callable[[Tensor, Tensor], Tensor],
    ours: Callable[[Tensor, Tensor], Tensor],
    product: str,
    side: int = 256,
) -> float:
    """The time of `ours` as a share of that of `theirs`, on operands laid out as in that product.

    The third-best of nine alternating readings against the best: a busy machine delays now one and now the other,
    and one lucky reading must not decide. Infinite where it is too busy for nine in a tenth of a second.
    """
    a, b = (torch.ones(side, side, dtype=torch.float32, device="cpu") for _ in range(2))
    left, right = {"output": (a, b), "input grad": (a, b.t()), "weight grad": (a.t(), b.t())}[product]
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + 0.1
    with torch.no_grad():
        for _ in range(9):
            if time.perf_counter() > end:
                return float("inf")
            for run, readings in zip((theirs, ours), times, strict=True):
                start = time.perf_counter()
                run(left, right)
                readings.append(time.perf_counter() - start)
    return sorted(times[1])[2] / min(times[0])
