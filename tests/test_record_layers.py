"""`record` on transformers models: which layers, how often, and the model left as it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.compat import transformers as hf
from clearhead.compat.call import Call
from clearhead.multihead import Core
from families import BY_NAME, tokens, transformers
from test_record_families import agree

ENTROPY = ch.Observe(entropy=True)
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]


def run(model: Any, name: str = "llama", **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**BY_NAME[name].inputs(None), **options)[0]
    return out


@pytest.mark.parametrize(
    ("layers", "recorded"),
    [
        (None, LAYERS),
        (0, LAYERS[:1]),
        (-1, LAYERS[1:]),
        ([1, -2], LAYERS),
        (slice(1, None), LAYERS[1:]),
        (LAYERS[0], LAYERS[:1]),
        ("model.layers.1", LAYERS[1:]),
        (["model.layers.1", 0], LAYERS),
        ("model", LAYERS),
    ],
)
def test_layers_chooses_by_name_or_number(layers: Any, recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = BY_NAME["llama"].build(), []
    plain = run(model)
    original = hf.read_call
    monkeypatch.setattr(
        hf, "read_call", lambda module, *args, **options: read.append(module) or original(module, *args, **options)
    )
    with ch.record(model, ENTROPY, layers) as recording:
        assert torch.equal(run(model), plain)
    assert list(recording) == recorded
    assert len(read) == len(recorded)  # of the others nothing is even read


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (2, r"no attention layer 2: there are 2, 'model\.layers\.0\.self_attn'"),
        (-3, "no attention layer -3"),
        ("model.layers.1.self", r"no attention layer 'model\.layers\.1\.self', and none below it"),
        ([0, "lm_head"], "no attention layer 'lm_head'"),
        ([], "chooses none"),
        (slice(5, 7), "chooses none"),
    ],
)
def test_layers_that_are_not_there_are_refused_before_anything_runs(layers: Any, message: str) -> None:
    model = BY_NAME["llama"].build()
    before = [len(interface._global_mapping) for interface in hf.interfaces()]
    with pytest.raises(KeyError, match=message), ch.record(model, ENTROPY, layers):
        pytest.fail("ran")
    assert type(model.config._attn_implementation) is str
    assert [len(interface._global_mapping) for interface in hf.interfaces()] == before
    for wrong in (1.5, [True], [None]):
        with pytest.raises(TypeError), ch.record(model, ENTROPY, wrong):  # type: ignore[arg-type]
            pytest.fail("ran")


@pytest.mark.parametrize("layers", [1.5, nn.Linear(2, 2)], ids=["float", "module"])
def test_layers_that_are_neither_names_nor_numbers_are_a_type_error(layers: Any) -> None:
    mha = ch.MultiHeadAttention(14, 2)
    with pytest.raises(TypeError, match="layers takes names, numbers"), ch.record(mha, ENTROPY, layers):
        pytest.fail("ran")


def test_layers_of_clearhead_and_of_transformers_are_numbered_together() -> None:
    model = nn.ModuleDict({"one": ch.MultiHeadAttention(4, 2), "llama": BY_NAME["llama"].build()})
    with torch.no_grad(), ch.record(model, ENTROPY, [0, 2]) as recording:
        model["one"](torch.randn(1, 3, 4))
        run(model["llama"])
    assert list(recording) == ["one", "llama.model.layers.1.self_attn"]


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_checkpointed_layers_are_recorded_once(reentrant: bool, attached: bool, grad: bool) -> None:
    if reentrant and grad:
        pytest.skip("a reentrant checkpoint has no graph in its forward pass")
    inputs = BY_NAME["llama"].inputs("right")

    def gradients(record: bool) -> tuple[list[Tensor], Any]:
        model = BY_NAME["llama"].build()
        model = ch.attach(model) if attached else model
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        recording = None
        if record:
            with ch.record(model, ch.Observe(entropy=True, weights=True, grad=grad)) as recording:
                model(**inputs, use_cache=False)[0].square().mean().backward()
        else:
            model(**inputs, use_cache=False)[0].square().mean().backward()
        return [p.grad for p in model.parameters()], recording

    plain, _ = gradients(record=False)
    recorded, recording = gradients(record=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert [len(recording.calls(layer)) for layer in LAYERS] == [1, 1]
    assert all(seen.weights.requires_grad == grad for seen in recording.values())


def test_recording_one_layer_twice_is_refused_and_other_layers_are_not() -> None:
    model = BY_NAME["llama"].build()
    plain = run(model)
    with ch.record(model, ENTROPY, 0) as first:
        with pytest.raises(ValueError, match="is being recorded already"), ch.record(model, ENTROPY):
            pytest.fail("ran")
        with ch.record(model, ENTROPY, 1) as second:
            assert torch.equal(run(model), plain)
        run(model)
    assert (len(first.calls(LAYERS[0])), list(second), len(second.calls(LAYERS[1]))) == (2, LAYERS[1:], 1)
    assert type(model.config._attn_implementation) is str


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("recording_first", [False, True])
def test_a_handler_that_changes_a_call_is_recorded_with_its_change(recording_first: bool, attached: bool) -> None:
    """The seam for interventions: here BERT is made causal, and compared with BERT under a causal mask."""
    family = BY_NAME["bert"]
    model = family.build()
    model = ch.attach(model) if attached else model
    ids = family.inputs(None)["input_ids"]
    low = torch.finfo(torch.float32).min
    floats = torch.full((3, 1, 11, 11), low).triu(1)
    layers = {module for module in model.modules() if type(module).__name__ == "BertSelfAttention"}

    def causal(call: Call, run: hf.Run) -> Tensor:
        return run(call._replace(mask=ch.Causal()))[0]

    contexts = [ch.record(model, ch.Observe(weights=True)), hf.handling(model, hf.Handler(causal, layers))]
    one, two = contexts if recording_first else contexts[::-1]
    with torch.no_grad():
        plain = model(input_ids=ids)[0]
        eager = family.build("eager")(input_ids=ids, attention_mask=floats, output_attentions=True)
        with one as first, two as second:
            mine = model(input_ids=ids)[0]
        assert torch.equal(model(input_ids=ids)[0], plain)
    agree(mine, eager[0])
    recording = first if recording_first else second
    for seen, weights in zip(recording.values(), eager.attentions, strict=True):
        agree(seen.weights, weights)


def test_two_models_are_recorded_in_two_threads() -> None:
    one = BY_NAME["llama"].build()
    two = copy.deepcopy(one)
    for module in two.modules():  # of one configuration, even
        if hasattr(module, "config"):
            module.config = one.config
    start, found = threading.Barrier(2), {}

    def work(name: str, model: Any, length: int) -> None:
        start.wait()
        for _ in range(5):
            with torch.no_grad(), ch.record(model, ENTROPY) as recording:
                model(input_ids=torch.arange(length)[None])
            found[name, length] = [seen.entropy.shape[-1] for layer in recording for seen in recording.calls(layer)]

    threads = [threading.Thread(target=work, args=arguments) for arguments in (("one", one, 5), ("two", two, 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {("one", 5): [5, 5], ("two", 7): [7, 7]}
    assert type(one.config._attn_implementation) is str


@pytest.mark.parametrize(
    ("kind", "sizes", "layer"),
    [
        ("Bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 2}, r"h\.0\.self_attention \(BloomAttention\)"),
        ("Falcon", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, r"h\.0\.self_attention"),
        ("Mpt", {"d_model": 8, "n_heads": 2, "n_layers": 1}, r"blocks\.0\.attn \(MptAttention\)"),
        (
            "DebertaV2",
            {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
            r"encoder\.layer\.0\.attention\.self \(DisentangledSelfAttention\)",
        ),
        (
            "Swinv2",
            {"image_size": 8, "patch_size": 2, "embed_dim": 4, "depths": [1], "num_heads": [2], "window_size": 2},
            r"encoder\.layers\.0\.blocks\.0\.attention\.self \(Swinv2SelfAttention\)",
        ),
    ],
)
def test_layers_past_the_registry_are_named(kind: str, sizes: dict[str, Any], layer: str) -> None:
    sizes = sizes if kind == "Swinv2" else {"vocab_size": 11, **sizes}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    with pytest.raises(ValueError, match=layer), ch.record(model, ENTROPY):
        pytest.fail("ran")


def test_a_model_of_both_kinds_is_recorded_with_a_warning() -> None:
    encoder = transformers.Swinv2Model(
        transformers.Swinv2Config(
            image_size=8, patch_size=2, embed_dim=4, depths=[1], num_heads=[2], window_size=2, hidden_dropout_prob=0.0
        )
    )
    sizes = {**BY_NAME["bert"].sizes, "is_decoder": True, "add_cross_attention": True}
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**sizes))
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "decoder_input_ids": torch.ones(2, 5, dtype=torch.long)}
    with torch.no_grad():
        plain = model(**inputs).logits
        with (
            pytest.warns(UserWarning, match=r"not recorded.*encoder\.encoder\.layers\.0\.blocks\.0\.attention\.self"),
            ch.record(model, ENTROPY) as recording,
        ):
            assert torch.equal(model(**inputs).logits, plain)
        with ch.record(model, ENTROPY, "decoder"):  # what was chosen can be recorded: nothing to warn of
            model(**inputs)
    assert [name.split(".")[-2] for name in recording] == ["attention", "crossattention"] * 2


def test_a_layer_that_takes_another_way_at_times_is_named() -> None:
    sizes = {**BY_NAME["gpt2"].sizes, "reorder_and_upcast_attn": True}
    config = transformers.GPT2Config(**sizes, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).eval()
    plain = run(model, "gpt2")
    with pytest.warns(UserWarning, match=r"transformer\.h\.0\.attn"), ch.record(model, ENTROPY) as recording:
        assert torch.equal(run(model, "gpt2"), plain)
    assert len(recording) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports
def test_compiled_modules_are_refused() -> None:
    model = BY_NAME["llama"].build()
    with pytest.raises(ValueError, match="compiled"), ch.record(torch.compile(model), ENTROPY):
        pytest.fail("ran")
    model.compile()
    with pytest.raises(ValueError, match="compiled"), ch.record(model, ENTROPY):
        pytest.fail("ran")


def test_copies_made_while_recording_are_plain() -> None:
    model = ch.attach(BY_NAME["llama"].build())
    with ch.record(model, ENTROPY) as recording:
        other = copy.deepcopy(model)
    agree(run(other), run(model))
    assert len(recording) == 0
    assert type(other.config._attn_implementation) is type(model.config._attn_implementation)
    assert str(ch.detach(other).config._attn_implementation) == "sdpa"


def test_keys_of_a_static_cache_stay_as_they_were_seen() -> None:
    model = BY_NAME["mistral"].build()
    cache = transformers.StaticCache(config=model.config, max_cache_len=7)
    with torch.no_grad(), ch.record(model, ch.Observe(key=True), 0) as recording:
        for i in range(6):
            model(input_ids=torch.full((1, 1), i + 2), cache=cache)
            if i == 0:
                first = recording[0].key.clone()
    assert torch.equal(recording.calls(0)[0].key, first)


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = BY_NAME["bart"].build()
    before = [len(interface._global_mapping) for interface in hf.interfaces()]
    with pytest.raises(IndexError, match="out of range"), ch.record(model, ch.Observe(weights=ch.At(queries=9))):
        run(model, "bart")  # At(queries=9) is in the encoder's 11, and not in the decoder's 7
    assert {type(module.config._attn_implementation) for module in model.modules() if hasattr(module, "config")} == {
        str
    }
    assert [len(interface._global_mapping) for interface in hf.interfaces()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_branches_on_the_implementation_keeps_its_way(implementation: str) -> None:
    model = BY_NAME["llama"].build(implementation)
    layer = model.model.layers[0].self_attn

    class Branching(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            if self.config._attn_implementation not in ("eager", "sdpa"):
                raise NotImplementedError
            return super().forward(*args, **options)

    layer.__class__ = Branching
    plain = run(model)
    with ch.record(model, ENTROPY) as recording:
        assert torch.equal(run(model), plain)
    assert list(recording) == LAYERS


def test_a_layer_that_runs_several_times_is_recorded_each_time() -> None:
    """ALBERT's one layer is all of its layers."""
    sizes = {**BY_NAME["bert"].sizes, "embedding_size": 7, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes, attn_implementation="eager")).eval()
    inputs = BY_NAME["bert"].inputs("left")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True).attentions
        with ch.record(ch.attach(model), ch.Observe(weights=True)) as recording:
            model(**inputs)
    (name,) = recording
    assert len(recording.calls(name)) == len(eager) == 3
    for seen, weights in zip(recording.calls(name), eager, strict=True):
        agree(seen.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention_of_equal_lengths_is_not_taken_for_self_attention(name: str) -> None:
    """Its keys are padded, not its queries: all of these count in what the keys receive."""
    family = BY_NAME[name]
    generator = torch.Generator().manual_seed(2)
    encoder, decoder = tokens(7, "right", generator), tokens(7, None, generator)
    inputs = {**encoder, "decoder_input_ids": decoder["input_ids"]}
    with torch.no_grad():
        eager = family.build("eager")(**inputs, output_attentions=True).cross_attentions
        for model in (family.build(), ch.attach(family.build())):
            with ch.record(model, ch.Observe(received=True)) as recording:
                model(**inputs)
            crossing = [layer for layer in recording if layer.endswith(("encoder_attn", "EncDecAttention"))]
            for layer, weights in zip(crossing, eager, strict=True):
                agree(recording[layer].received, weights.sum(2))


def test_the_bytes_of_all_layers_are_told_before_the_first_is_computed() -> None:
    model = BY_NAME["llama"].build()
    one = 3 * 6 * 11 * 11 * 4
    with (
        pytest.raises(ch.TooLargeError, match=rf"takes {2 * one} bytes .* for 2 layers.*L=11"),
        ch.record(model, ch.Observe(weights=True, allow_bytes=2 * one - 1)) as recording,
    ):
        run(model)
    assert len(recording) == 0
    with ch.record(model, ch.Observe(weights=True, allow_bytes=one), 1):  # of one layer there is room
        run(model)


class Louder(Core):
    """A core with a forward of its own."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options) * 2


@torch.no_grad()
@pytest.mark.parametrize("instance", [False, True])
def test_a_core_with_a_forward_of_its_own_keeps_it(instance: bool) -> None:
    mha, x = ch.MultiHeadAttention(14, 2).eval(), torch.randn(2, 5, 14)
    before = mha(x, mask=ch.Causal())
    if instance:
        own = mha.core.forward
        mha.core.forward = lambda *args, **options: own(*args, **options) * 2
    else:
        mha.core = Louder()
    plain = mha(x, mask=ch.Causal())
    assert not torch.equal(plain, before)
    with ch.record(mha, ch.Observe(weights=True, context=True)) as recording:
        assert torch.equal(mha(x, mask=ch.Causal()), plain)
    assert torch.equal(mha(x, mask=ch.Causal()), plain)
    agree(recording[0].context, 2 * recording[0].weights @ mha.v_proj(x).unflatten(-1, (2, 7)).transpose(1, 2))
    silent = {0: [ch.ScaleHeads([0.0, 1.0]), ch.Knockout(ch.Window(left=0, right=0))]}
    with ch.intervene(mha, silent):
        context = mha.out_proj.bias + 0 * plain
        changed = mha(x, mask=ch.Causal())
    v = mha.v_proj(x)[..., 7:]
    scores = mha.q_proj(x)[..., 7:] @ mha.k_proj(x)[..., 7:].mT * 7**-0.5
    hidden = torch.ones(5, 5).triu().bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    agree(changed, context + 2 * weights @ v @ mha.out_proj.weight[:, 7:].T)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "clearhead"])
@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.self_attn"])
def test_a_part_of_a_model_is_recorded_by_itself(part: str, implementation: str) -> None:
    model = BY_NAME["llama"].build("eager" if implementation == "eager" else None)
    model = ch.attach(model) if implementation == "clearhead" else model
    inputs = BY_NAME["llama"].inputs("right")
    everything = ch.Observe(weights=True, received=True)
    with torch.no_grad():
        plain = model(**inputs).logits
        with ch.record(model, everything) as whole:
            model(**inputs)
        with ch.record(model.get_submodule(part), everything) as recording:
            assert torch.equal(model(**inputs).logits, plain)
    assert list(recording) == ["self_attn" if part.endswith("1") else ""]
    assert torch.equal(recording[0].weights, whole[1].weights)
    assert torch.equal(recording[0].received, whole[1].received)


def test_a_model_that_was_given_another_implementation_meanwhile_is_named() -> None:
    model = BY_NAME["llama"].build()
    told = pytest.warns(UserWarning, match=r"not recorded.*another implementation.*model\.layers\.0\.self_attn")
    with told, ch.record(model, ENTROPY):
        model.set_attn_implementation("eager")
        run(model)
    told = pytest.warns(UserWarning, match=r"not changed.*another implementation.*: model\.layers\.1\.self_attn\.$")
    with told, ch.intervene(model, {1: ch.ScaleHeads({0: 0.0})}):
        model.set_attn_implementation("sdpa")
        run(model)


def test_a_head_that_pools_by_torch_s_attention_is_recorded_and_not_named(recwarn: pytest.WarningsRecorder) -> None:
    sizes = {"hidden_size": 12, "intermediate_size": 17, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=6, patch_size=3)
    model = transformers.SiglipVisionModel(config).eval()
    with torch.no_grad(), ch.record(model, ENTROPY) as recording:
        model(pixel_values=torch.randn(2, 3, 6, 6))
    assert [name.rsplit(".", 1)[-1] for name in recording] == ["self_attn", "attention"]
    assert not [warning for warning in recwarn if "not recorded" in str(warning.message)]
