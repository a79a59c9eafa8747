"""Row 15: ragged batches.

pytorch 153472, 136270, 138993: torch's module fails on jagged nested tensors, and masks are unsupported. Here lists
of different lengths become one batch and the mask that hides its padding, in one call.

Not covered yet: jagged nested tensors themselves.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import FORMS, PLAIN, TYPICAL, WAYS, Way, assert_near, build, numbers, run

SENTENCES = [[5, 3, 8], [1, 9, 4, 4, 7, 2, 6], [], [0, 5]]  # 0 is a token like any other
TABLE = numbers(11, 15)


def check_ragged(form: str, way: Way = PLAIN, side: str = "right", causal: bool = False, pad_id: int = 0) -> None:
    """Every sentence's rows are those of the sentence alone."""
    model, batch = build(form), ch.pad(SENTENCES, pad_id=pad_id, side=side)
    mask = ch.Causal() & batch.mask if causal else batch.mask
    out = run(model, TABLE.to(numbers(1).dtype)[batch.ids], way=way, mask=mask)
    assert out.isfinite().all(), f"{form} {way} {side}: not finite"
    assert batch.lengths.tolist() == [3, 7, 0, 2]
    for b, sentence in enumerate(SENTENCES):
        n = len(sentence)
        real = slice(0, n) if side == "right" else slice(7 - n, 7)
        alone = model.truth(
            TABLE[torch.tensor(sentence, dtype=torch.int64)][None],
            sees=oracle.causal(0) if causal else oracle.everything(),
        )
        assert_near(out[b : b + 1, real], alone, f"{form} {way} {side} sentence {b}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_ragged(form, way)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", FORMS)
def test_every_side(form: str, side: str, causal: bool) -> None:
    for way in TYPICAL:
        check_ragged(form, way, side, causal)
        check_ragged(form, way, side, causal, pad_id=10)


def test_tensors_are_sentences_too() -> None:
    batch = ch.pad([torch.tensor(sentence, dtype=torch.int64) for sentence in SENTENCES])
    assert torch.equal(batch.ids, ch.pad(SENTENCES).ids)
    assert batch.ids.tolist() == [sentence + [0] * (7 - len(sentence)) for sentence in SENTENCES]
    assert batch.mask == ch.KeyPadding([3, 7, 0, 2])
