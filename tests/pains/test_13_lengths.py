"""Row 13: a key and a value of different lengths.

pytorch 193728: torch's kernel reads past the end of the key, and crashes. Here it is an error, with the numbers,
before any work.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.backends import BACKENDS
from pains.encoder import FEW, FORMS, PLAIN, Way, build, numbers, run

B, L, S = 2, 5, 7


def check_raises(form: str, way: Way = PLAIN, length: int = 6, rows: int = B) -> None:
    """A value of another length, or of another batch, is a ShapeError that says which."""
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    value = numbers(rows, length, 15, seed=2)
    wrong = rf"same length S: {S} and {length} in" if rows == B else r"same batch size B: got"

    def work(*_: object) -> None:
        raise AssertionError(f"{form} {way}: work was done before the error")

    with pytest.MonkeyPatch.context() as patch:
        for backend in BACKENDS.values():
            patch.setattr(type(backend), "run", work)
        patch.setattr(torch.nn.Linear, "forward", work)
        with pytest.raises(ch.ShapeError, match=wrong):
            run(model, x, memory, value, way=way)


def check_heads_raise(way: Way = PLAIN, heads: int = 1) -> None:
    """A value of another number of heads than the key's: to broadcast it would be a guess."""
    query, key, value = (numbers(B, h, L, 5, seed=h) for h in (3, 3, heads))
    with pytest.raises(ch.ShapeError, match=rf"same number of heads: 3 and {heads}"):
        ch.attention(query, key, value, backend=way.backend)


@pytest.mark.parametrize("heads", [0, 1, 2, 6])
def test_heads(heads: int) -> None:
    for way in FEW:
        check_heads_raise(way, heads)


@pytest.mark.parametrize("length", [0, 1, 6, 8])
@pytest.mark.parametrize("form", FORMS)
def test_lengths(form: str, length: int) -> None:
    for way in FEW:
        check_raises(form, way, length)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_batches(form: str, rows: int) -> None:
    for way in FEW:
        check_raises(form, way, S, rows)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_four_million_rows(backend: str | None) -> None:
    x = torch.zeros(1, 3, 15)
    value = torch.zeros(1, 1, 15).expand(1, 4_000_000, 15)
    with pytest.raises(ch.ShapeError, match=r"same length S: 3 and 4000000"):
        run(build("function"), x, x, value, way=Way(backend=backend))


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_other_lengths_raises_too(form: str) -> None:
    model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
    for way in FEW:
        with pytest.raises(ch.MaskError, match=f"a length of 8 is more than the {S} keys"):
            run(model, x, memory, way=way, mask=ch.KeyPadding([8, 1]))
        with pytest.raises(ch.MaskError, match=f"is for 6 keys, but the inputs have {S}"):
            run(model, x, memory, way=way, mask=ch.KeyPadding(real=torch.ones(B, 6, dtype=torch.bool)))
