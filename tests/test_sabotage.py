"""The suite can fail: deliberately wrong backends run through the same checks, and must not pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from cases import Case
from clearhead import functional
from clearhead.backends import BACKENDS
from clearhead.backends.reference import Reference
from clearhead.checks import Request
from clearhead.masks import And, Mask, Not, Or
from conformance import (
    check_dropout_share,
    check_gradients,
    check_output,
    check_run,
    check_seen,
    check_table,
)
from poison import check_hidden_poison, check_visible_poison
from product import CASES, Run

DOUBLE = [case for case in CASES if case.dtype == "f64" and not case.bias.startswith("bias-hides")]
PLAIN = [case for case in DOUBLE if case.scale == "default" and case.bias == "no-bias"]


class Wrong(Reference):
    """The reference, with one thing changed in what it is given or in what it gives."""

    name = "wrong"

    def given(self, request: Request) -> Request:
        return request

    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context

    def run(self, request: Request) -> Tensor:
        return self.gives(request, super().run(self.given(request)))


def rewritten(mask: Mask | None, change: Callable[[Mask], Mask | None]) -> Mask | None:
    """The mask with each kind in it changed; None = left out."""
    if isinstance(mask, And | Or | Not):
        parts = [part for part in (rewritten(part, change) for part in mask.parts) if part is not None]
        return type(mask)(tuple(parts)) if parts else None
    return None if mask is None else change(mask)


class WindowTooWide(Wrong):
    def given(self, request: Request) -> Request:
        def wider(mask: Mask) -> Mask:
            return (
                replace(mask, left=mask.left + 1) if isinstance(mask, ch.Window) and mask.left is not None else mask
            )

        return replace(request, mask=rewritten(request.mask, wider))


class WindowTooNarrow(Wrong):
    def given(self, request: Request) -> Request:
        def narrower(mask: Mask) -> Mask:
            return replace(mask, right=mask.right - 1) if isinstance(mask, ch.Window) and mask.right else mask

        return replace(request, mask=rewritten(request.mask, narrower))


class CausalFromTheStart(Wrong):
    def given(self, request: Request) -> Request:
        return replace(
            request, mask=rewritten(request.mask, lambda m: ch.Causal("start") if isinstance(m, ch.Causal) else m)
        )


class CausalIgnored(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, mask=rewritten(request.mask, lambda m: None if isinstance(m, ch.Causal) else m))


class PaddingLeaks(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, mask=rewritten(request.mask, lambda m: None if isinstance(m, ch.KeyPadding) else m))


class LastPaddingLeaks(Wrong):
    """One padded key too many is seen."""

    def given(self, request: Request) -> Request:
        def longer(mask: Mask) -> Mask:
            if isinstance(mask, ch.KeyPadding) and mask.lengths is not None and mask.side == "right":
                return ch.KeyPadding((mask.lengths + 1).clamp_max(request.sizes[3]))
            return mask

        return replace(request, mask=rewritten(request.mask, longer))


class PolarityInverted(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, mask=rewritten(request.mask, lambda m: ~m if isinstance(m, ch.Allowed) else m))


class HeadsInTurn(Wrong):
    """Query head h uses key/value head h % Hkv: `repeat` in the place of `repeat_interleave`."""

    def given(self, request: Request) -> Request:
        group = request.group
        key, value = (tensor.repeat(1, group, 1, 1) for tensor in (request.key, request.value))
        return request.on((request.query, key, value), request.attn_bias)


class ScaleDropped(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, scale=1.0)


class ScaleOfTheValues(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, scale=max(request.value.shape[-1], 1) ** -0.5)


class BiasDropped(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, attn_bias=None)


class BiasScaled(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, attn_bias=None if request.attn_bias is None else request.attn_bias * request.scale)


class DeadRowsGiveTheMean(Wrong):
    def gives(self, request: Request, context: Tensor) -> Tensor:
        mean = request.value.mean(dim=2, keepdim=True).repeat_interleave(request.group, dim=1)
        return torch.where(_dead(request), mean, context)


class DeadRowsGiveNaN(Wrong):
    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context.masked_fill(_dead(request), torch.nan)


class ItemsSwapped(Wrong):
    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context.flip(0)


class HeadsSwapped(Wrong):
    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context.flip(1)


class SlightlyOff(Wrong):
    """By three times the tolerance."""

    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context * (1 + 3e-12)


class HalfPrecisionInside(Wrong):
    def given(self, request: Request) -> Request:
        half = [tensor.float().to(tensor.dtype) for tensor in (request.query, request.key, request.value)]
        return request.on(half, request.attn_bias)


def _dead(request: Request) -> Tensor:
    B, H, L, S = request.sizes
    visible = torch.ones(1, 1, L, S, dtype=torch.bool) if request.mask is None else request.mask.dense(L, S)
    return ~visible.expand(B, H, L, S).any(dim=-1, keepdim=True)


class KeysWithoutGradient(Wrong):
    def given(self, request: Request) -> Request:
        key = request.key + (request.key * 0).detach() - (request.key - request.key.detach())
        return request.on((request.query, key, request.value), request.attn_bias)


class ValueGradientDoubled(Wrong):
    def given(self, request: Request) -> Request:
        value = 2 * request.value - request.value.detach()
        return request.on((request.query, request.key, value), request.attn_bias)


class BiasGradientLost(Wrong):
    def given(self, request: Request) -> Request:
        bias = request.attn_bias
        return replace(request, attn_bias=None if bias is None else bias.detach() + 0 * bias.nan_to_num(neginf=0.0))


class DropoutTwice(Wrong):
    def given(self, request: Request) -> Request:
        p = request.dropout_p
        return replace(request, dropout_p=1 - (1 - p) ** 2)


class DropoutNotScaled(Wrong):
    def gives(self, request: Request, context: Tensor) -> Tensor:
        return context * (1 - request.dropout_p)


class NoDropout(Wrong):
    def given(self, request: Request) -> Request:
        return replace(request, dropout_p=0.0)


@dataclass(frozen=True)
class Plot:
    """A wrong backend, the check that must catch it, and the cases in which it can."""

    wrong: type[Wrong]
    check: Callable[[Case, str], None]
    cases: list[Case]

    def __str__(self) -> str:
        return f"{self.wrong.__name__}-{self.check.__name__}"


def _with(cases: list[Case], part: str) -> list[Case]:
    found = [case for case in cases if part in str(case)]
    assert found, part
    return found


PLOTS = [
    Plot(WindowTooWide, check_output, _with(DOUBLE, "window")),
    Plot(WindowTooNarrow, check_output, _with(DOUBLE, "window")),
    Plot(CausalFromTheStart, check_output, _with(DOUBLE, "causal")),
    Plot(CausalIgnored, check_output, _with(DOUBLE, "causal")),
    Plot(PaddingLeaks, check_output, _with(DOUBLE, "keys")),
    Plot(LastPaddingLeaks, check_output, _with(DOUBLE, "keys")),
    Plot(PolarityInverted, check_output, _with(DOUBLE, "allowed")),
    Plot(HeadsInTurn, check_output, _with(DOUBLE, "gqa")),
    Plot(ScaleDropped, check_output, PLAIN),
    Plot(ScaleOfTheValues, check_output, PLAIN),
    Plot(BiasDropped, check_output, _with(DOUBLE, "/bias")),
    Plot(BiasScaled, check_output, _with(DOUBLE, "/bias")),
    Plot(DeadRowsGiveTheMean, check_output, DOUBLE),
    Plot(DeadRowsGiveNaN, check_output, DOUBLE),
    Plot(ItemsSwapped, check_output, PLAIN),
    Plot(HeadsSwapped, check_output, PLAIN),
    Plot(SlightlyOff, check_output, PLAIN),
    Plot(HalfPrecisionInside, check_output, PLAIN),
    Plot(KeysWithoutGradient, check_gradients, PLAIN),
    Plot(ValueGradientDoubled, check_gradients, PLAIN),
    Plot(BiasGradientLost, check_gradients, _with(DOUBLE, "/bias")),
]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Wrong]], str]:
    """Put a backend among the others, last, so that nothing takes it unasked."""

    def put(kind: type[Wrong]) -> str:
        monkeypatch.setitem(BACKENDS, kind.name, kind())
        return kind.name

    return put


@pytest.mark.parametrize("plot", PLOTS, ids=str)
def test_a_wrong_backend_is_caught(plot: Plot, install: Callable[[type[Wrong]], str]) -> None:
    name = install(plot.wrong)
    with pytest.raises(AssertionError):
        check_table(plot.check, plot.cases, name)


@pytest.mark.parametrize("plot", PLOTS, ids=str)
def test_the_right_backend_passes_the_same(plot: Plot, install: Callable[[type[Wrong]], str]) -> None:
    check_table(plot.check, plot.cases[::5], install(Wrong))


@pytest.mark.parametrize("wrong", [DropoutTwice, DropoutNotScaled, NoDropout])
def test_wrong_dropout_is_caught(wrong: type[Wrong], install: Callable[[type[Wrong]], str]) -> None:
    name = install(wrong)
    with pytest.raises(AssertionError, match=r"dropout 0\.3"):
        check_dropout_share(name, 0.3)
    check_dropout_share(install(Wrong), 0.3)
    run = Run(PLAIN[0], name, mode="drops", grad="grad")
    install(wrong)
    with pytest.raises(AssertionError, match="output is off"):
        check_run(run)
    install(Wrong)
    check_run(run)


def test_a_module_that_drops_in_eval_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(next(case for case in PLAIN if case.sinks == "no-sinks"), "blockwise", form="module")
    check_run(run)
    monkeypatch.setattr(ch.MultiHeadAttention, "eval", lambda self: self)
    monkeypatch.setattr(ch.MultiHeadAttention, "train", lambda self, mode=True: self)
    with pytest.raises(AssertionError, match="output is off"):
        check_run(run)


@pytest.mark.parametrize("check", [check_hidden_poison, check_visible_poison])
def test_non_finite_numbers_let_in_are_caught(
    check: Callable[[Case, str, float], None], install: Callable[[type[Wrong]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = _with(PLAIN, "keys")

    def all_of_them() -> None:
        for case in cases:
            check(case, install(Wrong), float("nan"))

    all_of_them()
    monkeypatch.setattr(functional, "set_aside", lambda request: (request, None))
    with pytest.raises(AssertionError):
        all_of_them()


# -- what is seen ----------------------------------------------------------------------------------------------


WRONG_SIGHTS: dict[str, Callable[[Any], Any]] = {
    "entropy": lambda entropy: entropy / math.log(2),  # in bits
    "lse": lambda lse: lse.exp(),
    "distance": lambda distance: distance + 1e-3,
    "received": lambda received: received / received.sum(dim=-1, keepdim=True),  # a mean, not a sum
    "max_weight": lambda weight: weight.flip(1),
    "offsets": lambda offsets: offsets.roll(1, dims=-1),
    "weights": lambda weights: weights.transpose(0, 1).reshape(weights.shape),
    "scores": lambda scores: scores * 1.001,
    "pooled": lambda pooled: (pooled[1], pooled[0]),
    "top_k": lambda top: (top[0], (top[1] - 1).clamp_min(-1)),
    "mass": lambda mass: {name: 1 - part for name, part in mass.items()},
}


@pytest.mark.parametrize("name", WRONG_SIGHTS)
def test_wrong_statistics_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in PLAIN if case.layout == "bhle"]
    check_table(check_seen, cases, "blockwise")
    look = functional.look

    def wrong(*args: Any) -> dict[str, Any]:
        found = look(*args)
        return found | {name: WRONG_SIGHTS[name](found[name])} if name in found else found

    monkeypatch.setattr(functional, "look", wrong)
    with pytest.raises(AssertionError, match=name):
        check_table(check_seen, cases, "blockwise")


def test_an_output_changed_by_looking_is_caught(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[type[Wrong]], str]
) -> None:
    calls = 0

    class Fickle(Wrong):
        def gives(self, request: Request, context: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return context * (1 + calls * 1e-15)

    with pytest.raises(AssertionError, match="looking changed the output"):
        check_table(check_seen, PLAIN[:3], install(Fickle))
