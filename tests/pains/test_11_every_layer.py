"""Row 11: encoder layers expose no weights, and hooks and LoRA on ``out_proj`` never fire.

pytorch 78109, 88810, 128413; peft 761; helical 405. Here every projection is a module that is called, and `record`
sees every layer; torch's own in ``test_record_torch.py``.

Not covered yet: generation.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS
from pains.encoder import (
    BY_DEFAULT,
    ENCODERS,
    FORMS,
    LOOK,
    PLAIN,
    WAYS,
    Truth,
    Way,
    assert_near,
    build,
    in_torch,
    numbers,
    run,
)

B, L, LENGTHS = 2, 7, [4, 7]
MODULES = [form for form in FORMS if form != "function"]  # the function has no projections
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Adapted(nn.Module):
    """A projection with a low-rank addition, as LoRA makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(numbers(2, base.in_features, seed=1))
        self.up = nn.Parameter(numbers(base.out_features, 2, seed=2))

    @property
    def weight(self) -> Tensor:
        """The sum, as one matrix."""
        return self.base.weight + self.up @ self.down

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def check_hooks(form: str, way: Way = PLAIN) -> None:
    """A hook on each projection, and on the core, fires once a layer; what it changes is changed."""
    model, x = copy.deepcopy(build(form)), numbers(B, L, 15)
    fired: list[str] = []

    def listen(name: str) -> Any:
        return lambda module, args, result: fired.append(name)

    for name, module in model.named_modules():
        if name.endswith((*PROJECTIONS, ".core")):
            module.register_forward_hook(listen(name))
    run(model, x, way=way, mask=ch.Causal())
    expected = [f"layers.{i}.attention.{name}" for i in range(len(model.layers)) for name in (*PROJECTIONS, "core")]
    assert sorted(fired) == sorted(expected), f"{form} {way}: {fired}"

    model.layers[-1].attention.out_proj.register_forward_hook(lambda module, args, result: result * 0)
    silent = copy.deepcopy(build(form))
    for parameter in silent.layers[-1].attention.out_proj.parameters():
        parameter.data.zero_()
    truth = silent.truth(x, sees=oracle.causal(0))
    assert_near(run(model, x, way=way, mask=ch.Causal()), truth, f"{form} {way}: a hook that silences")


def check_adapted(form: str, way: Way = PLAIN, projection: str = "out_proj") -> None:
    """A replaced projection is used, and learns."""
    model, x = copy.deepcopy(build(form)), numbers(B, L, 15)
    for layer in model.layers:
        setattr(layer.attention, projection, Adapted(getattr(layer.attention, projection)))
    out = run(model, x, way=way, mask=ch.Causal())
    assert_near(out, model.truth(x, sees=oracle.causal(0)), f"{form} {way} {projection}")
    if way.grad:
        adapters = [p for name, p in model.named_parameters() if name.endswith((".up", ".down"))]
        for gradient in torch.autograd.grad(out.square().sum(), adapters):
            assert gradient.any(), f"{form} {way} {projection}: an adapter learns nothing"


def check_recorded(form: str, way: Way = PLAIN, biased: bool = False) -> None:
    """`record` has the weights of every layer, the truth's, and leaves every bit of the output alone."""
    model, x = build(form), numbers(B, L, 15)
    bias = 2 * numbers(B, 3, L, L, seed=4) if biased else None
    given: list[Tensor] = []
    handles = [
        layer.attention.register_forward_pre_hook(lambda module, args: given.append(args[0].detach()))
        for layer in model.layers
    ]
    mask = ch.Causal() & ch.KeyPadding(LENGTHS)
    alone = run(model, x, way=way, mask=mask, attn_bias=bias)
    given.clear()
    with ch.record(model, LOOK) as recording:
        out = run(model, x, way=way, mask=mask, attn_bias=bias)
    for handle in handles:
        handle.remove()
    assert torch.equal(out, alone), f"{form} {way}: recording changed the output"
    names = [f"layers.{i}.attention" for i in range(len(model.layers))]
    assert list(recording) == names, f"{form} {way}: recorded {list(recording)}"
    # In self-attention padded queries are dead rows in what is recorded.
    sees = oracle.both(
        oracle.both(oracle.causal(0), oracle.key_padding(LENGTHS, "right", L)),
        oracle.query_padding(LENGTHS, "right", L),
    )
    for name, x_of_layer, layer in zip(names, given, model.layers, strict=True):
        with torch.no_grad():
            truth = Truth(layer.attention, sees, bias, None).found(x_of_layer)
        for field in ("weights", "entropy", "received"):
            assert_near(
                recording[name][field], torch.from_numpy(getattr(truth, field)), f"{form} {way} {name} {field}"
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", MODULES)
def test_every_way(form: str, backend: str) -> None:
    for way in WAYS[backend]:
        check_hooks(form, way)
        check_recorded(form, way)
        check_recorded(form, way, biased=True)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("form", MODULES)
def test_replaced_projections(form: str, projection: str) -> None:
    for way in BY_DEFAULT:
        check_adapted(form, way, projection)


@pytest.mark.parametrize("form", ENCODERS)
def test_every_call_is_kept(form: str) -> None:
    model = build(form)
    with ch.record(model, ch.Observe(entropy=True)) as recording:
        run(model, numbers(B, L, 15))
        run(model, numbers(B, 3, 15))
    for i in range(2):
        assert [seen.entropy.shape[2] for seen in recording.calls(f"layers.{i}.attention")] == [L, 3]


@in_torch
def test_torch_never_calls_its_output_projection() -> None:
    layer, x = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), torch.randn(1, 5, 12)
    fired: list[int] = []
    layer.self_attn.out_proj.register_forward_hook(lambda module, args, result: fired.append(1))
    layer.train()(x)
    with torch.no_grad():
        layer.eval()(x)
    assert not fired
