"""``clearhead walk``: masked multi-head attention, step by step, with the shape, numbers and picture of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from clearhead.cli.journey import (
    HEAD,
    HEADS,
    VOCABULARY,
    WIDTH,
    E,
    Journey,
    Step,
    cross_attention,
    published,
    self_attention,
    sizes,
)
from clearhead.cli.terminal import WIDTH as PAGE
from clearhead.cli.terminal import beside, console, heading, one_line_errors

MOST_SEQUENCES, MOST_IDS = 16, 32


def walk(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="IDS", help="Sequences of token ids from 1 to 99, such as 62,13,47 60,96."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the weights of the embedding and the projections.")] = 0,
) -> None:
    """Walk through masked multi-head attention: each step with its name, shape, numbers and picture.

    Without IDS, the five sequences of a published worked example are walked through.
    """
    out = console()
    example = json.loads(resources.files("clearhead.cli").joinpath("walk.json").read_text(encoding="utf-8"))
    with one_line_errors():
        if not 0 <= seed < 2**63:
            raise ValueError("--seed must be an integer from 0 to 2**63 - 1.")
        sequences = _read(ids) if ids else example["sequences"]
    targets = [example["target_sequences"][i % len(example["target_sequences"])] for i in range(len(sequences))]
    journey = Journey(sequences, targets, seed)
    _print_opening(out, journey)
    steps = [*self_attention(journey), *cross_attention(journey), published(example["tables"])]
    for index, step in enumerate(steps, start=1):
        _print_step(out, index, step)


def _read(texts: Sequence[str]) -> list[list[int]]:
    """Sequences of ids from texts such as ``"62,13,47"``."""
    if len(texts) > MOST_SEQUENCES:
        raise ValueError(f"at most {MOST_SEQUENCES} sequences are walked through, not {len(texts):,}.")
    sequences = []
    for place, text in enumerate(texts, start=1):
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > MOST_IDS:
            raise ValueError(f"sequence {place} has {len(parts):,} ids: at most {MOST_IDS} are walked through.")
        for part in parts:
            # isdigit alone takes digits of any script, and int() takes any length of them.
            if not (part.isascii() and part.isdigit() and len(part) <= 2 and int(part) > 0):
                raise ValueError(
                    f"sequence {place}: ids are integers from 1 to {VOCABULARY - 1} (0 is the padding) with commas "
                    f"between them, such as 62,13,47; not {part[:20]!r}."
                )
        sequences.append([int(part) for part in parts])
    return sequences


def _print_opening(out: Console, journey: Journey) -> None:
    B, L = journey.batch.ids.shape
    lines = [
        Text("Masked multi-head attention, step by step", style="bold"),
        Text(),
        Text("  Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V", style="bold"),
        Text("  MultiHead(Q, K, V) = [head_1, ..., head_h] W_O,   head_i = Attention(Q W_Q[i], K W_K[i], V W_V[i])"),
        Text("  Vaswani et al. 2017, Attention Is All You Need, section 3.2", style="dim"),
        Text(),
        Text(
            f"{B} sequences of up to {L} ids below {VOCABULARY}; model width D = {WIDTH}, {HEADS} heads of width "
            f"d_k = {E}; seed {journey.seed}."
        ),
        Text(f"Pictures show batch item {journey.item}, head {HEAD}; rows and columns carry the tokens' ids."),
    ]
    for line in lines:
        out.print(line, soft_wrap=True)


def _print_step(out: Console, index: int, step: Step) -> None:
    out.print()
    out.print(heading(f"{index}. {step.name}", sizes(step.shape), min(out.width, PAGE)), soft_wrap=True)
    out.print(Text(step.why), soft_wrap=True)
    for call in step.code.split("\n"):
        out.print(Text(f"  >>> {call}", style="green"), soft_wrap=True)
    out.print()
    for line in beside(step.pictures, out.width):
        out.print(line, soft_wrap=True)
    for note in step.notes:
        out.print(Text(note, style="dim"), soft_wrap=True)
