"""Dropout: the right share, no pattern, repeatable, the same however the work is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from cases import Case
from conformance import TILINGS, check_dropout_share, expected_reasons, tiling
from product import CASES

DROPPING = ("reference", "blockwise")


def kept(p: float, B: int, H: int, L: int, S: int, seed: int | None = 0, **options: object) -> Tensor:
    """Which weights are kept, bool (B, H, L, S)."""
    if seed is not None:
        torch.manual_seed(seed)
    x = torch.zeros(B, H, L, 2)
    _, seen = ch.attention(
        x,
        torch.zeros(B, H, S, 2),
        torch.zeros(B, H, S, 2),
        dropout_p=p,
        observe=ch.Observe(dropped_weights=True),
        **options,
    )
    return seen.dropped_weights != 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("backend", DROPPING)
def test_the_share_kept(backend: str, p: float) -> None:
    check_dropout_share(backend, p)


@pytest.mark.parametrize("backend", [None, *DROPPING])
def test_none_and_all(backend: str | None) -> None:
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    whole = ch.attention(x, x, x, ch.Causal(), backend=backend)
    assert torch.equal(ch.attention(x, x, x, ch.Causal(), dropout_p=0.0, backend=backend), whole)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn for nothing
    assert not ch.attention(x, x, x, ch.Causal(), dropout_p=1.0, backend=backend).any()


def correlations(bits: Tensor) -> Tensor:
    """Of every two rows of bits, (rows, n)."""
    signs = bits.double() - bits.double().mean()
    n = bits.shape[1]
    matrix = signs @ signs.T / (n * signs.var())
    return matrix[torch.ones_like(matrix).triu(1).bool()]


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("between", ["rows", "columns", "heads", "items", "calls", "seeds"])
def test_no_two_are_alike(between: str, p: float) -> None:
    """Correlations of independent bits are normal with deviation n ** -0.5: none is far out, nor are they biased."""
    if between == "rows":
        bits = kept(p, 1, 1, 61, 1021)[0, 0]
    elif between == "columns":
        bits = kept(p, 1, 1, 1021, 61)[0, 0].T
    elif between == "heads":
        bits = kept(p, 1, 61, 31, 37)[0].flatten(1)
    elif between == "items":
        bits = kept(p, 61, 1, 31, 37)[:, 0].flatten(1)
    elif between == "calls":
        torch.manual_seed(3)
        bits = torch.stack([kept(p, 1, 1, 31, 37, seed=None).flatten() for _ in range(31)])
    else:
        bits = torch.stack([kept(p, 1, 1, 31, 37, seed=seed).flatten() for seed in range(31)])
    found, n = correlations(bits), bits.shape[1]
    assert found.abs().max() < 5.5 * n**-0.5
    assert abs(found.mean()) < 5 * (n * len(found)) ** -0.5
    assert found.std() == pytest.approx(n**-0.5, rel=0.2)
    # Each row has its share, too: no row is all kept or all dropped.
    assert (bits.double().mean(dim=1) - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5


def test_neighbours_are_independent() -> None:
    bits = kept(0.5, 2, 3, 127, 131).double() * 2 - 1
    for step in (1, 2, 3, 16, 64):
        for axis in (2, 3):
            size = bits.shape[axis]
            product = bits.narrow(axis, 0, size - step) * bits.narrow(axis, step, size - step)
            assert abs(product.mean()) < 5 * product.numel() ** -0.5


def test_the_seed_is_torchs() -> None:
    assert torch.equal(kept(0.5, 2, 3, 5, 7, seed=4), kept(0.5, 2, 3, 5, 7, seed=4))
    assert not torch.equal(kept(0.5, 2, 3, 5, 7, seed=4), kept(0.5, 2, 3, 5, 7, seed=5))
    torch.manual_seed(4)
    first, second = (kept(0.5, 2, 3, 5, 7, seed=None) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_longer_call_keeps_what_a_shorter_one_does() -> None:
    # A hash of positions: nothing depends on the sizes.
    assert torch.equal(kept(0.5, 3, 4, 11, 13)[:2, :3, :5, :7], kept(0.5, 2, 3, 5, 7))


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if expected_reasons(c, "sdpa", dropout_p=0.3) == ["dropout"] and c.dtype == "f64"][::5],
    ids=str,
)
def test_the_same_seed_drops_the_same_in_every_backend_and_cut(case: Case) -> None:
    given = case.inputs()
    leaves = [tensor.requires_grad_() for tensor in (given.query, given.key, given.value)]
    results = []
    for backend in DROPPING:
        for cut in TILINGS:
            torch.manual_seed(1)
            with tiling(cut):
                out = ch.attention(*leaves, **given.options(), dropout_p=0.3, backend=backend)
                results.append([out, *torch.autograd.grad(out, leaves, case.output_gradient())])
    first, *others = results
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", ["whole", "single"])
@pytest.mark.parametrize("backend", DROPPING)
def test_derivatives(backend: str, cut: str) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, h, n, 2, generator=generator).double().requires_grad_() for h, n in ((4, 5), (2, 7), (2, 7))
    ]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(2)
        return ch.attention(query, key, value, ch.Causal(), dropout_p=0.4, backend=backend)

    with tiling(cut):
        assert gradcheck(call, leaves, fast_mode=True)


def test_the_mean_over_many_draws_is_the_output_without() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 5, generator=generator).double() for n in (3, 7, 7))
    torch.manual_seed(0)
    many = torch.stack([ch.attention(query, key, value, dropout_p=0.5) for _ in range(600)])
    whole = ch.attention(query, key, value)
    error = (many.mean(dim=0) - whole) / (many.std(dim=0) / 600**0.5)
    assert error.abs().max() < 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays(reentrant: bool) -> None:
    def gradient(through: bool) -> Tensor:
        x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.manual_seed(8)

        def call(x: Tensor) -> Tensor:
            return ch.attention(x, x, x, dropout_p=0.5)

        out = checkpoint(call, x, use_reentrant=reentrant) if through else call(x)
        return torch.autograd.grad(out.square().sum(), x)[0] if not reentrant else _through_backward(out, x)

    assert torch.allclose(gradient(True), gradient(False), atol=1e-6)


def _through_backward(out: Tensor, x: Tensor) -> Tensor:
    out.square().sum().backward()  # reentrant checkpoints know no autograd.grad
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_out_of_range(p: float) -> None:
    x = torch.randn(2, 3, 5, 7)
    with pytest.raises(ValueError, match=f"dropout_p must be between 0 and 1, not {p}"):
        ch.attention(x, x, x, dropout_p=p)
