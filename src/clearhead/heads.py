"""What each head of a recording does on average, and which heads do one thing most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.observe import PER_QUERY, Seen

Row = dict[str, Any]
Layers = Sequence[tuple[str, Sequence[Seen]]]

GROUPS = {"mass": "mass", "patterns": "pattern"}  # of dicts: `mass={"SEP": ...}` is the column "mass.SEP"
ON_FIRST_KEY = {
    "received": "sink",
    "received_mean": "sink",
    "value_weighted": "value_weighted.sink",
    "contribution": "contribution.sink",
}


class Head(NamedTuple):
    """A head and how much it does of what was looked for."""

    score: float
    layer: str
    number: int
    head: int


class Kind(NamedTuple):
    """What a head can be good at: the columns that tell, the first that was recorded counts."""

    columns: tuple[str, ...]
    largest: bool
    ask: str


KINDS: Mapping[str, Kind] = {
    "previous": Kind(("offset.1", "pattern.previous"), True, "offsets=[1]"),
    "next": Kind(("offset.-1",), True, "offsets=[-1]"),
    "self": Kind(("offset.0",), True, "offsets=[0]"),
    "duplicate": Kind(("pattern.duplicate",), True, "patterns=clearhead.patterns(ids)"),
    "induction": Kind(("pattern.induction",), True, "patterns=clearhead.patterns(ids)"),
    "sink": Kind(("mass.sink", "sink"), True, "received=True"),
    "local": Kind(("distance",), False, "distance=True"),
    "distant": Kind(("distance",), True, "distance=True"),
    "focused": Kind(("entropy",), False, "entropy=True"),
    "diffuse": Kind(("entropy",), True, "entropy=True"),
}


def rows_of(layers: Layers, first: int = 0) -> list[Row]:
    """One row a head: its mean of every statistic over live queries, batch items and calls.

    Args:
        layers: names, each with all calls of its layer.
        first: the number of the first of them.
    """
    rows: list[Row] = []
    for number, (name, calls) in enumerate(layers, start=first):
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for seen in calls:
            for column, total, count in _columns(seen):
                sums[column] = sums[column] + total if column in sums else total
                counts[column] = counts[column] + count if column in counts else count
        for head in range(calls[-1].sizes[1]):
            row: Row = {"layer": name, "number": number, "head": head, "queries": int(sums["queries"][head])}
            for column in sums:
                if column != "queries":
                    many = float(counts[column][head])
                    row[column] = float(sums[column][head]) / many if many else math.nan
                if column == "entropy":
                    row["effective_keys"] = math.exp(row["entropy"])
            rows.append(row)
    return rows


def find(rows: Sequence[Row], kind: str, most: int | None) -> list[Head]:
    """Heads by what they do, most of it first; those without any live query are left out.

    Raises:
        ValueError: no such kind or column, or nothing was recorded that tells.
    """
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise ValueError(f"find takes the number of heads at most, or None for all, not {most!r}.")
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in _NAMES))
    if kind not in KINDS and kind not in columns:
        raise ValueError(
            f"find({kind!r}) is no kind of head: there are {', '.join(KINDS)}, and the columns of heads(), here "
            f"{', '.join(columns) or 'none'}."
        )
    wanted = KINDS.get(kind, Kind((kind,), True, ""))
    column = next((column for column in wanted.columns if column in columns), None)
    if column is None:
        raise ValueError(
            f"find({kind!r}) reads {' or '.join(wanted.columns)}, which was not recorded: record with "
            f"Observe({wanted.ask}). Here is {', '.join(columns) or 'nothing'}."
        )
    heads = [Head(row[column], row["layer"], row["number"], row["head"]) for row in rows if column in row]
    told = [head for head in heads if not math.isnan(head.score)]
    return sorted(told, key=lambda head: -head.score if wanted.largest else head.score)[:most]


_NAMES = ("layer", "number", "head", "queries")


def _columns(seen: Seen) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of one call each column's sum over queries and batch items, and over how many, both (Hq,)."""
    B, H, L, S = seen.sizes
    alive = seen.alive.cpu()
    queries = alive.sum(dim=2)  # (B, Hq)
    count = queries.sum(dim=0)
    yield "queries", count, count
    for name, value in seen.items():
        if name in PER_QUERY:
            yield name, *_sum(value.reshape(B, H, L), alive)
        elif name in GROUPS:
            for part, values in value.items():
                yield f"{GROUPS[name]}.{part}", *_sum(values.reshape(B, H, L), alive)
        elif name == "offsets":
            for distance, values in zip(seen.observe.offsets or (), value.unbind(-1), strict=True):
                there = alive & _has_key(alive, distance, S)
                yield f"offset.{distance}", *_sum(values.reshape(B, H, L), there)
        elif name == "agreement":
            others = _plain(value.reshape(B, H, H)).sum(dim=2) / max(1, H - 1)
            yield name, (others * queries).sum(dim=0), count
    first = _first_key(seen)
    if first is None:
        return
    for name, column in ON_FIRST_KEY.items():
        if name in seen and not (name == "received_mean" and "received" in seen):
            at = _plain(seen[name].reshape(B, H, S))[torch.arange(B), :, first]
            yield column, (at * queries if name == "received_mean" else at).sum(dim=0), count


def _sum(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of (B, Hq, L) over what counts, and how many that are: both (Hq,)."""
    chosen = torch.where(where, _plain(values), 0.0)
    return chosen.sum(dim=(0, 2)), where.sum(dim=(0, 2))


def _first_key(seen: Seen) -> Tensor | None:
    """Each item's first key that receives anything, (B,): padding on the left receives nothing."""
    B, H, _, S = seen.sizes
    name = next((name for name in ON_FIRST_KEY if name in seen), None)
    if name is None or S == 0:
        return None
    return (_plain(seen[name].reshape(B, H, S)) != 0).any(dim=1).int().argmax(dim=-1)


def _plain(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _has_key(alive: Tensor, distance: int, S: int) -> Tensor:
    """Whether the key `distance` to the left of each query exists, and is real where that is known: (B, 1, L).

    In self-attention (L = S) a key is real if the query at its place is alive in some head.
    """
    B, _, L = alive.shape
    keys = torch.arange(L) + (S - L - distance)
    inside = (keys >= 0) & (keys < S)
    if L != S:
        return inside.expand(B, 1, L)
    return inside & alive.any(dim=1, keepdim=True)[..., keys.clamp(0, max(S - 1, 0))]
