"""`record` on torch's own attention and transformer layers: against torch's weights, with its results untouched."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.multihead import Core

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

B, L, S, H, E = 3, 7, 5, 2, 11
D = H * E
ALL = ch.Observe(weights=True, lse=True, entropy=True, max_weight=True, distance=True, received=True, context=True)
FAST = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


@contextmanager
def counting(*names: str) -> Iterator[list[str]]:
    """How often torch's fused functions run, while they do what they always do."""
    calls: list[str] = []

    def counted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return own(*args, **options)

        return function

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch, name, counted(name, getattr(torch, name)))
        yield calls


def padding(lengths: tuple[int, ...], size: int) -> torch.Tensor:
    """Torch's way round: True = padding."""
    return torch.arange(size) >= torch.tensor(lengths)[:, None]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, NaN included."""
    if a is None or b is None:
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if a.is_nested:
        return b.is_nested and all(equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def torch_weights(mha: nn.MultiheadAttention, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """(B, H, L, S), by torch's plain path, without dropout."""
    training, enabled = mha.training, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            given = {"is_causal": False, **options, "need_weights": True, "average_attn_weights": False}
            weights = mha.eval()(*inputs, **given)[1]
    finally:
        mha.train(training)
        torch.backends.mha.set_fastpath_enabled(enabled)
    return weights if inputs[0].ndim == 3 else weights[None]


def check_seen(seen: ch.Seen, weights: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
    """Weights and statistics against torch's weights; `hidden` (B, L) are queries that must be dead rows."""
    alive = torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool)
    alive = alive if hidden is None else ~hidden
    expected = weights.double() * alive[:, None, :, None]
    tolerance = {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(seen.weights.double(), expected.nan_to_num(), **tolerance)
    assert not expected.transpose(1, 2)[alive].isnan().any()
    expected = expected.nan_to_num()
    torch.testing.assert_close(seen.entropy.double(), torch.special.entr(expected).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.max_weight.double(), expected.amax(-1), **tolerance)
    torch.testing.assert_close(seen.received.double(), expected.sum(2), atol=1e-5, rtol=0)
    assert (seen.lse == -math.inf).equal(~alive[:, None].expand(seen.lse.shape))


def module(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    mha = nn.MultiheadAttention(D, H, **options)
    for parameter in mha.parameters():  # biases too, so that one left out is seen
        nn.init.normal_(parameter, std=0.4)
    return mha


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L)},
    "causal, with the hint": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L), "is_causal": True},
    "flags": {"attn_mask": torch.eye(L, dtype=torch.bool).roll(1, 0)},
    "soft": {"attn_mask": torch.linspace(-2, 2, L * L).sin().view(L, L)},
    "heads": {"attn_mask": (torch.arange(B * H * L * L) % 5 == 1).view(B * H, L, L)},
    "soft heads": {"attn_mask": torch.linspace(-3, 9, B * H * L * L).cos().view(B * H, L, L)},
    "padding": {"key_padding_mask": padding((L, 4, 1), L)},
    "soft padding": {"key_padding_mask": torch.linspace(-1, 1, B * L).view(B, L)},
    "both": {"key_padding_mask": padding((2, L, 3), L), "attn_mask": torch.ones(L, L).triu(1).bool()},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_self_attention(name: str, training: bool, need_weights: bool) -> None:
    mha, masks = module(dropout=0.3, batch_first=True).train(training), MASKS[name]
    x = torch.randn(B, L, D)
    options = {**masks, "need_weights": need_weights}
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            torch.manual_seed(0)
            plain = mha(x, x, x, **options)
            torch.manual_seed(0)
            with ch.record(mha, ALL) as recording:
                assert equal(mha(x, x, x, **options), plain)
        hidden = masks.get("key_padding_mask")
        hidden = hidden if hidden is not None and hidden.dtype == torch.bool else None
        check_seen(recording[""], torch_weights(mha, x, x, x, **masks), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 13},
        {"kdim": 13, "vdim": 17},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "vdim": 17},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["batch first", "length first", "unbatched"])
def test_cross_attention(form: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    mha = module(batch_first=form == "batch first", dtype=dtype, **options)
    query, key, value = torch.randn(B, L, D), torch.randn(B, S, mha.kdim), torch.randn(B, S, mha.vdim)
    inputs = [tensor.to(dtype) for tensor in (query, key, value)]
    masks = {"key_padding_mask": padding((S, 2, 4), S), "attn_mask": torch.rand(L, S) > 1.5}
    masks["attn_mask"][2, 0] = True
    if form == "length first":
        inputs = [tensor.transpose(0, 1) for tensor in inputs]
    if form == "unbatched":
        inputs = [tensor[1] for tensor in inputs]
        masks["key_padding_mask"] = masks["key_padding_mask"][1]
    plain = mha(*inputs, **masks)
    with ch.record(mha, ALL) as recording:
        assert equal(mha(*inputs, **masks), plain)
    seen = recording[0]
    check_seen(seen, torch_weights(mha, *inputs, **masks))
    assert seen.weights.dtype == dtype
    added = mha.add_zero_attn + (mha.bias_k is not None)
    assert seen.weights.shape == (1 if form == "unbatched" else B, H, L, S + added)
    merged = seen.context.transpose(1, 2).flatten(2)
    output = plain[0] if form != "length first" else plain[0].transpose(0, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(mha.out_proj(merged).view(output.shape), output, atol=tolerance, rtol=0)


def test_added_keys_are_the_last_and_padded_queries_are_dead_beside_them() -> None:
    mha, x, hidden = module(add_bias_kv=True, add_zero_attn=True, batch_first=True), torch.randn(B, L, D), (L, 4, 0)
    with ch.record(mha, ch.Observe(weights=True, scores=True, lse=True)) as recording:
        mha(x, x, x, key_padding_mask=padding(hidden, L))
    seen, weights = recording[0], torch_weights(mha, x, x, x, key_padding_mask=padding(hidden, L))
    torch.testing.assert_close(seen.weights, weights * ~padding(hidden, L)[:, None, :, None], atol=1e-6, rtol=0)
    assert seen.scores[..., -1].count_nonzero() == 0
    assert seen.scores[..., -2].count_nonzero() == B * H * L
    assert ((seen.lse == -math.inf) == padding(hidden, L)[:, None]).all()


HINTED: dict[str, tuple[bool, dict[str, Any]]] = {
    "followed": (True, {"need_weights": False}),
    "not with weights": (False, {}),
    "not with padding": (False, {"need_weights": False, "key_padding_mask": torch.zeros(B, L, dtype=torch.bool)}),
    "not on the fast path": (False, {"need_weights": False}),
}


@pytest.mark.parametrize("name", HINTED)
def test_a_wrong_hint_is_recorded_as_torch_took_it(name: str) -> None:
    followed, options = HINTED[name]
    mha, x, fast = module(batch_first=True), torch.randn(B, L, D), name == "not on the fast path"
    mask = torch.zeros(L, L, dtype=torch.bool)
    mask[:, 3] = True
    with torch.set_grad_enabled(not fast), ch.record(mha.train(not fast), ALL) as recording:
        output, _ = mha(x, x, x, attn_mask=mask, is_causal=True, **options)
    merged = recording[0].context.transpose(1, 2).flatten(2)
    torch.testing.assert_close(mha.out_proj(merged), output, atol=1e-5, rtol=0)
    assert bool(recording[0].weights.triu(1).any()) is not followed


def test_added_keys_are_seen_beside_a_causal_mask() -> None:
    mha, x = module(add_bias_kv=True, batch_first=True), torch.randn(B, L, D)
    with ch.record(mha, ALL) as recording:
        mha(x, x, x, **MASKS["causal"])
    check_seen(recording[0], torch_weights(mha, x, x, x, **MASKS["causal"]))


def encoder(layers: int = 2, *, nested: bool = False, final: bool = False, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(5)
    options = {"batch_first": True, "dropout": 0.2, **options}
    layer = nn.TransformerEncoderLayer(D, H, 19, **options)
    norm = nn.LayerNorm(D) if final else None
    model = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=nested)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def by_hand(model: nn.TransformerEncoder, x: torch.Tensor, **masks: Any) -> list[torch.Tensor]:
    """Every layer's weights, by its formula on torch's plain path, in eval."""
    found = []
    for layer in model.layers:
        x_in = layer.norm1(x) if layer.norm_first else x
        found.append(torch_weights(layer.self_attn, x_in, x_in, x_in, **masks))
        attended = layer.self_attn(x_in, x_in, x_in, **masks)[0].nan_to_num()
        if layer.norm_first:
            x = x + attended
            x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
        else:
            x = layer.norm1(x + attended)
            x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return found


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("masks", "attention"),
    [
        ({}, {}),
        ({"src_key_padding_mask": padding((L, 4, 2), L)}, {"key_padding_mask": padding((L, 4, 2), L)}),
        ({"mask": MASKS["causal"]["attn_mask"]}, {"attn_mask": MASKS["causal"]["attn_mask"]}),
    ],
    ids=["none", "padding", "causal"],
)
def test_an_encoder_keeps_its_fast_path(
    masks: dict[str, torch.Tensor], attention: dict[str, torch.Tensor], norm_first: bool
) -> None:
    model, x = encoder(norm_first=norm_first).eval(), torch.randn(B, L, D)
    with torch.no_grad(), counting(*FAST) as calls:
        plain = model(x, **masks)
        assert calls == [FAST[0]] * 2
        with ch.record(model, ALL) as recording:
            assert equal(model(x, **masks), plain)
        assert calls == [FAST[0]] * 4
    assert list(recording) == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        expected = by_hand(model, x, **attention)
    for seen, weights in zip(recording.values(), expected, strict=True):
        check_seen(seen, weights, attention.get("key_padding_mask"))


def test_attention_alone_keeps_its_fast_path() -> None:
    mha, x = module(batch_first=True).eval(), torch.randn(B, L, D)
    with torch.no_grad(), counting(*FAST) as calls:
        for options in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            plain = mha(x, x, x, **options)
            with ch.record(mha, ALL) as recording:
                assert equal(mha(x, x, x, **options), plain)
            assert recording.calls(0) == [recording[0]]
            check_seen(recording[0], torch_weights(mha, x, x, x))
    assert calls == [FAST[1]] * 6


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_encoder_in_training(batch_first: bool, norm_first: bool) -> None:
    model = encoder(norm_first=norm_first, batch_first=batch_first, final=True)
    x = torch.randn(B, L, D) if batch_first else torch.randn(L, B, D)
    masks = {"src_key_padding_mask": padding((L, 3, 1), L), "mask": torch.ones(L, L).triu(1).bool()}

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(1)
        model.zero_grad()
        output = model(x, **masks)
        output.square().sum().backward()
        return output, [parameter.grad.clone() for parameter in model.parameters()]

    plain, gradients = run()
    with ch.record(model, ALL) as recording:
        recorded, found = run()
    assert equal(recorded, plain)
    assert all(equal(a, b) for a, b in zip(found, gradients, strict=True))
    first = model.layers[0]
    given = first.norm1(x) if norm_first else x
    weights = torch_weights(
        first.self_attn, given, given, given, attn_mask=masks["mask"], key_padding_mask=masks["src_key_padding_mask"]
    )
    check_seen(recording[0], weights, masks["src_key_padding_mask"])
    assert len(recording) == 2
    assert not recording[0].entropy.requires_grad


def test_twelve_layers_of_nested_tensors() -> None:
    model, x, hidden = encoder(12, nested=True).eval(), torch.randn(B, L, D), padding((5, 4, 1), L)
    with torch.no_grad(), counting(*FAST) as calls:
        plain = model(x, src_key_padding_mask=hidden)
        with ch.record(model, ALL) as recording:
            assert equal(model(x, src_key_padding_mask=hidden), plain)
        assert calls == [FAST[0]] * 24
        expected = by_hand(model, x, key_padding_mask=hidden)
    assert len(recording) == 12
    for seen, weights in zip(recording.values(), expected, strict=True):
        # As long as the longest sequence.
        torch.testing.assert_close(
            seen.weights, weights[:, :, :5, :5] * ~hidden[:, None, :5, None], atol=1e-5, rtol=0
        )
        assert "KeyPadding(lengths=[5, 4, 1])" in repr(seen.mask)


@pytest.mark.parametrize("norm_first", [False, True])
def test_nested_tensors_of_the_user(norm_first: bool) -> None:
    model, lengths = encoder(norm_first=norm_first).eval(), (4, L, 2)
    x = torch.randn(B, L, D)
    nested = torch.nested.nested_tensor([row[:n] for row, n in zip(x, lengths, strict=True)])
    mha = model.layers[0].self_attn
    with torch.no_grad():
        plain, alone = model(nested), mha(nested, nested, nested, need_weights=False)
        with ch.record(model, ALL) as recording:
            assert equal(model(nested), plain)
            assert equal(mha(nested, nested, nested, need_weights=False), alone)
        hidden = padding(lengths, L)
        for seen, weights in zip(
            (recording.calls(0)[0], recording[1]), by_hand(model, x, key_padding_mask=hidden), strict=True
        ):
            check_seen(seen, weights, hidden)
        check_seen(recording[0], torch_weights(mha, x, x, x, key_padding_mask=hidden), hidden)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_decoder_is_heard_twice_a_layer(training: bool, norm_first: bool) -> None:
    torch.manual_seed(7)
    layer = nn.TransformerDecoderLayer(D, H, 19, dropout=0.2, batch_first=True, norm_first=norm_first)
    model = nn.TransformerDecoder(layer, 2).train(training)
    target, memory = torch.randn(B, L, D), torch.randn(B, S, D)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(L),
        "tgt_key_padding_mask": torch.zeros(B, L).masked_fill(padding((L, 5, 3), L), -math.inf),
        "memory_key_padding_mask": padding((S, 1, 3), S),
    }
    torch.manual_seed(1)
    plain = model(target, memory, **masks)
    torch.manual_seed(1)
    with ch.record(model, ALL) as recording:
        assert equal(model(target, memory, **masks), plain)
    assert list(recording) == [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "multihead_attn")]
    first = model.layers[0].eval()
    with torch.no_grad():
        x = first.norm1(target) if norm_first else target
        options = {"attn_mask": masks["tgt_mask"], "key_padding_mask": masks["tgt_key_padding_mask"]}
        check_seen(recording[0], torch_weights(first.self_attn, x, x, x, **options), padding((L, 5, 3), L))
        if not training:  # else what comes next went through dropout
            x = target + first.self_attn(x, x, x, **options)[0]
            x = first.norm2(x) if norm_first else first.norm1(x)
            options = {"key_padding_mask": masks["memory_key_padding_mask"]}
            check_seen(recording[1], torch_weights(first.multihead_attn, x, memory, memory, **options))
    assert recording[3].weights.shape == (B, H, L, S)


@pytest.mark.parametrize("training", [False, True])
def test_the_whole_transformer(training: bool) -> None:
    torch.manual_seed(2)
    model = nn.Transformer(D, H, 2, 2, 19, batch_first=True).train(training)
    source, target, causal = torch.randn(B, S, D), torch.randn(B, L, D), model.generate_square_subsequent_mask(L)

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        hidden = padding((S, 2, 3), S)
        with torch.set_grad_enabled(training):
            options = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
            return model(source, target, tgt_mask=causal, **options)

    with counting(*FAST) as calls:
        plain, before = run(), len(calls)
        with ch.record(model, ch.Observe(weights=True, received=True)) as recording:
            assert equal(run(), plain)
    assert len(calls) == 2 * before == (0 if training else 4)
    shapes = {name: tuple(seen.weights.shape) for name, seen in recording.items()}
    assert shapes == {
        **{f"encoder.layers.{i}.self_attn": (B, H, S, S) for i in (0, 1)},
        **{f"decoder.layers.{i}.self_attn": (B, H, L, L) for i in (0, 1)},
        **{f"decoder.layers.{i}.multihead_attn": (B, H, L, S) for i in (0, 1)},
    }
    real = torch.tensor([S, 2, 3]).float()[:, None].expand(B, H)
    torch.testing.assert_close(recording["encoder.layers.1.self_attn"].received.sum(-1), real)
    cross = recording["decoder.layers.1.multihead_attn"].received
    torch.testing.assert_close(cross.sum(-1), torch.full((B, H), float(L)))
    assert cross[1, :, 2:].count_nonzero() == 0


def test_masks_stay_symbolic() -> None:
    model, x, hidden = encoder(1), torch.randn(B, L, D), padding((L, 4, 2), L)
    with ch.record(model, ch.Observe(lse=True)) as recording:
        model(x, mask=torch.ones(L, L).triu(1).bool(), src_key_padding_mask=hidden)
        model(x)
    seen, free = recording.calls(0)
    assert [type(part).__name__ for part in seen.mask.parts] == ["Causal", "KeyPadding", "QueryPadding"]
    assert free.mask is None


def test_a_soft_mask_and_dead_rows_are_recorded_as_given_where_the_fast_path_computes_something_else() -> None:
    model, x = encoder(1).eval(), torch.randn(B, L, D)
    soft, hidden = MASKS["soft"]["attn_mask"], padding((L, 3, 0), L)
    mha = model.layers[0].self_attn
    with torch.no_grad():
        with ch.record(model, ALL) as recording:
            model(x, mask=soft)
            assert model(x, src_key_padding_mask=hidden)[2].isnan().all()
        by_bias, dead = recording.calls(0)
        check_seen(by_bias, torch_weights(mha, x, x, x, attn_mask=soft))
        check_seen(dead, torch_weights(mha, x, x, x, key_padding_mask=hidden), hidden)


def test_chosen_layers_alone_are_listened_to() -> None:
    model, x = encoder(3).eval(), torch.randn(B, L, D)
    with torch.no_grad(), counting(*FAST) as calls:
        plain = model(x)
        with ch.record(model, ALL, layers=["layers.0", -1]) as recording:
            assert equal(model(x), plain)
            assert "forward" not in vars(model.layers[1])
        assert calls == [FAST[0]] * 6
        expected = by_hand(model, x)
    assert list(recording) == ["layers.0.self_attn", "layers.2.self_attn"]
    check_seen(recording[0], expected[0])
    check_seen(recording[1], expected[2])


def test_shared_layers_and_several_calls() -> None:
    mha = module(batch_first=True)
    model = nn.ModuleDict({"first": mha, "again": mha})
    x, y = torch.randn(B, L, D), torch.randn(B, S, D)
    with ch.record(model, ch.Observe(weights=True)) as recording:
        model["first"](x, x, x)
        model["again"](query=y, value=x, key=x)
    assert list(recording) == ["first"]
    for seen, inputs in zip(recording.calls("first"), ((x, x, x), (y, x, x)), strict=True):
        torch.testing.assert_close(seen.weights, torch_weights(mha, *inputs), atol=1e-6, rtol=0)


def test_a_recording_in_a_recording_hears_the_same() -> None:
    model, x = encoder(1).eval(), torch.randn(B, L, D)
    mha = model.layers[0].self_attn
    with torch.no_grad(), ch.record(model, ALL) as outer, ch.record(model, ALL) as inner:
        model(x)
        mha(x, x, x)
    with ch.record(model, ALL) as longer:
        with ch.record(model, ALL):
            pass
        mha(x, x, x)
    assert len(longer.calls(0)) == 1
    for recording in (outer, inner):
        assert len(recording.calls(0)) == 2
        check_seen(recording[0], torch_weights(mha, x, x, x))
    assert not vars(mha).keys() & {"forward", "merge_masks"}


def test_exceptions_restore_everything() -> None:
    model, x = encoder(2).eval(), torch.randn(B, L, D)
    before = {part: set(vars(part)) for part in model.modules()}
    with pytest.raises(RuntimeError), torch.no_grad(), ch.record(model, ALL):
        model(x, mask=torch.zeros(L + 1, L + 1))
    with pytest.raises(IndexError), torch.no_grad(), ch.record(model, ch.Observe(weights=ch.At(queries=[L]))):
        model(x)
    assert {part: set(vars(part)) for part in model.modules()} == before
    with torch.no_grad(), ch.record(model, ALL) as recording:
        with pytest.raises((RuntimeError, AssertionError)):
            model(x, mask=torch.zeros(L + 1, L + 1))
        assert not len(recording)
        model(x)
    assert len(recording) == 2


def test_what_was_put_in_place_of_forward_meanwhile_stays() -> None:
    mha, x = module(batch_first=True), torch.randn(B, L, D)
    with ch.record(mha, ch.Observe(lse=True)):
        ours = mha.forward
        mha.forward = lambda *args, **options: ours(*args, **options)
    assert mha(x, x, x)[0].shape == x.shape
    assert "forward" in vars(mha)


class Overriding(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


class Inheriting(nn.MultiheadAttention):
    pass


def test_what_cannot_be_heard_is_named() -> None:
    parts: dict[str, nn.Module] = {name: module() for name in ("plain", "patched", "parametrized", "compiled")}
    parts["overriding"], parts["inheriting"] = Overriding(D, H), Inheriting(D, H)
    own = parts["patched"].forward
    parts["patched"].forward = lambda *args, **options: own(*args, **options)
    nn.utils.parametrizations.orthogonal(parts["parametrized"], "in_proj_weight")
    parts["compiled"].compile(backend="eager")
    model, x = nn.ModuleDict(parts), torch.randn(B, L, D)
    recorder = ch.record(model, ch.Observe(lse=True))
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="not recorded: .*") as caught:
            recording = stack.enter_context(recorder)
        for part in ("plain", "inheriting"):
            model[part](x, x, x)
    assert list(recording) == ["plain", "inheriting"]
    message = str(caught[0].message)
    for name, reason in {
        "patched": "forward of its own",
        "parametrized": "may change",
        "compiled": "compiled",
        "overriding": "Overriding has a forward of its own",
    }.items():
        assert any(part.startswith(f"{name} (") and reason in part for part in message[14:].split("; ")), name
    assert "plain" not in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quantizable_and_scripted_attention_is_named() -> None:
    from torch.ao.nn import quantizable

    for part in (quantizable.MultiheadAttention(D, H), torch.jit.script(module())):
        with (
            pytest.raises(ValueError, match=r"nothing to record: .*listened to: .*(scripted|forward of its own)"),
            ch.record(nn.Sequential(part), ch.Observe(lse=True)),
        ):
            pass


def test_a_layer_outside_of_what_is_recorded_is_said() -> None:
    layer, x = encoder(1).eval().layers[0], torch.randn(B, L, D)

    def run() -> Any:
        with ch.record(layer.self_attn, ch.Observe(weights=True)) as recording:
            with torch.no_grad():
                layer(x)
            # A path of its own, on which torch follows a hint.
            layer.self_attn(x, x, x, attn_mask=torch.zeros(L, L), is_causal=True, need_weights=False)
        return recording

    with pytest.warns(UserWarning, match="record the layer") as caught:
        recording = run()
    assert len(recording.calls(0)) == 1
    assert recording[0].weights.triu(1).count_nonzero() == 0
    assert caught[0].filename == __file__


def test_a_layer_of_ones_own_on_the_fast_path_of_torchs() -> None:
    class Twice(nn.TransformerEncoderLayer):
        def forward(self, src: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return super().forward(2 * src, *args, **options)

    torch.manual_seed(0)
    layer, x = Twice(D, H, 19, batch_first=True).eval(), torch.randn(B, L, D)
    with torch.no_grad(), counting(*FAST) as calls, ch.record(layer, ALL) as recording:
        layer(x)
    assert calls == [FAST[0]]
    check_seen(recording["self_attn"], torch_weights(layer.self_attn, *[2 * x] * 3))


def test_what_was_seen_can_keep_its_graph() -> None:
    mha, x = module(batch_first=True), torch.randn(B, L, D)
    with ch.record(mha, ch.Observe(entropy=True, context=True, grad=True)) as recording:
        mha(x, x, x)
    recording[0].entropy.sum().backward()
    assert mha.in_proj_weight.grad.count_nonzero() > 0
    assert recording[0].context.requires_grad


def test_a_learned_mask_is_a_bias_also_while_it_is_zero() -> None:
    mha, x, learned = module(batch_first=True), torch.randn(B, L, D), torch.zeros(L, L, requires_grad=True)
    with ch.record(mha, ch.Observe(entropy=True, grad=True)) as recording:
        mha(x, x, x, attn_mask=learned)
    recording[0].entropy.sum().backward()
    assert learned.grad.count_nonzero() == L * L


@pytest.mark.parametrize("training", [False, True])
def test_checkpointing_inside_a_recording(training: bool) -> None:
    """What is computed once more is not recorded once more, and has the same graph."""
    layer, x = encoder(1).layers[0].train(training), torch.randn(B, L, D)
    with ch.record(layer, ch.Observe(entropy=True, grad=True)) as recording:
        output = checkpoint(layer, x, use_reentrant=False)
        output.square().sum().backward()
    assert len(recording.calls(0)) == 1


@pytest.mark.parametrize("training", [False, True])
def test_checkpointing_goes_on_after_the_recording(training: bool) -> None:
    """It counts what is kept for the backward pass: a recording keeps nothing of its own."""
    layer, x = encoder(1).layers[0].train(training), torch.randn(B, L, D)

    def gradients(record: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer.zero_grad()
        with ch.record(layer, ALL) if record else nullcontext():
            output = checkpoint(layer, x, use_reentrant=False)
        output.square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    assert all(equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_any_module_with_our_core_is_heard_through_it() -> None:
    class Theirs(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(D, H, batch_first=True)
            self.core = Core()

        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.unflatten(-1, (H, E)).transpose(1, 2) for x in (query, key, value))
            mask, scale = ch.KeyPadding([L, 4, 2]), 0.5
            return self.core(q, k, v, mask=mask, attn_bias=None, scale=scale).transpose(1, 2).flatten(2)

    model, x = nn.ModuleDict({"theirs": Theirs(), "plain": module(batch_first=True)}), torch.randn(B, L, D)
    with ch.record(model, ch.Observe(weights=True, lse=True)) as recording:
        model["theirs"](x, x, value=x)
        model["plain"](x, x, x)
    assert list(recording) == ["theirs", "plain"]
    heads = x.unflatten(-1, (H, E)).transpose(1, 2)
    hidden = padding((L, 4, 2), L)
    scores = (heads @ heads.mT / 2).masked_fill(hidden[:, None, None], -math.inf)
    expected = scores.softmax(-1) * ~hidden[:, None, :, None]
    torch.testing.assert_close(recording["theirs"].weights, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_converted_layers_are_heard_once_through_their_core(training: bool) -> None:
    plain, x, hidden = encoder(nested=True).eval(), torch.randn(B, L, D), padding((L, 4, 2), L)
    with torch.no_grad():
        expected = by_hand(plain, x, key_padding_mask=hidden)
    model = ch.convert(copy.deepcopy(plain)).train(training)

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        with torch.set_grad_enabled(training):
            return model(x, src_key_padding_mask=hidden)

    alone = run()
    with ch.record(model, ALL) as recording:
        assert equal(run(), alone)
    assert [len(recording.calls(name)) for name in recording] == [1, 1]
    check_seen(recording["layers.0.self_attn"], expected[0], hidden)
    if not training:  # else what comes next went through dropout
        check_seen(recording["layers.1.self_attn"], expected[1], hidden)


def test_recordings_that_end_in_another_order_leave_nothing_behind() -> None:
    mha, x = nn.MultiheadAttention(D, H, batch_first=True), torch.randn(B, L, D)
    names = set(vars(mha))
    first, second = ch.record(mha, ALL), ch.record(mha, ALL)
    one, two = first.__enter__(), second.__enter__()
    mha(x, x, x)
    first.__exit__(None, None, None)
    mha(x, x, x)
    second.__exit__(None, None, None)
    mha(x, x, x)
    assert (len(one.calls(0)), len(two.calls(0))) == (1, 2)
    assert set(vars(mha)) == names
