"""Memory grows with L, never with L x S; what the mask hides is not computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead.backends import BACKENDS
from clearhead.plan import TILE_ELEMENTS

H, LENGTH, WIDTH = 2, 2048, 16
WHOLE = H * LENGTH * LENGTH * 4  # bytes of one L x S map in float32: 32 MiB
TILE = TILE_ELEMENTS * 4
LINEAR = H * LENGTH * WIDTH * 4
SKIPPING = ("sdpa", "blockwise")  # backends that keep this promise; the reference materialises on purpose


class Meter(TorchDispatchMode):
    """The largest tensor made, the most bytes alive at a time, and multiply-adds of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.most = self.products = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), before)
        self.products += _multiply_adds(str(func), args)
        return out

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        at = storage._cdata
        if at in before or at in self._known:
            return  # a view
        size = storage.nbytes()
        self._known.add(at)
        self.alive += size
        self.most, self.largest = max(self.most, self.alive), max(self.largest, size)
        weakref.finalize(storage, self._freed, at, size)

    def _freed(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.alive -= size


def _multiply_adds(name: str, args: Any) -> int:
    if name.startswith(("aten.bmm", "aten.mm", "aten.baddbmm")):
        left, right = [t for t in args if isinstance(t, Tensor)][-2:]
        return left.numel() * int(right.shape[-1])
    if name.startswith("aten._scaled_dot_product") and "backward" not in name:
        query, key, value = args[:3]
        return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * (key.shape[3] + value.shape[3])
    return 0


def measured(call: Callable[[], object]) -> Meter:
    with Meter() as meter:
        call()
    return meter


def inputs(requires_grad: bool = False, heads: int = H) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, LENGTH, WIDTH, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


MASKS = [
    None,
    ch.Causal(),
    ch.KeyPadding(lengths=[1500]),
    ch.Causal() & ch.KeyPadding(lengths=[1500]),
    ch.Window(left=63, right=0),
    ch.Segments(torch.arange(LENGTH) // 500),
    ch.Causal() | ch.Prefix(100),
]


def test_the_meter_sees_what_is_there() -> None:
    query, key, value = inputs()
    meter = measured(lambda: ch.attention(query, key, value, backend="reference"))
    assert meter.largest >= WHOLE
    assert meter.most >= 2 * WHOLE
    assert meter.products == H * LENGTH * LENGTH * 2 * WIDTH
    assert meter.alive <= 0  # nothing outlives the call


@pytest.mark.parametrize("backend", SKIPPING)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_forward_and_backward(mask: ch.Mask | None, backend: str) -> None:
    leaves = inputs(requires_grad=True)

    def call() -> None:
        ch.attention(*leaves, mask, backend=backend).sum().backward()

    meter = measured(call)
    assert meter.largest <= 2 * TILE
    # A few tensors of a tile, and what is linear in L.
    assert meter.most <= 10 * TILE + 40 * LINEAR
    assert meter.most < WHOLE


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_dropout(mask: ch.Mask | None) -> None:
    leaves = inputs(requires_grad=True)
    meter = measured(lambda: ch.attention(*leaves, mask, dropout_p=0.1).sum().backward())
    assert meter.largest <= 2 * TILE
    assert meter.most < WHOLE


@pytest.mark.parametrize("backend", SKIPPING)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", [ch.Causal(), ch.KeyPadding(lengths=[1500])], ids=repr)
def test_looking(mask: ch.Mask | None, grad: bool, backend: str) -> None:
    leaves = inputs(requires_grad=grad)
    observe = ch.Observe(
        lse=True,
        entropy=True,
        max_weight=True,
        distance=True,
        received=True,
        top_k=8,
        mass={"first": (torch.arange(LENGTH) < 9)[None]},
        offsets=[0, 1, 2],
        pooled=64,
        weights=ch.At(heads=[1], queries=[-1]),
        grad=grad,
    )

    def call() -> None:
        out, seen = ch.attention(*leaves, mask, observe=observe, backend=backend)
        if grad:
            (out.sum() + seen.entropy.sum() + seen.received.square().sum()).backward()

    meter = measured(call)
    assert meter.largest <= 3 * TILE  # int64 indices of a tile count double
    assert meter.most < WHOLE


def test_hidden_nan() -> None:
    query, key, value = inputs()
    key[:, :, 1500:] = torch.nan
    mask = ch.Causal() & ch.KeyPadding(lengths=[1500])
    meter = measured(lambda: ch.attention(query, key, value, mask, observe=ch.Observe(entropy=True)))
    assert meter.most < WHOLE


@pytest.mark.parametrize("backend", SKIPPING)
@pytest.mark.parametrize(
    ("mask", "least", "most"),
    [
        (ch.Window(left=63, right=0), 0.03, 0.25),
        (ch.Window(left=63, right=63) & ch.KeyPadding(lengths=[1024]), 0.03, 0.2),
        (ch.Causal() & ch.KeyPadding(lengths=[512]), 0.2, 0.26),
        (ch.KeyPadding(lengths=[512]), 0.25, 0.25),
        (ch.KeyPadding(lengths=[512], side="left"), 0.25, 0.25),
        (ch.QueryPadding(lengths=[512]), 0.25, 0.3),
        (ch.Prefix(256) & ch.Causal(), 0.1, 0.13),
        (ch.Causal() & ch.Window(right=None, left=None), 0.5, 0.6),
        (None, 1.0, 1.0),
    ],
    ids=repr,
)
def test_masked_work_is_skipped(mask: ch.Mask | None, least: float, most: float, backend: str) -> None:
    query, key, value = inputs()
    meter = measured(lambda: ch.attention(query, key, value, mask, backend=backend))
    share = meter.products / (H * LENGTH * LENGTH * 2 * WIDTH)
    assert least <= share <= most


def test_maps_cost_what_was_asked() -> None:
    query, key, value = inputs()
    at = ch.At(heads=[1], queries=[5, -1])
    meter = measured(lambda: ch.attention(query, key, value, ch.Causal(), observe=ch.Observe(weights=at, scores=at)))
    plain = measured(lambda: ch.attention(query, key, value, ch.Causal()))
    assert meter.products - plain.products <= 3 * 2 * LENGTH * WIDTH


def test_every_backend_is_measured_or_excused() -> None:
    assert set(BACKENDS) - set(SKIPPING) <= {"reference", "native"}
