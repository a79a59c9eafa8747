"""Pictures in the terminal: heat maps, numbers and labels as lines of `rich.text.Text`.

A picture is a list of lines of equal width, so pictures stand beside each other where the terminal has room.
Shades carry the meaning and colour only repeats it: the same picture can be read in black and white.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from clearhead.view.text import visible_text

Picture = list[Text]

WIDTH = 100  # of output that goes to no terminal
HIDDEN = "·"
SHADES = " ░▒▓█"
WEIGHT_STEPS = (0.05, 0.1, 0.2, 0.4)  # a shade begins at each: doubling, for weights share out a sum of 1
VALUE_STEPS = (0.25, 0.5, 1.0, 2.0)
WEIGHT_LEGEND = f"░ from 0.05  ▒ 0.1  ▓ 0.2  █ 0.4  {HIDDEN} hidden"
VALUE_LEGEND = "░ from 0.25  ▒ 0.5  ▓ 1  █ 2  in size; - before a shade: negative"
_LONGEST_ERROR = 600
_ASCII = {"■": "#", HIDDEN: ".", "░": ":", "▒": "+", "▓": "x", "█": "#", "─": "-", "√": "sqrt ", "ᵀ": "^T", "≈": "="}


def console(*, stderr: bool = False) -> Console:
    """A console that reads no markup, and that draws in plain ASCII where the encoding has no shades."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        codecs.register_error("clearhead.ascii", _in_ascii)
        stream.reconfigure(errors="clearhead.ascii")
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=None if known else WIDTH)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in text), error.end


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake becomes one line on stderr and exit code 2; a mistake of ours stays a traceback.

    Only what reads or applies the user's input belongs inside: there a ValueError (so MaskError and ShapeError)
    or an IndexError speaks of that input.
    """
    try:
        yield
    except (ValueError, IndexError, OSError) as error:
        line = visible_text(" ".join(str(error).split()))
        if len(line) > _LONGEST_ERROR:
            line = f"{line[: _LONGEST_ERROR // 3]} ... {line[-2 * _LONGEST_ERROR // 3 :]}"
        console(stderr=True).print(Text(f"Error: {line}"), soft_wrap=True)
        raise typer.Exit(2) from None


def heat(values: Tensor, visible: Tensor | None = None, *, signed: bool = False, gap: str = " ") -> Picture:
    """A picture of (rows, columns) numbers: a shade of two characters for each, a dot where hidden.

    Args:
        values: (rows, columns).
        visible: bool, the same shape; None = all of them.
        signed: whether the values can be negative: a minus sign takes the place of the first character.
        gap: what stands between two cells.

    Example:
        >>> for line in heat(torch.tensor([[0.3, 0.03, 0.0]]), torch.tensor([[True, True, False]])):
        ...     print(line.plain.replace(" ", "_"))
        ▓▓____·_
        >>> print(heat(torch.tensor([[-0.5, 3.0]]), signed=True)[0].plain)
        -▒ ██
    """
    seen = visible.tolist() if visible is not None else [[True] * values.shape[1]] * len(values)
    picture = []
    for numbers_row, seen_row in zip(values.tolist(), seen, strict=True):
        line = Text()
        for column, (value, shown) in enumerate(zip(numbers_row, seen_row, strict=True)):
            line.append(gap if column else "")
            if shown:
                shade = _shade(abs(value), VALUE_STEPS if signed else WEIGHT_STEPS)
                line.append(f"-{shade}" if value < 0 else shade * 2, style="red" if value < 0 else "cyan")
            else:
                line.append(f"{HIDDEN} ", style="dim")
        picture.append(line)
    return picture


def _shade(size: float, steps: Sequence[float]) -> str:
    return SHADES[sum(size >= step for step in steps)]


def numbers(values: Tensor, visible: Tensor | None = None, *, decimals: int = 2, width: int = 6) -> Picture:
    """(rows, columns) numbers in columns of `width` characters, a dot where hidden.

    Example:
        >>> print(numbers(torch.tensor([[0.25, -1.5]]), torch.tensor([[True, False]]))[0].plain)
          0.25     ·
    """
    seen = visible.tolist() if visible is not None else [[True] * values.shape[1]] * len(values)
    picture = []
    for numbers_row, seen_row in zip(values.tolist(), seen, strict=True):
        line = Text()
        for value, shown in zip(numbers_row, seen_row, strict=True):
            text = number(value, decimals) if shown else HIDDEN
            line.append(f"{text:>{width}}", style="" if shown else "dim")
        picture.append(line)
    return picture


def number(value: float, decimals: int = 2) -> str:
    """A number to a few decimals, without a negative zero.

    Example:
        >>> number(-0.001), number(-1.255)
        ('0.00', '-1.25')
    """
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def mask_picture(drawn: str, gap: str = " ") -> Picture:
    """The text of `Mask.draw` with its hidden cells dimmed.

    Example:
        >>> print(mask_picture("■ ·", gap="  ")[0].plain)
        ■  ·
    """
    picture = []
    for row in drawn.split("\n"):
        line = Text()
        for column, cell in enumerate(row.split(" ")):
            line.append(gap if column else "")
            line.append(cell, style="dim" if cell == HIDDEN else "cyan")
        picture.append(line)
    return picture


def labelled(
    picture: Picture,
    rows: Sequence[object] | None = None,
    columns: Sequence[object] | None = None,
    *,
    pitch: int = 3,
    right: bool = False,
    title: str = "",
) -> Picture:
    """A picture with labels: `rows` on its left, `columns` and a title above it.

    Args:
        picture: the lines.
        rows: a label for each line.
        columns: a label for each cell; where they would run into each other, every n-th.
        pitch: from one cell to the next, in characters.
        right: whether the cells' text ends, rather than begins, at their edge.
        title: a line above all.

    Example:
        >>> for line in labelled(heat(torch.ones(1, 2)), rows=[62], columns=[62, 13], title="weights"):
        ...     print(line.plain)
        weights
           62 13
        62 ██ ██
    """
    margin = max(len(str(row)) for row in rows) if rows else 0
    lines = []
    if title:
        lines.append(Text(title, style="bold"))
    if columns is not None:
        header = Text(" " * (margin + 1) if rows else "")
        header.append(_ticks(columns, pitch, right), style="dim")
        lines.append(header)
    for index, line in enumerate(picture):
        front = f"{rows[index]!s:>{margin}} " if rows else ""
        lines.append(Text.assemble((front, "dim"), line))
    return lines


def _ticks(labels: Sequence[object], pitch: int, right: bool) -> str:
    if right:
        return "".join(f"{label!s:>{pitch}}" for label in labels)
    longest = max((len(str(label)) for label in labels), default=0)
    every = longest // pitch + 1
    return "".join(f"{label!s:<{every * pitch}}" for label in labels[::every]).rstrip()


def beside(pictures: Sequence[Picture], width: int, gap: int = 3) -> Picture:
    """Pictures side by side, bottom lines level, as many as fit in `width`; the others below them.

    Example:
        >>> for line in beside([[Text("a"), Text("b")], [Text("c")]], width=80):
        ...     print(line.plain)
        a
        b   c
    """
    lines: Picture = []
    group: list[Picture] = []
    for picture in [*pictures, None]:
        taken = sum(_width(placed) + gap for placed in group)
        if group and (picture is None or taken + _width(picture) > width):
            lines += [Text()] * bool(lines) + _joined(group, gap)
            group = []
        if picture is not None:
            group.append(picture)
    return lines


def _joined(pictures: Sequence[Picture], gap: int) -> Picture:
    height = max(map(len, pictures))
    lines = [Text() for _ in range(height)]
    start = 0
    for picture in pictures:
        for line, part in zip(lines[height - len(picture) :], picture, strict=True):
            line.append(" " * (start - line.cell_len))
            line.append_text(part)
        start += _width(picture) + gap
    for line in lines:
        line.rstrip()
    return lines


def _width(picture: Picture) -> int:
    return max((line.cell_len for line in picture), default=0)


def heading(title: str, note: str, width: int) -> Text:
    """A title at the left, a note at the right, a rule between them.

    Example:
        >>> heading("pad", "(5, 10)", 24).plain
        '── pad ───────── (5, 10)'
    """
    rule = "─" * max(3, width - len(title) - len(note) - 5)
    return Text.assemble(("── ", "dim"), (title, "bold"), (f" {rule} ", "dim"), (note, "bold cyan"))
