"""Further peers, for information: other libraries' ways to the same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from benchmarks.race import Pairs, Race, Row, Rows, UnavailableError
from benchmarks.rows.forward import inputs
from benchmarks.rows.looking import STATISTICS, statistics_of


def rows() -> Rows:
    bert = "BERT, 4 layers, L=512, record"
    return [
        Row("record", bert, "its unrecorded run", unrecorded),
        Row("record", bert, "eager, output_attentions", eager),
        Row("flex", "causal, L=2048", "FlexAttention, compiled", partial(flex, 2048, None)),
        Row("flex", "window 512 & causal, L=8192", "FlexAttention, compiled", partial(flex, 8192, 512)),
        Row("x-transformers", "causal, L=2048", "x-transformers Attend, flash", partial(attend, 2048)),
        Row("x-transformers", "causal + statistics, L=2048", "Attend, keeps weights", partial(attend_seen, 2048)),
    ]


def berts() -> tuple[Any, Any, Tensor]:
    """The same random model twice, on torch's kernel and materialising, and its input."""
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        raise UnavailableError("needs transformers: pip install 'clearhead[bench]'") from None

    def model(implementation: str) -> Any:
        sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
        config = BertConfig(vocab_size=1009, initializer_range=0.1, attn_implementation=implementation, **sizes)
        return BertModel(config, add_pooling_layer=False).eval()

    fused, materialising = model("sdpa"), model("eager")
    materialising.load_state_dict(fused.state_dict())
    return fused, materialising, torch.randint(0, 1009, (1, 512))


def recorded(model: Any, ids: Tensor) -> tuple[Tensor, ch.Recording]:
    with torch.no_grad(), ch.record(model, ch.Observe(entropy=True, received=True)) as recording:
        out = model(ids).last_hidden_state
    return out, recording


def plain(model: Any, ids: Tensor, **options: bool) -> Any:
    with torch.no_grad():
        return model(ids, **options)


def unrecorded() -> Race:
    fused, _, ids = berts()

    def pairs(ours: tuple[Tensor, ch.Recording], theirs: Any) -> Pairs:
        return [(ours[0], theirs.last_hidden_state)]

    return Race(partial(recorded, fused, ids), partial(plain, fused, ids), pairs, tolerance=0.0)


def eager() -> Race:
    fused, materialising, ids = berts()

    def pairs(ours: tuple[Tensor, ch.Recording], theirs: Any) -> Pairs:
        out, recording = ours
        yield out, theirs.last_hidden_state
        for seen, weights in zip(recording.values(), theirs.attentions, strict=True):
            yield seen.entropy, torch.special.entr(weights).sum(-1)
            yield seen.received, weights.sum(-2)

    theirs = partial(plain, materialising, ids, output_attentions=True)
    return Race(partial(recorded, fused, ids), theirs, pairs, tolerance=1e-4)


def flex(L: int, width: int | None) -> Race:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if width is None else (i >= j) & (i - j < width)

    q, k, v = inputs(L)
    blocks = create_block_mask(visible, None, None, L, L, device="cpu")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    mask = ch.Causal() if width is None else ch.Causal() & ch.Window(left=width - 1)
    return Race(partial(ch.attention, q, k, v, mask), partial(compiled, q, k, v, block_mask=blocks))


def attender(**options: bool) -> Any:
    try:
        from x_transformers.attend import Attend
    except ImportError as error:
        raise UnavailableError(f"needs x-transformers: pip install 'clearhead[bench]' ({error})") from None
    return Attend(causal=True, **options).eval()


def attend(L: int) -> Race:
    q, k, v = inputs(L)
    module = attender(flash=True)
    return Race(partial(ch.attention, q, k, v, ch.Causal()), lambda: module(q, k, v)[0])


def attend_seen(L: int) -> Race:
    """The peer keeps the weights, and has yet to compute anything from them."""
    q, k, v = inputs(L)

    def pairs(ours: tuple[Tensor, ch.Seen], theirs: Any) -> Pairs:
        out, kept = theirs
        yield ours[0], out
        truth = statistics_of(kept.post_softmax_attn, kept.pre_softmax_attn)
        for name, value in zip(STATISTICS, truth, strict=True):
            yield ours[1][name], value

    observe = ch.Observe(**STATISTICS)
    return Race(partial(ch.attention, q, k, v, ch.Causal(), observe=observe), partial(attender(), q, k, v), pairs)
