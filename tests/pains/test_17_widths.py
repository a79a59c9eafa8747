"""Row 17: widths and axes.

pytorch 27623, 120793, 95712, 63560; AEMatter 3: kdim, vdim and the width of a head are tangled; "embed_dim must be
divisible by num_heads" comes without the numbers; published code attends over the batch axis. Here widths are free,
messages have numbers, and the batch comes first, always.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FEW, FORMS, HEADS, PLAIN, WAYS, Way, assert_near, build, numbers, run

B, L, S = 2, 5, 7
MODULES = [form for form in FORMS if form != "function"]
WIDTHS: dict[str, dict[str, int]] = {
    "wider heads": {"head_dim": 7},
    "narrow heads": {"head_dim": 2},
    "other value heads": {"value_head_dim": 11},
    "both": {"head_dim": 2, "value_head_dim": 3},
    "kdim": {"kdim": 11},
    "kdim and vdim": {"kdim": 11, "vdim": 13},
    "one key head": {"num_kv_heads": 1},
    "all of them": {"num_kv_heads": 1, "head_dim": 7, "value_head_dim": 2, "kdim": 11, "vdim": 13},
}


def possible(way: Way, E: int, Ev: int) -> bool:
    """Torch's kernels would materialise L x S where the widths differ, and are not used."""
    return way.backend != "sdpa" or Ev == E


def check_widths(form: str, way: Way = PLAIN, widths: str = "kdim and vdim") -> None:
    """Any widths give the truth's output."""
    options = WIDTHS[widths]
    model, E = build(form, **options), options.get("head_dim", 5)
    kdim = options.get("kdim", 15)
    memory, value = numbers(B, S, kdim, seed=1), numbers(B, S, options.get("vdim", kdim), seed=2)
    if possible(way, E, options.get("value_head_dim", E)):
        x = numbers(B, L, 15)
        out = run(model, x, memory, value, way=way, mask=ch.Causal())
        truth = model.truth(x, memory, value, sees=oracle.causal(S - L))
        assert_near(out, truth, f"{form} {way} {widths}")
    for layer in model.layers:
        assert layer.attention.q_proj.out_features == HEADS * E
        assert layer.attention.k_proj.in_features == kdim


def check_function_widths(way: Way = PLAIN, heads: int = 6, shared: int = 3, E: int = 2, Ev: int = 7) -> None:
    """The function takes any E, Ev and groups of heads: query head h uses key head h // group."""
    query, key, value = numbers(B, heads, L, E), numbers(B, shared, S, E, seed=1), numbers(B, shared, S, Ev, seed=2)
    if possible(way, E, Ev):
        truth = oracle.attend(query.numpy(), key.numpy(), value.numpy(), oracle.everything()).output
        with torch.set_grad_enabled(way.grad):
            out = ch.attention(query.requires_grad_(way.grad), key, value, backend=way.backend)
        assert_near(out, torch.from_numpy(truth), f"{way} {heads} {shared} {E} {Ev}")


def check_batch_first(form: str, way: Way = PLAIN) -> None:
    """Another item changes no bit of this one; another token does."""
    model, x = build(form), numbers(B, L, 15)
    before = run(model, x, way=way)
    other = x.clone()
    other[1] += 1 + numbers(L, 15, seed=1)
    after = run(model, other, way=way)
    assert torch.equal(before[0], after[0]), f"{form} {way}: an item sees another"
    assert not torch.equal(before[1], after[1])
    other = x.clone()
    other[0, 0] += 1 + numbers(15, seed=1)
    assert (run(model, other, way=way)[0, 1:] != before[0, 1:]).any(dim=-1).all(), f"{form} {way}: no token is seen"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"embed_dim": 13, "num_heads": 3}, "embed_dim must be divisible by num_heads, but 13 = 4 x 3 + 1"),
    ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads: 6 is not one of 4"),
    ({"head_dim": 0}, "head_dim must be at least 1, not 0"),
    ({"vdim": -3}, "vdim must be at least 1, not -3"),
]


def check_numbers_told() -> None:
    """Messages have the numbers."""
    for options, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            ch.MultiHeadAttention(**{"embed_dim": 12, "num_heads": 3, **options})


def check_wrong_widths_raise(form: str) -> None:
    """Inputs of another width, or without a batch, say so with the numbers."""
    model, x = build(form, kdim=11, vdim=13), numbers(B, L, 15)
    memory, value = numbers(B, S, 11), numbers(B, S, 13)
    for inputs, message in (
        ((x, value, memory), "key must be (batch, length, 11), not (2, 7, 13): its last axis is 13 wide"),
        ((x, memory, memory), "value must be (batch, length, 13), not (2, 7, 11): its last axis is 11 wide"),
        ((x, memory[0], value), "key must be (batch, length, width), batch first, not (7, 11)"),
    ):
        with pytest.raises(ch.ShapeError, match=re.escape(message)):
            run(model, *inputs)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("form", MODULES)
def test_every_width(form: str, widths: str) -> None:
    for way in FEW:
        check_widths(form, way, widths)


@pytest.mark.parametrize(("heads", "shared"), [(6, 3), (6, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize(("E", "Ev"), [(2, 7), (7, 2), (5, 5), (1, 1)])
def test_the_functions_widths(heads: int, shared: int, E: int, Ev: int) -> None:
    for way in FEW:
        check_function_widths(way, heads, shared, E, Ev)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_batch_first(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_batch_first(form, way)


def test_numbers_are_told() -> None:
    check_numbers_told()


@pytest.mark.parametrize("form", MODULES)
def test_wrong_widths_raise(form: str) -> None:
    check_wrong_widths_raise(form)
