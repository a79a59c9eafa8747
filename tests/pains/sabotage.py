"""How a protection is removed: a function of the library with a piece of its source replaced.

Where the source no longer has that piece, the removal says so: then the protection has moved, and its entry in the
list must follow.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pains.encoder import FORMS

Check = partial[None]


@dataclass(frozen=True)
class Removal:
    """One protection removed.

    Attributes:
        name: what goes wrong then.
        where: the module or class whose function is changed.
        function: its name.
        old: the piece of source that protects.
        new: what stands there instead.
        breaks: the checks that must fail, each on its own.
        error: how they fail: not by the check's own judgement where torch itself then raises.
    """

    name: str
    where: Any
    function: str
    old: str
    new: str
    breaks: tuple[Check, ...]
    error: type[Exception] = AssertionError

    @property
    def rows(self) -> set[int]:
        """The rows of the table whose checks it breaks."""
        return {int(check.func.__module__.split("test_")[1][:2]) for check in self.breaks}

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Change the function, wherever the library has imported it."""
        held = inspect.getattr_static(self.where, self.function)
        original = getattr(held, "fget", None) or getattr(held, "__func__", held)
        changed = _rewritten(original, self.old, self.new)
        patch.setattr(self.where, self.function, changed)
        for name, module in list(sys.modules.items()):
            if name.startswith("clearhead") and getattr(module, self.function, None) is original:
                patch.setattr(module, self.function, changed)


def _rewritten(function: Any, old: str, new: str) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    if old not in source:
        raise LookupError(f"{function.__qualname__} has no {old!r}: which protection stands there now?")
    # Outside its class a method must say whose super it means.
    source = source.replace(old, new).replace("super()", f"super({function.__qualname__.split('.')[0]}, self)")
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<{function.__qualname__} without {old}>", "exec", flags)
    names: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, names)  # decorators are part of the source
    return names[function.__name__]


# Where the norms stand makes no difference to what fails.
BROKEN = FORMS[:3]


def each(check: Callable[..., None], forms: tuple[str, ...] = BROKEN, **options: Any) -> tuple[Check, ...]:
    """The check on every form."""
    return tuple(partial(check, form, **options) for form in forms)


def one(check: Callable[..., None], *args: Any, **options: Any) -> tuple[Check]:
    """A check that has no form."""
    return (partial(check, *args, **options),)
