"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A name beside `path` to write to; when all went well it becomes `path`, else it vanishes.

    Raises:
        FileExistsError: `path` exists and may not be replaced, whoever made it meanwhile.
        FileNotFoundError: there is no such folder.
    """
    if not overwrite and os.path.lexists(path):
        raise _exists(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into.")
    beside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield beside
        if overwrite:
            os.replace(beside, path)
        else:
            _move_to_free_name(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _move_to_free_name(beside: Path, path: Path) -> None:
    try:
        os.link(beside, path)  # unlike a rename, fails where something is
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise _exists(path) from None
        os.replace(beside, path)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists: choose another name, or pass overwrite=True.")
