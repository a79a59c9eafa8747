"""Row 7: a real-valued bias (ALiBi) in an encoder layer, in eval.

pytorch 118628, 107084: it becomes a hard mask that leaves each query itself alone, without a warning. Here a bias is
an argument of its own, and always added to the scores.
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
APART = (torch.arange(L)[:, None] - torch.arange(L)).abs().double()
SLOPES = torch.tensor([0.5, 0.25, 0.0625]).double()
HIDES = torch.where(numbers(L, L, seed=2) > 1, -torch.inf, numbers(L, L, seed=3))
BIASES = {
    "alibi": -SLOPES[:, None, None] * APART[None, None],  # (1, H, L, S)
    "one for all": -0.5 * APART,
    "far from zero": 30 - APART,
    "for each item": numbers(B, 1, L, L, seed=4),
    "for each key": numbers(B, 1, 1, L, seed=5),
    "with -inf": HIDES,
}


def check_bias(form: str, way: Way = PLAIN, bias: str = "alibi", dtype: str = "f64", masked: bool = True) -> None:
    """The output is the truth's, the bias added to the scores; what is seen has it, too."""
    model, x = build(form, DTYPES[dtype]), numbers(B, L, 15, dtype=DTYPES[dtype])
    added = BIASES[bias].to(torch.promote_types(DTYPES[dtype], torch.float32))
    mask = ch.Causal() & ch.KeyPadding([4, 7]) if masked else None
    sees = oracle.both(oracle.causal(0), oracle.key_padding([4, 7], "right", L)) if masked else None
    out = run(model, x, way=way, attn_bias=added, mask=mask)
    assert_near(out, model.truth(x, sees=sees, bias=added), f"{form} {way} {bias}")
    for seen in model.seen:
        sums = seen.weights.sum(dim=-1)
        assert_near(sums, torch.ones_like(sums), f"{form} {way} {bias}: sums", 1e-5)


def check_bias_gradient(form: str, way: Way = PLAIN) -> None:
    """A learned bias has the slope of the truth."""
    model, x, bias = build(form), numbers(B, L, 15), BIASES["alibi"].clone().requires_grad_()
    by_out, direction, step = numbers(B, L, 15, seed=6), numbers(*bias.shape, seed=7), 1e-5
    out = model.train(way.training)(x, attn_bias=bias, mask=ch.Causal(), backend=way.backend)
    (gradient,) = torch.autograd.grad(out, bias, by_out)
    ends = [
        (model.truth(x, sees=oracle.causal(0), bias=bias + sign * step * direction) * by_out).sum()
        for sign in (1, -1)
    ]
    assert_near((gradient * direction).sum(), (ends[0] - ends[1]) / (2 * step), f"{form} {way}", 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_bias(form, way)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("form", FORMS)
def test_every_bias(form: str, bias: str) -> None:
    for way in FEW:
        check_bias(form, way, bias, masked=False)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str) -> None:
    for way in TYPICAL:
        check_bias(form, way, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_learned_bias(form: str) -> None:
    for way in (Way(), Way(training=True), Way(backend="blockwise"), Way(backend="reference")):
        check_bias_gradient(form, way)


@pytest.mark.parametrize("form", FORMS)
def test_floats_of_torchs_module_are_a_bias(form: str) -> None:
    model, x = build(form), numbers(B, L, 15)
    mask, bias = ch.mask_from_mha(attn_mask=BIASES["one for all"])
    assert mask is None
    assert_near(run(model, x, mask=mask, attn_bias=bias), model.truth(x, bias=BIASES["one for all"]))


@in_torch
def test_torch_makes_it_a_mask() -> None:
    layer, x = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0), torch.randn(1, 5, 12)
    alibi = -(torch.arange(5)[:, None] - torch.arange(5)).abs().float()

    def call(mask: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(x, src_mask=mask)

    layer.eval()
    assert torch.allclose(call(alibi), call(~torch.eye(5, dtype=torch.bool)), atol=1e-6)  # itself alone
    evaluated = call(alibi)
    layer.train()
    assert (call(alibi) - evaluated).abs().max() > 0.01
