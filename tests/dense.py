"""Calls too large for the double loop, and the truth about them as whole matrices in float64.

The matrices are held against the double loop in `test_native_kernels`. Masks have rules of their own, as tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache

import torch
from torch import Tensor

import clearhead as ch
from cases import Sizes
from clearhead.backends.dropout import kept as hash_keeps
from clearhead.checks import check as request_of
from clearhead.masks import Tile

SEED = 29  # of what dropout draws
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Built = tuple[ch.Mask | None, Tensor]  # the library's mask, and what it shows: bool, broadcasts to (B, Hq, L, S)

# -- masks -----------------------------------------------------------------------------------------------------


def _axes(s: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch item, head, query, key."""
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    b, h, q, k = (torch.arange(n).reshape(shape) for n, shape in zip((s.B, s.Hq, s.L, s.S), shapes, strict=True))
    return b, h, q, k


def _random(label: str, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{label}{shape}".encode())))


def _none(s: Sizes) -> Built:
    return None, torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _causal(s: Sizes) -> Built:
    _, _, q, k = _axes(s)
    return ch.Causal(), k <= q + s.S - s.L


def _window(s: Sizes) -> Built:
    _, _, q, k = _axes(s)
    here = q + s.S - s.L
    return ch.Window(left=37, right=5), (k >= here - 37) & (k <= here + 5)


def _keys(s: Sizes) -> Built:
    """The first item has keys left out, the second has none."""
    b, _, _, k = _axes(s)
    lengths = torch.tensor([s.S - s.S // 3, 0, s.S][: s.B])
    return ch.KeyPadding(lengths), k < lengths[b]


def _keys_left(s: Sizes) -> Built:
    b, _, _, k = _axes(s)
    lengths = torch.tensor([s.S - s.S // 3, s.S // 2, s.S][: s.B])
    return ch.KeyPadding(lengths, side="left"), k >= s.S - lengths[b]


def _queries(s: Sizes) -> Built:
    b, _, q, _ = _axes(s)
    lengths = torch.tensor([s.L // 2, s.L, 0][: s.B])
    return ch.QueryPadding(lengths), q < lengths[b]


def _packed(s: Sizes) -> Built:
    n = max(s.L, s.S)
    ids = (torch.arange(n) + 5 * torch.arange(s.B)[:, None]) // (n // 3 + 1)
    query, key = ids[:, n - s.L :], ids[:, n - s.S :]
    return ch.Segments(query, key), query[:, None, :, None] == key[:, None, None, :]


def _scattered(s: Sizes) -> Built:
    """No intervals, and no tensor of it is at hand: it goes by tiles."""
    query, key = ((_random(f"ids {n}", s.B, n) * 3).long() for n in (s.L, s.S))
    _, _, _, k = _axes(s)
    seen = (query[:, None, :, None] == key[:, None, None, :]) | (k < s.S // 5)
    return ch.Segments(query, key) | ch.Prefix(s.S // 5), seen


def _allowed(s: Sizes, axes: str) -> Built:
    """At random; and of all queries or keys a run of 80, more than a block, is hidden."""
    size = {"b": s.B, "h": s.Hq, "q": s.L, "k": s.S}
    flags = _random(axes, *(size[axis] for axis in axes)) < 0.6
    for axis in set(axes) & set("qk"):
        start = size[axis] // 3
        flags.narrow(axes.index(axis), start, min(80, size[axis] - start)).fill_(False)
    whole = flags.reshape([size[axis] if axis in axes else 1 for axis in "bhqk"])
    return ch.Allowed(flags, axes=axes), whole


def _both(*kinds: Callable[[Sizes], Built]) -> Callable[[Sizes], Built]:
    def build(s: Sizes) -> Built:
        (mask, seen), *rest = [kind(s) for kind in kinds]
        for other, also in rest:
            mask, seen = mask & other, seen & also
        return mask, seen

    return build


MASKS: dict[str, Callable[[Sizes], Built]] = {
    "none": _none,
    "causal": _causal,
    "window": _window,
    "keys": _keys,
    "keys-left": _keys_left,
    "queries": _queries,
    "packed": _packed,
    "scattered": _scattered,
    "allowed-qk": lambda s: _allowed(s, "qk"),
    "allowed-bk": lambda s: _allowed(s, "bk"),
    "allowed-hk": lambda s: _allowed(s, "hk"),
    "allowed-bq": lambda s: _allowed(s, "bq"),
    "allowed-bhqk": lambda s: _allowed(s, "bhqk"),
    "causal & keys-left": _both(_causal, _keys_left),
    "window & packed": _both(_window, _packed),
    "causal & allowed-hk": _both(_causal, lambda s: _allowed(s, "hk")),
}
BIASES = {"none": "", "full": "bhqk", "qk": "qk", "hk": "hk", "bq": "bq"}  # axes that are not 1
LAYOUTS = ("plain", "turned", "odd", "expanded")


# -- calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of the function."""

    sizes: Sizes
    dtype: str = "f32"
    mask: str = "none"
    bias: str = "none"
    layout: str = "plain"
    dropout_p: float = 0.0
    softcap: float | None = None
    sinks: str = "none"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        return "/".join([sizes, *(str(getattr(self, field.name)) for field in fields(self)[1:6]), *self._seldom()])

    def _seldom(self) -> list[str]:
        cap = [] if self.softcap is None else [f"cap-{self.softcap}"]
        return cap if self.sinks == "none" else [*cap, f"sinks-{self.sinks}"]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value and bias, always the same numbers."""
        s = self.sizes
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        def laid_out(heads: int, length: int, width: int) -> Tensor:
            if self.layout == "turned":
                return normal(s.B, length, heads, width).transpose(1, 2)
            if self.layout == "odd":  # rows that start anywhere
                return normal(s.B, heads, length, width + 3)[..., 1 : width + 1]
            if self.layout == "expanded":  # all items and heads share their numbers
                return normal(1, 1, length, width).expand(s.B, heads, length, width)
            return normal(s.B, heads, length, width)

        query, key = laid_out(s.Hq, s.L, s.E), laid_out(s.Hkv, s.S, s.E)
        value = laid_out(s.Hkv, s.S, s.Ev)
        axes = BIASES[self.bias]
        if not axes:
            return query, key, value, None
        shape = [n if axis in axes else 1 for axis, n in zip("bhqk", (s.B, s.Hq, s.L, s.S), strict=True)]
        bias = normal(*shape)
        if "k" in axes:
            bias = bias.masked_fill(_random("hides", *shape) < 0.3, -torch.inf)
        return query, key, value, bias

    def options(self) -> dict[str, object]:
        """What else the function takes; its dropout draws from `SEED` if that is torch's seed."""
        return {"mask": self.built[0], "dropout_p": self.dropout_p, "softcap": self.softcap}

    def sink_logits(self) -> Tensor | None:
        """(Hq,): of each head its own; or some that take nothing, and some nearly everything."""
        if self.sinks == "none":
            return None
        sinks = 2 * _random("sinks", self.sizes.Hq)
        if self.sinks == "wild":
            sinks[::2] = -torch.inf
            sinks[1::2] = 12.0
        return sinks.to(DTYPES[self.dtype])

    @property
    def built(self) -> Built:
        """The mask, and what it shows."""
        return MASKS[self.mask](self.sizes)

    def output_gradient(self) -> Tensor:
        """A gradient of the output."""
        s = self.sizes
        generator = torch.Generator().manual_seed(7)
        return torch.randn(s.B, s.Hq, s.L, s.Ev, generator=generator).to(DTYPES[self.dtype])

    def kept(self) -> Tensor | None:
        """Which weights the shared stream of dropout keeps, bool (B, Hq, L, S)."""
        if not self.dropout_p:
            return None
        query, key, value, _ = self.tensors()
        torch.manual_seed(SEED)
        request = request_of(query, key, value, None, None, None, self.dropout_p).seeded()
        L, S = self.sizes.L, self.sizes.S
        everywhere = slice(None)
        return hash_keeps(request, Tile(everywhere, everywhere, slice(0, L), slice(0, S), L, S, query.device))

    @property
    def truth(self) -> Truth:
        """By whole matrices, on the inputs as they are after rounding to the dtype."""
        return _truth(self)


@lru_cache(maxsize=8)  # a truth of 600 x 600 takes 100 MB
def _truth(call: Call) -> Truth:
    query, key, value, bias = call.tensors()
    sinks = call.sink_logits()
    return Truth(
        query.double(),
        key.double(),
        value.double(),
        call.built[1],
        None if bias is None else bias.double(),
        call.kept(),
        call.dropout_p,
        call.output_gradient().double(),
        call.softcap,
        None if sinks is None else sinks.double(),
    )


forget_truths = _truth.cache_clear

# -- the truth -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Truth:
    """Everything about one call, (B, Hq, L, S) maps and what follows from them."""

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    bias: Tensor | None
    kept: Tensor | None
    dropout_p: float
    doutput: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None
    scores: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    visible: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.query.shape[1] // self.key.shape[1]
        self.scale = max(self.query.shape[-1], 1) ** -0.5
        self.scores = self.scale * self.query @ self._by_head(self.key).mT
        self.slopes = torch.ones_like(self.scores)
        if self.softcap is not None:
            bent = (self.scores / self.softcap).tanh()
            self.scores, self.slopes = self.softcap * bent, 1 - bent.square()
        self.visible = self.seen.expand(self.scores.shape)
        if self.bias is not None:
            self.scores = self.scores + self.bias
            self.visible = self.visible & (self.bias != -torch.inf)
        hidden = self.scores.masked_fill(~self.visible, -torch.inf)
        self.lse = hidden.logsumexp(dim=-1) if hidden.shape[-1] else hidden.new_full(hidden.shape[:-1], -torch.inf)
        self.max_score = hidden.amax(dim=-1) if hidden.shape[-1] else self.lse
        self.alive = self.visible.any(dim=-1)
        self.rest = torch.zeros_like(self.lse)
        if self.sinks is not None:
            beside = torch.logaddexp(self.lse, self.sinks[:, None])
            self.rest = (self.sinks[:, None] - beside).exp().masked_fill(~self.alive, 0.0)
            self.lse = self.lse.where(~self.alive, beside)
        log_weights = (hidden - self.lse[..., None]).masked_fill(~self.visible, 0.0)
        self.weights = log_weights.exp().masked_fill(~self.visible, 0.0)
        factor = 0.0 if self.dropout_p == 1 else 1 / (1 - self.dropout_p)
        self.drops = 1.0 if self.kept is None else self.kept * factor
        self.entropy = 0.0 - (self.weights * log_weights).sum(dim=-1)
        S = self.weights.shape[-1]
        self.max_weight = self.weights.amax(dim=-1) if S else self.lse.new_zeros(self.lse.shape)
        self.distance = (self.weights * self.apart().abs()).sum(dim=-1)
        self.received = self.weights.sum(dim=-2)
        self.output = (self.weights * self.drops) @ self._by_head(self.value)
        self.output_size = _largest((self.weights * self.drops) @ self._by_head(self.value).abs())

    @cached_property
    def largest_score(self) -> float:
        """Of those that are finite."""
        return _largest(self.scores.nan_to_num(0.0, 0.0, 0.0))

    def apart(self) -> Tensor:
        """(L, S): how far the key lies to the left of the query's position."""
        L, S = self.weights.shape[-2:]
        return torch.arange(L)[:, None] + S - L - torch.arange(S)

    def offsets(self, distances: list[int]) -> Tensor:
        """The weights at distances to the left."""
        L, S = self.weights.shape[-2:]
        keys = torch.arange(L)[:, None] + S - L - torch.tensor(distances)
        inside = (keys >= 0) & (keys < S)
        if not S:
            return self.weights.new_zeros(*self.weights.shape[:-1], len(distances))
        at = keys.clamp(0, S - 1).expand(*self.weights.shape[:-1], -1)
        return self.weights.gather(-1, at) * inside

    def mass(self, keys: Tensor) -> Tensor:
        """The weight on a group of keys, bool (B|1, S)."""
        return (self.weights * keys[:, None, None, :]).sum(dim=-1)

    def top(self, k: int) -> Tensor:
        """The k largest weights, falling; 0 where there are fewer."""
        ordered = self.weights.topk(min(k, self.weights.shape[-1]), dim=-1).values
        return torch.nn.functional.pad(ordered, (0, k - ordered.shape[-1]))

    @cached_property
    def gradients(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Of query, key, value and bias, and the largest sum of absolute terms of each: what errors are made of."""
        key, value = self._by_head(self.key), self._by_head(self.value)
        dweights = (self.doutput @ value.mT) * self.drops
        sizes = (self.doutput.abs() @ value.abs().mT) * self.drops
        dscores = self.weights * (dweights - (self.weights * dweights).sum(dim=-1, keepdim=True))
        absolute = sizes
        sizes = self.weights * (sizes + (self.weights * sizes).sum(dim=-1, keepdim=True))
        dropped = self.weights * self.drops
        found = {
            "query": self.scale * (dscores * self.slopes) @ key,
            "key": self._by_group(self.scale * (dscores * self.slopes).mT @ self.query),
            "value": self._by_group(dropped.mT @ self.doutput),
        }
        terms = {
            "query": self.scale * (sizes * (2 - self.slopes)) @ key.abs(),
            "key": self._by_group(self.scale * (sizes * (2 - self.slopes)).mT @ self.query.abs()),
            "value": self._by_group(dropped.mT @ self.doutput.abs()),
        }
        if self.bias is not None:
            axes = [axis for axis, size in enumerate(self.bias.shape) if size == 1]
            found["bias"], terms["bias"] = (
                part.sum(dim=axes, keepdim=True) if axes else part for part in (dscores, sizes)
            )
        if self.sinks is not None:  # a value of 0, less the mean
            mean, size = ((self.weights * part).sum(dim=-1) for part in (dweights, absolute))
            found["sinks"], terms["sinks"] = (-(self.rest * mean).sum((0, 2)), (self.rest * size).sum((0, 2)))
        return found, {name: _largest(part) for name, part in terms.items()}

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.group, dim=1)

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, self.group)).sum(dim=2)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
