"""Masks from any bool tensor, its axes named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import AXIS_NAMES, Mask, broadcast, frozen, show
from clearhead.masks.tiles import Tile
from clearhead.masks.values import as_tensor


@dataclass(frozen=True, eq=False, repr=False)
class Allowed(Mask):
    """Any bool tensor, its axes named; True = may attend.

    Args:
        tensor: bool, with an axis for each letter of `axes`; an axis of size 1 broadcasts. It is not copied.
        axes: letters of ``"bhqk"`` (batch, head, query, key) in the tensor's order, each at most once.

    Raises:
        MaskError: not bool (a 0/1 float mask may mean an additive one), unknown or repeated letters, wrong
            number of axes.

    Example:
        >>> Allowed(torch.tensor([[True, False], [True, True]]), axes="qk").dense(2, 2).shape
        torch.Size([1, 1, 2, 2])
        >>> Allowed([[True, False]], axes="bk").dense(3, 2).int()[0, 0].tolist()
        [[1, 0], [1, 0], [1, 0]]
    """

    tensor: Tensor
    letters: str

    _tensors: ClassVar[tuple[str, ...]] = ("tensor",)

    def __init__(self, tensor: Tensor | Sequence[object], axes: str) -> None:
        name = type(self).__name__
        if not isinstance(axes, str) or set(axes) - set(AXIS_NAMES) or len(set(axes)) != len(axes):
            raise MaskError(
                f"{name}: axes must be letters of 'bhqk' (batch, head, query, key), each at most once, not {axes!r}."
            )
        tensor = as_tensor(name, tensor, empty=torch.bool)
        if tensor.dtype != torch.bool:
            raise MaskError(
                f"{name} takes a bool tensor, not {tensor.dtype}: a number could mean a flag or a score to add. "
                f"Convert it ({name}(t.bool(), ...)), or pass scores as attn_bias=."
            )
        if tensor.ndim != len(axes):
            raise MaskError(
                f"{name}: axes={axes!r} names {len(axes)} axes, but the tensor {tuple(tensor.shape)} has "
                f"{tensor.ndim}."
            )
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "letters", axes)

    @property
    def axes(self) -> dict[str, int]:
        """The axes that this mask fixes, and their sizes."""
        return dict(zip(self.letters, self.tensor.shape, strict=True))

    def _four_axes(self) -> Tensor:
        """The tensor with its axes in the order (b, h, q, k), size 1 where it has none."""
        order = [self.letters.index(letter) for letter in AXIS_NAMES if letter in self.letters]
        index = tuple(slice(None) if letter in self.letters else None for letter in AXIS_NAMES)
        return self.tensor.permute(order)[index]

    @property
    def _same_for_all_queries(self) -> bool:  # type: ignore[override]
        return self.axes.get("q", 1) == 1

    def _is_at_hand(self) -> bool:
        return True

    def _read(self, visible: Tensor) -> Tensor:
        return visible

    def _rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, L: int, S: int) -> Tensor:
        table = self._four_axes()
        return self._read(table[tuple(broadcast(i, table, axis) for axis, i in enumerate((b, h, q, k)))])

    def _tile(self, tile: Tile) -> Tensor:
        # The same as the rule on the tile's positions, but by cutting: slices are views, not gathers.
        table = self._four_axes()
        for axis, index in enumerate((tile.batch, tile.heads, tile.queries, tile.keys)):
            if table.shape[axis] != 1:
                cut: list[slice | Tensor] = [slice(None)] * 4
                cut[axis] = index
                table = table[tuple(cut)]
        return self._read(table)

    def _why(self, b: int, h: int, q: int, k: int, L: int, S: int) -> str:
        at = dict(zip("bhqk", (b, h, q, k), strict=True))
        where = [at[letter] if self.axes[letter] != 1 else 0 for letter in self.letters]
        return f"the tensor holds {bool(self.tensor[tuple(where)])} at {where}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show(self.tensor)}, axes={self.letters!r})"


@frozen
class Blocked(Allowed):
    """Any bool tensor, its axes named; True = hidden (the polarity of ``nn.MultiheadAttention``).

    Args and errors as in `Allowed`.

    Example:
        >>> Blocked([[False, True]], axes="bk") == ~Allowed([[False, True]], axes="bk")
        False
        >>> Blocked([[False, True]], axes="bk").dense(1, 2).tolist()
        [[[[True, False]]]]
    """

    def _read(self, visible: Tensor) -> Tensor:
        return ~visible
