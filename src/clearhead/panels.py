"""From what was seen in each layer to what the HTML report shows of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
        return Panel(name, seen.visible(), weights=weights, entropy=entropy)
    if "pooled" in seen and "top_k" in seen:
        mean, maximum = seen.pooled
        top, keys = seen.top_k
        return Panel(name, seen.visible(mean.shape[-1]), mean=mean, maximum=maximum, top=(top, keys), entropy=entropy)
    raise ValueError(
        f"layer {name!r} has nothing to draw: record with Observe(weights=True), or with "
        f"Observe(pooled=256, top_k=8) for long texts. It has {', '.join(seen) or 'nothing'}."
    )
