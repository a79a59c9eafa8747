"""What ``clearhead see`` prints: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clearhead.cli import heads
from clearhead.cli.parts import Part, Wanted, column_of
from clearhead.cli.reading import Reading
from clearhead.cli.terminal import number
from clearhead.heads import KINDS
from clearhead.view.text import visible_text


def print_parts(terminal: Console, parts: Sequence[Part], name: str, wanted: Wanted) -> None:
    """Everything, part by part."""
    readings = list({id(reading): reading for part in parts for reading in (part.keys, part.queries)}.values())
    for part in parts:
        title = f"{visible_text(name)}, {part.name}" if part.name else visible_text(name)
        terminal.print(Text(f"{title}: {_size(part)}", style="bold"))
        terminal.print()
        if wanted.stats is not None:
            _print_rows(terminal, part, wanted.stats)
        else:
            _print_telling(terminal, part)
            _print_links(terminal, part)
            terminal.print()
            for line in heads.in_words(part):
                terminal.print(Text(line))
        if part is not parts[-1]:
            terminal.print()
    if wanted.stats is None:
        for reading in readings:
            _explain(terminal, reading)


def as_json(parts: Sequence[Part], name: str) -> str:
    """Rows of all chosen heads, and for each kind the best of them; NaN is null.

    The rows are means over all queries; what is found is scored as in the words beside it.
    """
    return json.dumps(
        {
            "model": name,
            "parts": [
                {
                    "part": part.name or "all",
                    "texts": part.queries.texts,
                    "tokens": int(part.queries.real.sum()),
                    "layers": list(part.recording),
                    "heads": [_plain(row) for row in part.rows],
                    "found": {
                        kind: [_plain(head._asdict()) for head in found]
                        for kind in KINDS
                        if (found := heads.ranked(part, kind)[:10])
                    },
                    "in_words": heads.in_words(part),
                }
                for part in parts
            ],
        },
        allow_nan=False,
    )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }


def _size(part: Part) -> str:
    seen = next(iter(part.recording.values()))
    B, H, L, _ = seen.sizes
    many = "" if B == 1 else f" in {B} texts, padded to {L}"
    tokens = f"{int(part.queries.real.sum()):,} tokens{many}"
    if part.keys is not part.queries:
        tokens += f" that look at {int(part.keys.real.sum()):,}"
    layers = len(part.recording)
    return f"{layers} layer{'s' * (layers != 1)} x {H if part.heads is None else len(part.heads)} heads, {tokens}"


def _print_rows(terminal: Console, part: Part, stats: Sequence[str]) -> None:
    table = Table()
    for column in ("head", *stats):
        table.add_column(column, justify="left" if column == "head" else "right")
    for row in part.rows:
        values = [row.get(column_of(stat), math.nan) for stat in stats]
        table.add_row(f"L{row['number']}H{row['head']}", *(number(value, 3) for value in values))
    terminal.print(table)


def _print_telling(terminal: Console, part: Part) -> None:
    terminal.print(Text("The most telling heads (layers and heads count from 0)"))
    table = Table()
    for column in ("", "head", "mean"):
        table.add_column(column, justify="right" if column == "mean" else "left")
    table.add_column("strongest: who looks at whom", overflow="fold")
    previous = None
    for row in heads.telling(part):
        if previous not in (None, row.kind):
            table.add_section()
        links = Text("   ").join(_link(link, part) for link in row.links)
        score = f"{number(row.score)}{row.unit}"
        table.add_row(
            Text(visible_text(row.kind) if row.kind != previous else ""), f"L{row.layer}H{row.head}", score, links
        )
        previous = row.kind
    terminal.print(table)


def _print_links(terminal: Console, part: Part) -> None:
    found = heads.links(part)
    if found:
        between = (
            "words that are no neighbours" if part.queries is part.keys else "a word and a word that it looks at"
        )
        terminal.print(Text(f"\nEach head's strongest link between {between}: the ten strongest"))
        table = Table()
        for column in ("from", "to", "weight", "head"):
            table.add_column(column, justify="right" if column == "weight" else "left", overflow="fold")
        many = len(part.queries.texts) > 1
        if many:
            table.add_column("text", justify="right")
        for link in found:
            query, key = _token(part.queries, link.text, link.query), _token(part.keys, link.text, link.key)
            text = [str(link.text + 1)] if many else []
            table.add_row(query, key, f"{link.weight:.2f}", f"L{link.layer}H{link.head}", *text)
        terminal.print(table)


def _explain(terminal: Console, reading: Reading) -> None:
    if any("·" in label for labels in reading.labels for label in labels):
        terminal.print(Text("x·2 is the second token of the character or word x."))
    if reading.unknown:
        pieces = visible_text(" ".join(reading.unknown[:20]))
        terminal.print(Text(f"{len(reading.unknown)} tokens are unknown to the model, which sees [UNK]: {pieces}"))


def _link(link: heads.Link, part: Part) -> Text:
    query, key = _token(part.queries, link.text, link.query), _token(part.keys, link.text, link.key)
    text = f"[{link.text + 1}] " if len(part.queries.texts) > 1 else ""
    return Text.assemble(text, query, " → ", key, f" {link.weight:.2f}")


def _token(reading: Reading, text: int, position: int) -> Text:
    label = reading.labels[text][position]
    return Text(visible_text(label.strip(" ") or "\u2420"), style="cyan")
