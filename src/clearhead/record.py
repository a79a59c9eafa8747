"""`record`: what every attention layer of a whole model does while it runs, with its output untouched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from clearhead.backends.native import Native
from clearhead.checks import check, check_observe
from clearhead.compat.call import Call
from clearhead.compat.transformers import is_transformers_model, listening
from clearhead.derived import sources
from clearhead.functional import in_own_precision, seen_of
from clearhead.masks import And, KeyPadding, Mask, QueryPadding
from clearhead.multihead import MultiHeadAttention
from clearhead.observe import Observe
from clearhead.recording import Recording


@contextmanager
def record(model: nn.Module, observe: Observe) -> Iterator[Recording]:
    """While this lasts, look into every attention layer of a model whenever it runs.

    The model keeps its own kernels and its output is bit-equal to an unrecorded run; statistics are computed
    beside it, in O(L) memory. In self-attention padded queries are dead rows in what is recorded (never in the
    output), so `received` counts real queries only.

    Args:
        model: any module that contains transformers models (their attention going through the registry, by
            ``"sdpa"`` or ``"eager"``) or `MultiHeadAttention`. Padding of the latter is read from `KeyPadding`.
        observe: what to look at; `Seen` has the fields of `clearhead.attention` (but ``dropped_weights``).

    Shapes:
        those of `Observe`, for each layer's own (B, Hq, L, S).

    Yields:
        A `Recording`, filled while the model runs, and kept afterwards.

    Raises:
        ValueError: nothing in the model can be recorded, with the reason.

    Example:
        >>> layers = torch.nn.ModuleDict({"first": MultiHeadAttention(8, 2), "second": MultiHeadAttention(8, 4)})
        >>> with record(layers, Observe(entropy=True, received=True)) as recording:
        ...     _ = layers["second"](layers["first"](torch.randn(1, 3, 8)))
        >>> recording["second"].received.shape, recording[1] is recording["second"]
        (torch.Size([1, 4, 3]), True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record takes a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(observe, Observe):
        raise TypeError(f"observe must be an Observe, as in Observe(entropy=True), not {observe!r}.")
    # A recorded call is looked at without its dropout, whose mask the model doesn't show.
    observe = replace(observe, dropped_weights=False)
    names = {module: name for name, module in model.named_modules()}
    own = [module for module in names if isinstance(module, MultiHeadAttention)]
    foreign = _outermost([module for module in names if is_transformers_model(module)])
    _check_model(model, names, bool(own or foreign))
    recording = Recording(list(names.values()))

    def heard(call: Call) -> None:
        name = names.get(call.module)
        if name is None:
            return  # another model that shares this one's configuration
        request = check(call.query, call.key, call.value, call.mask, call.attn_bias, call.scale, 0.0)
        check_observe(observe, request)
        with in_own_precision(request):
            seen = seen_of(request, call.context, observe, Native().look(request, sources(observe, request)))
        recording.add(name, seen)

    with ExitStack() as stack:
        for module in foreign:
            stack.enter_context(listening(module, heard))
        for module in own:
            stack.enter_context(_listening_to(module, heard))
        yield recording


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that are inside no other."""
    inside = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inside]


def _check_model(model: nn.Module, names: dict[nn.Module, str], something: bool) -> None:
    """Say what can't be recorded: as an error if it's all there is, else as a warning."""
    kind = type(model).__name__
    if any(type(module).__name__ == "OptimizedModule" for module in names):
        raise ValueError(
            f"{kind} holds a compiled module, which doesn't say when its layers run: record the module before "
            f"torch.compile, as in record(compiled._orig_mod, ...)."
        )
    torchs = [name or kind for module, name in names.items() if isinstance(module, nn.MultiheadAttention)]
    if not something:
        found = f" ({len(torchs)} torch.nn.MultiheadAttention, to be converted by from_torch)" if torchs else ""
        raise ValueError(
            f"{kind} has nothing to record: no clearhead.MultiHeadAttention and no transformers model among its "
            f"{len(names)} modules{found}."
        )
    if torchs:
        warnings.warn(f"not recorded: torch.nn.MultiheadAttention at {', '.join(torchs)}.", stacklevel=4)


@contextmanager
def _listening_to(mha: MultiHeadAttention, heard: Callable[[Call], None]) -> Iterator[None]:
    """While this lasts, `heard` is called after every call of a clearhead module."""
    call = threading.local()

    def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        query, key, *_rest = [*args, None, None]
        query, key = options.get("query", query), options.get("key", key)
        call.itself = key is None or key is query

    def after(_: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any], result: Any) -> None:
        context = result[0] if isinstance(result, tuple) else result
        mask, bias = options["mask"], options["attn_bias"]
        mask = with_padded_queries(mask) if call.itself and isinstance(mask, Mask) else mask
        query, key, value = args
        heard(Call(mha, query, key, value, mask, bias, options["scale"], context))

    handles = [
        mha.register_forward_pre_hook(before, with_kwargs=True),
        mha.core.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_padded_queries(mask: Mask) -> Mask:
    """In self-attention, what is padding as a key is padding as a query: the mask with those queries hidden."""
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, KeyPadding):
            same = QueryPadding(part.lengths, side=part.side) if part.real is None else QueryPadding(real=part.real)
            mask = mask & same
    return mask
