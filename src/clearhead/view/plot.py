"""Heat maps with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.view.text import visible_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LABELS = 40  # more than that on an axis can't be read


def plot_weights(
    weights: Tensor,
    visible: Tensor,
    titles: Sequence[str],
    tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
) -> Figure:
    """A grid of heat maps, rows = queries, columns = keys; pairs hidden by the mask are grey.

    Args:
        weights: (maps, L, S).
        visible: bool, (maps, L, S).
        titles: one for each map.
        tokens: L labels, or None for numbers.
        key_tokens: S labels, or None for numbers.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: label counts that don't fit.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'clearhead[view]'.") from None
    _, L, S = weights.shape
    for name, labels, size in (("tokens", tokens, L), ("key_tokens", key_tokens, S)):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{name} must be {size} labels, one for each position, not {len(labels)}.")
    columns = min(4, len(titles)) or 1
    rows = math.ceil(len(titles) / columns) or 1
    figure = Figure(figsize=(3.6 * columns + 0.6, 3.4 * rows), layout="constrained")
    # NaN cells show the axes' background: that is what "hidden" looks like.
    shown = weights.detach().float().cpu().masked_fill(~visible.cpu(), float("nan")).numpy()
    image = None
    for index, title in enumerate(titles):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_facecolor("0.85")
        image = axes.imshow(shown[index], vmin=0.0, vmax=1.0, cmap="Blues", aspect="auto", interpolation="none")
        axes.set_title(title, parse_math=False, fontsize=10)
        _label(axes, "y", tokens, L)
        _label(axes, "x", key_tokens, S)
        axes.set_ylabel("query (from)")
        axes.set_xlabel("key (to)")
    if image is not None:
        figure.colorbar(image, ax=figure.axes, label="weight", shrink=0.8)
    return figure


def _label(axes: Axes, which: str, labels: Sequence[str] | None, size: int) -> None:
    step = max(1, math.ceil(size / _MAX_LABELS))
    positions = range(0, size, step)
    texts = [str(p) if labels is None else visible_text(labels[p]) for p in positions]
    # Token text may hold a dollar sign: it's text, not mathematics.
    if which == "y":
        axes.set_yticks(list(positions), texts, fontsize=8, parse_math=False)
    else:
        axes.set_xticks(list(positions), texts, fontsize=8, rotation=90, parse_math=False)
