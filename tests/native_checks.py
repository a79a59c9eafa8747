"""What the native kernels must give for a call of `dense`: shared by their tests and by sabotage of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import BACKENDS
from clearhead.backends.native_library import library, why_missing
from conformance import assert_near
from dense import DTYPES, SEED, Call, Truth

TOP_K, OFFSETS = 4, [0, 1, 3, -2, 70]
FLAGS = ("lse", "entropy", "max_weight", "max_score", "distance", "received", "rest")
needs_kernels = pytest.mark.skipif(library() is None, reason=str(why_missing()))


def isas() -> list[str]:
    """The instruction sets that were built and that this processor has."""
    module = library()
    return [] if module is None else module.isas()


@contextmanager
def isa(name: str) -> Iterator[None]:
    """The kernels of one instruction set."""
    module = library()
    assert module is not None
    before = module.isa()
    module.set_isa(name)
    try:
        yield
    finally:
        module.set_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """As many threads as that."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def groups(call: Call) -> dict[str, Tensor]:
    """Groups of keys: of each item its own, and shared."""
    generator = torch.Generator().manual_seed(11)
    s = call.sizes
    shares = {"each": (s.B, 0.5), "shared": (1, 0.3)}
    return {name: torch.rand(n, s.S, generator=generator) < share for name, (n, share) in shares.items()}


def everything(call: Call) -> ch.Observe:
    """All that the kernels see on their way."""
    return ch.Observe(**dict.fromkeys(FLAGS, True), top_k=TOP_K, mass=groups(call), offsets=OFFSETS)


def run(call: Call, observe: ch.Observe | None = None) -> tuple[Tensor, ch.Seen | None, dict[str, Tensor]]:
    """Output, what is seen, gradients of query, key, value and bias."""
    tensors = dict(zip(("query", "key", "value", "bias"), call.tensors(), strict=True))
    tensors["sinks"] = call.sink_logits()
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None}
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    torch.manual_seed(SEED)
    found = ch.attention(
        *(query, key, value),
        attn_bias=leaves.get("bias"),
        sinks=leaves.get("sinks"),
        **call.options(),
        backend="native",
        observe=observe,
    )
    out, seen = (found, None) if observe is None else found
    gradients = torch.autograd.grad(out, list(leaves.values()), call.output_gradient())
    return out.detach(), seen, dict(zip(leaves, gradients, strict=True))


def tolerance(call: Call, dtype: torch.dtype) -> float:
    """The backend's, and a score of size s is off by s times its precision."""
    return BACKENDS["native"].tolerance[dtype] + 2 * torch.finfo(torch.float32).eps * call.truth.largest_score


def check(call: Call) -> None:
    """Output, gradients and statistics of a call are the truth's."""
    out, seen, gradients = run(call, everything(call))
    truth, allowed = call.truth, tolerance(call, DTYPES[call.dtype])
    assert_near(out, truth.output.numpy(), allowed, f"{call}: output", truth.output_size)
    assert not out[~truth.alive].any(), f"{call}: a dead row is not exactly zero"
    expected, sizes = truth.gradients
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name].numpy(), allowed, f"{call}: gradient of {name}", sizes[name])
    assert seen is not None
    check_seen(call, truth, seen)


def check_seen(call: Call, truth: Truth, seen: ch.Seen) -> None:
    """Every statistic of `everything`."""
    pairs = {name: (seen[name], getattr(truth, name)) for name in FLAGS}
    pairs["offsets"] = seen["offsets"], truth.offsets(OFFSETS)
    pairs["top_k"] = seen["top_k"][0], truth.top(TOP_K)
    for name, keys in groups(call).items():
        pairs[f"mass {name}"] = seen["mass"][name], truth.mass(keys)
    allowed = tolerance(call, torch.float32)
    for name, (found, expected) in pairs.items():
        finite = expected[expected.isfinite()]
        scale = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        assert found.dtype == torch.float32, f"{call}: dtype of {name}"
        assert_near(found, expected.numpy(), allowed, f"{call}: {name}", scale)
    check_top_keys(call, truth, seen["top_k"][1], allowed)


def check_top_keys(call: Call, truth: Truth, keys: Tensor, allowed: float) -> None:
    """They are distinct, visible, and carry the largest weights in order; -1 where there are no more."""
    count = truth.visible.sum(dim=-1, keepdim=True)
    missing = torch.arange(TOP_K) >= count
    assert torch.equal(keys == -1, missing), f"{call}: top_k fills up in other places"
    if not truth.visible.shape[-1]:
        return
    at = keys.long().clamp_min(0)
    assert (truth.visible.gather(-1, at) | missing).all(), f"{call}: top_k shows a hidden key"
    weights = truth.weights.gather(-1, at).masked_fill(missing, 0.0)
    assert_near(weights, truth.top(TOP_K).numpy(), allowed, f"{call}: keys of top_k", 1.0)
    ordered = at.masked_fill(missing, -1).sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    assert not twice.any(), f"{call}: top_k shows a key twice"


def bits(call: Call, observe: ch.Observe | None = None) -> list[Tensor]:
    """Output and gradients."""
    out, _, gradients = run(call, observe)
    return [out, *gradients.values()]


def assert_same_bits(one: list[Tensor], other: list[Tensor], what: str) -> None:
    """Equal, NaN with NaN."""
    for a, b in zip(one, other, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        assert same.all(), what
