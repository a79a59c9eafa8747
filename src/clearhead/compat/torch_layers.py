"""torch.nn: listening to ``nn.MultiheadAttention``, alone or in torch's transformer layers, on any path they take.

Forward hooks would make torch leave its fast path, and that changes the result's last bits. So while listening a
function of ours stands in each instance's place of ``forward``, calls what was there, and passes on what it saw. On
its fast path ``nn.TransformerEncoderLayer`` doesn't call its attention at all; but it asks it to merge the masks, as
nothing else does, so that is listened to as well, and what the attention would have been given is computed anew.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from clearhead.compat.call import Call
from clearhead.compat.standins import is_stand_in, plain_copies, stand_in
from clearhead.compat.torch_masks import as_flags, is_causal
from clearhead.masks import KeyPadding, Mask, QueryPadding
from clearhead.masks.convert import mask_from_mha
from clearhead.multihead import Core

_ARGUMENTS = inspect.signature(nn.MultiheadAttention.forward)


class _Merged(threading.local):
    """What a module was last asked to merge: (attn_mask, key_padding_mask, query). Torch asks on fast paths only."""

    masks: tuple[Tensor | None, Tensor | None, Tensor] | None = None

    def while_running(
        self, forward: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None, Tensor] | None]:
        """The result, and what was merged for it, but not for a call further inside."""
        before, self.masks = self.masks, None
        try:
            return forward(*args, **options), self.masks
        finally:
            self.masks = before


def attention_modules(model: nn.Module) -> tuple[list[nn.MultiheadAttention], dict[nn.Module, str]]:
    """Torch's attention modules inside a model: those that can be listened to, and why each of the others can't."""
    heard: list[nn.MultiheadAttention] = []
    unheard: dict[nn.Module, str] = {}
    compiled = {
        part
        for module in model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None
        for part in module.modules()
    }
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) and module.original_name == "MultiheadAttention":
            unheard[module] = "it is scripted"
        elif not isinstance(module, nn.MultiheadAttention) or isinstance(getattr(module, "core", None), Core):
            continue
        elif module in compiled:
            unheard[module] = "it is compiled: record the model before .compile()"
        elif type(module).forward is not nn.MultiheadAttention.forward or _is_replaced(module):
            unheard[module] = f"{type(module).__name__} has a forward of its own"
        elif is_parametrized(module):
            unheard[module] = "its weights are parametrized, and may change when read once more"
        else:
            heard.append(module)
    return heard, unheard


@contextmanager
def listening(
    model: nn.Module, modules: Collection[nn.Module], heard: Callable[[Call], None], *, grad: bool = False
) -> Iterator[None]:
    """While this lasts, `heard` is called after every call of these ``nn.MultiheadAttention`` of the model.

    The call is the attention that the arguments mean, whatever torch's path makes of them: before dropout; with a
    soft float mask added to the scores, where the fast path of an encoder layer hides all that isn't 0; and a query
    that sees nothing is a dead row, where torch gives NaN. Its context is not known, since torch doesn't show it.

    Unbatched inputs are a batch of one. Nested tensors are padded to the longest sequence and masked by their
    lengths. Keys that the module adds itself are the last ones: first ``add_bias_kv``'s, then ``add_zero_attn``'s.

    Args:
        model: what they are part of: its encoder layers call some of them on paths of their own.
        modules: which to listen to.
        heard: called with each `Call`.
        grad: whether its tensors are to have a graph, where the model's have one. A graph nobody needs costs memory,
            and checkpointing, which counts what is kept for it, takes it for the model's.
    """
    merged = {mha: _Merged() for mha in model.modules() if mha in modules and isinstance(mha, nn.MultiheadAttention)}

    def listener(mha: nn.MultiheadAttention, *given: Any, **options: Any) -> None:
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            heard(_call(mha, *given, **options))

    with ExitStack() as stack:
        for mha in merged:
            stack.enter_context(_instead(mha, "merge_masks", _noting(mha, merged[mha])))
            stack.enter_context(_instead(mha, "forward", _hearing(mha, merged[mha], listener)))
        for layer in model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer) and layer.self_attn in merged:
                stack.enter_context(
                    _instead(layer, "forward", _hearing_fast(layer, merged[layer.self_attn], listener))
                )
        yield
        if any(note.masks for note in merged.values()):
            warnings.warn(
                "not recorded: calls on the fast path of an nn.TransformerEncoderLayer that isn't part of what is "
                "recorded, only its attention is: record the layer.",
                stacklevel=6,  # past record and what lies between
            )


def _noting(mha: nn.MultiheadAttention, merged: _Merged) -> Callable[..., Any]:
    own = mha.merge_masks

    @wraps(own)
    def merge_masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Any:
        merged.masks = attn_mask, key_padding_mask, query
        return own(attn_mask, key_padding_mask, query)

    return merge_masks


def _hearing(mha: nn.MultiheadAttention, merged: _Merged, heard: Callable[..., None]) -> Callable[..., Any]:
    own = mha.forward

    @wraps(own)
    def forward(*args: Any, **options: Any) -> Any:
        result, fast = merged.while_running(own, args, options)
        asked = _ARGUMENTS.bind(mha, *args, **options)
        asked.apply_defaults()
        given: dict[str, Any] = asked.arguments
        hidden = given["key_padding_mask"]
        # The one path on which torch follows the hint, and not the mask that it is a hint about.
        causal = given["is_causal"] and not (fast is not None or given["need_weights"] or hidden is not None)
        attn_mask = None if causal else given["attn_mask"]
        heard(mha, given["query"], given["key"], given["value"], attn_mask, hidden, causal=causal)
        return result

    return forward


def _hearing_fast(
    layer: nn.TransformerEncoderLayer, merged: _Merged, heard: Callable[..., None]
) -> Callable[..., Any]:
    own = layer.forward

    @wraps(own)
    def forward(*args: Any, **options: Any) -> Any:
        result, fast = merged.while_running(own, args, options)
        if fast is not None:
            attn_mask, hidden, x = fast
            norm = layer.norm1 if layer.norm_first else None
            heard(layer.self_attn, x, x, x, attn_mask, hidden, norm=norm)
        return result

    return forward


def _call(
    mha: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    causal: bool = False,
    norm: nn.Module | None = None,
) -> Call:
    """What the arguments mean; `norm` comes before the attention."""
    itself = key is query
    lengths = None
    if query.is_nested:  # torch takes it on fast paths only: batch first, no masks, and the same tensor three times
        lengths = [len(sequence) for sequence in query.unbind()]
        query = key = value = query.to_padded_tensor(0.0)
    rows = [_batch_first(mha, tensor) for tensor in (query, key, value)]
    rows = rows if norm is None else [norm(tensor) for tensor in rows]
    q, k, v = _split(mha, rows)
    mask: Mask | None
    if lengths is not None:
        mask, bias = KeyPadding(lengths) & QueryPadding(lengths), None
    else:
        added = k.shape[2] - rows[1].shape[1]
        mask, bias = _meaning(mha, attn_mask, key_padding_mask, causal=causal, added=added, itself=itself)
    return Call(mha, q, k, v, mask, bias, None)


def _batch_first(mha: nn.MultiheadAttention, tensor: Tensor) -> Tensor:
    """(B, L, D), from an unbatched (L, D) or torch's (L, B, D) too."""
    if tensor.ndim == 2:
        return tensor[None]
    return tensor if mha.batch_first else tensor.transpose(0, 1)


def _split(mha: nn.MultiheadAttention, rows: list[Tensor]) -> list[Tensor]:
    """Query, key and value as the heads see them, (B, H, L, E), with the keys and values that the module adds."""
    packed = mha.in_proj_weight is not None
    weights = mha.in_proj_weight.chunk(3) if packed else (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    biases = (None, None, None) if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    projected = [F.linear(x, weight, bias) for x, weight, bias in zip(rows, weights, biases, strict=True)]
    B = len(rows[0])
    for i, learned in ((1, mha.bias_k), (2, mha.bias_v)):
        if learned is not None:
            projected[i] = torch.cat([projected[i], learned.expand(B, 1, -1).to(projected[i])], dim=1)
        if mha.add_zero_attn:
            projected[i] = F.pad(projected[i], (0, 0, 0, 1))
    return [tensor.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2) for tensor in projected]


def _meaning(
    mha: nn.MultiheadAttention,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    causal: bool,
    added: int,
    itself: bool,
) -> tuple[Mask | None, Tensor | None]:
    """The mask and the bias that the arguments mean; in self-attention a padded key is a padded query too."""
    if attn_mask is not None and not added and is_causal(attn_mask):
        attn_mask, causal = None, True
    attn_mask, padding = (None if mask is None else as_flags(mask) for mask in (attn_mask, key_padding_mask))
    if padding is not None and padding.ndim == 1:
        padding = padding[None]
    # Every query sees the keys that the module adds itself.
    attn_mask, hidden = (F.pad(tensor, (0, added)) if tensor is not None else None for tensor in (attn_mask, padding))
    mask, bias = mask_from_mha(attn_mask, hidden, causal, mha.num_heads)
    if itself and padding is not None and padding.dtype == torch.bool:
        queries = QueryPadding(real=~padding)
        mask = queries if mask is None else mask & queries
    return mask, bias


_ended: WeakSet[Callable[..., Any]] = WeakSet()  # functions that pass on: what came later may end later, too


@contextmanager
def _instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, the instance has a function of ours in a method's place."""
    own = vars(module)
    before, without = own.get(name), getattr(module, name)

    @wraps(without)
    def here(*args: Any, **options: Any) -> Any:
        return (without if here in _ended else function)(*args, **options)

    with plain_copies(module):
        own[name] = stand_in(here, instead_of=before)
        try:
            yield
        finally:
            _ended.add(here)
            if own.get(name) is here:  # else someone chose another meanwhile, or began later and is still there
                while before is not None and before in _ended:
                    before = before.instead_of
                if before is None:
                    del own[name]
                else:
                    own[name] = before


def _is_replaced(module: nn.Module) -> bool:
    """Whether the instance has another forward than its class, and not by us."""
    forward = vars(module).get("forward")
    return forward is not None and not is_stand_in(forward)
