"""Every instruction set, every remainder of its vectors and blocks: output, statistics and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
from cases import Sizes
from conformance import assert_near
from covering import covering
from dense import BIASES, DTYPES, LAYOUTS, MASKS, Call
from native_checks import check, isa, isas, needs_kernels

pytestmark = needs_kernels

# Around vectors of 4, 8 and 16 floats; around blocks of 64 queries, of 64 and 256 keys.
WIDTHS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 80, 128)
LENGTHS = (0, 1, 2, 13, 32, 63, 64, 65, 130, 257, 600)
HEADS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (5, 1)}
DROPOUT = {"no-dropout": 0.0, "dropout": 0.3}
CAPS = {"no-cap": None, "cap": 1.1, "wide cap": 30.0}
FACTORS = {
    "E": dict.fromkeys(map(str, WIDTHS), 1.0),
    "Ev": dict.fromkeys(map(str, WIDTHS), 1.0),
    "L": dict.fromkeys(map(str, LENGTHS), 1.0),
    "S": dict.fromkeys(map(str, LENGTHS), 1.0),
    "heads": dict.fromkeys(HEADS, 1.0),
    "dtype": dict.fromkeys(DTYPES, 1.0),
    "mask": dict.fromkeys(MASKS, 1.0),
    "bias": dict.fromkeys(BIASES, 1.0),
    "layout": dict.fromkeys(LAYOUTS, 1.0),
    "dropout": dict.fromkeys(DROPOUT, 1.0),
    "softcap": dict.fromkeys(CAPS, 1.0),
    "sinks": dict.fromkeys(("none", "each", "wild"), 1.0),
}


def calls() -> list[Call]:
    """Every pair of levels of any two factors."""
    found = []
    for row in covering(FACTORS, 2, lambda *_: False, seed=3):
        E, Ev, L, S, heads, dtype, mask, bias, layout, dropout, cap, sinks = row
        sizes = Sizes(2, *HEADS[heads], int(L), int(S), int(E), int(Ev))
        found.append(Call(sizes, dtype, mask, bias, layout, DROPOUT[dropout], CAPS[cap], sinks))
    return found


CALLS = calls()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_instruction_set(call: Call) -> None:
    for name in isas():
        with isa(name):
            try:
                check(call)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


# -- the matrices themselves -----------------------------------------------------------------------------------

SMALL = [
    Call(Sizes(2, 4, 2, 5, 7, 3, 2), mask="causal & keys-left", bias="full"),
    Call(Sizes(3, 5, 1, 7, 4, 2, 3), mask="scattered", bias="hk"),
    Call(Sizes(2, 2, 2, 3, 11, 5, 1), mask="allowed-bhqk", bias="bq", dropout_p=0.4),
    Call(Sizes(2, 2, 2, 3, 0, 5, 1)),
    Call(Sizes(2, 4, 2, 5, 7, 3, 2), mask="causal & keys-left", bias="full", softcap=0.7, sinks="wild"),
    Call(Sizes(2, 3, 3, 5, 0, 3, 2), sinks="each"),
]


@pytest.mark.parametrize("call", SMALL, ids=str)
def test_the_matrices_are_the_double_loop(call: Call) -> None:
    query, key, value, bias = (None if t is None else t.double().numpy() for t in call.tensors())
    s = call.sizes
    shown = call.built[1].expand(s.B, s.Hq, s.L, s.S).numpy()
    sinks = call.sink_logits()
    given = {"softcap": call.softcap, "sinks": None if sinks is None else sinks.double().numpy()}
    loop = oracle.attend(query, key, value, lambda *at: bool(shown[at]), bias, **given)
    kept = call.kept()
    if kept is not None:
        loop = loop.dropped(kept.expand(shown.shape).numpy(), call.dropout_p)
    truth = call.truth
    names = ("output", "weights", "lse", "entropy", "max_weight", "distance", "received", "rest", "output_size")
    for name in names:
        found = torch.as_tensor(getattr(truth, name), dtype=torch.float64)
        assert_near(found, np.asarray(getattr(loop, name)), 1e-12, name)
    assert_near(truth.offsets([0, 2, -1]), loop.offsets([0, 2, -1]), 1e-12, "offsets")
    assert_near(truth.top(3), loop.top_k(3)[0], 1e-12, "top_k")
    keys = torch.arange(s.S)[None] % 3 == 0
    assert_near(truth.mass(keys), loop.mass(keys.numpy()), 1e-12, "mass")
    gradients, sizes = truth.gradients
    expected, terms = loop.gradients(call.output_gradient().double().numpy())
    for name, gradient in gradients.items():
        wanted = expected[name]
        if name == "bias":
            axes = tuple(axis for axis, n in enumerate(gradient.shape) if n == 1)
            wanted = wanted.sum(axis=axes, keepdims=True)
        else:
            assert abs(sizes[name] - terms[name]) <= 1e-12 * max(terms[name], 1.0), name
        assert_near(gradient, wanted, 1e-12, f"gradient of {name}", terms[name] or 1.0)


@pytest.mark.parametrize("name", MASKS)
def test_rules_of_masks_agree(name: str) -> None:
    """The rule that is written here, and the library's mask."""
    s = Sizes(3, 2, 2, 129, 200, 1, 1)
    mask, shown = MASKS[name](s)
    if mask is not None:
        assert torch.equal(mask.dense(s.L, s.S).expand(s.B, s.Hq, s.L, s.S), shown.expand(s.B, s.Hq, s.L, s.S))
