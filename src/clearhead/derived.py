"""Statistics that follow from others and from the mask alone, so that they cost no pass over the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.backends.blockwise import visible_tile
from clearhead.backends.native import Native
from clearhead.backends.nonfinite import SetAside
from clearhead.checks import Request
from clearhead.masks import Tile
from clearhead.masks.intervals import EVERYTHING
from clearhead.observe import Observe
from clearhead.plan import tiles

DERIVED = ("received_mean", "value_weighted", "lookback")
CONTEXT, NEWER = "\0context", "\0newer"  # groups of keys that `lookback` adds to those asked for


def sources(observe: Observe, request: Request) -> Observe:
    """The same, with the statistics that others follow from in place of these."""
    if not any(observe.asks(name) for name in (*DERIVED, "patterns")):
        return observe
    received = observe.received or observe.received_mean or observe.value_weighted
    mass = observe.mass
    if observe.lookback is not None:
        context = torch.arange(request.sizes[3], device=request.query.device) < _context_lengths(observe, request)
        mass = {**(mass or {}), CONTEXT: context, NEWER: ~context}
    lse = observe.lse or bool(observe.patterns)
    return replace(
        observe, lse=lse, received=received, mass=mass, received_mean=False, value_weighted=False, lookback=None
    )


def derive(request: Request, aside: SetAside | None, observe: Observe, found: dict[str, Any]) -> dict[str, Any]:
    """What follows from the statistics found.

    Args:
        request: the call, finite.
        aside: what of it was not.
        observe: what is asked.
        found: what `sources` asks for.
    """
    derived: dict[str, Any] = {}
    if observe.received_mean or (observe.value_weighted and aside is not None):
        counts = queries_that_see(request)
    if observe.received_mean:
        derived["received_mean"] = found["received"] / counts.clamp_min(1)
    if observe.value_weighted:
        sizes, norms = (part.repeat_interleave(request.group, dim=1) for part in _norms(request))
        weighted = found["received"] * sizes * norms  # in this order: what gets nothing adds no 0 x inf
        if aside is not None:
            seen = aside.value.repeat_interleave(request.group, dim=1) & (counts > 0)
            weighted = weighted.masked_fill(seen, torch.nan)
        derived["value_weighted"] = weighted
    if observe.lookback is not None:
        context, newer = (
            found["mass"][name] / count.clamp_min(1)
            for name, count in zip((CONTEXT, NEWER), _visible_keys(request, observe), strict=True)
        )
        both = context + newer
        derived["lookback"] = context / torch.where(both == 0, 1.0, both)
    return derived


def _norms(request: Request) -> tuple[Tensor, Tensor]:
    """Each value's largest number, and its norm in units of that: no square overflows. (B, Hkv, S), twice."""
    value = request.value.to(request.acc_dtype)
    value = value if value.shape[-1] else F.pad(value, (0, 1))
    size = value.detach().abs().amax(dim=-1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(value / torch.where(size == 0, 1.0, size), dim=-1)
    return size[..., 0], norms


def pattern_weights(request: Request, observe: Observe, lse: Tensor) -> dict[str, Any]:
    """``exp(lse(mask & pattern) - lse(mask))`` of each pattern, by the kernels, which skip what it hides.

    Nothing where they decline. Where a query sees something non-finite its lse is NaN, and so are these.
    """
    found = {}
    for name, pattern in (observe.patterns or {}).items():
        mask = pattern if request.mask is None else request.mask & pattern
        part = Native().lse(replace(request, mask=mask, sinks=None))  # the sinks are in the whole alone
        if part is None:
            return {}
        found[name] = torch.where(part == -torch.inf, 0.0, (part - lse).exp())
    return {"patterns": found}


# -- counts of visible pairs -----------------------------------------------------------------------------------


def queries_that_see(request: Request) -> Tensor:
    """How many queries may see each key: int64 (B|1, Hq|1, S)."""
    S = request.sizes[3]
    run = _runs(request)
    if run is None:
        return _sum_by_key(request)
    # A query adds one from its first key on and takes it away behind its last: a running sum has the counts.
    first, behind = run
    steps = first.new_zeros(first.shape[0], S + 1)
    ones = torch.ones_like(first)
    steps = steps.scatter_add(1, first, ones).scatter_add(1, behind, -ones)
    return steps.cumsum(dim=1)[:, None, :S]


def _sum_by_key(request: Request) -> Tensor:
    S = request.sizes[3]
    totals: dict[int, Tensor] = {}
    for tile, visible in _visible_tiles(request):
        assert isinstance(tile.batch, slice)
        assert isinstance(tile.keys, slice)
        part = F.pad(visible.sum(dim=2), (tile.keys.start, S - tile.keys.stop))
        totals[tile.batch.start] = totals[tile.batch.start] + part if tile.batch.start in totals else part
    return torch.cat([totals[start] for start in sorted(totals)])


def _visible_keys(request: Request, observe: Observe) -> tuple[Tensor, Tensor]:
    """How many keys of the context, and newer ones, each query may see: int64 (B|1, Hq|1, L), twice."""
    lengths = _context_lengths(observe, request)
    run = _runs(request)
    if run is not None:
        first, behind = run
        context = (behind.minimum(lengths) - first.minimum(lengths))[:, None]
        return context, (behind - first)[:, None] - context
    inside = torch.arange(request.sizes[3], device=lengths.device) < lengths
    inside = inside.expand(request.sizes[0], -1)[:, None, None]

    def count(of: Callable[[Tile], Tensor]) -> Tensor:
        rows: dict[int, list[Tensor]] = {}
        for tile, visible in _visible_tiles(request):
            assert isinstance(tile.batch, slice)
            rows.setdefault(tile.batch.start, []).append((visible & of(tile)).sum(dim=-1))
        return torch.cat([torch.cat(rows[start], dim=2) for start in sorted(rows)])

    context = count(lambda tile: inside[tile.batch, ..., tile.keys])
    return context, count(lambda tile: ~inside[tile.batch, ..., tile.keys])


def _context_lengths(observe: Observe, request: Request) -> Tensor:
    """(B|1, 1)."""
    assert isinstance(observe.lookback, Tensor)
    return observe.lookback.to(request.query.device)[:, None]


def _visible_tiles(request: Request) -> Any:
    """The tiles of a call, each with what it leaves visible: bool (b, h|1, q, k)."""
    for tile in tiles(request):
        visible = visible_tile(request, tile)
        assert isinstance(tile.batch, slice)
        assert isinstance(tile.queries, slice)
        assert isinstance(tile.keys, slice)
        sizes = (tile.batch.stop - tile.batch.start, -1, tile.queries.stop - tile.queries.start)
        keys = tile.keys.stop - tile.keys.start
        if visible is None:
            visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tile.device)
        yield tile, visible.expand(*sizes, keys)


def _runs(request: Request) -> tuple[Tensor, Tensor] | None:
    """Each query's run of visible keys, [first, behind), int64 (B|1, L); None where they are not runs."""
    if request.attn_bias is not None:
        return None
    _, _, L, S = request.sizes
    run, rest = (EVERYTHING, None) if request.mask is None else request.mask._split(L, S)
    return run.ends(L, S, request.query.device) if rest is None else None
