"""``clearhead mask``: what a mask expression shows and hides, drawn, counted and explained."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from clearhead.cli.terminal import HIDDEN, beside, console, labelled, mask_picture, one_line_errors
from clearhead.masks import ALL, Mask, parse_mask
from clearhead.view.text import visible_text

MOST_TOKENS = 100_000
MOST_PAIRS = 500_000_000  # looked at one by one: some seconds
POOLED_CELLS = 32  # a side of the picture where not each pair has a cell of its own
MOST_ITEMS = 16  # batch items listed by their share


def mask(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="Such as 'Causal() & KeyPadding([8, 5])'.")],
    L: Annotated[int, typer.Option("-L", help="How many queries.")] = 10,
    S: Annotated[int | None, typer.Option("-S", help="How many keys; as many as queries if not given.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="Q,K", help="Say why query Q may or may not attend to key K.")
    ] = None,
    batch: Annotated[int, typer.Option(help="The batch item to draw and explain.")] = 0,
    head: Annotated[int, typer.Option(help="The head to draw and explain.")] = 0,
) -> None:
    """Draw a mask, count what it leaves visible, and explain a pair.

    Masks are Causal(), Window(left=3, right=0), KeyPadding([8, 5]), QueryPadding([8, 5]), Segments([0, 0, 1]),
    Prefix(2), Allowed([[True, False]], axes="bk") and Blocked(...), combined by & | ~ and parentheses. The
    expression is read by a whitelist and never run.
    """
    out = console()
    with one_line_errors():
        for name, size in (("L", L), ("S", S)):
            if size is not None and not 1 <= size <= MOST_TOKENS:
                raise ValueError(f"-{name} must be between 1 and {MOST_TOKENS:,}, not {_short(size)}.")
        for name, index in (("batch", batch), ("head", head)):
            if abs(index) > MOST_TOKENS:
                raise IndexError(f"--{name} {_short(index)} is out of range.")
        S = L if S is None else S
        pair = None if explain is None else _pair(explain)
        parsed = parse_mask(expression)
        B, H = parsed._sizes
        parsed._check(B, H, L, S)
        if 0 in (B, H):
            raise ValueError(f"{parsed!r} is for {B} batch items and {H} heads: there is nothing to draw.")
        # Everything that can refuse the input comes before the first line of output.
        verdict = None if pair is None else parsed.explain(L, S, query=pair[0], key=pair[1], batch=batch, head=head)
        parts = sum(1 for _ in parsed._leaves())
        picture = None
        if parts * L * S <= MOST_PAIRS:
            picture = parsed.draw(L, S, batch=batch, head=head, max_cells=_most_cells(out, L, S))
    out.print(Text(visible_text(repr(parsed)), style="bold"), soft_wrap=True)
    out.print()
    if picture is not None:
        _print_picture(out, picture, parsed, L, S, batch, head)
    _print_share(out, parsed, L, S, drawn=picture is not None)
    if verdict is not None:
        out.print()
        for line in verdict.split("\n"):
            out.print(Text(visible_text(line)), soft_wrap=True)


def _short(number: int) -> str:
    return f"{number:,}" if abs(number) < 10**12 else "a number of more than 12 digits"


def _pair(text: str) -> tuple[int, int]:
    """Two integers from ``"3,5"``; negative ones count from the end."""
    parts = [part.strip() for part in text.split(",")]
    digits = [part.removeprefix("-") for part in parts]
    if len(parts) != 2 or not all(d.isascii() and d.isdigit() and len(d) <= 6 for d in digits):
        raise ValueError(f"--explain takes a query and a key, such as 3,5; not {text[:40]!r}.")
    return int(parts[0]), int(parts[1])


def _most_cells(out: Console, L: int, S: int) -> int:
    """A cell for each pair if they fit beside the labels, two characters each; else a pooled picture."""
    fit = max(1, (out.width - len(str(L)) - 2) // 2)
    return fit if max(L, S) <= fit else min(fit, POOLED_CELLS)


def _print_picture(out: Console, drawn: str, parsed: Mask, L: int, S: int, batch: int, head: int) -> None:
    rows = drawn.count("\n") + 1
    columns = len(drawn.split("\n", 1)[0].split(" "))
    which = [
        f"{name} {index % size} of {size}"
        for name, index, size in (
            ("batch item", batch, parsed.axes.get("b", 1)),
            ("head", head, parsed.axes.get("h", 1)),
        )
        if size > 1
    ]
    title = ", ".join([f"{L:,} queries (rows) x {S:,} keys (columns)", *which])
    if (rows, columns) != (L, S):
        title += f"; a cell is about {L / rows:.3g} x {S / columns:.3g} pairs"
    picture = labelled(
        mask_picture(drawn),
        rows=[i * L // rows for i in range(rows)],
        columns=[j * S // columns for j in range(columns)],
        pitch=2,
    )
    out.print(Text(title), soft_wrap=True)
    for line in picture:
        out.print(line, soft_wrap=True)
    legend = f"■ may attend   {HIDDEN} hidden"
    out.print(Text(legend + ("   ▒ some of the cell's pairs may" if "▒" in drawn else ""), style="dim"))
    out.print()


def _print_share(out: Console, parsed: Mask, L: int, S: int, *, drawn: bool) -> None:
    B, H = parsed._sizes
    pairs = B * H * L * S
    parts = sum(1 for _ in parsed._leaves())
    if parts * pairs > MOST_PAIRS:
        times = f" in each of {parts} parts" if parts > 1 else ""
        what = "counted" if drawn else "drawn or counted"
        out.print(
            Text(
                f"visible: not {what}, {pairs:,} pairs{times} are more than the {MOST_PAIRS:,} looked at one by one"
            ),
            soft_wrap=True,
        )
        return
    sizes = [f"{size:,} {name}" for size, name in ((B, "batch items"), (H, "heads")) if size > 1]
    total = " x ".join([*sizes, f"{L:,} queries", f"{S:,} keys"])
    visible = parsed._visible_by_key(ALL, ALL, range(L), L, S).sum(dim=(1, 2))
    shares = (visible / (H * L * S)).tolist()
    out.print(Text(f"visible: {_percent(sum(shares) / B)} of {total}"), soft_wrap=True)
    if len(set(shares)) > 1:
        lines = [Text(f"  item {item}  {_percent(share)}") for item, share in enumerate(shares[:MOST_ITEMS])]
        half = -(-len(lines) // 2) if len(lines) > 4 else len(lines)
        for line in beside([part for part in (lines[:half], lines[half:]) if part], out.width):
            out.print(line)
        if len(shares) > MOST_ITEMS:
            more = f"  and {len(shares) - MOST_ITEMS:,} more; all are between {_percent(min(shares))} and "
            out.print(Text(f"{more}{_percent(max(shares))}"), soft_wrap=True)


def _percent(share: float) -> str:
    """A share as a percentage that never rounds something to nothing, or not quite all to all."""
    text = f"{100 * share:.2f}"
    if share > 0 and text == "0.00":
        return "less than 0.01 %"
    if share < 1 and text == "100.00":
        return "more than 99.99 %"
    return f"{text} %"
