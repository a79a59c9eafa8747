"""The steps of ``clearhead walk``: what each shows, all of it computed by the library's public calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn

from clearhead.cli.terminal import (
    HIDDEN,
    VALUE_LEGEND,
    WEIGHT_LEGEND,
    Picture,
    heat,
    labelled,
    mask_picture,
    number,
    numbers,
)
from clearhead.functional import attention
from clearhead.masks import Causal
from clearhead.multihead import MultiHeadAttention
from clearhead.observe import Observe
from clearhead.ragged import Batch, pad

VOCABULARY, WIDTH, HEADS = 100, 8, 2
E = WIDTH // HEADS  # the width of a head
HEAD = 0  # the head that is shown
_ROWS, _COLUMNS = 12, 14  # of the numbers; pictures show everything


class Journey:
    """Everything that the steps show, computed once by the library.

    Args:
        sequences: token ids of the sources.
        targets: token ids of as many targets.
        seed: of the weights.
    """

    def __init__(self, sequences: list[list[int]], targets: list[list[int]], seed: int) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
            mha = MultiHeadAttention(WIDTH, HEADS)
            cross = MultiHeadAttention(WIDTH, HEADS)
            self.batch: Batch = pad(sequences)
            self.target: Batch = pad(targets)
            self.mask = self.batch.mask & Causal()
            self.x: Tensor = embedding(self.batch.ids)
            self.y, self.seen = mha(self.x, mask=self.mask, observe=Observe.all())
            self.z, self.cross = cross(
                embedding(self.target.ids), self.y, mask=self.batch.mask, observe=Observe.all()
            )
        self.seed = seed
        lengths = self.batch.lengths.tolist()
        # An item with padding has more to show.
        self.item: int = next((i for i, n in enumerate(lengths) if n < max(lengths)), 0)
        self.tokens: list[int] = self.batch.ids[self.item].tolist()
        self.target_tokens: list[int] = self.target.ids[self.item].tolist()

    @property
    def length(self) -> int:
        """L, the length of the longest source."""
        return len(self.tokens)


@dataclass(frozen=True)
class Step:
    """A stop on the way.

    Attributes:
        name: of the step.
        shape: of what it makes.
        why: one sentence.
        code: what makes it: the lines of all steps in a row, with the sequences, give the same numbers.
        pictures: shown side by side where there is room.
        notes: plain lines below the pictures.
    """

    name: str
    shape: Sequence[int]
    why: str
    code: str
    pictures: list[Picture] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def self_attention(journey: Journey) -> Iterator[Step]:
    """From the ids of the sources to the output of masked self-attention."""
    batch, seen, item, tokens = journey.batch, journey.seen, journey.item, journey.tokens
    projected = {"q": seen.query_projected, "k": seen.key_projected, "v": seen.value_projected}
    yield Step(
        "pad",
        batch.ids.shape,
        f"A tensor is a box, so shorter sequences are filled up with id 0, shown as {HIDDEN}.",
        f"torch.manual_seed({journey.seed})\nbatch = ch.pad(sequences)",
        [labelled(_ids(batch), rows=range(len(batch.ids)))],
    )
    yield _masks(journey)
    yield Step(
        "embed",
        journey.x.shape,
        f"Each id becomes a vector of {WIDTH} learnt numbers; the padding's vector is zero.",
        f"embedding = torch.nn.Embedding({VOCABULARY}, {WIDTH}, padding_idx=0)\nx = embedding(batch.ids)",
        _shown(journey.x[item], tokens, range(WIDTH), "x"),
        [VALUE_LEGEND],
    )
    yield Step(
        "project: q, k, v",
        seen.query_projected.shape,
        "Three linear maps of x: what a token asks for (q), what it offers (k), what it hands over (v).",
        f"mha = ch.MultiHeadAttention({WIDTH}, {HEADS})\ny, seen = mha(x, mask=mask, observe=ch.Observe.all())\n"
        "seen.query_projected, seen.key_projected, seen.value_projected",
        [
            labelled(heat(part[item], signed=True), tokens, range(WIDTH), title=name)
            for name, part in projected.items()
        ],
        [
            f"{name} of token {tokens[0]}: {', '.join(map(number, part[item, 0].tolist()))}"
            for name, part in projected.items()
        ],
    )
    yield Step(
        "split into heads",
        seen.query.shape,
        f"The {WIDTH} numbers of q, k and v are cut into {HEADS} heads of {E}, and each head attends on its own.",
        "seen.query, seen.key, seen.value",
        [
            part
            for h in range(HEADS)
            for part in _shown(seen.query[item, h], tokens, range(h * E, h * E + E), f"q, head {h}")
        ],
    )
    yield from _weights(journey)
    yield Step(
        "context",
        seen.context.shape,
        "Each query takes the mean of the values, every value counting by its weight.",
        "seen.context",
        _shown(seen.context[item, HEAD], tokens, range(E), f"weights v, head {HEAD}"),
        _mean_by_hand(journey),
    )
    yield Step(
        "merge the heads",
        seen.merged.shape,
        "The contexts of the heads are put side by side again.",
        "seen.merged",
        [
            labelled(_joined_heads(seen.merged[item]), ["", *tokens], title="merged"),
            _shown(seen.merged[item], tokens, range(WIDTH), "")[1],
        ],
    )
    yield Step(
        "output projection",
        journey.y.shape,
        "A last linear map lets the heads' findings mix; the output has the shape of the input x.",
        "y",
        _shown(journey.y[item], tokens, range(WIDTH), "y"),
        ["the whole way in one call: y = mha(x, mask=mask)"],
    )


def _masks(journey: Journey) -> Step:
    L = journey.length
    parts = (("KeyPadding", journey.batch.mask), ("Causal()", Causal()), ("both, by &", journey.mask))
    return Step(
        "mask",
        journey.mask.dense(L, L).shape,
        "A query (row) may attend to a key (column) that is real and doesn't come after it.",
        f"mask = batch.mask & ch.Causal()\nmask.dense({L}, {L})",
        [
            labelled(
                mask_picture(part.draw(L, L, batch=journey.item), gap="  "),
                journey.tokens,
                journey.tokens,
                title=f"{name} {sizes(part.dense(L, L).shape)}",
            )
            for name, part in parts
        ],
        [f"■ may attend   {HIDDEN} hidden", f"mask = {journey.mask!r}"],
    )


def _weights(journey: Journey) -> Iterator[Step]:
    seen, item, tokens, L = journey.seen, journey.item, journey.tokens, journey.length
    visible = journey.mask.dense(L, L)[item, 0]
    yield Step(
        "scores",
        seen.scores.shape,
        "How well does each query match each key? Their dot product, scaled to stay in softmax's good range.",
        "seen.scores  # q kᵀ / √d_k",
        _shown(seen.scores[item, HEAD], tokens, tokens, f"scores, head {HEAD}"),
        _score_by_hand(journey),
    )
    yield Step(
        "masked scores",
        seen.masked_scores.shape,
        "Hidden pairs get minus infinity, so that their exponential is zero.",
        "seen.masked_scores",
        _shown(seen.masked_scores[item, HEAD], tokens, tokens, f"masked scores, head {HEAD}", visible),
    )
    yield Step(
        "softmax: the weights",
        seen.weights.shape,
        "Exponentials, divided by their sum: each query shares out a total of 1 among the keys it sees.",
        "seen.weights",
        _shown(seen.weights[item, HEAD], tokens, tokens, f"weights, head {HEAD}", visible, signed=False),
        [WEIGHT_LEGEND, *_softmax_by_hand(journey, visible), *_about_padding(journey)],
    )


def cross_attention(journey: Journey) -> Iterator[Step]:
    """From the ids of the targets to what they take from the sources."""
    cross, item, tokens, targets = journey.cross, journey.item, journey.tokens, journey.target_tokens
    visible = journey.batch.mask.dense(journey.target.ids.shape[1], journey.length)[item, 0]
    visible = visible.expand(len(targets), -1)
    yield Step(
        "cross-attention: the targets",
        journey.target.ids.shape,
        "Now other sequences ask, as in a translation: target t attends to the output y of the sources.",
        "target = ch.pad(target_sequences)\nt = embedding(target.ids)",
        [labelled(_ids(journey.target), rows=range(len(journey.target.ids)))],
    )
    yield Step(
        "cross-attention: q of the targets",
        cross.query.shape,
        f"The queries come from the targets; keys and values, {sizes(cross.key.shape)}, from the sources.",
        f"cross = ch.MultiHeadAttention({WIDTH}, {HEADS})\n"
        "z, seen = cross(t, y, mask=batch.mask, observe=ch.Observe.all())\nseen.query",
        _shown(cross.query[item, HEAD], targets, range(E), f"q, head {HEAD}"),
    )
    yield Step(
        "cross-attention: the weights",
        cross.weights.shape,
        "Every target sees the whole source but its padding: here nothing is causal.",
        "seen.weights",
        _shown(cross.weights[item, HEAD], targets, tokens, f"weights, head {HEAD}", visible, signed=False),
        [WEIGHT_LEGEND],
    )
    yield Step(
        "cross-attention: context",
        cross.context.shape,
        "For each target a mean of the source's values.",
        "seen.context",
        _shown(cross.context[item, HEAD], targets, range(E), f"weights v, head {HEAD}"),
    )
    yield Step(
        "cross-attention: output",
        journey.z.shape,
        "Merged and projected as before: as long as the targets, as wide as the model.",
        "z",
        _shown(journey.z[item], targets, range(WIDTH), "z"),
    )


def published(tables: list[dict[str, Any]]) -> Step:
    """The library's softmax of published scores against the published weights.

    With the scores as a bias on zero queries, and one-hot values, the context of attention is its weights.
    """
    scores = torch.tensor([[[-math.inf if s is None else s for s in row] for row in t["scores"]] for t in tables])
    printed = torch.tensor([table["attention"] for table in tables])
    n, L, S = scores.shape
    zeros, one_hot = torch.zeros(n, 1, S, 1), torch.eye(S).expand(n, 1, S, S)
    weights = attention(zeros[:, :, :L], zeros, one_hot, attn_bias=scores[:, None])[:, 0]
    difference = float((weights - printed).abs().max())
    verdict = "they agree to the four decimals printed" if difference < 1e-4 else "they do NOT agree"
    row = 4
    return Step(
        "check against a published table",
        weights.shape,
        "A worked example of 2021 printed scores and weights: softmax must turn one into the other.",
        "ch.attention(zeros, zeros, one_hot, attn_bias=scores)",
        [
            labelled(
                numbers(
                    torch.stack([scores[0, row], weights[0, row], printed[0, row]])[:, : row + 1],
                    decimals=4,
                    width=8,
                ),
                rows=["scores", "softmax", "published"],
                title=f"table 0, query {row}",
            )
        ],
        [f"largest difference over {n} tables of {L} x {S}: {difference:.6f}; {verdict}"],
    )


# -- numbers by hand -------------------------------------------------------------------------------------------


def _score_by_hand(journey: Journey) -> list[str]:
    q = min(1, journey.length - 1)  # the second query has a key before it
    query, key = (
        journey.seen.query[journey.item, HEAD, q].tolist(),
        journey.seen.key[journey.item, HEAD, 0].tolist(),
    )
    products = " + ".join(f"{number(a)}·{number(b)}" for a, b in zip(query, key, strict=True))
    score = float(journey.seen.scores[journey.item, HEAD, q, 0])
    return [f"by hand, query {q}, key 0: ({products}) / √{len(query)} ≈ {number(score)}"]


def _softmax_by_hand(journey: Journey, visible: Tensor) -> list[str]:
    q = min(1, journey.length - 1)
    keys = visible[q].nonzero()[:, 0].tolist()
    scores = [float(journey.seen.scores[journey.item, HEAD, q, k]) for k in keys]
    weights = [number(float(journey.seen.weights[journey.item, HEAD, q, k]), 3) for k in keys]
    total = " + ".join(f"e^{number(score)}" for score in scores)
    return [f"by hand, query {q}: e^{number(scores[0])} / ({total}) ≈ {weights[0]}; the row: {', '.join(weights)}"]


def _about_padding(journey: Journey) -> list[str]:
    if journey.tokens[-1]:
        return []
    return ["The padding's own rows (0) share out their weight as well, but no real query sees what comes of it."]


def _mean_by_hand(journey: Journey) -> list[str]:
    q, seen, item = min(1, journey.length - 1), journey.seen, journey.item
    terms = [
        f"{number(float(weight), 3)}·{number(float(seen.value[item, HEAD, k, 0]))}"
        for k, weight in enumerate(seen.weights[item, HEAD, q])
        if weight > 0
    ]
    return [f"by hand, query {q}, column 0: {' + '.join(terms)} ≈ {number(float(seen.context[item, HEAD, q, 0]))}"]


# -- pictures --------------------------------------------------------------------------------------------------


def _ids(batch: Batch) -> Picture:
    picture = []
    for row, length in zip(batch.ids.tolist(), batch.lengths.tolist(), strict=True):
        line = Text("".join(f"{i:>3}" for i in row[:length]))
        line.append(f"  {HIDDEN}" * (len(row) - length), style="dim")
        picture.append(line)
    return picture


def _shown(
    values: Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    title: str,
    visible: Tensor | None = None,
    *,
    signed: bool = True,
) -> list[Picture]:
    """A heat picture, and the numbers beside it."""
    few = values[:_ROWS, :_COLUMNS]
    seen = None if visible is None else visible[:_ROWS, :_COLUMNS]
    part = "" if few.shape == values.shape else f"  (the first {few.shape[0]} x {few.shape[1]})"
    printed = numbers(few, seen, decimals=2 if signed else 3)
    return [
        labelled(heat(values, visible, signed=signed), rows, columns, title=title),
        labelled(
            printed,
            rows[: len(few)] if part else None,
            columns[: few.shape[1]],
            pitch=6,
            right=True,
            title=f"in numbers{part}",
        ),
    ]


def _joined_heads(merged: Tensor) -> Picture:
    half = merged.shape[1] // HEADS
    left, right = (heat(part, signed=True) for part in merged.split(half, dim=1))
    names = Text(f"{'head 0':<{3 * half - 1}} | head 1", style="dim")
    return [names, *(Text.assemble(a, (" | ", "dim"), b) for a, b in zip(left, right, strict=True))]


def sizes(shape: Sequence[int]) -> str:
    """A shape as it is written: ``(5, 2, 10, 4)``."""
    return f"({', '.join(map(str, shape))})"
