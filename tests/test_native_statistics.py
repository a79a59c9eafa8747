"""Statistics of the kernels' one pass: those of a pass of their own, for any combination; and decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from cases import Sizes
from clearhead.backends import BACKENDS
from clearhead.backends.native_calls import NAMES
from clearhead.checks import check as request_of
from clearhead.look import look
from dense import DTYPES, Call
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
    tolerance,
)

pytestmark = needs_kernels

GQA = Sizes(1, 4, 2, 37, 1300, 5, 3)
CALLS = {
    "blocks": Call(Sizes(2, 4, 2, 150, 333, 16, 8), mask="causal & keys-left"),
    "dead rows": Call(Sizes(2, 3, 3, 150, 200, 5, 7), mask="keys", bias="bq"),
    "dropout": Call(Sizes(2, 5, 1, 70, 333, 16, 8), mask="window", dropout_p=0.3),
    "pairs": Call(Sizes(2, 4, 2, 70, 333, 16, 8), "bf16", mask="allowed-bhqk", dropout_p=0.3),
    "as long as the strip": Call(Sizes(1, 2, 1, 70, 4096, 8, 4)),
    "beyond the strip": Call(Sizes(1, 2, 1, 70, 4097, 8, 4), mask="allowed-hk"),
    "some blocks beyond the strip": Call(Sizes(1, 1, 1, 530, 4500, 4, 4), mask="causal"),
    "beyond it in pairs": Call(Sizes(1, 2, 2, 70, 5003, 16, 2), "bf16", mask="keys-left"),
    "runs of keys": Call(Sizes(1, 4, 2, 5, 1027, 16, 8), mask="keys-left"),
    "runs of keys beyond the strip": Call(Sizes(2, 4, 1, 3, 5003, 16, 8), "f16", mask="allowed-bk", bias="hk"),
    "sinks": Call(Sizes(2, 4, 2, 150, 333, 16, 8), mask="causal & keys-left", sinks="each", softcap=2.0),
    "sinks in pairs": Call(Sizes(2, 4, 2, 70, 333, 16, 8), "bf16", mask="keys", sinks="wild", softcap=2.0),
    "sinks beyond the strip": Call(Sizes(1, 2, 1, 70, 4097, 8, 4), mask="causal", sinks="each"),
    "sinks of runs of keys": Call(Sizes(2, 4, 2, 5, 1027, 16, 8), mask="keys-left", sinks="wild", softcap=0.9),
    "runs that see nothing": Call(Sizes(1, 2, 2, 2, 2600, 16, 8), mask="window"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_truth_and_a_pass_of_their_own(name: str) -> None:
    call = CALLS[name]
    observe = everything(call)
    query, key, value, bias = call.tensors()
    options = (None, call.dropout_p, call.softcap, call.sink_logits())
    request = request_of(query, key, value, call.built[0], bias, *options).seeded()
    alone = look(request, observe, {})
    for name in isas():
        with isa(name):
            check(call)
            _, seen = BACKENDS["native"].see(request, observe)
        assert set(seen) == set(NAMES)  # all in the same pass, none left for another
        assert_near_each(seen, alone, tolerance(call, torch.float32))


def assert_near_each(found: dict[str, Any], expected: dict[str, Any], allowed: float) -> None:
    for name in found:
        if name == "top_k":  # of weights that differ by a rounding either may be first
            pairs = [(found[name][0], expected[name][0])]
        else:
            pairs = list(zip(tree_leaves(found[name]), tree_leaves(expected[name]), strict=True))
        for one, other in pairs:
            scale = max(1.0, float(other[other.isfinite()].abs().max()))
            assert torch.allclose(one / scale, other / scale, rtol=0, atol=2 * allowed), name


ALL_OF_THEM: dict[str, Any] = {**dict.fromkeys(FLAGS, True), "top_k": TOP_K, "offsets": OFFSETS, "mass": None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "call",
    [
        Call(Sizes(1, 2, 1, 19, 71, 6, 4), mask="causal", bias="full"),
        Call(Sizes(1, 2, 1, 3, 1025, 6, 4), mask="allowed-hk"),
    ],
    ids=["blocks", "runs of keys"],
)
def test_no_combination_changes_a_bit_of_the_context(call: Call, dtype: str) -> None:
    """All 512 of them, at each instruction set; and each field is what it is among all others."""
    call = replace(call, dtype=dtype)
    query, key, value, bias = call.tensors()
    options = {"mask": call.built[0], "attn_bias": bias, "backend": "native"}
    asked = ALL_OF_THEM | {"mass": groups(call)}
    for name in isas():
        with isa(name):
            plain = ch.attention(query, key, value, **options)
            _, all_seen = ch.attention(query, key, value, **options, observe=everything(call))
            for count in range(1, len(asked) + 1):
                for some in combinations(asked, count):
                    observe = ch.Observe(**{field: asked[field] for field in some})
                    out, seen = ch.attention(query, key, value, **options, observe=observe)
                    assert torch.equal(out, plain), f"{name}: looking at {some} changed the context"
                    assert set(seen) == set(some)
                    for field in some:
                        for one, other in zip(tree_leaves(seen[field]), tree_leaves(all_seen[field]), strict=True):
                            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6), f"{name}: {field} of {some}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal & keys-left", "scattered", "allowed-qk"])
def test_looking_changes_no_gradient(mask: str, dtype: str) -> None:
    call = Call(Sizes(2, 4, 2, 70, 131, 16, 8), dtype, mask, dropout_p=0.2)
    assert_same_bits(bits(call, everything(call)), bits(call), f"{call}: looking changed a bit")


def test_more_than_the_kernels_take_in_one_pass() -> None:
    """65 strongest keys, 17 groups, 65 offsets: the same numbers, by another pass."""
    call = Call(Sizes(2, 3, 3, 70, 131, 16, 8), mask="causal")
    query, key, value, _ = call.tensors()
    many = {str(i): torch.arange(131)[None] % (i + 2) == 0 for i in range(17)}
    observe = ch.Observe(top_k=65, mass=many, offsets=range(65), entropy=True)
    out, seen = ch.attention(query, key, value, call.built[0], observe=observe, backend="native")
    assert torch.equal(out, ch.attention(query, key, value, call.built[0], backend="native"))
    truth = call.truth
    wanted = {"top_k": truth.top(65), "offsets": truth.offsets(list(range(65))), "entropy": truth.entropy}
    found: dict[str, Tensor] = {"top_k": seen.top_k[0], "offsets": seen.offsets, "entropy": seen.entropy}
    for name, keys in many.items():
        found[f"mass {name}"], wanted[f"mass {name}"] = seen.mass[name], truth.mass(keys)
    for name, expected in wanted.items():
        assert torch.allclose(found[name].double(), expected, rtol=0, atol=1e-5), name


# -- decoding --------------------------------------------------------------------------------------------------

DECODING = [
    Call(Sizes(2, 4, 2, 1, 1500, 64, 64)),
    Call(Sizes(3, 6, 3, 1, 1777, 33, 17), mask="keys-left"),
    Call(Sizes(2, 8, 2, 2, 2048, 16, 16), "bf16", mask="causal & keys-left"),
    Call(Sizes(2, 4, 1, 3, 2500, 17, 5), "f16", mask="causal"),
    Call(Sizes(2, 3, 3, 4, 3001, 5, 7), mask="window"),
    Call(Sizes(2, 4, 4, 5, 1501, 16, 16), "bf16", mask="allowed-bk", layout="turned"),
    Call(Sizes(2, 4, 2, 6, 4099, 8, 8), mask="allowed-bhqk", bias="hk"),
    Call(Sizes(2, 4, 2, 7, 1536, 16, 16), "f16", mask="scattered"),
    Call(Sizes(1, 6, 2, 8, 5000, 16, 16), mask="causal & keys-left", layout="odd"),
    Call(Sizes(2, 6, 2, 8, 1999, 16, 16), "bf16", mask="keys", dropout_p=0.3),
    Call(Sizes(2, 4, 2, 3, 2500, 17, 5), mask="causal & keys-left", sinks="each", softcap=1.5),
    Call(Sizes(2, 6, 3, 1, 4099, 16, 16), "f16", mask="keys", sinks="wild"),
]


@pytest.mark.parametrize("call", DECODING, ids=str)
def test_decoding(call: Call) -> None:
    for name in isas():
        with isa(name):
            check(call)


@pytest.mark.parametrize("call", DECODING, ids=str)
def test_no_bit_of_decoding_depends_on_the_threads(call: Call) -> None:
    query, key, value, bias = call.tensors()

    def all_seen() -> list[Tensor]:
        torch.manual_seed(0)
        found = ch.attention(
            query, key, value, attn_bias=bias, sinks=call.sink_logits(), **call.options(), observe=everything(call)
        )
        return [found[0], *tree_leaves(dict(found[1]))]

    one = all_seen()
    for count in (2, 3):
        with threads(count):
            assert_same_bits(all_seen(), one, f"{call}: {count} threads change a bit")
