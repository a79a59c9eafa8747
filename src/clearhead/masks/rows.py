"""What a mask leaves of whole rows and of coarse cells, without its L x S pairs ever existing at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.masks.base import Mask
from clearhead.masks.tiles import ALL, Tile

_PAIRS = 2**22  # looked at in one go, for each batch item and head that the mask tells apart


def living_rows(mask: Mask | None, L: int, S: int) -> Tensor:
    """Which queries see any key: bool (B|1, Hq|1, L).

    Example:
        >>> living_rows(Causal(), 4, 2).tolist()  # the last query is aligned with the last key
        [[[False, False, True, True]]]
    """
    if mask is None or S == 0:
        return torch.full((1, 1, L), S > 0)
    run, rest = mask._split(L, S)
    if rest is None:
        first, behind = run.ends(L, S, mask.device)
        return (first < behind)[:, None]
    step = max(1, _PAIRS // S)
    spans = [slice(row, min(row + step, L)) for row in range(0, max(L, 1), step)]
    return torch.cat([_tile(mask, span, L, S).any(dim=-1) for span in spans], dim=-1)


def visible_cells(mask: Mask | None, L: int, S: int, n: int) -> Tensor:
    """Which of n x n cells hold a visible pair: bool (B|1, Hq|1, n, n).

    Cell i covers [floor(i L / n), ceil((i + 1) L / n)) of the queries, as `adaptive_avg_pool2d` cuts; so the keys.

    Example:
        >>> visible_cells(Causal(), 6, 6, 2).tolist()
        [[[[True, False], [True, True]]]]
    """
    if mask is None:
        return torch.ones(1, 1, n, n, dtype=torch.bool)
    spans = [slice(cell * L // n, -(-(cell + 1) * L // n)) for cell in range(n)]
    run, rest = mask._split(L, S)
    if rest is None:
        first, behind = (end[..., None] for end in run.ends(L, S, mask.device))
        cells = torch.arange(n, device=first.device)
        starts, ends = cells * S // n, -(-(cells + 1) * S // n)
        meets = (first < behind) & (first < ends) & (behind > starts)  # (B|1, L, n)
        return torch.stack([meets[:, span].any(dim=1) for span in spans], dim=1)[:, None]
    keys = [_tile(mask, span, L, S).any(dim=2) for span in spans]
    return torch.stack([F.adaptive_max_pool1d(seen.float(), n) > 0 for seen in keys], dim=2)


def _tile(mask: Mask, queries: slice, L: int, S: int) -> Tensor:
    """These rows of the mask: bool (B|1, Hq|1, rows, S)."""
    tile = mask._tile(Tile(ALL, ALL, queries, ALL, L, S, mask.device or torch.device("cpu")))
    return tile.expand(-1, -1, queries.stop - queries.start, S)
