"""Row 1: a sequence or a row with no visible key.

pytorch 41508 (open since 2020), 24816, 27968, 160064, 152028, 190486; unsloth 9848: NaN, or the bare output bias,
or NaN that reaches every gradient, by train/eval, grad mode, need_weights, the mask's dtype, even by whether value
`is` key. Here: weights 0, context 0, output = the output projection's bias, and no gradient through it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import (
    BY_DEFAULT,
    DTYPES,
    FEW,
    FORMS,
    GRAD,
    PLAIN,
    TOLERANCE,
    TYPICAL,
    WAYS,
    Model,
    Way,
    assert_near,
    build,
    flags,
    in_torch,
    merge,
    numbers,
    run,
)

B, L, S = 3, 7, 5
ROW_2 = np.arange(L)[:, None].repeat(S, 1) != 2
HEAD_1 = np.ones((3, L, S), dtype=bool)
HEAD_1[1, 3] = False

# Each leaves some row without a key: a mask, and what it means.
DEAD: dict[str, tuple[Callable[[], ch.Mask | Tensor], oracle.Sees]] = {
    "an item without keys": (lambda: ch.KeyPadding([0, 5, 3]), oracle.key_padding([0, 5, 3], "right", S)),
    "no item has keys": (lambda: ch.KeyPadding([0, 0, 0]), oracle.key_padding([0, 0, 0], "right", S)),
    "causal, L > S": (ch.Causal, oracle.causal(S - L)),
    "padded queries": (lambda: ch.QueryPadding([0, 7, 4]), oracle.query_padding([0, 7, 4], "right", L)),
    "a bare tensor's row": (lambda: torch.from_numpy(ROW_2), oracle.table(ROW_2, "qk")),
    "a row of one head": (lambda: ch.Allowed(torch.from_numpy(HEAD_1), axes="hqk"), oracle.table(HEAD_1, "hqk")),
    "masks without a common key": (
        lambda: ch.Prefix(1) & ch.KeyPadding([2, 2, 2], side="left"),
        lambda b, h, q, k: False,
    ),
    "causal and left padding": (
        lambda: ch.Causal() & ch.KeyPadding([1, 5, 3], side="left"),
        oracle.both(oracle.causal(S - L), oracle.key_padding([1, 5, 3], "left", S)),
    ),
}


def hides(model: Model, dead: str, as_bias: bool) -> dict[str, Tensor | ch.Mask]:
    """The rule as a mask, or as a float bias of -inf."""
    mask, sees = DEAD[dead]
    if not as_bias:
        return {"mask": mask()}
    dtype = next(iter(model.parameters()), numbers(1)).dtype
    return {"attn_bias": torch.zeros(B, 3, L, S, dtype=dtype).masked_fill(~flags(sees, B, L, S), -torch.inf)}


def resting(model: Model) -> Tensor:
    """What attention gives where there is nothing to attend to."""
    projection = getattr(model.layers[0].attention, "out_proj", None)
    return numbers(1) * 0 if projection is None else projection.bias.detach()


def check_dead_rows(
    form: str, dead: str = "an item without keys", way: Way = PLAIN, as_bias: bool = False, dtype: str = "f64"
) -> None:
    """The output is the truth's; without an encoder around it, exactly the bias; what is seen is 0."""
    model = build(form, DTYPES[dtype])
    x, memory = numbers(B, L, 15, dtype=DTYPES[dtype]), numbers(B, S, 15, seed=1, dtype=DTYPES[dtype])
    sees = DEAD[dead][1]
    out = run(model, x, memory, way=way, **hides(model, dead, as_bias))
    assert_near(out, model.truth(x, memory, sees=sees), f"{form} {dead} {way}")
    rows = ~flags(sees, B, L, S).any(dim=-1)  # (B, H, L)
    if len(model.layers) == 1:
        rest = resting(model).to(out.dtype)
        silent = rows.all(dim=1)
        assert (out[silent] == rest).all(), f"{form} {dead} {way}: a dead row is not exactly the output bias"
    for seen in model.seen:
        assert not seen.weights[rows].any(), f"{form} {dead} {way}: a dead row has weights"
        assert not seen.entropy[rows].any()
        assert (seen.lse[rows] == -torch.inf).all()
        assert seen.received.isfinite().all()


def check_dead_gradient(form: str, dead: str = "an item without keys", way: Way = GRAD) -> None:
    """Gradients are finite and those of the truth; none comes through a dead row."""
    model = build(form)
    x, memory = numbers(B, L, 15), numbers(B, S, 15, seed=1)
    mask, sees = DEAD[dead]
    leaves = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
    out = model.train(way.training)(*leaves, mask=mask(), backend=way.backend)
    by_out = numbers(*out.shape, seed=2)
    inputs = [*leaves, *model.parameters()]
    found = torch.autograd.grad(out, inputs, by_out, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in found), f"{form} {dead} {way}: a gradient is not finite"

    step = 1e-5
    for i in range(2):
        direction = numbers(*leaves[i].shape, seed=3)
        ends = []
        for sign in (1, -1):
            moved = [x.double(), memory.double()]
            moved[i] = moved[i] + sign * step * direction.double()
            ends.append((model.truth(*moved, sees=sees) * by_out).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert_near(
            (found[i] * direction).sum(), slope, f"{form} {dead} {way}: slope {i}", max(1e-6, TOLERANCE[x.dtype])
        )

    if len(model.layers) == 1:
        silent = ~flags(sees, B, L, S).any(dim=-1).any(dim=1)
        names = ["x", "memory", *(name for name, _ in model.named_parameters())]
        for name, gradient in zip(names, torch.autograd.grad(out[silent].sum(), inputs), strict=True):
            if name != "layers.0.attention.out_proj.bias":
                assert not gradient.any(), f"{form} {dead} {way}: {name} has a gradient through a dead row"


def check_no_keys_at_all(form: str, way: Way = PLAIN) -> None:
    """A memory of length 0."""
    model = build(form)
    x, memory = numbers(B, L, 15), numbers(B, 0, 15)
    assert_near(run(model, x, memory, way=way), model.truth(x, memory), f"{form} {way}")


def check_compiled(form: str) -> None:
    """The same in one compiled graph."""
    model = build(form)
    x, memory = numbers(B, L, 15), numbers(B, S, 15, seed=1)
    mask, sees = DEAD["causal and left padding"]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(x, memory, mask=mask())
    assert_near(out, model.truth(x, memory, sees=sees), form)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_dead_rows(form, way=way)


@pytest.mark.parametrize("as_bias", [False, True], ids=["bool", "-inf"])
@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_dead_row(form: str, dead: str, as_bias: bool) -> None:
    for way in (Way(), Way(True, True, True), Way(backend="blockwise"), Way(backend="reference")):
        check_dead_rows(form, dead, way, as_bias)


@pytest.mark.parametrize("as_bias", [False, True], ids=["bool", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(form: str, dtype: str, as_bias: bool) -> None:
    for way in TYPICAL:
        check_dead_rows(form, way=way, as_bias=as_bias, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dead", ["an item without keys", "causal, L > S", "a row of one head"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, dead: str, backend: str) -> None:
    for way in [way for way in WAYS[backend] if way.grad and not way.observed]:
        check_dead_gradient(form, dead, way)


@pytest.mark.parametrize("form", FORMS)
def test_no_keys_at_all(form: str) -> None:
    for way in BY_DEFAULT:
        check_no_keys_at_all(form, way)


@pytest.mark.parametrize("form", FORMS[:3])  # where the norms stand makes no difference to a graph
def test_compiled(form: str) -> None:
    check_compiled(form)


@pytest.mark.parametrize("observed", [False, True])
def test_whether_value_is_key_does_not_matter(observed: bool) -> None:
    for form in FORMS:
        model, x, memory = build(form), numbers(B, L, 15), numbers(B, S, 15, seed=1)
        way, mask = Way(observed=observed), ch.KeyPadding([0, 5, 3])
        alone = run(model, x, memory, way=way, mask=mask)
        assert torch.equal(run(model, x, memory, memory, way=way, mask=mask), alone)
        assert torch.equal(run(model, x, memory, memory.clone(), way=way, mask=mask), alone)


def test_one_query_of_one_item() -> None:
    mask = ch.KeyPadding([0])
    for form in FORMS:
        model, x = build(form), numbers(1, 1, 15)
        for way in FEW:
            assert_near(run(model, x, way=way, mask=mask), model.truth(x, sees=lambda *_: False), f"{form} {way}")


def test_the_context_is_exactly_zero() -> None:
    x = numbers(2, 3, 5, 7)
    assert not merge(ch.attention(x, x, x, ch.KeyPadding([0, 0]))).any()


@in_torch
def test_torch_gives_nan_or_not_by_need_weights() -> None:
    mha, x = nn.MultiheadAttention(12, 4, batch_first=True).train(), torch.randn(1, 5, 12)
    hidden = torch.ones(1, 5, dtype=torch.bool)
    assert mha(x, x, x, key_padding_mask=hidden, need_weights=True)[0].isnan().all()
    assert not mha(x, x, x, key_padding_mask=hidden, need_weights=False)[0].isnan().any()
