"""Which attention layers a Hugging Face model has, and how they find their attention function."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

from torch import nn

REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # what a layer that goes through the registry calls it
_LOOKED_UP = "_attn_implementation"


def is_transformers_model(model: nn.Module) -> bool:
    """Whether this is a transformers model; never imports transformers itself."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def attention_layers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The attention layers of transformers models, or of parts of them: those that use its registry, and others.

    Only inside a whole model is a module known for an attention layer that doesn't use it.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return [], []
    through = [module for module in model.modules() if _uses(module, REGISTRY) and not is_transformers_model(module)]
    known = set(through)
    inside = dict.fromkeys(
        module for part in model.modules() if is_transformers_model(part) for module in part.modules()
    )
    past = [
        module
        for module in inside
        if _looks_like_attention(module)
        and not any(isinstance(part, nn.MultiheadAttention) for part in module.modules())  # has its own way
        and known.isdisjoint(module.modules())
        and not any(_looks_like_attention(part) for part in module.modules() if part is not module)
    ]
    return through, past


def _looks_like_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not isinstance(module, nn.MultiheadAttention)


def _uses(module: nn.Module, *names: str, constant: str | None = None) -> bool:
    """Whether a method of the module's class reads these names, and holds this constant."""
    kind: Any = type(module)
    return _reads(kind, names, constant)


@functools.cache
def _reads(kind: Any, names: tuple[str, ...], constant: str | None) -> bool:
    for parent in kind.__mro__:
        for method in vars(parent).values():
            code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
            if (
                isinstance(code, types.CodeType)
                and {*names} <= {*code.co_names}
                and (constant is None or any(_is_or_holds(held, constant) for held in code.co_consts))
            ):
                return True
    return False


def _is_or_holds(held: Any, constant: str) -> bool:
    return constant in held if isinstance(held, tuple | frozenset) else bool(held == constant)


def branches_on_names(model: nn.Module) -> list[nn.Module]:
    """Modules that take another way where the implementation is not called ``"sdpa"``."""
    return [module for module in model.modules() if _uses(module, _LOOKED_UP, constant="sdpa")]


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration object that transformers' layers inside the model read, once each."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation_internal", None) is not None:
            found[id(config)] = config
    return list(found.values())
