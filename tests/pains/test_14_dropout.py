"""Row 14: dropout on the CPU.

The family of pytorch 124464: 15 times the time and 1.5 GB at L = 4096. Here no tensor of L x S is made, forward or
backward, and dropout is for training alone. (The function's ``dropout_p`` always applies, as in torch's own.)
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FORMS, TRAINING, WAYS, Model, Way, assert_near, build, numbers, run
from test_memory import measured

B, L = 2, 7
DROPPING = [None, "blockwise", "reference"]
MODULES = [form for form in FORMS if form != "function"]


def dropping(form: str, p: float, training: bool, dtype: torch.dtype | None = None) -> tuple[Model, dict[str, float]]:
    """A form with dropout: the module's setting, or what the caller of the function passes."""
    if form == "function":
        return build(form, dtype), {"dropout_p": p if training else 0.0}
    return build(form, dtype, dropout_p=p), {}


def check_none_in_eval(form: str, way: Way) -> None:
    """In eval the output is the truth's, and nothing is drawn."""
    model, options = dropping(form, 0.9, training=False)
    x = numbers(B, L, 15)
    before = torch.get_rng_state()
    out = run(model, x, way=way, mask=ch.Causal(), **options)
    assert_near(out, model.truth(x, sees=oracle.causal(0)), f"{form} {way}")
    assert torch.equal(torch.get_rng_state(), before), f"{form} {way}: a random number was drawn"


def check_some_in_training(form: str, way: Way = TRAINING) -> None:
    """While training each call drops others; the seed repeats it; the mean is the truth."""
    model, options = dropping(form, 0.4, training=True)
    x = numbers(1, L, 15).expand(211, L, 15)  # the same item, many times

    def call(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return run(model, x, way=way, mask=ch.Causal(), **options).detach()

    many = call(1)
    assert torch.equal(many, call(1)), f"{form} {way}: the seed doesn't repeat it"
    assert not torch.equal(many, call(2)), f"{form} {way}: nothing is dropped"
    assert not torch.equal(many[0], many[1]), f"{form} {way}: items drop alike"
    if len(model.layers) == 1:  # linear in the weights
        truth = model.truth(x[:1], sees=oracle.causal(0))[0]
        error = (many.mean(dim=0) - truth) / (many.std(dim=0) / len(x) ** 0.5)
        assert error.abs().max() < 5, f"{form} {way}: the mean is off by {error.abs().max():.1f} deviations"


def check_kept(way: Way = TRAINING, p: float = 0.4) -> None:
    """Values that are one-hot show what is kept: the share asked for, another choice in each head and row."""
    keys = 61
    query, key = torch.zeros(B, 3, 53, 1), torch.zeros(B, 3, keys, 1)
    torch.manual_seed(5)
    weights = ch.attention(query, key, torch.eye(keys).expand(B, 3, keys, keys), dropout_p=p, backend=way.backend)
    kept = weights != 0
    assert_near(weights[kept], torch.full_like(weights[kept], 1 / keys / (1 - p)), f"{way}: kept weights")
    bound = 5 * (p * (1 - p) / kept.numel()) ** 0.5
    share = kept.double().mean()
    assert abs(share - (1 - p)) < bound, f"{way}: {share:.4f} are kept, not {1 - p}"
    for axis, name in enumerate(("items", "heads", "queries", "keys")):
        one, other = kept.select(axis, 0), kept.select(axis, 1)
        # Independent choices agree in p^2 + (1 - p)^2 of the places.
        alike = (one == other).double().mean()
        assert abs(alike - p**2 - (1 - p) ** 2) < 5 * one.numel() ** -0.5, f"{way}: {name} are dropped alike"


def check_memory(form: str, backend: str | None = None) -> None:
    """Forward and backward of a long text in training."""
    long = 1499
    model, options = dropping(form, 0.1, training=True, dtype=torch.float32)
    x = numbers(1, long, 15, dtype=torch.float32).requires_grad_()
    meter = measured(lambda: model.train()(x, mask=ch.Causal(), backend=backend, **options).sum().backward())
    whole = 3 * long * long * 4
    assert meter.largest < 0.2 * whole, f"{form}: a tensor of {meter.largest / whole:.2f} of all weights"
    assert meter.most < 1.2 * whole, f"{form}: {meter.most / whole:.2f} of all weights at a time"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_none_in_eval(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        if not way.training:
            check_none_in_eval(form, way)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", DROPPING)
@pytest.mark.parametrize("form", FORMS)
def test_some_in_training(form: str, backend: str | None, grad: bool) -> None:
    check_some_in_training(form, Way(True, grad, backend=backend))


@pytest.mark.parametrize("backend", [None, "native", "blockwise", "reference"])
def test_what_is_kept(backend: str | None) -> None:
    for p in (0.1, 0.4, 0.9):
        check_kept(way=Way(True, backend=backend), p=p)


@pytest.mark.parametrize("backend", [None, "blockwise"])
@pytest.mark.parametrize("form", FORMS)
def test_memory(form: str, backend: str | None) -> None:
    check_memory(form, backend)


@pytest.mark.parametrize("form", MODULES)
def test_all_dropped_leaves_the_bias(form: str) -> None:
    model, x = build(form, dropout_p=1.0), numbers(B, L, 15)
    for grad in (False, True):
        out = run(model, x, way=Way(True, grad))
        assert_near(out, model.truth(x, sees=lambda *_: False))
