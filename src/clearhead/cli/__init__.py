"""The command line: ``clearhead see``, ``walk``, ``mask`` and ``info``."""

from __future__ import annotations

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
