"""`attach`: a transformers model computes its attention by clearhead, recorded or not; `detach`: as it was."""

from __future__ import annotations

import warnings
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from clearhead.compat.call import attend
from clearhead.compat.transformers import ATTACHED, interfaces, is_being_handled
from clearhead.compat.transformers_calls import read_call, weights_of
from clearhead.compat.transformers_layers import (
    attention_layers,
    branches_on_names,
    configurations,
    is_transformers_model,
)
from clearhead.compat.transformers_masks import MaskTensor, meaning_of
from clearhead.masks import Causal

Model = TypeVar("Model", bound=nn.Module)


class _Attached(str):
    """The name of clearhead's implementation in a configuration, which remembers the one before."""

    before: str

    def __new__(cls, before: str) -> Self:
        functions, masks = interfaces()  # here, so that it is found in a process that only loads a model, too
        functions.register(ATTACHED, _attention_forward)
        masks.register(ATTACHED, _mask)
        itself = super().__new__(cls, ATTACHED)
        itself.before = before
        return itself

    def __reduce__(self) -> Any:
        return _Attached, (self.before,)


def attach(model: Model) -> Model:
    """From now on a transformers model computes its attention by clearhead, in training and inference.

    Numbers agree with the model's eager attention but for rounding; a query that sees no key (padding on the left of
    a decoder) gives zeros, where eager attention gives the mean of all values. Masks stay symbolic: what they hide is
    not computed, and nothing of size L x S exists unless the model itself looks into its mask. Under `record` no bit
    of the output changes, and statistics come from the same pass. ``output_attentions=True`` gives exact weights,
    before dropout.

    Args:
        model: a module that holds transformers models; one that is attached already stays so.

    Returns:
        The model itself.

    Raises:
        ValueError: layers that can't be attached, by name.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = attach(BertModel(BertConfig(vocab_size=11, **sizes)))
        >>> model.config._attn_implementation, detach(model).config._attn_implementation
        ('clearhead', 'sdpa')
    """
    _check(model)
    for config in configurations(model):
        before = config._attn_implementation_internal
        if not isinstance(before, _Attached):
            config._attn_implementation_internal = _Attached(before)
    return model


def detach(model: Model) -> Model:
    """Undo `attach`: each configuration gets back the implementation that it had; of others none is touched.

    Args:
        model: what was given to `attach`; one that is not attached stays as it is.

    Returns:
        The model itself.

    Raises:
        ValueError: the model is being recorded.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> detach(attach(BertModel(BertConfig(vocab_size=11, **sizes)))).config._attn_implementation
        'sdpa'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"detach takes a torch.nn.Module, not {type(model).__name__}.")
    if is_being_handled(model):
        raise ValueError(f"{type(model).__name__} is being recorded: attach and detach before or after it.")
    for config in configurations(model):
        if isinstance(attached := config._attn_implementation_internal, _Attached):
            config._attn_implementation_internal = attached.before
    return model


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, not {type(model).__name__}.")
    kind = type(model).__name__
    if is_being_handled(model):
        raise ValueError(f"{kind} is being recorded: attach and detach before or after it.")
    names = {module: name or kind for name, module in model.named_modules()}
    through, past = attention_layers(model)
    if not through:
        found = f": {_list(past, names)} don't use its attention registry" if past else ""
        raise ValueError(f"{kind} can't be attached, for it has no attention layer of transformers' registry{found}.")
    if not any(map(is_transformers_model, model.modules())):
        raise ValueError(
            f"{kind} is a part of a transformers model, whose layers share a configuration: attach that."
        )
    if branching := branches_on_names(model):
        raise ValueError(
            f"{kind} can't be attached: {_list(branching, names)} take another way where the implementation is not "
            f"called 'sdpa'."
        )
    if past:
        warnings.warn(
            f"not attached, for they don't use transformers' attention registry: {_list(past, names)}.", stacklevel=3
        )


def _list(modules: list[nn.Module], names: dict[nn.Module, str]) -> str:
    return ", ".join(f"{names[module]} ({type(module).__name__})" for module in modules)


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that is registered."""
    call = read_call(module, query, key, value, attention_mask, options, padding=False)
    context, _ = attend(call)
    return context.transpose(1, 2).contiguous(), weights_of(call, context, options)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask function that is registered: symbolic, None where transformers itself would leave it out."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    L, S = q_length, kv_length
    options = {"mask_function": causal_mask_function, **options, "q_length": L, "kv_length": S}
    meaning = meaning_of(**options)
    if meaning is None:
        skips = {
            "allow_is_causal_skip": allow_is_causal_skip,
            "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        }
        mask: Tensor | None = sdpa_mask(batch_size, **options, **skips, device=device)
        return mask
    mask_, keys, _ = meaning
    if mask_ is None and keys == S and allow_is_bidirectional_skip:
        return None
    # Without a mask a layer that is causal takes the first key for the first query's, and a single query sees all.
    if mask_ == Causal() and allow_is_causal_skip and (keys == L if L > 1 else keys == S):
        return None
    return MaskTensor(meaning, (batch_size, L, S), device)
