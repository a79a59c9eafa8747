"""Statistics in the same pass: against the call without them, and against keeping the weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from benchmarks.race import Pairs, Race, Row, Rows
from benchmarks.rows.forward import inputs

STATISTICS: dict[str, Any] = {
    "lse": True,
    "entropy": True,
    "max_weight": True,
    "received": True,
    "distance": True,
}
FIVE = "lse, entropy, max, received, distance"


def rows() -> Rows:
    unobserved, kept = "itself, not looking", "softmax(QK)V, keeps weights"
    same = "the same statistics by hand"
    return [
        Row("looking", f"{FIVE}, L=2048", unobserved, partial(looking, 2048), 1.06),
        Row("looking", "top_k=8 besides, L=2048", unobserved, partial(looking, 2048, top_k=8), 1.40),
        Row("weights", "output + these, L=4096, dense", kept, partial(keeping, 4096), 0.20, memory=1 / 50),
        Row("weights", "output + these, L=4096, causal", kept, partial(keeping, 4096, True), 0.10, memory=1 / 50),
        Row("weights", "output + these, L=2048, dense", same, partial(computing, 2048)),
    ]


def looking(L: int, **more: Any) -> Race:
    q, k, v = inputs(L)
    observe = ch.Observe(**STATISTICS, **more)

    def pairs(ours: tuple[Tensor, ch.Seen], theirs: Tensor) -> Pairs:
        if not torch.equal(ours[0], theirs):
            raise AssertionError("looking changed the output")
        return first_head(q, k, v, ours)

    return Race(partial(ch.attention, q, k, v, observe=observe), partial(ch.attention, q, k, v), pairs)


def keeping(L: int, causal: bool = False) -> Race:
    """The peer keeps the weights, and has yet to compute anything from them."""
    q, k, v = inputs(L)
    hidden = ~torch.ones(L, L, dtype=torch.bool).tril() if causal else None
    mask = ch.Causal() if causal else None

    def pairs(ours: tuple[Tensor, ch.Seen], theirs: Sequence[Tensor]) -> Pairs:
        return [(ours[0], theirs[0]), *first_head(q, k, v, ours, hidden)]

    observe = ch.Observe(**STATISTICS)
    return Race(partial(ch.attention, q, k, v, mask, observe=observe), partial(by_hand, q, k, v, hidden), pairs)


def computing(L: int) -> Race:
    q, k, v = inputs(L)

    def theirs() -> tuple[Tensor, ...]:
        out, weights, scores = by_hand(q, k, v)
        return out, *statistics_of(weights, scores)

    def pairs(ours: tuple[Tensor, ch.Seen], theirs: Sequence[Tensor]) -> Pairs:
        return zip([ours[0], *(ours[1][name] for name in STATISTICS)], theirs, strict=True)

    return Race(partial(ch.attention, q, k, v, observe=ch.Observe(**STATISTICS)), theirs, pairs)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and scores: what one would write to see them."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights, scores


def statistics_of(weights: Tensor, scores: Tensor) -> list[Tensor]:
    """In the order of `STATISTICS`."""
    L, S = weights.shape[-2:]
    apart = (torch.arange(L)[:, None] + S - L - torch.arange(S)).abs()
    return [
        scores.logsumexp(-1),
        torch.special.entr(weights).sum(-1),
        weights.amax(-1),
        weights.sum(-2),
        (weights * apart).sum(-1),
    ]


def first_head(
    q: Tensor, k: Tensor, v: Tensor, ours: tuple[Tensor, ch.Seen], hidden: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """What was seen of one head, beside the truth in float64."""
    out, seen = ours
    truth, weights, scores = by_hand(q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), hidden)
    found = [(out[:, :1], truth)]
    found += [
        (seen[name][:, :1], value) for name, value in zip(STATISTICS, statistics_of(weights, scores), strict=True)
    ]
    if "top_k" in seen:
        strongest, _ = seen.top_k
        found.append((strongest[:, :1], weights.topk(strongest.shape[-1]).values))
    return found
