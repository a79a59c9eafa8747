"""Which backend runs, what each declines, and in what words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from cases import Case
from clearhead.backends import BACKENDS, Backend
from conformance import check_declines, expected_reasons
from native_checks import needs_kernels
from product import ALL

# -- who ran ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that are called, in order."""
    names: list[str] = []

    def spy_on(name: str, kind: type[Backend]) -> None:
        original = kind.see

        def see(self: Backend, request: Any, observe: Any) -> Any:
            names.append(name)
            return original(self, request, observe)

        monkeypatch.setattr(kind, "see", see)

    for name, backend in BACKENDS.items():
        spy_on(name, type(backend))
    return names


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_named_runs(backend: str, ran: list[str]) -> None:
    x = torch.randn(2, 3, 5, 7)
    ch.attention(x, x, x, backend=backend)
    ch.attention(x, x, x, backend=backend, observe=ch.Observe(entropy=True, weights=True))
    assert ran == [backend, backend]


@needs_kernels
@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.KeyPadding([5, 3]), ch.Window(1, 0)], ids=repr)
def test_torchs_kernel_runs_for_sdpa_and_for_no_other(mask: ch.Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    x = torch.randn(2, 3, 5, 7)
    for backend in BACKENDS:
        calls = 0
        ch.attention(x, x, x, mask, backend=backend)
        assert (calls > 0) == (backend == "sdpa")


@needs_kernels
@pytest.mark.parametrize("case", ALL[::4], ids=str)
def test_the_first_backend_that_can_is_the_default(case: Case, ran: list[str]) -> None:
    given = case.inputs()
    ch.attention(given.query, given.key, given.value, **given.options())
    assert ran == [next(name for name in BACKENDS if not expected_reasons(case, name))]


def test_asking_to_look_does_not_change_the_backend(ran: list[str]) -> None:
    x = torch.randn(2, 3, 5, 7)
    ch.attention(x, x, x, ch.Causal())
    ch.attention(x, x, x, ch.Causal(), observe=ch.Observe.all())
    assert ran[0] == ran[1]
    assert len(ran) == 2


def test_fused_before_plain_before_whole() -> None:
    assert list(BACKENDS) == ["native", "sdpa", "blockwise", "reference"]


@needs_kernels
def test_dropout_is_not_for_torchs_kernels(ran: list[str]) -> None:
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    ch.attention(x, x, x, dropout_p=0.1)
    ch.attention(x.float(), x.float(), x.float(), dropout_p=0.1)
    assert ran == ["blockwise", "native"]


@needs_kernels
@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("case", ALL[::5], ids=str)
def test_what_is_declined(case: Case, bias_grad: bool) -> None:
    for backend in BACKENDS:
        reasons = expected_reasons(case, backend, bias_grad=bias_grad)
        if reasons:
            check_declines(case, backend, reasons, bias_grad=bias_grad)


# -- errors ----------------------------------------------------------------------------------------------------


def test_a_declined_call_names_every_reason() -> None:
    x = torch.randn(2, 3, 5, 7)
    bias = torch.zeros(5, 5, requires_grad=True)
    with pytest.raises(
        ch.BackendError, match=r"'sdpa' can't do this call: head widths differ \(E=7, Ev=2\)"
    ) as caught:
        ch.attention(x, x, x[..., :2], attn_bias=bias, scale=-1.0, dropout_p=0.5, backend="sdpa")
    for reason in ("dropout", "scale -1 <= 0", "the bias needs a gradient"):
        assert reason in str(caught.value)


def test_if_no_backend_can_each_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS.values():
        monkeypatch.setattr(type(backend), "reasons", lambda self, request: [f"{self.name} is out", "so sorry"])
    x = torch.randn(2, 3, 5, 7)
    with pytest.raises(ch.BackendError, match="no backend can do this call") as caught:
        ch.attention(x, x, x)
    for name in BACKENDS:
        assert f"{name}: {name} is out; so sorry." in str(caught.value)


def test_an_unknown_backend_is_named_beside_the_known() -> None:
    x = torch.randn(2, 3, 5, 7)
    with pytest.raises(ValueError, match=r"no backend 'flash': choose from .*sdpa.*reference"):
        ch.attention(x, x, x, backend="flash")
