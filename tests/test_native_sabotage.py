"""The checks of the kernels can fail: kernels that are deliberately wrong must not pass them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import test_native_nonfinite as nonfinite
from cases import Sizes
from clearhead.backends import native_calls
from clearhead.backends.native_library import library
from dense import Call
from native_checks import assert_same_bits, bits, check, everything, needs_kernels
from test_native_dropout import kept_backward, kept_forward

pytestmark = needs_kernels

INPUTS = ("query", "key", "value", "context", "lse")
MASKING = ("left", "right", "first", "behind", "visible", "bias")
NAMES = (*INPUTS, *MASKING, "scale", "softcap", "sinks", "dropping", "threads", "trust")
BY_ROW = ("entropy", "max_weight", "distance")
STATISTICS = (
    *BY_ROW,
    "received",
    "top_weights",
    "top_keys",
    "groups",
    "mass",
    "offsets",
    "at_offsets",
    "rest",
    "max_score",
)
Change = Callable[[dict[str, Any]], None]


class Wrong:
    """The kernels, with their arguments changed before a call, or their results after it."""

    def __init__(self, before: Change | None = None, after: Change | None = None, calls: str = "both") -> None:
        self.right, self.before, self.after, self.calls, self.count = library(), before, after, calls, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def forward(self, *args: Any) -> Any:
        return self._call("forward", (*NAMES, "statistics"), args)

    def backward(self, *args: Any) -> Any:
        return self._call("backward", (*NAMES, "dcontext", "dquery", "dkey", "dvalue", "dbias"), args)

    def _call(self, kind: str, names: tuple[str, ...], args: tuple[Any, ...]) -> Any:
        given = dict(zip(names, args, strict=True))
        wrong = self.calls in (kind, "both")
        if wrong and self.before:
            self.before(given)
        outcome = getattr(self.right, kind)(*given.values())
        if wrong and self.after:
            self.after(given)
        self.count += 1
        return outcome


def put(name: str, of: Callable[[Any], Any]) -> Change:
    def change(given: dict[str, Any]) -> None:
        given[name] = of(given[name])

    return change


def dropping(index: int, of: Callable[[Any], Any]) -> Change:
    return put("dropping", lambda d: (*d[:index], of(d[index]), *d[index + 1 :]))


def swap(one: str, other: str) -> Change:
    def change(given: dict[str, Any]) -> None:
        given[one], given[other] = given[other], given[one]

    return change


def spoil(name: str, of: Callable[[Any], Any]) -> Change:
    """A result overwritten."""

    def change(given: dict[str, Any]) -> None:
        if name not in given:
            given = dict(zip(STATISTICS, given["statistics"], strict=True))
        given[name].copy_(of(given[name].clone()))

    return change


def last_to_zero(axis: int) -> Callable[[Any], Any]:
    def of(tensor: Any) -> Any:
        tensor.select(axis, -1).zero_()
        return tensor

    return of


S = Sizes(2, 4, 2, 70, 131, 16, 5)
PLAIN, CAUSAL, WINDOW = Call(S), Call(S, mask="causal"), Call(S, mask="window")
PACKED, DROPS = Call(S, mask="packed"), Call(S, mask="causal", dropout_p=0.3)
CAPPED, SUNK = Call(S, mask="causal", softcap=0.8), Call(S, mask="causal", sinks="each")
PLOTS: dict[str, tuple[Wrong, Call]] = {
    "causal by one": (Wrong(put("right", lambda right: right + 1)), CAUSAL),
    "window by one": (Wrong(put("left", lambda left: left + 1)), WINDOW),
    "first and behind swapped": (Wrong(swap("first", "behind")), PACKED),
    "first lost": (Wrong(put("first", lambda first: None)), PACKED),
    "behind by one": (Wrong(put("behind", lambda behind: behind + 1)), PACKED),
    "items swapped": (Wrong(put("first", lambda first: first.flip(0))), PACKED),
    "mask lost": (Wrong(put("visible", lambda visible: None)), Call(S, mask="allowed-qk")),
    "mask of the next head": (Wrong(put("visible", lambda v: v.roll(1, 1))), Call(S, mask="allowed-hk")),
    "bias lost": (Wrong(put("bias", lambda bias: None)), Call(S, bias="bq")),
    "bias of the next row": (Wrong(put("bias", lambda bias: bias.roll(1, 2))), Call(S, bias="qk")),
    "scale": (Wrong(put("scale", lambda scale: scale * (1 + 1e-4))), PLAIN),
    "heads in turn": (Wrong(put("key", lambda key: key.flip(1))), PLAIN),
    "values one row on": (Wrong(put("value", lambda value: value.roll(1, 2))), PLAIN),
    "last query": (Wrong(after=spoil("context", last_to_zero(2)), calls="forward"), PLAIN),
    "last feature": (Wrong(after=spoil("context", last_to_zero(3)), calls="forward"), PLAIN),
    "slightly off": (Wrong(after=spoil("context", lambda c: c * (1 + 2e-5)), calls="forward"), PLAIN),
    "dropout lost": (Wrong(put("dropping", lambda d: None)), DROPS),
    "dropout's share": (Wrong(dropping(0, lambda threshold: threshold + 2**27)), DROPS),
    "dropout's seed": (Wrong(dropping(1, lambda seed: seed ^ 1)), DROPS),
    "dropout's factor": (Wrong(dropping(3, lambda factor: factor * 1.001)), DROPS),
    "dropout's place": (Wrong(dropping(5, lambda row: 0)), Call(S._replace(L=600), mask="scattered", dropout_p=0.3)),
    "softcap lost": (Wrong(put("softcap", lambda cap: 0.0)), CAPPED),
    "softcap": (Wrong(put("softcap", lambda cap: cap * (1 + 1e-3))), CAPPED),
    "backward's softcap": (Wrong(put("softcap", lambda cap: cap * (1 + 1e-3)), calls="backward"), CAPPED),
    "sinks lost": (Wrong(put("sinks", lambda sinks: None)), SUNK),
    "sinks of the next head": (Wrong(put("sinks", lambda sinks: sinks.roll(1))), SUNK),
    "rest": (Wrong(after=spoil("rest", lambda rest: rest + 1e-4), calls="forward"), SUNK),
    "backward's causal": (Wrong(put("right", lambda right: right + 1), calls="backward"), CAUSAL),
    "backward's scale": (Wrong(put("scale", lambda scale: scale * (1 + 1e-4)), calls="backward"), PLAIN),
    "backward's lse": (Wrong(put("lse", lambda lse: lse + 1e-4), calls="backward"), PLAIN),
    "backward's context": (Wrong(put("context", lambda c: c * (1 + 1e-3)), calls="backward"), PLAIN),
    "backward's dropout": (Wrong(put("dropping", lambda d: None), calls="backward"), DROPS),
    "backward's bias": (Wrong(put("bias", lambda bias: None), calls="backward"), Call(S, bias="qk")),
    "dquery": (Wrong(after=spoil("dquery", lambda d: d * (1 + 1e-4)), calls="backward"), PLAIN),
    "dkey": (Wrong(after=spoil("dkey", last_to_zero(2)), calls="backward"), PLAIN),
    "dvalue": (Wrong(after=spoil("dvalue", last_to_zero(3)), calls="backward"), PLAIN),
    "dbias": (Wrong(after=spoil("dbias", lambda d: d * 2), calls="backward"), Call(S, bias="hk")),
    "lse": (Wrong(after=spoil("lse", lambda lse: lse + 1e-4), calls="forward"), PLAIN),
    "entropy": (Wrong(after=spoil("entropy", lambda e: e * (1 + 1e-4)), calls="forward"), CAUSAL),
    "max_weight": (Wrong(after=spoil("max_weight", lambda w: w.roll(1, 2)), calls="forward"), CAUSAL),
    "distance": (Wrong(after=spoil("distance", lambda d: d + 1e-2), calls="forward"), CAUSAL),
    "received": (Wrong(after=spoil("received", last_to_zero(2)), calls="forward"), CAUSAL),
    "top weights": (Wrong(after=spoil("top_weights", last_to_zero(3)), calls="forward"), PLAIN),
    "top keys": (Wrong(after=spoil("top_keys", lambda keys: keys.roll(1, 3)), calls="forward"), PLAIN),
    "mass": (Wrong(after=spoil("mass", lambda mass: mass.flip(0)), calls="forward"), PLAIN),
    "offsets": (Wrong(after=spoil("at_offsets", lambda at: at.roll(1, 3)), calls="forward"), PLAIN),
    "a dead row": (
        Wrong(after=spoil("context", lambda c: c + (c == 0) * 1e-9), calls="forward"),
        Call(S, mask="keys"),
    ),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wrong], None]:
    """Calls go to these kernels."""
    return lambda wrong: monkeypatch.setattr(native_calls, "library", lambda: wrong)


@pytest.mark.parametrize("name", PLOTS)
def test_wrong_kernels_are_caught(name: str, install: Callable[[Wrong], None]) -> None:
    wrong, call = PLOTS[name]
    right = Wrong()
    install(right)
    check(call)
    assert right.count >= 2  # forward and backward did go through it
    install(wrong)
    with pytest.raises(AssertionError):
        check(call)


def test_looking_that_changes_bits_is_caught(install: Callable[[Wrong], None]) -> None:
    def nudge(given: dict[str, Any]) -> None:
        if given.get("statistics") is not None:
            given["context"].mul_(1 + 1e-7)

    install(Wrong(after=nudge, calls="forward"))
    check(PLAIN)  # it is right, but for a rounding
    with pytest.raises(AssertionError, match="looking"):
        assert_same_bits(bits(PLAIN, everything(PLAIN)), bits(PLAIN), "looking changed a bit")


def test_trusting_kernels_are_caught(install: Callable[[Wrong], None]) -> None:
    """Ones that do not look for NaN where they read."""
    call = Call(S, mask="allowed-bhqk")
    install(Wrong())
    nonfinite.test_what_is_hidden_changes_no_bit(call, "f32")
    nonfinite.test_nan_in_one_rows_gradient("causal & keys-left", "f32")
    install(Wrong(put("trust", lambda trust: True)))
    with pytest.raises(AssertionError, match="hidden"):
        nonfinite.test_what_is_hidden_changes_no_bit(call, "f32")
    with pytest.raises(AssertionError):
        nonfinite.test_nan_in_one_rows_gradient("causal & keys-left", "f32")


@pytest.mark.parametrize(("recover", "calls"), [(kept_forward, "forward"), (kept_backward, "backward")])
def test_another_stream_is_caught(
    recover: Callable[[Call, str], torch.Tensor], calls: str, install: Callable[[Wrong], None]
) -> None:
    call = Call(Sizes(2, 2, 2, 13, 17, 2, 0), dropout_p=0.4)
    install(Wrong())
    assert torch.equal(recover(call, "whole"), call.kept())
    install(Wrong(swap_seeds, calls=calls))
    assert not torch.equal(recover(call, "whole"), call.kept())


def swap_seeds(given: dict[str, Any]) -> None:
    threshold, one, other, *rest = given["dropping"]
    given["dropping"] = (threshold, other, one, *rest)
