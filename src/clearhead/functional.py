"""`attention`: check, plan, run, observe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from clearhead.backends import Backend, choose
from clearhead.backends.nonfinite import set_aside
from clearhead.budget import check_observe
from clearhead.checks import Request, autocasting, check, without_added_axes
from clearhead.derived import sources
from clearhead.look import look
from clearhead.masks import Mask
from clearhead.observe import SPLIT, Observe, Seen


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    observe: None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    observe: Observe,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Seen]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    observe: Observe | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Seen]:
    r"""Scaled dot-product attention: ``softmax(scale * query key^T + attn_bias) value`` over the visible keys.

    A query that sees no key gives exactly zero. What is hidden has no influence on output or gradients, even if
    it is NaN; a query that is non-finite or sees a non-finite key or value gives NaN. With more query heads than
    key/value heads, query head h uses key/value head ``h // (Hq // Hkv)`` (grouped-query attention).

    Args:
        query: what asks.
        key: what is asked.
        value: what is given.
        mask: a `Mask`, or a bool tensor (L, S) or (B|1, Hq|1, L, S); True = may attend. None: all visible.
        attn_bias: floats added to the scaled scores; -inf hides.
        scale: the factor on the scores; None = ``E ** -0.5``.
        dropout_p: the share of weights set to zero, the others scaled up; always applies, as in torch's SDPA.
        backend: ``"native"``, ``"sdpa"``, ``"blockwise"`` or ``"reference"``; None = the first that can do the call.
        observe: what to look at; it changes no bit of the output and not the backend.
        softcap: c > 0 bounds the scaled scores: ``s = c * tanh(s / c)``, before `attn_bias` and mask. None: no bound.
        sinks: a logit for each query head, which takes part in the softmax like one more key that everyone sees,
            and has no value: rows sum to less than 1. -inf = none. A query that sees no key still gives zero.

    Shapes:
        query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev) -> (B, Hq, L, Ev), Hq a multiple of Hkv.
        Also (B, L, E) and (L, E): one head, without its axis. attn_bias (L|1, S|1) or (B|1, Hq|1, L|1, S|1).
        sinks (Hq,).

    Returns:
        The context; with `observe` a pair (context, `Seen`).

    Raises:
        ShapeError: sizes, dtypes or devices that don't fit, with the numbers. A ValueError.
        MaskError: a mask that doesn't fit or can be read in two ways. A ValueError.
        IndexError: an `At` outside the inputs.
        BackendError: the backend asked for can't do the call, with its reasons. A RuntimeError.
        TooLargeError: what is to be observed takes more than its `allow_bytes`. A MemoryError.

    References:
        Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762), equation 1. Ainslie et al. 2023,
        "GQA" (arXiv 2305.13245). Gemma Team 2024, "Gemma 2" (arXiv 2408.00118), section 2, for `softcap`. Xiao et
        al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453), section 3.3, and
        Miller 2023, "Attention Is Off By One" (a sink of 0), for `sinks`.

    Example:
        >>> query, memory = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16)  # 8 query heads share 2
        >>> attention(query, memory, memory, KeyPadding(lengths=[7, 4])).shape
        torch.Size([2, 8, 5, 16])
        >>> out, seen = attention(query, memory, memory, observe=Observe(weights=At(heads=[2], queries=[-1])))
        >>> seen.weights.shape
        torch.Size([2, 1, 1, 7])
        >>> _, seen = attention(query, memory, memory, sinks=torch.zeros(8), observe=Observe(weights=True, rest=True))
        >>> torch.allclose(seen.weights.sum(-1) + seen.rest, torch.ones(2, 8, 5))
        True
    """
    request = check(query, key, value, mask, attn_bias, scale, dropout_p, softcap, sinks)
    if observe is not None:
        check_observe(observe, request)
    chosen = choose(request, backend)
    request = request.seeded()
    if not autocasting(request.query.device.type):
        return _attend(request, chosen, observe)
    with in_own_precision(request):
        return _attend(request, chosen, observe)


def _attend(request: Request, chosen: Backend, observe: Observe | None) -> Tensor | tuple[Tensor, Seen]:
    finite, aside = (request, None) if chosen.careful else set_aside(request)
    context, found = chosen.see(finite, None if observe is None else sources(observe, request))
    if aside is not None:
        context = aside.restore(context)
    out = context if request.axes == 4 else without_added_axes(context, request.axes)
    return out if observe is None else (out, seen_of(request, context, observe, found))


def in_own_precision(request: Request) -> AbstractContextManager[Any]:
    """Autocast ends where a call begins: the inputs' dtype decides, and statistics stay float32."""
    device = request.query.device.type
    return torch.autocast(device, enabled=False) if autocasting(device) else nullcontext()


def seen_of(request: Request, context: Tensor | None, observe: Observe, found: dict[str, Any] | None = None) -> Seen:
    """What `observe` asks for of a call whose context is known.

    Args:
        request: the call.
        context: (B, Hq, L, Ev), whoever computed it; None where nobody did and it isn't asked for.
        observe: what is asked.
        found: statistics that are known already.
    """
    seen: dict[str, Any] = {
        name: getattr(request, name) for name in SPLIT if name != "context" and observe.asks(name)
    }
    seen |= look(request, observe, found or {})
    if observe.context:
        seen["context"] = context
    return Seen(
        {name: _as_asked(part, request, observe) for name, part in seen.items()}, request.mask, request.sizes, observe
    )


def _as_asked(part: Any, request: Request, observe: Observe) -> Any:
    """Without the axes that the caller's tensors didn't have, and without the graph unless asked."""
    if isinstance(part, dict):
        return {name: _as_asked(value, request, observe) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(_as_asked(value, request, observe) for value in part)
    part = without_added_axes(part, request.axes)
    return part if observe.grad else part.detach()
