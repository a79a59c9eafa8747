"""`Call`: one call of an attention layer, whoever wrote the layer, and how it is computed or looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from clearhead.backends.native import Native
from clearhead.budget import check_observe
from clearhead.checks import Request, check
from clearhead.derived import sources
from clearhead.functional import attention, in_own_precision, seen_of
from clearhead.masks import Mask
from clearhead.observe import Observe, Seen


class Call(NamedTuple):
    """One call of an attention layer, in clearhead's words."""

    module: nn.Module
    query: Tensor  # (B, Hq, L, E)
    key: Tensor  # (B, Hkv, S, E)
    value: Tensor  # (B, Hkv, S, Ev)
    mask: Mask | None
    attn_bias: Tensor | None
    scale: float | None
    context: Tensor | None = None  # (B, Hq, L, Ev), once it is known; some layers don't show it
    dropout_p: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,)
    padded: Mask | None = None  # hides queries that are padding, in what is seen, never in the output
    backend: str | None = None


class Run(Protocol):
    """Computes a call: its context (B, Hq, L, Ev), and what was asked for."""

    def __call__(self, call: Call, observe: Observe | None = None, /) -> tuple[Tensor, Seen | None]:
        """The call it was made for as the layer itself would, a changed one by clearhead's kernels."""


Handle = Callable[[Call, Run], Tensor]


def around(run: Run, handle: Handle) -> Run:
    """The way to run a call that leads through a handle first; what is seen on it, the handle keeps."""
    return lambda call, _=None: (handle(call, run), None)


def attend(call: Call, observe: Observe | None = None) -> tuple[Tensor, Seen | None]:
    """The context by clearhead's own kernels, and what was asked for, from the same pass where that can be."""
    if observe is not None and call.padded is None:
        return attention(*call[1:5], **_options(call), dropout_p=call.dropout_p, observe=observe)
    context = attention(*call[1:5], **_options(call), dropout_p=call.dropout_p)
    # Padded queries are dead in what is seen, and computed all the same: that takes a pass of its own.
    return context, None if observe is None else look_at(call._replace(context=context), observe)


def look_at(call: Call, observe: Observe) -> Seen:
    """What was asked for of a call whose context is known, in a pass of its own; dropout is left out."""
    request = request_of(call, observe)
    context = call.context
    if context is None and observe.context:  # ours, on what the layer was given
        context = attention(*call[1:5], **_options(call))
    with in_own_precision(request):
        return seen_of(request, context, observe, Native().look(request, sources(observe, request)))


def request_of(call: Call, observe: Observe) -> Request:
    """The call as its statistics see it, checked: padded queries hidden, nothing dropped."""
    if call.padded is not None:
        call = call._replace(mask=call.padded if call.mask is None else call.mask & call.padded)
    request = check(*call[1:5], call.attn_bias, call.scale, 0.0, call.softcap, call.sinks)
    check_observe(observe, request)
    return request


def _options(call: Call) -> dict[str, Any]:
    return {
        "attn_bias": call.attn_bias,
        "scale": call.scale,
        "softcap": call.softcap,
        "sinks": call.sinks,
        "backend": call.backend,
    }
