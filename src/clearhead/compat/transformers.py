"""Hugging Face transformers: a function of ours in the place of each attention layer's own.

Every attention layer looks its function up by ``config._attn_implementation`` at every forward pass. While a model is
`handled`, the name that it finds there leads to our function, which reads the arguments as a `Call` and gives that to
a handle, together with a way to run it: the layer's own function with the very same arguments, or clearhead's kernels
where these are attached or the handle has changed the call.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from clearhead.compat.call import Call, Handle, Run, around, attend, look_at, request_of
from clearhead.compat.standins import plain_copies, stand_in
from clearhead.compat.transformers_calls import crosses, note_memory, read_call, weights_of
from clearhead.compat.transformers_layers import REGISTRY, configurations
from clearhead.compat.transformers_masks import meaning_of, tag
from clearhead.observe import Observe, Seen

ATTACHED = "clearhead"  # the implementation that `clearhead.attach` sets
_SUPPORTED = ("sdpa", "eager", ATTACHED)


# -- the place of ours -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Handler:
    """A handle and the layers that it is for, with what came of it.

    Attributes:
        handle: gets the `Call` and a way to run it, and returns the context.
        layers: the layers whose calls it gets; of all others nothing is read.
        listens: whether it changes nothing; those come last, and see what the others have changed.
        ran: layers whose forward pass began while it lasted.
        handled: layers whose calls it got.
    """

    handle: Handle
    layers: Collection[nn.Module]
    listens: bool = False
    ran: set[nn.Module] = field(default_factory=set)
    handled: set[nn.Module] = field(default_factory=set)


class _Name(str):
    """Reads as the implementation it stands for, which models branch on, but is found by identity: it leads to ours.

    A copy of a configuration carries the plain one.
    """

    own: str
    handlers: list[Handler]

    def __new__(cls, own: str) -> Self:
        itself = super().__new__(cls, own)
        itself.own, itself.handlers = own, []
        return itself

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        return copy.copy, (self.own,)


_changing = Lock()  # the names in configurations, which several models may share


@contextmanager
def handling(model: nn.Module, handler: Handler) -> Iterator[Handler]:
    """While this lasts, the handler is called in the place of its layers' attention functions.

    Several may be at work at once, on the same layers too; each may `run` the call as it came, or a changed one.

    Raises:
        ValueError: an implementation other than ``"sdpa"``, ``"eager"`` or clearhead's own, or two that listen to
            one layer.
    """
    configs = configurations(model)
    _check(model, configs, handler)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        handler.ran.add(module)
        note_memory(module, args, options)

    hooks = [layer.register_forward_pre_hook(stand_in(before), with_kwargs=True) for layer in handler.layers]
    names: list[tuple[Any, _Name]] = []
    copies = ExitStack()
    try:
        for layer in handler.layers:
            copies.enter_context(plain_copies(layer))
        with _changing:
            for config in configs:
                name = config._attn_implementation_internal
                if not isinstance(name, _Name):
                    name = config._attn_implementation_internal = _registered(_Name(name))
                name.handlers.append(handler)
                names.append((config, name))
        yield handler
    finally:
        for hook in hooks:
            hook.remove()
        copies.close()
        with _changing:
            for config, name in names:
                name.handlers.remove(handler)
                if not name.handlers:
                    if config._attn_implementation_internal is name:  # else someone chose another meanwhile
                        config._attn_implementation_internal = name.own
                    for interface in interfaces():
                        interface._global_mapping.pop(name, None)


def interfaces() -> tuple[Any, Any]:
    """Where transformers looks up an implementation's attention function, and the one that makes its masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface


def _check(model: nn.Module, configs: list[Any], handler: Handler) -> None:
    kind = type(model).__name__
    for config in configs:
        name = config._attn_implementation_internal
        if name not in _SUPPORTED:
            raise ValueError(
                f"{kind} runs attention by {name!r}; clearhead supports {' and '.join(map(repr, _SUPPORTED))}: call "
                f"model.set_attn_implementation('sdpa') first."
            )
        others = name.handlers if isinstance(name, _Name) else []
        if any(handler.listens and other.listens and set(handler.layers) & set(other.layers) for other in others):
            raise ValueError(f"{kind} is being recorded already: ask for all you want in one Observe.")


def _registered(name: _Name) -> _Name:
    functions, masks = interfaces()
    functions.register(name, _function(name))
    # The mask that a model is given depends on the name as well: the layer's own function must get what it expects.
    make = masks._global_mapping[name.own]

    def make_mask(*args: Any, **options: Any) -> Any:
        mask = make(*args, **options)
        if type(mask) is Tensor and not args and (meaning := meaning_of(**options)) is not None:
            return tag(mask, meaning)
        return mask

    masks.register(name, make_mask)
    return name


def _function(name: _Name) -> Callable[..., Any]:
    """What stands under a name: the handlers' way to a call, around the layer's own function."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        def plain() -> Any:
            own = _own_function(module, name.own)
            return own(module, query, key, value, attention_mask, **options)

        handlers = [handler for handler in name.handlers if module in handler.layers]
        if not handlers:
            return plain()
        call = read_call(module, query, key, value, attention_mask, options, added=name == "eager")
        if crosses(module):
            call = call._replace(padded=None)
        ran, weights = call, None

        def itself(asked: Call, observe: Observe | None = None, /) -> tuple[Tensor, Seen | None]:
            nonlocal ran, weights
            ran, weights = asked, None
            if asked is not call or name == ATTACHED:
                return attend(asked, observe)
            if observe is not None:
                request_of(asked, observe)  # what can't be seen is refused before anything is computed
            context, weights = plain()
            context = context.transpose(1, 2)  # transformers has (B, L, Hq, Ev)
            return context, None if observe is None else look_at(asked._replace(context=context), observe)

        run: Run = itself
        for handler in sorted(handlers, key=lambda handler: not handler.listens):  # outwards: listeners are inside
            handler.handled.add(module)
            run = around(run, handler.handle)
        context, _ = run(call)
        if ran is not call or name == ATTACHED:
            weights = weights_of(ran, context, options)
        return context.transpose(1, 2).contiguous(), weights

    return cast("Callable[..., Any]", attention_forward)


def _own_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """What the layer would have called: looked up as it does, where its class or the one it comes from is defined."""
    for kind in type(module).__mro__:
        names = vars(sys.modules.get(kind.__module__, object))
        if REGISTRY in names:
            eager = names.get("eager_attention_forward")
            found = names[REGISTRY].get_interface(implementation, eager)
            if found is not None:
                return cast("Callable[..., Any]", found)
    raise ValueError(f"{type(module).__name__} has no eager attention: call model.set_attn_implementation('sdpa').")


def is_being_handled(model: nn.Module) -> bool:
    """Whether some handler is at work on the model."""
    return any(isinstance(config._attn_implementation_internal, _Name) for config in configurations(model))
