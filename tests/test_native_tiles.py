"""Shapes that go by tiles of bfloat16 pieces, and keys that go in chunks: from 1024 rows, 1024 keys, 24 features on
(512 without a mask of intervals); bfloat16 from 32 rows on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

import clearhead as ch
from cases import Sizes
from dense import DTYPES, MASKS, Built, Call
from native_checks import (
    FLAGS,
    OFFSETS,
    TOP_K,
    assert_same_bits,
    bits,
    check,
    everything,
    groups,
    isa,
    isas,
    needs_kernels,
    threads,
)

pytestmark = needs_kernels


def _thin_window(s: Sizes) -> Built:
    """Both edges of it fall everywhere between the places where keys are cut."""
    here, k = torch.arange(s.L)[:, None] + s.S - s.L, torch.arange(s.S)
    return ch.Window(left=101, right=0), (k >= here - 101) & (k <= here)


def _hidden_blocks(s: Sizes) -> Built:
    """Rows whose first, whose middle, and whose every block of keys is hidden."""
    seen = torch.ones(s.L, s.S, dtype=torch.bool)
    for rows, start, stop in ((slice(0, 64), 0, 131), (slice(64, 128), 128, 640), (slice(128, 192), 0, s.S)):
        seen[rows, start:stop] = False
    seen[:, 256:320] = False
    return ch.Allowed(seen, axes="qk"), seen


MORE = {"thin window": _thin_window, "hidden blocks": _hidden_blocks}


class Large(Call):
    """A call with masks of its own."""

    @property
    def built(self) -> Built:
        return (MASKS | MORE)[self.mask](self.sizes)


# Of chunks: 768 KiB hold so many keys and values in three pieces, in multiples of 256.
CHUNKS = Sizes(1, 8, 2, 257, 1031, 256, 256)
MANY_BLOCKS = Sizes(1, 2, 1, 1031, 1031, 130, 72)  # 33 blocks of queries, more than go over a chunk together
SEVERAL_HEADS = Sizes(1, 16, 2, 131, 1031, 40, 31)  # a block holds the end of one head and the start of the next
CALLS = [
    Large(SEVERAL_HEADS),
    Large(SEVERAL_HEADS, mask="causal & keys-left", sinks="wild"),
    Large(SEVERAL_HEADS, mask="queries", bias="hk", layout="odd"),
    Large(SEVERAL_HEADS, mask="keys", dropout_p=0.3),
    Large(SEVERAL_HEADS, mask="hidden blocks", softcap=1.5, layout="turned"),
    Large(Sizes(2, 4, 1, 257, 1031, 24, 64), mask="thin window", bias="full"),
    Large(Sizes(2, 1, 1, 1301, 1031, 31, 24), mask="window & packed", sinks="each", dropout_p=0.2),
    Large(Sizes(1, 2, 1, 521, 1031, 64, 130), mask="scattered", bias="bq", layout="turned"),
    Large(Sizes(3, 8, 1, 131, 1031, 72, 40), mask="keys-left", softcap=30.0, layout="expanded"),
    Large(CHUNKS),
    Large(CHUNKS, mask="thin window", layout="turned"),
    Large(CHUNKS, mask="hidden blocks", dropout_p=0.3),
    Large(CHUNKS, mask="packed", bias="hk", sinks="each", softcap=2.0),
    Large(MANY_BLOCKS, mask="causal"),
    Large(MANY_BLOCKS, mask="thin window", sinks="each"),
    Large(MANY_BLOCKS, mask="allowed-bk", bias="qk"),
    Large(Sizes(1, 1, 1, 2053, 2053, 24, 40), mask="window"),
    Large(Sizes(1, 16, 1, 67, 5003, 24, 24), mask="causal"),  # more keys than weights are kept of
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_output_statistics_and_gradients(call: Call) -> None:
    for name in isas()[:2]:
        with isa(name):
            check(call)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    "call",
    [
        Large(SEVERAL_HEADS, mask="causal & keys-left", bias="qk", sinks="each"),
        Large(SEVERAL_HEADS, mask="hidden blocks", dropout_p=0.3, softcap=2.0),
        Large(Sizes(2, 2, 2, 257, 331, 1, 130), mask="thin window", bias="full", layout="turned"),
        Large(Sizes(1, 2, 2, 257, 331, 64, 3), mask="queries", layout="odd"),  # the scale is a power of two
        Large(Sizes(1, 2, 2, 257, 1031, 256, 256), mask="window"),  # chunks of 768 keys
    ],
    ids=str,
)
def test_in_half_precision(call: Call, dtype: str) -> None:
    for name in isas()[:2]:
        with isa(name):
            check(replace(call, dtype=dtype))


@pytest.mark.parametrize("name", isas()[2:])
def test_chunks_without_tiles(name: str) -> None:
    """Of floats they are half as long again, and of bfloat16 three times."""
    with isa(name):
        check(Large(Sizes(1, 2, 2, 131, 1031, 256, 256), mask="thin window", sinks="each"))
        check(Large(Sizes(1, 2, 2, 131, 1031, 256, 256), "bf16", mask="causal"))


# -- bits ------------------------------------------------------------------------------------------------------

WATCHED: dict[str, Any] = {**dict.fromkeys(FLAGS, True), "top_k": TOP_K, "offsets": OFFSETS, "mass": None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "call",
    [
        Large(SEVERAL_HEADS, mask="thin window"),
        Large(SEVERAL_HEADS, mask="keys-left", dropout_p=0.3),
        Large(CHUNKS, mask="window"),
        Large(CHUNKS, mask="hidden blocks", sinks="each"),
        Large(MANY_BLOCKS, mask="thin window"),
        Large(Sizes(1, 16, 1, 67, 4507, 24, 24), mask="causal"),
    ],
    ids=str,
)
def test_no_statistic_changes_a_bit(call: Call, dtype: str) -> None:
    """For what each key received, weights are kept, and fewer blocks go over a chunk of keys together."""
    call = replace(call, dtype=dtype)
    query, key, value, bias = call.tensors()
    given = {**call.options(), "attn_bias": bias, "sinks": call.sink_logits(), "backend": "native"}
    asked = WATCHED | {"mass": groups(call)}

    def look(observe: ch.Observe | None) -> Any:
        torch.manual_seed(5)
        return ch.attention(query, key, value, **given, observe=observe)

    for name in isas()[:2]:
        with isa(name):
            plain = look(None)
            out, everything_seen = look(everything(call))
            assert torch.equal(out, plain), f"{name}: looking at everything changed the context"
            for field, what in asked.items():
                out, seen = look(ch.Observe(**{field: what}))
                assert torch.equal(out, plain), f"{name}: looking at {field} changed the context"
                pairs = zip(tree_leaves(seen[field]), tree_leaves(everything_seen[field]), strict=True)
                for one, other in pairs:
                    assert torch.allclose(one, other, rtol=1e-6, atol=1e-6), f"{name}: {field}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "call",
    [
        Large(SEVERAL_HEADS, mask="causal & keys-left", dropout_p=0.3),
        Large(CHUNKS, mask="thin window"),
        Large(MANY_BLOCKS, mask="causal"),
    ],
    ids=str,
)
def test_two_threads_give_the_same_output(call: Call, dtype: str) -> None:
    """And gradients that each repetition gives again."""
    call = replace(call, dtype=dtype)
    for name in isas()[:2]:
        with isa(name):
            one = bits(call)
            with threads(2):
                two = bits(call)
                assert_same_bits(bits(call, everything(call)), two, f"{name}: looking or repeating changed a bit")
            assert_same_bits(two[:1], one[:1], f"{name}: two threads changed a bit of the output")


# -- numbers that are not finite, or huge ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", [(0, 1001), (37, 1000), (129, 1003)])
def test_hidden_numbers_beside_the_edges_change_no_bit(edge: tuple[int, int], dtype: str) -> None:
    """A tile holds pairs of keys, 32 of them at a time: those beside the edges share it with what is seen."""
    start, stop = edge
    call = Large(Sizes(1, 8, 1, 131, 1031, 24, 40), dtype)
    query, key, value, _ = call.tensors()
    real = (torch.arange(1031) >= start) & (torch.arange(1031) < stop)
    whole = torch.ones(1, 1, 131, dtype=torch.bool)
    whole[..., 64:70] = False
    mask = ch.KeyPadding(real=real[None]) & ch.QueryPadding(real=whole[0])
    doutput = call.output_gradient()
    kind = DTYPES[dtype]

    def run(key: Tensor, value: Tensor, query: Tensor, observe: ch.Observe | None) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        found = ch.attention(*leaves, mask, backend="native", observe=observe)
        out, seen = (found, {}) if observe is None else found
        return [out, *torch.autograd.grad(out, leaves, doutput), *tree_leaves(dict(seen))]

    for name in isas():
        with isa(name):
            for observe in (None, ch.Observe(received=True, lse=True, top_k=3)):
                clean = run(key, value, query, observe)
                assert all(part.isfinite().all() for part in clean[:4])
                for number in (torch.nan, torch.inf, min(1e20, torch.finfo(kind).max), -torch.finfo(kind).max):
                    dirty = run(
                        key.masked_fill(~real[:, None], number),
                        value.masked_fill(~real[:, None], number),
                        query.masked_fill(~whole[0][0][:, None], number),
                        observe,
                    )
                    assert_same_bits(dirty, clean, f"{name}: hidden {number} changed a bit")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("sizes", [SEVERAL_HEADS, CHUNKS], ids=str)
def test_visible_nan(sizes: Sizes, which: str, dtype: str) -> None:
    """NaN in the rows that see it, and no bit of another changes."""
    call = Large(sizes, dtype, "thin window")
    query, key, value, _ = call.tensors()
    broken = {"query": query, "key": key, "value": value}
    visible = call.truth.visible
    bad = torch.zeros_like(call.truth.alive)
    at = 99 if which == "query" else sizes.S - 61
    broken[which] = broken[which].clone()
    broken[which][0, 1, at, -1] = torch.nan
    if which == "query":
        bad[0, 1, at] = True
    else:
        group = sizes.Hq // sizes.Hkv
        bad[0, group : 2 * group] = visible[0, group : 2 * group, :, at]
    assert 0 < bad.sum() < bad.numel()
    for name in isas()[:2]:
        with isa(name):
            clean = ch.attention(query, key, value, call.built[0], backend="native")
            dirty = ch.attention(*broken.values(), call.built[0], backend="native")
        assert_same_bits([dirty], [clean.masked_fill(bad[..., None], torch.nan)], name)


# -- accuracy --------------------------------------------------------------------------------------------------


def _plain(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Normal numbers."""


def _sharp(query: Tensor, key: Tensor, value: Tensor) -> None:
    query *= 8


def _columns(query: Tensor, key: Tensor, value: Tensor) -> None:
    value *= torch.tensor([1e-20, 1.0, 1e20, 1e-7])[torch.arange(value.shape[-1]) % 4]


def _features(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Of keys, by a factor of 1e6, and those of queries the other way."""
    sizes = 10.0 ** torch.linspace(-3, 3, key.shape[-1])
    key *= sizes
    query /= sizes


def _small_features(query: Tensor, key: Tensor, value: Tensor) -> None:
    key *= 10.0 ** -torch.linspace(0, 6, key.shape[-1])


def _shifted(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Values far from 0, whose sums are larger than what they differ by."""
    value += 100


KINDS = [_plain, _sharp, _columns, _features, _small_features, _shifted]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1031, 1301, 64, 40), (1, 1031, 1409, 130, 72), (2, 1031, 1031, 24, 31)], ids=str
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
def test_errors_in_float32_are_at_most_twice_torchs(kind: Any, sizes: tuple[int, ...], causal: bool) -> None:
    """The largest and the root of the mean square, of each column relative to its size."""
    H, L, S, E, Ev = sizes
    generator = torch.Generator().manual_seed(L)
    query, key, value = (torch.randn(1, H, *shape, generator=generator) for shape in ((L, E), (S, E), (S, Ev)))
    kind(query, key, value)
    seen = torch.ones(L, S, dtype=torch.bool).tril(S - L) if causal else None
    scores = (query.double() * E**-0.5) @ key.double().mT
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    truth, size = weights @ value.double(), value.double().abs().amax(dim=(0, 1, 2))
    found = (
        ch.attention(query, key, value, ch.Causal() if causal else None, backend="native"),
        scaled_dot_product_attention(query, key, value, attn_mask=seen),
    )
    errors = [(one.double() - truth) / size for one in found]
    for measure in (lambda x: x.abs().max(), lambda x: x.square().mean().sqrt()):
        ours, theirs = map(measure, errors)
        assert ours <= 2 * theirs, f"{ours:.2e}, and torch's is {theirs:.2e}"


def test_pieces_add_up_to_the_float() -> None:
    """A weight of 1 gives the value itself, a one among zeros the score itself: 24 bits, not 8 or 16."""
    S, E = 1031, 24
    value = torch.randn(1, 1, S, 40, generator=torch.Generator().manual_seed(3))
    value[..., 1] = torch.finfo(torch.float32).max  # rounded up it would be infinite
    value[..., 2] = 1 + torch.finfo(torch.float32).eps * torch.arange(S)
    sight = torch.arange(S)[:, None] == torch.arange(S)
    x = torch.zeros(1, 1, S, E)
    out, _ = ch.attention(x, x, value, ch.Allowed(sight, axes="qk"), backend="native", observe=ch.Observe(lse=True))
    assert torch.equal(out, value)
    key = value[..., :E].clone()
    key[..., 1] = 0.0
    query = torch.zeros_like(key)
    query[0, 0, torch.arange(S), torch.arange(S) % E] = 1.0
    mask = ch.Allowed(sight, axes="qk")
    _, seen = ch.attention(query, key, value, mask, scale=1.0, backend="native", observe=ch.Observe(max_score=True))
    assert torch.equal(seen.max_score[0, 0], key[0, 0, torch.arange(S), torch.arange(S) % E])
