"""What masks are built from, checked once: lengths, 0/1 rows, ids, bool tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.errors import MaskError

Lengths = Tensor | Sequence[int] | int
Rows = Tensor | Sequence[Sequence[int]]


def extremes(tensor: Tensor) -> tuple[int, int] | None:
    """The smallest and the largest number, read once to the host; None if there are none.

    Also None inside a compiled or exported program, whose tensors have no values yet: what depends on them is not
    checked, and nothing is skipped, there.
    """
    if tensor.numel() == 0 or torch.compiler.is_compiling():
        return None
    low, high = torch.aminmax(tensor)
    return int(low), int(high)


def span(real: Tensor) -> tuple[int | None, int | None]:
    """From the first to behind the last position (of the second axis) that any row has; None, None if unknown."""
    if torch.compiler.is_compiling():
        return None, None
    used = real.any(dim=0).nonzero()
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def spans_of_ids(query_ids: Tensor, key_ids: Tensor) -> tuple[list[int], list[int]] | None:
    """For each query the first key with its id and the one behind the last, over all rows; None if unknown.

    A query whose id no key carries has the empty span (S, 0).
    """
    if torch.compiler.is_compiling():
        return None
    S = key_ids.shape[1]
    first = torch.full((query_ids.shape[1],), S)
    behind = torch.zeros_like(first)
    rows = query_ids.shape[0] if key_ids.shape[0] == 1 else key_ids.shape[0]  # a batch may be empty
    for queries, keys in zip(query_ids.cpu().expand(rows, -1), key_ids.cpu().expand(rows, -1), strict=True):
        # Sorted stably, the keys of one id stand together, from the first position to the last.
        ids, order = keys.sort(stable=True)
        left, right = torch.searchsorted(ids, queries), torch.searchsorted(ids, queries, right=True)
        there = right > left
        first[there] = torch.minimum(first[there], order[left[there]])
        behind[there] = torch.maximum(behind[there], order[right[there] - 1] + 1)
    return first.tolist(), behind.tolist()


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """MaskError unless the value is one of the choices."""
    if value not in choices:
        raise MaskError(f"{owner}: {name} must be {' or '.join(map(repr, choices))}, not {value!r}.")


def as_tensor(owner: str, data: object, empty: torch.dtype) -> Tensor:
    """A tensor as it is, nested lists as a tensor; an empty list carries no dtype of its own and gets `empty`."""
    if isinstance(data, Tensor):
        return data
    try:
        tensor = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{owner} takes a tensor or nested lists of equal lengths: {error}.") from None
    return tensor if tensor.numel() else tensor.to(empty)


def as_integers(owner: str, name: str, data: object) -> Tensor:
    """Integers of any shape, as int64."""
    tensor = as_tensor(owner, data, empty=torch.int64)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        way_out = f" A flag for each token goes in {owner}(real=...)." if tensor.dtype == torch.bool else ""
        raise MaskError(f"{owner}: {name} must be integers, not {tensor.dtype}.{way_out}")
    # A copy: numbers of it are kept on the host, and a mask doesn't change when the caller's tensor does.
    return tensor.to(torch.int64, copy=True)


def as_lengths(owner: str, lengths: Lengths) -> Tensor:
    """(B,) lengths, at least 0; an int is a batch of one, which broadcasts."""
    tensor = as_integers(owner, "lengths", lengths)
    if tensor.ndim == 0:
        tensor = tensor[None]
    if tensor.ndim != 1:
        raise MaskError(f"{owner}: lengths must be an int or (B,), not {tuple(tensor.shape)}.")
    known = extremes(tensor)
    if known is not None and known[0] < 0:
        raise MaskError(f"{owner}: lengths must be >= 0, but one is {known[0]}.")
    return tensor


def zero_one_rows(owner: str, name: str, data: object) -> Tensor:
    """(B, tokens) flags as bool, from bool or 0/1 integers."""
    tensor = as_tensor(owner, data, empty=torch.bool)
    if tensor.ndim != 2:
        raise MaskError(f"{owner}: {name} must have two axes, (batch, tokens), not {tuple(tensor.shape)}.")
    if tensor.dtype == torch.bool:
        return tensor.clone()
    if tensor.is_floating_point() or tensor.is_complex():
        raise MaskError(f"{owner}: {name} must be bool or 0/1 integers, not {tensor.dtype}.")
    known = extremes(tensor)
    if known is not None and not 0 <= known[0] <= known[1] <= 1:
        raise MaskError(
            f"{owner}: {name} must be bool or 0/1 integers, but it holds {known[0]} to "
            f"{known[1]}. From token ids: {owner}.from_ids(ids, pad_id=...)."
        )
    return tensor.bool()


def id_rows(name: str, data: object) -> Tensor:
    """(B, tokens) ids; one row is a batch of one."""
    tensor = as_integers("Segments", name, data)
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.ndim != 2:
        raise MaskError(f"Segments: {name} must be (B, tokens) or (tokens,), not {tuple(tensor.shape)}.")
    return tensor
