"""Row 18: two layouts of a state dict, and conversions by hand.

torchtune 222; transformers 33928: a strict load fails between packed and separate projections. Here `from_torch` and
`to_torch` carry over both layouts, both ways, and the module's own layout has one name for each projection.

Loading grouped heads by `load_state_dict` is in ``test_state.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from pains.encoder import ENCODERS, FEW, PLAIN, Model, Way, assert_near, build, merge, numbers, run

B, L, S = 2, 5, 7
LAYOUTS: dict[str, dict[str, int]] = {"packed": {}, "split": {"kdim": 11, "vdim": 13}, "split keys": {"kdim": 11}}
OWN = ["q_proj", "k_proj", "v_proj", "out_proj"]


def theirs(layout: str, bias: bool = True) -> nn.MultiheadAttention:
    """Torch's module, no number of it zero."""
    torch.manual_seed(5)
    module = nn.MultiheadAttention(15, 3, bias=bias, batch_first=True, dtype=torch.float64, **LAYOUTS[layout])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.eval()


def by_hand(state: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output that a state dict of torch's means, packed or split."""
    if "in_proj_weight" in state:
        weights = state["in_proj_weight"].chunk(3)
    else:
        weights = tuple(state[f"{letter}_proj_weight"] for letter in "qkv")
    biases = state["in_proj_bias"].chunk(3) if "in_proj_bias" in state else (0, 0, 0)
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (3, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    weights_of_keys = torch.softmax(q @ k.transpose(-2, -1) / 5**0.5, dim=-1)
    return merge(weights_of_keys @ v) @ state["out_proj.weight"].T + state.get("out_proj.bias", 0)


def inputs(layout: str) -> tuple[Tensor, Tensor, Tensor]:
    kdim, vdim = (LAYOUTS[layout].get(name, 15) for name in ("kdim", "vdim"))
    return numbers(B, L, 15), numbers(B, S, kdim, seed=1), numbers(B, S, vdim, seed=2)


def check_from_torch(layout: str = "packed", way: Way = PLAIN, bias: bool = True) -> None:
    """Torch's numbers, in either layout, give torch's meaning."""
    module, given = theirs(layout, bias), inputs(layout)
    mha = ch.MultiHeadAttention.from_torch(module).train(way.training)
    with torch.set_grad_enabled(way.grad):
        out = mha(*given, backend=way.backend)
    assert_near(out, by_hand(module.state_dict(), *given).detach(), f"{layout} {way}")


def check_to_torch(layout: str = "packed", bias: bool = True) -> None:
    """And back: the state dict of torch's module, every bit of it, which loads strictly."""
    module = theirs(layout, bias)
    back = ch.MultiHeadAttention.from_torch(module).to_torch()
    assert list(back.state_dict()) == list(module.state_dict()), layout
    for name, tensor in module.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), f"{layout}: {name} is another"
    theirs(layout, bias).load_state_dict(back.state_dict(), strict=True)
    given = inputs(layout)
    assert_near(back.eval()(*given)[0], by_hand(module.state_dict(), *given).detach(), layout)


def check_loads(layout: str = "packed") -> None:
    """A strict load of the state dict of torch's module, as it is, gives torch's meaning."""
    state, given = theirs(layout).state_dict(), inputs(layout)
    mha = ch.MultiHeadAttention(15, 3, kdim=given[1].shape[-1], vdim=given[2].shape[-1], dtype=torch.float64)
    mha.load_state_dict(state, strict=True)
    assert_near(mha(*given).detach(), by_hand(state, *given), layout)


def check_in_an_encoder(form: str, way: Way = PLAIN) -> None:
    """An encoder whose attention comes from torch's modules is the one it came from."""
    model, x = build(form), numbers(B, L, 15)
    moved: Model = copy.deepcopy(model)
    for layer in moved.layers:
        layer.attention = ch.MultiHeadAttention.from_torch(layer.attention.to_torch())
    assert_near(run(moved, x, way=way), model.truth(x), f"{form} {way}")
    assert list(moved.state_dict()) == list(model.state_dict())
    moved.load_state_dict(model.state_dict(), strict=True)


def check_own_layout(form: str = "module", **options: int) -> None:
    """Names for each projection, whatever the widths; a strict load gives every bit of the output."""
    model = build(form, **options)
    for i, layer in enumerate(model.layers):
        names = [name for name in model.state_dict() if name.startswith(f"layers.{i}.attention.")]
        expected = [f"layers.{i}.attention.{part}.{kind}" for part in OWN for kind in ("weight", "bias")]
        assert names == expected, f"{form} {options}: {names}"
        assert layer.attention.q_proj.weight.shape[1] == 15
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.fill_(0.5)
    other.load_state_dict(model.state_dict(), strict=True)
    x = numbers(B, L, 15)
    assert torch.equal(run(other, x), run(model, x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_torch_and_back(layout: str, bias: bool) -> None:
    for way in FEW:
        check_from_torch(layout, way, bias)
    check_to_torch(layout, bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_layouts_load(layout: str) -> None:
    check_loads(layout)


@pytest.mark.parametrize("form", ENCODERS)
def test_in_an_encoder(form: str) -> None:
    for way in FEW:
        check_in_an_encoder(form, way)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"head_dim": 7, "value_head_dim": 2}], ids=str)
@pytest.mark.parametrize("form", ["module", *ENCODERS])
def test_own_layout(form: str, options: dict[str, int]) -> None:
    check_own_layout(form, **options)


def test_what_torch_has_no_place_for_is_told() -> None:
    with pytest.raises(ValueError, match=r"here D=15, 3 query and 1 key/value heads, widths E=5, Ev=5"):
        ch.MultiHeadAttention(15, 3, num_kv_heads=1).to_torch()
    with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
        ch.MultiHeadAttention.from_torch(nn.MultiheadAttention(15, 3, add_zero_attn=True))
