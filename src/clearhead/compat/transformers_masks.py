"""What the masks of Hugging Face transformers mean, as clearhead's masks: no table of L x S where it can be helped.

A mask function of transformers is given a rule on positions, built of a few known ones, with the lengths and offsets
of queries and keys: those are read here (`meaning_of`). What was built otherwise, or by the user, is a tensor
(`read_tensor`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from clearhead.masks import Allowed, Causal, KeyPadding, Mask, QueryPadding, Segments, Window

_RULES = "transformers.masking_utils"


class Meaning(NamedTuple):
    """What a mask says of L queries and the keys that exist."""

    mask: Mask | None
    keys: int  # a static cache has room for more than exist
    padded: QueryPadding | None  # padding among the queries, if they are of the same sequence as the keys


def meaning_of(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Meaning | None:
    """What the arguments of a mask function mean; None where they hold a rule that isn't known.

    Query i stands at position i + q_offset, key j at j + kv_offset.
    """
    rules = _rules(mask_function)
    if rules is None or torch.compiler.is_compiling() or not (attention_mask is None or attention_mask.ndim == 2):
        return None
    if "remapped" in rules and "packed" not in rules:
        return None
    L, S, shift = q_length, kv_length, int(q_offset) - kv_offset
    relative = {"causal", "window", "both sides"} & rules.keys()
    if "causal" in rules:
        if not 0 <= shift <= S - L:
            return None
        S = shift + L  # keys behind the last query don't exist yet
    elif relative and shift != S - L:
        return None
    parts: list[Mask] = []
    if "window" in rules:
        parts.append(Window(left=rules["window"] - 1, right=0 if "causal" in rules else None))
    elif "causal" in rules:
        parts.append(Causal())
    if "both sides" in rules:
        parts.append(Window(rules["both sides"], rules["both sides"]))
    if "packed" in rules:
        parts.append(Segments(rules["packed"]))
    if "chunks" in rules:
        at = range(int(q_offset), int(q_offset) + L), range(kv_offset, kv_offset + S)
        parts.append(_chunks(rules["chunks"], *at))
    keys = queries = None
    if attention_mask is not None:
        missing = kv_offset + S - attention_mask.shape[1]
        real = F.pad(attention_mask.bool(), (0, max(0, missing)))
        keys, queries = real[:, kv_offset : kv_offset + S], real[:, int(q_offset) : int(q_offset) + L]
        if not bool(keys.all()):
            parts.append(KeyPadding(real=keys))
        else:
            queries = None
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = mask & part  # type: ignore[operator]
    return Meaning(mask, S, _padded(queries, keys, L, causal="causal" in rules))


def _padded(queries: Tensor | None, keys: Tensor | None, L: int, *, causal: bool) -> QueryPadding | None:
    """Padding among the queries, where the mask itself doesn't leave it without a key."""
    if queries is None or keys is None or queries.shape[1] != L or bool(queries.all()):
        return None
    if causal and bool((keys[:, 1:] >= keys[:, :-1]).all()):
        return None  # on the left: what comes before it is padding, too
    return QueryPadding(real=queries)


def _chunks(rule: tuple[int, Tensor], queries: range, keys: range) -> Segments:
    """Positions are counted from each item's first token, and cut into chunks of a size."""
    size, first = rule
    query, key = (
        (torch.tensor(at, device=first.device) - first[:, None]).div(size, rounding_mode="floor")
        for at in (queries, keys)
    )
    return Segments(query, key)


def _rules(function: Callable[..., Any]) -> dict[str, Any] | None:
    """The known rules that all must say yes, with their parameters; None if there are others."""
    if getattr(function, "__module__", None) != _RULES or not inspect.isfunction(function):
        return None
    held = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.split(".")[0]:
        case "causal_mask_function":
            return {"causal": True}
        case "bidirectional_mask_function":
            return {}
        case "sliding_window_overlay":
            return {"window": held["sliding_window"]}
        case "sliding_window_bidirectional_overlay":
            return {"both sides": held["sliding_window"]}
        case "chunked_overlay":
            return {"chunks": (held["chunk_size"], held["left_padding"])}
        case "packed_sequence_mask_function":
            return {"packed": held["packed_sequence_mask"]}
        case "remap_positions_for_packed_sequence":
            # Inside a packed sequence positions count on as indices do, and its own rule keeps to one sequence.
            rules = _rules(held["mask_function"])
            return None if rules is None or "chunks" in rules else {**rules, "remapped": True}
        case "and_masks":
            return _all_of([_rules(part) for part in held["mask_functions"]])
    return None


def _all_of(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    joined: dict[str, Any] = {}
    for rules in parts:
        if rules is None or (rules.keys() & joined.keys()) - {"causal", "remapped"}:
            return None
        joined |= rules
    return joined


def read_tensor(tensor: Tensor, *, added: bool) -> tuple[Mask | None, Tensor | None]:
    """The mask and the bias that a tensor (B|1, H|1, L, S) means.

    Args:
        tensor: bool, True = may attend, or floats: the dtype's minimum (or -inf) hides, all else is a bias.
        added: whether the layer adds even flags, as 0 and 1.
    """
    if tensor.dtype == torch.bool and not added:
        return Allowed(tensor, axes="bhqk"), None
    if tensor.dtype == torch.bool:
        return None, tensor.float()
    visible = tensor > torch.finfo(tensor.dtype).min
    bias = tensor.masked_fill(~visible, 0.0)
    return Allowed(visible, axes="bhqk"), bias if bool(bias.any()) else None


def padding_in(mask: Mask | None) -> QueryPadding | None:
    """In self-attention a token that no query may look at is padding, and so is the query at its place."""
    if not isinstance(mask, Allowed):
        return None
    real = mask.tensor.any(dim=2).any(dim=1)
    return None if bool(real.all()) else QueryPadding(real=real)


# -- a mask that passes through a model as a tensor --------------------------------------------------------------


class MaskTensor(Tensor):
    """A bool tensor (B, 1, L, S) that says what it means, and holds no numbers until somebody asks for them."""

    meaning: Meaning
    _numbers: Tensor | None

    @staticmethod
    def __new__(cls, meaning: Meaning, sizes: tuple[int, int, int], device: torch.device | str) -> Self:
        """Of sizes B, L, S."""
        B, L, S = sizes
        device = torch.device(device)
        itself = Tensor._make_wrapper_subclass(cls, (B, 1, L, S), dtype=torch.bool, device=device)
        itself.meaning, itself._numbers = meaning, None
        return itself

    def numbers(self) -> Tensor:
        """As an ordinary tensor; the same one each time, so that what is written into it counts."""
        if self._numbers is None:
            self._numbers = self._dense()
        return self._numbers

    def _dense(self) -> Tensor:
        B, _, L, S = self.shape
        mask, keys, _ = self.meaning
        seen = torch.ones(1, 1, L, keys, dtype=torch.bool) if mask is None else mask.dense(L, keys)
        return F.pad(seen.to(self.device), (0, S - keys)).repeat(B // len(seen), 1, 1, 1)

    def says_what_it_means(self) -> bool:
        """Whether nobody has written into it."""
        return self._numbers is None or torch.equal(self._numbers, self._dense())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Whoever computes with it gets its numbers."""
        if func is torch.ops.aten.detach.default and args[0]._numbers is None:
            (mask,) = args
            return cls(mask.meaning, (mask.shape[0], *mask.shape[2:]), mask.device)
        args, kwargs = _pytree.tree_map_only(MaskTensor, MaskTensor.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


_TAG = "_clearhead_meaning"


def tag(tensor: Tensor, meaning: Meaning) -> Tensor:
    """The tensor, with its meaning written on it."""
    # A copy of a mask for several items, as generation makes one, would lose it.
    tensor = tensor.contiguous() if tensor.shape[2] != tensor.shape[3] else tensor
    setattr(tensor, _TAG, (meaning, tensor._version))
    return tensor


def meaning_on(tensor: Tensor) -> Meaning | None:
    """What is written on a tensor, or it was made of, unless its numbers were changed since."""
    if isinstance(tensor, MaskTensor):
        return tensor.meaning if tensor.says_what_it_means() else None
    meaning, version = getattr(tensor, _TAG, (None, None))
    return meaning if tensor._version == version else None
