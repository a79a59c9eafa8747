"""Ragged batches: sequences of different lengths as one padded tensor and the mask that hides the padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.masks import KeyPadding


@dataclass(frozen=True, eq=False)
class Batch:
    """A padded batch.

    Attributes:
        ids: (B, L) int64, L the longest length.
        lengths: (B,) int64, how many of each row are real.
        mask: the `KeyPadding` that hides the rest.
    """

    ids: Tensor
    lengths: Tensor
    mask: KeyPadding


def pad(
    sequences: Sequence[Sequence[int] | Tensor],
    pad_id: int = 0,
    side: Literal["right", "left"] = "right",
    progress: bool = False,
) -> Batch:
    """Pad sequences of token ids to the longest of them.

    Args:
        sequences: lists or 1-D integer tensors of token ids; an empty one is a row of padding.
        pad_id: the id that fills up.
        side: where the filling goes: ``"right"`` (after the tokens) or ``"left"``.
        progress: show a progress bar.

    Shapes:
        .ids (B, L), .lengths (B,), .mask a `KeyPadding` for L keys.

    Raises:
        ShapeError: no sequences at all, or one that is not a flat list of integers.

    Example:
        >>> batch = pad([[5, 7], [9]])
        >>> batch.ids.tolist(), batch.lengths.tolist(), batch.mask
        ([[5, 7], [9, 0]], [2, 1], KeyPadding(lengths=[2, 1]))
    """
    if side not in ("right", "left"):
        raise ShapeError(f"side must be 'right' or 'left', not {side!r}.")
    if isinstance(pad_id, bool) or not isinstance(pad_id, int) or not -(2**63) <= pad_id < 2**63:
        raise ShapeError(f"pad_id must be a token id, a 64-bit integer, not {pad_id!r}.")
    if len(sequences) == 0:
        raise ShapeError("pad needs at least one sequence, got none.")
    rows = [_row(index, sequence) for index, sequence in enumerate(_shown(sequences, progress))]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), max(map(len, rows))), pad_id)
    for line, row in zip(ids, rows, strict=True):
        start = 0 if side == "right" else len(line) - len(row)
        line[start : start + len(row)] = row
    return Batch(ids=ids, lengths=lengths, mask=KeyPadding(lengths, side=side))


def _row(index: int, sequence: Sequence[int] | Tensor) -> Tensor:
    if isinstance(sequence, (str, bytes)):
        raise ShapeError(f"sequence {index} is text: pad takes token ids, so tokenize it first.")
    try:
        row = torch.as_tensor(sequence)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"sequence {index} must be a flat list of token ids: {error}.") from None
    if row.numel() == 0:
        row = row.long()
    if row.ndim != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise ShapeError(
            f"sequence {index} must be a flat list of token ids, not {tuple(row.shape)} {row.dtype}: pad takes a "
            f"list of lists."
        )
    return row.long()


def _shown(sequences: Sequence[Sequence[int] | Tensor], progress: bool) -> Iterable[Sequence[int] | Tensor]:
    if not progress:
        return sequences
    from tqdm import tqdm

    return tqdm(sequences, desc="padding", unit="seq")
