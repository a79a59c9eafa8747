"""What a backward pass reads again must still be what it was: a tensor changed in place in between is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


def watch(*parts: Any) -> Callable[[], None]:
    """A check of the tensors in these parts (tensors, masks, None), to be called before they are read again.

    Raises:
        RuntimeError: from the check, as torch's own: one of them was changed in place since.
    """
    if torch.compiler.is_compiling():
        return _nothing  # a compiled program keeps what it reads again
    tensors = [leaf for leaf in _pytree.tree_leaves(parts) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in tensors]

    def check() -> None:
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"one of the tensors needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}, not {version}. Change it "
                    f"after the backward pass, or pass a clone."
                )

    return check


def _nothing() -> None:
    pass
