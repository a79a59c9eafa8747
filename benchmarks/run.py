"""``make bench``: every row, one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks import machine
from benchmarks.fresh import fresh
from benchmarks.harness import DifferentError, measure
from benchmarks.limits import limits
from benchmarks.memory import extra_memory
from benchmarks.race import Row, Rows, UnavailableError
from benchmarks.rows import all_rows
from benchmarks.table import Line, as_markdown, brief, noted, on_screen, remembered, summary, timed, write


def chosen(rows: Rows, groups: str) -> Rows:
    """Those of the groups, given as ``dense,decode``; if none is named, all but what is apart."""
    known = list(dict.fromkeys(row.group for row in rows))
    wanted = [name.strip() for name in groups.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}: choose from {', '.join(known)}.")
    return [row for row in rows if row.group in wanted or not (wanted or row.apart)]


def lines_of(row: Row, threads: Sequence[int], seconds: float) -> Iterator[Line]:
    """What the table says of a row: its times, and its memory where that has a target."""
    try:
        if row.isa is None:
            yield timed(row, measure(row, threads, seconds))
        else:
            yield timed(row, fresh({"CLEARHEAD_ISA": row.isa}, measure, row, threads, seconds))
        if row.memory is not None:
            yield remembered(row, *extra_memory(row, threads[-1]), len(threads))
    except UnavailableError as error:
        yield noted(row, len(threads), f"skipped: {error}")
    except DifferentError as error:
        yield noted(row, len(threads), f"DIFFERENT WORK: {error}", failed=True)
    except Exception as error:  # one row that fails must not cost the others
        yield noted(row, len(threads), f"FAILED: {type(error).__name__}: {error}", failed=True)


def main(
    rows: Annotated[str, typer.Option(help="Groups of rows, as dense,decode; all if not given.")] = "",
    seconds: Annotated[float, typer.Option(help="Time of a row at each number of threads, about.")] = 1.5,
    quick: Annotated[
        bool, typer.Option(help="One round each: proves that every row runs, measures nothing.")
    ] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table there too.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the rows.")] = False,
) -> None:
    """Ratios of clearhead's time to a peer's on the same work, measured alternately in one process."""
    out = Console()
    if not out.is_terminal:
        out = Console(width=190)
    selected = chosen(all_rows(), rows)
    if quick:  # one round says nothing about a target
        seconds, selected = 0.0, [replace(row, target=None) for row in selected]
    if listing:
        for row in selected:
            out.print(Text(f"{row.group:<15} {row.work} | {row.peer}"))
        return
    threads = sorted({1, torch.get_num_threads()})
    before = machine.load()
    facts = machine.facts()
    lines: list[Line] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("the machine's limits", total=len(selected) + 1)
        facts |= limits(threads)
        for row in selected:
            progress.update(task, advance=1, description=row.work)
            for line in lines_of(row, threads, seconds):
                lines.append(line)
                # A run that is stopped has shown something.
                progress.console.print(Text(brief(line), style="dim"), soft_wrap=True)
    facts["load"] = machine.busy(before, machine.load())
    if quick:
        facts["NO MEASUREMENT"] = "one round each, to prove that every row runs"
    for name, fact in facts.items():
        out.print(Text.assemble((f"{name}: ", "bold"), fact))
    out.print()
    out.print(on_screen(lines, threads))
    out.print()
    out.print(Text(summary(lines)))
    if markdown is not None:
        write(markdown, as_markdown(facts, lines, threads))
    if any(line.failed for line in lines):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
