"""The most telling heads of a recording, and the strongest links between words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.cli.reading import Reading
from clearhead.observe import Observe
from clearhead.recording import Recording

Wanted = Callable[[Tensor, Tensor], Tensor]  # of query and key positions (B, H, L, k), which links count

OFFSETS = (1, -1, 0)  # previous, next, same
TOP_K = 8


class Link(NamedTuple):
    """One weight: who looks at whom."""

    layer: int
    head: int
    text: int
    query: int
    key: int
    weight: float


class Telling(NamedTuple):
    """A head that does one thing more than the others."""

    kind: str
    layer: int
    head: int
    score: float
    unit: str
    links: list[Link]


def statistics(reading: Reading, *, exact: bool) -> Observe:
    """What `telling` and `links` need, and the weights of every pair or, for long texts, pooled maps."""
    side = max(32, 256 // int(len(reading.texts) ** 0.5))
    return Observe(
        entropy=True,
        max_weight=True,
        distance=True,
        received=True,
        offsets=OFFSETS,
        mass=reading.names or None,
        top_k=TOP_K,
        weights=exact,
        pooled=None if exact else side,
    )


def telling(recording: Recording, reading: Reading, *, most: int = 2) -> list[Telling]:
    """For each kind the heads that show it most, as means over the real tokens of all texts."""
    real = reading.real
    entropy = _mean(torch.stack([seen.entropy for seen in recording.values()]), real)
    offsets = torch.stack([seen.offsets for seen in recording.values()])
    found: list[Telling] = []

    def add(kind: str, scores: Tensor, unit: str, wanted: Wanted, sign: int = 1) -> None:
        order = (sign * scores.flatten()).argsort(descending=True, stable=True)[:most]
        for flat in order.tolist():
            layer, head = divmod(flat, scores.shape[1])
            links = _links(recording, reading, wanted, layers=[layer], heads=[head])[:3]
            found.append(Telling(kind, layer, head, float(scores[layer, head]), unit, links))

    add("most focused", entropy, " nats", _anything, sign=-1)
    add("most spread", entropy, " nats", _anything)
    for index, (kind, distance) in enumerate(
        zip(("previous token", "next token", "same token"), OFFSETS, strict=True)
    ):
        there = real & _shifted(real, distance)
        scores = _mean(offsets[..., index], there)
        add(kind, scores, "", partial(_at_distance, distance))
    for name, where in reading.names.items():
        scores = _mean(torch.stack([seen.mass[name] for seen in recording.values()]), real)
        add(f"to {name}", scores, "", partial(_at_key, where))
    return found


def links(recording: Recording, reading: Reading, *, most: int = 10) -> list[Link]:
    """Of each head the strongest link between words that are neither the same nor neighbours; strongest first."""

    def apart(query: Tensor, key: Tensor) -> Tensor:
        here, there = _at(reading.words, query), _at(reading.words, key)
        return (here >= 0) & (there >= 0) & ((here - there).abs() > 1)

    best: dict[tuple[int, int], Link] = {}
    for layer, seen in enumerate(recording.values()):
        for head in range(seen.sizes[1]):
            for link in _links(recording, reading, apart, layers=[layer], heads=[head])[:1]:
                best[layer, head] = link
    return sorted(best.values(), key=lambda link: -link.weight)[:most]


def _links(
    recording: Recording,
    reading: Reading,
    wanted: Wanted,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
) -> list[Link]:
    """Links from real tokens that are `wanted` (by query and key positions), strongest first."""
    found: list[Link] = []
    for layer, seen in enumerate(recording.values()):
        if layers is not None and layer not in layers:
            continue
        weights, keys = seen.top_k  # (B, H, L, k)
        if heads is not None:
            weights, keys = weights[:, heads], keys[:, heads]
        query = torch.arange(weights.shape[2])[:, None].expand_as(keys)
        fits = (keys >= 0) & reading.real[:, None, :, None] & wanted(query, keys.long().clamp_min(0))
        scores = weights.masked_fill(~fits, -1.0).flatten()
        top = scores.topk(min(32, scores.numel()))
        for weight, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if weight < 0:
                break
            text, head, token, rank = (int(i) for i in torch.unravel_index(torch.tensor(flat), weights.shape))
            key = int(keys[text, head, token, rank])
            found.append(Link(layer, head if heads is None else heads[head], text, token, key, weight))
    return sorted(found, key=lambda link: -link.weight)


def _anything(_: Tensor, key: Tensor) -> Tensor:
    return torch.ones_like(key, dtype=torch.bool)


def _at_distance(distance: int, query: Tensor, key: Tensor) -> Tensor:
    return key == query - distance


def _at_key(where: Tensor, _: Tensor, key: Tensor) -> Tensor:
    return _at(where, key)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean of (layers, B, H, L) over the tokens where (B, L) holds: (layers, H)."""
    chosen = where[:, None].to(values.dtype)
    return (values * chosen).sum(dim=(1, 3)) / chosen.sum().clamp_min(1.0)


def _shifted(real: Tensor, distance: int) -> Tensor:
    """Whether the token `distance` to the left is real, too."""
    moved = real.roll(distance, dims=1)
    if distance > 0:
        moved[:, :distance] = False
    elif distance < 0:
        moved[:, distance:] = False
    return moved


def _at(where: Tensor, positions: Tensor) -> Tensor:
    """`where` (B, L) read at positions (B, H, L, k)."""
    return where[torch.arange(where.shape[0])[:, None, None, None], positions.clamp_min(0)]
