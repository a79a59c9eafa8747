"""State dicts and parameters of other layouts: packed projections, and torch's own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def from_other_layouts(mha: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename and cut the entries of other layouts in a state dict that is about to be loaded.

    Packed rows stand in the order query, key, value; what doesn't fit is left as it is, for torch to name.
    """
    errors: list[str] = rest[-1]

    def put(name: str, parts: dict[str, Tensor]) -> None:
        if twice := [part for part in parts if part in state]:
            errors.append(f"{name} and {', '.join(twice)} say the same twice: leave one of them out.")
        else:
            del state[name]
            state.update(parts)

    names = ("q_proj", "k_proj", "v_proj")
    projections = [mha.get_submodule(name) for name in names]
    rows = [p.out_features if isinstance(p, nn.Linear) else 0 for p in projections]
    for kind in ("weight", "bias"):
        for packed in (f"{prefix}in_proj_{kind}", f"{prefix}qkv_proj.{kind}"):
            tensor = state.get(packed)
            if isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape[0] == sum(rows):
                parts = zip(names, tensor.split(rows), strict=True)
                put(packed, {f"{prefix}{name}.{kind}": part for name, part in parts})
    for name in names:
        if (old := f"{prefix}{name}_weight") in state:
            put(old, {f"{prefix}{name}.weight": state[old]})


def weights_in(module: nn.MultiheadAttention) -> list[nn.Parameter]:
    """The input weights of torch's module: one packed parameter, or three."""
    if module.in_proj_weight is not None:
        return [module.in_proj_weight]
    return [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]


def copy_parameters(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy parameters, several into a packed one; what is frozen stays frozen, packed if all its parts are."""
    if len(targets) == 1:
        trainable = any(source.requires_grad for source in sources)
        sources = [torch.cat([source.detach() for source in sources]).requires_grad_(trainable)]
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
            target.requires_grad_(source.requires_grad)
