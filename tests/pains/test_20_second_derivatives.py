"""Row 20: derivatives of derivatives, and forward mode.

pytorch 116350, 154226; xformers 552; flash-attention 1672: they fail. Here they work, on a slower path where the
fused kernel has none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradgradcheck

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import DOUBLE, FORMS, PLAIN, Model, Way, build, in_torch, numbers

# Torch's own forward mode scripts its decompositions when first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

B, L, LENGTHS = 2, 5, [0, 4]
SEES = oracle.both(oracle.causal(0), oracle.key_padding(LENGTHS, "right", L))  # with dead rows


def loss_of(model: Model, way: Way) -> Callable[[Tensor], Tensor]:
    weights, mask = numbers(B, L, 15, seed=2), ch.Causal() & ch.KeyPadding(LENGTHS)
    model.train(way.training)
    return lambda x: (model(x, mask=mask, backend=way.backend) * weights).sum()


def true_slopes(model: Model, x: Tensor, direction: Tensor) -> tuple[float, float]:
    """First and second derivative of the loss along a direction, by differences of the double loop."""
    weights = numbers(B, L, 15, seed=2)

    def loss(t: float) -> float:
        return float((model.truth(x + t * direction, sees=SEES) * weights).sum())

    h = 3e-4
    before, here, after = loss(-h), loss(0.0), loss(h)
    return (after - before) / (2 * h), (after - 2 * here + before) / h**2


def assert_slope(found: Tensor, truth: float, what: str) -> None:
    assert found.isfinite(), f"{what}: not finite"
    found = found.detach()
    assert abs(float(found) - truth) <= 1e-3 * max(abs(truth), 1.0), f"{what}: {float(found):.8g}, not {truth:.8g}"


def check_double_backward(form: str, way: Way = PLAIN) -> None:
    """The second derivative along a direction, by two backward passes."""
    model, x, direction = build(form), numbers(B, L, 15), 0.3 * numbers(B, L, 15, seed=1)
    first, second = true_slopes(model, x, direction)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, way)(leaf), leaf, create_graph=True)
    assert_slope((gradient * direction).sum().detach(), first, f"{form} {way}: first")
    (again,) = torch.autograd.grad((gradient * direction).sum(), leaf)
    assert_slope((again * direction).sum(), second, f"{form} {way}: second")


def check_forward_mode(form: str, way: Way = PLAIN) -> None:
    """The first derivative along a direction, forwards, by ``torch.func.jvp`` and by dual numbers."""
    model, x, direction = build(form), numbers(B, L, 15), 0.3 * numbers(B, L, 15, seed=1)
    first, _ = true_slopes(model, x, direction)
    loss = loss_of(model, way)
    assert_slope(torch.func.jvp(loss, (x,), (direction,))[1], first, f"{form} {way}: jvp")
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, direction))).tangent
    assert tangent is not None, f"{form} {way}: no tangent"
    assert_slope(tangent.detach(), first, f"{form} {way}: dual numbers")


def check_hessian(form: str, way: Way = PLAIN) -> None:
    """``torch.func.hessian``, forward over reverse, along a direction."""
    model, x, direction = build(form), numbers(B, L, 15), 0.3 * numbers(B, L, 15, seed=1)
    _, second = true_slopes(model, x, direction)
    loss = loss_of(model, way)
    hessian = torch.func.hessian(lambda t: loss(x + t * direction))(torch.zeros((), dtype=torch.float64))
    assert_slope(hessian, second, f"{form} {way}")


NAMED = [None, *BACKENDS]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", NAMED)
@pytest.mark.parametrize("form", FORMS)
def test_double_backward(form: str, backend: str | None, training: bool) -> None:
    check_double_backward(form, Way(training, backend=backend))


@pytest.mark.parametrize("backend", [None, "blockwise", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_and_hessian(form: str, backend: str | None) -> None:
    check_forward_mode(form, Way(backend=backend))
    check_hessian(form, Way(backend=backend))


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("form", FORMS)
def test_fused_kernels_decline_forward_mode(form: str, backend: str) -> None:
    model, x = build(form), numbers(B, L, 15)
    with pytest.raises(ch.BackendError, match=r"inside torch\.func or forward-mode differentiation"):
        torch.func.jvp(loss_of(model, Way(backend=backend)), (x,), (x,))


@pytest.mark.parametrize("backend", [None, *DOUBLE])
@pytest.mark.parametrize("form", FORMS)
def test_every_second_derivative(form: str, backend: str | None) -> None:
    model, x = build(form), numbers(1, 3, 15).requires_grad_()
    assert gradgradcheck(lambda x: model(x, mask=ch.Causal(), backend=backend), x, fast_mode=True)


@in_torch
def test_torch_has_none() -> None:
    x = torch.randn(1, 1, 5, 4, requires_grad=True)
    out = F.scaled_dot_product_attention(x, x, x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        torch.autograd.grad(gradient.sum(), x)
