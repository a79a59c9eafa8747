"""`record` on models whose parts are easy to take for something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch


class TestTransformers:
    """What `record` does on models whose parts are easy to take for something else."""

    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    sizes = {  # noqa: RUF012
        "vocab_size": 31,
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 5,
        "max_position_embeddings": 16,
    }

    def bert(self, implementation: str = "sdpa", config: Any = None) -> Any:
        torch.manual_seed(0)
        config = config or self.transformers.BertConfig(**self.sizes, attn_implementation=implementation)
        return self.transformers.BertModel(config).eval()

    def test_a_bool_mask_of_the_users_own_means_what_the_model_makes_of_it(self) -> None:
        mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.4
        ids = torch.arange(6)[None]
        eager = self.bert("eager")
        with torch.no_grad(), ch.record(eager, ch.Observe(weights=True)) as recording:
            theirs = eager(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[0]
        torch.testing.assert_close(recording[0].weights, theirs, atol=1e-6, rtol=0)

    def test_a_step_with_a_longer_cache_sees_what_the_model_sees(self) -> None:
        config = self.transformers.LlamaConfig(**self.sizes, num_key_value_heads=1, pad_token_id=0)
        torch.manual_seed(0)
        model = self.transformers.LlamaForCausalLM(config).eval()
        ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
        options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 3, "do_sample": False}
        for cache in ("dynamic", "static"):
            with torch.no_grad(), ch.record(model, ch.Observe(weights=True, value=True, context=True)) as recording:
                model.generate(ids, cache_implementation=cache, **options)
            for seen in recording.calls(0):
                context = seen.weights @ seen.value.repeat_interleave(3, dim=1)
                alive = seen.weights.sum(-1) > 0
                assert alive[0].all()
                torch.testing.assert_close(context[alive], seen.context[alive], atol=1e-5, rtol=0)

    def test_another_model_with_the_same_config_is_not_heard(self) -> None:
        config = self.transformers.BertConfig(**self.sizes)
        one, other = self.bert(config=config), self.bert(config=config)
        ids = torch.arange(6)[None]
        with torch.no_grad(), ch.record(one, ch.Observe(entropy=True)) as recording:
            other(input_ids=ids)
            assert len(recording) == 0
            one(input_ids=ids)
        assert list(recording) == ["encoder.layer.0.attention.self"]

    def test_recording_twice_at_a_time_is_refused_in_words(self) -> None:
        model = self.bert()
        refused = pytest.raises(ValueError, match="is being recorded already")
        with ch.record(model, ch.Observe(entropy=True)), refused, ch.record(model, ch.Observe(entropy=True)):
            pass
        assert model.config._attn_implementation == "sdpa"

    def test_an_implementation_chosen_meanwhile_stays(self) -> None:
        model = self.bert()
        with ch.record(model, ch.Observe(entropy=True)):
            model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"

    def test_models_inside_a_plain_module_are_heard(self) -> None:
        model = nn.ModuleDict({"bert": self.bert(), "head": ch.MultiHeadAttention(12, 3)})
        with torch.no_grad(), ch.record(model, ch.Observe(entropy=True)) as recording:
            model["head"](model["bert"](input_ids=torch.arange(6)[None]).last_hidden_state)
        assert list(recording) == ["bert.encoder.layer.0.attention.self", "head"]

    def test_an_eager_layer_subclassed_elsewhere_is_found(self) -> None:
        model = self.bert("eager")
        layer = model.encoder.layer[0].attention
        kind = type("Own", (type(layer.self),), {"__module__": __name__})
        layer.self.__class__ = kind
        with torch.no_grad(), ch.record(model, ch.Observe(entropy=True)) as recording:
            model(input_ids=torch.arange(6)[None])
        assert recording[0].entropy.shape == (1, 3, 6)
