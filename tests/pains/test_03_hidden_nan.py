"""Row 3: NaN or infinity in a hidden key or value.

pytorch 101967: it leaks into every output (0 x NaN). pytorch 141128: a *visible* NaN was turned into zeros. Here:
hidden content can't matter, forward or backward, and what is visible stays visible.

Numbers that are finite, but so large that a score overflows, are of the same kind: -inf added to inf is NaN.
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
SDPA = Way(backend="sdpa")
LENGTHS = [4, 7]
NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
POISONS = NOT_FINITE | {"1e20": 1e20, "largest": float("inf")}  # the last is cut to what the dtype holds


def poisoned(memory: Tensor, poison: str) -> Tensor:
    """With one number, then whole rows, of the padding spoilt."""
    number = POISONS[poison]
    if poison not in NOT_FINITE:
        number = min(number, torch.finfo(memory.dtype).max)
    spoilt = memory.clone()
    spoilt[0, 4, 3] = number
    spoilt[0, 5:] = number
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


def check_hidden_parameters(form: str, way: Way = GRAD, poison: str = "nan") -> None:
    """Gradients of every weight are those of the clean inputs: no 0 x NaN from the padding."""
    model, x, memory = build(form).train(way.training), numbers(B, L, 15), numbers(B, S, 15, seed=1)

    def gradients(memory: Tensor) -> tuple[Tensor, ...]:
        out = model(x, memory, mask=ch.KeyPadding(LENGTHS), backend=way.backend)
        return torch.autograd.grad(out, list(model.parameters()), numbers(B, L, 15, seed=2))

    for a, b in zip(gradients(poisoned(memory, poison)), gradients(memory), strict=True):
        assert_near(a, b, f"{form} {way} {poison}")


def check_visible(form: str, way: Way = PLAIN, poison: str = "nan", where: str = "key") -> None:
    """A query that sees it gives NaN; one that doesn't is as it would be."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    spoilt = memory.clone()
    spoilt[1, 4, 2] = POISONS[poison]
    inputs = (spoilt, memory) if where == "key" else (memory, spoilt) if where == "value" else (memory, memory)
    asking = x.clone()
    if where == "query":
        asking[1, 3, 2] = POISONS[poison]
    out = run(model, asking, *inputs, way=way, mask=ch.Causal())
    truth = model.truth(x, memory, sees=oracle.causal(S - L))
    # Query q of 5 sees the keys up to q + 2; the function's head 0 alone holds the poison.
    sees_it = torch.zeros(B, L, dtype=torch.bool)
    if where == "query":
        sees_it[1, 3] = True
    else:
        sees_it[1, 2:] = True
    assert_near(out[~sees_it], truth[~sees_it], f"{form} {way} {poison} in {where}: queries that don't see it")
    touched = out[sees_it][:, :5] if form == "function" else out[sees_it]
    assert touched.isnan().all(), f"{form} {way}: a visible {poison} in {where} has vanished"


def check_large_hidden(way: Way = SDPA, poison: str = "1e20", masked: str = "keys") -> None:
    """Of the function, in float32: output and gradients beside large hidden rows are those of the clean inputs."""
    mask, keys, queries = {
        "keys": (ch.KeyPadding([4, 7]), [4, 5, 6], []),
        "queries": (ch.QueryPadding([3, 5]), [], [3, 4]),
        "bias": (None, [4, 5, 6], []),
        "segments": (ch.Segments([0, 0, 0, 1, 1], [0, 0, 0, 0, 2, 2, 2]), [4, 5, 6], [3, 4]),
    }[masked]
    bias = torch.zeros(S).masked_fill(torch.arange(S) > 3, -torch.inf)[None] if mask is None else None
    number = min(POISONS[poison], torch.finfo(torch.float32).max)
    clean = [numbers(B, 3, n, 5, seed=n, dtype=torch.float32) for n in (L, S, S)]
    spoilt = [tensor.clone() for tensor in clean]
    for tensor, rows in zip(spoilt, (queries, keys, keys), strict=True):
        tensor[0, :, rows] = number * (-1) ** torch.arange(3 * len(rows) * 5).reshape(3, len(rows), 5)

    def results(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = ch.attention(*leaves, mask, attn_bias=bias, backend=way.backend)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    for name, a, b in zip(("out", "query", "key", "value"), results(spoilt), results(clean), strict=True):
        assert_near(a, b, f"{way} {poison} {masked} {name}")


@pytest.mark.parametrize("masked", ["keys", "queries", "bias", "segments"])
@pytest.mark.parametrize("poison", ["1e20", "largest"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_hidden(backend: str, poison: str, masked: str) -> None:
    check_large_hidden(Way(backend=backend), poison, masked)


def check_visible_gradient(way: Way = GRAD, where: str = "key") -> None:
    """Of the function: a query's gradient is NaN where it sees a NaN or is one, and nowhere else."""
    query, key, value = (numbers(B, 3, n, 5, seed=n) for n in (L, S, S))
    spoilt = {"query": query[1, 1, 3], "key": key[1, 1, 4], "value": value[1, 1, 4]}[where]
    spoilt[2] = torch.nan
    query.requires_grad_()
    out = ch.attention(query, key, value, ch.Causal(), backend=way.backend)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    bad = torch.zeros(B, 3, L, dtype=torch.bool)
    bad[1, 1, 3 if where == "query" else slice(2, None)] = True
    assert gradient[bad].isnan().all(), f"{way}: a NaN in {where} leaves the gradient of its row finite"
    assert gradient[~bad].isfinite().all(), f"{way}: a NaN in {where} reaches other rows"


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_visible_gradient(backend: str, where: str) -> None:
    check_visible_gradient(Way(grad=True, backend=backend), where)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "function"])
def test_hidden_parameters(form: str, backend: str, poison: str) -> None:
    check_hidden_parameters(form, Way(grad=True, backend=backend), poison)


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


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_visible_every_way(form: str, backend: str, where: str) -> None:
    for way in WAYS[backend]:
        check_visible(form, way, "nan", where)
    for poison in NOT_FINITE:
        check_visible(form, Way(backend=backend), poison, where)


@in_torch
def test_torch_leaks() -> None:
    query, key, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    value[..., 4, :] = torch.nan
    visible = torch.tensor([True, True, True, True, False]).expand(3, 5)
    assert F.scaled_dot_product_attention(query, key, value, attn_mask=visible).isnan().all()
