"""Row 2: left padding and causal in eval, through two layers.

transformers 31035, 26572: every row NaN, the real tokens' too. Here: each real row equals the unpadded run.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import DTYPES, FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, in_torch, numbers, run

L, LENGTHS = 7, (1, 7, 4)


def check_left_padded(form: str, way: Way = PLAIN, dtype: str = "f64") -> None:
    """Nothing is NaN, and each item's real rows are those of the item alone."""
    model = build(form, DTYPES[dtype])
    x = numbers(len(LENGTHS), L, 15, dtype=DTYPES[dtype])
    mask = ch.Causal() & ch.KeyPadding(LENGTHS, side="left")
    out = run(model, x, way=way, mask=mask)
    assert out.isfinite().all(), f"{form} {way}: not finite"
    for b, n in enumerate(LENGTHS):
        alone = model.truth(x[b : b + 1, L - n :], sees=oracle.causal(0))
        assert_near(out[b : b + 1, L - n :], alone, f"{form} {way} item {b}")
    for seen in model.seen:
        assert seen.weights.isfinite().all()
        for b, n in enumerate(LENGTHS):
            assert not seen.weights[b, :, :, : L - n].any()
            assert not seen.weights[b, :, : L - n].any()  # causal: padded queries see padding only


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_left_padded(form, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str) -> None:
    for way in TYPICAL:
        check_left_padded(form, way, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_finite(form: str) -> None:
    model, x = build(form), numbers(len(LENGTHS), L, 15).requires_grad_()
    out = model(x, mask=ch.Causal() & ch.KeyPadding(LENGTHS, side="left"))
    for gradient in torch.autograd.grad(out.square().sum(), [x, *model.parameters()]):
        assert gradient.isfinite().all()


@in_torch
def test_torch_makes_every_row_nan() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.tensor([[True, True, False, False, False]])
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        assert encoder(torch.randn(1, 5, 12), mask=future, src_key_padding_mask=padding).isnan().all()
