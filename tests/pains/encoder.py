"""Attention in four forms, all (B, L, D) -> (B, L, D), and the truth of each by the double loop.

The forms: the function on heads cut from the width, the module, and the module inside two layers of a pre-norm
and of a post-norm encoder. A `Way` is how a form is called: what must never change the answer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
import oracle
from clearhead.backends import BACKENDS

HEADS, WIDTH = 3, 15
FORMS = ("function", "module", "pre-norm", "post-norm")
ENCODERS = ("pre-norm", "post-norm")
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPE = torch.float64  # of checks that name none; float32 on the native backend, by conftest.py
# Of two layers with norms and rounded intermediate results, relative to the output's scale.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LOOK = ch.Observe(weights=True, entropy=True, lse=True, received=True)

# What torch was seen to do; another version may do better, and the contrast is then not worth a failure.
in_torch = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="a contrast to torch 2.13")


@dataclass(frozen=True)
class Way:
    """A path to the same answer."""

    training: bool = False
    grad: bool = False
    observed: bool = False
    backend: str | None = None

    def __str__(self) -> str:
        words = ("train" if self.training else "eval", "grad" if self.grad else "no_grad")
        return "-".join([*words, "observed" if self.observed else "unobserved", str(self.backend)])


DOUBLE = [name for name in BACKENDS if name != "native"]  # which computes in float32
PLAIN, TRAINING, GRAD, OBSERVED = Way(), Way(training=True), Way(grad=True), Way(observed=True)
WAYS = {name: [Way(*flags, name) for flags in product((False, True), repeat=3)] for name in BACKENDS}
BY_DEFAULT = [Way(*flags) for flags in product((False, True), repeat=3)]  # the backend is chosen
TYPICAL = [Way(True, True, True), *(Way(*[flag] * 3, name) for flag in (False, True) for name in DOUBLE)]
FEW = [*BY_DEFAULT[:-1], *TYPICAL]


_TRUTHS: dict[tuple[object, ...], Tensor] = {}


# -- the forms -------------------------------------------------------------------------------------------------


class Function(nn.Module):
    """`clearhead.attention` with the call of the module: heads are cut from the width, nothing is projected."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        observe: ch.Observe | None = None,
        **options: Any,
    ) -> Any:
        key = query if key is None else key
        value = key if value is None else value
        query, key, value = (cut(tensor) for tensor in (query, key, value))
        if observe is None:
            return merge(ch.attention(query, key, value, **options))
        out, seen = ch.attention(query, key, value, observe=observe, **options)
        return merge(out), seen


class Bare(nn.Module):
    """A layer that is attention and nothing else."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def before(self, x: Tensor) -> Tensor:
        """What the attention is given."""
        return x

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return attended


class Block(Bare):
    """A transformer layer: attention, then an MLP, each with a residual connection and a norm."""

    def __init__(self, attention: nn.Module, norm_first: bool) -> None:
        super().__init__(attention)
        self.norm_first = norm_first
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.norm_first else x

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        if self.norm_first:
            return x + self.mlp(self.mlp_norm(x))
        x = self.norm(x)
        return self.mlp_norm(x + self.mlp(x))


class Model(nn.Module):
    """Layers one after the other; `seen` keeps what the last call showed, a `Seen` for each layer."""

    def __init__(self, *layers: Bare) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.seen: list[ch.Seen] = []

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        value: Tensor | None = None,
        *,
        observe: ch.Observe | None = None,
        **options: Any,
    ) -> Tensor:
        self.seen = []
        for layer in self.layers:
            found = layer.attention(layer.before(x), memory, value, observe=observe, **options)
            if observe is not None:
                found, seen = found
                self.seen.append(seen)
            x = layer.after(x, found)
        return x

    def in_chunks(self, x: Tensor, sizes: list[int], **options: Any) -> Tensor:
        """A few tokens at a time, each layer keeping what its keys and values are made of: a cache."""
        caches = [x[:, :0]] * len(self.layers)
        done = []
        for chunk in x.split(sizes, dim=1):
            for i, layer in enumerate(self.layers):
                given = layer.before(chunk)
                caches[i] = torch.cat([caches[i], given], dim=1)
                chunk = layer.after(chunk, layer.attention(given, caches[i], **options))
            done.append(chunk)
        return torch.cat(done, dim=1)

    def truth(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        value: Tensor | None = None,
        *,
        sees: oracle.Sees | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The same model in float64, its attention by the double loop; `sees` says what the mask must mean."""
        inputs = [None if tensor is None else tensor.detach().double() for tensor in (x, memory, value, bias)]
        sees = sees or oracle.everything()
        (B, L), S = x.shape[:2], (x if memory is None else memory).shape[1]
        # A double loop is slow, and many ways lead to one answer: each is worked out once.
        known = (str(self), scale, flags(sees, B, L, S), *self.state_dict().values(), *inputs)
        key = tuple(
            (part.shape, part.double().numpy().tobytes()) if isinstance(part, Tensor) else part for part in known
        )
        if key not in _TRUTHS:
            model = copy.deepcopy(self).double()
            for layer in model.layers:
                layer.attention = Truth(layer.attention, sees, inputs[3], scale)
            with torch.no_grad():
                _TRUTHS[key] = model(*inputs[:3])
        return _TRUTHS[key].clone()


class Truth(nn.Module):
    """An attention module's formula in NumPy."""

    def __init__(self, attention: nn.Module, sees: oracle.Sees, bias: Tensor | None, scale: float | None) -> None:
        super().__init__()
        self.attention, self.sees, self.scale = attention, sees, scale
        self.bias = None if bias is None else bias.numpy()

    def found(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> oracle.Truth:
        """Everything about a call."""
        key = query if key is None else key
        value = key if value is None else value
        given = {"q_proj": query, "k_proj": key, "v_proj": value}
        return oracle.attend(*(self._projected(*item) for item in given.items()), self.sees, self.bias, self.scale)

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None, observe: None = None) -> Tensor:
        context = torch.from_numpy(self.found(query, key, value).output)
        return self._project("out_proj", merge(context))

    def _projected(self, name: str, x: Tensor) -> np.ndarray:
        width = x.shape[-1] // HEADS
        if isinstance(self.attention, ch.MultiHeadAttention):
            width = self.attention.value_head_dim if name == "v_proj" else self.attention.head_dim
        return self._project(name, x).unflatten(-1, (-1, width)).transpose(1, 2).numpy()

    def _project(self, name: str, x: Tensor) -> Tensor:
        projection = getattr(self.attention, name, None)  # the function has none
        return x if projection is None else x @ projection.weight.T + projection.bias


def build(form: str, dtype: torch.dtype | None = None, **options: Any) -> Model:
    """A model of the form, its numbers always the same, its biases not zero; in eval mode. Not to be changed."""
    return _built(form, dtype or DTYPE, tuple(options.items())).eval()


@cache
def _built(form: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...]) -> Model:
    def attention() -> nn.Module:
        return ch.MultiHeadAttention(WIDTH, HEADS, **dict(options))

    torch.manual_seed(3)
    if form == "function":
        model = Model(Bare(Function()))
    elif form == "module":
        model = Model(Bare(attention()))
    else:
        model = Model(*(Block(attention(), norm_first=form == "pre-norm") for _ in range(2)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros would hide one that is lost or swapped
                parameter.normal_(std=0.5)
    return model.to(dtype)


# -- calls and comparisons -------------------------------------------------------------------------------------


def run(model: Model, x: Tensor, *inputs: Tensor | None, way: Way = PLAIN, **options: Any) -> Tensor:
    """The output by one way."""
    model.train(way.training)
    x = x.detach().clone().requires_grad_(way.grad)
    with torch.set_grad_enabled(way.grad):
        return model(x, *inputs, backend=way.backend, observe=LOOK if way.observed else None, **options)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 31 * sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or DTYPE)


def cut(x: Tensor) -> Tensor:
    """(B, L, D) -> (B, H, L, E)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, L, E) -> (B, L, D)."""
    return x.transpose(1, 2).flatten(2)


def assert_near(found: Tensor, truth: Tensor, what: str = "", tolerance: float | None = None) -> None:
    """Finite, and within the tolerance of the found dtype, in units of the largest true number."""
    assert found.shape == truth.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(truth.shape)}"
    assert found.isfinite().all(), f"{what}: not finite"
    if truth.numel():
        tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
        error = (found.detach().double() - truth.double()).abs().max().item()
        scale = truth.abs().max().item() or 1.0
        assert error <= tolerance * scale, f"{what}: error {error:.2e} in units of {scale:.2e}"


def flags(sees: oracle.Sees, B: int, L: int, S: int, heads: int = HEADS) -> Tensor:
    """A rule as a bool tensor (B, H, L, S)."""
    seen = [sees(*at) for at in np.ndindex(B, heads, L, S)]
    return torch.tensor(seen, dtype=torch.bool).reshape(B, heads, L, S)
