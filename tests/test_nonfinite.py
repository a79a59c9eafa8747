"""What is hidden can't leak, even if it is NaN; what is visible stays visible."""

from __future__ import annotations

import math

import pytest
import torch

import clearhead as ch
from cases import Case
from clearhead.backends import BACKENDS
from conformance import tiling, with_backends
from poison import LARGE, NOT_FINITE, POISONS, check_hidden_poison, check_visible_poison, held
from product import CASES

# Cases in which some key, or some query, is nobody's.
HIDING = [
    case
    for case in CASES
    if not case.truth.alive.all() or not case.truth.visible.any(axis=2).all()
]  # fmt: skip


@pytest.mark.parametrize("cut", ["whole", "rows"])
@pytest.mark.parametrize(("case", "backend"), with_backends(HIDING[::5]), ids=str)
def test_hidden(case: Case, backend: str, cut: str) -> None:
    with tiling(cut):
        check_hidden_poison(case, backend, POISONS[len(str(case)) % len(POISONS)])


@pytest.mark.parametrize("layout", ["bhle", "blhe"])
def test_hidden_numbers_leave_the_memory_layout_alone(layout: str) -> None:
    # Setting rows aside once made transposed inputs contiguous, and their products then rounded otherwise.
    check_hidden_poison(Case("keys-empty", "gqa-wide", "f32", layout=layout), "blockwise", -math.inf)


@pytest.mark.parametrize("number", POISONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mask",
    [
        ch.KeyPadding(lengths=[5, 3]),
        ch.KeyPadding(lengths=[2, 5], side="left"),
        ch.Causal() & ch.KeyPadding(lengths=[0, 4]),
        ch.Window(1, 0) & ch.QueryPadding(lengths=[3, 5]),
    ],
    ids=repr,
)
def test_each_number_in_padding(mask: ch.Mask, backend: str, number: float) -> None:
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 4, 5, 8, generator=generator) for _ in range(3)]
    visible = mask.dense(5, 5).expand(2, 1, 5, 5)[:, 0]
    keys, queries = ~visible.any(dim=1), ~visible.any(dim=2)
    dirty = [
        t.masked_fill(bad[:, None, :, None], held(number, t.dtype))
        for t, bad in zip(clean, (queries, keys, keys), strict=True)
    ]
    assert any((~tensor.isfinite() | (tensor.abs() > 1e19)).any() for tensor in dirty)
    assert torch.equal(
        ch.attention(*clean, mask, backend=backend),
        ch.attention(*dirty, mask, backend=backend),
    )


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize(("case", "backend"), with_backends(CASES[3::23]), ids=str)
def test_visible(case: Case, backend: str, number: float) -> None:
    check_visible_poison(case, backend, number)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_shows_what_its_row_saw(backend: str) -> None:
    # Key 3 is NaN. With causal, queries 3 and 4 see it: their gradients are NaN, those of 0 to 2 are as ever.
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(3))
    key[:, :, 3] = math.nan
    query.requires_grad_()
    out = ch.attention(query, key, value, ch.Causal(), backend=backend)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient[:, :, 3:].isnan().all()
    first = query.detach()[:, :, :3].requires_grad_()
    alone = ch.attention(first, key[:, :, :3], value[:, :, :3], ch.Causal(), backend=backend)
    assert torch.allclose(gradient[:, :, :3], torch.autograd.grad(alone.sum(), first)[0], atol=1e-6)


@pytest.mark.parametrize("cut", ["whole", "rows"])
def test_statistics_beside_a_visible_nan(cut: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3))
    key[0, 1, 2, 4] = math.nan  # item 0, head 1: queries 2, 3, 4 see it
    observe = ch.Observe(lse=True, entropy=True, max_weight=True, distance=True, weights=True)
    with tiling(cut):
        _, seen = ch.attention(query, key, value, ch.Causal(), observe=observe)
        _, clean = ch.attention(query, key.nan_to_num(), value, ch.Causal(), observe=observe)
    bad = torch.zeros(2, 2, 5, dtype=torch.bool)
    bad[0, 1, 2:] = True
    for name in ("lse", "entropy", "max_weight", "distance"):
        assert torch.equal(seen[name].isnan(), bad), name
        assert torch.equal(seen[name][~bad], clean[name][~bad]), name
    future = torch.ones(5, 5).triu(1).bool()
    assert torch.equal(seen.weights.isnan(), bad[..., None] & ~future)
    assert not seen.weights[..., future].any()  # hidden weights are 0 even there


def test_statistics_do_not_depend_on_values() -> None:
    x = torch.randn(2, 2, 5, 8)
    observe = ch.Observe(entropy=True, weights=True, received=True)
    _, seen = ch.attention(x, x, x, observe=observe)
    out, dirty = ch.attention(x, x, torch.full_like(x, math.nan), observe=observe)
    assert out.isnan().all()
    for name in seen:
        assert torch.equal(seen[name], dirty[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_in_a_bias(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 5, 8, generator=generator)
    bias = torch.zeros(5, 5)
    clean = ch.attention(x, x, x, ch.Causal(), attn_bias=bias, backend=backend)
    bias[0, 3], bias[1, 4] = math.nan, math.inf  # both in the future
    assert torch.equal(ch.attention(x, x, x, ch.Causal(), attn_bias=bias, backend=backend), clean)
    bias[3, 0], bias[4, 1] = math.nan, math.inf  # both in the past
    out = ch.attention(x, x, x, ch.Causal(), attn_bias=bias, backend=backend)
    assert out[:, :, 3:].isnan().all()
    assert torch.equal(out[:, :, :3], clean[:, :, :3])


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("mask", [ch.Window(1, 0), ch.KeyPadding([4, 5])], ids=repr)
def test_a_large_row_that_some_queries_see(mask: ch.Mask, backend: str | None, how: str, number: float) -> None:
    """Of those that don't see it, no output and no gradient of a query is moved by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 4, 5, 8, generator=generator) for _ in range(3)]
    dirty = [tensor.clone() for tensor in clean]
    for tensor in dirty[1:]:
        tensor[0, :, 4] = held(number, tensor.dtype)  # with the window for query 4, else for none

    def results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = query.clone().requires_grad_()
        call = torch.compile(ch.attention, backend="aot_eager") if how == "compiled" else ch.attention
        out = call(query, key, value, mask, backend=backend)[:, :, :4]
        return out.detach(), torch.autograd.grad(out.square().sum(), query)[0][:, :, :4]

    torch._dynamo.reset()
    for a, b in zip(results(*dirty), results(*clean), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_numbers_are_not_taken_for_infinite(backend: str) -> None:
    # Their sum overflows; each of them is finite.
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    value = torch.full_like(x, 3e38)
    out = ch.attention(x, x, value, ch.Window(0, 0), backend=backend)
    assert torch.equal(out, value)
