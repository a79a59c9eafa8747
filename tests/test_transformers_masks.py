"""What transformers' masks are read as, against the tensors that it makes of the same arguments itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.compat.transformers_masks import MaskTensor, Meaning, meaning_of, meaning_on, read_tensor, tag

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
from transformers import masking_utils as theirs  # noqa: E402

FIRST = torch.tensor([2, 0])  # of two items, where the tokens begin
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 0]])


def packed(rule: Callable[..., Any]) -> Callable[..., Any]:
    return theirs.and_masks(
        theirs.remap_positions_for_packed_sequence(rule, POSITIONS), theirs.packed_sequence_mask_function(PACKED)
    )


RULES = {
    "causal": theirs.causal_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "chunks": theirs.chunked_causal_mask_function(3, FIRST),
    "bidirectional": theirs.bidirectional_mask_function,
    "both sides": theirs.sliding_window_bidirectional_mask_function(2),
    "packed": packed(theirs.causal_mask_function),
    "packed window": packed(theirs.sliding_window_causal_mask_function(2)),
}
# (L, S, where the queries start, where the keys start, tokens so far)
SHAPES = {
    "first": (7, 7, 0, 0, 7),
    "step": (1, 8, 7, 0, 8),
    "chunk": (3, 8, 5, 0, 8),
    "static first": (5, 17, 0, 0, 5),
    "static chunk": (3, 17, 5, 0, 8),
    "static step": (1, 17, 8, 0, 9),
    "sliding": (1, 3, 9, 7, 10),
    "sliding chunk": (2, 4, 7, 5, 9),
}


@pytest.mark.parametrize("padding", [None, "left", "right", "holes"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_mask_means_what_transformers_makes_of_it(rule: str, shape: str, padding: str | None) -> None:
    L, S, q_offset, kv_offset, tokens = SHAPES[shape]
    if "packed" in rule and (shape != "first" or padding is not None):
        pytest.skip("transformers packs without cache and padding only")
    real = torch.ones(2, tokens, dtype=torch.bool)
    if padding == "left":
        real[0, :2] = False
    if padding == "right":
        real[1, -2:] = False
    if padding == "holes":
        real[1, 1::2] = False
    arguments: dict[str, Any] = {
        "q_length": L,
        "kv_length": S,
        "q_offset": torch.tensor(q_offset) if "static" in shape else q_offset,
        "kv_offset": kv_offset,
        "mask_function": RULES[rule],
        "attention_mask": None if padding is None else real,
    }
    expected = theirs.sdpa_mask(2, **arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    meaning = meaning_of(**arguments)
    if rule == "both sides" and q_offset - kv_offset != S - L:
        assert meaning is None  # clearhead's windows are aligned to the end or the start: the tensor is taken
        return
    assert meaning is not None
    mask, keys, hidden = meaning
    own = torch.ones(1, 1, L, keys, dtype=torch.bool) if mask is None else mask.dense(L, keys)
    assert torch.equal(own.expand(2, 1, L, keys), expected[..., :keys])
    assert not expected[..., keys:].any()
    assert torch.equal(MaskTensor(meaning, (2, L, S), "cpu") | torch.tensor(False), expected)
    # Padded queries are hidden by the mask itself, or named beside it.
    if rule != "both sides":
        queries = real[:, q_offset : q_offset + L]
        dead = ~queries if hidden is None else ~hidden.dense(L, keys).expand(2, 1, L, keys)[:, 0, :, 0]
        assert torch.equal(dead | ~own.expand(2, 1, L, keys)[:, 0].any(-1), ~queries | ~expected[:, 0].any(-1))


@pytest.mark.parametrize(
    "function",
    [
        theirs.or_masks(theirs.causal_mask_function, theirs.bidirectional_mask_function),
        theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: k > 2),
        theirs.remap_positions_for_packed_sequence(theirs.causal_mask_function, POSITIONS),
        theirs.and_masks(theirs.sliding_window_overlay(3), theirs.sliding_window_overlay(2)),
        theirs.blockwise_overlay(PACKED),
    ],
)
def test_rules_that_are_not_known_are_left_to_tensors(function: Callable[..., Any]) -> None:
    assert meaning_of(q_length=7, kv_length=7, mask_function=function) is None


def test_floats_hide_by_their_minimum_and_add_otherwise() -> None:
    low = torch.finfo(torch.float32).min
    mask, bias = read_tensor(torch.tensor([[[[0.0, low, -float("inf"), 1.5]]]]), added=False)
    assert mask is not None
    assert mask.dense(1, 4).tolist() == [[[[True, False, False, True]]]]
    assert bias is not None
    assert bias.tolist() == [[[[0.0, 0.0, 0.0, 1.5]]]]
    flags = torch.tensor([[[[True, False]]]])
    assert read_tensor(flags, added=False)[1] is None
    assert read_tensor(flags, added=True)[0] is None  # eager attention adds flags as numbers
    assert read_tensor(flags, added=True)[1].tolist() == [[[[1.0, 0.0]]]]  # type: ignore[union-attr]


def masked() -> MaskTensor:
    return MaskTensor(Meaning(ch.Causal(), 5, None), (2, 3, 7), "cpu")


def test_a_mask_passes_as_a_tensor_and_gives_its_numbers_to_who_reads_them() -> None:
    mask = masked()
    numbers = torch.zeros(2, 1, 3, 7, dtype=torch.bool)
    numbers[..., :5] = ch.Causal().dense(3, 5)
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype, mask.ndim) == ((2, 1, 3, 7), torch.bool, 4)
    same = (mask, mask.contiguous(), mask.detach(), mask.to("cpu"))
    assert all(isinstance(other, MaskTensor) and meaning_on(other) == mask.meaning for other in same)
    assert mask._numbers is None
    assert torch.equal(mask[:, 0, :, :4], numbers[:, 0, :, :4])
    assert torch.equal(mask & ~numbers, torch.zeros_like(numbers))
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(numbers, 0.0, -1.0))
    assert meaning_on(mask) == mask.meaning


@pytest.mark.parametrize("write", ["item", "view", "inplace"])
def test_what_is_written_into_a_mask_counts(write: str) -> None:
    mask = masked()
    if write == "item":
        mask[1, :, 0] = False
    elif write == "view":
        part = mask[:, :, :2]
        part[1, :, 0] = False
    else:
        mask.logical_and_(torch.arange(6).reshape(2, 1, 3, 1) != 3)
    numbers = torch.zeros(2, 1, 3, 7, dtype=torch.bool)
    numbers[..., :5] = ch.Causal().dense(3, 5)
    numbers[1, :, 0] = False
    assert torch.equal(mask | torch.tensor(False), numbers)
    assert meaning_on(mask) is None


def test_a_meaning_is_forgotten_where_its_tensor_was_changed() -> None:
    meaning = Meaning(ch.Causal(), 3, None)
    tensor = tag(ch.Causal().dense(3, 3), meaning)
    assert meaning_on(tensor) == meaning
    assert meaning_on(tensor.clone()) is None
    tensor[..., 0] = False
    assert meaning_on(tensor) is None
