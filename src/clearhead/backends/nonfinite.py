"""NaN and infinity: what is hidden can't leak, what is visible stays visible, whatever the backend.

Kernels multiply hidden values by a weight of 0, and 0 x NaN is NaN; some turn a visible NaN into zeros. So
non-finite rows are set aside (replaced by zeros) before any backend runs, and afterwards each query that is
non-finite itself, or sees a non-finite key, value, bias or sink, is given NaN: in the output, and in its gradient.

Finite numbers leak as well where a kernel adds -inf to a hidden score: a score that overflows gives inf - inf. Such a
kernel has rows beyond a limit set aside, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clearhead.backends.blockwise import assemble, bias_tile, visible_tile
from clearhead.checks import AUTOCAST, Request, accumulating, autocasting
from clearhead.masks import Tile
from clearhead.plan import tiles


@dataclass(frozen=True, eq=False)
class SetAside:
    """Where a request holds something non-finite.

    Attributes:
        original: the request as it came.
        query: bool (B, Hq, L), rows of query that are not finite.
        key: bool (B, Hkv, S), rows of key.
        value: bool (B, Hkv, S), rows of value.
    """

    original: Request
    query: Tensor
    key: Tensor
    value: Tensor

    def sees(self, tile: Tile, *, values: bool) -> Tensor:
        """Queries of the tile that are non-finite, or see a non-finite key, bias, sink or (if `values`) value."""
        request = self.original
        bad_keys = (self.key | self.value if values else self.key)[tile.batch, :, tile.keys]
        heads = torch.arange(request.query.shape[1], device=tile.device)[tile.heads]
        pairs = bad_keys[:, heads // request.group, None, :]
        bias = bias_tile(request, tile)
        if bias is not None:
            pairs = pairs | _no_number(bias)
        own = self.query[tile.batch][:, tile.heads][:, :, tile.queries]
        if request.sinks is not None:
            own = own | _no_number(request.sinks[tile.heads, None])
        visible = visible_tile(request, tile)
        if visible is None:
            return (own & (pairs.shape[-1] > 0)) | pairs.any(dim=-1)
        return (own & visible.any(dim=-1)) | (pairs & visible).any(dim=-1)

    def spoilt(self, *, values: bool = True) -> Tensor:
        """Bool (B, Hq, L): the same for all queries."""
        request = self.original
        if request.mask is None and request.attn_bias is None and request.sinks is None:  # every query sees every key
            by_head = (self.key | self.value if values else self.key).any(dim=-1, keepdim=True)
            return self.query | by_head.repeat_interleave(request.group, dim=1)
        return assemble((tile, self.sees(tile, values=values)) for tile in tiles(request))

    def restore(self, context: Tensor) -> Tensor:
        """The context with NaN in every row that must have it."""
        request = self.original
        bad = self.spoilt()[..., None]
        # NaN from the query itself, so that its gradient is NaN as well; other rows get no 0 x NaN from here.
        own = torch.where(bad, request.query, 0.0).sum(dim=-1, keepdim=True)
        return torch.where(bad, own * torch.where(bad, torch.nan, 1.0), context).to(context.dtype)


def set_aside(request: Request, largest: float = math.inf) -> tuple[Request, SetAside | None]:
    """The request with some rows zeroed, and which; the request itself if a glance shows that there are none.

    Args:
        request: the call.
        largest: a row with a number beyond this is set aside, as if it were not finite. Values only count where
            a gradient is wanted: their products are with weights, until the backward pass.
    """
    query, key, value = request.query, request.key, request.value
    limits = (largest, largest, largest if request.needs_grad else math.inf)
    if _surely_within(limits, request):
        return request, None
    aside = SetAside(request, *(~_rows_within(*item) for item in zip(limits, (query, key, value), strict=True)))
    bias = request.attn_bias
    if bias is not None:
        bias = torch.where(_no_number(bias), 0.0, bias)
    if request.sinks is not None:
        request = replace(request, sinks=torch.where(_no_number(request.sinks), 0.0, request.sinks))
    # masked_fill would lay them out anew, and products of another memory layout may round otherwise.
    finite = [
        tensor.clone().masked_fill_(bad[..., None], 0.0)
        for tensor, bad in ((query, aside.query), (key, aside.key), (value, aside.value))
    ]
    return request.on(finite, bias), aside


def _no_number(added: Tensor) -> Tensor:
    """Where a bias or a sink is NaN or +inf; -inf only hides."""
    return ~(torch.isfinite(added) | (added == -torch.inf))


def visible_to(request: Request, queries: Tensor) -> Tensor:
    """Bool (B, Hq, S): keys that some of these queries, bool (B, Hq, L), may see."""
    B, H, _, S = request.sizes
    found = torch.zeros(B, H, S, dtype=torch.bool, device=queries.device)
    for tile in tiles(request):
        rows = queries[tile.batch, :, tile.queries, None]
        visible = visible_tile(request, tile)
        found[tile.batch, :, tile.keys] |= (rows if visible is None else rows & visible).any(dim=2)
    return found


def by_rows(projections: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each projection of its input; a non-finite row gives NaN and takes no part in the gradient.

    A projection's weights would get 0 x NaN from a hidden row: from padding that holds NaN, say.
    """
    distinct = {id(tensor): tensor for tensor in inputs}
    finite = {key for key, tensor in distinct.items() if _all_finite([_as_projected(tensor)])}
    return [
        projection(tensor) if id(tensor) in finite else _guarded(projection, tensor)
        for projection, tensor in zip(projections, inputs, strict=True)
    ]


def _guarded(projection: nn.Module, tensor: Tensor) -> Tensor:
    bad = ~torch.isfinite(_as_projected(tensor)).all(dim=-1, keepdim=True)
    projected: Tensor = projection(tensor.masked_fill(bad, 0.0))
    return projected.masked_fill(bad, torch.nan)


def _as_projected(tensor: Tensor) -> Tensor:
    """As a linear layer reads it: autocast may make an infinity of what is finite. Not for gradients."""
    tensor, device = tensor.detach(), tensor.device.type
    autocast = tensor.dtype in AUTOCAST and autocasting(device)
    return tensor.to(torch.get_autocast_dtype(device)) if autocast else tensor


def _surely_within(limits: Sequence[float], request: Request) -> bool:
    top = []
    for added in (request.attn_bias, request.sinks):
        if added is not None and added.numel():
            highest = added.detach().amax()  # NaN and +inf come through a maximum; -inf only hides
            top.append(torch.where(highest == -torch.inf, 0.0, highest))
    tensors = [request.query, request.key, request.value]
    if math.isinf(limits[0]):
        return _all_finite([*tensors, *top])
    return _all_finite(top) and all(_all_within(*item) for item in zip(limits, tensors, strict=True))


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether a glance shows that all is finite; False where a tensor can't be looked at (compile, vmap)."""
    if torch.compiler.is_compiling():
        return False
    try:
        with torch.no_grad():
            # A sum is finite only if every term is.
            return math.isfinite(sum(t.sum(dtype=accumulating(t.dtype)) for t in tensors))
    except RuntimeError:  # vmap: no control flow on data
        return False


def _all_within(largest: float, tensor: Tensor) -> bool:
    """The same for a limit."""
    if torch.compiler.is_compiling():
        return False
    try:
        with torch.no_grad():
            low, high = torch.aminmax(tensor) if tensor.numel() else (0.0, 0.0)
            return -_limit(largest, tensor) <= float(low) and float(high) <= _limit(largest, tensor)
    except RuntimeError:
        return False


def _rows_within(largest: float, tensor: Tensor) -> Tensor:
    return (tensor.detach().abs() <= _limit(largest, tensor)).all(dim=-1)


def _limit(largest: float, tensor: Tensor) -> float:
    return min(largest, torch.finfo(tensor.dtype).max)
