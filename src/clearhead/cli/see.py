"""``clearhead see``: what the heads of a trained model do on a text."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import nn

from clearhead.cli import heads
from clearhead.cli.reading import Reading, UserError, first_line, gather_texts, load, tokenize
from clearhead.cli.terminal import console, one_line_errors
from clearhead.record import record
from clearhead.recording import Recording
from clearhead.view.report import fits
from clearhead.view.text import visible_text


def see(
    text: Annotated[list[str] | None, typer.Argument(help="One or more texts; several are one padded batch.")] = None,
    file: Annotated[Path | None, typer.Option(help="A document to read as one text; - for standard input.")] = None,
    lines: Annotated[Path | None, typer.Option(help="A file with a text in each line; - for standard input.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A transformers model folder, or a name in the local cache.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The HTML report. Default: report.html, or the next free name.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Save all numbers, as layer.N.FIELD in a .safetensors file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Show what every head of a trained model does on a text: a table, and an HTML report of all weights."""
    with one_line_errors():
        texts = gather_texts(text or [], file, lines)
        report = _free_name(Path("report.html")) if out is None else out
        for path in (report, save):
            _check_target(path, force)
        if save is not None and save.absolute() == report.absolute():
            raise UserError(f"--out and --save name the same file, {save}.")
        with _progress() as progress:
            task = progress.add_task("loading the model", total=None)
            network, tokenizer, name = load(model)
            reading = tokenize(texts, network, tokenizer)
            progress.update(task, total=1, completed=1)
    with _progress() as progress:
        recording, exact = _run(network, reading, progress)

    terminal = console()
    _print(terminal, recording, reading, name)
    with one_line_errors():
        recording.to_html(report, reading.labels, title=f"Attention in {name}", overwrite=force)
        what = (
            "every weight" if exact else "pooled maps and each query's 8 strongest keys (too long for every weight)"
        )
        shown = Text.assemble("\nReport: ", (visible_text(str(report)), "bold"), f", {what}. Open it in a browser.")
        terminal.print(shown)
        if save is not None:
            _save(save, recording, reading, name, overwrite=force)
            terminal.print(Text.assemble("Numbers: ", (visible_text(str(save)), "bold")))


def _run(network: nn.Module, reading: Reading, progress: Progress) -> tuple[Recording, bool]:
    """Run the model under `record`; whether all weights were kept."""
    config: Any = network.config
    B, L = reading.real.shape
    exact = fits(config.num_hidden_layers, B, config.num_attention_heads, L, L)
    steps = [module for module in network.modules() if isinstance(module, nn.Linear)]
    task = progress.add_task("running the model", total=len(steps))
    with ExitStack() as stack:
        for module in steps:
            handle = module.register_forward_hook(lambda *_: progress.advance(task))
            stack.callback(handle.remove)
        with one_line_errors():
            recording = stack.enter_context(record(network, heads.statistics(reading, exact=exact)))
        with torch.no_grad(), one_line_errors():
            try:
                network(**reading.inputs)
            except Exception as error:  # a foreign model may want anything: images, other inputs, more memory
                raise UserError(f"{type(network).__name__} can't read text: {first_line(error)}") from None
            if not len(recording):
                raise UserError(f"{type(network).__name__} called no attention layer.")
    progress.update(task, completed=len(steps))
    return recording, exact


def _print(terminal: Console, recording: Recording, reading: Reading, name: str) -> None:
    first = next(iter(recording.values()))
    B, H, L, _ = first.sizes
    tokens = int(reading.real.sum())
    many = "" if B == 1 else f" in {B} texts, padded to {L}"
    terminal.print(
        Text(f"{visible_text(name)}: {len(recording)} layers x {H} heads, {tokens:,} tokens{many}\n", style="bold")
    )

    terminal.print(Text("The most telling heads (layers and heads count from 0)"))
    table = Table()
    for column in ("", "head", "mean"):
        table.add_column(column, justify="right" if column == "mean" else "left")
    table.add_column("strongest: who looks at whom", overflow="fold")
    previous = None
    for row in heads.telling(recording, reading):
        if previous not in (None, row.kind):
            table.add_section()
        shown = Text("   ").join(_link(link, reading) for link in row.links)
        score = f"{row.score:.2f}{row.unit}"
        table.add_row(
            Text(visible_text(row.kind) if row.kind != previous else ""), f"L{row.layer}H{row.head}", score, shown
        )
        previous = row.kind
    terminal.print(table)

    found = heads.links(recording, reading)
    if found:
        terminal.print(Text("\nEach head's strongest link between words that are no neighbours: the ten strongest"))
        table = Table()
        for column in ("from", "to", "weight", "head"):
            table.add_column(column, justify="right" if column == "weight" else "left", overflow="fold")
        if B > 1:
            table.add_column("text", justify="right")
        for link in found:
            query, key = (_token(reading, link.text, position) for position in (link.query, link.key))
            number = [] if B == 1 else [str(link.text + 1)]
            table.add_row(query, key, f"{link.weight:.2f}", f"L{link.layer}H{link.head}", *number)
        terminal.print(table)
    if any("·" in label for labels in reading.labels for label in labels):
        terminal.print(Text("x·2 is the second token of the character or word x."))
    if reading.unknown:
        pieces = visible_text(" ".join(reading.unknown[:20]))
        terminal.print(Text(f"{len(reading.unknown)} tokens are unknown to the model, which sees [UNK]: {pieces}"))


def _link(link: heads.Link, reading: Reading) -> Text:
    query, key = (_token(reading, link.text, position) for position in (link.query, link.key))
    number = f"[{link.text + 1}] " if len(reading.texts) > 1 else ""
    return Text.assemble(number, query, " → ", key, f" {link.weight:.2f}")


def _token(reading: Reading, text: int, position: int) -> Text:
    return Text(visible_text(reading.labels[text][position]), style="cyan")


def _save(path: Path, recording: Recording, reading: Reading, name: str, *, overwrite: bool) -> None:
    """Every tensor that was seen, named ``layer.3.entropy``; texts, tokens and layer names in the header."""
    from safetensors.torch import save as to_bytes

    tensors = {}
    for layer, seen in enumerate(recording.values()):
        for field, value in seen.items():
            parts = {"": value}
            if isinstance(value, dict):
                parts = {f".{key}": part for key, part in value.items()}
            elif isinstance(value, tuple):
                kinds = ("weights", "keys") if field == "top_k" else ("mean", "max")
                parts = {f".{kind}": part for kind, part in zip(kinds, value, strict=True)}
            for suffix, part in parts.items():
                tensors[f"layer.{layer}.{field}{suffix}"] = part.contiguous()
    header = {
        "model": name,
        "layers": list(recording),
        "texts": reading.texts,
        "tokens": reading.labels,
        "offsets": heads.OFFSETS,  # the distances that the last axis of layer.N.offsets stands for
    }
    data = to_bytes(tensors, metadata={"clearhead": json.dumps(header, ensure_ascii=False)})
    with path.open("wb" if overwrite else "xb") as file:
        file.write(data)


def _free_name(path: Path) -> Path:
    number, free = 2, path
    while os.path.lexists(free):
        free = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return free


def _check_target(path: Path | None, force: bool) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file.")
    if os.path.lexists(path):
        if not force:
            raise UserError(f"{path} exists: choose another name, or overwrite it with --force.")
        if not path.is_file():
            raise UserError(f"{path} is no regular file: choose another name.")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into.")


def _progress() -> Progress:
    errors = console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
