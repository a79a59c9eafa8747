"""NaN, infinity, huge numbers: hidden ones change no bit, visible ones and a gradient's go where they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from cases import Sizes
from dense import DTYPES, Call
from native_checks import assert_same_bits, everything, isa, isas, needs_kernels

pytestmark = needs_kernels

CALLS = [
    Call(Sizes(2, 4, 2, 70, 131, 16, 64), mask="keys"),
    Call(Sizes(2, 4, 2, 70, 131, 5, 3), mask="queries"),
    Call(Sizes(2, 3, 3, 70, 131, 64, 16), mask="allowed-bhqk"),
    Call(Sizes(2, 2, 1, 70, 131, 16, 16), mask="window & packed"),
    Call(Sizes(2, 4, 2, 33, 65, 32, 32), mask="causal & keys-left", bias="qk", layout="turned"),
    Call(Sizes(2, 3, 1, 13, 70, 7, 2), mask="allowed-bk", bias="full", dropout_p=0.3),
    Call(Sizes(1, 3, 1, 2, 1300, 16, 16), mask="keys-left"),  # in runs of keys
    Call(Sizes(2, 2, 2, 70, 80, 16, 16), mask="allowed-bq"),
    # By tiles, and the number of keys that are seen is odd; softcap: a score that overflows has no slope.
    Call(Sizes(1, 8, 1, 131, 1033, 24, 40), mask="keys", softcap=1.1),
    Call(Sizes(1, 2, 1, 131, 301, 33, 24), mask="allowed-bk", softcap=30.0, sinks="each"),
    Call(Sizes(1, 4, 1, 257, 1031, 256, 256), mask="keys-left", dropout_p=0.3),
]
NUMBERS = {
    "nan": lambda dtype: float("nan"),
    "inf": lambda dtype: float("inf"),
    "-inf": lambda dtype: -float("inf"),
    "max": lambda dtype: torch.finfo(dtype).max,
    "1e20": lambda dtype: min(1e20, torch.finfo(dtype).max / 2),
}


def run(call: Call, tensors: tuple[Tensor, ...], doutput: Tensor) -> dict[str, Tensor]:
    """Output, gradients and everything seen, by name."""
    query, key, value, bias = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    torch.manual_seed(0)
    options = {**call.options(), "attn_bias": bias, "observe": everything(call), "backend": "native"}
    out, seen = ch.attention(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, doutput)
    found = {"output": out.detach(), **dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))}
    return found | {f"{name} {i}": part for name in seen for i, part in enumerate(tree_leaves(seen[name]))}


def poisoned(call: Call, number: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """The call's tensors with the number wherever nobody sees it, and so in the output's gradient."""
    query, key, value, bias = call.tensors()
    doutput = call.output_gradient()
    dead = ~call.truth.alive
    by_head = call.truth.visible.any(dim=2).unflatten(1, (call.sizes.Hkv, -1)).any(dim=2)
    assert dead.any() or not by_head.all(), f"{call} hides nothing"
    query.masked_fill_(dead[..., None], number)  # in place: in another layout sums may round otherwise
    for tensor in (key, value):
        tensor.masked_fill_(~by_head[..., None], number)
    doutput.masked_fill_(dead[..., None], number)
    if call.bias == "full":
        bias.masked_fill_(~call.built[1].expand(bias.shape) & (bias != -torch.inf), number)
    return (query, key, value, bias), doutput


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_what_is_hidden_changes_no_bit(call: Call, dtype: str) -> None:
    call = replace(call, dtype=dtype)
    poison = {number: poisoned(call, of(DTYPES[dtype])) for number, of in NUMBERS.items()}
    for name in isas():
        with isa(name):
            clean = run(call, call.tensors(), call.output_gradient())
            for number, given in poison.items():
                dirty = run(call, *given)
                for what, part in clean.items():
                    assert_same_bits([dirty[what]], [part], f"{name}: hidden {number} changed {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal & keys-left", "allowed-bhqk", "scattered", "window"])
def test_nan_in_one_rows_gradient(mask: str, dtype: str) -> None:
    """It reaches that query, and key and value where the row sees them; no bit of anything else."""
    call = Call(Sizes(2, 4, 2, 70, 131, 16, 8), dtype, mask)
    b, h, q = 1, 3, 7
    seen = call.truth.visible[b, h, q]
    assert seen.any()
    doutput = call.output_gradient()
    doutput[b, h, q, 2] = torch.nan
    for name in isas():
        with isa(name):
            clean = run(call, call.tensors(), call.output_gradient())
            dirty = run(call, call.tensors(), doutput)
        clean["dquery"][b, h, q] = torch.nan
        for part in ("dkey", "dvalue"):
            clean[part][b, h // 2, seen] = torch.nan
        for what, part in clean.items():
            assert_same_bits([dirty[what]], [part], f"{name}: {what}")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_visible_is_nan(dtype: str, which: str, number: float) -> None:
    """In the rows that see it, and no bit of the others' output changes."""
    call = Call(Sizes(2, 4, 2, 70, 131, 16, 8), dtype, "causal & keys-left", "full")
    visible = call.truth.visible
    b, h, q, k = 1, 3, 50, 70
    query, key, value, bias = call.tensors()
    visible[b, h, q, k] = True
    bad = torch.zeros_like(call.truth.alive)
    if which == "query":
        query[b, h, q, 3] = number
        bad[b, h, q] = True
    elif which == "bias":
        bias[b, h, q, k] = number
        bad[b, h, q] = True
    else:
        (key if which == "key" else value)[b, h // 2, k, 3] = number
        bad[b, 2:] = visible[b, 2:, :, k]
        bad[b, h, q] = call.tensors()[3][b, h, q, k] != -torch.inf
    assert 0 < bad.sum() < bad.numel()
    for name in isas():
        with isa(name):
            clean = run(call, call.tensors(), call.output_gradient())["output"]
            dirty = run(call, (query, key, value, bias), call.output_gradient())["output"]
        assert_same_bits([dirty], [clean.masked_fill(bad[..., None], torch.nan)], f"{name}: visible {number}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_overflow_are_not_hidden(dtype: str) -> None:
    """Of finite numbers: an infinite score gives NaN in its row, as infinity minus infinity does, and not zeros."""
    x = torch.ones(1, 1, 40, 16, dtype=DTYPES[dtype])
    query = x.clone()
    query[0, 0, 7] = key_max = torch.finfo(DTYPES[dtype]).max
    key = torch.full_like(x, key_max)
    for name in isas():
        with isa(name):
            out = ch.attention(query, key, x, scale=1.0, backend="native")
        if dtype == "f16":  # 65504 ** 2 is a float32
            assert torch.allclose(out.float(), torch.ones(())), name
        else:
            assert out[0, 0, 7].isnan().all(), name
