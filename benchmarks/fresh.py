"""A function called in a fresh process: nothing of this one's memory, caches or settings is in it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def fresh(environment: Mapping[str, str], function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """The function's result; its errors are raised here. `environment` is set before its process starts."""
    spawn = multiprocessing.get_context("spawn")  # a forked child would share our pages, and hang in OpenMP
    with _set(environment), ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *args, **options).result()


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
