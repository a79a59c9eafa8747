"""The module against its formula, and against itself: widths, padding, hooks, what is seen, wrong calls."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import Causal, KeyPadding, MultiHeadAttention, Observe, QueryPadding, Window
from clearhead.observe import MAPS, MODULE, SPLIT, STATISTICS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
B, L, S = 2, 5, 7


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(found: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    """Equal up to an error relative to the expected tensor's scale."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = expected.abs().max().item() or 1.0
    assert (found - expected).abs().max().item() <= error * scale


def random_biases(module: nn.Module) -> None:
    """Initial biases are zero, which would hide a swapped or forgotten one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()


def by_the_formula(mha: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Head by head, from the weight matrices; visible (B, L, S)."""
    E, Ev = mha.head_dim, mha.value_head_dim
    Q, K, V = mha.q_proj(query), mha.k_proj(key), mha.v_proj(value)
    Hq, Hkv = Q.shape[-1] // E, K.shape[-1] // E
    contexts = []
    for h in range(Hq):
        g = h // (Hq // Hkv)
        q, k, v = Q[..., h * E : (h + 1) * E], K[..., g * E : (g + 1) * E], V[..., g * Ev : (g + 1) * Ev]
        scores = torch.einsum("bqe,bke->bqk", q, k) * (E**-0.5 if mha.scale is None else mha.scale)
        weights = torch.exp(scores) * visible
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
        contexts.append(torch.einsum("bqk,bkv->bqv", weights, v))
    output: Tensor = mha.out_proj(torch.cat(contexts, dim=-1))
    return output


# -- widths and heads ------------------------------------------------------------------------------------------

WIDTHS: dict[str, dict[str, int]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 5},
    "wide values": {"value_head_dim": 7},
    "narrow memory": {"kdim": 11},
    "keys and values apart": {"kdim": 11, "vdim": 13},
    "values apart": {"vdim": 13},
    "all": {"num_kv_heads": 3, "head_dim": 5, "value_head_dim": 7, "kdim": 11, "vdim": 13},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", WIDTHS.values(), ids=WIDTHS.keys())
def test_every_width_by_the_formula(options: dict[str, int], bias: bool) -> None:
    mha = MultiHeadAttention(18, 6, bias=bias, dtype=torch.float64, **options)
    random_biases(mha)
    kdim = options.get("kdim", 18)
    q, k, v = numbers(B, L, 18), numbers(B, S, kdim), numbers(B, S, options.get("vdim", kdim), seed=1)
    E = options.get("head_dim", 3)
    Ev, Hkv = options.get("value_head_dim", E), options.get("num_kv_heads", 6)
    shapes = {name: tuple(parameter.shape) for name, parameter in mha.named_parameters()}
    weights = [(6 * E, 18), (Hkv * E, kdim), (Hkv * Ev, v.shape[-1]), (18, 6 * Ev)]
    expected = {f"{name}.weight": shape for name, shape in zip(PROJECTIONS, weights, strict=True)}
    if bias:
        expected |= {f"{name}.bias": shape[:1] for name, shape in zip(PROJECTIONS, weights, strict=True)}
    assert shapes == expected

    visible = torch.ones(B, L, S, dtype=torch.bool).tril(2) & (torch.arange(S) < torch.tensor([[[6]], [[3]]]))
    found = mha(q, k, v, mask=Causal() & KeyPadding([6, 3]))
    close(found, by_the_formula(mha, q, k, v, visible))


def test_one_memory_serves_as_keys_and_values() -> None:
    mha = MultiHeadAttention(18, 6, kdim=11, dtype=torch.float64)
    x, memory = numbers(B, L, 18), numbers(B, S, 11)
    assert torch.equal(mha(x, memory), mha(x, memory, memory))
    plain = MultiHeadAttention(18, 6, dtype=torch.float64)
    assert torch.equal(plain(x), plain(x, x, x))


def test_grouped_heads_are_repeated_heads() -> None:
    grouped = MultiHeadAttention(18, 6, num_kv_heads=2, dtype=torch.float64)
    random_biases(grouped)
    whole = MultiHeadAttention(18, 6, dtype=torch.float64)
    state = copy.deepcopy(grouped.state_dict())
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            heads = state[f"{name}.{kind}"].unflatten(0, (2, 3))
            state[f"{name}.{kind}"] = heads.repeat_interleave(3, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    x = numbers(B, L, 18)
    close(grouped(x, mask=Causal()), whole(x, mask=Causal()))


@pytest.mark.parametrize("scale", [1.0, 18**-0.5, -0.7, 0.0])
def test_scale(scale: float) -> None:
    mha = MultiHeadAttention(18, 6, scale=scale, dtype=torch.float64)
    x = numbers(B, L, 18)
    close(mha(x), by_the_formula(mha, x, x, x, torch.ones(B, L, L, dtype=torch.bool)))


def test_initial_weights_are_xavier_uniform_and_biases_zero() -> None:
    torch.manual_seed(0)
    mha = MultiHeadAttention(60, 6, num_kv_heads=2, value_head_dim=7, kdim=40)
    for name in PROJECTIONS:
        projection = mha.get_submodule(name)
        bound = math.sqrt(6 / (projection.in_features + projection.out_features))
        weight = projection.weight
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.99 * bound  # with hundreds of draws, some are near the bounds
        # Uniform on [-bound, bound]: standard deviation bound / sqrt(3).
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert abs(weight.mean().item()) < 0.1 * bound
        assert not projection.bias.any()


# -- dropout, hooks, replaced projections, observation ---------------------------------------------------------


def test_dropout_only_while_training() -> None:
    x = numbers(B, 32, 12)
    mha = MultiHeadAttention(12, 3, dropout_p=0.5, dtype=torch.float64)
    assert mha.training
    one, two = mha(x), mha(x)
    assert (one - two).abs().max() > 1e-3
    torch.manual_seed(5)
    one, seen = mha(x, observe=Observe(weights=True, dropped_weights=True))
    torch.manual_seed(5)
    assert torch.equal(mha(x), one)
    kept = seen.dropped_weights != 0
    assert 0.4 < kept.double().mean() < 0.6
    close(seen.dropped_weights, torch.where(kept, seen.weights * 2, 0.0))

    mha.eval()
    quiet = MultiHeadAttention(12, 3, dtype=torch.float64)
    quiet.load_state_dict(mha.state_dict())
    assert torch.equal(mha(x), quiet(x))


def test_hooks_on_every_module_fire_once_whatever_is_observed() -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x, memory = numbers(B, L, 12), numbers(B, S, 12)
    fired: list[str] = []
    for name in (*PROJECTIONS, "core"):
        mha.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    for options in ({}, {"mask": Causal()}, {"observe": Observe.all()}, {"backend": "reference"}):
        fired.clear()
        mha.eval()(x, memory, **options)
        assert fired == ["q_proj", "k_proj", "v_proj", "core", "out_proj"]
    with torch.no_grad():
        fired.clear()
        mha(x)
        assert len(fired) == 5


def test_a_hook_may_change_a_projection() -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x = numbers(B, L, 12)
    before = mha(x)
    handle = mha.v_proj.register_forward_hook(lambda module, args, output: output * 3)
    close(mha(x), before * 3)  # biases are zero, so the output is linear in the values
    handle.remove()
    close(mha(x), before)


def test_projections_with_an_activation() -> None:
    """Some published layers put a ReLU after each projection: replace the modules."""
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    random_biases(mha)
    for name in PROJECTIONS:
        setattr(mha, name, nn.Sequential(mha.get_submodule(name), nn.ReLU()))
    q, k, v = numbers(B, L, 12), numbers(B, S, 12), numbers(B, S, 12, seed=1)
    found = mha(q, k, v)
    assert (found >= 0).all()
    assert (found == 0).any()
    close(found, by_the_formula(mha, q, k, v, torch.ones(B, L, S, dtype=torch.bool)))
    with torch.no_grad():
        relu_first = torch.relu(q @ mha.q_proj[0].weight.mT + mha.q_proj[0].bias)
    _, seen = mha(q, k, v, observe=Observe(query_projected=True))
    close(seen.query_projected, relu_first)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mask", [None, Causal(), KeyPadding([4, 0]), Window(1, 0) & QueryPadding([3, 5])])
def test_observing_changes_no_bit(mask: ch.Mask | None, train: bool) -> None:
    mha = MultiHeadAttention(12, 3, dropout_p=0.25 if train else 0.0).train(train)
    x = numbers(B, L, 12, dtype=torch.float32)
    torch.manual_seed(1)
    expected = mha(x, mask=mask)
    every = {**{name: True for name in Observe.all().__dataclass_fields__ if getattr(Observe.all(), name) is True}}
    for observe in (Observe(), Observe(entropy=True), Observe(**every, top_k=3, offsets=[0, 1], pooled=2)):
        torch.manual_seed(1)
        output, seen = mha(x, mask=mask, observe=observe)
        assert torch.equal(output, expected)
        assert set(seen) == {
            name
            for name in (
                *STATISTICS,
                *MAPS,
                *SPLIT,
                *MODULE,
            )
            if observe.asks(name)
        }


def test_what_is_seen_adds_up_step_by_step() -> None:
    mha = MultiHeadAttention(12, 6, num_kv_heads=2, value_head_dim=5, kdim=7, vdim=11, dtype=torch.float64)
    random_biases(mha)
    q, k, v = numbers(B, L, 12), numbers(B, S, 7), numbers(B, S, 11)
    mask = Causal() & KeyPadding([6, 3])
    output, seen = mha(q, k, v, mask=mask, observe=Observe.all())
    assert torch.equal(seen.query_projected, mha.q_proj(q))
    assert torch.equal(seen.key_projected, mha.k_proj(k))
    assert torch.equal(seen.value_projected, mha.v_proj(v))
    for split, projected, heads in (
        ("query", "query_projected", 6),
        ("key", "key_projected", 2),
        ("value", "value_projected", 2),
    ):
        width = seen[projected].shape[-1] // heads
        for h in range(heads):
            assert torch.equal(seen[split][:, h], seen[projected][..., h * width : (h + 1) * width])
    keys, values = (seen[name].repeat_interleave(3, dim=1) for name in ("key", "value"))
    close(seen.scores, seen.query @ keys.mT * 2**-0.5)
    visible = mask.dense(L, S)
    close(seen.masked_scores.masked_fill(~visible, 0.0), seen.scores.masked_fill(~visible, 0.0))
    assert torch.equal(torch.isneginf(seen.masked_scores), ~visible.expand(B, 6, L, S))
    close(seen.weights, torch.softmax(seen.masked_scores, -1))
    assert torch.equal(seen.dropped_weights, seen.weights)
    close(seen.context, seen.weights @ values)
    for h in range(6):
        assert torch.equal(seen.merged[..., 5 * h : 5 * h + 5], seen.context[:, h])
    assert torch.equal(seen.output, output)
    assert torch.equal(output, mha.out_proj(seen.merged))


# -- padding and dead rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_a_dead_row_gives_the_bias_of_the_output_projection(train: bool) -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64).train(train)
    random_biases(mha)
    x = numbers(3, L, 12).requires_grad_()
    output, seen = mha(x, mask=KeyPadding([L, 0, 2]) & QueryPadding([L, L, 2]), observe=Observe.all())
    dead = torch.tensor([[False] * 5, [True] * 5, [False] * 2 + [True] * 3])
    assert torch.equal(output[dead], mha.out_proj.bias.expand(8, -1))
    rows = dead[:, None].expand(3, 3, L)
    assert not seen.weights[rows].any()
    assert not seen.context[rows].any()
    assert not seen.entropy[rows].any()
    assert torch.isneginf(seen.lse[rows]).all()
    output[dead].sum().backward()
    assert not x.grad.any()
    assert torch.equal(mha.out_proj.bias.grad, torch.full((12,), 8.0, dtype=torch.float64))
    assert not mha.v_proj.weight.grad.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_padded_batch_equals_single_sequences(side: str, causal: bool, dtype: torch.dtype) -> None:
    """Two layers, so that a padded query's output would come back as a key of the second."""
    layers = [MultiHeadAttention(12, 3, dtype=dtype) for _ in range(2)]
    for layer in layers:
        random_biases(layer)
    lengths = [7, 3, 0, 1, 5]
    mask = KeyPadding(lengths, side=side) & Causal() if causal else KeyPadding(lengths, side=side)
    batch = numbers(5, 7, 12, dtype=dtype)
    real = [slice(0, n) if side == "right" else slice(7 - n, 7) for n in lengths]
    poisoned = batch.clone()
    for i, rows in enumerate(real):
        keep = torch.zeros(7, dtype=torch.bool)
        keep[rows] = True
        poisoned[i, ~keep] = torch.nan
    for given in (batch, poisoned):
        found = given
        for layer in layers:
            found = layer(found, mask=mask)
        for i, rows in enumerate(real):
            alone = batch[i : i + 1, rows]
            for layer in layers:
                alone = layer(alone, mask=Causal() if causal else None)
            scale = alone.abs().max().item() if alone.numel() else 1.0
            torch.testing.assert_close(found[i : i + 1, rows], alone, rtol=0, atol=1e-6 * max(scale, 1.0))


def test_a_real_token_does_not_depend_on_its_batch_mates() -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x, other = numbers(3, L, 12), numbers(3, L, 12, seed=1)
    mask = Causal() & KeyPadding([4, 5, 2])
    expected = mha(x, mask=mask)[0, :4]
    for mates in itertools.product([x[1:], other[1:], other[1:] * torch.nan], [[5, 2], [1, 0]]):
        changed = torch.cat([x[:1], mates[0]])
        close(mha(changed, mask=Causal() & KeyPadding([4, *mates[1]]))[0, :4], expected)


# -- the module as a module ------------------------------------------------------------------------------------


def test_state_dict_names() -> None:
    names = [f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")]
    assert list(MultiHeadAttention(12, 3).state_dict()) == names
    assert list(MultiHeadAttention(12, 3, bias=False).state_dict()) == names[::2]
    assert [name for name, _ in MultiHeadAttention(12, 3).named_children()] == [*PROJECTIONS, "core"]


def test_deepcopy_is_independent() -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x = numbers(B, L, 12)
    twin = copy.deepcopy(mha)
    assert torch.equal(twin(x), mha(x))
    with torch.no_grad():
        twin.out_proj.weight.zero_()
    assert not twin(x).any()
    assert mha(x).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, Causal() & KeyPadding([5, 3])])
def test_half_precision(dtype: torch.dtype, mask: ch.Mask | None) -> None:
    torch.manual_seed(2)
    mha = MultiHeadAttention(12, 3, dtype=dtype)
    exact = copy.deepcopy(mha).double()
    x = numbers(B, L, 12, dtype=dtype)
    output, seen = mha(x, mask=mask, observe=Observe(weights=True, entropy=True))
    assert output.dtype == dtype
    assert seen.weights.dtype == seen.entropy.dtype == torch.float32
    expected = exact(x.double(), mask=mask)
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error < 4 * torch.finfo(dtype).eps


def test_meta_device_and_dtype() -> None:
    mha = MultiHeadAttention(12, 3, device="meta", dtype=torch.bfloat16)
    assert {parameter.device.type for parameter in mha.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in mha.parameters()} == {torch.bfloat16}


def test_attn_bias_reaches_the_scores() -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x, bias = numbers(B, L, 12), numbers(B, 3, L, L)
    _, plain = mha(x, observe=Observe(scores=True))
    _, seen = mha(x, attn_bias=bias, observe=Observe(scores=True, weights=True))
    close(seen.scores, plain.scores + bias)
    close(seen.weights, torch.softmax(plain.scores + bias, -1))


def test_double_backward_and_gradcheck() -> None:
    mha = MultiHeadAttention(4, 2, dtype=torch.float64)
    random_biases(mha)
    x = numbers(2, 3, 4).requires_grad_()
    mask = Causal() & KeyPadding([3, 2])
    assert torch.autograd.gradcheck(lambda x: mha(x, mask=mask), x)
    assert torch.autograd.gradgradcheck(lambda x: mha(x, mask=mask, backend="blockwise"), x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch\'s own, in jvp
@pytest.mark.parametrize("twice", [True, False], ids=["double backward", "forward mode"])
def test_second_derivatives_without_naming_a_backend(twice: bool) -> None:
    mha = MultiHeadAttention(4, 2, dtype=torch.float64)
    x = numbers(2, 3, 4).requires_grad_()
    if twice:
        assert torch.autograd.gradgradcheck(mha, x)
    else:
        torch.func.jvp(mha, (x.detach(),), (x.detach(),))


# -- wrong calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Causal(), KeyPadding([5, 3]), torch.ones(5, 5, dtype=torch.bool)])
def test_a_mask_in_the_place_of_key_or_value(mask: Any) -> None:
    mha = MultiHeadAttention(12, 3, dtype=torch.float64)
    x = numbers(B, L, 12)
    with pytest.raises(TypeError, match=r"got a mask in the place of key: pass it by name, mask=\.\.\."):
        mha(x, mask)
    with pytest.raises(TypeError, match="got a mask in the place of value"):
        mha(x, x, mask)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((200, 7), {}, r"embed_dim must be divisible by num_heads, but 200 = 28 x 7 \+ 4"),
        ((0, 1), {}, r"embed_dim must be at least 1, not 0"),
        ((12, 0), {}, r"num_heads must be at least 1, not 0"),
        ((12, -3), {}, r"num_heads must be at least 1, not -3"),
        ((12, 6), {"num_kv_heads": 0}, r"num_kv_heads must be at least 1, not 0"),
        ((12, 6), {"num_kv_heads": 4}, r"num_heads must be a multiple of num_kv_heads: 6 is not one of 4"),
        ((12, 3), {"dropout_p": 2.0}, r"dropout_p must be between 0 and 1, not 2.0"),
        ((12, 3), {"dropout_p": math.nan}, r"dropout_p must be between 0 and 1, not nan"),
    ],
)
def test_wrong_sizes(arguments: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*arguments, **options)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", ["head_dim", "value_head_dim", "kdim", "vdim"])
@pytest.mark.parametrize("size", [0, -1])
def test_widths_below_one(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not {size}"):
        MultiHeadAttention(12, 3, **{name: size})


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scale_is_checked_when_the_module_is_built(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be a finite number"):
        MultiHeadAttention(12, 3, scale=scale)
