"""clearhead's own modules: a handle in the place of a module's core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead.checks import check
from clearhead.compat.call import Call, Handle, Run, around, attend, look_at
from clearhead.masks import And, KeyPadding, Mask, QueryPadding
from clearhead.multihead import Core
from clearhead.observe import Observe, Seen


def has_core(module: nn.Module) -> bool:
    """Whether the module computes its attention by a core of clearhead's."""
    return isinstance(getattr(module, "core", None), Core)


@contextmanager
def handling_core(mha: nn.Module, handle: Handle, *, listens: bool = False) -> Iterator[None]:
    """While this lasts, `handle` gets the calls of the module's core.

    Args:
        mha: the module.
        handle: gets each `Call` and a way to run it, and returns the context.
        listens: whether it changes nothing; it then sees what the others have changed.

    Raises:
        ValueError: a second one that listens.
    """
    core = mha.get_submodule("core")
    instead = vars(core).get("forward")
    if not isinstance(instead, _Instead):
        instead = _Instead(mha)
    if listens and instead.listener is not None:
        raise ValueError(f"{type(mha).__name__} is being recorded already: ask for all you want in one Observe.")
    before = mha.register_forward_pre_hook(instead.before, with_kwargs=True)
    if listens:
        instead.listener = handle
    else:
        instead.handles.append(handle)
    vars(core)["forward"] = instead
    try:
        yield
    finally:
        before.remove()
        if listens:
            instead.listener = None
        else:
            instead.handles.remove(handle)
        if not instead.handles and instead.listener is None and vars(core).get("forward") is instead:
            del vars(core)["forward"]


class _Instead:
    """What stands in the place of a core's forward: the handles' way to the call, around the core's own."""

    def __init__(self, mha: nn.Module) -> None:
        self.mha = mha
        self.handles: list[Handle] = []
        self.listener: Handle | None = None
        self._call = threading.local()

    def before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note whether the module attends to its own queries: the core can't tell."""
        query, key, *_rest = [*args, None, None]
        query, key = options.get("query", query), options.get("key", key)
        self._call.itself = key is None or key is query

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, observe: Observe | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Seen]:
        mask = check(query, key, value, options.pop("mask"), None, None, 0.0).mask
        itself = getattr(self._call, "itself", False) and key.shape[2] == query.shape[2]  # no keys were added
        padded = padding_in(mask) if itself else None
        call = Call(self.mha, query, key, value, mask, padded=padded, **options)
        seen: Seen | None = None

        def run(asked: Call, more: Observe | None = None) -> tuple[Tensor, Seen | None]:
            nonlocal seen
            if observe is None:
                return attend(asked, more)
            context, seen = attend(asked._replace(padded=None), observe)  # as the module's own caller asked
            return context, None if more is None else look_at(asked._replace(context=context), more)

        through: Run = run
        for handle in (self.listener, *self.handles):  # the last is called first
            through = through if handle is None else around(through, handle)
        context, _ = through(call)
        return context if observe is None or seen is None else (context, seen)


def padding_in(mask: Mask | None) -> Mask | None:
    """In self-attention, what is padding as a key is padding as a query: None, or those queries hidden."""
    found: Mask | None = None
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, KeyPadding):
            same = QueryPadding(part.lengths, side=part.side) if part.real is None else QueryPadding(real=part.real)
            found = same if found is None else found & same
    return found
