"""Sinks and softcap: closed forms, an extra key, other libraries, dead rows, numbers at the edge, derivatives."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import clearhead as ch
from clearhead.backends import BACKENDS
from conformance import TILINGS, tiling
from native_checks import needs_kernels

B, H, G, L, S, E = 2, 6, 3, 5, 7, 11
ABLE = ("blockwise", "reference")  # backends that do both, in float64 too
FLOATS = (*ABLE, pytest.param("native", marks=needs_kernels))
SEEN = ch.Observe(
    lse=True, entropy=True, max_weight=True, distance=True, received=True, rest=True, weights=True, top_k=2
)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and sinks."""
    return [drawn(B, h, n, E, seed=i, dtype=dtype) for i, (h, n) in enumerate(((H, L), (G, S), (G, S)))] + [
        drawn(H, seed=3, dtype=dtype)
    ]


# -- what they are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ABLE)
def test_a_sink_of_0_is_the_softmax_off_by_one(backend: str) -> None:
    query, key, value, _ = inputs()
    out = ch.attention(query, key, value, sinks=torch.zeros(H), backend=backend)
    exps = (query @ key.repeat_interleave(2, 1).mT / math.sqrt(E)).exp()
    weights = exps / (1 + exps.sum(-1, keepdim=True))
    torch.testing.assert_close(out, weights @ value.repeat_interleave(2, 1), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize("backend", ABLE)
def test_a_sink_is_one_more_key_without_a_value(backend: str, softcap: float | None) -> None:
    """A key of zeros scores 0, capped or not; the bias makes it the sink, and its value is 0."""
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    query, key, value, sinks = leaves
    mask, gradient = ch.Allowed(drawn(L, S, seed=5) > -0.5, axes="qk"), drawn(B, H, L, E, seed=6)
    out, seen = ch.attention(query, key, value, mask, softcap=softcap, sinks=sinks, backend=backend, observe=SEEN)
    found = torch.autograd.grad(out, leaves, gradient)

    one_more = [torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value)]
    bias = torch.cat([torch.zeros(H, 1, S), sinks[:, None, None]], dim=-1)[None]
    open_ = ch.Allowed(torch.nn.functional.pad(mask.dense(L, S)[0, 0], (0, 1), value=True), axes="qk")
    alive = mask.dense(L, S).any(-1, keepdim=True)
    # Where nothing else is seen the row is dead, sink or not.
    expected, other = ch.attention(
        query, *one_more, open_, softcap=softcap, attn_bias=bias, backend="reference", observe=SEEN
    )
    torch.testing.assert_close(out, expected * alive, rtol=1e-12, atol=1e-14)
    truth = torch.autograd.grad(expected * alive, leaves, gradient)
    for one, another in zip(found, truth, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(seen.weights, other.weights[..., :S], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(seen.rest, other.weights[..., S] * alive[..., 0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(seen.lse, other.lse.masked_fill(~alive[..., 0], -math.inf), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(seen.received, other.received[..., :S], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", FLOATS)
def test_transformers_agrees(backend: str) -> None:
    """GPT-OSS has sinks, Gemma-2 a softcap: scale, cap, mask, softmax with the sink, values."""
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    gpt = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    query, key, value, sinks = inputs(torch.float32)
    mask = torch.zeros(1, 1, L, S).masked_fill(~ch.Causal().dense(L, S), -math.inf)
    module: Any = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=E, sinks=sinks)
    for call, theirs, ours in (
        (gemma.eager_attention_forward, {"softcap": 1.3}, {"softcap": 1.3}),
        (gpt.eager_attention_forward, {}, {"sinks": sinks}),
    ):
        out, _ = call(module, query, key, value, mask, scaling=0.4, dropout=0.0, **theirs)
        found = ch.attention(query, key, value, ch.Causal(), scale=0.4, backend=backend, **ours)
        torch.testing.assert_close(found.transpose(1, 2), out, rtol=1e-5, atol=1e-6)


# -- the edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", TILINGS)
@pytest.mark.parametrize("sink", [0.7, -math.inf, 80.0])
@pytest.mark.parametrize("backend", FLOATS)
def test_a_dead_row_stays_dead(backend: str, sink: float, cut: str) -> None:
    query, key, value, _ = inputs(torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, torch.full((H,), sink))]
    with tiling(cut):
        out, seen = ch.attention(*leaves[:3], ch.QueryPadding([2, 0]), sinks=leaves[3], backend=backend, observe=SEEN)
    dead = torch.ones(B, H, L, dtype=torch.bool)
    dead[0, :, :2] = False
    assert not out[dead].any()
    assert (seen.lse[dead] == -math.inf).all()
    for name in ("entropy", "rest", "max_weight", "distance", "weights"):
        assert not seen[name][dead].any(), name
    assert seen.lse[~dead].isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", ABLE)
def test_no_keys_at_all(backend: str) -> None:
    query, key, value, sinks = inputs()
    out, seen = ch.attention(query, key[:, :, :0], value[:, :, :0], sinks=sinks, backend=backend, observe=SEEN)
    assert out.shape == query.shape
    assert not out.any()
    assert not seen.rest.any()
    assert (seen.lse == -math.inf).all()


@pytest.mark.parametrize("backend", ABLE)
def test_sinks_of_minus_infinity_are_none(backend: str) -> None:
    query, key, value, sinks = inputs()
    plain, of_plain = ch.attention(query, key, value, ch.Causal(), backend=backend, observe=SEEN)
    sinks.fill_(-math.inf).requires_grad_()
    out, seen = ch.attention(query, key, value, ch.Causal(), sinks=sinks, backend=backend, observe=SEEN)
    torch.testing.assert_close(out, plain, rtol=1e-13, atol=1e-15)
    for name in ("lse", "entropy", "rest", "received"):
        torch.testing.assert_close(seen[name], of_plain[name], rtol=1e-12, atol=1e-14)
    assert not torch.autograd.grad(out.sum(), sinks)[0].any()


@pytest.mark.parametrize("backend", FLOATS)
def test_a_sink_that_takes_everything(backend: str) -> None:
    """The weights are e^-300, which is 0 in float32; the lse is the sink."""
    query, key, value, _ = inputs(torch.float32)
    out, seen = ch.attention(query, key, value, sinks=torch.full((H,), 300.0), backend=backend, observe=SEEN)
    assert not out.any()
    assert (seen.rest == 1).all()
    torch.testing.assert_close(seen.lse, torch.full((B, H, L), 300.0))
    assert not seen.entropy.any()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("backend", FLOATS)
def test_a_sink_that_is_no_number_spoils_its_head(backend: str, number: float) -> None:
    query, key, value, sinks = inputs(torch.float32)
    mask = ch.QueryPadding([4, 3])
    clean = ch.attention(query, key, value, mask, sinks=sinks, backend=backend)
    spoilt = sinks.clone()
    spoilt[2] = number
    out, seen = ch.attention(query, key, value, mask, sinks=spoilt, backend=backend, observe=SEEN)
    alive = mask.dense(L, S).any(-1).expand(B, H, L)
    bad = alive & (torch.arange(H) == 2)[:, None]
    assert out[bad].isnan().all()
    for name in ("lse", "rest", "entropy"):
        assert torch.equal(seen[name].isnan(), bad), name
    assert torch.equal(out[~bad], clean[~bad])


@pytest.mark.parametrize("backend", FLOATS)
def test_scores_that_overflow_are_capped(backend: str) -> None:
    query, key, value, _ = inputs(torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (query * 1e18, key * 1e18, value)]
    scale = (
        1.0 if backend == "native" else 1e4
    )  # the kernels multiply the query by it, which would overflow within the sums
    out = ch.attention(*leaves, softcap=3.0, scale=scale, backend=backend)
    scores = 3 * (leaves[0].double() @ leaves[1].double().repeat_interleave(2, 1).mT).sign()
    expected = torch.softmax(scores, -1) @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("axes", [2, 3])
def test_without_head_axis_there_is_one_sink(axes: int) -> None:
    query, key, value, sinks = inputs()
    query, key, value = query[:, 0], key[:, 0], value[:, 0]
    whole = ch.attention(query[:, None], key[:, None], value[:, None], sinks=sinks[:1])[:, 0]
    if axes == 2:
        query, key, value, whole = query[0], key[0], value[0], whole[0]
    out, seen = ch.attention(query, key, value, sinks=sinks[:1], observe=SEEN)
    torch.testing.assert_close(out, whole)
    assert seen.rest.shape == query.shape[:-1]


# -- derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["whole", "rows"])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("backend", ABLE)
def test_gradients_of_a_formula_of_its_own(backend: str, softcap: float | None, cut: str) -> None:
    """In einsums, with a dropout of nothing and a bias after the cap; float64."""
    leaves = [tensor.requires_grad_() for tensor in [*inputs(), drawn(H, L, S, seed=8)]]
    query, key, value, sinks, bias = leaves
    with tiling(cut):
        out = ch.attention(
            query, key, value, attn_bias=bias[None], softcap=softcap, sinks=sinks, backend=backend, scale=0.6
        )
    grouped = query.unflatten(1, (G, 2))
    scores = 0.6 * torch.einsum("bgnqe,bgke->bgnqk", grouped, key)
    scores = scores if softcap is None else softcap * (1 - 2 / (1 + (2 * scores / softcap).exp()))
    exps = (scores + bias.unflatten(0, (G, 2))).exp()
    weights = exps / (exps.sum(-1, keepdim=True) + sinks.exp().reshape(G, 2, 1, 1))
    expected = torch.einsum("bgnqk,bgke->bgnqe", weights, value).flatten(1, 2)
    gradient = drawn(B, H, L, E, seed=9)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    truth = torch.autograd.grad(expected, leaves, gradient)
    for found, wanted in zip(torch.autograd.grad(out, leaves, gradient), truth, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["rest", "entropy", "lse", "received"])
@pytest.mark.parametrize("cut", ["whole", "single"])
def test_what_is_seen_has_derivatives_if_asked(name: str, cut: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs()]

    def look(query: Tensor, key: Tensor, sinks: Tensor) -> Tensor:
        observe = ch.Observe(**{name: True}, grad=True)
        mask = ch.Causal() & ch.KeyPadding([S, 0])
        _, seen = ch.attention(query, key, leaves[2], mask, softcap=0.9, sinks=sinks, observe=observe)
        return seen[name].masked_fill(seen[name] == -torch.inf, 0.0)

    with tiling(cut):
        assert gradcheck(look, (leaves[0], leaves[1], leaves[3]), fast_mode=True)


@pytest.mark.parametrize("backend", ABLE)
def test_second_derivatives(backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs()]

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return ch.attention(query, key, value, ch.Causal(), softcap=0.9, sinks=sinks, backend=backend)

    assert gradgradcheck(call, leaves, fast_mode=True)


def test_sinks_changed_before_the_backward_pass_are_told() -> None:
    *leaves, sinks = (tensor.requires_grad_() for tensor in inputs())
    with tiling("rows"):
        out = ch.attention(*leaves, sinks=sinks, backend="blockwise")
        with torch.no_grad():
            sinks.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rest_is_0_without_sinks(backend: str) -> None:
    query, _, _, _ = inputs(torch.float32)
    _, seen = ch.attention(query, query, query, ch.Causal(), backend=backend, observe=ch.Observe(rest=True))
    assert seen.rest.shape == (B, H, L)
    assert not seen.rest.any()


@pytest.mark.parametrize("backend", FLOATS)
def test_compiled_as_eager(backend: str) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return ch.attention(query, key, value, ch.Causal(), softcap=0.9, sinks=sinks, backend=backend)

    leaves = [tensor.requires_grad_() for tensor in inputs(torch.float32)]
    torch.compiler.reset()
    out, plain = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves)
    torch.testing.assert_close(out, plain)
    for one, other in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


@needs_kernels
def test_exported_for_any_length() -> None:
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
            return ch.attention(query, key, value, ch.Causal(), softcap=0.9, sinks=sinks)

    given = inputs(torch.float32)
    length, keys = (torch.export.Dim(name, min=2) for name in ("length", "keys"))
    shapes = {"query": {2: length}, "key": {2: keys}, "value": {2: keys}, "sinks": None}
    with torch.no_grad():
        program = torch.export.export(Attend(), tuple(given), dynamic_shapes=shapes)
    assert any(str(node.target).startswith("clearhead.attend") for node in program.graph.nodes)
    query, memory = drawn(B, H, 31, E, dtype=torch.float32), drawn(B, G, 40, E, seed=1, dtype=torch.float32)
    other = (query, memory, memory, given[3])
    torch.testing.assert_close(program.module()(*other), Attend()(*other))


@pytest.mark.parametrize("backend", FLOATS)
def test_a_broken_gradient_reaches_the_sink_of_its_head(backend: str) -> None:
    *leaves, sinks = inputs(torch.float32)
    sinks.requires_grad_()
    out = ch.attention(*leaves, ch.Causal(), sinks=sinks, backend=backend)
    gradient = torch.ones_like(out)
    gradient[1, 4, 3, 2] = math.nan
    (found,) = torch.autograd.grad(out, sinks, gradient)
    assert torch.equal(found.isnan(), torch.arange(H) == 4)


@pytest.mark.parametrize("backend", FLOATS)
def test_sinks_whose_gradient_is_wanted_alone_and_twice(backend: str) -> None:
    """Only the sinks ask for one; then a gradient of that gradient, which the kernels leave to plain torch."""
    *given, sinks = inputs(torch.float32)
    found = []
    for name, kind in ((backend, torch.float32), ("reference", torch.float64)):
        leaf = sinks.to(kind).detach().requires_grad_()
        out = ch.attention(*(tensor.to(kind) for tensor in given), ch.Causal(), sinks=leaf, backend=name)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        found.append((first.detach().double(), torch.autograd.grad(first.square().sum(), leaf)[0].double()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
