"""`record`: what every attention layer of a whole model does while it runs, with its output untouched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.compat.call import Call, look_at
from clearhead.compat.transformers import Handler, Run, handling
from clearhead.compat.transformers_layers import attention_layers
from clearhead.masks import And, KeyPadding, Mask, QueryPadding
from clearhead.multihead import MultiHeadAttention
from clearhead.observe import Observe, Seen
from clearhead.recording import Recording

Layers = int | str | slice | Sequence[int | str] | None


@contextmanager
def record(model: nn.Module, observe: Observe, layers: Layers = None) -> Iterator[Recording]:
    """While this lasts, look into the attention layers of a model whenever they run.

    The model keeps its own kernels and its output is bit-equal to an unrecorded run; statistics are computed
    beside it, in O(L) memory. Under `clearhead.attach` they come from the same pass. In self-attention padded
    queries are dead rows in what is recorded (never in the output), so `received` counts real queries only. Of a
    static cache only the keys that exist are recorded. What gradient checkpointing computes again in the backward
    pass is not recorded again.

    Args:
        model: any module that contains transformers models (their attention going through the registry, by
            ``"sdpa"``, ``"eager"`` or `clearhead.attach`) or `MultiHeadAttention`. Padding of the latter is read
            from `KeyPadding`.
        observe: what to look at; `Seen` has the fields of `clearhead.attention` (but ``dropped_weights``).
        layers: which attention layers: names, or parts that names begin with (``"decoder"``), or numbers in the
            model's order, negative from the end; a list of them, or a slice; None = all. The others are left alone.

    Shapes:
        those of `Observe`, for each layer's own (B, Hq, L, S).

    Yields:
        A `Recording`, filled while the model runs, and kept afterwards.

    Raises:
        ValueError: nothing in the model can be recorded, with the reason, or it is being recorded already.
        KeyError: there is no such layer; the message lists them.

    Warns:
        UserWarning: attention layers that can't be recorded, and that ran all the same, by name.

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
    foreign, past = attention_layers(model)
    own = [module for module in names if isinstance(module, MultiHeadAttention)]
    _check_model(model, names, own + foreign, past)
    recordable = {*own, *foreign}
    chosen = _chosen({name: module for module, name in names.items() if module in recordable}, layers)
    recording = Recording(list(names.values()))

    def heard(call: Call) -> None:
        recording.add(names[call.module], look_at(call, observe))

    def handle(call: Call, run: Run) -> Tensor:
        # In the backward pass a checkpoint computes again what was recorded; a graph must be the same again.
        again = torch._C._current_graph_task_id() != -1
        context, seen = run(call, None if again and not observe.grad else observe)
        if seen is not None and not again:
            recording.add(names[call.module], _kept(seen))
        return context

    with ExitStack() as stack:
        if foreign:
            # All that is asked for, and what will have to be named if it runs.
            mine = {*chosen, *(past if layers is None else ())} - {*own}
            handler = stack.enter_context(handling(model, Handler(handle, mine, listens=True)))
        for module in own:
            if module in chosen:
                stack.enter_context(_listening_to(module, heard))
        yield recording
        if foreign and (missed := [names[module] for module in names if module in handler.ran - handler.handled]):
            warnings.warn(
                f"not recorded, for they don't use transformers' attention registry: {', '.join(missed)}.",
                stacklevel=3,
            )


def _kept(seen: Seen) -> Seen:
    """What stays as it was seen: a static cache is written over in place."""
    return seen.with_fields({name: seen[name].clone() for name in ("key", "value") if name in seen})


def _chosen(named: dict[str, nn.Module], layers: Layers) -> set[nn.Module]:
    """The layers that are asked for, by name or number.

    Raises:
        KeyError: there is no such layer.
        TypeError: neither names nor numbers.
    """
    everything = list(named)
    if layers is None:
        return set(named.values())
    found: set[str] = set()
    for layer in (layers,) if isinstance(layers, int | str | slice) else layers:
        if isinstance(layer, slice):
            found.update(everything[layer])
        elif isinstance(layer, str):
            under = [name for name in everything if name == layer or name.startswith(f"{layer}.")]
            if not under:
                raise KeyError(f"there is no attention layer {layer!r}, and none below it: {_listed(everything)}.")
            found.update(under)
        elif isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(everything) <= layer < len(everything):
                raise KeyError(f"there is no attention layer {layer}: {_listed(everything)}.")
            found.add(everything[layer])
        else:
            raise TypeError(f"layers takes names, numbers, a list of them or a slice, not {layers!r}.")
    if not found:
        raise KeyError(f"layers={layers!r} chooses none: {_listed(everything)}.")
    return {named[name] for name in found}


def _listed(names: list[str]) -> str:
    return f"there are {len(names)}, {', '.join(map(repr, names))}"


def _check_model(
    model: nn.Module, names: dict[nn.Module, str], recordable: list[nn.Module], past: list[nn.Module]
) -> None:
    """Say what can't be recorded: as an error if it's all there is, else as a warning."""
    kind = type(model).__name__
    if any(type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None for module in names):
        raise ValueError(
            f"{kind} holds a compiled module, which doesn't say when its layers run: record the module before "
            f"torch.compile, as in record(compiled._orig_mod, ...)."
        )
    torchs = [name or kind for module, name in names.items() if isinstance(module, nn.MultiheadAttention)]
    if not recordable and past:
        listed = ", ".join(f"{names[module]} ({type(module).__name__})" for module in past)
        raise ValueError(
            f"{kind} can't be recorded: its attention layers don't use transformers' attention registry, so nothing "
            f"can listen to them: {listed}."
        )
    if not recordable:
        found = f" ({len(torchs)} torch.nn.MultiheadAttention, to be converted by from_torch)" if torchs else ""
        raise ValueError(
            f"{kind} has nothing to record: no clearhead.MultiHeadAttention and no attention layer of a transformers "
            f"model among its {len(names)} modules{found}."
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
