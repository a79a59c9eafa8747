"""The module against ``nn.MultiheadAttention`` with the same weights: outputs, weights, gradients, both ways."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import KeyPadding, MultiHeadAttention, Observe, mask_from_mha

B, L, S = 2, 5, 7


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(found: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    """Equal up to an error relative to the expected tensor's scale."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = expected.abs().max().item() or 1.0
    assert (found - expected).abs().max().item() <= error * scale


def random_biases(module: nn.Module) -> None:
    """Initial biases are zero, which would hide a swapped or forgotten one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()


def torch_mha(bias: bool = True, batch_first: bool = True, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first, dtype=torch.float64, **options)
    random_biases(module)
    return module


# -- the same as torch's module --------------------------------------------------------------------------------

LAYOUTS = {
    "packed": {},
    "separate": {"kdim": 7, "vdim": 11},
    "separate keys": {"kdim": 7},
    "separate values": {"vdim": 11},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_from_torch_computes_the_same(layout: dict[str, int], bias: bool, batch_first: bool) -> None:
    theirs = torch_mha(bias, batch_first, **layout).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    q, k, v = numbers(B, L, 12), numbers(B, S, layout.get("kdim", 12)), numbers(B, S, layout.get("vdim", 12), seed=1)
    hidden = torch.ones(L, S, dtype=torch.bool).triu(2)
    padding = torch.arange(S) >= torch.tensor([[6], [3]])
    inputs = (q, k, v) if batch_first else (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    expected, weights = theirs(*inputs, key_padding_mask=padding, attn_mask=hidden, average_attn_weights=False)
    if not batch_first:
        expected = expected.transpose(0, 1)
    mask, _ = mask_from_mha(hidden, padding)
    output, seen = ours(q, k, v, mask=mask, observe=Observe(weights=True))
    close(output, expected)
    close(seen.weights, weights)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_to_torch_and_back_is_bit_exact(layout: dict[str, int], bias: bool) -> None:
    theirs = torch_mha(bias, dropout=0.25, **layout).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    again = ours.to_torch()
    assert again.batch_first
    assert not again.training
    assert again.dropout == ours.dropout_p == 0.25
    expected, found = theirs.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert found[name].dtype == parameter.dtype
        assert torch.equal(found[name], parameter), name
    for name, parameter in MultiHeadAttention.from_torch(again).state_dict().items():
        assert torch.equal(parameter, ours.state_dict()[name]), name


def test_from_torch_copies() -> None:
    theirs = torch_mha()
    ours = MultiHeadAttention.from_torch(theirs)
    before = copy.deepcopy(theirs.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(torch.equal(theirs.state_dict()[name], before[name]) for name in before)


def test_from_torch_keeps_what_is_frozen_and_to_torch_too() -> None:
    theirs = torch_mha(kdim=7)
    theirs.q_proj_weight.requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    frozen = [name for name, parameter in ours.named_parameters() if not parameter.requires_grad]
    assert frozen == ["q_proj.weight", "out_proj.bias"]


def test_to_torch_keeps_what_is_frozen() -> None:
    ours = MultiHeadAttention(12, 3)
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in ours.to_torch().parameters())


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_from_torch_refuses_keys_that_are_in_no_input(option: str) -> None:
    with pytest.raises(ValueError, match="can't carry over add_bias_kv or add_zero_attn"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 3, **{option: True}))


@pytest.mark.parametrize(
    ("mha", "message"),
    [
        (MultiHeadAttention(12, 6, num_kv_heads=2), r"D=12, 6 query and 2 key/value heads, widths E=2, Ev=2"),
        (MultiHeadAttention(12, 3, head_dim=5), r"D=12, 3 query and 3 key/value heads, widths E=5, Ev=5"),
        (MultiHeadAttention(12, 3, value_head_dim=5), r"widths E=4, Ev=5"),
        (MultiHeadAttention(12, 3, scale=1.0), r"scales by head_dim \*\* -0.5, not by 1.0"),
    ],
)
def test_to_torch_refuses_what_torch_has_not(mha: MultiHeadAttention, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mha.to_torch()


def test_to_torch_refuses_a_replaced_projection() -> None:
    mha = MultiHeadAttention(12, 3)
    mha.v_proj = nn.Sequential(mha.v_proj, nn.ReLU())
    with pytest.raises(ValueError, match="needs the four projections to be plain"):
        mha.to_torch()


@pytest.mark.parametrize("layout", [{}, {"kdim": 7, "vdim": 11}], ids=["packed", "separate"])
def test_gradients_are_torchs(layout: dict[str, int]) -> None:
    theirs = torch_mha(**layout)
    ours = MultiHeadAttention.from_torch(theirs)
    inputs = numbers(B, L, 12), numbers(B, S, layout.get("kdim", 12)), numbers(B, S, layout.get("vdim", 12), seed=1)
    padding = torch.arange(S) >= torch.tensor([[6], [3]])
    q, k, v = (t.clone().requires_grad_() for t in inputs)
    expected, _ = theirs(q, k, v, key_padding_mask=padding)
    weight = numbers(B, L, 12, seed=9)
    (expected * weight).sum().backward()
    q2, k2, v2 = (t.clone().requires_grad_() for t in inputs)
    (ours(q2, k2, v2, mask=KeyPadding([6, 3])) * weight).sum().backward()
    for one, two in ((q, q2), (k, k2), (v, v2)):
        close(two.grad, one.grad)
    as_weights = copy.deepcopy(theirs)  # their gradients in the place of weights, to be taken apart as those
    with torch.no_grad():
        for place, parameter in zip(as_weights.parameters(), theirs.parameters(), strict=True):
            place.copy_(parameter.grad)
    gradients = MultiHeadAttention.from_torch(as_weights)
    for name, parameter in ours.named_parameters():
        # The key's bias shifts all scores of a row alike: its gradient is zero but for rounding.
        scale = 1.0 if name == "k_proj.bias" else gradients.get_parameter(name).abs().max().item()
        assert (parameter.grad - gradients.get_parameter(name)).abs().max().item() < 1e-12 * scale, name
