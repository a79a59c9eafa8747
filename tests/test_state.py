"""Parameters come and go unchanged: state dicts of every layout, copies, pickles, functional calls."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch

MODULES: dict[str, Callable[[], ch.MultiHeadAttention]] = {
    "plain": lambda: ch.MultiHeadAttention(12, 3),
    "no bias": lambda: ch.MultiHeadAttention(12, 3, bias=False),
    "grouped": lambda: ch.MultiHeadAttention(12, 6, num_kv_heads=2),
    "wide": lambda: ch.MultiHeadAttention(12, 3, head_dim=5, value_head_dim=7, kdim=11, vdim=13),
}


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_a_state_dict_comes_back_bit_for_bit(build: Callable[[], ch.MultiHeadAttention]) -> None:
    source, target = randomised(build()), randomised(build(), seed=1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert same(source.state_dict(), target.state_dict())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 11, "vdim": 13}], ids=["packed", "separate"])
def test_torchs_layouts_load_and_give_torchs_output(widths: dict[str, int], bias: bool) -> None:
    theirs = randomised(nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, **widths))
    ours = ch.MultiHeadAttention(12, 3, bias=bias, **widths)
    ours.load_state_dict(theirs.state_dict())
    x, key, value = torch.randn(2, 5, 12), torch.randn(2, 7, ours.k_proj.in_features), torch.randn(2, 7, 13)
    value = value[..., : ours.v_proj.in_features]
    torch.testing.assert_close(ours(x, key, value), theirs(x, key, value)[0], atol=1e-5, rtol=1e-5)
    assert same(ours.to_torch().state_dict(), theirs.state_dict())  # and back, bit for bit


@pytest.mark.parametrize("heads", [(3, 3), (6, 2)])
def test_one_packed_projection_loads(heads: tuple[int, int]) -> None:
    source = randomised(ch.MultiHeadAttention(12, heads[0], num_kv_heads=heads[1]))
    state = source.state_dict()
    for kind in ("weight", "bias"):
        state[f"qkv_proj.{kind}"] = torch.cat([state.pop(f"{name}_proj.{kind}") for name in "qkv"])
    target = ch.MultiHeadAttention(12, heads[0], num_kv_heads=heads[1])
    target.load_state_dict(state)
    assert same(source.state_dict(), target.state_dict())


def test_layouts_load_inside_a_larger_model() -> None:
    theirs = randomised(nn.ModuleDict({"attention": nn.MultiheadAttention(12, 3)}))
    ours = nn.ModuleDict({"attention": ch.MultiHeadAttention(12, 3)})
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours["attention"].k_proj.weight, theirs["attention"].in_proj_weight[12:24])


def test_loading_leaves_the_callers_dict_alone_and_names_what_does_not_fit() -> None:
    state = nn.MultiheadAttention(12, 3).state_dict()
    before = list(state)
    ch.MultiHeadAttention(12, 3).load_state_dict(state)
    assert list(state) == before
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ch.MultiHeadAttention(12, 6, num_kv_heads=2).load_state_dict(state)


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_a_copy_is_independent_and_exact(build: Callable[[], ch.MultiHeadAttention]) -> None:
    source = randomised(build())
    twin = copy.deepcopy(source)
    assert same(source.state_dict(), twin.state_dict())
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not same(source.state_dict(), twin.state_dict())
    theirs = randomised(nn.MultiheadAttention(12, 3)).state_dict()
    copy.deepcopy(ch.MultiHeadAttention(12, 3)).load_state_dict(theirs)  # the hook is copied as well


def test_functional_calls_and_transforms_of_the_module() -> None:
    mha = randomised(ch.MultiHeadAttention(6, 2, dtype=torch.float64))
    parameters = dict(mha.named_parameters())
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    mask = ch.Causal() & ch.KeyPadding([5, 3])

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(mha, parameters, (x,), {"mask": mask})
        return result

    assert torch.equal(call(parameters, x[0]), mha(x[0], mask=mask))
    mapped = torch.vmap(call, in_dims=(None, 0))(parameters, x)
    torch.testing.assert_close(mapped, torch.stack([mha(part, mask=mask) for part in x]))
    # Gradients of each sample by vmap(grad), against one backward each.
    gradients = torch.vmap(torch.func.grad(lambda p, x: call(p, x).square().sum()), in_dims=(None, 0))(parameters, x)
    for index, part in enumerate(x):
        mha.zero_grad()
        mha(part, mask=mask).square().sum().backward()
        for name, parameter in mha.named_parameters():
            torch.testing.assert_close(gradients[name][index], parameter.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward mode
def test_the_hessian_of_one_query_is_the_one_of_the_formula() -> None:
    """With two keys the weight is a sigmoid of the score difference d, whose second derivative is known."""
    key = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    value = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    at = torch.tensor([[0.7]], dtype=torch.float64)
    found = torch.func.hessian(lambda query: ch.attention(query, key, value, scale=1.0).sum())(at)
    p = 1 / (1 + math.exp(-0.7))
    assert found.item() == pytest.approx(p * (1 - p) * (1 - 2 * p), abs=1e-12)
