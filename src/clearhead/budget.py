"""What it takes to keep what `Observe` asks for, in bytes: known from the sizes, before any of it exists."""

from __future__ import annotations

import torch

from clearhead.errors import TooLargeError
from clearhead.observe import At, Observe, indices


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
    costs = dict.fromkeys(("lse", "entropy", "max_weight", "max_score", "distance", "rest", "lookback"), by_query)
    costs |= dict.fromkeys(("received", "received_mean", "value_weighted", "contribution"), by_key)
    costs["agreement"] = B * H * H * exact
    costs["top_k"] = B * H * L * (observe.top_k or 0) * (exact + 4)
    costs["mass"] = by_query * len(observe.mass or {})
    costs["patterns"] = by_query * len(observe.patterns or {})
    costs["offsets"] = by_query * len(observe.offsets or ())
    costs["pooled"] = 2 * B * H * (observe.pooled or 0) ** 2 * exact
    for name in ("weights", "scores", "masked_scores", "dropped_weights"):
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


def check_bytes(observe: Observe, costs: dict[str, int], what: str) -> None:
    """Raise TooLargeError if the costs together are more than `observe` allows.

    Args:
        observe: what is asked, and its `allow_bytes`.
        costs: bytes by field, of one call or of many.
        what: what they are the costs of, in words with numbers.
    """
    total = sum(costs.values())
    if total <= observe.allow_bytes:
        return
    largest = sorted(costs, key=lambda name: -costs[name])[:3]
    parts = ", ".join(f"{name} {_readable(costs[name])}" for name in largest)
    raise TooLargeError(
        f"what observe asks for takes {total} bytes ({_readable(total)}: {parts}) for {what}, and allow_bytes is "
        f"{observe.allow_bytes} ({_readable(observe.allow_bytes)}). Ask for some rows, as in "
        f"weights=At(heads=[0], queries=[-1]), for pooled=256 in place of a map, or for statistics; or allow it: "
        f"Observe(..., allow_bytes={total})."
    )


def _readable(count: int) -> str:
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
