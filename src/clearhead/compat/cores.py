"""clearhead's own modules: a handle in the place of a module's core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from clearhead.checks import check
from clearhead.compat.call import Call, Handle, Run, around, attend, look_at
from clearhead.compat.standins import plain_copies, stand_in
from clearhead.masks import And, KeyPadding, Mask, QueryPadding
from clearhead.multihead import Core
from clearhead.observe import Observe, Seen


def has_core(module: nn.Module) -> bool:
    """Whether the module computes its attention by a core of clearhead's."""
    return isinstance(getattr(module, "core", None), Core)


@contextmanager
def handling_core(mha: nn.Module, handle: Handle, *, listens: bool = False) -> Iterator[None]:
    """While this lasts, `handle` gets the calls of the module's core, be it `Core` or one with a forward of its own.

    Args:
        mha: the module.
        handle: gets each `Call` and a way to run it, and returns the context.
        listens: whether it changes nothing; it then sees what the others have changed.

    Raises:
        ValueError: a second one that listens.
    """
    core = mha.get_submodule("core")
    there = vars(core).get("forward")
    instead = there if isinstance(there, _Instead) else _Instead(mha, core, instead_of=there)
    if listens and instead.listener is not None:
        raise ValueError(f"{type(mha).__name__} is being recorded already: ask for all you want in one Observe.")
    with plain_copies(mha), plain_copies(core):
        before = mha.register_forward_pre_hook(stand_in(partial(instead.before)), with_kwargs=True)
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
                if instead.instead_of is None:
                    del vars(core)["forward"]
                else:
                    vars(core)["forward"] = instead.instead_of


class _Instead:
    """What stands in the place of a core's forward: the handles' way to the call, around the core's own."""

    def __init__(self, mha: nn.Module, core: nn.Module, instead_of: Callable[..., Any] | None) -> None:
        self.mha = mha
        self.own = core.forward
        self.is_plain = instead_of is None and type(core).forward is Core.forward
        self.instead_of = instead_of  # what makes it a stand-in
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
        given = options.pop("mask")
        mask = check(query, key, value, given, None, None, 0.0).mask
        itself = getattr(self._call, "itself", False) and key.shape[2] == query.shape[2]  # no keys were added
        padded = padding_in(mask) if itself else None
        call = Call(self.mha, query, key, value, mask, padded=padded, **options)
        seen: Seen | None = None

        def run(asked: Call, more: Observe | None = None) -> tuple[Tensor, Seen | None]:
            nonlocal seen
            if not self.is_plain:
                options.update({name: getattr(asked, name) for name in options})
                result = self.own(
                    *asked[1:4], mask=given if asked.mask is mask else asked.mask, observe=observe, **options
                )
                context, seen = (result, None) if observe is None else result
                return context, None if more is None else look_at(asked._replace(context=context), more)
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
