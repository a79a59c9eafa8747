"""Statistics of a tile that are more than a sum over its keys: each takes weights (b, h, q, k), hidden ones 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pattern_weight(weights: Tensor, allowed: Tensor) -> Tensor:
    """The weight on the pairs that a pattern allows: (b, h, q)."""
    return weights.masked_fill(~allowed, 0.0).sum(dim=-1)


def contribution(weights: Tensor, value: Tensor, spoilt: Tensor | None, visible: Tensor | None) -> Tensor:
    """``sum_i w_ij <v_j, o_i> / ||o_i||^2``: (b, h, k).

    It is ``<v_j, sum_i w_ij u_i>`` with ``u_i = o_i / ||o_i||^2``: two products and no third axis.

    Args:
        weights: (b, h, q, k).
        value: (b, hkv, k, Ev), finite.
        spoilt: bool (b, h, q), queries that see something non-finite: what they see gets NaN. None = none.
        visible: bool, broadcastable to the weights; None = everything.
    """
    if value.shape[-1] == 0:
        value = F.pad(value, (0, 1))
    if spoilt is not None:
        weights = weights.masked_fill(spoilt[..., None], 0.0)
    shared = value.shape[1]
    grouped = weights.unflatten(1, (shared, -1))  # the heads that share a value side by side
    values = value.to(weights.dtype)[:, :, None]
    context = grouped @ values
    # Scaled to a largest number of 1, so that no square is too small or too large; a factor that cancels.
    size = context.detach().abs().amax(dim=-1, keepdim=True)
    scaled = context / torch.where(size == 0, 1.0, size)
    square = (scaled * scaled).sum(dim=-1, keepdim=True)
    share = scaled / torch.where(size == 0, 1.0, square * size)
    found: Tensor = ((grouped.transpose(-2, -1) @ share) * values).sum(dim=-1).flatten(1, 2)
    if spoilt is None:
        return found
    reached = spoilt[..., None].expand_as(weights)
    return found.masked_fill((reached if visible is None else reached & visible).any(dim=-2), torch.nan)


def disagreement(weights: Tensor, visible: Tensor | None, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence of every two heads, summed over the queries alive in both, and their number.

    Both (b, h, h). One head against all at a time: never h x h maps. What goes to the sinks, the rest (b, h, q),
    counts as one more key.
    """
    b, h, q, _ = weights.shape
    alive = weights.new_ones(b, h, q)
    if visible is not None:
        alive = alive * visible.any(dim=-1)
    if rest is not None:
        weights = torch.cat([weights, rest[..., None]], dim=-1)
    own = _entropy(weights)
    sums = []
    for head in range(h):
        mixed = _entropy((weights[:, head : head + 1] + weights) / 2)
        apart = mixed - (own[:, head : head + 1] + own) / 2
        sums.append((apart * (alive[:, head : head + 1] * alive)).sum(dim=-1))
    return torch.stack(sums, dim=1), alive @ alive.transpose(-2, -1)


def _entropy(weights: Tensor) -> Tensor:
    # Clamped, so that neither 0 log 0 nor its gradient is NaN.
    return -(weights * weights.clamp_min(torch.finfo(weights.dtype).tiny).log()).sum(dim=-1)
