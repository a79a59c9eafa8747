"""Structure in the masks that ``torch.nn.MultiheadAttention`` is given: True = hidden, or floats to add."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.masks.values import at_hand

ROWS = 512  # compared at a time, so that nothing as large as the mask is made


def is_causal(mask: Tensor) -> bool:
    """Whether it hides the future and does nothing else."""
    if mask.ndim != 2 or mask.requires_grad or not at_hand(mask):
        return False
    for start in range(0, mask.shape[0], ROWS):
        rows = mask[start : start + ROWS]
        hidden = rows if rows.dtype == torch.bool else rows == -torch.inf
        if not torch.equal(hidden, torch.ones_like(hidden).triu(start + 1)):
            return False
        if rows is not hidden and bool(rows.masked_fill(hidden, 0.0).any()):
            return False
    return True


def as_flags(mask: Tensor) -> Tensor:
    """Floats of 0 and -inf only as bool, since torch's layers hand flags on so; all else as it is."""
    if not mask.is_floating_point() or mask.requires_grad or not at_hand(mask):
        return mask
    hidden = mask == -torch.inf
    return hidden if bool((hidden | (mask == 0)).all()) else mask
