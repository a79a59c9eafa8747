"""From what was seen in each layer to what the HTML report shows of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clearhead.observe import Seen
from clearhead.view.report import Panel

Labels = Sequence[Sequence[str]]


def panels_of(
    layers: Sequence[tuple[str, Seen]], *, numbers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> list[Panel]:
    """A panel for each layer: its exact weights if they were kept, else its pooled maps.

    Args:
        layers: names, and what was seen of each.
        numbers: what each layer is called by; None = 0, 1, ...
        heads: which heads to show; None = all that were kept.

    Raises:
        ValueError: nothing recorded, or a layer with neither.
    """
    if not layers:
        raise ValueError("nothing was recorded: run the model inside `with record(...)` first.")
    called = range(len(layers)) if numbers is None else numbers
    return [_panel(name, seen, number, heads) for number, (name, seen) in zip(called, layers, strict=True)]


def labels_for(labels: Labels | Sequence[str] | None, batch: int, length: int) -> Labels:
    """Labels for each batch item: one list is the only item's; None = the numbers 0, 1, ..."""
    if labels is None:
        return [[str(position) for position in range(length)]] * batch
    if not isinstance(labels, Sequence):
        raise TypeError(f"tokens takes a list of labels for each batch item, not {type(labels).__name__}.")
    if labels and all(isinstance(label, str) for label in labels):
        return [[str(label) for label in labels]]
    rows = [list(item) for item in labels]
    wrong = next((label for row in rows for label in row if not isinstance(label, str)), None)
    if wrong is not None:
        raise TypeError(
            f"tokens takes labels as text, as tokenizer.convert_ids_to_tokens gives them, not {type(wrong).__name__}."
        )
    return rows


def _panel(name: str, seen: Seen, number: int, heads: Sequence[int] | None) -> Panel:
    H = seen.sizes[1]
    kept = seen.whole_heads
    shown = kept if heads is None and kept is not None else list(range(H) if heads is None else heads)
    entropy = seen.entropy[:, shown] if "entropy" in seen else None
    if kept is not None:
        weights: Tensor = seen.weights[:, [kept.index(head) for head in shown]]
        return Panel(name, _of(seen.visible(), shown), weights=weights, entropy=entropy, number=number, heads=shown)
    if "pooled" in seen and "top_k" in seen:
        mean, maximum = (part[:, shown] for part in seen.pooled)
        top, keys = (part[:, shown] for part in seen.top_k)
        visible = _of(seen.visible(mean.shape[-1]), shown)
        return Panel(
            name, visible, mean=mean, maximum=maximum, top=(top, keys), entropy=entropy, number=number, heads=shown
        )
    raise ValueError(
        f"layer {name!r} has nothing to draw: record with Observe(weights=True), or with "
        f"Observe(pooled=256, top_k=8) for long texts. It has {', '.join(seen) or 'nothing'}."
    )


def _of(visible: Tensor, heads: list[int]) -> Tensor:
    return visible if visible.shape[1] == 1 else visible[:, heads]
