"""Which weights dropout keeps: a hash of (seed, batch, head, query, key), so any part of it can be made again.

No state is kept: forward, recomputed backward and observation of the same call see the same mask, however the
work is cut into tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.checks import Request
from clearhead.masks import Tile, positions


def kept(request: Request, tile: Tile) -> Tensor:
    """Which weights of the tile are kept, each with probability 1 - dropout_p: bool, broadcastable to its shape."""
    B, H, L, S = request.sizes
    device = tile.device
    if request.dropout_p == 1.0:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    assert request.seed is not None  # a request with dropout has one
    seed = request.seed.to(device=device, dtype=torch.int32)
    b = positions(tile.batch, B, device).int()[:, None, None, None]
    h = positions(tile.heads, H, device).int()[:, None, None]
    q = positions(tile.queries, L, device).int()[:, None]
    k = positions(tile.keys, S, device).int()
    row = _mix(_mix(_mix(seed[0] ^ b) ^ h) ^ q) ^ seed[1]
    # Uniform on the int32 range, so a share of p lies below this threshold.
    threshold = min(round(request.dropout_p * 2**32), 2**32 - 1) - 2**31
    return _mix(_mix(row) ^ k) >= threshold


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit flips each output bit about half the time.

    Two rounds of xor-shift and odd multiplication, constants by C. Wellons' search ("hash-prospector",
    lowbias32). Torch's shift of signed integers copies the sign, hence the masks.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
