"""Copies and pickles made of a model while it is recorded or changed: they have its weights, and nobody's ear."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from families import BY_NAME

ENTROPY = ch.Observe(entropy=True)
B, L, D = 2, 5, 14


def saved(model: nn.Module) -> Any:
    """What ``torch.save`` writes, loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def llama() -> Any:
    return BY_NAME["llama"].build()


def attention(x: Tensor, model: nn.Module) -> Tensor:
    return model(x, x, x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, nn.Module], Tensor]]] = {
    "torch's attention": (lambda: nn.MultiheadAttention(D, 2, batch_first=True), attention),
    "torch's layer": (lambda: nn.TransformerEncoderLayer(D, 2, 11, batch_first=True), lambda x, model: model(x)),
    "converted": (
        lambda: ch.convert(nn.TransformerEncoderLayer(D, 2, 11, batch_first=True)),
        lambda x, model: model(x),
    ),
    "clearhead's": (lambda: ch.MultiHeadAttention(D, 2), lambda x, model: model(x)),
    "transformers'": (llama, lambda x, model: model(inputs_embeds=x.repeat(1, 1, 5)[..., :60]).logits),
}
WATCHED: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "record": lambda model: nullcontext(),
    "intervene": lambda model: ch.intervene(model, {0: ch.ScaleHeads({0: 0.0})}),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, saved], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("watch", WATCHED)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_has_weights_of_its_own_and_nobody_listens(
    name: str, watch: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    if name.startswith("torch's") and watch == "intervene":
        pytest.skip("torch's own attention is not changed while it runs")
    build, run = MODELS[name]
    model, x = build().eval(), torch.randn(B, L, D)
    with torch.no_grad():
        plain = run(x, model)
        made = copied(model)
        with WATCHED[watch](model), ch.record(model, ENTROPY) as recording:
            other = copied(model)
            alike = run(x, other)
        assert torch.equal(alike, plain)
        assert len(recording) == 0
        assert vars_of(other) == vars_of(made)
        for parameter in other.parameters():
            parameter.mul_(2.0)
        for parameter in made.parameters():
            parameter.mul_(2.0)
        assert torch.equal(run(x, other), run(x, made))
        assert not torch.equal(run(x, other), plain)
        with ch.record(other, ENTROPY) as recording:
            run(x, other)
        assert len(recording) > 0
    assert vars_of(model) == vars_of(build().eval())


def vars_of(model: nn.Module) -> list[tuple[str, list[str], int]]:
    """What each module inside has of its own: the names of its attributes, and how many hooks."""
    return [(name, sorted(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()]


def test_a_copy_keeps_the_forward_that_someone_else_has_put_there() -> None:
    mha = nn.MultiheadAttention(D, 2, batch_first=True)
    layer = ch.MultiHeadAttention(D, 2)
    layer.core.forward = Doubled(layer.core.forward)
    x = torch.randn(B, L, D)
    with ch.record(nn.ModuleList([mha, layer]), ENTROPY):
        other = copy.deepcopy(layer)
    assert isinstance(vars(other.core)["forward"], Doubled)
    assert torch.equal(other(x), layer(x))


class Doubled:
    """A forward, and its result times two."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options) * 2
