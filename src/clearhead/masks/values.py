"""What masks are built from, checked once: lengths, 0/1 rows, ids, bool tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from clearhead.errors import MaskError
from clearhead.masks.intervals import EVERYTHING, Intervals

Lengths = Tensor | Sequence[int] | int
Rows = Tensor | Sequence[Sequence[int]]


def at_hand(tensor: Tensor) -> bool:
    """Whether its numbers can be read, here and now.

    Not in a compiled or exported program, under vmap, of a fake tensor, or on the meta device: what depends on them
    is then not checked, and nothing is skipped.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) is Tensor or type(tensor) is Parameter


def extremes(tensor: Tensor) -> tuple[int, int] | None:
    """The smallest and the largest number, read once to the host; None if there are none, or none at hand."""
    if tensor.numel() == 0 or not at_hand(tensor):
        return None
    low, high = torch.aminmax(tensor)
    return int(low), int(high)


def runs_of_ones(real: Tensor) -> tuple[int | None, int | None, Intervals | None]:
    """From the first to behind the last position that any row has, and each row's positions as one run.

    None, None, None where they are not at hand; no run where some row's positions are not together.
    """
    if not at_hand(real):
        return None, None, None
    if real.numel() == 0:
        return 0, 0, EVERYTHING
    flags, size = real.cpu().numpy(), real.shape[1]
    used = flags.any(axis=1)
    first, behind = flags.argmax(axis=1), size - flags[:, ::-1].argmax(axis=1)  # of an unused row 0 and size
    if not used.any():
        return 0, 0, Intervals(None, None, None, torch.zeros(len(real), 1, dtype=torch.int64, device=real.device))
    extent = int(first[used].min()), int(behind[used].max())
    starts = np.count_nonzero(flags[:, 0]) + np.count_nonzero(flags[:, 1:] > flags[:, :-1])
    if starts != np.count_nonzero(used):
        return *extent, None

    # No limit where there is none: padding on one side is one tensor, and an unused row's run is empty from there.
    to_the_end = bool((behind == size).all())
    if to_the_end:
        first[~used] = size
    else:
        behind[~used] = 0
    return *extent, Intervals(
        None,
        None,
        torch.from_numpy(first[:, None]).to(real.device) if first.any() else None,
        None if to_the_end else torch.from_numpy(behind[:, None]).to(real.device),
    )


def runs_of_ids(query_ids: Tensor, key_ids: Tensor) -> tuple[tuple[list[int], list[int]] | None, Intervals | None]:
    """For each query the first key with its id and the one behind the last: over all rows, and in each as a run.

    A query whose id no key carries has the empty span (S, 0). None, None where they are not at hand; no run where
    the keys of some query are not together.
    """
    if not (at_hand(query_ids) and at_hand(key_ids)):
        return None, None
    L, S = query_ids.shape[1], key_ids.shape[1]
    rows = query_ids.shape[0] if key_ids.shape[0] == 1 else key_ids.shape[0]  # a batch may be empty
    if 0 in (rows, S):
        return ([S] * L, [0] * L), EVERYTHING
    # Sorted stably, the keys of one id stand together, from the first position to the last.
    ids, order = key_ids.cpu().sort(dim=1, stable=True)
    queries = query_ids.cpu().expand(rows, -1).contiguous()
    ids = ids.expand(rows, -1).contiguous()
    left, right = torch.searchsorted(ids, queries), torch.searchsorted(ids, queries, right=True)
    order = order.expand(rows, -1)
    missing = left == right
    first = order.gather(1, left.clamp(max=S - 1)).masked_fill_(missing, S)
    behind = (order.gather(1, (right - 1).clamp(min=0)) + 1).masked_fill_(missing, 0)
    together = bool(((behind - first == right - left) | missing).all())
    run = Intervals(None, None, first.to(query_ids.device), behind.to(query_ids.device)) if together else None
    return (first.amin(dim=0).tolist(), behind.amax(dim=0).tolist()), run


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """MaskError unless the value is one of the choices."""
    if value not in choices:
        raise MaskError(f"{owner}: {name} must be {' or '.join(map(repr, choices))}, not {value!r}.")


def as_tensor(owner: str, data: object, empty: torch.dtype) -> Tensor:
    """A tensor as it is, nested lists as a tensor; an empty list carries no dtype of its own and gets `empty`."""
    if isinstance(data, Tensor):
        if data.layout != torch.strided:
            raise MaskError(f"{owner} takes a dense tensor, not {data.layout}: use .to_dense().")
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
        flags = tensor.dtype == torch.bool and owner in ("KeyPadding", "QueryPadding")  # the others take none
        way_out = f" A flag for each token goes in {owner}(real=...)." if flags else ""
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
