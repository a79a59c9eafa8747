"""Row 9: the shapes a mask may have.

pytorch 64706, 28884, 29520, 116472; lighthouse 77: only (L, S) and (B * heads, L, S); ``repeat`` for
``repeat_interleave`` leaks one sample's mask into another; (B, L, S) with B == heads is read per head. Here axes are
named, a bare 3-D mask raises, and nothing is expanded to B x H x L x S.
"""

from __future__ import annotations

import re

import pytest
import torch

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FEW, FORMS, HEADS, PLAIN, WAYS, Way, assert_near, build, numbers, run
from test_memory import measured

B, L, S = 3, 5, 7  # as many items as heads
SIZES = {"b": B, "h": HEADS, "q": L, "k": S}
AXES = ("qk", "kq", "bqk", "qkb", "hqk", "bhqk", "hbkq", "bk", "kb", "hk", "bq", "h", "k", "bh")


def check_named(form: str, way: Way = PLAIN, axes: str = "bqk") -> None:
    """Each axis is what its letter says."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    flags = numbers(*(SIZES[axis] for axis in axes), seed=len(axes)) > -0.3
    truth = model.truth(x, memory, sees=oracle.table(flags.numpy(), axes))
    assert_near(run(model, x, memory, way=way, mask=ch.Allowed(flags, axes)), truth, f"{form} {way} {axes}")
    assert_near(run(model, x, memory, way=way, mask=ch.Blocked(~flags, axes)), truth, f"{form} {way} blocked {axes}")


def check_three_axes_raise(form: str, way: Way = PLAIN) -> None:
    """(B, L, S), (H, L, S), (B * H, L, S), (B, S): all say that axes need names; nothing is guessed."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    for shape in ((B, L, S), (1, L, S), (B * HEADS, L, S), (B, S), (S,), (S, L)):
        with pytest.raises(ch.MaskError, match=re.escape(f"not {shape}: name its axes")):
            run(model, x, memory, way=way, mask=torch.ones(shape, dtype=torch.bool))


def check_two_readings_raise(form: str, way: Way = PLAIN) -> None:
    """A bare mask that could be (L, S) or (B, S)."""
    model, x = build(form), numbers(L, L, 15)
    with pytest.raises(ch.MaskError, match=r"can mean \(L, S\) or \(B, S\)"):
        run(model, x, way=way, mask=torch.ones(L, L, dtype=torch.bool))


def check_torchs_three_axes(form: str, way: Way = PLAIN) -> None:
    """(B * heads, L, S) of torch's module: the heads of an item stand together."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    hidden = numbers(B * HEADS, L, S, seed=4) > 0.5
    mask, _ = ch.mask_from_mha(hidden, num_heads=HEADS)
    truth = model.truth(x, memory, sees=lambda b, h, q, k: not hidden[b * HEADS + h, q, k])
    assert_near(run(model, x, memory, way=way, mask=mask), truth, f"{form} {way}")


def check_not_expanded(form: str, backend: str = "sdpa") -> None:
    """A mask (B, L, S) costs no tensor of B x H x L x S, of bools or of floats."""
    model, long = build(form, torch.float32), 1499
    x = numbers(1, long, 15, dtype=torch.float32)
    mask = ch.Allowed(torch.ones(1, long, long, dtype=torch.bool).tril(), axes="bqk")
    with torch.no_grad():
        meter = measured(lambda: model(x, mask=mask, backend=backend))
    assert meter.largest < HEADS * long * long, f"{form} {backend}: a tensor of {meter.largest} bytes"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_named(form, way)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("form", FORMS)
def test_every_order_of_axes(form: str, axes: str) -> None:
    for way in (PLAIN, Way(True, True, True), Way(backend="blockwise"), Way(backend="reference")):
        check_named(form, way, axes)


@pytest.mark.parametrize("form", FORMS)
def test_what_can_be_mistaken_raises(form: str) -> None:
    for way in FEW:
        check_three_axes_raise(form, way)
        check_two_readings_raise(form, way)


@pytest.mark.parametrize("form", FORMS)
def test_torchs_three_axes(form: str) -> None:
    for way in FEW:
        check_torchs_three_axes(form, way)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])  # which materialises
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_expanded(form: str, backend: str) -> None:
    check_not_expanded(form, backend)


def test_one_items_mask_stays_its_own() -> None:
    mask = ch.Allowed(torch.tensor([[True] * 3 + [False] * 4, [True] * 7, [True] * 7]), axes="bk")
    for form in FORMS:
        model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
        masked, free = run(model, x, memory, mask=mask), run(model, x, memory)
        assert_near(masked[1:], free[1:])
        assert (masked[0] - free[0]).abs().max() > 1e-3
