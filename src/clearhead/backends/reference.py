"""The oracle: the formula of attention as it stands in the paper, on whole L x S matrices.

    context = softmax(scale * query key^T + bias, over the visible keys) value

Vaswani et al. 2017, equation 1; with scores capped by a tanh (arXiv 2408.00118) and with a sink in the softmax (arXiv
2309.17453) where that is asked. Short and slow on purpose; in float64 the other backends are measured by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.base import Backend
from clearhead.backends.dropout import kept
from clearhead.checks import Request
from clearhead.masks import ALL, Tile


class Reference(Backend):
    """Materialises everything; does everything."""

    name = "reference"

    def reasons(self, request: Request) -> list[str]:
        """None."""
        return []

    def run(self, request: Request) -> Tensor:
        """The formula."""
        query, key, value = (tensor.to(request.acc_dtype) for tensor in (request.query, request.key, request.value))
        B, H, L, S = request.sizes
        key = key.repeat_interleave(request.group, dim=1)
        value = value.repeat_interleave(request.group, dim=1)

        visible = torch.ones(B, H, L, S, dtype=torch.bool, device=query.device)
        if request.mask is not None:
            visible = visible & request.mask.dense(L, S).to(query.device)
        bias = None if request.attn_bias is None else request.attn_bias.to(query.dtype)
        if bias is not None:
            visible = visible & (bias != -torch.inf)

        scores = request.scale * (query @ key.transpose(-2, -1))
        if request.softcap is not None:
            # Hidden scores that overflow have no slope: 0 x NaN would be their gradient.
            scores = request.softcap * torch.tanh(scores.masked_fill(~visible, 0.0) / request.softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~visible, -torch.inf)
        if request.sinks is not None:
            sinks = request.sinks.to(scores.dtype)[:, None, None].expand(B, H, L, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        # A dead row has no maximum: it is given zeros to exponentiate, and then zero weights.
        alive = visible.any(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~alive, 0.0), dim=-1)[..., :S].masked_fill(~visible, 0.0)

        if request.dropout_p > 0:
            keep = kept(request, Tile(ALL, ALL, ALL, ALL, L, S, query.device))
            # With p = 1 nothing is kept, and the factor never counts.
            weights = torch.where(keep, weights / (1 - request.dropout_p or 1.0), 0.0)
        return (weights @ value).to(request.query.dtype)
