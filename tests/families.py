"""Tiny, randomly initialised models of many families, and what each needs to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

VOCABULARY = 101
LENGTHS = (11, 7, 2)  # of the sequences in a padded batch
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 53,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 10}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 30,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 13,
    "init_std": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Family:
    """How to build a model, and what it reads."""

    name: str
    kind: str  # the model's class in transformers
    config: str
    sizes: dict[str, Any]
    reads: str = "tokens"  # or "both" (encoder and decoder), "pixels", "sound"
    decoder: bool = True
    own: str = "sdpa"  # the implementation that transformers gives it

    def build(self, implementation: str | None = None) -> Any:
        """The model in eval, with the same weights whichever the implementation; None = its own."""
        implementation = implementation or self.own
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**copy.deepcopy(self.sizes))
        model = getattr(transformers, self.kind)._from_config(config, attn_implementation="eager").eval()
        for module in model.modules():  # learned sinks and relative biases begin at zero, or near it
            for name in ("sinks", "relative_attention_bias"):
                part = getattr(module, name, None)
                part = getattr(part, "weight", part)
                if isinstance(part, Tensor):
                    torch.nn.init.normal_(part)
        if implementation != "eager":
            model.set_attn_implementation(implementation)
        return model

    def inputs(self, side: str | None) -> dict[str, Tensor]:
        """A batch of three; padded on that side, or None: all of one length."""
        generator = torch.Generator().manual_seed(1)
        if self.reads == "pixels":
            return {"pixel_values": torch.randn(3, 3, 10, 15, generator=generator)}
        if self.reads == "sound":
            own = {"input_features": torch.randn(3, 5, 2 * 13, generator=generator)}
            return own | {"decoder_input_ids": tokens(7, None, generator)["input_ids"]}
        own = tokens(11, side, generator)
        if self.reads == "both":
            decoder = tokens(7, side, generator)
            own |= {"decoder_input_ids": decoder["input_ids"], "decoder_attention_mask": decoder["attention_mask"]}
        return own


def tokens(longest: int, side: str | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids and their mask: of lengths that are the longest's, and less."""
    ids = torch.randint(2, VOCABULARY, (3, longest), generator=generator)
    real = torch.ones_like(ids)
    for row, length in enumerate((longest, longest - 4, 2)):
        if side is not None:
            real[row, length:] = 0
    real = real.flip(1) if side == "left" else real
    return {"input_ids": ids * real, "attention_mask": real}


ALL = [
    Family("bert", "BertModel", "BertConfig", DECODER, decoder=False),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", {**DECODER, "scale_attn_by_inverse_layer_idx": True}),
    Family("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED),
    Family("mistral", "MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 4, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 7},
        own="eager",
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "sliding_window": 4, "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 20},
        own="eager",
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 30,
            "d_kv": 7,
            "d_ff": 17,
            "num_layers": 2,
            "num_heads": 3,
            "relative_attention_num_buckets": 8,
            "initializer_factor": 0.7,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 1,
        },
        reads="both",
    ),
    Family(
        "bart", "BartForConditionalGeneration", "BartConfig", {**ENCODER_DECODER, "forced_eos_token_id": None}, "both"
    ),
    Family(
        "vit",
        "ViTModel",
        "ViTConfig",
        {
            "hidden_size": 30,
            "intermediate_size": 17,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": (10, 15),
            "patch_size": 5,
            "initializer_range": 0.3,
        },
        reads="pixels",
        decoder=False,
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**ENCODER_DECODER, "num_mel_bins": 5, "max_source_positions": 13, "max_target_positions": 53},
        reads="sound",
    ),
]
BY_NAME = {family.name: family for family in ALL}


def eager_weights(outputs: Any, names: list[str]) -> dict[str, Tensor]:
    """The weights of ``output_attentions=True`` by the recorded layers' names."""
    kinds: dict[str, Callable[[str], bool]] = {
        "attentions": lambda name: True,
        "encoder_attentions": lambda name: "encoder." in name and "decoder." not in name,
        "decoder_attentions": lambda name: "decoder." in name and not _crosses(name),
        "cross_attentions": lambda name: "decoder." in name and _crosses(name),
    }
    found: dict[str, Tensor] = {}
    for kind, belongs in kinds.items():
        weights = getattr(outputs, kind, None)
        if weights:
            found |= zip([name for name in names if belongs(name)], weights, strict=True)
    return found


def _crosses(name: str) -> bool:
    return name.endswith(("encoder_attn", "EncDecAttention"))
