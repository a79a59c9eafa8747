"""The only place that validates a call: tensors in, one `Request` out, or one error with the numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.errors import ShapeError
from clearhead.masks import Mask, as_mask

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
AUTOCAST = {torch.float32, torch.float16, torch.bfloat16}  # float64 and integers are left as they are
_LEGEND = "query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev)"


@dataclass(frozen=True, eq=False)
class Request:
    """A validated call: four axes each, and nothing left to ask.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E).
        value: (B, Hkv, S, Ev).
        mask: a mask that fits, or None.
        attn_bias: (B|1, Hq|1, L|1, S|1) floats added to the scaled scores, or None.
        scale: the factor on the scores.
        dropout_p: the share of weights dropped.
        seed: (2,) int64, the seed of the dropout; None without dropout, and while the call is not `seeded`.
        axes: how many axes the caller's query had: 2, 3 or 4.
        softcap: c where scores are c tanh(score / c) before the bias; None = they are not capped.
        sinks: (Hq,) logits of a column that each row's softmax has besides, without a value; or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    attn_bias: Tensor | None
    scale: float
    dropout_p: float
    seed: Tensor | None
    axes: int
    softcap: float | None = None
    sinks: Tensor | None = None

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        attn_bias: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        axes: int,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        # What a frozen dataclass would write takes three times as long: a tenth of a small call.
        vars(self).update(
            query=query,
            key=key,
            value=value,
            mask=mask,
            attn_bias=attn_bias,
            scale=scale,
            dropout_p=dropout_p,
            seed=seed,
            axes=axes,
            softcap=softcap,
            sinks=sinks,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, Hq, L, S)."""
        B, H, L, _ = self.query.shape
        return B, H, L, self.key.shape[2]

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def acc_dtype(self) -> torch.dtype:
        """What scores and statistics are computed in: float64 for float64, else float32."""
        return accumulating(self.query.dtype)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will want to come back through this call."""
        bias, sinks = self.attn_bias, self.sinks
        return torch.is_grad_enabled() and (
            self.query.requires_grad
            or self.key.requires_grad
            or self.value.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        )

    def seeded(self) -> Request:
        """With the seed of its dropout, drawn from torch's generator: manual_seed and checkpointing repeat it.

        Once a call, and after everything is checked: a call that is refused draws nothing.
        """
        return replace(self, seed=torch.randint(2**31, (2,), device="cpu")) if self.dropout_p > 0 else self

    def on(self, tensors: Sequence[Tensor], attn_bias: Tensor | None) -> Request:
        """The same call on another query, key, value and bias of the same shapes."""
        query, key, value = tensors
        return replace(self, query=query, key=key, value=value, attn_bias=attn_bias)


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """What sums over inputs of this dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasting(device: str) -> bool:
    """Whether autocast is on; some devices (meta) have none."""
    return (device == "cpu" or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    attn_bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Request:
    """Validate the arguments of `clearhead.attention`; see there for shapes and errors."""
    axes = 4
    if not _fit_at_a_glance(query, key, value):
        _check_tensors(query, key, value)
        axes = query.ndim
        query, key, value = (_four_axes(tensor, axes) for tensor in (query, key, value))
    B, H, L, E = query.shape
    S = key.shape[2]
    mask = as_mask(mask, B, H, L, S)
    if mask is not None and mask.device not in (None, query.device):
        raise ShapeError(
            f"the mask is on {mask.device}, the query on {query.device}: use mask.to({str(query.device)!r})."
        )
    if attn_bias is not None:
        attn_bias = _check_bias(attn_bias, axes, (B, H, L, S), query)
    default = E**-0.5 if E else 1.0
    scale = default if scale is None else check_scale(scale, accumulating(query.dtype))
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = check_dropout(dropout_p)
    if softcap is not None:
        softcap = check_softcap(softcap, accumulating(query.dtype))
    if sinks is not None:
        sinks = _check_sinks(sinks, query)
    return Request(query, key, value, mask, attn_bias, scale, dropout_p, None, axes, softcap, sinks)


def _fit_at_a_glance(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all is as it mostly is: tensors of four axes that fit, of one kind. A call is short: so is this."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    q, k, v = query.shape, key.shape, value.shape
    dtype, device, dense = query.dtype, query.device, torch.strided
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and q[1] > 0
        and k[1] > 0
        and q[1] % k[1] == 0
        and k[2] == v[2]
        and q[3] == k[3]
        and dtype in DTYPES
        and dtype == key.dtype == value.dtype
        and device == key.device == value.device
        and query.layout == key.layout == value.layout == dense
        and not (query.is_nested or key.is_nested or value.is_nested)
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Say what doesn't fit."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
    _check_kinds(query, key, value)
    _check_shapes(query, key, value)


def check_scale(scale: Any, dtype: torch.dtype = torch.float64) -> float:
    """A finite number, in the dtype that scores are computed in."""
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number, not a tensor: a learned scale is a factor on the query.")
    number = _number("scale", scale)
    if not math.isfinite(number):
        raise ValueError(f"scale must be a finite number, not {scale}.")
    if abs(number) > torch.finfo(dtype).max:
        raise ValueError(
            f"scale must be finite in {dtype}, which scores are computed in, not {scale}: the most is "
            f"{torch.finfo(dtype).max:g}."
        )
    return number


def check_softcap(softcap: Any, dtype: torch.dtype = torch.float64) -> float:
    """A positive number, in the dtype that scores are computed in."""
    if isinstance(softcap, Tensor):
        raise TypeError("softcap must be a number, not a tensor: softcap.item() is one.")
    number = _number("softcap", softcap)
    range_ = torch.finfo(dtype)
    if not range_.tiny <= number <= range_.max:
        raise ValueError(
            f"softcap must be a number from {range_.tiny:g} to {range_.max:g} ({dtype}, which scores are computed "
            f"in), not {softcap}: softcap=None leaves scores as they are."
        )
    return number


def check_dropout(dropout_p: Any) -> float:
    """A number between 0 and 1."""
    number = _number("dropout_p", dropout_p)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, not {dropout_p}.")
    return number


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            pass  # not a number
    raise TypeError(f"{name} must be a number, not {value!r}.")


def check_count(name: str, value: Any) -> int:
    """A whole number, at least 1."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}.") from None
    if count < 1:
        raise ValueError(f"{name} must be at least 1, not {count}.")
    return count


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3, 4):
        raise ShapeError(
            f"expected {_LEGEND}, or all three without the head axis, or without batch and head axes; "
            f"got {_shapes(query, key, value)}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query and key must have the same width E: {query.shape[-1]} and {key.shape[-1]} "
            f"in {_shapes(query, key, value)}."
        )
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key and value must have the same length S: {key.shape[-2]} and {value.shape[-2]} "
            f"in {_shapes(query, key, value)}."
        )
    if query.ndim > 2 and not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ShapeError(f"query, key and value must have the same batch size B: got {_shapes(query, key, value)}.")
    if query.ndim == 4:
        Hq, Hkv = query.shape[1], key.shape[1]
        if value.shape[1] != Hkv:
            raise ShapeError(f"key and value must have the same number of heads: {Hkv} and {value.shape[1]}.")
        if Hq == 0 or Hkv == 0 or Hq % Hkv:
            raise ShapeError(
                f"the query heads must be a multiple of the key/value heads (grouped-query attention): "
                f"{Hq} is not a multiple of {Hkv} in {_shapes(query, key, value)}. Axes are (B, H, L, E): heads "
                f"before length."
            )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise ShapeError(
            "nested tensors are not supported: pad them (nested.to_padded_tensor) and pass a KeyPadding."
        )
    if any(tensor.layout != torch.strided for tensor in (query, key, value)):
        raise ShapeError(
            f"query, key and value must be dense, not {query.layout}, {key.layout}, {value.layout}: use .to_dense()."
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value)]
        raise ShapeError(
            f"query, key and value must share one floating-point dtype (float16, bfloat16, float32 or float64), not "
            f"{', '.join(dtypes)}: convert with .to()."
        )
    if not query.device == key.device == value.device:
        raise ShapeError(
            f"query, key and value must be on one device, not {query.device}, {key.device}, {value.device}."
        )


def _check_bias(bias: Tensor, axes: int, sizes: tuple[int, int, int, int], query: Tensor) -> Tensor:
    B, H, L, S = sizes
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ShapeError(
            f"attn_bias must be a floating-point tensor, added to the scores, not {kind}. Flags go in mask=."
        )
    if bias.dtype not in DTYPES or bias.layout != torch.strided:
        raise ShapeError(
            f"attn_bias must be float16, bfloat16, float32 or float64, and dense, not {bias.dtype} {bias.layout}: "
            f"convert it with .to() or .to_dense()."
        )
    if bias.device != query.device:
        raise ShapeError(f"attn_bias is on {bias.device}, the query on {query.device}.")
    if bias.ndim == 2:
        full = bias[None, None]
    elif bias.ndim == axes:
        full = _four_axes(bias, axes)
    else:
        full = bias
    if full.ndim != 4 or any(size not in (1, expected) for size, expected in zip(full.shape, sizes, strict=True)):
        wanted = {4: "(B|1, H|1, L|1, S|1)", 3: "(B|1, L|1, S|1)", 2: "(L|1, S|1)"}[axes]
        raise ShapeError(
            f"attn_bias must be (L|1, S|1) or {wanted} with B={B}, H={H}, L={L}, S={S}, not {tuple(bias.shape)}."
        )
    return _held(full, accumulating(query.dtype))


def _check_sinks(sinks: Tensor, query: Tensor) -> Tensor:
    if not isinstance(sinks, Tensor) or sinks.dtype not in DTYPES or sinks.layout != torch.strided:
        kind = f"{sinks.dtype} {sinks.layout}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ShapeError(
            f"sinks must be a dense tensor of float16, bfloat16, float32 or float64, one logit for each query head, "
            f"not {kind}: convert it with .to() or .to_dense()."
        )
    heads = query.shape[1]
    if sinks.shape != (heads,):
        raise ShapeError(
            f"sinks must be (Hq,) = ({heads},), one logit for each query head, not {tuple(sinks.shape)}: "
            f"sinks.expand({heads}) gives all heads the same."
        )
    if sinks.device != query.device:
        raise ShapeError(f"sinks are on {sinks.device}, the query on {query.device}: use sinks.to({query.device}).")
    return _held(sinks, accumulating(query.dtype))


def _held(tensor: Tensor, exact: torch.dtype) -> Tensor:
    """In no more than the dtype of the scores; what is finite stays finite: only -inf hides."""
    if tensor.dtype != torch.float64 or exact == torch.float64:
        return tensor
    range_ = torch.finfo(exact)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(range_.min, range_.max)).to(exact)


def _four_axes(tensor: Tensor, axes: int) -> Tensor:
    """(L, E) or (B, L, E) as (B, 1, L, E)."""
    if axes == 2:
        return tensor[None, None]
    return tensor[:, None] if axes == 3 else tensor


def without_added_axes(tensor: Tensor, axes: int) -> Tensor:
    """Undo what `check` added, on anything that starts with the axes (B, H)."""
    # Reshaped, not squeezed: compiled, torch 2.13 squeezes an alias twice, and takes an axis of L = 1 for its own.
    for axis in {4: (), 3: (1,), 2: (1, 0)}[axes]:
        if tensor.shape[axis] == 1:
            tensor = tensor.reshape(tensor.shape[:axis] + tensor.shape[axis + 1 :])
    return tensor


def check_inputs(query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Validate what `MultiHeadAttention` is called with.

    Raises:
        TypeError: a mask in the place of key or value, value without key, or no tensor.
        ShapeError: not three axes, other batch sizes, or lengths of key and value that differ.
    """
    for name, tensor in (("key", key), ("value", value)):
        if isinstance(tensor, Mask) or (isinstance(tensor, Tensor) and tensor.dtype == torch.bool):
            raise TypeError(f"got a mask in the place of {name}: pass it by name, mask=...")
    if key is None and value is not None:
        raise TypeError("value was given without key: pass both, or the memory alone as key.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
        if tensor.ndim != 3:
            raise ShapeError(
                f"{name} must be (batch, length, width), batch first, not {tuple(tensor.shape)}: "
                f"a single sequence is {name}[None]."
            )
    key = query if key is None else key
    value = key if value is None else value
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ShapeError(f"query, key and value must have the same batch size B: got {_shapes(query, key, value)}.")
    if key.shape[1] != value.shape[1]:
        raise ShapeError(
            f"key and value must have the same length S: {key.shape[1]} and {value.shape[1]} "
            f"in {_shapes(query, key, value)}."
        )


def check_widths(given: Sequence[Tensor], projections: Sequence[nn.Module], plain: Sequence[type[nn.Linear]]) -> None:
    """Validate query, key and value against the projections that take them.

    A replaced projection takes what it likes; of a `plain` one, of just these classes, width and dtype are known.

    Raises:
        ShapeError: another width or dtype.
    """
    for name, tensor, projection in zip(("query", "key", "value"), given, projections, strict=True):
        if type(projection) in plain:
            _check_fits(name, tensor, cast("nn.Linear", projection))


def _check_fits(name: str, given: Tensor, projection: nn.Linear) -> None:
    weight = projection.weight
    if given.shape[-1] != projection.in_features:
        raise ShapeError(
            f"{name} must be (batch, length, {projection.in_features}), not {tuple(given.shape)}: its last axis is "
            f"{given.shape[-1]} wide."
        )
    if given.device != weight.device:
        raise ShapeError(
            f"{name} is on {given.device} and the parameters are on {weight.device}: move one of them with .to()."
        )
    cast = autocasting(given.device.type) and {given.dtype, weight.dtype} <= AUTOCAST
    if given.dtype != weight.dtype and not cast:
        raise ShapeError(
            f"{name} is {given.dtype} and the parameters are {weight.dtype}: convert one of them with .to()."
        )
