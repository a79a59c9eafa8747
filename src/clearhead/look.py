"""What `Observe` asks for, computed beside the output by the same tiles, and never touching it.

Statistics are sums over a tile's weights, so they take O(L) memory; maps (`weights`, `scores`, ...) are computed
for the heads and queries asked for only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.backends.blockwise import assemble, dropped, over_tiles, raw_scores, visible_tile, weights_of
from clearhead.backends.nonfinite import SetAside, set_aside
from clearhead.checks import Request
from clearhead.derived import DERIVED, derive, pattern_weights, sources
from clearhead.masks import ALL, Allowed, Tile
from clearhead.measures import contribution, disagreement, pattern_weight
from clearhead.observe import MAPS, STATISTICS, At, Observe, indices
from clearhead.plan import TILE_ELEMENTS, tiles


@dataclass(frozen=True, eq=False)
class Sight:
    """What there is to see in one tile; hidden weights are 0, hidden scores -inf."""

    weights: Tensor  # (b, h, q, k)
    scores: Tensor  # (b, h, q, k)
    visible: Tensor | None  # bool, broadcastable to them; None = everything
    sinks: Tensor | None  # (h, 1)
    rest: Tensor | None  # (b, h, q), of the sinks
    query_positions: Tensor  # (q,), on the axis of the keys
    key_positions: Tensor  # (k,)
    tile: Tile
    value: Tensor  # (b, hkv, k, Ev), finite
    spoilt: Tensor | None  # bool (b, h, q), queries that see something non-finite; None = none


def look(request: Request, observe: Observe, found: dict[str, Any]) -> dict[str, Any]:
    """Every statistic and map that `observe` asks for, by name.

    Args:
        request: the call.
        observe: what is asked.
        found: statistics that are known already.
    """
    if observe.rest and request.sinks is None and "rest" not in found:
        found = found | {"rest": request.query.new_zeros(request.sizes[:3], dtype=request.acc_dtype)}
    needed = sources(observe, request)
    if not observe.lse and "lse" not in found:
        needed = replace(needed, lse=False)  # it is for the patterns of the kernels only
    asked = [name for name in STATISTICS if needed.asks(name) and name not in found]
    maps = [name for name in MAPS if observe.asks(name)]
    derived = any(observe.asks(name) for name in DERIVED)
    with torch.set_grad_enabled(observe.grad and torch.is_grad_enabled()):
        finite, aside = set_aside(request) if asked or maps or derived else (request, None)
        if "patterns" in asked and "lse" in found:
            found = found | pattern_weights(finite, observe, found["lse"])
            asked = [name for name in asked if name not in found]
        # In a graph each statistic is a pass of its own: a checkpoint recomputes all that was computed together,
        # and would keep what the loss makes no use of.
        together = [[name] for name in asked] if finite.needs_grad else [asked] if asked else []
        for names in together:
            found = found | _statistics(finite, aside, _only(needed, names))
        found = found | derive(finite, aside, observe, found)
        for name in maps:
            at = getattr(observe, name)
            found = found | {name: _map(finite, aside, name, At() if at is True else at)}
    if observe.mass is not None:
        found = found | {"mass": {name: found["mass"][name] for name in observe.mass}}
    return {name: found[name] for name in (*STATISTICS, *MAPS) if observe.asks(name)}


def _only(observe: Observe, names: list[str]) -> Observe:
    """The same, with these statistics only."""
    nothing: dict[str, Any] = {
        f.name: f.default for f in fields(observe) if f.name in STATISTICS and f.name not in names
    }
    return replace(observe, **nothing)


# -- statistics ------------------------------------------------------------------------------------------------


def _sharpness(sight: Sight, observe: Observe) -> dict[str, Tensor]:
    """The largest weight, log-sum-exp and entropy of each query, which share their work; those asked for."""
    # The weight of that very score, not the largest weight: of two that round alike the gradients would be mixed up.
    top, at = sight.scores.max(dim=-1)  # -inf in a dead row, with a weight of 0
    max_weight = sight.weights.gather(-1, at[..., None]).squeeze(-1)
    most = max_weight
    if sight.sinks is not None and sight.rest is not None:
        beyond = top < sight.sinks
        top, most = torch.where(beyond, sight.sinks, top), torch.where(beyond, sight.rest, max_weight)
    # The largest weight is exp(largest score - lse): two maxima instead of another pass of exponentials.
    lse = torch.where(most == 0, -torch.inf, top - most.log())
    found = {"max_weight": max_weight, "lse": lse}
    if observe.entropy:
        # -sum w log w with log w = score - lse: exact for small weights, and hidden ones count as 0. Beside a score
        # of 1e38 the lse itself has no room for the log of the largest weight.
        log_weights = sight.scores - top[..., None] + most.log()[..., None]
        if sight.visible is not None:
            log_weights = log_weights.masked_fill(~sight.visible, 0.0)
        found["entropy"] = 0.0 - (sight.weights * log_weights).sum(dim=-1)
    return {name: part for name, part in found.items() if observe.asks(name)}


def _distance(sight: Sight) -> Tensor:
    apart = (sight.query_positions[:, None] - sight.key_positions).abs()
    return (sight.weights * apart.to(sight.weights.dtype)).sum(dim=-1)


def _over_all_keys(by_key: Tensor, tile: Tile) -> Tensor:
    assert isinstance(tile.keys, slice)
    return F.pad(by_key, (tile.keys.start, tile.S - tile.keys.stop))


def _top_k(sight: Sight, k: int) -> tuple[Tensor, Tensor]:
    weights = sight.weights
    if sight.visible is not None:
        weights = weights.masked_fill(~sight.visible, -1.0)  # a hidden key comes after a visible zero
    top, at = weights.topk(min(k, weights.shape[-1]), dim=-1)
    keys = sight.key_positions[at].masked_fill(top < 0, -1).int()
    missing = (0, k - top.shape[-1])
    return F.pad(top.clamp_min(0.0), missing), F.pad(keys, missing, value=-1)


def _offsets(sight: Sight, offsets: tuple[int, ...]) -> Tensor:
    distances = torch.tensor(offsets, device=sight.weights.device)
    start = sight.key_positions[0]
    at = sight.query_positions[:, None] - distances - start
    inside = (at >= 0) & (at < sight.weights.shape[-1])
    at = at.clamp(0, sight.weights.shape[-1] - 1).expand(*sight.weights.shape[:2], -1, -1)
    return sight.weights.gather(-1, at).masked_fill(~inside, 0.0)


def _mass(sight: Sight, keys: Tensor) -> Tensor:
    rows = keys.to(sight.weights.device)
    rows = rows[sight.tile.batch] if rows.shape[0] != 1 else rows
    return (sight.weights @ rows[:, None, sight.tile.keys, None].to(sight.weights.dtype)).squeeze(-1)


def _pooled(sight: Sight, n: int) -> dict[str, Tensor]:
    """Sums and maxima of this tile's rows over n x n cells, and how many live rows each row of cells has.

    Cell i of n covers [floor(i L / n), ceil((i + 1) L / n)), as in torch's adaptive pooling; so do its keys.
    """
    tile, weights = sight.tile, sight.weights
    assert isinstance(tile.keys, slice)
    assert isinstance(tile.queries, slice)
    b, h, rows, _ = weights.shape
    if rows == 0:
        maps = weights.new_zeros(b, h, n, n)
        return {"pooled sum": maps, "pooled max": maps, "pooled rows": maps[..., 0]}
    whole = F.pad(weights, (tile.keys.start, tile.S - tile.keys.stop)).flatten(0, 2)[:, None]
    mean = F.adaptive_avg_pool1d(whole, n).reshape(b, h, rows, n)
    top = F.adaptive_max_pool1d(whole, n).reshape(b, h, rows, n)
    alive = weights.new_ones(b, h, rows)
    if sight.visible is not None:
        alive = alive * sight.visible.any(dim=-1)
    # Cells that a row of this tile falls in; in the others it adds nothing.
    first, last = tile.queries.start, tile.queries.stop
    cells = range(first * n // tile.L, -(-last * n // tile.L))
    bounds = [(max(i * tile.L // n, first) - first, min(-(-(i + 1) * tile.L // n), last) - first) for i in cells]
    empty = (cells.start, n - cells.stop)
    return {
        "pooled sum": F.pad(torch.stack([mean[:, :, i:j].sum(2) for i, j in bounds], 2), (0, 0, *empty)),
        "pooled max": F.pad(torch.stack([top[:, :, i:j].amax(2) for i, j in bounds], 2), (0, 0, *empty)),
        "pooled rows": F.pad(torch.stack([alive[:, :, i:j].sum(2) for i, j in bounds], 2), empty),
    }


def _measure(sight: Sight, observe: Observe) -> dict[str, Tensor]:
    """Everything asked for of one tile; composite results under names of their own."""
    found: dict[str, Tensor] = {}
    if observe.max_score:
        found["max_score"] = sight.scores.amax(dim=-1)
    if observe.lse or observe.entropy or observe.max_weight:
        found |= _sharpness(sight, observe)
    if observe.distance:
        found["distance"] = _distance(sight)
    if observe.received:
        found["received"] = _over_all_keys(sight.weights.sum(dim=-2), sight.tile)
    if observe.contribution:
        by_key = contribution(sight.weights, sight.value, sight.spoilt, sight.visible)
        found["contribution"] = _over_all_keys(by_key, sight.tile)
    if observe.agreement:
        found["agreement sum"], found["agreement rows"] = disagreement(sight.weights, sight.visible, sight.rest)
    if observe.rest and sight.rest is not None:
        found["rest"] = sight.rest
    if observe.top_k:
        found["top weights"], found["top keys"] = _top_k(sight, observe.top_k)
    for name, keys in (observe.mass or {}).items():
        found[f"mass {name}"] = _mass(sight, keys)
    for name, pattern in (observe.patterns or {}).items():
        found[f"pattern {name}"] = pattern_weight(sight.weights, pattern._tile(sight.tile))
    if observe.offsets is not None:
        found["offsets"] = _offsets(sight, tuple(observe.offsets))
    if observe.pooled:
        found |= _pooled(sight, observe.pooled)
    return found


# What each tile adds to one total; all else is put side by side, query after query.
_TOTALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "received": torch.add,
    "contribution": torch.add,
    "agreement sum": torch.add,
    "agreement rows": torch.add,
    "pooled sum": torch.add,
    "pooled rows": torch.add,
    "pooled max": torch.maximum,
}


def _statistics(request: Request, aside: SetAside | None, observe: Observe) -> dict[str, Any]:
    _, _, _, S = request.sizes
    if S == 0:
        return _of_no_keys(request, observe)

    by_query: dict[str, list[tuple[Tile, Tensor]]] = {}
    totals: dict[tuple[str, int], Tensor] = {}  # by name and first batch item
    for tile, part in over_tiles(request, tiles(request), lambda t: _measure(_sight(request, aside, t), observe)):
        assert isinstance(tile.batch, slice)
        for name, value in part.items():
            if name in _TOTALS:
                at = (name, tile.batch.start)
                totals[at] = _TOTALS[name](totals[at], value) if at in totals else value
            else:
                by_query.setdefault(name, []).append((tile, value))

    found: dict[str, Any] = {name: assemble(parts) for name, parts in by_query.items()}
    for name in _TOTALS:
        items = [totals[at] for at in sorted(totals) if at[0] == name]
        if items:
            found[name] = torch.cat(items)
    if observe.top_k:
        found["top_k"] = (found.pop("top weights"), found.pop("top keys"))
    if observe.mass is not None:
        found["mass"] = {name: found.pop(f"mass {name}") for name in observe.mass}
    if observe.patterns is not None:
        found["patterns"] = {name: found.pop(f"pattern {name}") for name in observe.patterns}
    if observe.agreement:
        found["agreement"] = found.pop("agreement sum") / found.pop("agreement rows").clamp_min(1.0)
    if observe.pooled:
        rows = found.pop("pooled rows").clamp_min(1.0)[..., None]
        found["pooled"] = (found.pop("pooled sum") / rows, found.pop("pooled max"))
    return {name: found[name] for name in STATISTICS if name in found}


def _of_no_keys(request: Request, observe: Observe) -> dict[str, Any]:
    """S = 0: look at one hidden key instead, and leave it out of what has an axis of keys."""
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (request.key, request.value))
    hidden = Allowed(torch.zeros(1, 1, dtype=torch.bool, device=key.device), axes="qk")
    padded = replace(request, key=key, value=value, mask=hidden, attn_bias=None)
    mass = {name: F.pad(keys, (0, 1)) for name, keys in (observe.mass or {}).items()}
    found = _statistics(padded, None, replace(observe, mass=mass or None, patterns=None))
    for name in ("received", "contribution"):
        if name in found:
            found[name] = found[name][..., :0]
    if observe.patterns is not None:
        nothing = request.query.new_zeros(request.sizes[:3], dtype=request.acc_dtype)
        found["patterns"] = dict.fromkeys(observe.patterns, nothing)
    return found


def _sight(request: Request, aside: SetAside | None, tile: Tile) -> Sight:
    weights, scores, visible, sinks, rest = weights_of(request, tile)
    spoilt = None
    if aside is not None:
        spoilt = aside.sees(tile, values=True)
        rows = aside.sees(tile, values=False)
        rest = None if rest is None else rest.masked_fill(rows, torch.nan)
        sees_nan = rows[..., None] if visible is None else rows[..., None] & visible
        weights, scores = (part.masked_fill(sees_nan, torch.nan) for part in (weights, scores))
    device = request.query.device
    queries = torch.arange(tile.L, device=device)[tile.queries] + tile.S - tile.L
    keys = torch.arange(tile.S, device=device)[tile.keys]
    value = request.value[tile.batch, :, tile.keys]
    return Sight(weights, scores, visible, sinks, rest, queries, keys, tile, value, spoilt)


# -- maps ------------------------------------------------------------------------------------------------------


def _map(request: Request, aside: SetAside | None, name: str, at: At) -> Tensor:
    """One map, (B, heads, queries, keys), for the heads, queries and keys asked for."""
    B, H, L, S = request.sizes
    device = request.query.device
    heads, queries, keys = (
        None if chosen is None else chosen.to(device)
        for chosen in (
            indices("heads", at.heads, H),
            indices("queries", at.queries, L),
            indices("keys", at.keys, S),
        )
    )

    def part(batch: slice, rows: slice | Tensor) -> Tensor:
        tile = Tile(batch, ALL if heads is None else heads, rows, slice(0, S), L, S, device)
        if keys is None:
            return _map_tile(request, aside, name, tile)
        if name in ("scores", "masked_scores"):  # a score needs no other key
            return _map_tile(request, aside, name, tile._replace(keys=keys))
        return _map_tile(request, aside, name, tile)[..., keys]

    if at.last_real:
        last = _last_alive(request)
        return torch.cat([part(slice(b, b + 1), last[b : b + 1]) for b in range(B)]) if B else part(slice(0, 0), ALL)
    shown = H if heads is None else len(heads)
    step = max(1, TILE_ELEMENTS // max(1, B * shown * S))
    if queries is None:
        runs: list[slice | Tensor] = [slice(i, min(i + step, L)) for i in range(0, max(L, 1), step)]
    else:
        runs = list(queries.split(step))
    return torch.cat([part(slice(0, B), rows) for rows in runs], dim=2)


def _map_tile(request: Request, aside: SetAside | None, name: str, tile: Tile) -> Tensor:
    if name in ("scores", "masked_scores"):
        # Scores show the inputs as they came, NaN and all.
        scores = raw_scores(request if aside is None else aside.original, tile)
        visible = visible_tile(request, tile) if name == "masked_scores" else None
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    weights = _sight(request, aside, tile).weights
    return dropped(request, tile, weights) if name == "dropped_weights" else weights


def _last_alive(request: Request) -> Tensor:
    """(B,), each item's last query that sees a key in some head; the last of all if there is none."""

    def alive(tile: Tile) -> Tensor:
        visible = visible_tile(request, tile)
        rows = torch.ones(1, 1, 1, dtype=torch.bool, device=tile.device) if visible is None else visible.any(dim=-1)
        return rows.expand(request.query[tile.batch, :, tile.queries].shape[:3])

    seeing = assemble((tile, alive(tile)) for tile in tiles(request)).any(dim=1)
    L = request.query.shape[2]
    last = torch.where(seeing, torch.arange(L, device=seeing.device), -1).amax(dim=-1)
    return last.where(last >= 0, L - 1)
