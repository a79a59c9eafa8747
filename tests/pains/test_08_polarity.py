"""Row 8: which way round a bool mask is.

pytorch 170400, 21518, 90534, 136816; LLMs-from-scratch 1061; x-transformers 164: True hides in torch's module and
shows in its function, and 0/1 floats are *added*. Here True = may attend everywhere; `Blocked` and `mask_from_mha`
name the other; floats and integers raise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FEW, FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, flags, in_torch, numbers, run

B, L = 2, 7
QK = (numbers(L, L, seed=2) > -0.3) | torch.eye(L, dtype=torch.bool)
BK = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
ON_QK, ON_BK = oracle.table(QK.numpy(), "qk"), oracle.table(BK.numpy(), "bk")

# Ways to say which pairs are visible, and what each says.
SAID: dict[str, tuple[Callable[[], ch.Mask | Tensor], oracle.Sees]] = {
    "bare (L, S)": (lambda: QK, ON_QK),
    "bare (1, 1, L, S)": (lambda: QK[None, None], ON_QK),
    "Allowed": (lambda: ch.Allowed(QK, axes="qk"), ON_QK),
    "Blocked": (lambda: ch.Blocked(~QK, axes="qk"), ON_QK),
    "~": (lambda: ~ch.Allowed(~QK, axes="qk"), ON_QK),
    "real keys": (lambda: ch.KeyPadding(real=BK), ON_BK),
    "a tokenizer's 0 and 1": (lambda: ch.KeyPadding(real=BK.int()), ON_BK),
    "lengths": (lambda: ch.KeyPadding([4, 7]), ON_BK),
    "ids": (lambda: ch.KeyPadding.from_ids(BK * 5, pad_id=0), ON_BK),
    "torch's function": (lambda: ch.mask_from_sdpa(QK)[0], ON_QK),
    "torch's module": (lambda: ch.mask_from_mha(~QK)[0], ON_QK),
    "torch's module, padding": (lambda: ch.mask_from_mha(key_padding_mask=~BK)[0], ON_BK),
}


def check_said(form: str, way: Way = PLAIN, said: str = "bare (L, S)") -> None:
    """The output is that of the pairs meant; no other has weight."""
    mask, sees = SAID[said]
    model, x = build(form), numbers(B, L, 15)
    assert_near(run(model, x, way=way, mask=mask()), model.truth(x, sees=sees), f"{form} {way} {said}")
    for seen in model.seen:
        assert not seen.weights[~flags(sees, B, L, L)].any(), f"{form} {way} {said}: a hidden pair has weight"


def check_numbers_raise(form: str, dtype: torch.dtype = torch.float32, way: Way = PLAIN) -> None:
    """A mask of numbers is an error that names both ways out, before any work."""
    model, x = build(form), numbers(B, L, 15)
    for mask in (QK.to(dtype), QK[None, None].to(dtype)):
        with pytest.raises(ch.MaskError, match=r"must be bool, True = may attend.*axes=.*attn_bias=") as caught:
            run(model, x, way=way, mask=mask)
        assert str(dtype) in str(caught.value), f"{form} {way}: {caught.value}"


def check_mask_in_keys_place(form: str) -> None:
    """As torch's module takes it, by position: the third thing is a value here, and no mask."""
    model, x = build(form), numbers(B, L, 15)
    for mask in (ch.Causal(), QK, BK):
        for name, given in (("key", (mask,)), ("value", (x, mask))):
            with pytest.raises(TypeError, match=f"got a mask in the place of {name}: pass it by name, mask="):
                run(model, x, *given)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "function"])
def test_a_mask_in_the_place_of_the_key(form: str) -> None:
    check_mask_in_keys_place(form)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_said(form, way)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("form", FORMS)
def test_everything_said(form: str, said: str) -> None:
    for way in TYPICAL:
        check_said(form, way, said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_raise(form: str, dtype: torch.dtype) -> None:
    for way in FEW:
        check_numbers_raise(form, dtype, way)


@pytest.mark.parametrize("kind", [ch.Allowed, ch.Blocked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_numbers_raise_when_the_mask_is_built(kind: type[ch.Mask], dtype: torch.dtype) -> None:
    with pytest.raises(ch.MaskError, match=f"takes a bool tensor, not {dtype}"):
        kind(QK.to(dtype), axes="qk")


def test_a_bool_bias_raises() -> None:
    for form in FORMS:
        with pytest.raises(ch.ShapeError, match=r"floating-point tensor, added to the scores, not torch.bool"):
            run(build(form), numbers(B, L, 15), attn_bias=QK)


def test_integers_of_torchs_raise() -> None:
    for convert in (ch.mask_from_mha, ch.mask_from_sdpa):
        with pytest.raises(ch.MaskError, match=r"bool or floating point, not torch\.int64"):
            convert(QK.long())


@in_torch
def test_torch_has_both_polarities() -> None:
    x, only_first = torch.randn(1, 5, 4), torch.zeros(5, 5, dtype=torch.bool)
    only_first[:, 0] = True
    mha = nn.MultiheadAttention(4, 1, batch_first=True)
    assert not mha(x, x, x, attn_mask=only_first)[1][0, :, 0].any()  # True hides
    out = F.scaled_dot_product_attention(x, x, x, attn_mask=only_first)
    assert torch.allclose(out, x[:, :1].expand_as(out), atol=1e-6)  # True shows
