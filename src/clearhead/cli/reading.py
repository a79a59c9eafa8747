"""From text to a model's inputs: texts, their tokens as written, and the model that reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

MAX_TEXTS = 64
MAX_BYTES = 4_000_000
MAX_NEW = 64  # tokens that an encoder-decoder model writes where no target is given


class UserError(ValueError):
    """What is wrong with the user's input, in one line."""


@dataclass(frozen=True)
class Reading:
    """Texts as a model reads them.

    Attributes:
        texts: as given.
        inputs: what the model takes, each (B, L).
        real: bool (B, L), False at padding.
        special: bool (B, L), True at tokens that the tokenizer added ([CLS], [SEP], ...).
        labels: for each text, L labels cut from the text itself; added tokens by their names.
        names: for the added tokens by name ("[CLS]"), bool (B, L) where they stand.
        words: (B, L), which word of the text (cut at white space) each token belongs to; -1 for added tokens.
        unknown: pieces of the texts that the model reads as unknown.
    """

    texts: list[str]
    inputs: dict[str, Tensor]
    real: Tensor
    special: Tensor
    labels: list[list[str]]
    names: dict[str, Tensor]
    words: Tensor
    unknown: list[str]


def gather_texts(texts: Sequence[str], file: Path | None, lines: Path | None) -> list[str]:
    """The texts of one run: arguments, or one document, or a text a line; exactly one of these.

    Raises:
        UserError: none or several sources, an unreadable file, an empty text, more than 64 texts.
    """
    if sum((bool(texts), file is not None, lines is not None)) != 1:
        raise UserError("give one source of text: TEXT..., or --file FILE (- for standard input), or --lines FILE.")
    if file is not None:
        found = [_read(file)]
    elif lines is not None:
        found = [line for line in _read(lines).splitlines() if line.strip()]
        if not found:
            raise UserError(f"{lines} has no line with text.")
    else:
        found = list(texts)
    if len(found) > MAX_TEXTS:
        raise UserError(f"{len(found):,} texts are more than the {MAX_TEXTS} of one run: give fewer at a time.")
    for number, text in enumerate(found, start=1):
        if not text.strip():
            raise UserError(f"text {number} is empty.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {number} is not valid Unicode at character {error.start}: save it as UTF-8."
            ) from None
    return found


def _read(path: Path) -> str:
    if str(path) == "-" and sys.stdin is None:
        raise UserError("standard input is closed: there is nothing to read.")
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{path} is longer than {MAX_BYTES:,} bytes: no model reads that much at once.")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}.") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}.") from None


def tokenize(texts: list[str], model: Any, tokenizer: Any) -> Reading:
    """The texts as one padded batch.

    Raises:
        UserError: a text longer than the model's positions, with the count; no way to pad.
    """
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise UserError("this tokenizer has no padding token: give one text at a time.")
    encoded = tokenizer(
        texts,
        padding=len(texts) > 1,
        return_tensors="pt",
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=True,
        verbose=False,
    )
    ids, real = encoded["input_ids"], encoded["attention_mask"].bool()
    _check_lengths("text", real, model, "give it in parts, a part a line of --lines FILE")
    special = encoded.pop("special_tokens_mask").bool() | ~real
    spans = encoded.pop("offset_mapping").tolist()
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    rows = list(zip(texts, tokens, spans, special.tolist(), strict=True))
    labels = [_labels(*row) for row in rows]
    words = torch.tensor([_words(text, at, added) for text, _, at, added in rows]).reshape(ids.shape)
    names = {
        name: (ids == token_id) & real
        for name, token_id in (
            (tokenizer.cls_token, tokenizer.cls_token_id),
            (tokenizer.sep_token, tokenizer.sep_token_id),
        )
        if token_id is not None and bool((ids == token_id).any())
    }
    not_known = ids == (-1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id)
    unknown = [labels[text][token] for text, token in (not_known & ~special).nonzero().tolist()]
    return Reading(texts, dict(encoded), real, special, labels, names, words, unknown)


def tokenize_targets(targets: list[str], model: Any, tokenizer: Any) -> Reading:
    """What an encoder-decoder model's decoder is given: its start token, then a target up to its end.

    Raises:
        UserError: a target longer than the model's positions, with the count.
    """
    rows = []
    start = _start_token(model)
    for text in targets:
        encoded = tokenizer(
            text_target=text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False
        )
        tokens = tokenizer.convert_ids_to_tokens([start, *encoded["input_ids"]])
        spans = [(0, 0), *encoded["offset_mapping"]]
        special = [1, *encoded["special_tokens_mask"]]
        ids = [start, *encoded["input_ids"]]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids, tokens, spans, special = ids[:-1], tokens[:-1], spans[:-1], special[:-1]
        rows.append((ids, special, _labels(text, tokens, spans, special), _words(text, spans, special)))
    return _decoder_reading(targets, rows, model, tokenizer)


def written(reading: Reading, model: Any, tokenizer: Any) -> Reading:
    """What the decoder writes by itself about the texts, the likeliest token each time, up to 64 tokens."""
    with torch.no_grad():
        out = model.generate(
            **reading.inputs, max_new_tokens=MAX_NEW, do_sample=False, num_beams=1, output_attentions=False
        )
    texts, rows = [], []
    for ids in out.tolist():
        if tokenizer.eos_token_id in ids[1:]:
            ids = ids[: ids.index(tokenizer.eos_token_id, 1)]
        special = [int(token in tokenizer.all_special_ids) for token in ids]
        # A token alone may be a part of a character: what it adds to the text before it.
        so_far = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
        ends = [(len(before), len(after)) for before, after in pairwise(so_far)]
        spans = [(max(0, start - 1) if start == end else start, end) for start, end in ends]
        text = so_far[-1]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        rows.append((ids, special, _labels(text, tokens, spans, special), _words(text, spans, special)))
        texts.append(text)
    return _decoder_reading(texts, rows, model, tokenizer)


def _start_token(model: Any) -> int:
    for config in (model.config, getattr(model, "generation_config", None)):
        start = getattr(config, "decoder_start_token_id", None)
        if isinstance(start, int):
            return start
    raise UserError(f"{type(model).__name__} doesn't say what token its decoder starts with.")


def _decoder_reading(texts: list[str], rows: list[Any], model: Any, tokenizer: Any) -> Reading:
    longest = max(len(ids) for ids, *_ in rows)
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def padded(column: int, filling: Any) -> list[list[Any]]:
        return [[*row[column], *[filling] * (longest - len(row[column]))] for row in rows]

    real = torch.arange(longest) < torch.tensor([[len(ids)] for ids, *_ in rows])
    _check_lengths("target", real, model, "give a shorter one")
    inputs = {"decoder_input_ids": torch.tensor(padded(0, pad)), "decoder_attention_mask": real.long()}
    labels = cast("list[list[str]]", padded(2, tokenizer.pad_token or ""))
    return Reading(
        texts, inputs, real, torch.tensor(padded(1, 1)).bool(), labels, {}, torch.tensor(padded(3, -1)), unknown=[]
    )


def _check_lengths(what: str, real: Tensor, model: Any, way_out: str) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    for number, count in enumerate(real.sum(dim=1).tolist(), start=1):
        if isinstance(most, int) and count > most:
            raise UserError(
                f"{what} {number} has {count:,} tokens, and the model has positions for {most:,}: {way_out}."
            )


def _labels(text: str, tokens: list[str], spans: Sequence[Sequence[int]], special: Sequence[int]) -> list[str]:
    """Each token as it is written in the text; what shares a character with the token before is numbered."""
    labels: list[str] = []
    covered, part = 0, 1
    for token, (start, end), added in zip(tokens, spans, special, strict=True):
        if added or start == end:
            labels.append(token)
            continue
        part = part + 1 if start < covered else 1
        covered = max(covered, end)
        labels.append(text[start:end] if part == 1 else f"{text[start:end]}·{part}")
    return labels


def _words(text: str, spans: Sequence[Sequence[int]], special: Sequence[int]) -> list[int]:
    """Which word, cut at white space and counted from 1, each token begins in; -1 for added tokens."""
    at, count, inside = [], 0, False
    for character in text:
        count += not character.isspace() and not inside
        inside = not character.isspace()
        at.append(count)
    words = []
    for (start, end), added in zip(spans, special, strict=True):
        first = next((i for i in range(start, end) if not text[i].isspace()), start)
        words.append(-1 if added or first >= len(at) else at[first])
    return words
