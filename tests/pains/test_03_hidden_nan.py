"""Row 3: NaN or infinity in a hidden key or value.

pytorch 101967: it leaks into every output (0 x NaN). pytorch 141128: a *visible* NaN was turned into zeros. Here:
hidden content can't matter, forward or backward, and what is visible stays visible.

The projections' weights, which a ``nn.Linear`` would give 0 x NaN, are in ``test_regressions.py``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import DTYPES, FORMS, GRAD, PLAIN, WAYS, Way, assert_near, build, in_torch, numbers, run

B, L, S = 2, 5, 7
LENGTHS = [4, 7]
POISONS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


def poisoned(memory: Tensor, poison: str) -> Tensor:
    """With one number, then whole rows, of the padding spoilt."""
    spoilt = memory.clone()
    spoilt[0, 4, 3] = POISONS[poison]
    spoilt[0, 5:] = POISONS[poison]
    return spoilt


def check_hidden(form: str, way: Way = PLAIN, poison: str = "nan", where: str = "both", dtype: str = "f64") -> None:
    """The output, and what is seen, is the truth of the clean inputs."""
    model = build(form, DTYPES[dtype])
    x, memory = numbers(B, L, 15, dtype=DTYPES[dtype]), numbers(B, S, 15, seed=1, dtype=DTYPES[dtype])
    key = poisoned(memory, poison) if where != "value" else memory
    value = poisoned(memory, poison) if where != "key" else memory
    out = run(model, x, key, value, way=way, mask=ch.KeyPadding(LENGTHS))
    truth = model.truth(x, memory, sees=oracle.key_padding(LENGTHS, "right", S))
    assert_near(out, truth, f"{form} {way} {poison} in {where}")
    for seen in model.seen:
        for name in ("weights", "entropy", "lse", "received"):
            assert seen[name].isfinite().all(), f"{form} {way}: {name} is not finite"


def check_hidden_in_self_attention(form: str, way: Way = PLAIN, poison: str = "nan") -> None:
    """Padding that holds NaN, through every layer: the real rows are those of the clean batch."""
    model, x = build(form), numbers(B, S, 15)
    out = run(model, poisoned(x, poison), way=way, mask=ch.KeyPadding(LENGTHS))
    truth = model.truth(x, sees=oracle.key_padding(LENGTHS, "right", S))
    for b, n in enumerate(LENGTHS):
        assert_near(out[b, :n], truth[b, :n], f"{form} {way} {poison} item {b}")


def check_hidden_gradient(form: str, way: Way = GRAD, poison: str = "nan") -> None:
    """Gradients are those of the clean inputs, and exactly 0 where the poison is."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    by_out = numbers(B, L, 15, seed=2)

    def gradients(memory: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
        out = model.train(way.training)(*leaves, mask=ch.KeyPadding(LENGTHS), backend=way.backend)
        return torch.autograd.grad(out, leaves, by_out)

    clean, spoilt = gradients(memory), gradients(poisoned(memory, poison))
    for a, b in zip(spoilt, clean, strict=True):
        assert_near(a, b, f"{form} {way} {poison}")
    assert not spoilt[1][0, 4:].any(), f"{form} {way}: hidden keys have a gradient"


def check_visible(form: str, way: Way = PLAIN, poison: str = "nan", where: str = "key") -> None:
    """A query that sees it gives NaN; one that doesn't is as it would be."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    spoilt = memory.clone()
    spoilt[1, 4, 2] = POISONS[poison]
    inputs = (spoilt, memory) if where == "key" else (memory, spoilt)
    out = run(model, x, *inputs, way=way, mask=ch.Causal())
    truth = model.truth(x, memory, sees=oracle.causal(S - L))
    # Query q of 5 sees the keys up to q + 2; the function's head 0 alone holds the poison.
    sees_it = torch.zeros(B, L, dtype=torch.bool)
    sees_it[1, 2:] = True
    assert_near(out[~sees_it], truth[~sees_it], f"{form} {way} {poison} in {where}: queries that don't see it")
    touched = out[sees_it][:, :5] if form == "function" else out[sees_it]
    assert touched.isnan().all(), f"{form} {way}: a visible {poison} in {where} has vanished"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_hidden_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_hidden(form, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("form", FORMS)
def test_hidden_every_poison(form: str, poison: str, where: str, dtype: str) -> None:
    check_hidden(form, Way(), poison, where, dtype)
    check_hidden(form, Way(True, True, True), poison, where, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_hidden_in_self_attention(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_hidden_in_self_attention(form, way)
        check_hidden_in_self_attention(form, way, "inf")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_hidden_backward(form: str, backend: str, poison: str) -> None:
    for way in [way for way in WAYS[backend] if way.grad and not way.observed]:
        check_hidden_gradient(form, way, poison)


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_visible_every_way(form: str, backend: str, where: str) -> None:
    for way in WAYS[backend]:
        check_visible(form, way, "nan", where)
    for poison in POISONS:
        check_visible(form, Way(backend=backend), poison, where)


@in_torch
def test_torch_leaks() -> None:
    query, key, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    value[..., 4, :] = torch.nan
    visible = torch.tensor([True, True, True, True, False]).expand(3, 5)
    assert F.scaled_dot_product_attention(query, key, value, attn_mask=visible).isnan().all()
