"""`Call`: one call of an attention layer, whoever wrote the layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from clearhead.masks import Mask


class Call(NamedTuple):
    """One call of an attention layer, in clearhead's words."""

    module: nn.Module
    query: Tensor  # (B, Hq, L, E)
    key: Tensor  # (B, Hkv, S, E)
    value: Tensor  # (B, Hkv, S, Ev)
    mask: Mask | None
    attn_bias: Tensor | None
    scale: float | None
    context: Tensor | None  # (B, Hq, L, Ev); None = the layer doesn't show it
