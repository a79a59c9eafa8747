"""Stand-ins: functions of ours in a module for a while, as a method or as a hook. Its copies never have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

_INSTEAD_OF = "instead_of"  # an attribute that stand-ins have: what was in their place
_STATE = "__getstate__"


def stand_in(function: F, instead_of: Callable[..., Any] | None = None) -> F:
    """The function, marked as one that stands in a place where this was; None: where nothing was."""
    setattr(function, _INSTEAD_OF, instead_of)
    return function


def is_stand_in(value: Any) -> bool:
    """Whether it is a function of ours that stands in a module."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, _INSTEAD_OF)


@contextmanager
def plain_copies(module: nn.Module) -> Iterator[None]:
    """While this lasts, copies and pickles of the module are made as if it had no stand-ins.

    A copied one would still call the module that it was made for, with that one's weights.
    """
    vars(module)[_STATE] = stand_in(partial(_plain_state, module))
    try:
        yield
    finally:
        if not _has_stand_in(module):
            vars(module).pop(_STATE, None)


def _plain_state(module: nn.Module) -> Any:
    state: Any = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    plain = {name: _before(value) for name, value in state.items()}
    ours = [number for number, hook in module._forward_pre_hooks.items() if is_stand_in(hook)]
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        plain[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key not in ours)
    return {name: value for name, value in plain.items() if value is not None or state[name] is None}


def _before(value: Any) -> Any:
    """What was there before the first stand-in; None: nothing."""
    while is_stand_in(value):
        value = getattr(value, _INSTEAD_OF)
    return value


def _has_stand_in(module: nn.Module) -> bool:
    there = [value for name, value in vars(module).items() if name != _STATE]
    return any(map(is_stand_in, [*there, *module._forward_pre_hooks.values()]))
