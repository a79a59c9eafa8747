"""Row 6: causal with as many queries as there are new tokens, fewer than the keys.

pytorch 108108, 144858, 115111; flax 5591; flash-attention 1778; mlx 2835: torch aligns the first query with the
first key, so that one new query sees key 0 alone. Here the last query is aligned with the last key unless
``align="start"``; chunks and their cache equal the whole.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, in_torch, numbers, run

B = 2
SIZES = [(1, 7), (5, 7), (7, 5), (7, 7), (1, 1), (7, 1)]


def check_last_with_last(form: str, way: Way = PLAIN, L: int = 5, S: int = 7) -> None:
    """Causal and a window, each with the last query at the last key."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    for mask, sees in (
        (ch.Causal(), oracle.causal(S - L)),
        (ch.Window(left=2, right=1), oracle.window(2, 1, S - L)),
        (
            ch.Causal() & ch.KeyPadding([1, S]),
            oracle.both(oracle.causal(S - L), oracle.key_padding([1, S], "right", S)),
        ),
    ):
        out = run(model, x, memory, way=way, mask=mask)
        assert_near(out, model.truth(x, memory, sees=sees), f"{form} {way} {mask} {L} {S}")


def check_first_with_first(form: str, way: Way = PLAIN, L: int = 5, S: int = 7) -> None:
    """``align="start"``, and what torch's is_causal means."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    truth = model.truth(x, memory, sees=oracle.causal(0))
    for mask in (ch.Causal(align="start"), ch.mask_from_sdpa(is_causal=True)[0], ch.mask_from_mha(is_causal=True)[0]):
        assert_near(run(model, x, memory, way=way, mask=mask), truth, f"{form} {way} {mask} {L} {S}")


def check_chunks(form: str, way: Way = PLAIN) -> None:
    """One call for all tokens, and calls for the last few with all keys, give the same rows."""
    model, x = build(form), numbers(B, 11, 15)
    window = ch.Window(left=4, right=0)
    for mask, sees in ((ch.Causal(), oracle.causal(0)), (window, oracle.window(4, 0, 0))):
        truth = model.truth(x, sees=sees)
        for sizes in ([1] * 11, [5, 6], [7, 1, 3]):
            out = model.train(way.training).in_chunks(x, sizes, mask=mask, backend=way.backend)
            assert_near(out, truth, f"{form} {way} {mask} {sizes}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_last_with_last(form, way)


@pytest.mark.parametrize(("L", "S"), SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_every_size(form: str, L: int, S: int) -> None:
    for way in TYPICAL:
        check_last_with_last(form, way, L, S)
        check_first_with_first(form, way, L, S)


@pytest.mark.parametrize("form", FORMS)
def test_chunks(form: str) -> None:
    for way in TYPICAL:
        check_chunks(form, way)


@pytest.mark.parametrize("form", FORMS)
def test_one_new_query_sees_every_key(form: str) -> None:
    model, x, memory = build(form), numbers(B, 1, 15), numbers(B, 7, 15, seed=1)
    assert torch.equal(run(model, x, memory, mask=ch.Causal()), run(model, x, memory))


@in_torch
def test_torch_shows_one_new_query_the_first_key_alone() -> None:
    query, key, value = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(out, value[:, :, :1], atol=1e-6)
