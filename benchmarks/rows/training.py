"""Forward and backward, against torch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.race import Pairs, Race, Row, Rows
from benchmarks.rows.forward import NEAR, inputs


def rows() -> Rows:
    bfloat16 = partial(training, 2048, dtype=torch.bfloat16)
    return [
        Row("training", "forward + backward, L=512", "SDPA", partial(training, 512), 0.48),
        Row("training", "forward + backward, L=2048", "SDPA", partial(training, 2048), 0.48),
        Row("dropout", "forward + backward, dropout 0.1, L=2048", "SDPA", partial(dropping, 2048), 0.15),
        Row("half", "bfloat16 forward + backward, L=2048", "SDPA, bfloat16", bfloat16, 0.70),
        Row("overhead", "(5, 2, 10, 4), forward + backward", "SDPA", tiny, 1.1),
    ]


def both(attention: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of the leaves."""
    out = attention(*leaves)
    return out, *torch.autograd.grad(out, leaves, upstream)


def training(L: int, dtype: torch.dtype = torch.float32) -> Race:
    return against_sdpa([x.to(dtype) for x in inputs(L)], NEAR[dtype])


def tiny() -> Race:
    return against_sdpa(list(torch.randn(3, 5, 2, 10, 4).unbind()), NEAR[torch.float32])


def against_sdpa(parts: list[Tensor], tolerance: float) -> Race:
    leaves, upstream = [x.requires_grad_() for x in parts], torch.randn_like(parts[2])
    return Race(
        partial(both, ch.attention, leaves, upstream),
        partial(both, F.scaled_dot_product_attention, leaves, upstream),
        tolerance=tolerance,
    )


def dropping(L: int) -> Race:
    """Each drops other weights, so what must agree is that it drops as many, and the same ones backward."""
    leaves = [x.requires_grad_() for x in inputs(L)]
    value, upstream = leaves[2], torch.randn_like(leaves[2])

    def pairs(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Pairs:
        # Scaled-up survivors widen what is summed: by sqrt(1 / 0.9), 5%, far more than the tolerance.
        for mine, other in zip(ours, theirs, strict=True):
            yield mine.std(), other.std()
        # The output is linear in the values: both sides of <upstream, out> = <dvalue, value> use the same weights.
        for out, _, _, dvalue in (ours, theirs):
            yield (dvalue * value).sum(-2), (upstream * out).sum(-2)

    return Race(
        partial(both, partial(ch.attention, dropout_p=0.1), leaves, upstream),
        partial(both, partial(F.scaled_dot_product_attention, dropout_p=0.1), leaves, upstream),
        pairs,
        tolerance=0.01,
    )
