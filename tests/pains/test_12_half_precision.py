"""Row 12: half precision.

apex 1105; fairseq 3575; transformers 27114; NeMo 2658: scores over 65,504 give NaN, but only when weights are asked
for; a fill of -1e9 overflows; summed ``finfo.min`` masks put half the weight on a future token. Here masks stay
boolean up to one place in the kernel, and scores and statistics are float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import (
    DTYPES,
    FORMS,
    PLAIN,
    TYPICAL,
    WAYS,
    Model,
    Way,
    assert_near,
    build,
    flags,
    in_torch,
    numbers,
    run,
)

B, L, LENGTHS = 2, 7, [4, 7]
HALVES = ("f16", "bf16")
SEES = oracle.both(oracle.causal(0), oracle.key_padding(LENGTHS, "left", L))
INSIDE = ch.Observe(query=True, key=True, value=True, context=True, scores=True, weights=True, entropy=True)


def mask() -> ch.Mask:
    return ch.Causal() & ch.KeyPadding(LENGTHS, side="left")


def scaled(form: str, dtype: str, scale: float) -> tuple[Model, dict[str, float]]:
    """A form whose scores are multiplied: the function's argument, the module's setting."""
    if form == "function":
        return build(form, DTYPES[dtype]), {"scale": scale}
    return build(form, DTYPES[dtype], scale=scale), {}


def check_large_scores(form: str, way: Way = PLAIN, dtype: str = "f16", scale: float = 3e4) -> None:
    """Scores far over 65,504: the context is the truth of what the layer was given, seen or not."""
    model, options = scaled(form, dtype, scale)
    x = numbers(B, L, 15, dtype=DTYPES[dtype])
    out = run(model, x, way=way, mask=mask(), **options)
    assert out.isfinite().all(), f"{form} {way} {dtype}: not finite"
    with torch.set_grad_enabled(way.grad):
        looked = model(x, mask=mask(), observe=INSIDE, backend=way.backend, **options)
    assert torch.equal(looked, out), f"{form} {way} {dtype}: looking changed the output"
    for seen in model.seen:
        given = (seen[name].double().numpy() for name in ("query", "key", "value"))
        truth = oracle.attend(*given, SEES, scale=scale)
        if scale > 1:
            assert abs(truth.scores).max() > 65504
        for name in ("scores", "weights", "entropy"):
            assert seen[name].dtype == torch.float32, f"{form} {way} {dtype}: {name} in {seen[name].dtype}"
        assert_near(seen.scores, torch.from_numpy(truth.scores), f"{form} {way} {dtype}: scores", 1e-6)
        # A score of size s is known to s times the precision of float32.
        error = max(1e-5, 4 * abs(truth.scores).max() * torch.finfo(torch.float32).eps)
        assert_near(seen.weights, torch.from_numpy(truth.weights), f"{form} {way} {dtype}: weights", error)
        assert_near(
            seen.context,
            torch.from_numpy(truth.output),
            f"{form} {way} {dtype}: context",
            error + {"f16": 2e-3, "bf16": 1.6e-2}[dtype],
        )


def check_nothing_hidden_weighs(form: str, way: Way = Way(observed=True), dtype: str = "f16") -> None:  # noqa: B008
    """All that is visible lies below any fill value: what is hidden still has weight 0, and dead rows have none."""
    model, x = build(form, DTYPES[dtype]), numbers(B, L, 15, dtype=DTYPES[dtype])
    visible = flags(SEES, B, L, L)
    for low in (-7e4, -2e9, -3.3e38):
        out = run(model, x, way=way, mask=mask(), attn_bias=torch.full((L, L), low))
        assert out.isfinite().all(), f"{form} {way} {dtype} {low}: not finite"
        for seen in model.seen:
            assert not seen.weights[~visible].any(), f"{form} {way} {dtype} {low}: a hidden pair has weight"
            assert_near(
                seen.weights.sum(dim=-1), visible.any(dim=-1).double(), f"{form} {way} {dtype} {low}: sums", 1e-5
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_large_scores(form: str, dtype: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_large_scores(form, way, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_float32(form: str, dtype: str) -> None:
    for way in TYPICAL:
        check_large_scores(form, way, dtype, scale=0.5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_hidden_weighs(form: str, dtype: str) -> None:
    for name in BACKENDS:
        check_nothing_hidden_weighs(form, Way(observed=True, backend=name), dtype)
        check_nothing_hidden_weighs(form, Way(True, True, True, name), dtype)


@in_torch
def test_torch_overflows() -> None:
    mha, x = nn.MultiheadAttention(12, 4, batch_first=True).half().eval(), torch.full((1, 3, 12), 300.0).half()
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.fill_(1)
        out: Tensor = mha(x, x, x)[0]
    assert out.isnan().any()
