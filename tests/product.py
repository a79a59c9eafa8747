"""The conformance product: every case on every path, as a covering array.

At strength 2, the default, each pair of levels of any two factors occurs in some run, and each mask alone with
each shape on each backend; at 3 (``CONFORMANCE=3``) each triple of levels does.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, fields
from functools import cache

from cases import BIASES, DTYPES, EMPTY_SHAPES, LAYOUTS, LONE, MASKS, PAIRED, SCALES, SHAPES, SINKS, SOFTCAPS, Case
from clearhead.backends import BACKENDS
from covering import covering

STRENGTH = int(os.environ.get("CONFORMANCE", "2"))
DROPOUT_P = 0.4

# Levels, and how often each is drawn where nothing is left to cover: plain ones more often, slow ones less.
FACTORS: dict[str, dict[str, float]] = {
    "mask": dict.fromkeys(MASKS, 1),
    "second": {"alone": 5} | {f"{sign} {name}": 1 for name in PAIRED for sign in "&|"},
    "shape": dict.fromkeys(SHAPES, 1) | dict.fromkeys(EMPTY_SHAPES, 0.02),
    "dtype": dict.fromkeys(DTYPES, 1),
    "bias": dict.fromkeys(BIASES, 1) | {"no-bias": 10},
    "scale": dict.fromkeys(SCALES, 1) | {"default": 5},
    "layout": dict.fromkeys(LAYOUTS, 1) | {"bhle": 3},
    "softcap": dict.fromkeys(SOFTCAPS, 1) | {"no-cap": 5},
    "sinks": dict.fromkeys(SINKS, 1) | {"no-sinks": 6},
    "backend": dict.fromkeys(BACKENDS, 1),
    "form": {"function": 3, "module": 1},  # attention(), or MultiHeadAttention around it
    "mode": {"eval": 3, "train": 3, "drops": 1},  # the last two with dropout_p 0 and above
    "grad": {"no-grad": 1, "grad": 1},
    "observe": {"nothing": 2, "statistics": 1, "maps": 1},
    "how": {"eager": 1, "compiled": 0.001},
    "cut": {"whole": 1, "rows": 1, "single": 1},  # into tiles
}
CASE_FACTORS = ("mask", "second", "shape", "dtype", "bias", "scale", "layout", "softcap", "sinks")


@dataclass(frozen=True)
class Run:
    """A case, and the path that it takes."""

    case: Case
    backend: str | None = None
    form: str = "function"
    mode: str = "eval"
    grad: str = "no-grad"
    observe: str = "nothing"
    how: str = "eager"
    cut: str = "whole"

    def __str__(self) -> str:
        path = "/".join(str(getattr(self, field.name)) for field in fields(self) if field.name != "case")
        return f"{self.case}-{path}"


def excluded(f: str, a: str, g: str, b: str) -> bool:
    """What can't be: a mask joined to what is no `Mask`, a module without width, what is declined; or is slow."""
    if f == "mask" and g == "second":
        return a in LONE and b != "alone"
    if f == "shape" and g == "form":
        return b == "module" and a in ("no-width", "no-value-width")
    if f in ("softcap", "sinks") and not a.startswith("no-"):
        return (g == "backend" and b == "sdpa") or (g == "form" and b == "module")
    if g == "backend" and b == "native":
        return a == "f64"
    if g == "backend" and b == "sdpa":
        sizes = (SHAPES | EMPTY_SHAPES).get(a) if f == "shape" else None
        widths_differ = sizes is not None and sizes.Ev != sizes.E
        return widths_differ or a in EMPTY_SHAPES or (f == "scale" and a in ("0", "-0.7"))
    if f == "backend" and g == "mode":
        return a == "sdpa" and b == "drops"
    return f == "how" and a == "compiled" and b == "single"  # dozens of tiles in one graph: minutes


@cache
def rows(strength: int) -> list[tuple[str, ...]]:
    """The array, by the names of the levels."""
    start = [
        {"second": "alone", "mask": mask, "shape": shape, "backend": backend}
        for mask, shape, backend in itertools.product(MASKS, (*SHAPES, *EMPTY_SHAPES), BACKENDS)
    ]
    return covering(FACTORS, strength, excluded, start, seed=1)


def runs(strength: int) -> list[Run]:
    """The array as runs."""
    found = []
    for row in rows(strength):
        levels = dict(zip(FACTORS, row, strict=True))
        mask, second = levels.pop("mask"), levels.pop("second")
        mask = mask if second == "alone" else f"{mask} {second}"
        case = Case(mask, *(levels.pop(name) for name in CASE_FACTORS[2:]))
        found.append(Run(case, **levels))
    return found


RUNS = runs(STRENGTH)
# The cases alone: those with an empty axis, and all others, among them the ones people have: nothing special, in
# every dtype, where every backend has its fast path.
PLAIN = [
    Case(mask, shape, dtype)
    for mask in ("none", "causal", "keys", "window-past")
    for shape in ("self", "gqa", "mqa", "mha")
    for dtype in DTYPES
]
ALL = list(dict.fromkeys([*(run.case for run in runs(2)), *PLAIN]))
CASES = [case for case in ALL if case.shape in SHAPES]
EMPTY = [case for case in ALL if case.shape in EMPTY_SHAPES]
