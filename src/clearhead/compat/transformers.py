"""Hugging Face transformers: listening at its attention registry, without changing what a model computes.

Every attention layer looks its function up by ``config._attn_implementation`` at every forward pass. While
listening, that name is ours: our function calls the model's own one with the very same arguments, hands its
result back untouched, and passes on what it saw.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.compat.call import Call
from clearhead.masks import Allowed, Causal, Mask, QueryPadding

_SUPPORTED = ("sdpa", "eager")
_PREFIX = "clearhead_listening_"
_names = (f"{_PREFIX}{number}" for number in itertools.count())


def is_transformers_model(model: nn.Module) -> bool:
    """Whether this is a transformers model; never imports transformers itself."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


@contextmanager
def listening(model: nn.Module, heard: Callable[[Call], None]) -> Iterator[None]:
    """While this lasts, `heard` is called after every attention call of the model.

    Raises:
        ValueError: the model's attention does not go through the registry, or by an implementation other than
            ``"sdpa"`` or ``"eager"``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    configs = _configs(model)
    _check(model, configs)
    registered: dict[str, str] = {}
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for implementation in {name for _, name in before}:
            registered[implementation] = next(_names)
            own = _own_function(implementation)
            AttentionInterface.register(
                registered[implementation], _listening_function(own, heard, eager=implementation == "eager")
            )
            # The mask a model is given depends on the name as well: ours must get what its own function expects.
            mask_function = AttentionMaskInterface._global_mapping[implementation]
            AttentionMaskInterface.register(registered[implementation], mask_function)
        for config, implementation in before:
            config._attn_implementation_internal = registered[implementation]
        yield
    finally:
        for config, implementation in before:
            if config._attn_implementation_internal.startswith(_PREFIX):  # else someone chose another meanwhile
                config._attn_implementation_internal = implementation
        for name in registered.values():
            AttentionInterface._global_mapping.pop(name, None)
            AttentionMaskInterface._global_mapping.pop(name, None)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration object that attention layers of the model read, once each."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation_internal", None) is not None:
            found[id(config)] = config
    return list(found.values())


def _check(model: Any, configs: list[Any]) -> None:
    kind = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{kind} can't be recorded: its attention layers don't use transformers' attention registry, so nothing "
            f"can listen to them."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder-decoder model, and record can't tell its cross-attention from its self-attention "
            f"yet: record its encoder alone, model.get_encoder()."
        )
    for config in configs:
        if config._attn_implementation_internal.startswith(_PREFIX):
            raise ValueError(f"{kind} is being recorded already: ask for all you want in one Observe.")
        if config._attn_implementation_internal not in _SUPPORTED:
            raise ValueError(
                f"{kind} runs attention by {config._attn_implementation_internal!r}; record supports "
                f"{' and '.join(map(repr, _SUPPORTED))}: call model.set_attn_implementation('sdpa') first."
            )


def _own_function(implementation: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """How to find the function that a layer would have called."""
    from transformers import AttentionInterface

    if implementation == "eager":  # not in the registry: each model's file has its own
        return _eager_function
    function = AttentionInterface._global_mapping[implementation]
    return lambda _: function


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """The eager function of the file that defines the layer's class, or the class it comes from."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return cast("Callable[..., Any]", found)
    raise ValueError(f"{type(module).__name__} has no eager attention: call model.set_attn_implementation('sdpa').")


def _listening_function(
    own: Callable[[nn.Module], Callable[..., Any]], heard: Callable[[Call], None], *, eager: bool
) -> Callable[..., Any]:
    def attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        result = own(module)(module, query, key, value, attention_mask, **options)
        _refuse_unknown(module, options)
        mask, bias = _meaning(module, query, key, attention_mask, options, eager=eager)
        context = result[0].transpose(1, 2)  # transformers returns (B, L, Hq, Ev)
        heard(Call(module, query, key, value, mask, bias, options.get("scaling"), context))
        return result

    return attention_forward


def _refuse_unknown(module: nn.Module, options: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} uses {name}, which record can't see through yet.")


def _meaning(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
    *,
    eager: bool,
) -> tuple[Mask | None, Tensor | None]:
    """The mask and bias that the arguments mean, with padded queries hidden in self-attention."""
    L, S = query.shape[2], key.shape[2]
    bias = options.get("position_bias")
    if attention_mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        # As transformers has it: a single query sees all, and is_causal is aligned to the start.
        return (Causal(align="start") if causal and L > 1 else None), bias
    attention_mask = attention_mask[..., :S]
    if attention_mask.dtype == torch.bool and eager:
        return None, attention_mask.to(query.dtype)  # a user's own mask: eager attention adds it, as 0 and 1
    if attention_mask.dtype == torch.bool:
        visible = attention_mask
    else:
        # Additive: the dtype's minimum (or -inf) hides, anything else is a bias.
        visible = attention_mask > torch.finfo(attention_mask.dtype).min
        added = attention_mask.masked_fill(~visible, 0.0)
        if bool(added.any()):
            bias = added if bias is None else bias + added
    mask: Mask = Allowed(visible, axes="bhqk")
    if _is_self_attention(module) and L == S:
        # A token that no query may look at is padding, and so is the query at its place.
        real = visible.any(dim=2).any(dim=1).expand(visible.shape[0], S)
        if not bool(real.all()):
            mask = mask & QueryPadding(real=real)
    return mask, bias


def _is_self_attention(module: nn.Module) -> bool:
    return "cross" not in type(module).__name__.lower() and not getattr(module, "is_cross_attention", False)
