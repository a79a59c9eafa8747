"""The kernels as torch operators: their registrations hold, and compiled and exported programs call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.utils import counters

import clearhead as ch
from clearhead.backends.native_calls import EVERYTHING, Parts
from clearhead.backends.native_ops import _attend, _attend_backward
from native_checks import needs_kernels

pytestmark = needs_kernels

B, H, G, L, S, E, EV = 2, 4, 2, 5, 7, 6, 3  # batch, heads, key/value heads, lengths, widths


def inputs(dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, L, E), (B, G, S, E), (B, G, S, EV))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def variants() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(B, 1, L, S, generator=generator) < 0.7
    bias = torch.randn(1, H, L, S, generator=generator)
    first, behind = torch.tensor([[1], [0]]), torch.arange(1, L + 1)[None]
    seed = torch.tensor([123456789, 987654321])
    return {
        "plain": {},
        "window": {"parts": Parts(left=-1, right=2)},
        "first and behind": {"parts": Parts(first=first, behind=behind)},
        "visible": {"parts": Parts(right=2, visible=visible)},
        "bias": {"bias": bias.clone().requires_grad_()},
        "bias of one row": {"bias": bias[:1, :1, :1].clone().requires_grad_()},
        "bias without gradient": {"bias": bias},
        "dropout": {"dropout_p": 0.4, "seed": seed},
        "softcap": {"softcap": 0.8},
        "sinks": {"sinks": torch.randn(H, generator=generator).requires_grad_()},
        "sinks without gradient": {"sinks": torch.zeros(H)},
        "all": {
            "softcap": 0.8,
            "sinks": torch.randn(H, generator=generator).requires_grad_(),
            "bias": bias.clone().requires_grad_(),
            "parts": Parts(0, 3, first, behind, visible),
            "dropout_p": 0.4,
            "seed": seed,
        },
    }


def arguments(
    tensors: list[Tensor],
    bias: Tensor | None = None,
    parts: Parts = EVERYTHING,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Any, ...]:
    return (*tensors, bias, *parts, 0.5, dropout_p, seed, [0, 0, 0], softcap, sinks)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in variants()), ("all", torch.bfloat16), ("bias", torch.float16)],
    ids=str,
)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch, with gradients and without."""
    chosen = variants()[name]
    if chosen.get("bias") is not None:
        bias = chosen["bias"]
        chosen["bias"] = bias.detach().to(dtype).requires_grad_(bias.requires_grad)
    half = dtype != torch.float32
    near = {"atol": 2e-2, "rtol": 2e-2} if half else {}
    for grad in (True, False):
        if not grad and chosen.get("bias") is not None:
            chosen["bias"] = chosen["bias"].detach()
        if not grad and chosen.get("sinks") is not None:
            chosen["sinks"] = chosen["sinks"].detach()
        given = arguments(inputs(dtype, grad), **chosen)
        torch.library.opcheck(_attend, given, **near)
        with torch.no_grad():
            context, lse = _attend(*given)
        grads = [chosen.get(name) is not None and chosen[name].requires_grad for name in ("bias", "sinks")]
        detached = tuple(part.detach() if isinstance(part, Tensor) else part for part in given)
        torch.library.opcheck(_attend_backward, (torch.ones_like(context), context, lse, *detached, *grads))


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        (((B, H, 0, E), (B, G, S, E), (B, G, S, EV)), "no queries"),
        (((B, H, L, E), (B, G, 0, E), (B, G, 0, EV)), "no keys"),
        (((0, H, L, E), (0, G, S, E), (0, G, S, EV)), "no items"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_opcheck_of_nothing(shapes: tuple[tuple[int, ...], ...], what: str) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.library.opcheck(_attend, arguments(tensors))


def test_opcheck_of_views() -> None:
    """Strides of the inputs are not those of the results."""
    turned = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs()]
    expanded = [inputs()[0].detach(), *(t.detach()[:, :1].expand(-1, G, -1, -1) for t in inputs()[1:])]
    sliced = [tensor.detach().repeat_interleave(2, dim=-1)[..., ::2] for tensor in inputs()]
    for tensors in (turned, expanded, sliced):
        torch.library.opcheck(_attend, arguments([tensor.requires_grad_() for tensor in tensors]))


def test_the_operators_gradient_is_the_calls() -> None:
    chosen = variants()["all"]
    leaves = [*inputs(), chosen["bias"], chosen["sinks"]]
    context, _ = _attend(*arguments(leaves[:3], **chosen))
    found = torch.autograd.grad(context, leaves, torch.ones_like(context))
    parts, bias = chosen["parts"], chosen["bias"]
    q, k = torch.arange(L)[:, None], torch.arange(S)
    seen = (k >= q) & (k <= q + 3) & (k >= parts.first[:, :, None]) & (k < parts.behind[:, :, None])
    mask = seen[:, None] & parts.visible
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.checks.torch.randint", lambda *args, **kwargs: chosen["seed"])
        out = ch.attention(
            *leaves[:3],
            mask,
            attn_bias=bias,
            scale=0.5,
            dropout_p=0.4,
            softcap=0.8,
            sinks=chosen["sinks"],
            backend="reference",
        )
    assert torch.allclose(out, context, atol=1e-6)
    expected = torch.autograd.grad(out, leaves, torch.ones_like(context))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


# -- compiled --------------------------------------------------------------------------------------------------


class Recorder:
    """A compiler's backend that notes the operators of every graph, forward and backward."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Any, example: Any) -> Any:
        def note(module: Any, _: Any) -> Any:
            self.graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
            return make_boxed_func(module.forward)

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)(graph, example)

    def count(self, name: str) -> int:
        return sum(target.startswith(name) for graph in self.graphs for target in graph)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


MASKS: dict[str, Callable[[], ch.Mask | None]] = {
    "none": lambda: None,
    "causal": ch.Causal,
    "padding": lambda: ch.Causal() & ch.KeyPadding([S, S - 3]),
    "bool": lambda: ch.Allowed(torch.arange(L * S).reshape(L, S) % 3 > 0, axes="qk"),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_compiled_function_calls_the_operators(mask: str) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, mask: ch.Mask | None) -> Tensor:
        return ch.attention(query, key, value, mask) * 2

    recorder = Recorder()
    compiled = torch.compile(call, fullgraph=True, backend=recorder)
    leaves, given = inputs(), MASKS[mask]()
    out = compiled(*leaves, given)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(recorder.graphs) == 2
    assert recorder.count("clearhead.attend.") == 1
    assert recorder.count("clearhead.attend_backward.") == 1
    plain = call(*leaves, given)
    assert torch.equal(out, plain)
    for one, other in zip(gradients, torch.autograd.grad(plain, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_module_calls_the_operators() -> None:
    torch.manual_seed(0)
    mha = ch.MultiHeadAttention(16, 4, num_kv_heads=2)
    x = torch.randn(2, 9, 16, requires_grad=True)
    recorder = Recorder()
    compiled = torch.compile(mha, fullgraph=True, backend=recorder)
    mask = ch.Causal() & ch.KeyPadding([9, 4])
    out = compiled(x, mask=mask)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert recorder.count("clearhead.attend.") == 1
    assert recorder.count("clearhead.attend_backward.") == 1
    plain = mha(x, mask=mask)
    assert torch.allclose(out, plain, atol=1e-6)
    (expected,) = torch.autograd.grad(plain, x, torch.ones_like(out))
    assert torch.allclose(dx, expected, atol=1e-6)


def lengths_of(b: int, n: int) -> Tensor:
    return torch.arange(1, b + 1) * n // (b + 1)


ANY_LENGTH: dict[str, Callable[[int, int, int], ch.Mask | None]] = {
    "none": lambda b, n, s: None,
    "causal": lambda b, n, s: ch.Causal(),
    "window": lambda b, n, s: ch.Window(left=3, right=1),
    "causal & window": lambda b, n, s: ch.Causal() & ch.Window(left=4),
    "padding": lambda b, n, s: ch.KeyPadding(lengths_of(b, s)),
    "causal & padding": lambda b, n, s: ch.Causal() & ch.KeyPadding(lengths_of(b, s), side="left"),
    "causal | prefix": lambda b, n, s: ch.Causal() | ch.Prefix(lengths_of(b, s)),
}


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_one_program_for_all_lengths(name: str) -> None:
    """Forward and backward; the lengths of paddings are tensors of the program, not numbers in it."""
    counters.clear()
    compiled = torch.compile(ch.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, keys in ((5, 7), (6, 8), (9, 31), (64, 65), (130, 131), (600, 700)):
        query, memory = torch.randn(2, 4, length, 8, requires_grad=True), torch.randn(2, 2, keys, 8)
        mask = ANY_LENGTH[name](2, length, keys)
        out = compiled(query, memory, memory, mask)
        (found,) = torch.autograd.grad(out.sum(), query)
        plain = ch.attention(query, memory, memory, mask)
        assert torch.allclose(out, plain, atol=1e-6)
        assert torch.allclose(found, torch.autograd.grad(plain.sum(), query)[0], atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


# -- exported --------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self, mask: ch.Mask | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ch.attention(query, key, value, self.mask)


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(left=3, right=1)], ids=repr)
def test_exported_for_any_batch_and_length(mask: ch.Mask | None) -> None:
    batch, length, keys = (torch.export.Dim(name, min=2) for name in ("batch", "length", "keys"))
    shapes = ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys})
    with torch.no_grad():
        program = torch.export.export(Attend(mask), tuple(inputs(grad=False)), dynamic_shapes=shapes)
    assert any(str(node.target).startswith("clearhead.attend") for node in program.graph.nodes)
    run = program.module()
    for b, queries, count in ((2, 5, 7), (3, 31, 40), (5, 200, 333)):
        query = torch.randn(b, H, queries, E)
        key, value = torch.randn(b, G, count, E), torch.randn(b, G, count, EV)
        assert torch.equal(run(query, key, value), ch.attention(query, key, value, mask))


def test_an_exported_module() -> None:
    torch.manual_seed(0)
    mha = ch.MultiHeadAttention(16, 4).eval()
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    with torch.no_grad():
        program = torch.export.export(mha, (torch.randn(2, 5, 16),), dynamic_shapes=({0: batch, 1: length},))
        assert any(str(node.target).startswith("clearhead.attend") for node in program.graph.nodes)
        x = torch.randn(3, 77, 16)
        assert torch.allclose(program.module()(x), mha(x), atol=1e-6)
