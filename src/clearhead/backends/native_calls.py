"""Calls of the native kernels: on tensors (`forward`, `backward`), under autograd, and as torch operators.

The kernels look at their inputs as they go. Where one holds a NaN or an infinity that a query could see, they
stop, and the call is made again by the rules of `nonfinite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.blockwise import Blockwise
from clearhead.backends.native_library import library
from clearhead.backends.nonfinite import set_aside
from clearhead.checks import Request
from clearhead.masks import Mask
from clearhead.observe import Observe

FAR = 2**40  # beyond any key


class Parts(NamedTuple):
    """What a call hides, as the kernels take it.

    Attributes:
        left: query q sees keys from q + left on ...
        right: ... up to q + right.
        first: int64 (B|1, L|1), no key before this; or None.
        behind: int64 (B|1, L|1), no key from this on; or None.
        visible: bool (B|1, Hq|1, L|1, S|1), or None.
    """

    left: int = -FAR
    right: int = FAR
    first: Tensor | None = None
    behind: Tensor | None = None
    visible: Tensor | None = None


EVERYTHING = Parts()


class Dropping(NamedTuple):
    """Dropout as the kernels take it: what `clearhead.backends.dropout` keeps, they keep."""

    threshold: int
    seed0: int
    seed1: int
    factor: float


def dropping(dropout_p: float, seed: Tensor | None) -> Dropping | None:
    """The dropout of a call; None if it has none."""
    if dropout_p == 0.0 or seed is None:
        return None
    threshold = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31
    seed0, seed1 = seed.tolist()
    return Dropping(threshold, seed0, seed1, 1 / (1 - dropout_p) if dropout_p < 1 else 0.0)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Parts,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    observe: Observe | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Context (B, Hq, L, Ev), lse (B, Hq, L), and the statistics asked for; none if something is not finite."""
    query, key, value = _packed(query), _packed(key), _packed(value)
    B, H, L, _ = query.shape
    context = query.new_empty(B, H, L, value.shape[-1])
    lse = query.new_empty((B, H, L), dtype=torch.float32)
    drop = dropping(dropout_p, seed)
    room = None if observe is None else _room(query, key, observe)
    seen = None if room is None else room.as_tuple()
    rest = (*parts, bias, scale, drop, torch.get_num_threads())
    if library().forward(query, key, value, context, lse, *rest, False, seen):
        return context, lse, {} if room is None else room.found(lse, observe)
    request = _request(query, key, value, parts, bias, scale, dropout_p, seed)
    finite, aside = set_aside(request)
    bias = finite.attn_bias
    rest = (*parts, bias, scale, drop, torch.get_num_threads())
    library().forward(*_inputs(finite), context, lse, *rest, True, None)
    return context if aside is None else aside.restore(context), lse, {}


def backward(
    dcontext: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    lse: Tensor,
    parts: Parts,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value, each like its tensor, and of the bias (float32) if asked for."""
    query, key, value, dcontext = _packed(query), _packed(key), _packed(value), _packed(dcontext)
    dquery, dkey, dvalue = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias_grad and bias is not None else None
    rest = (*parts, bias, scale, dropping(dropout_p, seed), torch.get_num_threads())
    wanted = (dquery, dkey, dvalue, dbias)
    if library().backward(query, key, value, context, lse, *rest, False, dcontext, *wanted):
        return wanted
    # Something isn't finite: plain torch knows what then reaches which gradient.
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    own_bias = None if bias is None else bias.detach().requires_grad_(bias_grad)
    request = _request(leaves[0], leaves[1], leaves[2], parts, own_bias, scale, dropout_p, seed)
    asked = (True, True, True, dbias is not None)
    found = [g if g is None else g.contiguous() for g in _gradients(request, asked, dcontext)]
    assert found[0] is not None and found[1] is not None and found[2] is not None  # noqa: PT018
    return found[0], found[1], found[2], None if found[3] is None else found[3].float()


def _packed(tensor: Tensor) -> Tensor:
    """The tensor with its features side by side."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _inputs(request: Request) -> list[Tensor]:
    return [_packed(tensor) for tensor in (request.query, request.key, request.value)]


# -- statistics of the same pass -------------------------------------------------------------------------------

NAMES = ("lse", "entropy", "max_weight", "distance", "received", "top_k", "mass", "offsets")
MAX_GROUPS, MAX_OFFSETS, MAX_TOP = 16, 64, 64


def in_one_pass(observe: Observe) -> list[str]:
    """Names of the statistics that the kernels can give beside the context."""
    names = [name for name in NAMES if observe.asks(name)]
    if observe.grad:
        return []  # a graph of them needs plain torch
    too_many = {
        "top_k": (observe.top_k or 0) > MAX_TOP,
        "mass": len(observe.mass or ()) > MAX_GROUPS,
        "offsets": len(observe.offsets or ()) > MAX_OFFSETS,
    }
    return [name for name in names if not too_many.get(name, False)]


@dataclass(frozen=True)
class _Room:
    """Tensors that a call writes its statistics into."""

    fields: dict[str, Tensor]
    groups: list[Tensor]
    offsets: list[int]

    def as_tuple(self) -> tuple[Any, ...]:
        """In the order of the kernels."""
        of = self.fields.get
        return (
            *(of(name) for name in ("entropy", "max_weight", "distance", "received", "top weights", "top keys")),
            *(self.groups, of("mass"), self.offsets, of("offsets")),
        )

    def found(self, lse: Tensor, observe: Observe) -> dict[str, Any]:
        """By the names of `Observe`."""
        fields: dict[str, Any] = dict(self.fields)
        if observe.lse:
            fields["lse"] = lse
        if "top weights" in fields:
            fields["top_k"] = (fields.pop("top weights"), fields.pop("top keys"))
        if "mass" in fields:
            fields["mass"] = dict(zip(observe.mass or (), fields["mass"].unbind(), strict=True))
        return {name: fields[name] for name in NAMES if name in fields}


def _room(query: Tensor, key: Tensor, observe: Observe) -> _Room | None:
    names = in_one_pass(observe)
    if not names:
        return None
    B, H, L, _ = query.shape
    S = key.shape[2]
    shapes: dict[str, tuple[int, ...]] = {name: (B, H, L) for name in ("entropy", "max_weight", "distance")}
    shapes["received"] = (B, H, S)
    groups: list[Tensor] = []
    offsets: list[int] = []
    if "top_k" in names and observe.top_k:
        shapes["top weights"] = (B, H, L, observe.top_k)
    if "mass" in names and observe.mass is not None:
        groups = [keys.to(query.device) for keys in observe.mass.values()]
        shapes["mass"] = (len(groups), B, H, L)
    if "offsets" in names and observe.offsets is not None:
        offsets = list(observe.offsets)
        shapes["offsets"] = (B, H, L, len(offsets))
    wanted = [*names, "top weights"]
    fields = {name: query.new_empty(shape, dtype=torch.float32) for name, shape in shapes.items() if name in wanted}
    if "top weights" in fields:
        fields["top keys"] = torch.empty_like(fields["top weights"], dtype=torch.int32)
    return _Room(fields, groups, offsets)


# -- autograd --------------------------------------------------------------------------------------------------


class Attend(torch.autograd.Function):
    """`forward` with `backward` as its gradient; a gradient of that gradient comes from plain torch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        request: Request,
        parts: Parts,
        observe: Observe | None,
        found: dict[str, Any],
    ) -> Tensor:
        """The context; statistics are put into `found`."""
        of_call = (request.scale, request.dropout_p, request.seed)
        context, lse, seen = forward(query, key, value, parts, bias, *of_call, observe)
        found |= seen
        ctx.save_for_backward(query, key, value, bias, context, lse)
        ctx.call = (request.mask, parts, *of_call)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of query, key, value and bias."""
        query, key, value, bias, context, lse = ctx.saved_tensors
        mask, parts, *of_call = ctx.call
        if torch.is_grad_enabled():  # a graph of this is wanted
            request = Request(query, key, value, mask, bias, *of_call, axes=4)
            found = _gradients(request, ctx.needs_input_grad[:4], grads[0], create_graph=True)
        else:
            tensors = (query, key, value, context, lse)
            *most, dbias = backward(grads[0], *tensors, parts, bias, *of_call, ctx.needs_input_grad[3])
            found = [*most, None if dbias is None else dbias.to(bias.dtype)]
        return *found, None, None, None, None


def _gradients(
    request: Request, asked: Sequence[bool], dcontext: Tensor, *, create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of query, key, value and bias by plain torch, None where not asked for."""
    with torch.enable_grad():
        finite, aside = set_aside(request)
        context = Blockwise().run(finite)
        if aside is not None:
            context = aside.restore(context)
    inputs = (request.query, request.key, request.value, request.attn_bias)
    leaves = [tensor for tensor, wanted in zip(inputs, asked, strict=True) if wanted and tensor is not None]
    grads = iter(torch.autograd.grad(context, leaves, dcontext, create_graph=create_graph, materialize_grads=True))
    return [next(grads) if wanted and tensor is not None else None for tensor, wanted in zip(inputs, asked, strict=True)]


# -- operators: what compiled and exported programs call -------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class _PartsMask(Mask):
    """Parts as a mask again."""

    first: Tensor | None
    behind: Tensor | None
    visible: Tensor | None
    left: int
    right: int

    _tensors: ClassVar[tuple[str, ...]] = ("first", "behind", "visible")

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        sizes: dict[str, int] = {}
        for tensor, letters in ((self.first, "bq"), (self.behind, "bq"), (self.visible, "bhqk")):
            for letter, size in zip(letters, () if tensor is None else tensor.shape, strict=False):
                sizes[letter] = max(size, sizes.get(letter, 1))
        return {letter: size for letter, size in sizes.items() if size != 1}

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        seen = (k >= q + self.left) & (k <= q + self.right)
        if self.first is not None:
            seen = seen & (k >= _at(self.first, b, q))
        if self.behind is not None:
            seen = seen & (k < _at(self.behind, b, q))
        return seen if self.visible is None else seen & _at(self.visible, b, h, q, k)


def as_mask(parts: Parts) -> Mask | None:
    """What the parts hide as a mask; None if that is nothing."""
    if parts is EVERYTHING:
        return None
    return _PartsMask(parts.first, parts.behind, parts.visible, parts.left, parts.right)


def _at(table: Tensor, *indices: Tensor) -> Tensor:
    return table[tuple(i if size != 1 else torch.zeros_like(i) for i, size in zip(indices, table.shape, strict=True))]


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Parts,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Request:
    return Request(query, key, value, as_mask(parts), bias, scale, dropout_p, seed, 4)


@torch.library.custom_op("clearhead::attention", mutates_args=(), device_types="cpu")
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int,
    right: int,
    first: Tensor | None,
    behind: Tensor | None,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Context and lse."""
    parts = Parts(left, right, first, behind, visible)
    context, lse, _ = forward(query, key, value, parts, bias, scale, dropout_p, seed)
    return context, lse


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, L, _ = query.shape
    return query.new_empty(B, H, L, value.shape[-1]), query.new_empty((B, H, L), dtype=torch.float32)


@torch.library.custom_op("clearhead::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_op(
    dcontext: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    lse: Tensor,
    left: int,
    right: int,
    first: Tensor | None,
    behind: Tensor | None,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty if not asked for."""
    parts = Parts(left, right, first, behind, visible)
    tensors = (query, key, value, context, lse)
    *most, dbias = backward(dcontext, *tensors, parts, bias, scale, dropout_p, seed, bias_grad)
    dense = [grad.contiguous() for grad in most]
    return dense[0], dense[1], dense[2], lse.new_empty(0) if dbias is None else dbias.contiguous()


@attention_backward_op.register_fake
def _(dcontext: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Tensor, lse: Tensor, *rest: Any) -> Any:
    bias, bias_grad = rest[5], rest[-1]
    dbias = lse.new_empty(bias.shape if bias_grad else 0)
    return *(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, left, right, first, behind, visible, bias, scale, dropout_p, seed = inputs
    ctx.save_for_backward(query, key, value, *output, first, behind, visible, bias, seed)
    ctx.numbers = (left, right, scale, dropout_p)
    ctx.bias_grad = bias is not None and bias.requires_grad


def _op_backward(ctx: Any, dcontext: Tensor, _: Tensor) -> Any:
    query, key, value, context, lse, first, behind, visible, bias, seed = ctx.saved_tensors
    left, right, scale, dropout_p = ctx.numbers
    dquery, dkey, dvalue, dbias = attention_backward_op(
        *(dcontext, query, key, value, context, lse, left, right, first, behind, visible, bias),
        *(scale, dropout_p, seed, ctx.bias_grad),
    )
    none = (None,) * 5
    return dquery, dkey, dvalue, *none, dbias.to(bias.dtype) if ctx.bias_grad else None, None, None, None


attention_op.register_autograd(_op_backward, setup_context=_keep)
