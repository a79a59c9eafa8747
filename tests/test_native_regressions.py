"""Faults of the native kernels that were found by reading them, each with the call that shows it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import BACKENDS
from clearhead.backends.native_calls import Piece
from native_checks import isa, isas, needs_kernels, threads

pytestmark = needs_kernels


@pytest.fixture(params=isas())
def each_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with isa(request.param):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: Tensor, truth: Tensor, tolerance: float) -> None:
    assert found.isfinite().all()
    assert (found.double() - truth).abs().max() <= tolerance * max(1.0, truth.abs().max().item())


# -- keys that are not read in one go --------------------------------------------------------------------------


def _with_a_gap() -> tuple[ch.Mask, tuple[int, int, int, int]]:
    visible = torch.ones(128, 768, dtype=torch.bool)
    visible[:64, 256:512] = False  # the first block of queries skips a whole block of keys
    return ch.Allowed(visible, axes="qk"), (1, 1, 128, 768)


def _backwards() -> tuple[ch.Mask, tuple[int, int, int, int]]:
    queries = torch.tensor([2, 0, 1]).repeat_interleave(64)
    return ch.Segments(queries[None], torch.arange(3).repeat_interleave(256)[None]), (1, 1, 192, 768)


def _window_over_heads() -> tuple[ch.Mask, tuple[int, int, int, int]]:
    return ch.Causal() & ch.Window(left=63), (3, 1, 1024, 1024)  # a task goes from one head to the next


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [_with_a_gap, _backwards, _window_over_heads])
def test_keys_with_gaps(case: object, dtype: torch.dtype, each_isa: None, two_threads: None) -> None:
    mask, (H, shared, L, S) = case()  # type: ignore[operator]
    inputs = [drawn(1, h, n, 64, dtype=dtype, seed=i) for i, (h, n) in enumerate(((H, L), (shared, S), (shared, S)))]
    gradient = drawn(1, H, L, 64, dtype=dtype, seed=9)
    results = []
    for kind, backend in ((dtype, "native"), (torch.float64, "reference")):
        leaves = [tensor.to(kind).requires_grad_() for tensor in inputs]
        out = ch.attention(*leaves, mask, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, gradient.to(kind))])
    for found, truth in zip(*results, strict=True):
        near(found, truth, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_nan_behind_a_gap_stays_hidden(each_isa: None) -> None:
    mask, (_, _, L, S) = _backwards()
    real = torch.ones(1, S, dtype=torch.bool)
    real[0, 300] = False
    query, key, value = drawn(1, 1, L, 64), drawn(1, 1, S, 64, seed=1), drawn(1, 1, S, 64, seed=2)
    clean = ch.attention(query, key, value, mask & ch.KeyPadding(real=real), backend="native")
    value[0, 0, 300] = torch.nan
    assert torch.equal(ch.attention(query, key, value, mask & ch.KeyPadding(real=real), backend="native"), clean)


@pytest.mark.parametrize(("dtype", "L", "S"), [(torch.bfloat16, 70, 300), (torch.float32, 1031, 1049)], ids=str)
def test_a_nan_behind_an_odd_number_of_keys_stays_hidden(dtype: torch.dtype, L: int, S: int, each_isa: None) -> None:
    mask = ch.KeyPadding(lengths=[131])
    results = []
    for hidden in (0.0, torch.nan):
        leaves = [drawn(1, 2, n, 32, dtype=dtype, seed=i) for i, n in enumerate((L, S, S))]
        for tensor in leaves[1:]:
            tensor[:, :, 131:] = hidden
        leaves = [tensor.requires_grad_() for tensor in leaves]
        out = ch.attention(*leaves, mask, backend="native")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_half_precision_are_read_where_they_start(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, each_isa: None
) -> None:
    monkeypatch.setattr(Piece, "packed", lambda piece: pytest.fail("what can be read was copied"))
    wide = [drawn(1, 2, n, 19, dtype=dtype, seed=i) for i, n in enumerate((70, 131, 131, 70))]
    results = []
    for kind, backend in ((dtype, "native"), (torch.float64, "reference")):
        query, key, value, gradient = (tensor.to(kind)[..., 1:17] for tensor in wide)  # 16 of 19 numbers a row
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = ch.attention(*leaves, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, gradient)])
    for found, truth in zip(*results, strict=True):
        near(found, truth, 2e-2)


def test_gradients_of_bfloat16_take_products_of_their_own() -> None:
    if not {"avx512bf16", "avx512"} <= set(isas()):
        pytest.skip("this processor has no products of bfloat16")
    leaves = [drawn(1, 2, 96, 64, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3)]
    found = []
    for name in ("avx512bf16", "avx512"):
        with isa("avx512"):  # the same forward pass
            out = ch.attention(*leaves, backend="native")
        with isa(name):
            found.append(torch.autograd.grad(out.sum(), leaves)[2])
    assert not torch.equal(*found)  # weights were rounded before they were summed, or not


# -- derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_given_three_times_with_a_graph(backend: str) -> None:
    dtype = torch.float32 if backend == "native" else torch.float64

    def gradients(name: str, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        x = drawn(1, 2, 5, 4).to(kind).requires_grad_()
        out = ch.attention(x, x * 1.5, x, ch.Causal(), backend=name)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    for found, truth in zip(gradients(backend, dtype), gradients("reference", torch.float64), strict=True):
        near(found, truth, 1e-5)


def test_many_gradients_at_once() -> None:
    leaves = [drawn(1, 2, 5, 4, seed=i).requires_grad_() for i in range(3)]
    out = ch.attention(*leaves, ch.Causal(), backend="native")
    many = torch.stack([drawn(1, 2, 5, 4, seed=7), drawn(1, 2, 5, 4, seed=8)])
    batched = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(many):
        for together, alone in zip(batched, torch.autograd.grad(out, leaves, one, retain_graph=True), strict=True):
            near(together[i], alone.double(), 1e-5)


def test_gradients_of_an_overlapping_view() -> None:
    results = []
    for kind, backend in ((torch.float32, "native"), (torch.float64, "reference")):
        row = drawn(1, 2, 12).to(kind).requires_grad_()
        key, value = drawn(1, 2, 7, 8, seed=1).to(kind), drawn(1, 2, 7, 8, seed=2).to(kind)
        out = ch.attention(row.unfold(2, 8, 1), key, value, backend=backend)  # (1, 2, 5, 8), all strides 1
        results.append(torch.autograd.grad(out.square().sum(), row)[0])
    near(results[0], results[1], 1e-5)


def test_a_broken_gradient_reaches_the_bias_where_its_row_looks() -> None:
    inputs = [drawn(2, 2, 5, 4, seed=i) for i in range(3)]
    bias = drawn(1, 2, 5, 5, seed=4).requires_grad_()
    out = ch.attention(*inputs, ch.Causal(), attn_bias=bias, backend="native")
    gradient = torch.ones_like(out)
    gradient[1, 0, 3, 2] = torch.nan
    (found,) = torch.autograd.grad(out, bias, gradient)
    expected = torch.zeros(1, 2, 5, 5, dtype=torch.bool)
    expected[0, 0, 3, :4] = True
    assert torch.equal(found.isnan(), expected)


# -- numbers ---------------------------------------------------------------------------------------------------


def test_entropy_beside_the_lowest_bias(each_isa: None) -> None:
    query, key, value = drawn(1, 1, 1, 8), drawn(1, 1, 130, 8, seed=1), drawn(1, 1, 130, 8, seed=2)
    bias = torch.zeros(1, 130)
    bias[:, :64] = torch.finfo(torch.float32).min
    _, seen = ch.attention(query, key, value, attn_bias=bias, observe=ch.Observe(entropy=True), backend="native")
    weights = torch.softmax(query.double() @ key[:, :, 64:].double().mT * 8**-0.5, dim=-1)
    near(seen.entropy, -(weights * weights.log()).sum(-1), 1e-5)


@pytest.mark.parametrize(("L", "S"), [(70, 300), (3, 1100)], ids=["blocks", "runs of keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_at_the_lowest_bias(L: int, S: int, dtype: torch.dtype, each_isa: None) -> None:
    """Beside -3.4e38 every score is the same, and so is every weight; a float holds no lse of that."""
    query, key, value, gradient = (
        drawn(1, 2, n, 8, dtype=dtype, seed=i).requires_grad_(i < 3) for i, n in enumerate((L, S, S, L))
    )
    bias = torch.full((L, S), torch.finfo(torch.float32).min).requires_grad_()
    observe = ch.Observe(entropy=True, max_weight=True, received=True)
    for backend in ("native", "blockwise"):
        out, seen = ch.attention(query, key, value, ch.Causal(), attn_bias=bias, backend=backend, observe=observe)
        found = torch.autograd.grad(out, (query, key, value, bias), gradient)

        visible = torch.ones(L, S, dtype=torch.bool).tril(S - L)
        weights = visible / visible.double().sum(-1, keepdim=True)
        q, k, v, d = (tensor.detach().double() for tensor in (query, key, value, gradient))
        dweights = d @ v.mT
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        truth = (dscores @ k * 8**-0.5, dscores.mT @ q * 8**-0.5, weights.mT @ d, dscores.sum((0, 1)))
        allowed = 2e-2 if dtype == torch.bfloat16 else 1e-5
        near(out.detach(), weights @ v, allowed)
        for one, expected in zip(found, truth, strict=True):
            near(one / expected.abs().max(), expected / expected.abs().max(), allowed)
        near(seen.entropy, weights.max(-1).values.log().neg().expand(1, 2, L), 1e-5)
        near(seen.max_weight, weights.max(-1).values.expand(1, 2, L), 1e-6)
        near(seen.received, weights.sum(0).expand(1, 2, S), 1e-5)


def test_traced_programs_compute() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about tracing
        traced = torch.jit.trace(lambda x: ch.attention(x, x, x), drawn(1, 2, 5, 4), check_trace=False)
    x = drawn(1, 2, 5, 4, seed=3)
    near(traced(x), ch.attention(x.double(), x.double(), x.double(), backend="reference"), 1e-5)


def _negated(*shape: int, seed: int = 0) -> Tensor:
    """A tensor whose memory holds the numbers with the other sign."""
    found = torch.complex(drawn(*shape, seed=seed), drawn(*shape, seed=seed + 1)).conj().imag
    assert found.is_neg()
    return found


def test_lazily_negated_tensors() -> None:
    x, z = drawn(1, 2, 5, 4, seed=2), _negated(1, 2, 5, 4)
    near(ch.attention(z, x, x), ch.attention(z.double(), x.double(), x.double(), backend="reference"), 1e-5)


@pytest.mark.parametrize("mask", [None, ch.Causal() | ch.Segments(torch.tensor([[0, 1, 0, 1, 0]]))], ids=repr)
def test_a_lazily_negated_bias(mask: ch.Mask | None) -> None:
    x, bias = drawn(1, 2, 5, 4, seed=2), _negated(5, 5)
    out = ch.attention(x, x, x, mask, attn_bias=bias, backend="native")
    near(
        out,
        ch.attention(x.double(), x.double(), x.double(), mask, attn_bias=bias.double(), backend="reference"),
        1e-5,
    )


@pytest.mark.parametrize("width", [1, 4])
def test_a_lazily_negated_gradient(width: int) -> None:
    results = []
    for kind, backend in ((torch.float32, "native"), (torch.float64, "reference")):
        leaves = [drawn(1, 2, 5, n, seed=i).to(kind).requires_grad_() for i, n in enumerate((4, 4, width))]
        out = ch.attention(*leaves, backend=backend)
        results.append(torch.autograd.grad(out, leaves, _negated(1, 2, 5, width, seed=5).to(kind)))
    for found, truth in zip(*results, strict=True):
        near(found, truth, 1e-5)


# -- what others do to a call ----------------------------------------------------------------------------------


def test_hooks_that_lay_out_anew_what_autograd_keeps() -> None:
    results = []
    for kind, backend in ((torch.float32, "native"), (torch.float64, "reference")):
        leaves = [drawn(2, 3, 5, 4, seed=i).to(kind).requires_grad_() for i in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous(), lambda t: t.mT):
            out = ch.attention(*leaves, backend=backend)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for found, truth in zip(*results, strict=True):
        near(found, truth, 1e-5)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("length", [3, 3000])
def test_memory_that_was_exchanged_is_not_read(which: int, length: int) -> None:
    leaves = [drawn(1, 2, 50, 64, seed=i).requires_grad_() for i in range(3)]
    out = ch.attention(*leaves, backend="native")
    leaves[which].data = torch.zeros(1, 2, length, 64)
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.autograd.grad(out.sum(), leaves)


def test_hooks_that_leave_another_dtype_are_noticed() -> None:
    leaves = [drawn(1, 2, 50, 64, seed=i).requires_grad_() for i in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
        out = ch.attention(*leaves, backend="native")
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.autograd.grad(out.sum(), leaves)


def test_dropout_where_new_tensors_are_made_elsewhere() -> None:
    x = torch.ones(1, 1, 5, 4)
    torch.manual_seed(0)
    expected = ch.attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = ch.attention(x, x, x, dropout_p=0.5)
    assert torch.equal(found, expected)


# -- statistics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), [(5, 9), (67, 131), (3, 1031)])  # the last one cuts the keys
def test_equal_weights_come_in_the_order_of_their_keys(L: int, S: int, each_isa: None) -> None:
    k = 4
    query, key = (drawn(1, 2, n, 2, seed=i).round() for i, n in enumerate((L, S)))
    _, seen = ch.attention(query, key, key, scale=1.0, observe=ch.Observe(top_k=k), backend="native")
    expected = torch.sort(query @ key.mT, dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(seen.top_k[1].long(), expected)
