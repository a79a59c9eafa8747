"""`attach` and `detach`: clearhead's kernels in a transformers model, and the model as it was."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import functional
from clearhead.compat.transformers_masks import MaskTensor
from families import ALL, BY_NAME, Family, transformers
from test_record_families import agree


def implementations(model: nn.Module) -> list[str]:
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [str(config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_no_table_of_the_mask_is_made(family: Family, side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ours is what runs, once for each layer."""

    def numbers(self: MaskTensor) -> Tensor:
        raise AssertionError("a mask was made as a tensor")

    model, calls = ch.attach(family.build()), []
    choose = functional.choose
    monkeypatch.setattr(MaskTensor, "numbers", numbers)
    monkeypatch.setattr(functional, "choose", lambda *args: calls.append(args) or choose(*args))
    with torch.no_grad():
        model(**family.inputs(side))
        with ch.record(model, ch.Observe(entropy=True)) as recording:
            model(**family.inputs(side))
    assert len(calls) == 2 * len(recording) > 2
    for seen in recording.values():
        assert "Allowed" not in repr(seen.mask)


def test_attach_and_detach_leave_each_configuration_as_it_was() -> None:
    family = BY_NAME["bart"]
    model = nn.ModuleDict({"bart": family.build(), "llama": BY_NAME["llama"].build("eager")})
    layer = model["llama"].model.layers[1].self_attn
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation_internal = "sdpa"
    before = implementations(model)
    assert {"sdpa", "eager"} == set(before)
    assert ch.attach(model) is model
    assert set(implementations(model)) == {"clearhead"}
    ch.attach(model)
    other = copy.deepcopy(model)
    assert ch.detach(model) is model
    assert implementations(model) == before
    assert set(implementations(other)) == {"clearhead"}
    assert implementations(ch.detach(other)) == before
    assert implementations(ch.detach(model)) == before


def test_an_attached_model_is_loaded_attached_in_another_process(tmp_path: Path) -> None:
    model = ch.attach(BY_NAME["llama"].build())
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.save((model, ids, model(input_ids=ids).logits), tmp_path / "model.pt")
    script = """
        import sys, torch
        model, ids, logits = torch.load(sys.argv[1], weights_only=False)
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, logits)
        import clearhead as ch
        print(model.config._attn_implementation, ch.detach(model).config._attn_implementation)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == ["clearhead", "sdpa"]


def test_what_cannot_be_attached_is_named() -> None:
    bloom = transformers.BloomModel(transformers.BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"BloomModel can't be attached.*h\.0\.self_attention \(BloomAttention\)"):
        ch.attach(bloom)
    with pytest.raises(ValueError, match="Linear can't be attached"):
        ch.attach(nn.Linear(2, 2))
    both = nn.ModuleDict({"bloom": bloom, "llama": BY_NAME["llama"].build()})
    with pytest.warns(UserWarning, match=r"not attached.*bloom\.h\.0\.self_attention"):
        ch.attach(both)
    model = BY_NAME["llama"].build()

    class Branching(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            if self.config._attn_implementation in ("eager", "sdpa"):
                return super().forward(*args, **options)
            raise NotImplementedError

    model.model.layers[0].self_attn.__class__ = Branching
    with pytest.raises(ValueError, match=r"can't be attached: model\.layers\.0\.self_attn \(Branching\)"):
        ch.attach(model)
    assert set(implementations(model)) == {"sdpa"}


def test_a_part_of_a_model_cannot_be_attached() -> None:
    model = BY_NAME["llama"].build()
    with pytest.raises(ValueError, match="is a part of a transformers model"):
        ch.attach(model.model.layers[1])
    assert model.config._attn_implementation == "sdpa"


def test_attach_while_recording_is_refused() -> None:
    model = BY_NAME["llama"].build()
    with ch.record(model, ch.Observe(entropy=True)):
        with pytest.raises(ValueError, match="is being recorded"):
            ch.attach(model)
        with pytest.raises(ValueError, match="is being recorded"):
            ch.detach(model)
    assert set(implementations(model)) == {"sdpa"}


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [None, "kept", "reentrant"])
def test_training_has_the_gradients_of_eager_attention(name: str, checkpointing: str | None) -> None:
    family = BY_NAME[name]
    inputs = family.inputs("right")

    def gradients(model: Any, recorded: bool = False) -> dict[str, Tensor]:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
        model.train()
        if checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
        out = model(**inputs, use_cache=False)[0]
        real = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
        out[real].square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    eager, model = gradients(family.build("eager")), ch.attach(family.build())
    mine = gradients(model)
    assert mine.keys() == eager.keys()
    for parameter, gradient in eager.items():
        # Of GPT-OSS both lie up to 1e-5 from the gradients in float64, eager attention further than the kernels.
        agree(mine[parameter], gradient, within=3e-5 if name == "gpt_oss" else 1e-5)
    model.zero_grad()
    with ch.record(model, ch.Observe(entropy=True, weights=True)) as recording:
        again = gradients(model)
    assert all(torch.equal(again[parameter], gradient) for parameter, gradient in mine.items())
    assert {len(recording.calls(layer)) for layer in recording} == {1}
    assert not any(seen.weights.requires_grad for seen in recording.values())


def test_dropout_reaches_the_kernels_in_training_only() -> None:
    sizes = {**BY_NAME["bert"].sizes, "attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    model = ch.attach(Family("bert", "BertModel", "BertConfig", sizes).build())
    inputs = BY_NAME["bert"].inputs(None)
    with torch.no_grad():
        still = model(**inputs)[0]
        assert torch.equal(model(**inputs)[0], still)
        model.train()
        torch.manual_seed(3)
        dropped = model(**inputs)[0]
        torch.manual_seed(3)
        with ch.record(model, ch.Observe(weights=True)) as recording:
            assert torch.equal(model(**inputs)[0], dropped)
    assert not torch.allclose(dropped, still, atol=1e-2)
    torch.testing.assert_close(recording[0].weights.sum(-1), torch.ones(3, 6, 11))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_output_attentions_gives_the_weights(name: str) -> None:
    family = BY_NAME[name]
    inputs = family.inputs(None)
    with torch.no_grad():
        eager = family.build("eager")(**inputs, output_attentions=True)
        mine = ch.attach(family.build())(**inputs, output_attentions=True)
    kinds = [kind for kind in eager if kind.endswith("attentions")]
    assert kinds
    for kind in kinds:
        for own, theirs in zip(mine[kind], eager[kind], strict=True):
            agree(own, theirs)


def test_packed_sequences_do_not_see_each_other() -> None:
    family = BY_NAME["mistral"]
    ids = family.inputs(None)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]])
    model = ch.attach(family.build())
    with torch.no_grad():
        with ch.record(model, ch.Observe(weights=True)) as recording:
            mine = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        eager = family.build("eager")(input_ids=ids, position_ids=positions, use_cache=False, output_attentions=True)
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split([6, 3, 2], dim=1)]
    agree(mine, eager.logits)
    agree(mine, torch.cat(alone, dim=1))
    assert "Segments" in repr(recording[0].mask)
    for seen, weights in zip(recording.values(), eager.attentions, strict=True):
        agree(seen.weights, weights)


@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_mask_of_the_users_own(name: str, kind: str) -> None:
    family = BY_NAME[name]
    ids = family.inputs(None)["input_ids"]
    generator = torch.Generator().manual_seed(5)
    flags = (torch.rand(3, 1, 11, 11, generator=generator) > 0.4) | torch.eye(11, dtype=torch.bool)
    floats = torch.zeros(3, 1, 11, 11).masked_fill(~flags, torch.finfo(torch.float32).min)
    if kind == "bias":
        floats = torch.randn(3, 1, 11, 11, generator=generator).masked_fill(~flags, torch.finfo(torch.float32).min)
    given = flags if kind == "bool" else floats
    model = family.build()
    with torch.no_grad():
        eager = family.build("eager")(input_ids=ids, attention_mask=floats, output_attentions=True)
        plain = model(input_ids=ids, attention_mask=given)[0]
        with ch.record(model, ch.Observe(weights=True)) as beside:
            assert torch.equal(model(input_ids=ids, attention_mask=given)[0], plain)
        ch.attach(model)
        attached = model(input_ids=ids, attention_mask=given)[0]
        with ch.record(model, ch.Observe(weights=True)) as within:
            assert torch.equal(model(input_ids=ids, attention_mask=given)[0], attached)
    agree(attached, eager[0])
    for recording in (beside, within):
        for seen, weights in zip(recording.values(), eager.attentions, strict=True):
            agree(seen.weights, weights)


def test_a_rule_of_the_models_own_is_taken_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that opens its prefix to all queries, by a function that clearhead doesn't know."""
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask
    opened = lambda **options: make(**options, or_mask_function=lambda b, h, q, k: k < 3)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "create_causal_mask", opened)
    family = BY_NAME["llama"]
    inputs = family.inputs("right")
    model = ch.attach(family.build())
    with torch.no_grad():
        eager = family.build("eager")(**inputs, output_attentions=True)
        with ch.record(model, ch.Observe(weights=True)) as recording:
            mine = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert eager.attentions[0][0, 0, 0, 2] > 0
    agree(mine[real], eager.logits[real])
    for seen, weights in zip(recording.values(), eager.attentions, strict=True):
        agree(seen.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_taken_as_torch_takes_it(dtype: torch.dtype) -> None:
    family = BY_NAME["llama"]
    inputs = family.inputs("left")
    with torch.no_grad(), torch.autocast("cpu", dtype):
        plain = family.build()(**inputs).logits
        model = ch.attach(family.build())
        attached = model(**inputs).logits
        with ch.record(model, ch.Observe(entropy=True)) as recording:
            assert torch.equal(model(**inputs).logits, attached)
    real = inputs["attention_mask"].bool()
    scale = float(plain.abs().max())
    torch.testing.assert_close(attached[real], plain[real], atol=0.05 * scale, rtol=0)
    assert recording[0].entropy.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports
def test_an_attached_model_compiles() -> None:
    family = BY_NAME["llama"]
    inputs = family.inputs(None)
    model = ch.attach(family.build())
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")
        agree(compiled(**inputs, use_cache=False).logits, expected)
