"""`convert`: torch's transformer layers on clearhead's attention; the truth is their formula in float64."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.compat import MultiheadAttention
from clearhead.compat.torch import ROWS, TransformerEncoderLayer
from test_compat_torch import by_formula

B, L, S, D, H = 2, 5, 7, 12, 4  # an even number of heads: with an odd one torch leaves its fast path
DOUBLE = torch.float64
in_torch = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="a contrast to torch 2.13")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


def close(found: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.isfinite().all()
    assert (found - expected).abs().max().item() <= error * (expected.abs().max().item() or 1.0)


def filled(model: nn.Module) -> nn.Module:
    """With parameters that are none of them zero or one, always the same."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.to(DOUBLE)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, H, 17, **{"dropout": 0.0, "batch_first": True, **options})


def encoder(nested: bool = True, norm: bool = False, **options: Any) -> nn.TransformerEncoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some layers can't be nested
        layer = encoder_layer(**options)
        found = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D) if norm else None, enable_nested_tensor=nested)
    return filled(found)


def decoder(**options: Any) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(D, H, 17, **{"dropout": 0.0, "batch_first": True, **options})
    return filled(nn.TransformerDecoder(layer, 2))


def transformer(**options: Any) -> nn.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return filled(nn.Transformer(D, H, 2, 2, 17, **{"dropout": 0.0, "batch_first": True, **options}))


def pair(model: nn.Module) -> tuple[Any, Any]:
    return ch.convert(copy.deepcopy(model)), model


def truth(model: nn.Module, *given: Tensor, **options: Any) -> Tensor:
    """What torch's formula gives; all masks as floats, since torch warns of two kinds."""
    options = {
        name: torch.zeros(o.shape, dtype=DOUBLE).masked_fill(o, -torch.inf)
        if isinstance(o, Tensor) and o.dtype == torch.bool
        else o
        for name, o in options.items()
    }
    with by_formula():
        return model(*given, **options)


PADDING = torch.arange(L) >= torch.tensor([[5], [3]])
LEFT = PADDING.flip(1)
MEMORY_PADDING = torch.arange(S) >= torch.tensor([[4], [7]])
FUTURE = torch.ones(L, L, dtype=torch.bool).triu(1)
SLOPES = 2.0 ** -torch.arange(1, H + 1).to(DOUBLE)
ALIBI = -(SLOPES[:, None, None] * (torch.arange(L)[:, None] - torch.arange(L)).abs()).repeat(B, 1, 1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_first": {"norm_first": True},
    "length first": {"batch_first": False},
    "without bias": {"bias": False},
    "gelu": {"activation": "gelu"},
    "own activation": {"activation": nn.functional.silu},
}


def modes(model: nn.Module) -> Iterator[str]:
    """Each way to call it, which must not matter."""
    for training in (True, False):
        model.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                yield f"{'train' if training else 'eval'}, {'grad' if grad else 'no grad'}"


def laid(x: Tensor, options: dict[str, Any]) -> Tensor:
    return x if options.get("batch_first", True) else x.transpose(0, 1).contiguous()


# -- the same numbers, in every mode ------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "dense"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_encoder(kind: str, nested: bool) -> None:
    options = OPTIONS[kind]
    ours, theirs = pair(encoder(nested, norm=True, **options))
    x = laid(numbers(B, L, D), options)
    soft = torch.where(PADDING, -1.5, 0.0).to(DOUBLE)
    for given in (
        {},
        {"mask": FUTURE},
        {"mask": FUTURE, "is_causal": True},
        {"mask": ALIBI},
        {"src_key_padding_mask": PADDING},
        {"src_key_padding_mask": LEFT},
        {"src_key_padding_mask": soft},
        {"mask": FUTURE, "src_key_padding_mask": PADDING},
    ):
        expected = truth(theirs.train(), x, **given)
        for _ in modes(ours):
            close(ours(x, **given), expected)
    close(ours(laid(x, options)[0]), truth(theirs, laid(x, options)[0]))


@pytest.mark.parametrize("kind", OPTIONS)
def test_decoder_and_its_cross_attention(kind: str) -> None:
    options = OPTIONS[kind]
    ours, theirs = pair(decoder(**options))
    x, memory = (laid(numbers(B, n, D), options) for n in (L, S))
    for given in (
        {},
        {"tgt_mask": FUTURE, "tgt_key_padding_mask": PADDING, "memory_key_padding_mask": MEMORY_PADDING},
        {"tgt_mask": ALIBI, "memory_mask": numbers(L, S)},
        {"tgt_mask": FUTURE, "tgt_is_causal": True, "memory_key_padding_mask": MEMORY_PADDING},
    ):
        expected = truth(theirs.train(), x, memory, **given)
        for _ in modes(ours):
            close(ours(x, memory, **given), expected)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_whole_transformer(kind: str) -> None:
    options = OPTIONS[kind]
    ours, theirs = pair(transformer(**options))
    x, y = (laid(numbers(B, n, D), options) for n in (S, L))
    given = {
        "tgt_mask": FUTURE,
        "src_key_padding_mask": MEMORY_PADDING,
        "memory_key_padding_mask": MEMORY_PADDING,
        "tgt_key_padding_mask": PADDING,
    }
    expected = truth(theirs.train(), x, y, **given)
    for _ in modes(ours):
        close(ours(x, y, **given), expected)


def test_gradients() -> None:
    grads = []
    for model in pair(transformer()):
        x, y = (numbers(B, n, D).requires_grad_() for n in (S, L))
        out = truth(model.train(), x, y, tgt_mask=FUTURE, src_key_padding_mask=MEMORY_PADDING)
        grads.append(torch.autograd.grad((out * numbers(B, L, D, seed=3)).sum(), [x, y, *model.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs, 1e-11)


def formula(layer: Any, x: Tensor, bias: Tensor) -> Tensor:
    """A post-norm encoder layer, written out; -inf in the bias (B, H, L, L) hides, and a dead row gives zero."""
    attention = layer.self_attn
    q, k, v = (
        (x @ w.T + b).reshape(B, L, H, D // H).transpose(1, 2)
        for w, b in zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    )
    scores = q @ k.transpose(2, 3) / (D // H) ** 0.5 + bias
    top = scores.amax(-1, keepdim=True)
    e = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    weights = e / e.sum(-1, keepdim=True).clamp_min(1e-300)
    context = (weights @ v).transpose(1, 2).reshape(B, L, D)
    x = layer.norm1(x + context @ attention.out_proj.weight.T + attention.out_proj.bias)
    hidden = (x @ layer.linear1.weight.T + layer.linear1.bias).clamp_min(0)
    return layer.norm2(x + hidden @ layer.linear2.weight.T + layer.linear2.bias)


def test_a_soft_bias_is_added_in_eval() -> None:
    ours, theirs = pair(encoder())
    x = numbers(B, L, D)
    expected = x
    for layer in theirs.layers:
        expected = formula(layer, expected, ALIBI.unflatten(0, (B, H)))
    for _ in modes(ours):
        close(ours(x, mask=ALIBI), expected)


@in_torch
def test_a_soft_bias_is_a_hard_mask_in_torchs_eval() -> None:
    theirs, x = encoder().eval(), numbers(B, L, D)
    with torch.no_grad():
        assert (theirs(x, mask=ALIBI) - truth(theirs, x, mask=ALIBI)).abs().max() > 0.01


@in_torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_soft_padding_is_hard_in_torchs_nested_tensors() -> None:
    theirs, x = encoder().eval(), numbers(B, L, D)
    soft = torch.where(PADDING, -1.5, 0.0).to(DOUBLE)
    with torch.no_grad():
        found = theirs(x, src_key_padding_mask=soft)
        assert torch.equal(found, theirs(x, src_key_padding_mask=PADDING))
        assert (found - truth(theirs, x, src_key_padding_mask=soft))[~PADDING].abs().max() > 0.01


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("nested", [True, False])
def test_dead_rows_give_no_nan(nested: bool, floats: bool) -> None:
    """A sequence that is all padding; and left padding with a causal mask, whose first rows see nothing."""
    ours, theirs = pair(encoder(nested))
    x = numbers(B, L, D)
    empty = torch.tensor([[False] * 3 + [True] * 2, [True] * L])
    for padding, mask in ((empty, None), (LEFT, FUTURE)):
        hidden = padding[:, None, None, :].expand(B, H, L, L)
        hidden = hidden if mask is None else hidden | mask
        bias = torch.zeros(B, H, L, L, dtype=DOUBLE).masked_fill(hidden, -torch.inf)
        expected = x
        for layer in theirs.layers:
            expected = formula(layer, expected, bias)
        given = torch.zeros(B, L, dtype=DOUBLE).masked_fill(padding, -torch.inf) if floats else padding
        if floats and mask is not None:
            mask = torch.zeros(L, L, dtype=DOUBLE).masked_fill(mask, -torch.inf)
        for _ in modes(ours):
            close(ours(x, mask=mask, src_key_padding_mask=given), expected)
    ours.train()
    ours(x, src_key_padding_mask=empty).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_padding_does_not_matter_to_real_tokens() -> None:
    ours, _ = pair(encoder())
    x, alone = numbers(B, L, D), ours(numbers(B, L, D)[1:, 2:])
    for _ in modes(ours):
        close(ours(x.masked_fill(LEFT[..., None], 1e30), src_key_padding_mask=LEFT)[1:, 2:], alone)


# -- torch's fast path does not run -----------------------------------------------------------------------------


class FastPathError(Exception):
    """It ran."""


@pytest.fixture
def no_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FastPathError

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, refuse)


class OwnLayer(nn.TransformerEncoderLayer):
    """Somebody's layer, which leaves most to torch."""

    def forward(self, *given: Any, **options: Any) -> Tensor:
        return super().forward(*given, **options)


def calls() -> dict[str, tuple[nn.Module, Callable[[Any], Any]]]:
    x = numbers(B, L, D)
    return {
        "module": (filled(nn.MultiheadAttention(D, H, batch_first=True)), lambda m: m(x, x, x)),
        "layer": (filled(encoder_layer()), lambda m: m(x)),
        "encoder": (encoder(), lambda m: m(x)),
        "padded encoder": (encoder(), lambda m: m(x, src_key_padding_mask=PADDING)),
        "own layer": (filled(OwnLayer(D, H, 17, batch_first=True)), lambda m: m(x)),
        "transformer": (transformer(), lambda m: m(x, x)),
    }


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("name", calls())
def test_torch_leaves_its_fast_path(name: str) -> None:
    model, call = calls()[name]
    model.eval()
    with torch.no_grad():
        with pytest.raises(FastPathError):
            call(model)
        for again in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            call(again(ch.convert(copy.deepcopy(model))))
        ch.convert(ch.convert(model), to="torch")
        with pytest.raises(FastPathError):
            call(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_put_together_by_hand() -> None:
    """Nothing is converted: torch's encoder makes a nested tensor, and its layer gets it."""
    layer = encoder_layer().to(DOUBLE)
    layer.self_attn = MultiheadAttention(D, H, batch_first=True, dtype=DOUBLE)
    model = filled(nn.TransformerEncoder(layer, 2)).eval()
    assert model.use_nested_tensor
    x = numbers(B, L, D)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=PADDING)
        expected = truth(ch.convert(copy.deepcopy(model), to="torch"), x, src_key_padding_mask=PADDING)
    close(found[~PADDING], expected[~PADDING])


def test_nested_inputs_of_a_converted_layer() -> None:
    ours, theirs = pair(filled(encoder_layer()))
    ours.eval()
    parts = [numbers(3, D), numbers(L, D)]
    with torch.no_grad():
        found = ours(torch.nested.nested_tensor(parts, layout=torch.jagged))
        for one, part in zip(found.unbind(), parts, strict=True):
            close(one, truth(theirs, part))


# -- in place, and back -------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> dict[str, Any]:
    """What must be the same objects, or equal, before and after."""
    return {
        "modules": [
            (name, id(module), module.training) for name, module in model.named_modules() if "core" not in name
        ],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)],
        "state": list(model.state_dict()),
        "hooks": [
            (name, list(hooks.items()))
            for path, module in model.named_modules()
            for name, hooks in vars(module).items()
            if name.endswith("_hooks") and "core" not in path
        ],
    }


MODELS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.MultiheadAttention(D, H, kdim=7, add_bias_kv=True),
    "layer": encoder_layer,
    "decoder layer": lambda: nn.TransformerDecoderLayer(D, H),
    "encoder": encoder,
    "decoder": decoder,
    "transformer": transformer,
    "in something": lambda: nn.ModuleDict({"a": encoder(), "b": nn.Sequential(nn.Linear(2, 3), encoder_layer())}),
}


@pytest.mark.parametrize("name", MODELS)
def test_in_place_and_back(name: str) -> None:
    model = MODELS[name]()
    torch_classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    first = next(m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    first.train(False)
    first.register_forward_hook(lambda *_: None)
    first.out_proj.weight.requires_grad_(False)
    before = everything(model)
    assert ch.convert(model) is model
    assert everything(model) == before
    ours = [type(module) for module in model.modules()]
    assert nn.MultiheadAttention not in ours
    assert nn.TransformerEncoderLayer not in ours
    assert all(type(m) is MultiheadAttention for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    cores = [id(module.core) for module in model.modules() if isinstance(module, MultiheadAttention)]
    assert ch.convert(model) is model
    assert [id(module.core) for module in model.modules() if isinstance(module, MultiheadAttention)] == cores
    assert everything(model) == before
    for _ in range(2):
        assert ch.convert(model, to="torch") is model
        assert [type(module) for module in model.modules()] == torch_classes
        assert [set(vars(module)) for module in model.modules()] == attributes
        assert everything(model) == before


@pytest.mark.parametrize("nested", [True, False])
def test_the_nested_flag_comes_back(nested: bool) -> None:
    model = encoder(nested)
    assert model.use_nested_tensor is nested
    ch.convert(ch.convert(model))
    assert not model.use_nested_tensor
    ch.convert(ch.convert(model, to="torch"), to="torch")
    assert model.use_nested_tensor is nested


@pytest.mark.parametrize("name", MODELS)
def test_state_dicts_load_both_ways(name: str) -> None:
    ours, theirs = ch.convert(filled(MODELS[name]())), filled(MODELS[name]())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_optimizers_go_on() -> None:
    losses = []
    for converting in (False, True):
        model = encoder().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = numbers(B, L, D)
        for step in range(4):
            if converting and step in (1, 3):
                ch.convert(model, to="clearhead" if step == 1 else "torch")
            optimizer.zero_grad()
            with by_formula():
                loss = (model(x, mask=FUTURE) - x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    close(losses[1], losses[0])


def test_tied_modules_stay_tied() -> None:
    attention = nn.MultiheadAttention(D, H)
    model = ch.convert(nn.ModuleList([attention, attention]))
    assert model[0] is model[1] is attention
    assert type(attention) is MultiheadAttention


def test_nothing_to_convert() -> None:
    model = nn.Linear(2, 3)
    assert ch.convert(model) is model
    assert type(model) is nn.Linear


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(again: Callable[[Any], Any]) -> None:
    ours = ch.convert(transformer()).eval()
    x = numbers(B, L, D)
    found = again(ours)
    assert torch.equal(found(x, x), ours(x, x))
    assert not {id(p) for p in found.parameters()} & {id(p) for p in ours.parameters()}
    assert type(ch.convert(found, to="torch").encoder.layers[0].self_attn) is nn.MultiheadAttention


def test_compiled() -> None:
    ours, theirs = pair(encoder())
    x = numbers(B, L, D)
    found = torch.compile(ours, fullgraph=True, backend="aot_eager")(x, mask=FUTURE, is_causal=True)
    close(found, truth(theirs, x, mask=FUTURE))


# -- what is left alone, and errors -------------------------------------------------------------------------------


class Derived(nn.MultiheadAttention):
    """With something of its own, but torch's forward."""

    @property
    def width(self) -> int:
        return self.embed_dim


class Forward(nn.MultiheadAttention):
    """With a forward of its own."""

    def forward(self, *given: Any, **options: Any) -> Any:
        return super().forward(*given, **options)


def test_a_derived_class_stays_one() -> None:
    theirs = filled(Derived(D, H, batch_first=True))
    ours = ch.convert(copy.deepcopy(theirs))
    x = numbers(B, L, D)
    for found in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(found, Derived)
        assert isinstance(found, MultiheadAttention)
        assert type(found) is type(ours)
        assert found.width == D
        close(found(x, x, x, is_causal=True)[0], truth(theirs, x, x, x, attn_mask=FUTURE)[0])
    assert type(ch.convert(ours, to="torch")) is Derived


def test_a_forward_of_its_own_is_left_alone_and_named() -> None:
    patched = nn.MultiheadAttention(D, H)
    patched.forward = lambda *_: None
    model = nn.ModuleDict({"own": Forward(D, H), "patched": patched, "plain": nn.MultiheadAttention(D, H)})
    with pytest.warns(UserWarning, match=r"own \(Forward\), patched \(MultiheadAttention\)\."):
        ch.convert(model)
    assert type(model["own"]) is Forward
    assert type(model["patched"]) is nn.MultiheadAttention
    assert type(model["plain"]) is MultiheadAttention


def test_errors_change_nothing() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(D, H), encoder()])
    with pytest.raises(ValueError, match="not to 'jax'"):
        ch.convert(model, to="jax")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not dict"):
        ch.convert({"model": model})
    assert not any(isinstance(module, MultiheadAttention) for module in model.modules())
    ch.convert(model)
    handle = model[1].layers[1].self_attn.core.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"1\.layers\.1\.self_attn was replaced, has hooks"):
        ch.convert(model, to="torch")
    assert all(type(m) is MultiheadAttention for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    assert not model[1].use_nested_tensor
    handle.remove()
    with ch.record(model, ch.Observe(entropy=True)), pytest.raises(ValueError, match="or is being recorded"):
        ch.convert(model, to="torch")
    ch.convert(model, to="torch")
    assert type(model[0]) is nn.MultiheadAttention


# -- the feed-forward block, and looking inside -----------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rows", [ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 7])
def test_the_feed_forward_block_by_parts(rows: int, batch_first: bool) -> None:
    layer = ch.convert(filled(encoder_layer(batch_first=batch_first))).eval()
    x = numbers(1, rows, D) if batch_first else numbers(rows, 1, D)
    expected = nn.TransformerEncoderLayer._ff_block(layer, x)
    with torch.no_grad():
        close(layer._ff_block(x), expected)
        close(layer._ff_block(x.transpose(0, 1)), expected.transpose(0, 1))


def test_who_listens_to_a_layer_inside_is_called_once() -> None:
    layer: Any = ch.convert(filled(encoder_layer())).eval()
    assert type(layer) is TransformerEncoderLayer
    sizes = []
    layer.linear1.register_forward_hook(lambda _, given, out: sizes.append(out.shape))
    with torch.no_grad():
        layer(numbers(1, ROWS + 7, D))
    assert sizes == [(1, ROWS + 7, 17)]


def test_record_sees_each_layer() -> None:
    ours, theirs = pair(encoder())
    ours.eval()
    x = numbers(B, L, D)
    with torch.no_grad():
        plain = ours(x, mask=ALIBI)
        with ch.record(ours, ch.Observe(weights=True)) as recording:
            assert torch.equal(ours(x, mask=ALIBI), plain)
    assert list(recording) == ["layers.0.self_attn", "layers.1.self_attn"]
    with by_formula():
        expected = theirs.layers[0].self_attn(x, x, x, attn_mask=ALIBI, average_attn_weights=False)[1]
    close(recording[0].weights, expected)


def test_record_where_keys_were_added() -> None:
    ours, theirs = pair(filled(nn.MultiheadAttention(D, H, add_zero_attn=True, batch_first=True)))
    x = numbers(B, L, D)
    with ch.record(ours, ch.Observe(weights=True)) as recording:
        ours(x, x, x, key_padding_mask=PADDING)
    expected = theirs(x, x, x, key_padding_mask=PADDING, average_attn_weights=False)[1]
    close(recording[0].weights, expected.detach())
