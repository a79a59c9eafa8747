"""Padding ragged sequences: the ids, the lengths, the mask, and nothing printed that was not asked for."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import KeyPadding, ShapeError, pad

SEQUENCES = [[7, 3, 11], [], [2], [5, 13, 2, 3, 7]]


@pytest.mark.parametrize("pad_id", [0, 3, -100])
@pytest.mark.parametrize("side", ["right", "left"])
def test_by_hand(side: str, pad_id: int) -> None:
    batch = pad(SEQUENCES, pad_id=pad_id, side=side)
    fill = [[pad_id] * (5 - len(row)) for row in SEQUENCES]
    rows = [row + more if side == "right" else more + row for row, more in zip(SEQUENCES, fill, strict=True)]
    assert batch.ids.tolist() == rows
    assert batch.ids.dtype == batch.lengths.dtype == torch.int64
    assert batch.lengths.tolist() == [3, 0, 1, 5]
    assert batch.mask == KeyPadding([3, 0, 1, 5], side=side)
    real = [[(j < n) if side == "right" else (j >= 5 - n) for j in range(5)] for n in (3, 0, 1, 5)]
    assert batch.mask.dense(1, 5)[:, 0, 0].tolist() == real
    # Exactly the real ids are behind the mask, even where a real id equals pad_id.
    assert batch.ids[batch.mask.dense(1, 5)[:, 0, 0]].tolist() == [7, 3, 11, 2, 5, 13, 2, 3, 7]


def test_lists_tensors_arrays_and_tuples_alike() -> None:
    expected = pad(SEQUENCES)
    kinds = [
        [torch.tensor(row, dtype=torch.int64) for row in SEQUENCES],
        [torch.tensor(row, dtype=torch.int32) for row in SEQUENCES],
        [torch.tensor(row, dtype=torch.uint8) for row in SEQUENCES],
        [tuple(row) for row in SEQUENCES],
        tuple(SEQUENCES),
        [range(0), *SEQUENCES][1:],
        [np.array(row, dtype=np.int64) for row in SEQUENCES],
    ]
    for sequences in kinds:
        batch = pad(sequences)
        assert torch.equal(batch.ids, expected.ids)
        assert torch.equal(batch.lengths, expected.lengths)
        assert batch.mask == expected.mask


def test_one_sequence_and_only_empty_ones() -> None:
    assert pad([[5, 7]]).ids.tolist() == [[5, 7]]
    batch = pad([[], []])
    assert batch.ids.shape == (2, 0)
    assert batch.lengths.tolist() == [0, 0]


def test_the_input_is_left_alone_and_not_shared() -> None:
    row = torch.tensor([5, 7])
    batch = pad([row])
    batch.ids.zero_()
    assert row.tolist() == [5, 7]


def test_a_batch_is_immutable() -> None:
    batch = pad(SEQUENCES)
    with pytest.raises(FrozenInstanceError):
        batch.ids = batch.ids  # type: ignore[misc]


@pytest.mark.parametrize("side", ["right", "left"])
def test_into_the_module(side: str) -> None:
    """A batch through an embedding and two causal layers equals its sequences, one at a time."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(17, 12, dtype=torch.float64)
    layers = [ch.MultiHeadAttention(12, 3, dtype=torch.float64) for _ in range(2)]
    batch = pad(SEQUENCES, side=side)
    x = embedding(batch.ids)
    for layer in layers:
        x = layer(x, mask=ch.Causal() & batch.mask)
    for i, row in enumerate(SEQUENCES):
        alone = embedding(torch.tensor([row], dtype=torch.int64))
        for layer in layers:
            alone = layer(alone, mask=ch.Causal())
        real = x[i, : len(row)] if side == "right" else x[i, 5 - len(row) :]
        torch.testing.assert_close(real, alone[0], rtol=1e-12, atol=1e-12)


def test_progress_bar_on_request_only(capfd: pytest.CaptureFixture[str]) -> None:
    pad(SEQUENCES)
    assert capfd.readouterr() == ("", "")
    quiet, shown = pad(SEQUENCES), pad(SEQUENCES, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "padding: 100%" in err
    assert "4/4" in err
    assert torch.equal(quiet.ids, shown.ids)


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, r"needs at least one sequence, got none"),
        ([[1], [2]], {"side": "both"}, r"side must be 'right' or 'left', not 'both'"),
        ([[1], "two"], {}, r"sequence 1 is text: pad takes token ids, so tokenize it first"),
        ([b"one"], {}, r"sequence 0 is text"),
        ([[1], [2.5]], {}, r"sequence 1 must be a flat list of token ids, not \(1,\) torch.float32"),
        ([[1], [True]], {}, r"sequence 1 .* not \(1,\) torch.bool"),
        ([[1], [1j]], {}, r"sequence 1 .* not \(1,\) torch.complex64"),
        ([[1], [[2, 3]]], {}, r"sequence 1 .* not \(1, 2\) torch.int64"),
        ([[1], 2], {}, r"sequence 1 .* not \(\) torch.int64"),
        ([[1], ["a"]], {}, r"sequence 1 must be a flat list of token ids"),
        ([[1], None], {}, r"sequence 1 must be a flat list of token ids"),
        ([[1], [[2], [3, 4]]], {}, r"sequence 1 must be a flat list of token ids"),
        ([[2**70]], {}, r"sequence 0 must be a flat list of token ids"),
    ],
)
def test_errors(sequences: object, options: dict[str, str], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        pad(sequences, **options)  # type: ignore[arg-type]


def test_a_large_pad_id_is_kept() -> None:
    assert pad([[1], [1, 2]], pad_id=2**53 + 1).ids[0, 1] == 2**53 + 1


@pytest.mark.parametrize("pad_id", [1.5, "x", True, None])
def test_pad_id_is_an_integer(pad_id: object) -> None:
    with pytest.raises((ShapeError, TypeError), match="pad_id"):
        pad([[1], [1, 2]], pad_id=pad_id)  # type: ignore[arg-type]
