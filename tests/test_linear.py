"""`Linear` is ``nn.Linear``, whichever product it takes; and it takes oneDNN's only where that is the faster one."""

import copy
import math
import pickle
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead import linear as module
from clearhead.linear import MARGIN, PRODUCTS, Linear, linear, race, ratio

pytestmark = pytest.mark.skipif(not module.available(), reason="this torch carries no oneDNN")

ROWS, INNER, OUTER = 37, 53, 41
WAYS = {"torch": math.inf, "onednn": 0.0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Each product decided, and taken at any size."""
    take(request.param, monkeypatch)
    return request.param


@pytest.fixture
def onednn(monkeypatch):
    take("onednn", monkeypatch)


def take(way, monkeypatch):
    monkeypatch.setattr(module, "_ratios", dict.fromkeys(PRODUCTS, WAYS[way]))
    monkeypatch.setattr(module, "WORK", 0)
    monkeypatch.setattr(module, "SIDE", 1)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of what went through oneDNN."""
    heard, product = [], module._onednn

    def listening(input, weight, bias=None):
        heard.append((tuple(input.shape), tuple(weight.shape)))
        return product(input, weight, bias)

    monkeypatch.setattr(module, "_onednn", listening)
    return heard


def make(bias=True, seed=0):
    torch.manual_seed(seed)
    return Linear(INNER, OUTER, bias=bias)


def exact(layer):
    """The same layer of torch's own class, in float64."""
    own = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=torch.float64)
    own.load_state_dict(layer.state_dict())
    return own


def close(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    if expected.numel():
        assert (found.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


INPUTS = {
    "rows": lambda: torch.randn(ROWS, INNER),
    "batch": lambda: torch.randn(3, 7, INNER),
    "four axes": lambda: torch.randn(2, 3, 5, INNER),
    "every other column": lambda: torch.randn(ROWS, 2 * INNER)[:, ::2],
    "transposed": lambda: torch.randn(INNER, ROWS).t(),
    "axes swapped": lambda: torch.randn(7, 3, INNER).transpose(0, 1),
    "one row for all": lambda: torch.randn(1, INNER).expand(ROWS, INNER),
    "one value for all": lambda: torch.randn(()).expand(ROWS, INNER),
    "rows that overlap": lambda: torch.randn(ROWS + INNER - 1).unfold(0, INNER, 1),
    "rows a half apart": lambda: torch.randn(3, INNER + 6 * 20).unfold(1, INNER, 20),
    "inside another": lambda: torch.randn(ROWS + 2, INNER + 3)[1:-1, 2:-1],
    "negated view": lambda: torch.randn(ROWS, INNER, dtype=torch.complex64).conj().imag,
    "one row": lambda: torch.randn(1, INNER),
    "a vector": lambda: torch.randn(INNER),
    "no rows": lambda: torch.randn(0, INNER),
    "no rows in a batch": lambda: torch.randn(2, 0, INNER),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", INPUTS)
def test_output_and_gradients_are_those_of_float64(way, kind, bias):
    layer = make(bias)
    own = exact(layer)
    x = INPUTS[kind]().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    output, expected = layer(x), own(x64)
    close(output, expected)
    with torch.no_grad():
        assert torch.equal(layer(x), output)
    grad = torch.randn(expected.shape)
    found = torch.autograd.grad(output, [x, *layer.parameters()], grad)
    for gradient, wanted in zip(
        found, torch.autograd.grad(expected, [x64, *own.parameters()], grad.double()), strict=True
    ):
        close(gradient, wanted)


def test_onednn_takes_all_three_products(onednn, calls):
    make()(torch.randn(3, 7, INNER, requires_grad=True)).sum().backward()
    assert calls == [
        ((3, 7, INNER), (OUTER, INNER)),
        ((3, 7, OUTER), (INNER, OUTER)),
        ((OUTER, 21), (INNER, 21)),
    ]


def test_the_output_can_be_changed_in_place(way):
    """As residual connections do, and activations with inplace=True."""
    layer = make()
    own = exact(layer)
    x = torch.randn(3, 7, INNER)
    more, grad = torch.randn(3, 7, OUTER), torch.randn(3, 7, OUTER)
    output, expected = layer(x), own(x.double())
    output += more
    output.relu_()
    expected = (expected + more.double()).relu()
    close(output, expected)
    wanted = torch.autograd.grad(expected, list(own.parameters()), grad.double())
    for found, gradient in zip(torch.autograd.grad(output, list(layer.parameters()), grad), wanted, strict=True):
        close(found, gradient)


@pytest.mark.parametrize(
    "kind", ["every other row", "rows that overlap", "transposed", "every other value", "one for all"]
)
def test_parameters_of_any_layout(way, kind):
    """OneDNN reads a bias as if it had no strides."""
    layer = make()
    weight, bias = {
        "rows that overlap": (torch.randn(OUTER + INNER - 1).unfold(0, INNER, 1), torch.randn(OUTER)),
        "every other row": (torch.randn(2 * OUTER, INNER)[::2], torch.randn(OUTER)),
        "transposed": (torch.randn(INNER, OUTER).t(), torch.randn(OUTER)),
        "every other value": (torch.randn(OUTER, INNER), torch.randn(2 * OUTER)[::2]),
        "one for all": (torch.randn(OUTER, INNER), torch.randn(1).expand(OUTER)),
    }[kind]
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    x = torch.randn(ROWS, INNER)
    close(layer(x), F.linear(x.double(), weight.double(), bias.double()))


@pytest.mark.parametrize("wanted", ["input", "weight", "bias"])
def test_only_the_gradient_that_is_wanted(onednn, calls, wanted):
    layer, x = make(), torch.randn(ROWS, INNER)
    tensors = {"input": x, "weight": layer.weight, "bias": layer.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == wanted)
    layer(x).square().sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [wanted]
    assert len(calls) == (1 if wanted == "bias" else 2)
    layer64, x64 = exact(layer), x.detach().double().requires_grad_()
    layer64(x64).square().sum().backward()
    close(tensors[wanted].grad, {"input": x64, "weight": layer64.weight, "bias": layer64.bias}[wanted].grad)


def test_second_and_third_derivatives(onednn):
    layer = make()
    own = exact(layer)

    def derivatives(run, x):
        found, value = [], run(x).pow(4).mean()
        for _ in range(3):
            first = torch.autograd.grad(value, [x, run.weight, run.bias], create_graph=True)
            found += first
            value = sum(gradient.pow(2).sum() for gradient in first)
        return found

    x = torch.randn(ROWS, INNER)
    found = derivatives(layer, x.requires_grad_())
    expected = derivatives(own, x.detach().double().requires_grad_())
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_changed_weights_are_noticed_in_the_backward_pass(onednn):
    layer = make()
    output = layer(torch.randn(ROWS, INNER, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_hooks_are_called_as_ever(way):
    layer, heard = make(), []
    layer.register_forward_pre_hook(lambda _, args: heard.append("before") or (2 * args[0],))
    layer.register_forward_hook(lambda *_: heard.append("after"))
    layer.register_full_backward_hook(lambda *_: heard.append("backward"))
    x = torch.randn(ROWS, INNER)
    output = layer(x.requires_grad_())
    output.sum().backward()
    assert heard == ["before", "after", "backward"]
    close(output, exact(layer)(2 * x.detach().double()))


def test_state_copies_and_pickles_are_those_of_nn_linear(way):
    layer, own = make(), nn.Linear(INNER, OUTER)
    assert list(layer.state_dict()) == list(own.state_dict())
    own.load_state_dict(layer.state_dict(), strict=True)
    back = make(seed=1)
    back.load_state_dict(own.state_dict(), strict=True)
    x = torch.randn(ROWS, INNER)
    for other in (back, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is Linear
        assert torch.equal(other(x), layer(x))
    assert repr(layer) == repr(own)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    own.reset_parameters()
    assert torch.equal(layer.weight, own.weight)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_it_can_be_made_the_very_class_for_tools_that_want_no_subclass():
    model = nn.Sequential(make())
    x = torch.randn(ROWS, INNER)
    expected = model(x)
    for layer in model:
        layer.__class__ = nn.Linear
    assert torch.equal(model(x), expected)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert isinstance(quantised[0], torch.ao.nn.quantized.dynamic.Linear)
    assert (quantised(x) - expected).abs().max() < 0.05 * expected.abs().max()


def test_without_gradients_and_recomputed(way):
    layer, x = make(), torch.randn(ROWS, INNER, requires_grad=True)
    expected = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], gradient)


def test_reparametrised_weights(onednn, calls):
    """Their value is an ordinary tensor, made anew at every call."""
    layer = nn.utils.parametrizations.weight_norm(make())
    own = nn.utils.parametrizations.weight_norm(nn.Linear(INNER, OUTER).double())
    own.load_state_dict(layer.state_dict())
    x = torch.randn(ROWS, INNER)
    layer(x).square().mean().backward()
    own(x.double()).square().mean().backward()
    assert len(calls) == 2
    for found, expected in zip(layer.parameters(), own.parameters(), strict=True):
        close(found.grad, expected.grad)


# Torch's own: forward-mode differentiation and tracing go through what it calls deprecated.
old_names = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Kept(torch.Tensor):
    """A subclass that only wants to be kept."""


class Tagged(torch.Tensor):
    """A subclass that only its type tells, as those are that hold a quantised or distributed tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def _flops(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * ROWS * INNER * OUTER


def _function_mode(layer, x):
    heard = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        layer(x)
    assert F.linear in heard


def _vmap(layer, x):
    close(torch.vmap(layer)(x), exact(layer)(x.double()))


def _batched_gradients(layer, x):
    """The graph is oneDNN's, of the forward pass; its backward pass runs under vmap."""
    output = layer(x.requires_grad_())
    grads = torch.randn(3, *output.shape)
    (found,) = torch.autograd.grad(output, x, grads, is_grads_batched=True)
    close(found, grads.double() @ layer.weight.detach().double())


def _hessian(layer, x):
    hessian = torch.func.hessian(lambda v: layer(v).pow(2).sum())
    close(hessian(x[0]), 2 * layer.weight.double().t() @ layer.weight.double())


def _forward_mode(layer, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    close(tangent, layer.weight.double().sum(dim=1).expand(ROWS, OUTER))


def _compiled(layer, x):
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), exact(layer)(x.double()))


def _exported(layer, x):
    rows = torch.export.Dim("rows", min=2, max=99)
    for strict in (True, False):
        graph = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict).graph
        assert torch.ops.aten.linear.default in {node.target for node in graph.nodes}


def _traced(layer, x):
    assert "aten::linear" in str(torch.jit.trace(layer, x, check_trace=False).inlined_graph)


@pytest.mark.parametrize(
    ("run", "products"),
    [
        (_autocast, 0),
        (_flops, 0),
        (_function_mode, 0),
        (_vmap, 0),
        (_batched_gradients, 1),
        pytest.param(_hessian, 0, marks=old_names),
        pytest.param(_forward_mode, 0, marks=old_names),
        (_compiled, 0),
        (_exported, 0),
        pytest.param(_traced, 0, marks=old_names),
        (lambda layer, x: layer.double()(x.double()), 0),
        (lambda layer, x: layer.bfloat16()(x.bfloat16()), 0),
        (lambda layer, x: layer.to("meta")(x.to("meta")), 0),
        (lambda layer, x: layer(x.as_subclass(Tagged)), 0),
        (
            lambda layer, x: (
                setattr(layer, "weight", nn.Parameter(layer.weight.detach().as_subclass(Kept))) or layer(x)
            ),
            0,
        ),
        (lambda layer, x: layer(x.to_sparse()), 0),
        (lambda layer, x: layer(x), 1),
    ],
)
def test_whoever_traces_transforms_or_counts_meets_f_linear(onednn, calls, run, products):
    run(make(), torch.randn(ROWS, INNER))
    assert len(calls) == products


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_inputs(onednn):
    layer, parts = make(), [torch.randn(3, INNER), torch.randn(5, INNER)]
    for found, part in zip(layer(torch.nested.nested_tensor(parts)).unbind(), parts, strict=True):
        close(found, exact(layer)(part.double()))


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_switched_off_in_torch_it_is_not_used(onednn, calls):
    with torch.backends.mkldnn.flags(enabled=False):
        make()(torch.randn(ROWS, INNER))
    assert calls == []


def test_errors_are_torchs(way):
    for x in (torch.randn(ROWS, INNER + 1), torch.randn(ROWS, INNER, dtype=torch.float64)):
        with pytest.raises(RuntimeError) as theirs:
            nn.Linear(INNER, OUTER)(x)
        with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            make()(x)


def test_small_calls_are_left_to_torch_and_never_measured(monkeypatch, calls):
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(module, "_decided", lambda product: pytest.fail("measured"))
    Linear(256, 256)(torch.randn(200, 256))  # too few multiply-adds
    Linear(64, 512)(torch.randn(1024, 64))  # too narrow
    Linear(4096, 4096)(torch.randn(1, 4096))  # too few rows
    assert calls == []


def test_two_calls_in_a_row_give_the_same_bits(monkeypatch):
    """The race is over before the first result."""
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(module, "race", lambda *_: 0.5)
    layer, x = Linear(256, 512), torch.randn(2, 128, 256, requires_grad=True)
    grads = []
    for _ in range(2):
        output = layer(x)
        grads.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_each_product_is_decided_once_whatever_the_threads(monkeypatch):
    decided = []

    def slowly(product):
        time.sleep(0.05)
        decided.append(product)
        return float(len(decided))

    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(module, "_decided", slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(ratio("output"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (decided, found) == (["output"], [1.0] * 5)


class Clock:
    """Time that passes only in the candidates; every call of them is recorded."""

    def __init__(self, monkeypatch):
        self.now, self.layouts = 0.0, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def candidate(self, *milliseconds):
        left = [each / 1000 for each in milliseconds]

        def run(a, b):
            self.layouts.append((a.is_contiguous(), b.is_contiguous()))
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return a

        return run


def test_the_race_is_of_times_on_the_layouts_of_the_product(monkeypatch):
    clock = Clock(monkeypatch)
    for product, layout in zip(PRODUCTS, [(True, True), (True, False), (False, False)], strict=True):
        clock.layouts.clear()
        share = race(clock.candidate(2.0), clock.candidate(1.0), product, side=7)
        assert share == pytest.approx(0.5)
        assert set(clock.layouts) == {layout}
    assert race(clock.candidate(1.0), clock.candidate(2.0), "output", side=7) == pytest.approx(2)


def test_luck_and_stalls_decide_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    lucky = clock.candidate(9.0, 0.1, 0.1, 1.0)  # the first is slow, two are too good to be true
    assert race(clock.candidate(1.0), lucky, "output", side=7) == pytest.approx(1)
    stalled = clock.candidate(*[9.0] * 8, 1.0)
    assert race(stalled, clock.candidate(1.0), "output", side=7) == pytest.approx(1)


def test_a_machine_too_busy_to_tell_stays_with_torch(monkeypatch):
    clock = Clock(monkeypatch)
    assert race(clock.candidate(60.0), clock.candidate(1.0), "output", side=7) == math.inf
    assert clock.now < 0.2


@pytest.mark.parametrize(("share", "products"), [(MARGIN - 0.01, 3), (MARGIN + 0.01, 0), (1.5, 0)])
def test_onednn_is_taken_where_it_wins_by_the_margin(monkeypatch, calls, share, products):
    monkeypatch.delenv("CLEARHEAD_LINEAR", raising=False)
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(
        module, "race", lambda _, __, product: race(clock.candidate(1.0), clock.candidate(share), product, side=7)
    )
    Linear(256, 512)(torch.randn(128, 256, requires_grad=True)).sum().backward()
    assert len(calls) == products
    raced = PRODUCTS if products else PRODUCTS[:1]  # gradients of torch's product are torch's
    assert module._ratios == pytest.approx(dict.fromkeys(raced, share))


@pytest.mark.parametrize("product", PRODUCTS)
def test_by_the_true_clock_four_products_take_longer_than_one(product):
    assert race(F.linear, lambda a, b: [F.linear(a, b) for _ in range(4)].pop(), product) > 2


@pytest.mark.parametrize("way", WAYS)
def test_the_environment_decides_without_a_race(monkeypatch, calls, way):
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(module, "race", lambda *_: pytest.fail("raced"))
    monkeypatch.setenv("CLEARHEAD_LINEAR", way)
    Linear(256, 512)(torch.randn(128, 256, requires_grad=True)).sum().backward()
    assert len(calls) == {"torch": 0, "onednn": 3}[way]


def test_an_unknown_choice_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setenv("CLEARHEAD_LINEAR", "mkl")
    with pytest.raises(ValueError, match="CLEARHEAD_LINEAR must be torch or onednn, or not set, not 'mkl'"):
        Linear(256, 512)(torch.randn(128, 256))


def test_without_onednn_it_is_torch(monkeypatch):
    monkeypatch.setattr(module, "_ratios", {})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setenv("CLEARHEAD_LINEAR", "onednn")
    assert ratio("output") == math.inf


def test_the_modules_projections_are_of_this_class(onednn, calls):
    mha = ch.MultiHeadAttention(embed_dim=24, num_heads=3, num_kv_heads=1, vdim=11)
    projections = (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)
    assert [type(projection) for projection in projections] == [Linear] * 4
    mha(torch.randn(2, 5, 24), torch.randn(2, 7, 24), torch.randn(2, 7, 11)).sum().backward()
    assert len(calls) == 4 + 5  # forward; the weights' gradients, and that of out_proj's input


def test_a_residual_is_added_in_place(onednn):
    mha = ch.MultiHeadAttention(embed_dim=24, num_heads=3)
    x = torch.randn(2, 5, 24)
    expected = mha(x) + x
    y = mha(x)
    y += x
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), mha.q_proj.weight)[0] for out in (y, expected)))


def test_initialisers_that_look_for_nn_linear_find_it():
    mha = ch.MultiHeadAttention(embed_dim=24, num_heads=3)
    mha.apply(lambda part: nn.init.zeros_(part.weight) if isinstance(part, nn.Linear) else None)
    assert all(not parameter.any() for parameter in mha.parameters())


def test_widths_are_checked_to_torch_works_and_a_subclass_counts_as_replaced():
    mha = ch.MultiHeadAttention(embed_dim=24, num_heads=3)
    with pytest.raises(ch.ShapeError, match=r"query must be \(batch, length, 24\), not \(2, 5, 23\)"):
        mha(torch.randn(2, 5, 23))
    with pytest.raises(ch.ShapeError, match=r"query is torch.float64 and the parameters are torch.float32"):
        mha(torch.randn(2, 5, 24, dtype=torch.float64))
    x = torch.randn(2, 5, 24)
    theirs = mha.to_torch()
    assert type(ch.MultiHeadAttention.from_torch(theirs).q_proj) is Linear
    expected = copy.deepcopy(theirs).double()(x.double(), x.double(), x.double(), need_weights=False)[0]
    close(mha(x).detach(), expected.detach())

    class Own(Linear):
        def forward(self, input):
            return super().forward(input[..., :24])

    mha.q_proj = Own(24, 24)
    assert mha(torch.randn(2, 5, 30), x).shape == (2, 5, 24)
    with pytest.raises(ValueError, match="one was replaced"):
        mha.to_torch()


def test_functional_form(way):
    x, weight = torch.randn(ROWS, INNER), torch.randn(OUTER, INNER)
    close(linear(x, weight), x.double() @ weight.double().t())
