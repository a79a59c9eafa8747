"""`convert`: torch's attention modules and transformer layers to clearhead's, in place, and back."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeVar

from torch import nn

from clearhead.compat.torch import MultiheadAttention, SlowPathCore, TransformerEncoderLayer

M = TypeVar("M", bound=nn.Module)

# Where an encoder keeps whether it made nested tensors.
_BEFORE = "_nested_before_clearhead"

_made: dict[type[Any], type[MultiheadAttention]] = {}


def convert(model: M, to: Literal["clearhead", "torch"] = "clearhead") -> M:
    """Put clearhead's attention in the place of torch's, in a whole model, or torch's back.

    Every ``nn.MultiheadAttention`` becomes a `clearhead.compat.MultiheadAttention`, wherever it stands: by itself, in
    ``nn.TransformerEncoderLayer`` and ``DecoderLayer``, in ``nn.Transformer``. The modules stay the objects they are
    and take another class: parameters, hooks, names, training flags and state dict are untouched, optimizers stay
    valid. Torch's fast path, which reads the weights of a layer and passes its modules by, is not taken any more, and
    an ``nn.TransformerEncoder`` makes no nested tensors of its own. ``docs/torch.md`` lists what is different then.

    Args:
        model: any module. It is changed in place.
        to: ``"clearhead"``, or ``"torch"`` to go back.

    Returns:
        The model.

    Raises:
        TypeError: not a module.
        ValueError: another `to`; or the way back would lose what was done to a ``core``. Nothing is changed then.

    Warns:
        UserWarning: names attention modules that are left alone, since they have a ``forward`` of their own.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = convert(torch.nn.TransformerEncoder(layer, num_layers=2)).eval()
        >>> alibi = -(torch.arange(5)[:, None] - torch.arange(5)).abs().float()
        >>> model(torch.randn(3, 5, 8), mask=alibi).shape  # (B, L, D)
        torch.Size([3, 5, 8])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, not {type(model).__name__}.")
    if to not in ("clearhead", "torch"):
        raise ValueError(f"convert goes to 'clearhead' or to 'torch', not to {to!r}.")
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    classes = {module: _class(module, to) for module in names}
    if to == "torch":
        _check_cores(names, classes)
    left = [f"{name} ({type(m).__name__})" for m, name in names.items() if classes[m] is None]
    if left:
        warnings.warn(f"not converted, having a forward of their own: {', '.join(left)}.", stacklevel=2)
    for module, kind in classes.items():
        if kind is not None and kind is not type(module):
            module.__class__ = kind
            if isinstance(module, nn.MultiheadAttention):
                _exchange_core(module)
        if isinstance(module, nn.TransformerEncoder):
            _exchange_nesting(module, to)
    return model


def _class(module: nn.Module, to: str) -> type[nn.Module] | None:
    """The class that the module is to have; None for attention with a forward that is neither torch's nor ours."""
    kind: type[Any] = type(module)
    if isinstance(module, nn.MultiheadAttention):
        known = kind.forward in (nn.MultiheadAttention.forward, MultiheadAttention.forward)
        if not known or "forward" in vars(module):
            return None
        if to == "clearhead":
            return kind if isinstance(module, MultiheadAttention) else _on_clearhead(kind)
        return _before(kind)
    if to == "clearhead":
        return TransformerEncoderLayer if kind is nn.TransformerEncoderLayer else kind
    return nn.TransformerEncoderLayer if kind is TransformerEncoderLayer else kind


def _on_clearhead(kind: type[Any]) -> type[MultiheadAttention]:
    """Torch's class as ours; a class derived from it, with names of its own, as one derived from both."""
    if kind is nn.MultiheadAttention:
        return MultiheadAttention
    if kind not in _made:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduce}
        _made[kind] = type(kind.__name__, (MultiheadAttention, kind), names)
    return _made[kind]


def _before(kind: type[nn.Module]) -> type[nn.Module] | None:
    if not issubclass(kind, MultiheadAttention):
        return kind
    if kind is MultiheadAttention:
        return nn.MultiheadAttention
    return kind.__bases__[1] if _is_made_here(kind) else None


def _is_made_here(kind: type[nn.Module]) -> bool:
    return kind.__dict__.get("__reduce__") is _reduce


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    """How a copy or a pickle makes a class anew that stands in no file."""
    return _blank, (type(module).__bases__[1],), module.__getstate__()


def _blank(kind: type[Any]) -> nn.Module:
    made = _on_clearhead(kind)
    return made.__new__(made)


def _check_cores(names: dict[nn.Module, str], classes: dict[nn.Module, type[nn.Module] | None]) -> None:
    for module, name in names.items():
        if isinstance(module, MultiheadAttention) and classes[module] is not None:
            core = module.core
            ours = type(core) is SlowPathCore and len(core._forward_pre_hooks) == 1 and "forward" not in vars(core)
            if not ours or core._forward_hooks or core._backward_hooks or core._backward_pre_hooks:
                raise ValueError(
                    f"torch's module has no core, and that of {name} was replaced, has hooks or is being recorded: "
                    f"undo that first."
                )


def _exchange_core(module: nn.MultiheadAttention) -> None:
    if isinstance(module, MultiheadAttention):
        module.core = SlowPathCore().train(module.training)
    else:
        del module.core


def _exchange_nesting(encoder: nn.TransformerEncoder, to: str) -> None:
    """Its nested tensors would turn soft padding masks into hard ones, and its padded rows into zeros."""
    if to == "clearhead" and _BEFORE not in vars(encoder):
        setattr(encoder, _BEFORE, getattr(encoder, "use_nested_tensor", False))
        encoder.use_nested_tensor = False
    elif to == "torch" and _BEFORE in vars(encoder):
        encoder.use_nested_tensor = getattr(encoder, _BEFORE)
        delattr(encoder, _BEFORE)
