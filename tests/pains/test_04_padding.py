"""Row 4: a padded batch differs from single sequences, and padded queries still attend.

transformers 29029, 30378, 36585, 35032; flash-attention 192; joeynmt 151. Here: a real token's output depends on
real tokens only, with any side, any batch mates and any cut of the sequence; keys and queries have lengths of their
own; zero lengths are legal.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import (
    BY_DEFAULT,
    FEW,
    FORMS,
    OBSERVED,
    PLAIN,
    TYPICAL,
    WAYS,
    Way,
    assert_near,
    build,
    numbers,
    run,
)

L, LENGTHS = 7, (3, 7, 1, 5)


def check_as_alone(form: str, way: Way = PLAIN, side: str = "right", causal: bool = False) -> None:
    """Each item's real rows are those of the item alone, whatever the padding holds and who else is there."""
    model = build(form)
    mask = ch.KeyPadding(LENGTHS, side=side)
    out = run(model, numbers(len(LENGTHS), L, 15), way=way, mask=ch.Causal() & mask if causal else mask)
    sees = oracle.causal(0) if causal else oracle.everything()
    for b, n in enumerate(LENGTHS):
        real = slice(0, n) if side == "right" else slice(L - n, L)
        alone = model.truth(numbers(len(LENGTHS), L, 15)[b : b + 1, real], sees=sees)
        assert_near(out[b : b + 1, real], alone, f"{form} {way} {side} item {b}")


def check_batch_mates(form: str, way: Way = PLAIN, side: str = "right") -> None:
    """Other padding, other mates and another place in the batch change nothing that is real."""
    model, x, length = build(form), numbers(4, L, 15), 3
    real = slice(0, length) if side == "right" else slice(L - length, L)
    outs = []
    for place in range(4):
        batch = numbers(4, L, 15, seed=5 + place) * 10
        batch[place, real] = x[0, real]
        lengths = [L - i for i in range(4)]
        lengths[place] = length
        outs.append(run(model, batch, way=way, mask=ch.KeyPadding(lengths, side=side))[place, real])
    alone = model.truth(x[:1, real])[0]
    for place, out in enumerate(outs):
        assert_near(out, alone, f"{form} {way} {side} place {place}")


def check_padded_queries(form: str, way: Way = OBSERVED) -> None:
    """Padded queries are dead rows; keys receive attention from real queries only."""
    model, x = build(form), numbers(len(LENGTHS), L, 15)
    mask = ch.KeyPadding(LENGTHS) & ch.QueryPadding(LENGTHS)
    out = run(model, x, way=way, mask=mask)
    sees = oracle.both(oracle.key_padding(LENGTHS, "right", L), oracle.query_padding(LENGTHS, "right", L))
    assert_near(out, model.truth(x, sees=sees), f"{form} {way}")
    for seen in model.seen:
        for b, n in enumerate(LENGTHS):
            assert not seen.weights[b, :, n:].any(), f"{form} {way}: a padded query attends"
            received = seen.received[b].sum(dim=-1)  # each real query gives 1 in all
            assert_near(received, torch.full_like(received, n), f"{form} {way} received", 1e-6)


def check_lengths_of_their_own(form: str, way: Way = PLAIN) -> None:
    """Queries and keys are padded each for themselves; lengths may be 0."""
    query_lengths, key_lengths, S = (7, 0, 4, 5), (0, 3, 5, 4), 5
    model, x, memory = build(form), numbers(4, L, 15), numbers(4, S, 15, seed=1)
    mask = ch.KeyPadding(key_lengths) & ch.QueryPadding(query_lengths)
    sees = oracle.both(oracle.key_padding(key_lengths, "right", S), oracle.query_padding(query_lengths, "right", L))
    assert_near(run(model, x, memory, way=way, mask=mask), model.truth(x, memory, sees=sees), f"{form} {way}")


def check_cut_in_chunks(form: str, way: Way = PLAIN, sizes: tuple[int, ...] = (3, 1, 3)) -> None:
    """A sequence given a few tokens at a time, its earlier keys kept, equals the whole."""
    model, x = build(form), numbers(2, L, 15)
    model.train(way.training)
    with torch.set_grad_enabled(way.grad):
        out = model.in_chunks(x, list(sizes), mask=ch.Causal(), backend=way.backend)
    assert_near(out, model.truth(x, sees=oracle.causal(0)), f"{form} {way} {sizes}")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_as_alone(form: str, backend: str, side: str) -> None:
    for way in WAYS[backend]:
        check_as_alone(form, way, side)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", FORMS)
def test_as_alone_when_causal(form: str, side: str) -> None:
    for way in TYPICAL:
        check_as_alone(form, way, side, causal=True)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", FORMS)
def test_batch_mates(form: str, side: str) -> None:
    for way in TYPICAL:
        check_batch_mates(form, way, side)


@pytest.mark.parametrize("form", FORMS)
def test_padded_queries(form: str) -> None:
    for way in FEW:
        check_padded_queries(form, way)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_of_their_own(form: str) -> None:
    for way in FEW:
        check_lengths_of_their_own(form, way)


@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 1, 3), (1, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_cut_in_chunks(form: str, sizes: tuple[int, ...]) -> None:
    for way in TYPICAL:
        check_cut_in_chunks(form, way, sizes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("B", "length"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_is_legal(form: str, B: int, length: int) -> None:
    model = build(form)
    for way in BY_DEFAULT:
        out = run(model, numbers(B, length, 15), way=way, mask=ch.Causal())
        assert out.shape == (B, length, 15)
