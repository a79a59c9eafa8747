"""Row 16: a mask and a key padding mask together.

x-transformers 261; TransformerLens 490; pytorch 97514: they are merged into floats of B x H x L x S. Here `&` keeps
the structure: what either hides is hidden; of structured masks nothing dense is made, and hidden work is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, numbers, run
from test_memory import measured

B, L, LENGTHS = 2, 7, [4, 7]
FLAGS = (numbers(L, L, seed=2) > -0.3) | torch.eye(L, dtype=torch.bool)
PADDED = torch.tensor([[False] * 4 + [True] * 3, [False] * 7])
PADDING = oracle.key_padding(LENGTHS, "right", L)
IDS = [[0, 0, 1, 1, 1, 2, 2]]

JOINED: dict[str, tuple[Callable[[], ch.Mask | None], oracle.Sees]] = {
    "causal & padding": (lambda: ch.Causal() & ch.KeyPadding(LENGTHS), oracle.both(oracle.causal(0), PADDING)),
    "window & padding": (
        lambda: ch.Window(2, 1) & ch.KeyPadding(LENGTHS),
        oracle.both(oracle.window(2, 1, 0), PADDING),
    ),
    "segments & padding": (
        lambda: ch.Segments(IDS) & ch.KeyPadding(LENGTHS),
        oracle.both(oracle.segments(IDS, IDS), PADDING),
    ),
    "tensor & padding": (
        lambda: ch.Allowed(FLAGS, axes="qk") & ch.KeyPadding(LENGTHS),
        oracle.both(oracle.table(FLAGS.numpy(), "qk"), PADDING),
    ),
    "prefix-LM & padding": (
        lambda: (ch.Causal() | ch.Prefix(3)) & ch.KeyPadding(LENGTHS),
        oracle.both(oracle.either(oracle.causal(0), oracle.prefix([3])), PADDING),
    ),
    "both of torch's module": (
        lambda: ch.mask_from_mha(~FLAGS, PADDED)[0],
        oracle.both(oracle.table(FLAGS.numpy(), "qk"), PADDING),
    ),
    "three of torch's module": (
        lambda: ch.mask_from_mha(~FLAGS, PADDED, is_causal=True)[0],
        oracle.both(oracle.both(oracle.table(FLAGS.numpy(), "qk"), PADDING), oracle.causal(0)),
    ),
}


def check_both_hide(form: str, way: Way = PLAIN, joined: str = "causal & padding") -> None:
    """What either part hides is hidden."""
    mask, sees = JOINED[joined]
    model, x = build(form), numbers(B, L, 15)
    assert_near(run(model, x, way=way, mask=mask()), model.truth(x, sees=sees), f"{form} {way} {joined}")


def check_structure() -> None:
    """The parts stay what they are, and hold what they held."""
    mask = ch.Causal() & ch.KeyPadding(LENGTHS) & ch.Window(left=2)
    assert mask.parts == (ch.Causal(), ch.KeyPadding(LENGTHS), ch.Window(left=2))
    mask, bias = ch.mask_from_mha(~FLAGS, PADDED)
    assert bias is None
    assert mask == ch.Blocked(~FLAGS, axes="qk") & ch.KeyPadding(real=~PADDED)


def check_cost(form: str, backend: str = "sdpa", training: bool = False) -> None:
    """Causal and padding of a long text: no map of L x S, and a quarter of the work."""
    long = 1499
    model = build(form, torch.float32).train(training)
    x = numbers(1, long, 15, dtype=torch.float32).requires_grad_(training)
    real = long // 2

    def products(mask: ch.Mask | None) -> tuple[int, int]:
        def call() -> None:
            with torch.set_grad_enabled(training):
                out: Tensor = model(x, mask=mask, backend=backend)
            if training:
                out.sum().backward()

        meter = measured(call)
        return meter.products, meter.largest

    masked, largest = products(ch.Causal() & ch.KeyPadding([real]))
    whole, _ = products(None)
    assert largest < 0.7 * long * long * 4, f"{form} {backend}: a tensor of {largest} bytes"
    # Of each row half the keys are real, of the first half of the rows half of these are past: 3/8 and some.
    projections = 0 if form == "function" else 15 * 15 * long * (4 if form == "module" else 16)
    share = (masked - projections) / (whole - projections)
    assert share < 0.45, f"{form} {backend}: {share:.2f} of the work"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_both_hide(form, way)


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("form", FORMS)
def test_every_pair(form: str, joined: str) -> None:
    for way in TYPICAL:
        check_both_hide(form, way, joined)


def test_structure() -> None:
    check_structure()


# The reference materialises; what the native kernels do is not counted among torch's products.
@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("form", FORMS)
def test_cost(form: str, backend: str) -> None:
    check_cost(form, backend)


@pytest.mark.parametrize("form", FORMS)
def test_parts_for_other_batches_raise(form: str) -> None:
    with pytest.raises(ch.MaskError, match="masks joined by & must agree in batch items"):
        run(build(form), numbers(B, L, 15), mask=ch.KeyPadding([4, 7]) & ch.QueryPadding([4, 7, 1]))
