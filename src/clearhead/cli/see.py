"""``clearhead see``: what the heads of a trained model do on a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn

from clearhead.cli import shown
from clearhead.cli.loading import first_line, load
from clearhead.cli.parts import Part, Wanted, layers_of, maps, parts_of, statistics
from clearhead.cli.reading import Reading, UserError, gather_texts, tokenize, tokenize_targets, written
from clearhead.cli.terminal import console, one_line_errors
from clearhead.compat.attach import attach
from clearhead.files import written as whole_file
from clearhead.observe import Observe
from clearhead.panels import panels_of
from clearhead.record import record
from clearhead.recording import Recording
from clearhead.view.report import render
from clearhead.view.text import visible_text


def see(
    text: Annotated[list[str] | None, typer.Argument(help="One or more texts; several are one padded batch.")] = None,
    file: Annotated[Path | None, typer.Option(help="A document to read as one text; - for standard input.")] = None,
    lines: Annotated[Path | None, typer.Option(help="A file with a text in each line; - for standard input.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A transformers model folder, a GGUF file, or a name in the local cache.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Encoder-decoder models: what the decoder reads, one for each text. Default: what it writes."
        ),
    ] = None,
    stat: Annotated[
        str | None,
        typer.Option(
            help="Only these numbers, of every head, as means over all queries: entropy,sink,previous,induction,"
            "offset.2 and so on. In words, duplicate and induction are means over tokens that occurred before."
        ),
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Only these layers: numbers, or how names begin: 0,3.")] = None,
    head: Annotated[str | None, typer.Option(help="Only these heads of each layer: 1,7.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every head's numbers and the best heads of each kind as JSON.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The HTML report. Default: report.html, or the next free name.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save all numbers in a .safetensors file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Show what every head of a trained model does on a text: a table, and an HTML report of all weights.

    Neither --stat nor --json writes a report, unless --out asks for one.
    """
    with one_line_errors():
        wanted = Wanted(
            stats=_listed("--stat", stat),
            layers=_listed("--layer", layer),
            heads=_numbers("--head", head),
            maps=out is not None or not (as_json or stat is not None),
        )
        statistics(wanted, None, None)  # names that don't exist, before anything is read
        texts = gather_texts(text or [], file, lines)
        _check_target(out, force)
        _check_target(save, force)
        if save is not None and out is not None and save.absolute() == out.absolute():
            raise UserError(f"--out and --save name the same file, {save}.")
        with _progress() as progress:
            task = progress.add_task("loading the model", total=None)
            network, tokenizer, name = load(model)
            source = tokenize(texts, network, tokenizer)
            layers = layers_of(network, wanted)
            _check_heads(network, wanted)
            written_to = _target(network, tokenizer, source, target or [])
            progress.update(task, total=1, completed=1)
    with _progress() as progress:
        recording, holds = _run(network, source, written_to, wanted, layers, progress)
    with one_line_errors():
        parts = parts_of(recording, layers, wanted.heads, source, written_to)
        pages = _pages(out, parts, force) if holds else []
    if as_json:
        typer.echo(shown.as_json(parts, name))
    else:
        shown.print_parts(console(), parts, name, wanted)
    messages = console(stderr=as_json)
    with one_line_errors():
        for path, part in pages:
            _write_page(path, part, name, overwrite=force)
            title = f"Report of the {part.name} attention: " if part.name else "Report: "
            messages.print(
                Text.assemble(f"\n{title}", (visible_text(str(path)), "bold"), f", {holds}. Open it in a browser.")
            )
        if wanted.maps and not holds:
            messages.print(Text("\nNo report: it would be too large. --layer and --head choose what fits."))
        if save is not None:
            _save(save, parts, name, overwrite=force)
            messages.print(Text.assemble("Numbers: ", (visible_text(str(save)), "bold")))


def _target(network: Any, tokenizer: Any, source: Reading, targets: list[str]) -> Reading | None:
    kind = type(network).__name__
    if not network.config.is_encoder_decoder:
        if targets:
            raise UserError(f"{kind} has no decoder beside an encoder: it takes no --target.")
        return None
    if targets and len(targets) != len(source.texts):
        raise UserError(f"{len(targets)} targets don't fit {len(source.texts)} texts: give one for each.")
    try:
        read = tokenize_targets(targets, network, tokenizer) if targets else written(source, network, tokenizer)
    except UserError:
        raise
    except Exception as error:  # a foreign model may want anything
        raise UserError(f"{kind} can't write text: {first_line(error)}") from None
    source.inputs.update(read.inputs)
    return read


def _check_heads(network: Any, wanted: Wanted) -> None:
    heads = getattr(network.config, "num_attention_heads", None)
    for head in wanted.heads or ():
        if isinstance(heads, int) and head >= heads:
            raise UserError(f"there is no head {head}: the layers have {heads} heads, 0 to {heads - 1}.")


def _run(
    network: nn.Module,
    source: Reading,
    target: Reading | None,
    wanted: Wanted,
    layers: dict[str, Any],
    progress: Progress,
) -> tuple[Recording, str]:
    """Run the model under `record`; and what a page of it holds, in words."""
    config: Any = network.config
    B, L = source.real.shape
    heads = config.num_attention_heads if wanted.heads is None else len(wanted.heads)
    longest = max(L, 0 if target is None else target.real.shape[1])
    flags, holds = maps(wanted, max(1, len(layers) * B * heads), longest)
    config.use_cache = False  # each token is read once: there is nothing to keep
    steps = [module for module in network.modules() if isinstance(module, nn.Linear)]
    task = progress.add_task("running the model", total=len(steps))
    with ExitStack() as stack:
        for module in steps:
            handle = module.register_forward_hook(lambda *_: progress.advance(task))
            stack.callback(handle.remove)
        with one_line_errors():
            observe = Observe(**statistics(wanted, source, target), **flags)
            with suppress(ValueError):  # a model that can't be attached keeps its own kernels
                attach(network)
            recording = stack.enter_context(record(network, observe, layers=list(layers)))
        with torch.no_grad(), one_line_errors():
            try:
                network(**source.inputs)
            except Exception as error:  # a foreign model may want anything: images, other inputs, more memory
                raise UserError(f"{type(network).__name__} can't read text: {first_line(error)}") from None
            if not len(recording):
                raise UserError(f"{type(network).__name__} called no attention layer.")
    progress.update(task, completed=len(steps))
    return recording, holds


def _pages(out: Path | None, parts: Sequence[Part], force: bool) -> list[tuple[Path, Part]]:
    """A page for each part: the encoder's is report.html, the others' report-decoder.html and report-cross.html."""

    def named(stem: Path) -> list[Path]:
        names = [stem.with_stem(f"{stem.stem}-{part.name}") for part in parts[1:]]
        return [stem, *names]

    stem, number = Path("report.html") if out is None else out, 2
    while out is None and any(os.path.lexists(path) for path in named(stem)):
        stem = Path(f"report-{number}.html")
        number += 1
    for path in named(stem):
        _check_target(path, force)
    return list(zip(named(stem), parts, strict=True))


def _write_page(path: Path, part: Part, name: str, *, overwrite: bool) -> None:
    what = f"{part.name[:1].upper()}{part.name[1:]} attention" if part.name else "Attention"
    page = render(
        panels_of(list(part.recording.items()), numbers=part.numbers, heads=part.heads),
        part.queries.labels,
        key_tokens=None if part.keys is part.queries else part.keys.labels,
        title=f"{what} in {name}",
    )
    with whole_file(path, overwrite=overwrite) as beside:
        beside.write_text(page, encoding="utf-8")


def _save(path: Path, parts: Sequence[Part], name: str, *, overwrite: bool) -> None:
    """All parts in one file, with texts and tokens as notes."""
    whole = Recording([layer for part in parts for layer in part.recording])
    for part in parts:
        for layer, seen in part.recording.items():
            whole.add(layer, seen)
    whole.notes = {
        "model": name,
        "numbers": [number for part in parts for number in part.numbers],
        "texts": parts[0].keys.texts,
        "tokens": parts[0].keys.labels,
    }
    if len(parts) > 1:
        whole.notes |= {"targets": parts[-1].queries.texts, "target_tokens": parts[-1].queries.labels}
    whole.save(path, overwrite=overwrite)


def _listed(option: str, given: str | None) -> list[str] | None:
    if given is None:
        return None
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise UserError(f"{option} takes names or numbers with commas between, not {given!r}.")
    return names


def _numbers(option: str, given: str | None) -> list[int] | None:
    names = _listed(option, given)
    if names is None:
        return None
    if not all(name.isascii() and name.isdigit() and len(name) < 7 for name in names):
        raise UserError(f"{option} takes numbers from 0 with commas between, not {given!r}.")
    return list(dict.fromkeys(int(name) for name in names))


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
