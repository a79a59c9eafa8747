"""Row 5: ``is_causal=True`` without a mask, in eval, is silently ignored, and the future is seen.

pytorch 99282, 172338, 118972; keras 23038; Kronos 199: torch sees the future in eval and raises for the same call
in train. Here causal is a mask, never a hint, and `&` joins it with everything, on every path.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import DTYPES, FEW, FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, in_torch, numbers, run

B, L = 2, 7
SEGMENTS = [[0, 0, 0, 1, 1, 1, 1]]
FLAGS = numbers(L, L) > -0.5

# The future stays hidden whatever else hides: a mask with causal in it, and the rest's meaning.
JOINED = {
    "alone": (ch.Causal, oracle.everything()),
    "with padding": (lambda: ch.Causal() & ch.KeyPadding([4, 7]), oracle.key_padding([4, 7], "right", L)),
    "after padding": (lambda: ch.KeyPadding([4, 7]) & ch.Causal(), oracle.key_padding([4, 7], "right", L)),
    "with segments": (lambda: ch.Causal() & ch.Segments(SEGMENTS), oracle.segments(SEGMENTS, SEGMENTS)),
    "with a tensor": (lambda: ch.Causal() & ch.Allowed(FLAGS, axes="qk"), oracle.table(FLAGS.numpy(), "qk")),
    "from torch's module": (lambda: ch.mask_from_mha(is_causal=True)[0], oracle.everything()),
    "from torch's function": (lambda: ch.mask_from_sdpa(is_causal=True)[0], oracle.everything()),
}


def check_causal(form: str, way: Way = PLAIN, joined: str = "alone", dtype: str = "f64") -> None:
    """The output is the truth's, and the future has no weight at all."""
    mask, rest = JOINED[joined]
    model, x = build(form, DTYPES[dtype]), numbers(B, L, 15, dtype=DTYPES[dtype])
    out = run(model, x, way=way, mask=mask())
    assert_near(out, model.truth(x, sees=oracle.both(oracle.causal(0), rest)), f"{form} {way} {joined}")
    for seen in model.seen:
        assert not seen.weights.triu(1).any(), f"{form} {way} {joined}: the future has weight"


def check_future_is_out_of_reach(form: str, way: Way = PLAIN) -> None:
    """Another future changes no bit of the past."""
    model, x = build(form), numbers(B, L, 15)
    other = torch.cat([x[:, :4], 100 * numbers(B, L, 15, seed=1)[:, 4:]], dim=1)
    before, after = (run(model, given, way=way, mask=ch.Causal()) for given in (x, other))
    assert torch.equal(before[:, :4], after[:, :4]), f"{form} {way}: the future is seen"
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_causal(form, way)
        check_future_is_out_of_reach(form, way)


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("form", FORMS)
def test_joined(form: str, joined: str) -> None:
    for way in FEW:
        check_causal(form, way, joined)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str) -> None:
    for way in TYPICAL:
        check_causal(form, way, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_does_not_open_it(form: str) -> None:
    model, x, bias = build(form), numbers(B, L, 15), 50 * numbers(L, L, seed=1)
    for way in FEW:
        out = run(model, x, way=way, mask=ch.Causal(), attn_bias=bias)
        assert_near(out, model.truth(x, sees=oracle.causal(0), bias=bias), f"{form} {way}")


def test_no_gradient_from_the_future() -> None:
    for form in FORMS:
        model, x = build(form), numbers(B, L, 15).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x, mask=ch.Causal())[:, :4].sum(), x)
        assert gradient[:, :4].any()
        assert not gradient[:, 4:].any()


@in_torch
def test_torch_ignores_it_in_eval_and_raises_in_train() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True)
    x = torch.randn(1, 5, 12)

    def call() -> Tensor:
        with torch.no_grad():
            return layer(x, is_causal=True)

    layer.eval()
    with torch.no_grad():
        unmasked = layer(x)
    assert torch.equal(call(), unmasked)
    layer.train()
    with pytest.raises(RuntimeError, match="is_causal hint"):
        call()
