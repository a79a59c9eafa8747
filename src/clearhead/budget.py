"""Whether a call can be asked for what `Observe` asks, and how many bytes that takes: before any of it exists."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.checks import Request
from clearhead.errors import ShapeError, TooLargeError
from clearhead.observe import MAPS, PER_KEY, PER_QUERY, At, Observe, indices


def check_observe(observe: Observe, request: Request) -> None:
    """Validate what is to be looked at in a call.

    Raises:
        TypeError: not an `Observe`.
        IndexError: an `At` outside the inputs.
        ShapeError: a group of keys in `mass` that is not (B|1, S), a `lookback` that is not (B|1,), or a pattern on
            another device.
        MaskError: a pattern that doesn't fit.
        TooLargeError: it takes more than `allow_bytes`.
    """
    if not isinstance(observe, Observe):
        raise TypeError(f"observe must be an Observe, as in Observe(entropy=True), not {observe!r}.")
    B, H, L, S = request.sizes
    for name in MAPS:
        at = getattr(observe, name)
        if isinstance(at, At):
            indices("heads", at.heads, H)
            indices("queries", at.queries, L)
            indices("keys", at.keys, S)
            if at.last_real and L == 0:
                raise IndexError("At(last_real=True) needs at least one query: there are none.")
    for name, keys in (observe.mass or {}).items():
        if keys.shape[0] not in (1, B) or keys.shape[1] != S:
            raise ShapeError(
                f"Observe(mass={{{name!r}: ...}}) must be (B|1, S) with B={B}, S={S}, not {tuple(keys.shape)}."
            )
    for name, pattern in (observe.patterns or {}).items():
        pattern._check(B, H, L, S)
        if pattern.device not in (None, request.query.device):
            raise ShapeError(
                f"Observe(patterns={{{name!r}: ...}}) is on {pattern.device}, the query on {request.query.device}: "
                f"use mask.to({str(request.query.device)!r})."
            )
    if isinstance(observe.lookback, Tensor) and observe.lookback.shape[0] not in (1, B):
        raise ShapeError(
            f"Observe(lookback=...) must be a number or (B,) with B={B}, not {tuple(observe.lookback.shape)}."
        )
    if not torch.compiler.is_exporting():  # of a program for any length nothing is known
        check_size(observe, request)


def bytes_seen(
    observe: Observe,
    sizes: tuple[int, int, int, int],
    *,
    kv_heads: int | None = None,
    widths: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes of each field that `observe` asks for, of one call.

    Args:
        observe: what is asked.
        sizes: (B, Hq, L, S) of the call.
        kv_heads: Hkv; None = Hq.
        widths: (E, Ev), the head widths.
        dtype: of the inputs.

    Returns:
        bytes by field; the module's output counts as wide as the merged heads.

    Example:
        >>> from clearhead import At, Observe
        >>> bytes_seen(Observe(entropy=True, weights=At(queries=[-1])), (1, 32, 4096, 4096))
        {'entropy': 524288, 'weights': 524288}
    """
    B, H, L, S = sizes
    E, Ev = widths
    shared = H if kv_heads is None else kv_heads
    exact = 8 if dtype == torch.float64 else 4
    by_query, by_key = B * H * L * exact, B * H * S * exact
    costs = dict.fromkeys(PER_QUERY, by_query) | dict.fromkeys(PER_KEY, by_key)
    costs["agreement"] = B * H * H * exact
    costs["top_k"] = B * H * L * (observe.top_k or 0) * (exact + 4)
    costs["mass"] = by_query * len(observe.mass or {})
    costs["patterns"] = by_query * len(observe.patterns or {})
    costs["offsets"] = by_query * len(observe.offsets or ())
    costs["pooled"] = 2 * B * H * (observe.pooled or 0) ** 2 * exact
    for name in MAPS:
        costs[name] = exact * _pairs(getattr(observe, name), sizes)
    query, context = B * H * L * E, B * H * L * Ev
    key, value = B * shared * S * E, B * shared * S * Ev
    elements = {"query": query, "key": key, "value": value, "context": context, "query_projected": query}
    elements |= {"key_projected": key, "value_projected": value, "merged": context, "output": context}
    costs |= {name: count * dtype.itemsize for name, count in elements.items()}
    return {name: cost for name, cost in costs.items() if observe.asks(name)}


def _pairs(at: bool | At, sizes: tuple[int, int, int, int]) -> int:
    """How many numbers a map has, or the part of it that is chosen."""
    B, H, L, S = sizes
    if not isinstance(at, At):
        return B * H * L * S
    for name, size in (("heads", H), ("queries", L), ("keys", S)):
        chosen = indices(name, getattr(at, name), size)
        count = size if chosen is None else len(chosen)
        B *= 1 if name == "queries" and at.last_real else count
    return B


def check_size(observe: Observe, request: Request, layers: int = 1) -> None:
    """Raise TooLargeError if what is to be seen of a call, or of one in each of so many layers, is too large."""
    query, key, value = request.query, request.key, request.value
    widths = (query.shape[3], value.shape[3])
    of_one = bytes_seen(observe, request.sizes, kv_heads=key.shape[1], widths=widths, dtype=query.dtype)
    costs = {name: layers * cost for name, cost in of_one.items()}
    total = sum(costs.values())
    if total <= observe.allow_bytes:
        return
    B, H, L, S = request.sizes
    what = "a call" if layers == 1 else f"{layers} layers, all as the first,"
    largest = sorted(costs, key=lambda name: -costs[name])[:3]
    parts = ", ".join(f"{name} {_readable(costs[name])}" for name in largest)
    raise TooLargeError(
        f"what observe asks for takes {total} bytes ({_readable(total)}: {parts}) for {what} with B={B}, Hq={H}, "
        f"L={L}, S={S}, and allow_bytes is {observe.allow_bytes} ({_readable(observe.allow_bytes)}). Ask for some "
        f"rows, as in weights=At(heads=[0], queries=[-1]), for pooled=256 in place of a map, or for statistics; or "
        f"allow it: Observe(..., allow_bytes={total})."
    )


def _readable(count: int) -> str:
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
