"""Row 10: the attention weights.

pytorch 98505, 119811, 88810, 99304, 42929; transformers 33996, 38750, 43213; flash-attention 106, 902, 1357;
xformers 730; inseq 279: they need a slow path, are averaged over the heads, are taken after dropout (rows sum to 0.6
to 1.5), and fill 1 GB at L = 4096. Here they are per head, before dropout, only what was asked for, and the numbers
that the output was made of; the dropped copy is another field.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.backends import BACKENDS
from pains.encoder import (
    DTYPES,
    FORMS,
    HEADS,
    OBSERVED,
    TRAINING,
    WAYS,
    Model,
    Way,
    assert_near,
    build,
    in_torch,
    numbers,
)
from test_memory import measured

B, L, LENGTHS = 2, 7, [4, 7]
EVERYTHING = ch.Observe(weights=True, dropped_weights=True, value=True, context=True)


def looked(model: Model, x: Tensor, way: Way, observe: ch.Observe, **options: object) -> tuple[Tensor, list[ch.Seen]]:
    model.train(way.training)
    with torch.set_grad_enabled(way.grad):
        out = model(x, observe=observe, backend=way.backend, **options)
    return out, model.seen


def check_weights(form: str, way: Way = OBSERVED, dtype: str = "f64") -> None:
    """Per head, rows sum to 1, weights @ value is the context, and looking changes no bit of the output."""
    model, x = build(form, DTYPES[dtype]), numbers(B, L, 15, dtype=DTYPES[dtype])
    mask = ch.Causal() & ch.KeyPadding(LENGTHS)
    out, layers = looked(model, x, way, EVERYTHING, mask=mask)
    with torch.set_grad_enabled(way.grad):
        assert torch.equal(out, model(x, mask=mask, backend=way.backend)), f"{form} {way}: looking changed the output"
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[DTYPES[dtype]]
    for seen in layers:
        assert seen.weights.shape == (B, HEADS, L, L), f"{form} {way}: not one map for each head"
        sums = seen.weights.sum(dim=-1)
        assert_near(sums, torch.ones_like(sums), f"{form} {way}: sums", 1e-6)
        assert_near(
            (seen.weights @ seen.value.to(seen.weights.dtype)).to(out.dtype),
            seen.context.double(),
            f"{form} {way}: weights @ value",
            tolerance,
        )


def check_dropped_apart(form: str, way: Way = TRAINING, p: float = 0.5) -> None:
    """With dropout the weights still sum to 1; the output is made of the dropped ones."""
    if form == "function":
        model, options = build(form), {"dropout_p": p}
    else:
        model, options = build(form, dropout_p=p), {}
    x = numbers(B, L, 15)
    _, layers = looked(model, x, way, EVERYTHING, **options)
    for seen in layers:
        sums = seen.weights.sum(dim=-1)
        assert_near(sums, torch.ones_like(sums), f"{form} {way}: sums before dropout")
        kept = seen.dropped_weights != 0
        assert 0.3 < kept.double().mean() < 0.7
        assert_near(seen.dropped_weights[kept], (seen.weights / (1 - p))[kept], f"{form} {way}: dropped weights")
        assert_near(seen.dropped_weights @ seen.value, seen.context, f"{form} {way}: dropped weights @ value")


def check_only_what_was_asked(form: str, way: Way = OBSERVED) -> None:
    """An `At` keeps its part, all axes there; what wasn't asked for says so."""
    model, x = build(form), numbers(B, L, 15)
    _, whole = looked(model, x, way, EVERYTHING)
    _, part = looked(model, x, way, ch.Observe(weights=ch.At(heads=1, queries=[0, -1])))
    for seen, all_of_it in zip(part, whole, strict=True):
        assert list(seen) == ["weights"], f"{form} {way}: {list(seen)}"
        assert_near(seen.weights, all_of_it.weights[:, 1:2, [0, -1]], f"{form} {way}")
        with pytest.raises(AttributeError, match=r"Observe\(entropy=True\)"):
            _ = seen.entropy


def check_memory(form: str, backend: str = "sdpa") -> None:
    """One row of a head and every statistic of a long text need no L x S."""
    long = 1499
    model, x = build(form, torch.float32), numbers(1, long, 15, dtype=torch.float32)
    observe = ch.Observe(weights=ch.At(heads=0, queries=-1), entropy=True, received=True, max_weight=True)
    with torch.no_grad():
        meter = measured(lambda: model(x, mask=ch.Causal(), observe=observe, backend=backend))
    one_map = long * long * 4
    assert meter.most < 0.7 * HEADS * one_map, f"{form} {backend}: {meter.most / one_map:.2f} maps at a time"
    assert meter.largest < 0.7 * one_map, f"{form} {backend}: a tensor of {meter.largest / one_map:.2f} maps"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_weights(form, way)
        check_only_what_was_asked(form, way)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str) -> None:
    for name in BACKENDS:
        check_weights(form, Way(backend=name), dtype)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", [None, "blockwise", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_dropped_weights_are_another_field(form: str, backend: str | None, grad: bool) -> None:
    check_dropped_apart(form, Way(True, grad, backend=backend))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])  # which materialises
@pytest.mark.parametrize("form", FORMS)
def test_a_long_text(form: str, backend: str) -> None:
    check_memory(form, backend)


@in_torch
def test_torch_averages_over_heads_and_drops() -> None:
    mha, x = nn.MultiheadAttention(12, 4, batch_first=True, dropout=0.5).train(), torch.randn(1, 5, 12)
    weights = mha(x, x, x)[1]
    assert weights.shape == (1, 5, 5)
    assert (weights.sum(dim=-1) - 1).abs().max() > 0.01
