"""From what was seen in each layer to what the HTML report shows of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.masks import ALL, Mask, Tile
from clearhead.observe import Seen
from clearhead.view.report import Panel

Labels = Sequence[Sequence[str]]


def panels_of(layers: Sequence[tuple[str, Seen]]) -> list[Panel]:
    """A panel for each layer: its exact weights if they were kept, else its pooled maps.

    Raises:
        ValueError: nothing recorded, or a layer with neither.
    """
    if not layers:
        raise ValueError("nothing was recorded: run the model inside `with record(...)` first.")
    return [_panel(name, seen) for name, seen in layers]


def labels_for(labels: Labels | Sequence[str] | None, batch: int, length: int) -> Labels:
    """Labels for each batch item: one list is the only item's; None = the numbers 0, 1, ..."""
    if labels is None:
        return [[str(position) for position in range(length)]] * batch
    if labels and all(isinstance(label, str) for label in labels):
        return [[str(label) for label in labels]]
    return [list(item) for item in labels]


def _panel(name: str, seen: Seen) -> Panel:
    entropy = seen.get("entropy")
    if "weights" in seen and seen.observe.whole("weights"):
        weights: Tensor = seen.weights
        return Panel(name, _visible(seen.mask, *seen.sizes[2:]), weights=weights, entropy=entropy)
    if "pooled" in seen and "top_k" in seen:
        mean, maximum = seen.pooled
        top, keys = seen.top_k
        visible = _pooled_visible(seen.mask, *seen.sizes[2:], mean.shape[-1])
        return Panel(name, visible, mean=mean, maximum=maximum, top=(top, keys), entropy=entropy)
    raise ValueError(
        f"layer {name!r} has nothing to draw: record with Observe(weights=True), or with "
        f"Observe(pooled=256, top_k=8) for long texts. It has {', '.join(seen) or 'nothing'}."
    )


def _visible(mask: Mask | None, L: int, S: int) -> Tensor:
    return torch.ones(1, 1, L, S, dtype=torch.bool) if mask is None else mask.dense(L, S)


def _pooled_visible(mask: Mask | None, L: int, S: int, n: int) -> Tensor:
    """Which of n x n cells hold a visible pair: bool (B|1, H|1, n, n), cut as `adaptive_avg_pool2d` does."""
    if mask is None:
        return torch.ones(1, 1, n, n, dtype=torch.bool)
    rows = []
    for cell in range(n):
        queries = slice(cell * L // n, -(-(cell + 1) * L // n))
        tile = mask._tile(Tile(ALL, ALL, queries, ALL, L, S, mask.device or torch.device("cpu")))
        keys = tile.any(dim=2).expand(-1, -1, S)
        rows.append(F.adaptive_max_pool1d(keys.float(), n) > 0)
    return torch.stack(rows, dim=2)
