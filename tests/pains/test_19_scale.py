"""Row 19: a scale of zero, or a negative one, with causal.

Seen in torch 2.13, not filed: NaN on the CPU. Here every scale is only a factor.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import DTYPES, FORMS, PLAIN, TYPICAL, Way, assert_near, build, in_torch, numbers, run

B, L = 2, 7
TINY = 1e-46  # 0 as a float32
SCALES = (0.0, -0.5, -3.0, 0.7, TINY)


def check_scale(form: str, way: Way = PLAIN, scale: float = -0.5, dtype: str = "f64") -> None:
    """The truth's output, by a backend that can; torch's kernels say why they can't."""
    if form == "function":
        model, options = build(form, DTYPES[dtype]), {"scale": scale}
    else:
        model, options = build(form, DTYPES[dtype], scale=scale), {}
    x = numbers(B, L, 15, dtype=DTYPES[dtype])
    for mask, sees in (
        (ch.Causal(), oracle.causal(0)),
        (ch.Causal() & ch.KeyPadding([0, 4]), oracle.both(oracle.causal(0), oracle.key_padding([0, 4], "right", L))),
        (None, oracle.everything()),
    ):
        if way.backend == "sdpa" and scale <= TINY:
            with pytest.raises(ch.BackendError, match=rf"scale {scale:g} <= 0"):
                run(model, x, way=way, mask=mask, **options)
            continue
        out = run(model, x, way=way, mask=mask, **options)
        assert_near(out, model.truth(x, sees=sees, scale=scale), f"{form} {way} {scale} {mask}")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, scale: float) -> None:
    for way in TYPICAL:
        check_scale(form, way, scale)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str) -> None:
    for name in (None, *BACKENDS):
        check_scale(form, Way(backend=name), -0.5, dtype)
        check_scale(form, Way(backend=name), TINY, dtype)


def test_of_zero_each_row_is_the_mean_of_what_it_sees() -> None:
    x = numbers(1, L, 5)
    out = ch.attention(x, x, x, ch.Causal(), scale=0.0)
    for q in range(L):
        assert_near(out[0, q], x[0, : q + 1].mean(dim=0))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_raises(scale: float) -> None:
    x = numbers(1, L, 5)
    with pytest.raises(ValueError, match=f"scale must be a finite number, not {scale}"):
        ch.attention(x, x, x, scale=scale)
    with pytest.raises(ValueError, match=f"scale must be a finite number, not {scale}"):
        ch.MultiHeadAttention(15, 3, scale=scale)


@in_torch
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_torch_gives_nan(scale: float) -> None:
    x = torch.randn(1, 1, 3, 4)
    assert F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=scale).isnan().any()
