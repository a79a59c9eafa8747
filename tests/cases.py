"""What a call is made of: sizes, masks, biases, scales, dtypes, memory layouts; and the truth about it.

`product` says which of their combinations are tried.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

import clearhead as ch
import oracle

T = TypeVar("T", Tensor, np.ndarray)


class Sizes(NamedTuple):
    """Prime and distinct where it can be, so that a swapped axis fails."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    E: int
    Ev: int


SHAPES = {
    "mha": Sizes(2, 3, 3, 5, 7, 11, 13),
    "self": Sizes(2, 3, 3, 11, 11, 5, 5),
    "gqa": Sizes(2, 6, 3, 7, 5, 11, 11),
    "gqa-wide": Sizes(3, 4, 2, 5, 11, 7, 2),
    "mqa": Sizes(3, 5, 1, 7, 7, 2, 2),
    "one-query": Sizes(2, 3, 3, 1, 7, 5, 5),
    "one-key": Sizes(2, 3, 3, 7, 1, 5, 5),
    "one-item": Sizes(1, 2, 1, 13, 11, 3, 3),
}
EMPTY_SHAPES = {
    "no-batch": Sizes(0, 3, 3, 5, 7, 2, 2),
    "no-queries": Sizes(2, 3, 3, 0, 7, 5, 5),
    "no-keys": Sizes(2, 6, 3, 5, 0, 7, 7),
    "no-tokens": Sizes(2, 3, 3, 0, 0, 5, 5),
    "no-width": Sizes(2, 3, 3, 5, 7, 0, 2),
    "no-value-width": Sizes(2, 3, 3, 5, 7, 2, 0),
}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCALES = {"default": None, "0": 0.0, "-0.7": -0.7, "0.3": 0.3, "1.9": 1.9}
LAYOUTS = ("bhle", "blhe", "sliced", "ble", "le")

# -- masks: each function gives the library's mask and, written on its own, the oracle's rule -------------------

Built = tuple[ch.Mask | Tensor | None, oracle.Sees]


def _flags(label: str, *shape: int, share: float = 0.6) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(f"{label}{shape}".encode())).random(shape) < share


def _lengths(count: int, size: int, first: int = 0) -> list[int]:
    """From `first` up to the whole size; one item has a length in between."""
    return [min(size, first + (size * (i + 1)) // (count + 1)) if i else size - size // 3 for i in range(count)]


def _causal(s: Sizes, align: str) -> Built:
    return ch.Causal(align=align), oracle.causal(s.S - s.L if align == "end" else 0)


def _window(s: Sizes, left: int | None, right: int | None, align: str = "end") -> Built:
    return ch.Window(left, right, align), oracle.window(left, right, s.S - s.L if align == "end" else 0)


def _key_padding(s: Sizes, side: str) -> Built:
    lengths = _lengths(s.B, s.S)
    return ch.KeyPadding(lengths, side=side), oracle.key_padding(lengths, side, s.S)


def _key_padding_empty(s: Sizes) -> Built:
    lengths = [0, *_lengths(s.B, s.S)[1:]][: s.B]
    return ch.KeyPadding(lengths=torch.tensor(lengths, dtype=torch.int64)), oracle.key_padding(lengths, "right", s.S)


def _key_padding_real(s: Sizes) -> Built:
    real = _flags("real keys", s.B, s.S)
    return ch.KeyPadding(real=torch.from_numpy(real).int()), oracle.table(real, "bk")


def _key_padding_ids(s: Sizes) -> Built:
    ids = np.random.default_rng(3).integers(0, 3, (s.B, s.S))
    return ch.KeyPadding.from_ids(torch.from_numpy(ids), pad_id=2), oracle.table(ids != 2, "bk")


def _query_padding(s: Sizes, side: str) -> Built:
    lengths = _lengths(s.B, s.L)
    return ch.QueryPadding(lengths, side=side), oracle.query_padding(lengths, side, s.L)


def _query_padding_real(s: Sizes) -> Built:
    real = _flags("real queries", s.B, s.L)
    return ch.QueryPadding(real=torch.from_numpy(real)), oracle.table(real, "bq")


def _segments(s: Sizes, kind: str) -> Built:
    if (
        kind == "packed"
    ):  # contiguous documents, another cut in each item; a token stands in the same one on both sides
        cut = [[(k + b) // 3 for k in range(max(s.L, s.S))] for b in range(s.B)]
        query, key = [row[len(row) - s.L :] for row in cut], [row[len(row) - s.S :] for row in cut]
    else:
        rng = np.random.default_rng(5)
        query, key = rng.integers(0, 3, (1, s.L)).tolist(), rng.integers(0, 3, (s.B, s.S)).tolist()
    ids = [torch.tensor(rows, dtype=torch.int64).reshape(len(rows), n) for rows, n in ((query, s.L), (key, s.S))]
    return ch.Segments(*ids), oracle.segments(query, key)


def _prefix(s: Sizes, per_item: bool) -> Built:
    lengths = _lengths(s.B, s.S) if per_item else [s.S // 2]
    return ch.Prefix(lengths if per_item else lengths[0]), oracle.prefix(lengths)


def _table(s: Sizes, kind: type[ch.Allowed], axes: str, ones: str = "") -> Built:
    size = {"b": s.B, "h": s.Hq, "q": s.L, "k": s.S} | dict.fromkeys(ones, 1)
    flags = _flags(axes, *(size[axis] for axis in axes))
    mask = kind(torch.from_numpy(flags), axes=axes)
    return mask, oracle.table(~flags if kind is ch.Blocked else flags, axes)


def _bare(s: Sizes, axes: str) -> Built:
    size = {"b": s.B, "h": 1, "q": s.L, "k": s.S}
    flags = _flags("bare", *(size[axis] for axis in axes))
    return torch.from_numpy(flags), oracle.table(flags, axes)


def _and(*kinds: Callable[[Sizes], Built]) -> Callable[[Sizes], Built]:
    def build(s: Sizes) -> Built:
        (mask, sees), *rest = [kind(s) for kind in kinds]
        for other, other_sees in rest:
            mask, sees = mask & other, oracle.both(sees, other_sees)
        return mask, sees

    return build


def _or(first: Callable[[Sizes], Built], second: Callable[[Sizes], Built]) -> Callable[[Sizes], Built]:
    def build(s: Sizes) -> Built:
        (mask, sees), (other, other_sees) = first(s), second(s)
        return mask | other, oracle.either(sees, other_sees)

    return build


def _not(kind: Callable[[Sizes], Built]) -> Callable[[Sizes], Built]:
    def build(s: Sizes) -> Built:
        mask, sees = kind(s)
        return ~mask, oracle.negated(sees)

    return build


# Masks that are made of one kind, and can be joined.
KINDS: dict[str, Callable[[Sizes], Built]] = {
    "causal": lambda s: _causal(s, "end"),
    "causal-start": lambda s: _causal(s, "start"),
    "window": lambda s: _window(s, 2, 1),
    "window-past": lambda s: _window(s, 1, 0),
    "window-future": lambda s: _window(s, None, 1, "start"),
    "keys": lambda s: _key_padding(s, "right"),
    "keys-left": lambda s: _key_padding(s, "left"),
    "keys-empty": _key_padding_empty,
    "keys-real": _key_padding_real,
    "keys-ids": _key_padding_ids,
    "queries": lambda s: _query_padding(s, "right"),
    "queries-left": lambda s: _query_padding(s, "left"),
    "queries-real": _query_padding_real,
    "segments": lambda s: _segments(s, "packed"),
    "segments-mixed": lambda s: _segments(s, "mixed"),
    "prefix": lambda s: _prefix(s, False),
    "prefix-items": lambda s: _prefix(s, True),
    "allowed-qk": lambda s: _table(s, ch.Allowed, "qk"),
    "allowed-kqb": lambda s: _table(s, ch.Allowed, "kqb"),
    "allowed-hqk": lambda s: _table(s, ch.Allowed, "hqk"),
    "allowed-bhqk": lambda s: _table(s, ch.Allowed, "bhqk", ones="b"),
    "blocked-bk": lambda s: _table(s, ch.Blocked, "bk"),
    "blocked-hk": lambda s: _table(s, ch.Blocked, "hk"),
}
MASKS: dict[str, Callable[[Sizes], Built]] = {
    "none": lambda s: (None, oracle.everything()),
    **KINDS,
    "bare-qk": lambda s: _bare(s, "qk"),
    "bare-bhqk": lambda s: _bare(s, "bhqk"),
    "~window": _not(KINDS["window"]),
    "~keys": _not(KINDS["keys"]),
    "prefix-lm": _and(_or(KINDS["causal"], KINDS["prefix-items"]), KINDS["keys"]),
    "packed-causal": _and(KINDS["causal"], KINDS["segments"], KINDS["queries"]),
}
LONE = ("none", "bare-qk", "bare-bhqk")  # not a `Mask`: nothing can be joined to them
PAIRED = tuple(name for name in KINDS if name not in ("keys-ids", "queries-real", "window-future", "blocked-hk"))
PAIRS = {
    f"{a} {sign} {b}": join(MASKS[a], KINDS[b])
    for a in MASKS
    if a not in LONE
    for b in PAIRED
    for sign, join in (("&", _and), ("|", _or))
}

# -- biases: axes that are not 1, whether some are -inf, and whether they lie far from zero, in float32 --------


class Bias(NamedTuple):
    axes: str
    hides: bool = False
    shift: float = 0.0


BIASES = {
    "no-bias": None,
    "bias": Bias("bhqk"),
    "bias-qk": Bias("qk"),
    "bias-bk": Bias("bk"),
    "bias-hq": Bias("hq"),
    "bias-hides": Bias("bhqk", hides=True),
    "bias-hides-hk": Bias("hk", hides=True),
    "bias-far": Bias("hk", shift=100.0),
}
# Far from one cap scores are bent strongly, far from the other hardly.
SOFTCAPS = {"no-cap": None, "cap-0.6": 0.6, "cap-7": 7.0}


class Sinks(NamedTuple):
    hides: bool = False  # some -inf: heads without one
    shift: float = 0.0


SINKS = {"no-sinks": None, "sinks": Sinks(), "sinks-hide": Sinks(hides=True), "sinks-far": Sinks(shift=4.0)}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a call takes."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: ch.Mask | Tensor | None
    attn_bias: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

    def options(self) -> dict[str, object]:
        names = ("mask", "attn_bias", "scale", "softcap", "sinks")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Case:
    """One call, by the names of its levels."""

    mask: str
    shape: str
    dtype: str = "f64"
    bias: str = "no-bias"
    scale: str = "default"
    layout: str = "bhle"
    softcap: str = "no-cap"
    sinks: str = "no-sinks"

    def __str__(self) -> str:
        seldom = [name for name in (self.softcap, self.sinks) if not name.startswith("no-")]
        return "/".join([*(getattr(self, field.name) for field in fields(self)[:6]), *seldom])

    @property
    def sizes(self) -> Sizes:
        """Of the case; a layout without head or batch axis has one of them."""
        sizes = (SHAPES | EMPTY_SHAPES)[self.shape]
        if self.layout in ("ble", "le"):
            sizes = sizes._replace(Hq=1, Hkv=1)
        return sizes._replace(B=1) if self.layout == "le" else sizes

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def built(self) -> Built:
        """The mask, and the oracle's rule."""
        return (MASKS | PAIRS)[self.mask](self.sizes)

    def full(self, tensor: T) -> T:
        """With the axes of batch and head, whether the layout has them or not."""
        if self.layout == "le":
            return tensor[None, None]
        return tensor[:, None] if self.layout == "ble" else tensor

    def plain(self, tensor: T) -> T:
        """As the caller's tensors are: undoes `full`."""
        if self.layout == "le":
            return tensor[0, 0]
        return tensor[:, 0] if self.layout == "ble" else tensor

    def inputs(self) -> Inputs:
        """Fresh tensors, always the same numbers."""
        s = self.sizes
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def laid_out(heads: int, length: int, width: int) -> Tensor:
            if self.layout == "blhe":
                return normal(s.B, length, heads, width).to(self.torch_dtype).transpose(1, 2)
            if self.layout == "sliced":
                return normal(s.B, heads, 2 * length, 2 * width).to(self.torch_dtype)[:, :, ::2, 1::2]
            return self.plain(normal(s.B, heads, length, width).to(self.torch_dtype))

        query, key = laid_out(s.Hq, s.L, s.E), laid_out(s.Hkv, s.S, s.E)
        value = laid_out(s.Hkv, s.S, s.Ev)
        bias, sinks = self._bias(normal), self._sinks(normal)
        return Inputs(query, key, value, self.built[0], bias, SCALES[self.scale], SOFTCAPS[self.softcap], sinks)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Of the bias with all four axes."""
        kind, s = BIASES[self.bias], self.sizes
        assert kind is not None
        size = {"b": s.B, "h": s.Hq, "q": s.L, "k": s.S}
        return tuple(size[axis] if axis in kind.axes else 1 for axis in "bhqk")

    def full_bias(self, bias: Tensor) -> Tensor:
        """With all four axes: axes "qk" are given as a tensor of two, the others with as many as the query."""
        return bias.reshape(self.bias_shape)

    def _bias(self, normal: Callable[..., Tensor]) -> Tensor | None:
        kind = BIASES[self.bias]
        if kind is None:
            return None
        bias = normal(*self.bias_shape)
        if kind.hides:
            bias = bias.masked_fill(torch.from_numpy(_flags("bias", *self.bias_shape, share=0.3)), -torch.inf)
        # Far from zero a half-precision bias would be coarse; users keep such ones (ALiBi) in float32.
        dtype = torch.promote_types(self.torch_dtype, torch.float32) if kind.shift else self.torch_dtype
        bias = bias + kind.shift
        return (bias[0, 0] if kind.axes == "qk" else self.plain(bias)).to(dtype)

    def _sinks(self, normal: Callable[..., Tensor]) -> Tensor | None:
        kind, heads = SINKS[self.sinks], self.sizes.Hq
        if kind is None:
            return None
        sinks = normal(heads) + kind.shift
        if kind.hides:
            sinks = sinks.masked_fill(torch.arange(heads) % 2 == 0, -torch.inf)
        return sinks.to(torch.promote_types(self.torch_dtype, torch.float32) if kind.shift else self.torch_dtype)

    @property
    def truth(self) -> oracle.Truth:
        """The double loop on the inputs as they are after rounding to the dtype."""
        return _truth(self)

    def output_gradient(self) -> Tensor:
        """A gradient of the output, random and always the same, as the caller has it."""
        s = self.sizes
        generator = torch.Generator().manual_seed(7)
        full = torch.randn(s.B, s.Hq, s.L, s.Ev, generator=generator, dtype=torch.float64)
        return self.plain(full).to(self.torch_dtype)


@lru_cache(maxsize=512)  # thousands of them would fill the memory
def _truth(case: Case) -> oracle.Truth:
    given = case.inputs()
    query, key, value = (case.full(t).double().numpy() for t in (given.query, given.key, given.value))
    bias = None
    if given.attn_bias is not None:
        bias = case.full_bias(given.attn_bias).double().numpy()
    _, sees = case.built
    sinks = None if given.sinks is None else given.sinks.double().numpy()
    return oracle.attend(query, key, value, sees, bias, given.scale, given.softcap, sinks)
