"""What a call leaves to do: tiles of rows, each with the keys that its queries could see at all.

A tile is small (`TILE_ELEMENTS` scores), so whatever a backend keeps for a tile, its memory stays O(L). The
tiles depend on shapes and on the mask's host-side numbers only: never on what is observed, never on a tensor.
"""

from __future__ import annotations

import torch

from clearhead.checks import Request
from clearhead.masks import ALL, Tile

TILE_ELEMENTS = 2**19  # scores at a time: 2 MiB in float32, which stays in the cache
MAX_ROWS = 256  # beyond that a matmul gains nothing, and a causal tile would compute more hidden scores
MIN_ROWS = 8


def tiles(request: Request, maps: int | None = None) -> list[Tile]:
    """Cut the call into tiles, in the order of batch and queries.

    Args:
        request: the call.
        maps: how many L x S maps the caller materialises for each batch item; None = one for each query head.

    Returns:
        At least one tile; together they cover every query once. ``tile.keys`` is the range of keys that
        any of its queries may see; where they see none, one hidden key.
    """
    B, H, L, S = request.sizes
    if torch.compiler.is_exporting():
        # An exported program is for any length: it can't have a loop over tiles.
        return [Tile(slice(0, B), ALL, slice(0, L), slice(0, S), L, S, request.query.device)]
    per_row = max(1, (H if maps is None else maps) * S)
    items = max(1, min(B, TILE_ELEMENTS // (MIN_ROWS * 8 * per_row)))
    rows = max(MIN_ROWS, min(MAX_ROWS, L, TILE_ELEMENTS // (items * per_row)))
    found = []
    for item in range(0, max(B, 1), items):
        for row in range(0, max(L, 1), rows):
            queries = range(row, min(L, row + rows))
            keys = range(S) if request.mask is None else request.mask._reach(queries, L, S)
            keys = keys or range(min(1, S))  # a hidden key is easier to work with than none
            found.append(
                Tile(
                    slice(item, min(B, item + items)),
                    ALL,
                    slice(queries.start, queries.stop),
                    slice(keys.start, keys.stop),
                    L,
                    S,
                    request.query.device,
                )
            )
    return found
