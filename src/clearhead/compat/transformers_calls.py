"""What a transformers layer means by the arguments that it calls its attention function with."""

from __future__ import annotations

import functools
import inspect
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from clearhead.checks import autocasting
from clearhead.compat.call import Call, look_at
from clearhead.compat.transformers_masks import MaskTensor, meaning_on, padding_in, read_tensor
from clearhead.masks import Causal, Mask
from clearhead.observe import Observe

_UNKNOWN = ("indices", "block_indices", "sinks")  # arguments that choose keys, or stand for some, in their own way


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
    *,
    added: bool = False,
    padding: bool = True,
) -> Call:
    """The arguments of an attention function as a `Call`, for the keys that exist.

    Args:
        module: the layer.
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E), with the cached ones; of a static cache more than exist.
        value: (B, Hkv, S, Ev).
        attention_mask: what the mask function made, or the user gave.
        options: all else.
        added: whether the layer adds even a mask of flags, as 0 and 1.
        padding: whether padded queries are looked for in a mask that is only known as a tensor.
    """
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} attends by {name}, which clearhead can't see through."
            )
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, the same for all
    if autocasting(query.device.type) and not query.dtype == key.dtype == value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32, and meant to be multiplied so
    L, S = query.shape[2], key.shape[2]
    bias, padded = options.get("position_bias"), None
    mask: Mask | None = None
    meaning = None if attention_mask is None else meaning_on(attention_mask)
    if attention_mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and L > 1:
            # As transformers has it: aligned to the start, and no key behind the last query exists.
            mask, S = (Causal(align="start") if L > S else Causal()), min(L, S)
    elif meaning is not None and attention_mask.shape[2:] == (L, S):
        mask, S, padded = meaning
    else:
        tensor = attention_mask.numbers() if isinstance(attention_mask, MaskTensor) else attention_mask
        mask, floats = read_tensor(tensor[(None,) * (4 - tensor.ndim)][..., :S], added=added)
        bias = floats if bias is None or floats is None else bias + floats
        padded = padding_in(mask) if padding and L == S else None
    return Call(
        module,
        query,
        key[:, :, :S],
        value[:, :, :S],
        mask,
        None if bias is None else bias[..., :S],
        options.get("scaling"),
        dropout_p=options.get("dropout", 0.0),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        padded=padded,
    )


def weights_of(call: Call, context: Tensor, options: dict[str, Any]) -> Tensor | None:
    """The weights that a call has used, if somebody asked the model for them (``output_attentions=True``)."""
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get() or {}
    if not (options.get("output_attentions") or any(name.endswith("attentions") for name in collected)):
        return None
    call = call._replace(context=context, padded=None)
    weights: Tensor = look_at(call, Observe(weights=True, grad=True)).weights
    return weights


# -- whose keys they are -----------------------------------------------------------------------------------------

_arrived = local()  # by thread: {layer: whether another sequence came along}
_MEMORY = ("key_value_states", "encoder_hidden_states", "encoder_hidden_state", "cross_attention_states")


def note_memory(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Before a layer's forward pass: note whether another sequence comes along for the keys."""
    kind: Any = type(module)
    given = dict(zip(_parameters(kind), args, strict=False)) | options
    if not hasattr(_arrived, "memory"):
        _arrived.memory = WeakKeyDictionary()
    _arrived.memory[module] = any(given.get(name) is not None for name in _MEMORY)


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def crosses(module: nn.Module) -> bool:
    """Whether the keys are another sequence's than the queries."""
    if "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False):
        return True
    return bool(getattr(_arrived, "memory", {}).get(module, False))
