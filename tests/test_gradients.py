"""Derivatives against finite differences, of the output and of what is seen; first and second order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import clearhead as ch
from cases import Case
from clearhead.backends import BACKENDS
from conformance import expected_reasons, tiling
from product import CASES

DOUBLE = [case for case in CASES if case.dtype == "f64"]
CHECKED = DOUBLE[::9]
GENERAL = ("reference", "blockwise")  # backends that do everything


def call_of(case: Case, backend: str | None, **options: object) -> tuple[Callable[..., object], list[Tensor]]:
    """attention() as a function of its floats alone, and these; the finite part of a bias that hides."""
    given = case.inputs()
    leaves = [given.query, given.key, given.value]
    hidden = None
    if given.attn_bias is not None:
        hidden = given.attn_bias == -torch.inf
        leaves.append(given.attn_bias.masked_fill(hidden, 0.0))
    no_sink = None
    if given.sinks is not None:
        no_sink = given.sinks == -torch.inf
        leaves.append(given.sinks.masked_fill(no_sink, 0.0))

    def call(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> object:
        rest, call = iter(more), given.options() | options
        if hidden is not None:
            call["attn_bias"] = next(rest).masked_fill(hidden, -torch.inf)
        if no_sink is not None:
            call["sinks"] = next(rest).masked_fill(no_sink, -torch.inf)
        return ch.attention(query, key, value, **call, backend=backend)

    return call, [leaf.detach().clone().requires_grad_() for leaf in leaves]


@pytest.mark.parametrize(
    ("backend", "cut"), [("reference", "whole"), ("blockwise", "whole"), ("blockwise", "single")]
)
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_first_derivatives(case: Case, backend: str, cut: str) -> None:
    call, leaves = call_of(case, backend)
    with tiling(cut):
        assert gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("case", [c for c in DOUBLE if not expected_reasons(c, "sdpa", bias_grad=True)][::4], ids=str)
def test_first_derivatives_of_fused_kernels(case: Case) -> None:
    call, leaves = call_of(case, "sdpa")
    with tiling("rows"):
        assert gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("cut", ["whole", "rows"])
@pytest.mark.parametrize("backend", GENERAL)
@pytest.mark.parametrize("case", CHECKED[::4], ids=str)
def test_second_derivatives(case: Case, backend: str, cut: str) -> None:
    call, leaves = call_of(case, backend)
    with tiling(cut):
        assert gradgradcheck(call, leaves, fast_mode=True)


OF_VALUES = ("value_weighted", "contribution")


@pytest.mark.parametrize("cut", ["whole", "single"])
@pytest.mark.parametrize(
    "name",
    [
        "entropy", "lse", "received", "distance", "max_weight", "weights", "max_score", "received_mean",
        "value_weighted", "contribution", "agreement", "patterns", "lookback",
    ],
)  # fmt: skip
@pytest.mark.parametrize("mask", ["none", "causal", "keys-empty"])
def test_what_is_seen_has_derivatives_if_asked(name: str, mask: str, cut: str) -> None:
    # L > S: with causal some rows are dead, and so is an item with no real keys.
    case = Case(mask, "gqa")
    given = case.inputs()
    inputs = (given.query, given.key, given.value)
    leaves = [tensor.requires_grad_() for tensor in (inputs if name in OF_VALUES else inputs[:2])]
    asked = {"patterns": {"near": ch.Window(1, 1)}, "lookback": 2}.get(name, True)

    def look(query: Tensor, key: Tensor, value: Tensor = given.value) -> Tensor:
        _, seen = ch.attention(
            query, key, value, given.mask, observe=ch.Observe(**{name: asked}, grad=True), backend="blockwise"
        )
        field = seen["patterns"]["near"] if name == "patterns" else seen[name]
        # lse is -inf in a dead row, where it has no slope.
        return field.masked_fill(field == -torch.inf, 0.0)

    with tiling(cut):
        assert gradcheck(look, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_seen_is_detached_unless_asked(backend: str) -> None:
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    out, seen = ch.attention(x, x, x, ch.Causal(), observe=ch.Observe.all(), backend=backend)
    assert out.requires_grad
    assert [name for name, field in seen.items() if field.requires_grad] == []
    out, seen = ch.attention(x, x, x, ch.Causal(), observe=ch.Observe.all(grad=True), backend=backend)
    # Without sinks the rest is 0, whatever the inputs.
    assert [name for name, field in seen.items() if not field.requires_grad] == ["rest"]


@pytest.mark.parametrize("backend", GENERAL)
def test_looking_changes_no_bit_of_a_gradient(backend: str) -> None:
    def gradient(**options: object) -> Tensor:
        x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
        result = ch.attention(x, x, x, ch.Causal(), backend=backend, **options)
        out = result if isinstance(result, Tensor) else result[0]
        return torch.autograd.grad(out.square().sum(), x)[0]

    for cut in ("whole", "single"):
        with tiling(cut):
            assert torch.equal(gradient(), gradient(observe=ch.Observe.all()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", ["whole", "rows"])
@pytest.mark.parametrize(
    "mask", [ch.KeyPadding(lengths=[0, 0]), ch.Causal() & ch.KeyPadding(lengths=[0, 0])], ids=repr
)
def test_a_call_of_dead_rows_alone_still_has_gradients(mask: ch.Mask, backend: str, cut: str) -> None:
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    with tiling(cut):
        out = ch.attention(x, x, x, mask, backend=backend)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_graph_is_kept_where_none_is_wanted(backend: str) -> None:
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    with torch.no_grad():
        out = ch.attention(x, x, x, ch.Causal(), backend=backend)
    assert not out.requires_grad
    assert not ch.attention(x.detach(), x.detach(), x.detach(), ch.Causal(), backend=backend).requires_grad


def test_the_gradient_of_lse_is_the_weights_where_scores_differ_and_their_weights_do_not() -> None:
    """Scores of 1e-9: in float32 all weights are 1 / 5, and which score is the largest says nothing of the slope."""
    query = torch.full((1, 1, 1, 1), 1e-9, requires_grad=True)
    key = torch.tensor([1.0, 2.0, 5.0, 4.0, 3.0]).view(1, 1, 5, 1)
    _, seen = ch.attention(query, key, key, scale=1.0, observe=ch.Observe(lse=True, grad=True), backend="blockwise")
    (slope,) = torch.autograd.grad(seen.lse.sum(), query)
    assert slope.item() == pytest.approx(3.0, rel=1e-6)  # sum_j w_j k_j
