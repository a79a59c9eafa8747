"""`record`: what every attention layer of a whole model does while it runs, with its output untouched."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.budget import check_size
from clearhead.compat import torch_layers
from clearhead.compat.call import Call, Run, look_at, request_of
from clearhead.compat.cores import handling_core, has_core
from clearhead.compat.transformers import Handler, handling
from clearhead.compat.transformers_layers import attention_layers
from clearhead.layers import Layers, choose_layers
from clearhead.observe import Observe, Seen
from clearhead.recording import Recording


@contextmanager
def record(model: nn.Module, observe: Observe, layers: Layers = None) -> Iterator[Recording]:
    """While this lasts, look into the attention layers of a model whenever they run.

    The model keeps its own kernels and its output is bit-equal to an unrecorded run; statistics are computed
    beside it, in O(L) memory; of clearhead's own kernels (its modules, and under `clearhead.attach`) they come from
    the same pass. In self-attention padded queries are dead rows in what is recorded (never in the output), so
    `received` counts real queries only. Of a static cache only the keys that exist are recorded. What gradient
    checkpointing computes again in the backward pass is not recorded again.

    Of torch's modules the softmax is recorded that their arguments mean: the fast path of an encoder layer hides all
    that a float mask doesn't leave at 0, and gives NaN where a query sees nothing; a recording does neither.
    Unbatched inputs are a batch of one; nested tensors are as long as their longest sequence; the keys of
    ``add_bias_kv`` and ``add_zero_attn`` are the last ones, in this order.

    Args:
        model: any module that contains transformers models or is a part of one (their attention going through the
            registry, by ``"sdpa"``, ``"eager"`` or `clearhead.attach`), `MultiHeadAttention`, or torch's
            ``nn.MultiheadAttention`` and its transformer layers, on any path they take. Padding of clearhead's
            modules is read from `KeyPadding`.
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
        TooLargeError: in the first call, what the layers together would take is more than ``allow_bytes``.

    Warns:
        UserWarning: attention layers that can't be recorded, and that ran all the same, by name; torch's attention
            with another ``forward``, compiled, scripted or with parametrized weights; calls on the fast path of a
            torch layer that `model` is only a part of.

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
    own = [module for module in names if has_core(module)]
    torchs, unheard = torch_layers.attention_modules(model)
    recordable = {*own, *foreign, *torchs}
    _check_model(model, names, recordable, past, {names[module]: why for module, why in unheard.items()})
    chosen = choose_layers({name: module for module, name in names.items() if module in recordable}, layers)
    recording = Recording(list(names.values()))

    sized = False

    def fits(call: Call) -> None:
        nonlocal sized
        if not sized:  # before the first layer is looked at: what all of them will take
            check_size(observe, request_of(call, observe), layers=len(chosen))
            sized = True

    def asked(call: Call) -> Observe | None:
        """What to look at: nothing again in a checkpoint's second run, unless its graph must be the same again."""
        fits(call)
        return observe if observe.grad or not _runs_again() else None

    def keep(call: Call, seen: Seen | None) -> None:
        if seen is not None and not _runs_again():
            recording.add(names[call.module], _kept(seen))

    def handle(call: Call, run: Run) -> Tensor:
        context, seen = run(call, asked(call))
        keep(call, seen)
        return context

    def heard(call: Call) -> None:
        wanted = asked(call)
        keep(call, None if wanted is None else look_at(call, wanted))

    with ExitStack() as stack:
        if foreign:
            # All that is asked for, and what will have to be named if it runs.
            mine = {*chosen, *(past if layers is None else ())} - {*own, *torchs}
            handler = stack.enter_context(handling(model, Handler(handle, mine, listens=True)))
        for module in own:
            if module in chosen:
                stack.enter_context(handling_core(module, handle, listens=True))
        stack.enter_context(torch_layers.listening(model, chosen.intersection(torchs), heard, grad=observe.grad))
        yield recording
        if foreign and (missed := [names[module] for module in names if module in handler.ran - handler.handled]):
            warnings.warn(
                f"not recorded, for they don't use transformers' attention registry, or were given another "
                f"implementation meanwhile: {', '.join(missed)}.",
                stacklevel=3,
            )


def _runs_again() -> bool:
    """Whether a checkpoint computes in the backward pass what was recorded in the forward pass."""
    return torch._C._current_graph_task_id() != -1


def _kept(seen: Seen) -> Seen:
    """What stays as it was seen: a static cache is written over in place."""
    return seen.with_fields({name: seen[name].clone() for name in ("key", "value") if name in seen})


def _check_model(
    model: nn.Module,
    names: dict[nn.Module, str],
    recordable: Collection[nn.Module],
    past: Sequence[nn.Module],
    unheard: dict[str, str],
) -> None:
    """Say what can't be recorded: as an error if it's all there is, else as a warning."""
    kind = type(model).__name__
    if any(_is_compiled(module) and not set(recordable).isdisjoint(module.modules()) for module in names):
        raise ValueError(
            f"{kind} holds a compiled module, which doesn't say when its layers run: record the module before "
            f"torch.compile, as in record(compiled._orig_mod, ...)."
        )
    left_out = "; ".join(f"{name or kind} ({why})" for name, why in unheard.items())
    if not recordable and past:
        listed = ", ".join(f"{names[module]} ({type(module).__name__})" for module in past)
        raise ValueError(
            f"{kind} can't be recorded: its attention layers don't use transformers' attention registry, so nothing "
            f"can listen to them: {listed}."
        )
    if not recordable:
        found = f" that can be listened to: {left_out}" if unheard else f" among its {len(names)} modules"
        raise ValueError(
            f"{kind} has nothing to record: no clearhead.MultiHeadAttention, no torch.nn.MultiheadAttention and no "
            f"attention layer of a transformers model{found}."
        )
    if unheard:
        warnings.warn(f"not recorded: {left_out}.", stacklevel=4)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
