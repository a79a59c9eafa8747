"""`intervene`: against a model whose weights or masks are changed by hand, and against plain formulae in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from families import BY_NAME

D, H, L = 12, 3, 7


def module(**options: Any) -> ch.MultiHeadAttention:
    torch.manual_seed(5)
    return ch.MultiHeadAttention(D, H, dtype=torch.float64, **options).eval()


def by_hand(
    mha: ch.MultiHeadAttention, x: Tensor, visible: Tensor, change: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The module's output, with each weight map and its values given to `change`, which returns the context."""
    q, k, v = (
        projection(x).unflatten(-1, (-1, mha.head_dim)).transpose(1, 2)
        for projection in (mha.q_proj, mha.k_proj, mha.v_proj)
    )
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = (q @ k.transpose(-1, -2) * mha.head_dim**-0.5).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    output: Tensor = mha.out_proj(change(weights, v).transpose(1, 2).flatten(2))
    return output


@pytest.mark.parametrize("num_kv_heads", [3, 1])
def test_edges_are_cut_in_the_chosen_heads(num_kv_heads: int) -> None:
    mha, x = module(num_kv_heads=num_kv_heads), torch.randn(2, L, D, dtype=torch.float64)
    i, j = torch.arange(L)[:, None], torch.arange(L)
    cut = (i - j) == 2
    visible = (j <= i) & torch.ones(H, 1, 1, dtype=torch.bool)
    visible[[0, 2]] &= ~cut
    with ch.intervene(mha, {0: ch.Knockout(ch.Allowed(cut, axes="qk"), heads=[0, -1])}):
        out = mha(x, mask=ch.Causal())
    torch.testing.assert_close(out, by_hand(mha, x, visible, torch.matmul), rtol=0, atol=1e-12)


def test_a_query_whose_edges_are_all_cut_is_a_dead_row() -> None:
    mha, x = module(), torch.randn(2, L, D, dtype=torch.float64)
    with ch.intervene(mha, {0: ch.Knockout(ch.Window(left=0, right=0))}):  # causal: the first query has no other key
        out = mha(x, mask=ch.Causal())
    torch.testing.assert_close(out[:, 0], mha.out_proj.bias.expand(2, D))
    assert out.isfinite().all()


def test_heads_are_scaled_and_rows_patched_after_the_cut() -> None:
    mha, x = module(), torch.randn(2, L, D, dtype=torch.float64)
    rows = torch.rand(2, 1, 2, L, dtype=torch.float64)

    def change(weights: Tensor, value: Tensor) -> Tensor:
        context = weights @ value
        context[:, 1] *= -0.5
        context[:, 0, [3, 6]] = (rows @ value[:, :1])[:, 0]
        return context

    visible = torch.ones(L, L, dtype=torch.bool)
    visible[:, 4] = False
    what = [
        ch.Knockout(ch.Blocked([[True, True, True, True, False, True, True]], axes="bk")),
        ch.ScaleHeads({1: -0.5}),
        ch.Patch(rows, heads=0, queries=[3, -1]),
    ]
    with ch.intervene(nn.ModuleDict({"layer": mha}), {"layer": what}):
        out = mha(x)
    torch.testing.assert_close(out, by_hand(mha, x, visible, change), rtol=0, atol=1e-12)


def test_patched_rows_read_the_values_of_their_group() -> None:
    mha, x = ch.MultiHeadAttention(D, 4, num_kv_heads=2, dtype=torch.float64), torch.randn(1, L, D).double()
    one_hot = torch.zeros(1, 4, L, L, dtype=torch.float64)
    keys = [6, 0, 3, 2]
    one_hot[0, range(4), :, keys] = 1.0
    with ch.intervene(mha, {0: ch.Patch(one_hot)}):
        out = mha(x)
    value = mha.v_proj(x).unflatten(-1, (2, 3))
    context = torch.cat([value[:, key, head // 2] for head, key in enumerate(keys)], -1)
    torch.testing.assert_close(out, mha.out_proj(context)[:, None].expand(-1, L, -1))


def test_what_is_recorded_is_what_was_changed() -> None:
    mha, x = module(), torch.randn(1, L, D, dtype=torch.float64)
    cut = ch.Knockout(ch.Window(left=0, right=0))
    asked = ch.Observe(weights=True)
    with ch.record(mha, asked) as outside, ch.intervene(mha, {0: cut}):
        first = mha(x)
    with ch.intervene(mha, {0: cut}), ch.record(mha, asked) as inside:
        second = mha(x)
    assert torch.equal(first, second)
    for recording in (outside, inside):
        assert not recording[0].weights.diagonal(dim1=-2, dim2=-1).any()
        torch.testing.assert_close(recording[0].weights.sum(-1), torch.ones(1, H, L, dtype=torch.float64))


def test_the_model_is_as_before_afterwards_and_after_an_error() -> None:
    mha, x = module(), torch.randn(1, L, D, dtype=torch.float64)
    before = mha(x)
    with (
        pytest.raises(ch.MaskError),
        ch.intervene(mha, {0: ch.Knockout(ch.Allowed(torch.ones(3, 3) > 0, axes="qk"))}),
    ):
        mha(x)
    assert torch.equal(mha(x), before)
    assert "forward" not in vars(mha.core)


def test_no_table_of_all_pairs_is_made() -> None:
    """At 40,000 tokens one such table of bools is 1.6 GB."""
    mha = ch.MultiHeadAttention(8, 1)
    x = torch.randn(1, 40_000, 8)
    with torch.no_grad(), ch.intervene(mha, {0: [ch.Knockout(ch.Window(left=3, right=0)), ch.ScaleHeads({0: 2.0})]}):
        out = mha(x, mask=ch.Window(left=5, right=0))  # what is left: keys i - 5 and i - 4
    q, k, v = mha.q_proj(x)[0], mha.k_proj(x)[0], mha.v_proj(x)[0]
    i = 12_345
    row = (q[i] @ k[i - 5 : i - 3].T * 8**-0.5).softmax(-1) @ v[i - 5 : i - 3]
    torch.testing.assert_close(out[0, i], mha.out_proj(2 * row), rtol=0, atol=1e-5)


# -- transformers ----------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["own kernels", "attached"])
def attached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def built(name: str, *, attached: bool) -> Any:
    model = BY_NAME[name].build("eager")
    return ch.attach(model) if attached else model


@pytest.mark.parametrize(
    ("name", "layer", "output"),
    [
        ("bert", "encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense"),
        ("llama", "model.layers.1.self_attn", "model.layers.1.self_attn.o_proj"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention", "decoder.block.1.layer.1.EncDecAttention.o"),
        ("gemma2", "model.layers.0.self_attn", "model.layers.0.self_attn.o_proj"),
        ("gpt_oss", "model.layers.0.self_attn", "model.layers.0.self_attn.o_proj"),
    ],
)
def test_a_scaled_head_is_one_with_scaled_columns_behind_it(
    name: str, layer: str, output: str, attached: bool
) -> None:
    model, inputs = built(name, attached=attached), BY_NAME[name].inputs("right")
    with torch.no_grad():
        before = model(**inputs)[0]
        with ch.intervene(model, {layer: ch.ScaleHeads({1: 0.0, -1: 3.0})}):
            changed = model(**inputs)[0]
        again = model(**inputs)[0]
        with ch.record(model, ch.Observe(lse=True)) as recording:
            model(**inputs)
        H = recording[layer].sizes[1]
        columns = model.get_submodule(output).weight.data.unflatten(1, (H, -1))
        columns[:, 1] = 0.0
        columns[:, -1] *= 3.0
        expected = model(**inputs)[0]
    real = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    torch.testing.assert_close(changed[real], expected[real], rtol=1e-4, atol=1e-5)
    assert torch.equal(again, before)
    assert not torch.allclose(changed[real], before[real], atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3"])
def test_edges_cut_in_every_layer_are_a_mask_of_the_user_s(name: str, attached: bool) -> None:
    """Transformers takes a mask (B, 1, L, S) of flags or floats; then it is the whole mask, causality included."""
    family = BY_NAME[name]
    model, ids = built(name, attached=attached), family.inputs(None)["input_ids"]
    L = ids.shape[1]
    i, j = torch.arange(L)[:, None], torch.arange(L)
    cut = (i - j >= 1) & (i - j <= 2)
    eager = family.build("eager")
    lowest = torch.finfo(torch.float32).min
    with torch.no_grad():
        with ch.intervene(model, {"model": ch.Knockout(ch.Window(left=2, right=0) & ~ch.Window(left=0, right=0))}):
            changed = model(input_ids=ids).logits
        handles = []
        for module in eager.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):

                def without(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
                    mask = options["attention_mask"]
                    if mask is None:
                        mask = torch.zeros(1, 1, L, L).masked_fill(j > i, lowest)
                    return args, {**options, "attention_mask": mask.masked_fill(cut, lowest)}

                handles.append(module.register_forward_pre_hook(without, with_kwargs=True))
        expected = eager(input_ids=ids).logits
    assert handles
    torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-4)


def test_edges_are_cut_while_text_is_generated(attached: bool) -> None:
    """With a cache each step sees other lengths: the same edges are cut as in one pass over all."""
    model, ids = built("llama", attached=attached), BY_NAME["llama"].inputs(None)["input_ids"]
    what = {1: ch.Knockout(ch.Window(left=2, right=0) & ~ch.Window(left=0, right=0), heads=[0, 2])}
    with torch.no_grad(), ch.intervene(model, what):
        out = model.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
        whole = model(input_ids=out.sequences).logits
    steps = torch.stack(out.logits, dim=1)
    torch.testing.assert_close(steps, whole[:, ids.shape[1] - 1 : -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ({7: ch.ScaleHeads([1.0, 1.0, 1.0])}, KeyError, "no attention layer 7"),
        ({"other": ch.ScaleHeads([1.0, 1.0, 1.0])}, KeyError, "'other'"),
        ({0: "knockout"}, TypeError, "Knockout, ScaleHeads and Patch"),
        ([ch.ScaleHeads([1.0])], TypeError, "{layer: intervention}"),
    ],
)
def test_what_is_wrong_is_refused_at_once(what: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says), ch.intervene(module(), what):
        pass


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        (ch.ScaleHeads([1.0, 2.0]), ch.ShapeError, "2 factors, and the layer 3 heads"),
        (ch.ScaleHeads({3: 1.0}), IndexError, "there are 3 heads"),
        (ch.Knockout(ch.Causal(), heads=5), IndexError, "there are 3 heads"),
        (ch.Patch(torch.rand(1, 3, 1, L), queries=L), IndexError, "there are 7 queries"),
        (ch.Patch(torch.rand(1, 3, 2, L), queries=0), ch.ShapeError, r"\(1\|1, 3, 1, 7\)"),
    ],
)
def test_what_does_not_fit_is_an_error_of_the_call(what: Any, error: type[Exception], says: str) -> None:
    mha = module()
    with pytest.raises(error, match=says), ch.intervene(mha, {0: what}):
        mha(torch.randn(1, L, D, dtype=torch.float64))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ch.Knockout("causal"),  # type: ignore[arg-type]
        lambda: ch.ScaleHeads(2.0),  # type: ignore[arg-type]
        lambda: ch.ScaleHeads({0: "x"}),  # type: ignore[dict-item]
        lambda: ch.Patch([[1.0]]),  # type: ignore[arg-type]
        lambda: ch.Patch(torch.ones(3, 3)),
        lambda: ch.Patch(torch.ones(1, 1, 1, 3, dtype=torch.int64)),
    ],
)
def test_interventions_say_what_they_take(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="takes"):
        make()


def test_torch_s_own_attention_must_be_converted() -> None:
    model = nn.TransformerEncoderLayer(D, H, batch_first=True).eval()
    with pytest.raises(ValueError, match=r"clearhead\.convert"), ch.intervene(model, {0: ch.ScaleHeads({0: 0.0})}):
        pass
    ch.convert(model)
    x = torch.randn(1, L, D)
    with torch.no_grad(), ch.intervene(model, {0: ch.ScaleHeads({0: 0.0})}):
        changed = model(x)
    model.self_attn.out_proj.weight.data[:, : D // H] = 0.0
    with torch.no_grad():
        torch.testing.assert_close(changed, model(x))


@pytest.mark.parametrize(
    "what",
    [ch.ScaleHeads({0: 0.0, -3: 1.0}), ch.Patch(torch.ones(1, 2, 1, L), heads=[0, -3], queries=0)],
    ids=["ScaleHeads", "Patch"],
)
def test_nothing_is_changed_into_two_things_at_once(what: Any) -> None:
    mha, x = module(), torch.randn(2, L, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="twice"), ch.intervene(mha, {0: what}):
        mha(x)
