"""Faults that were found by use, each with the right value; by the place where they were."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clearhead as ch
from clearhead.backends import BACKENDS
from clearhead.plan import TILE_ELEMENTS

B, H, L, E = 2, 3, 5, 7


def inputs(*lengths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, n, E).to(dtype) for n in (lengths or (L, L, L))]


# -- masks are values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        ch.KeyPadding,
        ch.QueryPadding,
        ch.Prefix,
        lambda t: ch.KeyPadding(real=t[:, None] > torch.arange(L)),
        ch.Segments,
    ],
)
def test_a_mask_does_not_change_with_the_callers_tensor(build: Any) -> None:
    source = torch.tensor([2, 3]) if build is not ch.Segments else torch.tensor([0, 0, 1, 1, 1])
    mask = build(source)
    before = mask.dense(L, L).clone(), repr(mask), mask.visible_fraction(L, L)
    source.fill_(5)
    assert torch.equal(mask.dense(L, L), before[0])
    assert (repr(mask), mask.visible_fraction(L, L)) == before[1:]


def test_a_real_tensor_is_copied_too() -> None:
    real = torch.tensor([[True, True, False, False, False]])
    mask = ch.KeyPadding(real=real)
    real[:] = True
    assert mask == ch.KeyPadding(real=[[1, 1, 0, 0, 0]])


def test_replaced_leaves_do_not_keep_old_host_numbers() -> None:
    mask = torch.utils._pytree.tree_map(lambda t: t + 2, ch.KeyPadding([1, 2]))
    q, k, v = inputs()
    torch.testing.assert_close(ch.attention(q, k, v, mask), ch.attention(q, k, v, ch.KeyPadding([3, 4])))


def test_an_explanation_shows_negations_and_groups() -> None:
    mask = ch.Causal() & ~ch.Prefix(1)
    assert "  no   ~Prefix(lengths=[1]): the first 1 keys" in mask.explain(5, 5, query=3, key=0)
    lines = ((ch.Causal() | ch.Prefix(2)) & ~(ch.KeyPadding([3]) & ch.Causal())).explain(5, 5, query=0, key=1)
    assert lines.splitlines() == [
        "query 0 may attend to key 1 (batch 0, head 0)",
        "  yes  | (one part must say yes):",
        "    no   Causal(): key 1 comes 1 after the query's position 0",
        "    yes  Prefix(lengths=[2]): the first 2 keys are open to all queries",
        "  yes  ~ (the part must say no):",
        "    no   & (every part must say yes):",
        "      yes  KeyPadding(lengths=[3]): key 1 is real, item 0 has 3 real keys",
        "      no   Causal(): key 1 comes 1 after the query's position 0",
    ]


def test_segments_reach_their_own_keys_only() -> None:
    ids = torch.arange(100) // 10
    mask = ch.Segments(ids)
    assert mask._reach(range(20, 40), 100, 100) == range(20, 40)
    assert len(ch.Segments(ids, ids + 100)._reach(range(100), 100, 100)) == 0
    shuffled = ids[torch.randperm(100, generator=torch.Generator().manual_seed(1))]
    mask = ch.Segments(torch.stack([ids, shuffled]))
    dense = mask.dense(100, 100)[:, 0]
    for start in range(0, 100, 7):
        rows = range(start, min(100, start + 7))
        seen = dense[:, rows.start : rows.stop].any(1).any(0).nonzero().flatten()
        assert mask._reach(rows, 100, 100) == range(int(seen[0]), int(seen[-1]) + 1)


def test_a_tensor_beside_a_mask_names_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"mask & Allowed\(tensor, axes='qk'\)"):
        ch.Causal() & torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ch.MaskError, match=r"A flag for each token goes in KeyPadding\(real=\.\.\.\)"):
        ch.KeyPadding(torch.ones(2, 3, dtype=torch.bool))


# -- one meaning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "blockwise", "reference"])
def test_autocast_does_not_reach_into_a_call(backend: str) -> None:
    q, k, v = inputs()
    observe = ch.Observe(lse=True, entropy=True, weights=True)
    plain, seen = ch.attention(6 * q, k, v, backend=backend, observe=observe)
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_seen = ch.attention(6 * q, k, v, backend=backend, observe=observe)
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)
    for name in ("lse", "entropy", "weights"):
        assert torch.equal(seen[name], cast_seen[name])


def test_the_module_under_autocast_is_torchs() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    ours, x = ch.MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        mine, expected = ours(x), theirs(x, x, x, need_weights=False)[0]
        _, seen = ours(x, observe=ch.Observe(weights=True))
    assert mine.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(mine, expected, atol=2e-2, rtol=2e-2)
    assert seen.weights.dtype == torch.float32
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(2, 4, 5), atol=1e-6, rtol=0)


def test_a_scale_that_vanishes_in_float32_gives_the_mean() -> None:
    q, k, v = inputs()
    for mask in (None, ch.Causal(align="start")):
        expected = ch.attention(q, k, v, mask, scale=0.0)
        torch.testing.assert_close(ch.attention(q, k, v, mask, scale=1e-46), expected)
        assert expected.isfinite().all()


def test_a_wide_bias_means_the_same_on_every_backend() -> None:
    q, k, v = inputs()
    bias = torch.zeros(L, L, dtype=torch.float64)
    bias[1] = torch.finfo(torch.float64).min  # as a float32 it would be minus infinity, which alone hides
    bias[2, 3], bias[3, 4], bias[4, 0] = -1e300, 1e300, -math.inf
    truth = ch.attention(q.double(), k.double(), v.double(), attn_bias=bias, backend="reference")
    for backend in BACKENDS:
        out, seen = ch.attention(q, k, v, attn_bias=bias, backend=backend, observe=ch.Observe(weights=True))
        torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=1e-5)
        assert (seen.weights[:, :, 4, 0] == 0).all()


def test_a_finite_bias_hides_nothing_in_half_precision() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    bias = torch.full((L, L), -1e300, dtype=torch.float64)
    for backend in BACKENDS:
        out = ch.attention(q, k, v, attn_bias=bias, backend=backend)
        torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(v), atol=1e-2, rtol=1e-2)


def test_a_learned_scale_is_refused_not_detached() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match="a learned scale is a factor on the query"):
        ch.attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True))


def test_a_learned_bias_without_grad_takes_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: called.append(1) or original(*a, **k)
    )
    q, k, v = inputs()
    with torch.no_grad():
        ch.attention(q, k, v, attn_bias=torch.randn(L, L, requires_grad=True), backend="sdpa")
    assert called


@pytest.mark.parametrize("cross", [False, True])
def test_hidden_nan_reaches_no_parameter(cross: bool) -> None:
    torch.manual_seed(0)
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    padding = ch.KeyPadding([5, 3])
    mask = padding if cross else padding & ch.QueryPadding([5, 3])

    def gradients(fill: float) -> list[torch.Tensor]:
        mha.zero_grad()
        memory = x.clone()
        memory[1, 3:] = fill
        out = mha(x, memory, mask=mask) if cross else mha(memory, mask=mask)
        out.sum().backward()
        return [p.grad.clone() for p in mha.parameters() if p.grad is not None]

    for clean, poisoned in zip(gradients(0.0), gradients(math.nan), strict=True):
        torch.testing.assert_close(clean, poisoned)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", [1e5, 1e20, torch.finfo(torch.float32).max, math.nan])
def test_what_autocast_makes_infinite_reaches_no_parameter(fill: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    mask = ch.KeyPadding([5, 3]) & ch.QueryPadding([5, 3])

    def gradients(fill: float) -> list[torch.Tensor]:
        mha.zero_grad()
        padded = x.clone()
        padded[1, 3:] = fill
        with torch.autocast("cpu", dtype):
            mha(padded, mask=mask).float().sum().backward()
        return [p.grad.clone() for p in mha.parameters() if p.grad is not None]

    for clean, spoilt in zip(gradients(0.0), gradients(fill), strict=True):
        torch.testing.assert_close(clean, spoilt, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("fill", [1e18, 1e20, 1e30])
def test_large_padding_of_queries_without_a_loss_reaches_no_parameter(fill: float, backend: str | None) -> None:
    # Padded queries see real keys here: their scores are huge, and their gradient is 0.
    mask = ch.KeyPadding([4, 2])
    for seed in range(7):
        torch.manual_seed(seed)
        mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 4, 8)
        x[1, 2:] = fill * torch.randn(2, 8)
        out = mha(x, mask=mask, backend=backend)
        (out[0].sum() + out[1, :2].sum()).backward()
        for name, parameter in mha.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all(), f"{name} at seed {seed}"


def test_visible_nan_stays_visible_in_the_module() -> None:
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    x[1, 2] = math.nan
    out = mha(x, mask=ch.Causal())
    assert out[0].isfinite().all()
    assert out[1, :2].isfinite().all()
    assert out[1, 2:].isnan().all()


# -- looking -------------------------------------------------------------------------------------------------------


def test_the_last_real_query_is_found_without_an_l_x_s_mask() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes())
            return out

    n = 4096
    q = torch.randn(1, 1, n, 4)
    with Largest() as largest:
        mask = ch.Window(left=64, right=0) & ch.QueryPadding([3000])
        _, seen = ch.attention(q, q, q, mask, observe=ch.Observe(weights=ch.At(last_real=True)))
    assert seen.weights[0, 0, 0].nonzero().max() == 2999
    assert largest.numel <= 8 * TILE_ELEMENTS  # n * n bytes are four times that


def test_pictures_refuse_a_choice_of_heads_or_queries(tmp_path: Any) -> None:
    q, k, v = inputs()
    for at in (ch.At(heads=[1, 0, 2]), ch.At(queries=[4, 3, 2, 1, 0])):
        _, seen = ch.attention(q, k, v, observe=ch.Observe(weights=at))
        with pytest.raises(ValueError, match="plot shows whole maps, but At"):
            seen.plot()
    mha = ch.MultiHeadAttention(8, 2)
    with ch.record(mha, ch.Observe(weights=ch.At(queries=[1]))) as recording:
        mha(torch.randn(1, 3, 8))
    with pytest.raises(ValueError, match="has nothing to draw"):
        recording.to_html(tmp_path / "page.html")


@pytest.mark.parametrize("choice", [[True, False], "12", [0.7]])
def test_a_choice_is_of_integers(choice: Any) -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"At\(heads=\.\.\.\) takes an int"):
        ch.attention(q, k, v, observe=ch.Observe(weights=ch.At(heads=choice)))


@pytest.mark.parametrize("wrong", [{"entropy": "yes"}, {"offsets": 3}, {"offsets": [0.5]}])
def test_an_observation_of_the_wrong_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"Observe\({next(iter(wrong))}=\.\.\.\) takes"):
        ch.Observe(**wrong)


def test_observations_and_what_was_seen_can_be_compared() -> None:
    q, k, v = inputs()
    observe = ch.Observe(mass={"a": torch.ones(1, L, dtype=torch.bool)})
    seen = [ch.attention(q, k, v, observe=observe)[1] for _ in range(2)]
    assert observe != ch.Observe(mass={"a": torch.ones(1, L, dtype=torch.bool)})
    assert seen[0] == seen[0]
    assert seen[0] != seen[1]


def test_what_is_read_once_is_kept() -> None:
    q, k, v = inputs()
    observe = ch.Observe(weights=ch.At(heads=(i for i in [2, 0])), offsets=(d for d in [0, 1]))
    _, seen = ch.attention(q, k, v, observe=observe)
    assert seen.weights.shape == (B, 2, L, L)
    assert seen.offsets.shape == (B, H, L, 2)
    torch.testing.assert_close(seen.offsets[:, 2, :, 0], seen.weights[:, 0].diagonal(dim1=-2, dim2=-1))


def test_choices_that_python_can_index_by() -> None:
    q, k, v = inputs()
    _, whole = ch.attention(q, k, v, observe=ch.Observe(weights=True))
    for choice, expected in (
        (np.int64(1), [1]),
        (np.array([2, 0]), [2, 0]),
        (range(2), [0, 1]),
        (slice(2, 1), []),
        (slice(None, None, -1), [2, 1, 0]),
    ):
        _, seen = ch.attention(q, k, v, observe=ch.Observe(weights=ch.At(heads=choice)))
        assert torch.equal(seen.weights, whole.weights[:, expected]), choice


# -- from and to torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_to_torch_with_one_bias_missing(without: str) -> None:
    torch.manual_seed(0)
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    for projection in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj):
        nn.init.normal_(projection.bias)  # type: ignore[union-attr, arg-type]
    setattr(mha, without, nn.Linear(8, 8, bias=False))
    torch.testing.assert_close(mha.to_torch()(x, x, x)[0], mha(x))
    back = ch.MultiHeadAttention.from_torch(mha.to_torch())
    torch.testing.assert_close(back(x), mha(x))


def test_to_torch_refuses_a_projection_that_computes_its_weight() -> None:
    mha = ch.MultiHeadAttention(8, 2)
    mha.q_proj.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(ValueError, match=r"plain nn\.Linear"):
        mha.to_torch()


@pytest.mark.parametrize("place", ["q_proj", "out_proj", "core"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_to_torch_refuses_what_is_hooked(place: str, kind: str) -> None:
    mha = ch.MultiHeadAttention(8, 2)
    getattr(mha.get_submodule(place), f"register_{kind}")(lambda *_: None)
    with pytest.raises(ValueError, match=r"no hooks on them or on core"):
        mha.to_torch()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("in_proj_weight", r"in_proj_weight and q_proj\.weight, k_proj\.weight, v_proj\.weight say the same twice"),
        ("in_proj_bias", r"in_proj_bias and q_proj\.bias, k_proj\.bias, v_proj\.bias say the same twice"),
        ("qkv_proj.weight", r"qkv_proj\.weight and q_proj\.weight, k_proj\.weight"),
        ("k_proj_weight", r"k_proj_weight and k_proj\.weight say the same twice"),
    ],
)
def test_weights_given_twice_are_refused(extra: str, named: str) -> None:
    mha = ch.MultiHeadAttention(8, 2)
    rows = 8 if extra.startswith("k_") else 24
    tensor = torch.zeros(rows) if extra.endswith("bias") else torch.zeros(rows, 8)
    with pytest.raises(RuntimeError, match=named):
        mha.load_state_dict({**mha.state_dict(), extra: tensor})


@pytest.mark.parametrize("wrong", [torch.tensor(1.0), None])
def test_a_packed_weight_that_is_none_is_named(wrong: Any) -> None:
    mha = ch.MultiHeadAttention(8, 2)
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight"):
        mha.load_state_dict({"qkv_proj.weight": wrong})


def test_padding_from_torch_is_padding() -> None:
    mask, _ = ch.mask_from_mha(key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))
    mha = ch.MultiHeadAttention(8, 2)
    with ch.record(mha, ch.Observe(received=True)) as recording:
        mha(torch.randn(2, 5, 8), mask=mask)
    torch.testing.assert_close(recording[0].received.sum(-1), torch.tensor([[5.0, 5.0], [3.0, 3.0]]))


# -- record --------------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_named() -> None:
    class Theirs(nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    model = nn.ModuleDict({"ours": ch.MultiHeadAttention(8, 2), "theirs": Theirs(8, 2)})
    with (
        pytest.warns(UserWarning, match=r"not recorded: theirs \(Theirs has a forward of its own\)"),
        ch.record(model, ch.Observe(entropy=True)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"Theirs has nothing to record.*Theirs has a forward of its own"),
        ch.record(model["theirs"], ch.Observe(entropy=True)),
    ):
        pass


def test_a_compiled_module_is_refused() -> None:
    compiled = torch.compile(ch.MultiHeadAttention(8, 2), backend="eager")
    with (
        pytest.raises(ValueError, match=r"record the module before torch\.compile"),
        ch.record(compiled, ch.Observe(entropy=True)),
    ):
        pass


@pytest.mark.parametrize(("model", "observe"), [(None, ch.Observe()), (nn.Linear(1, 1), None)])
def test_record_takes_a_module_and_an_observe(model: Any, observe: Any) -> None:
    with (
        pytest.raises(TypeError, match=r"record takes a torch\.nn\.Module|observe must be an Observe"),
        ch.record(model, observe),
    ):
        pass


# -- a call is checked before anything is done ---------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mask": ({"mask": ch.KeyPadding([9, 9])}, ch.MaskError, "a length of 9 is more than the 5 keys"),
    "mask of floats": ({"mask": torch.zeros(5, 5)}, ch.MaskError, "must be bool, True = may attend"),
    "bias": ({"attn_bias": torch.zeros(3, 3)}, ch.ShapeError, r"attn_bias must be .* not \(3, 3\)"),
    "observe": ({"observe": True}, TypeError, "observe must be an Observe"),
    "at": ({"observe": ch.Observe(weights=ch.At(heads=9))}, IndexError, r"there are 2 heads"),
    "backend": ({"backend": "x"}, ValueError, "there is no backend 'x'"),
    "can't": ({"backend": "sdpa"}, ch.BackendError, "backend 'sdpa' can't do this call: dropout"),
    "batch": ({"key": torch.zeros(3, 5, 8)}, ch.ShapeError, r"batch size B: got query \(2, 5, 8\), key \(3, 5, 8\)"),
    "length": (
        {"key": torch.zeros(2, 5, 8), "value": torch.zeros(2, 6, 8)},
        ch.ShapeError,
        r"length S: 5 and 6 in query \(2, 5, 8\), key \(2, 5, 8\), value \(2, 6, 8\)",
    ),
    "device": (
        {"key": torch.zeros(2, 5, 8, device="meta")},
        ch.ShapeError,
        "key is on meta and the parameters are on cpu",
    ),
    "integers": ({"key": torch.zeros(2, 5, 8, dtype=torch.int64)}, ch.ShapeError, "key is torch.int64"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_call_projects_and_draws_nothing(
    wrong: dict[str, Any], kind: type[Exception], message: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, x, called = ch.MultiHeadAttention(8, 2, dropout_p=0.5), torch.randn(2, 5, 8), []
    kind_of_projection = type(mha.q_proj)
    forward = kind_of_projection.forward
    monkeypatch.setattr(kind_of_projection, "forward", lambda self, x: called.append(self) or forward(self, x))
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(kind, match=message):
        mha(x, **wrong)
    assert not called
    assert torch.equal(torch.get_rng_state(), before)
    mha(x, mask=ch.Causal())
    assert called == [mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj]
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
def test_what_autocast_leaves_alone_is_named(dtype: torch.dtype) -> None:
    mha = ch.MultiHeadAttention(8, 2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ch.ShapeError, match=f"query is {dtype} and the param"):
        mha(torch.zeros(2, 5, 8, dtype=dtype))


# -- tensors changed in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 600])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("changed", ["query", "key", "value", "bias", "mask", "lengths"])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_change_before_the_backward_pass_is_no_other_gradient(
    backend: str | None, changed: str, second: bool, length: int
) -> None:
    # Either the gradient is that of the call as it was, or it is an error, as in torch.
    def gradient(change: bool) -> torch.Tensor:
        torch.manual_seed(0)
        leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        query, key, value = (leaf * 1 for leaf in leaves)
        allowed, bias = torch.rand(length, length) > 0.5, torch.randn(length, length)
        padding = ch.KeyPadding([length - 2])
        mask = padding if changed == "lengths" else ch.Allowed(allowed, axes="qk") & ch.Causal()
        out = ch.attention(query, key, value, mask, attn_bias=bias, backend=backend)
        if change:
            assert padding.lengths is not None
            where = {
                "query": query,
                "key": key,
                "value": value,
                "bias": bias,
                "mask": allowed,
                "lengths": padding.lengths,
            }
            with torch.no_grad():
                where[changed].zero_()
        (found,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=second)
        if second:
            (found,) = torch.autograd.grad(found.square().sum(), leaves[1])
        return found.detach()

    try:
        found = gradient(True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, gradient(False))


def test_a_mask_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        mask = ch.Allowed(torch.ones(600, 600, dtype=torch.bool).tril(), axes="qk")
    q, k, v = inputs(600, 600, 600)
    for backend in BACKENDS:
        leaf = q.clone().requires_grad_()
        expected = torch.autograd.grad(ch.attention(leaf, k, v, ch.Causal(), backend=backend).sum(), leaf)[0]
        found = torch.autograd.grad(ch.attention(leaf, k, v, mask, backend=backend).sum(), leaf)[0]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_checkpointed_block_runs_twice(layers: int, backend: str | None) -> None:
    class Block(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ch.MultiHeadAttention(8, 2) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer in self.layers:
                x = x + layer(x, mask=ch.Causal(), backend=backend)
            return x

    block, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    block.calls = 0
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    assert block.calls == 2
    torch.testing.assert_close(found, expected)


def test_the_fused_kernels_graph_goes_when_the_backward_pass_is_over() -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    out = ch.attention(q, k, v, backend="sdpa")
    node = out.grad_fn
    while node is not None and not hasattr(node, "once"):
        node = node.next_functions[0][0]
    assert node is not None
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert node.once is not None
    torch.autograd.grad(out.sum(), q)
    assert node.once is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), q)


# -- autograd, compile, export --------------------------------------------------------------------------------------


MASKS = [None, ch.Causal(), ch.Causal() & ch.KeyPadding([5, 3]), ch.Segments([0, 0, 1, 1, 1])]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in jvp
def test_derivatives_of_every_kind(mask: ch.Mask | None) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(dtype=torch.float64))

    def call(*tensors: torch.Tensor, backend: str | None = None) -> torch.Tensor:
        return ch.attention(*tensors, mask, backend=backend)

    assert torch.autograd.gradgradcheck(call, (q, k, v))
    primals = tuple(t.detach() for t in (q, k, v))
    tangents = tuple(torch.randn_like(t) for t in primals)
    _, ours = torch.func.jvp(call, primals, tangents)
    # Central differences of the reference, an independent truth.
    step = 1e-6
    ahead, behind = (
        call(*(p + sign * step * t for p, t in zip(primals, tangents, strict=True)), backend="reference")
        for sign in (1, -1)
    )
    torch.testing.assert_close(ours, (ahead - behind) / (2 * step), atol=1e-7, rtol=1e-6)
    mapped = torch.vmap(lambda x: call(x, *primals[1:]))(torch.stack([primals[0], 2 * primals[0]]))
    torch.testing.assert_close(mapped[1], call(2 * primals[0], *primals[1:]))


def test_a_backward_through_the_fused_kernel_can_be_repeated() -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    out = ch.attention(q, k, v, backend="sdpa")
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), q)[0])


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(2, 1)], ids=repr)
def test_an_exported_program_takes_any_batch_and_length(mask: ch.Mask | None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = ch.MultiHeadAttention(8, 2)

        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            padding = ch.KeyPadding(real=real)
            return self.mha(x, mask=padding if mask is None else mask & padding)

    layer = Layer().eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    real = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    program = torch.export.export(layer, (torch.randn(2, 5, 8), real), dynamic_shapes=(dims, dims))
    x, real = torch.randn(3, 11, 8), torch.rand(3, 11) > 0.3
    torch.testing.assert_close(program.module()(x, real), layer(x, real))


ARGUMENTS = [
    ch.Causal(),
    ch.Window(2, 1, "start"),
    ch.KeyPadding([5, 3]),
    ch.KeyPadding(real=[[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]]),
    ch.QueryPadding([2, 5], side="left"),
    ch.Segments([[0, 0, 1, 1, 1]]),
    ch.Prefix([1, 4]),
    ch.Allowed(torch.eye(5, dtype=torch.bool), axes="qk"),
    ch.Blocked(torch.eye(5, dtype=torch.bool)[:2], axes="bk"),
    (ch.Causal() | ch.Prefix(2)) & ~ch.KeyPadding([1, 0]),
]


@pytest.mark.parametrize("mask", ARGUMENTS, ids=repr)
def test_an_exported_program_that_takes_a_mask_can_be_saved(mask: ch.Mask, tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = ch.MultiHeadAttention(8, 2)

        def forward(self, x: torch.Tensor, mask: ch.Mask) -> torch.Tensor:
            return self.mha(x, mask=mask)

    layer, x = Layer().eval(), torch.randn(2, 5, 8)
    torch.export.save(torch.export.export(layer, (x, mask)), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(program(2 * x, mask), layer(2 * x, mask))


@pytest.mark.parametrize("backend", [None, "sdpa", "blockwise"])
def test_exported_causal_cross_attention_takes_equal_lengths(backend: str | None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = ch.MultiHeadAttention(8, 2)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return self.mha(x, memory, mask=ch.Causal(), backend=backend)

    layer = Layer().eval()
    given = (torch.randn(2, 5, 8), torch.randn(2, 7, 8))
    dims = ({1: torch.export.Dim("queries")}, {1: torch.export.Dim("keys")})
    program = torch.export.export(layer, given, dynamic_shapes=dims).module()
    for queries, keys in ((5, 7), (4, 4), (9, 2), (1, 5)):
        x, memory = torch.randn(2, queries, 8), torch.randn(2, keys, 8)
        torch.testing.assert_close(program(x, memory), layer(x, memory))


@pytest.mark.parametrize("mask", [None, *ARGUMENTS], ids=repr)
@pytest.mark.parametrize("backend", [None, "sdpa", "blockwise", "reference"])
def test_the_meta_device_gives_shapes(backend: str | None, mask: ch.Mask | None) -> None:
    if mask is not None and mask.device is not None:
        mask = mask.to("meta")
    x = torch.empty(2, 5, 8, device="meta")
    mha = ch.MultiHeadAttention(8, 2, device="meta")
    out, seen = mha(x, mask=mask, backend=backend, observe=ch.Observe(lse=True, weights=ch.At(heads=1)))
    assert (out.shape, out.device.type) == (x.shape, "meta")
    assert (seen.lse.shape, seen.weights.shape) == ((2, 2, 5), (2, 1, 5, 5))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_fake_tensors_give_shapes(backend: str | None) -> None:
    with FakeTensorMode():
        mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
        ids, real = torch.tensor([[0, 0, 1, 1, 1]]), torch.ones(2, 5, dtype=torch.bool)
        for mask in (ch.KeyPadding([5, 3]), ch.KeyPadding(real=real), ch.Prefix(2), ch.Segments(ids), ch.Causal()):
            assert mha(x, mask=mask, backend=backend).shape == x.shape


BUILT = {
    "lengths": (ch.KeyPadding, torch.tensor([[5, 3], [2, 1], [0, 4]])),
    "queries": (ch.QueryPadding, torch.tensor([[5, 3], [2, 1], [0, 4]])),
    "real": (
        lambda t: ch.KeyPadding(real=t),
        torch.tensor([[[1, 1, 0, 1, 0]], [[1, 0, 0, 0, 1]], [[0, 1, 1, 1, 1]]]) > 0,
    ),
    "prefix": (ch.Prefix, torch.tensor([[5, 3], [2, 1], [0, 4]])),
    "segments": (ch.Segments, torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 0, 1], [3, 3, 3, 3, 3]])),
}


@pytest.mark.parametrize(("build", "values"), BUILT.values(), ids=BUILT.keys())
def test_a_mask_can_be_built_inside_vmap(build: Any, values: torch.Tensor) -> None:
    q = torch.randn(3, B, H, L, E)
    mapped = torch.vmap(lambda q, t: ch.attention(q, q, q, build(t)))(q, values)
    for i in range(3):
        torch.testing.assert_close(mapped[i], ch.attention(q[i], q[i], q[i], build(values[i])))


def test_a_compiled_program_serves_other_lengths_of_padding() -> None:
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, mask: mha(x, mask=mask), backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([1, 2], [5, 5], [0, 3]):
            mask = ch.Causal() & ch.KeyPadding(lengths)
            torch.testing.assert_close(compiled(x, mask), mha(x, mask=mask))


def test_statistics_compile_whole() -> None:
    q, k, v = inputs()
    torch._dynamo.reset()
    observe = ch.Observe(lse=True, entropy=True, received=True, top_k=2, weights=ch.At(last_real=True))
    compiled = torch.compile(ch.attention, backend="eager", fullgraph=True)
    _, seen = compiled(q, k, v, ch.Causal(), observe=observe)
    _, plain = ch.attention(q, k, v, ch.Causal(), observe=observe)
    for name in ("lse", "entropy", "received", "weights"):
        torch.testing.assert_close(seen[name], plain[name])


def test_a_copy_of_a_module_computes_the_same() -> None:
    mha, x = ch.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    assert torch.equal(copy.deepcopy(mha)(x), mha(x))
