"""Dropout in the kernels keeps what `clearhead.backends.dropout` says, forward and backward, however work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clearhead as ch
from cases import Sizes
from clearhead.backends.native import _whole
from clearhead.checks import check as request_of
from conformance import tiling
from dense import SEED, Call, forget_truths
from native_checks import check, isa, isas, needs_kernels, threads

pytestmark = needs_kernels

# One-hot values and gradients need Ev = S, or Ev = L.
CALLS = [
    Call(Sizes(2, 3, 3, 70, 131, 2, 0), mask="none", dropout_p=0.4),
    Call(Sizes(2, 4, 2, 70, 90, 2, 0), "bf16", mask="causal & keys-left", dropout_p=0.1),
    Call(Sizes(2, 3, 1, 67, 70, 2, 0), "f16", mask="scattered", dropout_p=0.5),
    Call(Sizes(3, 2, 2, 130, 70, 2, 0), mask="scattered", dropout_p=0.3),
    Call(Sizes(1, 2, 1, 3, 1025, 2, 0), mask="none", dropout_p=0.9),  # in runs of keys
]


def kept_forward(call: Call, cut: str) -> Tensor:
    """With equal scores and one-hot values, the output is the weights; kept ones are not 0."""
    s = call.sizes
    query, key, _, _ = call.tensors()
    torch.manual_seed(SEED)
    with tiling(cut):
        value = torch.eye(s.S, dtype=query.dtype).expand(s.B, s.Hkv, s.S, s.S)
        out = ch.attention(0 * query, key, value, **call.options(), backend="native")
    return out != 0


def kept_backward(call: Call, cut: str) -> Tensor:
    """With one-hot gradients of the output, the gradient of the values is the weights."""
    s = call.sizes
    query, key, _, _ = call.tensors()
    value = torch.ones(s.B, s.Hkv, s.S, s.L, dtype=query.dtype, requires_grad=True)
    kept = []
    for h in range(s.Hq):  # one at a time, as heads of a group add up
        one_hot = torch.zeros(s.B, s.Hq, s.L, s.L, dtype=query.dtype)
        one_hot[:, h] = torch.eye(s.L)
        torch.manual_seed(SEED)
        with tiling(cut):
            out = ch.attention(0 * query, key, value, **call.options(), backend="native")
            (dvalue,) = torch.autograd.grad(out, value, one_hot)
        kept.append(dvalue[:, h // (s.Hq // s.Hkv)].mT != 0)
    return torch.stack(kept, dim=1)


@pytest.mark.parametrize("cut", ["whole", "rows", "single"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_shared_stream(call: Call, cut: str) -> None:
    s = call.sizes
    kept = call.kept()
    assert kept is not None
    expected = kept & call.built[1].expand(s.B, s.Hq, s.L, s.S)
    assert 0 < expected.sum() < expected.numel()
    for name in isas() if cut == "whole" else isas()[:1]:
        with isa(name):
            assert torch.equal(kept_forward(call, cut), expected), name
            assert torch.equal(kept_backward(call, cut), expected), name


def test_threads_drop_the_same() -> None:
    call = CALLS[0]
    with threads(2):
        two = kept_forward(call, "whole")
    assert torch.equal(two, kept_forward(call, "whole"))


def test_scattered_masks_do_go_by_tiles() -> None:
    call = CALLS[2]
    query, key, _, _ = call.tensors()
    assert _whole(request_of(query, key, key, call.built[0], None, None, 0.5).seeded()) is None
    assert _whole(request_of(query, key, key, ch.Causal(), None, None, 0.5).seeded()) is not None


@pytest.mark.parametrize("p", [1e-9, 0.9999, 0.999999, 1.0])
@pytest.mark.parametrize("mask", ["causal", "scattered"])
def test_extreme_shares(mask: str, p: float) -> None:
    call = Call(Sizes(2, 4, 2, 70, 131, 16, 8), "f32", mask, dropout_p=p)
    assert call.truth.output.any() == (p <= 0.9999)  # of 46,000 weights none is likely beyond that
    check(call)
    check(replace(call, dtype="bf16"))


@contextmanager
def seeds(seed: Tensor) -> Iterator[None]:
    """Every call draws this seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.checks.torch.randint", lambda *args, **options: seed)
        yield


@pytest.mark.parametrize("seed", [(0, 0), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1)])
def test_extreme_seeds(seed: tuple[int, int]) -> None:
    call = Call(Sizes(2, 3, 3, 17, 31, 4, 3), dropout_p=0.5)
    forget_truths()
    with seeds(torch.tensor(seed)):
        check(call)
    forget_truths()


def test_every_call_draws_anew() -> None:
    query, key, value, _ = Call(Sizes(2, 3, 3, 17, 31, 4, 3)).tensors()
    torch.manual_seed(0)
    one, two = (ch.attention(query, key, value, dropout_p=0.5, backend="native") for _ in range(2))
    assert not torch.equal(one, two)
