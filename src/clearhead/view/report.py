"""One self-contained HTML file that shows a model's attention, offline and safe to open.

The page is a template (`report.html`, `report.css`, `report_data.js`, `report.js`) plus a JSON payload. Text
enters the page only as JSON that the script inserts with `textContent`, or through `html.escape`; a
Content-Security-Policy allows the inlined style and script by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clearhead.view.text import visible_text

__all__ = ["LIMIT_BYTES", "Panel", "fits", "render"]

LIMIT_BYTES = 8 * 2**20
"""Up to this many bytes of 16-bit weights a page holds every weight; above it, pooled maps."""

_STEPS = 65534  # code 0 is kept for "hidden", so a visible weight has 65,535 codes
_HALF_SCALE = 2.0**15  # moves means far below float16's smallest normal number into its precise range

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Panel:
    """The attention of one layer, as plain tensors: exact weights, or pooled maps of a long text.

    A pooled map has n x n cells, cut as `adaptive_avg_pool2d` does: cell i covers the queries (or keys) from
    floor(i L / n) up to, not including, ceil((i + 1) L / n). A cell without any visible pair is hidden.

    Args:
        name: The module's name, for example `"encoder.layer.3.attention.self"`.
        visible: Which pair may attend, bool (B|1, H|1, L, S); pooled: which cell holds a visible pair,
            (B|1, H|1, n, n).
        weights: Exact mode: the weights (B, H, L, S). Hidden pairs may hold anything.
        mean: Pooled mode: the mean weight of each cell (B, H, n, n).
        maximum: Pooled mode: the largest weight of each cell (B, H, n, n).
        top: Pooled mode: each query's strongest keys, weights (B, H, L, k) and key indices (B, H, L, k),
            -1 where a query has fewer than k.
        entropy: The entropy of each row in nats (B, H, L).
        number: What the layer is called by, as in L3; None = its place in the page.
        heads: The same for each of its H heads, as in H1; None = their places.
    """

    name: str
    visible: Tensor
    weights: Tensor | None = None
    mean: Tensor | None = None
    maximum: Tensor | None = None
    top: tuple[Tensor, Tensor] | None = None
    entropy: Tensor | None = None
    number: int | None = None
    heads: Sequence[int] | None = None


def fits(layers: int, batch: int, heads: int, queries: int, keys: int) -> bool:
    """Return whether every weight fits in a page: 16 bits each, 8 MiB in all.

    Example:
        >>> fits(layers=6, batch=1, heads=12, queries=128, keys=128)
        True
        >>> fits(layers=6, batch=1, heads=12, queries=512, keys=512)
        False
    """
    return 2 * layers * batch * heads * queries * keys <= LIMIT_BYTES


def render(
    panels: Sequence[Panel],
    tokens: Sequence[Sequence[str]],
    *,
    key_tokens: Sequence[Sequence[str]] | None = None,
    title: str,
    notes: Sequence[str] = (),
) -> str:
    """Return the text of one HTML file that shows `panels`, which works offline and loads nothing.

    Args:
        panels: One per layer, all exact or all pooled, with the same B, L and S; H may differ.
        tokens: The labels of each sequence's queries: B lists of L.
        key_tokens: The labels of the keys, B lists of S, where they are not the queries (cross-attention).
        title: The heading of the page.
        notes: Sentences shown under the heading.

    Returns:
        The whole page. The same arguments give the same text.

    Raises:
        ValueError: Shapes disagree with each other or with the labels, or a visible weight lies outside 0..1.
    """
    if not panels:
        raise ValueError("A report needs at least one panel, one per attention layer; none was given.")
    pooled = panels[0].weights is None
    shapes = [_sizes(panel, pooled) for panel in panels]
    shared, last = ("(B, L, n, k)", 5) if pooled else ("(B, L, S)", 4)
    for panel, shape in zip(panels, shapes, strict=True):
        first, this = (sizes[:1] + sizes[2:last] for sizes in (shapes[0], shape))
        if this != first:
            raise ValueError(
                f"All panels share {shared}: {panels[0].name!r} has {first}, {panel.name!r} has {this}. "
                f"Record layers of one kind, as in record(..., layers='encoder')."
            )
    batch, _, queries, cells, top = shapes[0]
    _check_labels("tokens", tokens, batch, queries)
    what, key_labels = ("tokens", tokens) if key_tokens is None else ("key_tokens", key_tokens)
    keys = len(key_labels[0]) if pooled and key_labels else cells
    _check_labels(what, key_labels, batch, keys)
    payload = {
        "mode": "pooled" if pooled else "exact",
        "line": _mode_line(shapes, keys, pooled),
        "notes": [visible_text(note) for note in notes],
        "queries": queries,
        "keys": keys,
        "cells": cells if pooled else None,
        "top": top if pooled else None,
        "wide": keys >= 65536,
        "tokens": _labels(tokens),
        "keyTokens": None if key_tokens is None else _labels(key_tokens),
        "layers": [
            _layer(place, panel, shape, keys) for place, (panel, shape) in enumerate(zip(panels, shapes, strict=True))
        ],
    }
    return _page(title, payload)


def _labels(sequences: Sequence[Sequence[str]]) -> list[list[str]]:
    """A label made of spaces alone would be invisible on an axis, so they become the sign for a space."""
    return [
        [visible_text(label) if label.strip(" ") else "\u2420" * len(label) for label in sequence]
        for sequence in sequences
    ]


def _check_labels(what: str, labels: Sequence[Sequence[str]], batch: int, length: int) -> None:
    if len(labels) != batch:
        raise ValueError(
            f"{what} must hold a list of labels for each of the {batch} sequences, not for {len(labels)}: "
            f"{what}=[labels of the first, labels of the second, ...]."
        )
    for index, sequence in enumerate(labels):
        if isinstance(sequence, str):
            raise ValueError(f"{what}[{index}] must be a list of labels, not one string.")  # noqa: TRY004
        if len(sequence) != length:
            hint = " Cross-attention needs key_tokens as well." if what == "tokens" else ""
            raise ValueError(f"{what}[{index}] has {len(sequence)} labels for {length} positions.{hint}")


def _sizes(panel: Panel, pooled: bool) -> tuple[int, int, int, int, int]:
    """Check one panel's shapes; return (B, H, L, S, 0), or (B, H, L, n, k) of a pooled panel."""
    missing = [name for name in ("mean", "maximum", "top") if getattr(panel, name) is None]
    if panel.weights is not None and len(missing) < 3:
        raise ValueError(f"Panel {panel.name!r} has weights and pooled maps; give one of the two.")
    if panel.weights is None and missing:
        raise ValueError(f"Panel {panel.name!r} has no weights, so it needs {' and '.join(missing)} as well.")
    if (panel.weights is None) != pooled:
        raise ValueError(f"Panels are all exact or all pooled; {panel.name!r} differs from the first.")
    main = panel.mean if panel.weights is None else panel.weights
    if main is None or main.dim() != 4 or 0 in main.shape:
        got = None if main is None else tuple(main.shape)
        raise ValueError(f"Panel {panel.name!r} needs a map (B, H, rows, columns), none of them 0; got {got}.")
    batch, heads, rows, columns = main.shape
    queries, top = rows, 0
    if panel.top is not None and panel.maximum is not None:
        if rows != columns:
            raise ValueError(f"Panel {panel.name!r}: a pooled map is n x n, this one is {rows} x {columns}.")
        queries, top = tuple(panel.top[0].shape[-2:])
        for name, tensor in (("top[0]", panel.top[0]), ("top[1]", panel.top[1])):
            _check_shape(panel, name, tensor, (batch, heads, queries, top))
        _check_shape(panel, "maximum", panel.maximum, (batch, heads, rows, columns))
    if panel.entropy is not None:
        _check_shape(panel, "entropy", panel.entropy, (batch, heads, queries))
    if panel.heads is not None and len(panel.heads) != heads:
        raise ValueError(f"Panel {panel.name!r} has {heads} heads, and {len(panel.heads)} numbers for them.")
    mask = panel.visible
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != main.shape[2:]:
        wanted = f"({batch}|1, {heads}|1, {rows}, {columns})"
        raise ValueError(
            f"Panel {panel.name!r}: visible must be bool {wanted}, got {mask.dtype} {tuple(mask.shape)}."
        )
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise ValueError(f"Panel {panel.name!r}: visible {tuple(mask.shape)} does not fit {tuple(main.shape)}.")
    return batch, heads, queries, columns, top


def _check_shape(panel: Panel, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"Panel {panel.name!r}: {name} must be {shape}, got {tuple(tensor.shape)}.")


def _mode_line(shapes: Sequence[tuple[int, int, int, int, int]], keys: int, pooled: bool) -> str:
    """Say in words what the page holds, and what it had to leave out."""
    batch, _, queries, cells, top = shapes[0]
    heads = sum(shape[1] for shape in shapes)
    many = f"{batch} sequences, " if batch > 1 else ""
    scope = f"{many}{len(shapes)} layer{'s' * (len(shapes) > 1)}, {heads} head{'s' * (heads > 1)}"
    if not pooled:
        return (
            f"Exact weights: {scope}, {queries:,} queries × {keys:,} keys. "
            "Every weight is in this page, to 4 decimals."
        )
    size = 2 * batch * heads * queries * keys / 2**20
    return (
        f"Pooled maps: {scope}, {queries:,} queries × {keys:,} keys would take {size:,.0f} MiB, so a map "
        f"cell stands for about {queries / cells:.1f} queries × {keys / cells:.1f} keys ({cells} × {cells} "
        f"cells, their mean or maximum). Each query's {top} strongest keys are exact, to 4 decimals."
    )


def _layer(place: int, panel: Panel, shape: tuple[int, int, int, int, int], keys: int) -> dict[str, Any]:
    """Encode one panel: per sequence and head one base64 block, so the page decodes what it shows."""
    batch, heads = shape[:2]
    mask = panel.visible.expand(batch, heads, -1, -1)
    layer: dict[str, Any] = {
        "name": visible_text(panel.name),
        "heads": heads,
        "number": place if panel.number is None else panel.number,
        "numbers": list(range(heads) if panel.heads is None else panel.heads),
    }

    def blocks(encode: Callable[[int, int], _Array]) -> list[list[str]]:
        return [[_base64(encode(b, h)) for h in range(heads)] for b in range(batch)]

    def mapped(values: Tensor, code: Callable[[_Array], _Array]) -> list[list[str]]:
        return blocks(lambda b, h: _masked_codes(panel, values[b, h], mask[b, h], code))

    if panel.weights is not None:
        layer["weights"] = mapped(panel.weights, _fixed_point)
    if panel.mean is not None and panel.maximum is not None and panel.top is not None:
        weights, indices = panel.top
        if int(indices.min()) < -1 or int(indices.max()) >= keys:
            raise ValueError(
                f"Panel {panel.name!r}: top key indices must lie in -1..{keys - 1}, "
                f"got {int(indices.min())}..{int(indices.max())}."
            )
        layer["mean"] = mapped(panel.mean, _scaled_half)
        layer["maximum"] = mapped(panel.maximum, _scaled_half)
        layer["topWeights"] = blocks(
            lambda b, h: _masked_codes(panel, weights[b, h], indices[b, h] >= 0, _fixed_point)
        )
        width = np.uint32 if keys >= 65536 else np.uint16
        layer["topKeys"] = blocks(lambda b, h: (_numpy(indices[b, h]) + 1).astype(width))  # 0: no key
    if panel.entropy is not None:
        entropy = panel.entropy
        layer["entropy"] = blocks(lambda b, h: _numpy(entropy[b, h]).astype(np.float32))
        alive = mask.any(-1) if panel.top is None else (panel.top[1] >= 0).any(-1)
        total = torch.where(alive, entropy, 0.0).sum(-1)  # a query that sees nothing counts in no mean
        layer["meanEntropy"] = (total / alive.sum(-1).clamp(min=1)).tolist()
    return layer


def _masked_codes(panel: Panel, values: Tensor, visible: Tensor, code: Callable[[_Array], _Array]) -> _Array:
    """Return 16-bit codes: 0 where hidden, 1 for a visible zero, more for more."""
    seen = _numpy(visible)
    weights = np.where(seen, _numpy(values), 0.0)  # what is hidden may be NaN
    wrong = ~((weights >= -1e-3) & (weights <= 1.001))  # half precision rounds a little past 1
    if wrong.any():
        worst = weights[wrong].flat[0]
        raise ValueError(f"Panel {panel.name!r}: visible weights must lie in 0..1, got {worst}.")
    return np.where(seen, 1 + code(weights.clip(0.0, 1.0)).astype(np.uint16), 0).astype(np.uint16)


def _fixed_point(weights: _Array) -> _Array:
    return (weights * _STEPS).round()


def _scaled_half(weights: _Array) -> _Array:
    """Float16 bits grow with the value, so codes stay comparable; the scale keeps tiny means precise."""
    return (weights * _HALF_SCALE).astype(np.float16).view(np.uint16)


def _numpy(tensor: Tensor) -> _Array:
    plain = tensor.detach().cpu()
    array: _Array = (plain.to(torch.float64) if plain.is_floating_point() else plain).numpy()
    return array


def _base64(array: _Array) -> str:
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little_endian.tobytes()).decode("ascii")


def _json(payload: object) -> str:
    """JSON that no HTML parser can mistake: ASCII only, and without `<`, `>` or `&`."""
    text = json.dumps(payload, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(title: str, payload: object) -> str:
    """Fill the template in one pass, so that nothing inserted is taken for a placeholder."""
    page, style = _part("report.html"), _part("report.css")
    script = f'"use strict";\n{{\n{_part("report_data.js")}\n{_part("report.js")}}}\n'  # one block scope
    policy = (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(visible_text(title)),
        "style": style,
        "script": script,
        "data": _json(payload),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _part(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")  # the policy's hash is of the text as a browser reads it


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
