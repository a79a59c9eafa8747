"""The command line: ``clearhead see``, ``walk``, ``mask`` and ``info``."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from clearhead.cli.info import info
from clearhead.cli.mask import mask
from clearhead.cli.see import see
from clearhead.cli.walk import walk

app = typer.Typer(
    name="clearhead",
    help="Multi-head attention you can see through.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (see, walk, mask, info):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"clearhead {version_of('clearhead')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Multi-head attention you can see through."""
