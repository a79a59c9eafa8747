"""`record` and `attach` on tiny models of many families, against transformers' own eager weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from families import ALL, BY_NAME, Family, eager_weights, transformers

SHOWN = ch.Observe(
    weights=True, entropy=True, max_weight=True, distance=True, received=True, rest=True, offsets=[0, 1]
)


def on_real(rows: Tensor, real: Tensor) -> Tensor:
    """Rows (B, H, L, ...) of real queries only."""
    return rows.transpose(1, 2)[real]


def agree(mine: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    """Within so much of the size of what is compared."""
    scale = float(theirs.abs().max().clamp_min(1.0))
    torch.testing.assert_close(mine.double(), theirs.double(), atol=within * scale, rtol=0)


def real_queries(name: str, inputs: dict[str, Tensor], L: int) -> Tensor:
    """(B, L): which queries of a layer are tokens."""
    mask = inputs.get("decoder_attention_mask" if "decoder." in name else "attention_mask")
    return torch.ones(3, L, dtype=torch.bool) if mask is None else mask[:, -L:].bool()


def compare(seen: ch.Seen, eager: Tensor, real: Tensor, *, padded_are_dead: bool) -> None:
    """Weights equal eager's on real tokens; statistics are those of these weights, in float64."""
    S = seen.weights.shape[-1]
    weights = eager[..., :S].double()
    assert on_real(eager, real)[..., S:].count_nonzero() == 0  # room of a static cache
    agree(on_real(seen.weights, real), on_real(weights, real))
    L = weights.shape[2]
    apart = torch.arange(S) - (torch.arange(L)[:, None] + S - L)
    by_query = {
        "entropy": torch.special.entr(weights).sum(-1),
        "max_weight": weights.amax(-1),
        "rest": 1 - weights.sum(-1),
        "distance": (weights * apart.abs()).sum(-1),
        "offsets": torch.stack([(weights * (apart == -d)).sum(-1) for d in (0, 1)], -1),
    }
    for name, expected in by_query.items():
        agree(on_real(seen[name], real), on_real(expected, real))
    if padded_are_dead:
        assert on_real(seen.weights, ~real).count_nonzero() == 0
        agree(seen.received, (weights * real[:, None, :, None]).sum(2))


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_pass_is_recorded_as_eager_attention_has_it(family: Family, side: str | None) -> None:
    if side is not None and family.reads in ("pixels", "sound"):
        pytest.skip("takes no padding")
    model, inputs = family.build(), family.inputs(side)
    with torch.no_grad():
        eager = family.build("eager")(**inputs, output_attentions=True)
        plain = model(**inputs)[0]
        with ch.record(model, SHOWN) as beside:
            assert torch.equal(model(**inputs)[0], plain)
        ch.attach(model)
        attached = model(**inputs)[0]
        with ch.record(model, SHOWN) as within:
            assert torch.equal(model(**inputs)[0], attached)
        ch.detach(model)
        assert torch.equal(model(**inputs)[0], plain)
    L = attached.shape[1]
    real = real_queries("decoder." if family.reads == "both" else "", inputs, L)
    agree(attached[real], eager[0][real])
    for recording in (beside, within):
        theirs = eager_weights(eager, list(recording))
        assert recording.keys() == theirs.keys()
        for name, seen in recording.items():
            real = real_queries(name, inputs, seen.weights.shape[2])
            itself = not name.endswith(("encoder_attn", "EncDecAttention"))
            compare(seen, theirs[name], real, padded_are_dead=itself)


DECODERS = [family for family in ALL if family.decoder and family.reads == "tokens"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_a_cache_filled_in_chunks(family: Family, cache: str, padded: bool) -> None:
    """A first chunk, a second of several tokens, single tokens beyond the sliding window."""
    model, inputs = family.build(), family.inputs("left" if padded else None)

    def chunks(model: Any, **options: Any) -> list[Any]:
        config = model.config
        held = (
            transformers.StaticCache(config=config, max_cache_len=17)
            if cache == "static"
            else transformers.DynamicCache(config=config)
        )
        outputs, start = [], 0
        for length in (5, 3, 1, 1, 1):
            stop = start + length
            mask = inputs["attention_mask"][:, :stop] if padded else None
            ids = inputs["input_ids"][:, start:stop]
            positions = torch.arange(start, stop).expand(3, -1)
            outputs.append(model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=held, **options))
            start = stop
        return outputs

    with torch.no_grad():
        eager = chunks(family.build("eager"), output_attentions=True)
        plain = chunks(model)
        with ch.record(model, SHOWN) as beside:
            recorded = chunks(model)
        ch.attach(model)
        attached = chunks(model)
        with ch.record(model, SHOWN) as within:
            under = chunks(model)
    for a, b, c, d in zip(plain, recorded, attached, under, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(c.logits, d.logits)
    start = 0
    for step, length in enumerate((5, 3, 1, 1, 1)):
        real = inputs["attention_mask"][:, start : start + length].bool()
        agree(attached[step].logits[real], eager[step].logits[real])
        start += length
        for recording in (beside, within):
            for layer, weights in enumerate(eager[step].attentions):
                seen = recording.calls(layer)[step]
                compare(seen, weights, real, padded_are_dead=True)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(
    ("name", "cache", "beams"),
    [("llama", "dynamic", 1), ("llama", "static", 1), ("llama", "dynamic", 3), ("mistral", "static", 1),
     ("gpt2", "dynamic", 1), ("qwen3", "static", 1), ("t5", "dynamic", 1), ("bart", "static", 1),
     ("whisper", "dynamic", 1), ("gemma2", "static", 1), ("gemma2", "dynamic", 1), ("gpt_oss", "dynamic", 1)],
)  # fmt: skip
def test_generation_is_recorded_step_by_step(name: str, cache: str, beams: int, attached: bool) -> None:
    family = BY_NAME[name]
    inputs = family.inputs("left" if family.reads == "tokens" else None)
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "num_beams": beams,
        "cache_implementation": cache,
        "return_dict_in_generate": True,
    }
    model = family.build()
    if attached:
        ch.attach(model)
    with torch.no_grad():
        eager = family.build("eager").generate(**inputs, **options, output_attentions=True)
        with ch.record(model, SHOWN) as recording:
            mine = model.generate(**inputs, **options)
    assert torch.equal(mine.sequences, eager.sequences)
    whole = [layer for layer in recording if "encoder." not in layer or "decoder." in layer]
    itself = [layer for layer in whole if not layer.endswith(("encoder_attn", "EncDecAttention"))]
    crossing = [layer for layer in whole if layer not in itself]
    steps = eager.attentions if family.reads == "tokens" else eager.decoder_attentions
    for layers, theirs in ((itself, steps), (crossing, getattr(eager, "cross_attentions", None) or ())):
        for at, layer in enumerate(layers):
            calls = recording.calls(layer)
            assert len(calls) == len(theirs) == 5
            for step, seen in enumerate(calls):
                weights = theirs[step][at]
                length = seen.weights.shape[2]
                real = torch.ones(len(weights), length, dtype=torch.bool)
                if step == 0 and family.reads == "tokens":
                    real = inputs["attention_mask"].bool().repeat_interleave(beams, 0)
                compare(seen, weights, real, padded_are_dead=layers is itself)
