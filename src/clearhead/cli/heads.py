"""The most telling heads of a part of a model, the strongest links between words, and both in plain words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.cli.parts import Part
from clearhead.cli.reading import Reading
from clearhead.heads import Head

Wanted = Callable[[Tensor, Tensor], Tensor]  # of query and key positions (B, H, L, k), which links count

MUCH = 0.3  # of a head's weight: the bound of Gu et al. 2024 (arXiv 2410.10781) for sink heads


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


def telling(part: Part, *, most: int = 2) -> list[Telling]:
    """For each kind the heads that show it most, as means over the real tokens of all texts."""
    kinds: list[tuple[str, str, str, Wanted]] = [
        ("most focused", "focused", " nats", _anything),
        ("most spread", "diffuse", " nats", _anything),
    ]
    if part.queries is part.keys:
        kinds += [
            ("previous token", "previous", "", partial(_at_distance, 1)),
            ("next token", "next", "", partial(_at_distance, -1)),
            ("same token", "self", "", partial(_at_distance, 0)),
            ("duplicate token", "duplicate", "", partial(_at_token, part, 0)),
            ("induction", "induction", "", partial(_at_token, part, 1)),
        ]
    kinds += [(f"to {name}", f"mass.{name}", "", partial(_at_key, where)) for name, where in part.keys.names.items()]
    if not part.keys.names:
        kinds.append(("to the first token", "sink", "", partial(_at_key, _first(part.keys.real))))
    found = []
    for name, kind, unit, wanted in kinds:
        for head in ranked(part, kind)[:most]:
            if kind in ("focused", "diffuse") or head.score > 0:  # a causal head never looks at the next token
                shown = _links(part, wanted, head.number, head.head)[:3]
                found.append(Telling(name, head.number, head.head, head.score, unit, shown))
    return found


def ranked(part: Part, kind: str) -> list[Head]:
    """As `Recording.find`, with none where nothing was recorded that tells.

    Duplicate-token and induction heads are told by tokens that occurred before: their scores are means over these.
    """
    found = part.find(kind)
    if not found or kind not in ("duplicate", "induction"):
        return found
    able = int(_repeats(part.keys, 0 if kind == "duplicate" else 1).sum())
    share = able / max(1, int(part.keys.real.sum()))
    return [head._replace(score=head.score / share) for head in found] if able else []


def in_words(part: Part, *, most: int = 5) -> list[str]:
    """Which heads are sinks, previous-token, duplicate-token and induction heads: a line each, with their scores."""
    total = len(part.rows)
    whom = {
        "sink": ("Sink", "look at the first token"),
        "previous": ("Previous-token", "look at the token before"),
        "duplicate": ("Duplicate-token", "look at earlier copies of their token"),
        "induction": ("Induction", "look at what came right after earlier copies of their token"),
    }
    lines = []
    for kind, (name, does) in whom.items():
        found = ranked(part, kind)
        if not found:
            if kind == "duplicate" and part.find(kind):
                lines.append(
                    "No token of the text occurs twice, which would show duplicate-token and induction heads."
                )
            continue
        heads = [head for head in found if head.score > MUCH]
        shown = ", ".join(f"L{head.number}H{head.head} {head.score:.2f}" for head in (heads or found[:1])[:most])
        many = f"{len(heads)} of {total}: {shown}" if heads else f"none of {total}; the nearest is {shown}"
        more = " and more" if len(heads) > most else ""
        lines.append(f"{name} heads, which {does} with more than {MUCH} of their weight: {many}{more}.")
    return lines


def links(part: Part, *, most: int = 10) -> list[Link]:
    """Of each head the strongest link between words that are neither the same nor neighbours; strongest first."""

    def apart(query: Tensor, key: Tensor) -> Tensor:
        here, there = _at(part.queries.words, query), _at(part.keys.words, key)
        far = (here - there).abs() > 1 if part.queries is part.keys else torch.ones_like(here, dtype=torch.bool)
        # What a decoder gives its first token says nothing about the word that happens to stand there.
        sink = _at(_first(part.keys.real), key) if not part.keys.names else torch.zeros_like(far)
        return (here >= 0) & (there >= 0) & far & ~sink

    best = [_links(part, apart, row["number"], row["head"])[:1] for row in part.rows]
    return sorted((link for found in best for link in found), key=lambda link: -link.weight)[:most]


def _links(part: Part, wanted: Wanted, number: int, head: int) -> list[Link]:
    """Links of one head from real tokens that are `wanted` (by query and key positions), strongest first."""
    weights, keys = (found[:, head : head + 1] for found in part.seen(number).top_k)  # (B, 1, L, k)
    query = torch.arange(weights.shape[2])[:, None].expand_as(keys)
    fits = (keys >= 0) & part.queries.real[:, None, :, None] & wanted(query, keys.long().clamp_min(0))
    scores = weights.masked_fill(~fits, -1.0).flatten()
    top = scores.topk(min(32, scores.numel()))
    found = []
    for weight, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        if weight >= 0:
            text, _, token, rank = (int(i) for i in torch.unravel_index(torch.tensor(flat), weights.shape))
            found.append(Link(number, head, text, token, int(keys[text, 0, token, rank]), weight))
    return found


def _repeats(reading: Reading, shift: int) -> Tensor:
    """Which real tokens occurred before, so that a real one stands `shift` behind the earlier place: bool (B, L)."""
    found = torch.zeros_like(reading.real)
    for item, (ids, real) in enumerate(zip(reading.inputs["input_ids"].tolist(), reading.real.tolist(), strict=True)):
        before: set[int] = set()
        for place in range(len(ids)):
            if place > shift and real[place - 1] and real[place - 1 - shift]:
                before.add(ids[place - 1 - shift])
            found[item, place] = real[place] and ids[place] in before
    return found


def _first(real: Tensor) -> Tensor:
    """The first real token of each text: bool (B, L)."""
    return torch.nn.functional.one_hot(real.int().argmax(dim=1), real.shape[1]).bool()


def _anything(_: Tensor, key: Tensor) -> Tensor:
    return torch.ones_like(key, dtype=torch.bool)


def _at_distance(distance: int, query: Tensor, key: Tensor) -> Tensor:
    return key == query - distance


def _at_token(part: Part, shift: int, query: Tensor, key: Tensor) -> Tensor:
    ids = part.keys.inputs["input_ids"]
    return (key >= shift) & (key < query) & (_at(ids, key - shift) == _at(ids, query))


def _at_key(where: Tensor, _: Tensor, key: Tensor) -> Tensor:
    return _at(where, key)


def _at(where: Tensor, positions: Tensor) -> Tensor:
    """`where` (B, L) read at positions (B, H, L, k)."""
    return where[torch.arange(where.shape[0])[:, None, None, None], positions.clamp_min(0)]
