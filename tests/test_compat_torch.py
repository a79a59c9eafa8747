"""`compat.MultiheadAttention` against ``nn.MultiheadAttention``: what torch's own tests state of it, and where not.

The truth is torch's module in float64 with its fast path off: its formula, step by step.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.compat import MultiheadAttention
from clearhead.compat.torch_masks import ROWS

B, L, S, D, H = 2, 5, 7, 12, 3
DOUBLE = torch.float64

CONFIGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "without bias": {"bias": False},
    "kdim and vdim": {"kdim": 7, "vdim": 11},
    "vdim alone": {"vdim": 11, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv, zero_attn, kdim": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7},
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


def pair(config: str = "packed", **options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same parameters, none of them zero."""
    options = {"dtype": DOUBLE, **CONFIGS[config], **options}
    theirs = nn.MultiheadAttention(D, H, **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    ours = MultiheadAttention(D, H, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def inputs(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    found = [numbers(B, L, D), numbers(B, S, module.kdim, seed=1), numbers(B, S, module.vdim, seed=2)]
    if not batched:
        return [tensor[0] for tensor in found]
    return found if module.batch_first else [tensor.transpose(0, 1).contiguous() for tensor in found]


def additive(mask: Tensor | None, dtype: torch.dtype = DOUBLE) -> Tensor | None:
    """As floats: torch warns where one mask is bool and the other is not."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)


@contextmanager
def by_formula() -> Iterator[None]:
    """Torch without its fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def truth(module: nn.Module, *given: Any, **options: Any) -> Any:
    masks = {
        name: additive(options[name], given[0].dtype) for name in ("attn_mask", "key_padding_mask") if name in options
    }
    with by_formula():
        return module(*given, **{**options, **masks})


def close(found: Tensor | None, expected: Tensor | None, error: float = 1e-12) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max().item() <= error * (expected.abs().max().item() or 1.0)


FUTURE = torch.ones(L, S, dtype=torch.bool).triu(1)
PADDING = torch.arange(S) >= torch.tensor([[6], [3]])
# No query is without a key: torch would give NaN.
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "causal": FUTURE,
    "causal, floats": additive(FUTURE),
    "nearly causal": FUTURE.clone().index_put_((torch.tensor(4), torch.tensor(1)), torch.tensor(True)),
    "causal and a bias": torch.where(FUTURE, -torch.inf, numbers(L, S, seed=5)),
    "bias": numbers(L, S, seed=3),
    "by head": (numbers(B * H, L, S) > 1).index_fill_(2, torch.tensor(0), False),
    "bias by head": numbers(B * H, L, S, seed=4),
}
PADDINGS: dict[str, Tensor | None] = {
    "none": None,
    "bool": PADDING,
    "floats": additive(PADDING),
    "soft": torch.where(PADDING, -2.5, 0.0).double(),
    "nothing padded": torch.zeros(B, S, dtype=torch.bool),
}


# -- the same as torch's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_mask_gives_torchs_output_and_weights(config: str, batch_first: bool) -> None:
    ours, theirs = pair(config, batch_first=batch_first)
    given = inputs(theirs)
    for attn_mask in MASKS.values():
        for padding in PADDINGS.values():
            for average in (True, False):
                options = {
                    "attn_mask": attn_mask,
                    "key_padding_mask": padding,
                    "average_attn_weights": average,
                }
                output, weights = ours(*given, **options)
                expected, its_weights = truth(theirs, *given, **options)
                close(output, expected)
                close(weights, its_weights)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_without_a_batch(config: str, batch_first: bool) -> None:
    ours, theirs = pair(config, batch_first=batch_first)
    given = inputs(theirs, batched=False)
    for name, attn_mask in MASKS.items():
        for padding in PADDINGS.values():
            for average in (True, False):
                options = {
                    "attn_mask": attn_mask[:H] if attn_mask is not None and "head" in name else attn_mask,
                    "key_padding_mask": None if padding is None else padding[1],
                    "average_attn_weights": average,
                }
                found, expected = ours(*given, **options), truth(theirs, *given, **options)
                close(found[0], expected[0])
                close(found[1], expected[1])


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_of_output_and_weights(config: str) -> None:
    modules = pair(config)
    grads = []
    for module in modules:
        given = [tensor.requires_grad_() for tensor in inputs(module)]
        bias = numbers(L, S, seed=3).requires_grad_()
        output, weights = truth(module, *given, attn_mask=bias, key_padding_mask=PADDING)
        loss = (output * numbers(L, B, D, seed=7)).sum() + (weights * numbers(*weights.shape, seed=8)).sum()
        grads.append(torch.autograd.grad(loss, [*given, bias, *module.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        # The bias of the keys shifts a row's scores alike: that part is zero but for rounding.
        close(ours, theirs, 1e-11)


def test_self_attention_of_one_tensor() -> None:
    ours, theirs = pair(batch_first=True)
    x = numbers(B, L, D)
    for module in (ours, theirs):
        module.eval()
    padding = torch.tensor([[False] * L, [False] * 3 + [True] * 2])
    close(ours(x, x, x, key_padding_mask=padding)[0], truth(theirs, x, x, x, key_padding_mask=padding)[0])


@pytest.mark.parametrize("heads", [1, 2, 12])
def test_heads(heads: int) -> None:
    theirs = nn.MultiheadAttention(D, heads, dtype=DOUBLE)
    ours = MultiheadAttention(D, heads, dtype=DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    found, expected = ours(*inputs(theirs)), truth(theirs, *inputs(theirs))
    close(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_the_mode_changes_nothing_without_dropout(mode: str) -> None:
    ours, theirs = pair(batch_first=True)
    x = numbers(B, L, D)
    bias = numbers(L, L)
    ours.train(mode == "train")
    with torch.inference_mode(mode == "inference"):
        found = ours(x, x, x, attn_mask=bias, need_weights=False)[0]
    close(found, truth(theirs, x, x, x, attn_mask=bias)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    ours, theirs = pair(batch_first=True)
    given = inputs(theirs)
    expected = truth(theirs, *given, attn_mask=FUTURE, key_padding_mask=PADDING)
    ours.to(dtype)
    found = ours(*(t.to(dtype) for t in given), attn_mask=FUTURE, key_padding_mask=PADDING)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == dtype
        close(one.double(), two, {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype])


def test_autocast() -> None:
    ours, theirs = (module.float() for module in pair("bias_kv", batch_first=True))
    given = [tensor.float() for tensor in inputs(theirs)]
    expected = truth(theirs, *given, attn_mask=FUTURE)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, weights = ours(*given, attn_mask=additive(FUTURE, torch.float32))
    assert found.dtype == torch.bfloat16
    assert weights.sum(-1).sub(1).abs().max() < 1e-2
    close(found.float(), expected, 1e-1)


def test_a_batch_of_none() -> None:
    ours, theirs = pair(batch_first=True)
    given = [tensor[:0] for tensor in inputs(theirs)]
    output, weights = ours(*given)
    assert output.shape == (0, L, D)
    assert weights.shape == (0, L, S)


# -- construction and state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["__init__", "forward"])
def test_signature_is_torchs(call: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, call)) for c in (MultiheadAttention, nn.MultiheadAttention))
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default
        assert ours.parameters[name].kind == parameter.kind


@pytest.mark.parametrize("config", CONFIGS)
def test_initial_parameters_are_torchs(config: str) -> None:
    states = []
    for kind in (MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(0)
        states.append(kind(D, H, **CONFIGS[config]).state_dict())
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name])


@pytest.mark.parametrize("config", CONFIGS)
def test_state_dicts_both_ways(config: str) -> None:
    ours, theirs = pair(config)
    other = nn.MultiheadAttention(D, H, dtype=DOUBLE, **CONFIGS[config])
    other.load_state_dict(ours.state_dict(), strict=True)
    given = inputs(theirs)
    assert torch.equal(other(*given)[0], theirs(*given)[0])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(again: Any) -> None:
    ours, theirs = pair("bias_kv")
    found = again(ours)
    assert type(found) is MultiheadAttention
    assert torch.equal(found(*inputs(theirs))[0], ours(*inputs(theirs))[0])


def test_is_torchs_and_says_so() -> None:
    ours, _ = pair()
    assert isinstance(ours, nn.MultiheadAttention)
    assert repr(ours.out_proj) in repr(ours)


def test_hooks_on_the_output_projection_are_called() -> None:
    ours, theirs = pair()
    called = []
    ours.out_proj.register_forward_hook(lambda *_: called.append(1))
    ours.eval()(*inputs(theirs))
    assert called == [1]


# -- where torch depends on its path, or gives NaN --------------------------------------------------------------


@pytest.mark.parametrize("config", ["packed", "without bias", "kdim and vdim"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["bool", "floats"])
def test_a_dead_row_gives_the_bias_of_the_output(kind: str, training: bool, config: str) -> None:
    ours, theirs = pair(config, batch_first=True)
    ours.train(training)
    given = [tensor.requires_grad_() for tensor in inputs(theirs)]
    padding = torch.tensor([[False] * S, [True] * S])
    output, weights = ours(*given, key_padding_mask=padding if kind == "bool" else additive(padding))
    bias = torch.zeros(D, dtype=DOUBLE) if ours.out_proj.bias is None else ours.out_proj.bias
    assert torch.equal(output[1], bias.expand(L, D))
    assert not weights[1].any()
    close(output[:1], truth(theirs, *(tensor[:1] for tensor in given))[0])
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() and not tensor.grad[1].any() for tensor in given)
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_of_nan_leaks_nowhere(bad: float) -> None:
    ours, theirs = pair(batch_first=True)
    clean = inputs(theirs)
    spoilt = [clean[0], *(t.masked_fill(PADDING[..., None], bad) for t in clean[1:])]
    expected = truth(theirs, *clean, key_padding_mask=PADDING)
    found = ours(*spoilt, key_padding_mask=PADDING)
    close(found[0], expected[0])
    close(found[1], expected[1])
    found[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("config", ["packed", "bias_kv", "zero_attn"])
def test_is_causal_hides_the_future_without_a_mask(config: str, training: bool) -> None:
    ours, theirs = pair(config)
    ours.train(training)
    for given in (inputs(theirs), [numbers(S, B, D), numbers(L, B, D), numbers(L, B, D, seed=1)]):
        mask = torch.ones(len(given[0]), len(given[1]), dtype=torch.bool).triu(1)
        for padding in (None, torch.zeros(B, len(given[1]), dtype=torch.bool)):
            expected = truth(theirs, *given, attn_mask=mask)
            found = ours(*given, is_causal=True, key_padding_mask=padding)
            close(found[0], expected[0])
            close(found[1], expected[1])


def test_is_causal_is_no_hint_but_a_mask_beside_the_other() -> None:
    ours, theirs = pair()
    given, bias = inputs(theirs), numbers(L, S)
    expected = truth(theirs, *given, attn_mask=bias.masked_fill(FUTURE, -torch.inf))
    for need_weights in (True, False):
        close(ours(*given, attn_mask=bias, is_causal=True, need_weights=need_weights)[0], expected[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_change_no_bit_of_the_output(config: str, training: bool) -> None:
    ours, theirs = (module.float().train(training) for module in pair(config, dropout=0.5))
    given = [tensor.float() for tensor in inputs(theirs)]
    outputs = []
    for need_weights, average in ((False, True), (True, True), (True, False)):
        torch.manual_seed(0)
        outputs.append(ours(*given, need_weights=need_weights, average_attn_weights=average)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_dropout_only_while_training_and_not_of_the_weights_that_are_shown() -> None:
    ours, theirs = pair(dropout=0.5)
    given = inputs(theirs)
    theirs.eval()
    expected = truth(theirs, *given)
    dropped, weights = ours(*given)
    close(weights, expected[1])
    assert (dropped - expected[0]).abs().max() > 0.01
    close(ours.eval()(*given)[0], expected[0])
    # The mean over many draws is what no dropout gives.
    ours.train()
    with torch.no_grad():
        many = torch.stack([ours(*given, need_weights=False)[0] for _ in range(400)])
    error = (many.mean(0) - expected[0]).abs() / (many.std(0) / 400**0.5)
    assert error.max() < 5


def test_everything_dropped() -> None:
    ours, theirs = pair(dropout=1.0)
    assert torch.equal(ours(*inputs(theirs))[0], ours.out_proj.bias.expand(L, B, D))


def test_masks_of_two_kinds_make_no_noise() -> None:
    ours, theirs = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(*inputs(theirs), attn_mask=FUTURE, key_padding_mask=PADDINGS["soft"])


def test_structure_of_masks_is_kept() -> None:
    """What is causal or padding comes to the core as that, whatever it was given as."""
    ours, theirs = pair(batch_first=True)
    found: list[dict[str, Any]] = []
    ours.core.register_forward_pre_hook(lambda _, args, options: found.append(options), with_kwargs=True)
    given = inputs(theirs)
    for options in (
        {"is_causal": True, "key_padding_mask": PADDING},
        {"attn_mask": FUTURE, "key_padding_mask": PADDING},
        {"attn_mask": additive(FUTURE), "key_padding_mask": additive(PADDING), "is_causal": True},
    ):
        ours(*given, **options)
        assert repr(found[-1]["mask"]) == repr(ch.Causal(align="start") & ch.KeyPadding(real=~PADDING))
        assert found[-1]["attn_bias"] is None


@pytest.mark.parametrize("dtype", [torch.bool, DOUBLE])
def test_a_long_mask_is_causal_only_if_its_last_rows_are(dtype: torch.dtype) -> None:
    ours, theirs = pair(batch_first=True)
    found: list[dict[str, Any]] = []
    ours.core.register_forward_pre_hook(lambda _, args, options: found.append(options), with_kwargs=True)
    x = numbers(1, ROWS + 7, D)
    future = torch.ones(ROWS + 7, ROWS + 7, dtype=torch.bool).triu(1)
    for spoilt in (False, True):
        mask = future.clone()
        mask[-1, 2] = spoilt
        mask = mask if dtype == torch.bool else additive(mask)
        output = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
        close(output, truth(theirs, x, x, x, attn_mask=mask)[0])
        assert isinstance(found[-1]["mask"], ch.Causal) is not spoilt


# -- nested tensors -----------------------------------------------------------------------------------------------


def nested(lengths: list[int], width: int = D, layout: torch.layout = torch.jagged, seed: int = 0) -> Tensor:
    parts = [numbers(length, width, seed=seed + i) for i, length in enumerate(lengths)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the older layout will change
        return torch.nested.nested_tensor(parts, layout=layout)


LAYOUTS = pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])


@LAYOUTS
@pytest.mark.parametrize("config", CONFIGS)
def test_each_sequence_of_a_nested_tensor_is_by_itself(config: str, layout: torch.layout) -> None:
    ours, theirs = pair(config, batch_first=True)
    query = nested([2, 5, 3], layout=layout)
    key = nested([7, 1, 4], theirs.kdim, layout, seed=10)
    value = nested([7, 1, 4], theirs.vdim, layout, seed=20)
    output, weights = ours(query, key, value, average_attn_weights=False)
    assert output.is_nested
    assert output.layout == layout
    added = bool(theirs.bias_k is not None) + theirs.add_zero_attn
    for i, parts in enumerate(zip(query.unbind(), key.unbind(), value.unbind(), strict=True)):
        expected, its_weights = truth(theirs, *parts, average_attn_weights=False)
        close(output.unbind()[i], expected)
        rows, keys = len(parts[0]), len(parts[1])
        own = weights[i, :, :rows]
        close(torch.cat([own[..., :keys], own[..., weights.shape[-1] - added :]], dim=-1), its_weights)
        assert not weights[i, :, rows:].any()


@LAYOUTS
def test_a_nested_residual_and_its_gradient(layout: torch.layout) -> None:
    ours, theirs = pair(batch_first=True)
    parts = [numbers(length, D, seed=length).requires_grad_() for length in (4, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.as_nested_tensor(parts, layout=layout)
    y = x + ours(x, x, x, need_weights=False)[0]
    sum((part * part).sum() for part in y.unbind()).backward()
    for part in parts:
        alone = part.detach().clone().requires_grad_()
        with by_formula():
            out = alone + theirs(alone, alone, alone)[0]
        (out * out).sum().backward()
        close(part.grad, alone.grad)


def test_nested_and_causal() -> None:
    ours, theirs = pair(batch_first=True)
    x, called = nested([5, 3]), []
    ours.register_forward_hook(lambda *_: called.append(1))
    output = ours(x, x, x, is_causal=True)[0]
    assert called == [1]
    for found, part in zip(output.unbind(), x.unbind(), strict=True):
        mask = torch.ones(len(part), len(part), dtype=torch.bool).triu(1)
        close(found, truth(theirs, part, part, part, attn_mask=mask)[0])


# -- errors -------------------------------------------------------------------------------------------------------

ONES = torch.ones


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((ONES(5, 2, 12), ONES(7, 12), ONES(7, 2, 12)), {}, ch.ShapeError, "all have 2 axes, or all 3"),
        ((ONES(5, 12), ONES(7, 2, 12), ONES(7, 12)), {}, ch.ShapeError, "all have 2 axes, or all 3"),
        ((ONES(12), ONES(12), ONES(12)), {}, ch.ShapeError, "all have 2 axes, or all 3"),
        ((ONES(5, 2, 11), ONES(7, 2, 12), ONES(7, 2, 12)), {}, ch.ShapeError, "query must be 12 wide, not 11"),
        ((ONES(5, 2, 12), ONES(7, 2, 12), ONES(7, 2, 13)), {}, ch.ShapeError, "value must be 12 wide, not 13"),
        ((ONES(5, 2, 12), ONES(7, 2, 12), ONES(6, 2, 12)), {}, ch.ShapeError, "the same length"),
        ((ONES(5, 2, 12), ONES(7, 3, 12), ONES(7, 3, 12)), {}, ch.ShapeError, "the same batch"),
        (None, {"attn_mask": ONES(5).bool()}, ch.MaskError, r"attn_mask must be \(L, S\) = \(5, 7\)"),
        (None, {"attn_mask": ONES(7, 5).bool()}, ch.MaskError, r"not \(7, 5\)"),
        (None, {"attn_mask": ONES(2, 5, 7).bool()}, ch.MaskError, r"or \(B \* num_heads, L, S\) = \(6, 5, 7\)"),
        (None, {"attn_mask": ONES(5, 7).int()}, ch.MaskError, "bool or floating point"),
        (None, {"key_padding_mask": ONES(7).bool()}, ch.MaskError, r"key_padding_mask must be \(B, S\) = \(2, 7\)"),
        (None, {"key_padding_mask": ONES(7, 2).bool()}, ch.MaskError, r"not \(7, 2\)"),
        (None, {"key_padding_mask": ONES(2, 7).byte()}, ch.MaskError, "bool or floating point"),
    ],
)
def test_errors_have_the_numbers(
    given: Any, options: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    ours = MultiheadAttention(D, H)
    given = given or (ONES(L, B, D), ONES(S, B, D), ONES(S, B, D))
    with pytest.raises(error, match=message):
        ours(*given, **options)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        ours.eval()(*given, **options)


def test_errors_of_construction() -> None:
    with pytest.raises(ValueError, match=r"13 = 4 x 3 \+ 1"):
        MultiheadAttention(13, 3)
    for sizes in ((0, 3), (12, 0), (-12, 3)):
        with pytest.raises(ValueError, match="must be greater than 0"):
            MultiheadAttention(*sizes)


def test_errors_of_nested_tensors() -> None:
    ours = MultiheadAttention(D, H, batch_first=True, dtype=DOUBLE)
    x = nested([2, 3])
    with pytest.raises(ch.MaskError, match="neither key_padding_mask nor attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(3, 3))
    with pytest.raises(ch.ShapeError, match="nested all three"):
        ours(x, numbers(2, 3, D), numbers(2, 3, D))
    with pytest.raises(ch.ShapeError, match="batch_first=False"):
        MultiheadAttention(D, H, dtype=DOUBLE)(x, x, x)
    with pytest.raises(ch.ShapeError, match="the same lengths"):
        ours(x, x, nested([3, 2]))


# -- compiled -----------------------------------------------------------------------------------------------------


def test_compiled_in_one_graph() -> None:
    ours, theirs = pair("zero_attn", batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = inputs(theirs)
    for options in (
        {"attn_mask": FUTURE, "key_padding_mask": PADDING},
        {"attn_mask": additive(FUTURE), "key_padding_mask": additive(PADDING), "need_weights": False},
    ):
        found, expected = compiled(*given, **options), truth(theirs, *given, **options)
        close(found[0], expected[0])
        close(found[1], expected[1])


def test_what_is_no_tensor_is_refused_by_name() -> None:
    mha = MultiheadAttention(8, 2)
    with pytest.raises(TypeError, match=r"key must be a torch.Tensor, not NoneType"):
        mha(torch.randn(3, 1, 8), None, None)  # type: ignore[arg-type]
