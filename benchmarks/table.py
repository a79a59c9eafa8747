"""The table: on the screen by rich, in a file as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from benchmarks.harness import Times
from benchmarks.race import Row

START, END = "<!-- table: written by make bench MARKDOWN=... -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Cell:
    """A ratio or a share, and whether it misses its target."""

    text: str
    missed: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the table: texts and cells, one for each column."""

    work: str
    peer: str
    target: str
    medians: Sequence[Cell]
    minima: Sequence[Cell]
    ours: str
    theirs: str
    note: str = ""
    failed: bool = False

    @property
    def holds(self) -> str:
        if self.note or not self.target:
            return self.note
        return "no" if any(cell.missed for cell in self.medians) else "yes"


def timed(row: Row, found: Mapping[int, Times]) -> Line:
    """The line of a row that was measured at some numbers of threads."""

    def cell(ratio: float) -> Cell:
        value = 1 / ratio if row.share else ratio
        missed = row.target is not None and (value < row.target if row.share else value > row.target)
        return Cell(f"{value:.2f}", missed)

    last = list(found.values())[-1]
    sign = "≥" if row.share else "≤"
    return Line(
        row.work,
        row.peer,
        "" if row.target is None else f"{sign} {row.target:.2f}",
        [cell(times.median) for times in found.values()],
        [Cell(cell(times.least).text) for times in found.values()],
        f"{_ms(sorted(last.ours)[len(last.ours) // 2])} ms",
        f"{_ms(sorted(last.theirs)[len(last.theirs) // 2])} ms",
    )


def remembered(row: Row, ours: int, theirs: int, columns: int) -> Line:
    """The line of a row's extra memory; it was measured once, with all threads."""
    target = row.memory or 0.0
    ratio = ours / max(theirs, 1)
    blank = [Cell("")] * (columns - 1)
    return Line(
        row.work,
        f"{row.peer}: extra memory",
        f"≤ {target:.2f}",
        [*blank, Cell(f"{ratio:.3f}", ratio > target)],
        [*blank, Cell("")],
        f"{ours / 2**20:.1f} MiB",
        f"{theirs / 2**20:.1f} MiB",
    )


def noted(row: Row, columns: int, note: str, failed: bool = False) -> Line:
    """The line of a row that could not be measured, and why."""
    target = "" if row.target is None else f"{'≥' if row.share else '≤'} {row.target:.2f}"
    blank = [Cell("")] * columns
    return Line(row.work, row.peer, target, blank, blank, "", "", note, failed)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _heads(threads: Sequence[int]) -> list[str]:
    names = [f"{number} thread{'s' if number > 1 else ''}" for number in threads]
    ratios = [head for name in names for head in (name, "min")]
    return ["work", "peer", "target", *ratios, "ours", "peer's", "holds"]


def _cells(line: Line) -> list[Cell]:
    ratios = [cell for pair in zip(line.medians, line.minima, strict=True) for cell in pair]
    before = [Cell(line.work), Cell(line.peer), Cell(line.target)]
    return [*before, *ratios, Cell(line.ours), Cell(line.theirs), Cell(line.holds, line.holds == "no")]


def on_screen(lines: Sequence[Line], threads: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in _heads(threads):
        numbers = head not in ("work", "peer", "holds")
        table.add_column(Text(head), justify="right" if numbers else "left", no_wrap=numbers)
    for line in lines:
        table.add_row(*(Text(cell.text, style="bold red" if cell.missed else "") for cell in _cells(line)))
    return table


def as_markdown(facts: Mapping[str, str], lines: Sequence[Line], threads: Sequence[int]) -> str:
    heads = _heads(threads)
    rules = ["---" if head in ("work", "peer", "holds") else "---:" for head in heads]
    rows = [[f"**{cell.text}**" if cell.missed else cell.text for cell in _cells(line)] for line in lines]
    table = [f"| {' | '.join(row)} |" for row in ([*heads], rules, *rows)]
    return "\n".join([*(f"- {name}: {fact}" for name, fact in facts.items()), "", *table, "", summary(lines)])


def brief(line: Line) -> str:
    """A line by itself, while the others are still to come."""
    ratios = ", ".join(cell.text for cell in line.medians if cell.text)
    parts = (line.work, line.peer, line.note or ratios, line.target)
    return " | ".join(part for part in parts if part)


def summary(lines: Sequence[Line]) -> str:
    """How many lines hold, and which don't."""
    judged = [line for line in lines if line.target]
    held = [line for line in judged if line.holds == "yes"]
    missed = [f"{line.work} ({line.peer})" for line in judged if line.holds != "yes"]
    text = f"{len(held)} of {len(judged)} lines with a target hold."
    return f"{text} Missed or not measured: {'; '.join(missed)}." if missed else text


def write(path: Path, markdown: str) -> None:
    """Between the marks of a file that has them, else into a new file.

    Raises:
        FileExistsError: a file without the marks: it is not ours to replace.
    """
    if not path.exists():
        path.write_text(f"{START}\n{markdown}\n{END}\n", encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if START not in text or END not in text:
        raise FileExistsError(f"{path} exists and has no place for the table: give a new file, or one with {START}")
    before, after = text.split(START)[0], text.split(END)[-1]
    path.write_text(f"{before}{START}\n{markdown}\n{END}{after}", encoding="utf-8")
