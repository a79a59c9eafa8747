"""From other libraries' mask arguments, and from bare tensors, to masks whose meaning is written on them."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import Mask
from clearhead.masks.relative import Causal
from clearhead.masks.tensors import Allowed, Blocked
from clearhead.masks.tokens import KeyPadding


def as_mask(mask: Mask | Tensor | None, B: int, H: int, L: int, S: int) -> Mask | None:
    """A mask, or a bool tensor whose meaning can't be mistaken, as a checked mask.

    Args:
        mask: a `Mask`; a bool tensor (L, S) or (B|1, H|1, L|1, S|1), True = may attend; or None.
        B: batch size of the call.
        H: number of query heads.
        L: number of queries.
        S: number of keys.

    Raises:
        MaskError: another dtype or shape, or a shape that can be read in two ways.
        TypeError: neither a mask nor a tensor.

    Example:
        >>> as_mask(torch.ones(2, 3, dtype=torch.bool), B=5, H=1, L=2, S=3)
        Allowed([[True, True, True], [True, True, True]], axes='qk')
    """
    if isinstance(mask, Tensor):
        mask = _from_tensor(mask, B, L, S)
    if mask is not None:
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask must be a clearhead mask, a bool tensor or None, not {type(mask).__name__}: "
                f"for example Causal() & KeyPadding(lengths=[...])."
            )
        mask._check(B, H, L, S)
    return mask


def _from_tensor(mask: Tensor, B: int, L: int, S: int) -> Mask:
    shape = tuple(mask.shape)
    if mask.layout != torch.strided:
        raise MaskError(f"a mask tensor must be dense, not {mask.layout} {shape}: use .to_dense().")
    if mask.dtype != torch.bool:
        raise MaskError(
            f"a mask tensor must be bool, True = may attend, not {mask.dtype} {shape}: a number could mean a flag "
            f"(either way round) or a score to add. Flags: Allowed(m.bool(), axes=...) or KeyPadding(real=m). "
            f"Scores: attn_bias=m."
        )
    if mask.ndim == 4:
        return Allowed(mask, axes="bhqk")
    if mask.ndim == 2 and shape == (L, S):
        if B == L != 1:
            raise MaskError(
                f"a mask {shape} can mean (L, S) or (B, S) here, since B = L = {B}: say which with "
                f"Allowed(m, axes='qk') or KeyPadding(real=m)."
            )
        return Allowed(mask, axes="qk")
    raise MaskError(
        f"a bare mask tensor must be (L, S) = {(L, S)} or (B|1, H|1, L, S) with four axes, not {shape}: "
        f"name its axes, as in Allowed(m, axes='bqk') or KeyPadding(real=m)."
    )


def mask_from_mha(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    num_heads: int | None = None,
) -> tuple[Mask | None, Tensor | None]:
    """The mask and bias that arguments of ``nn.MultiheadAttention`` mean: there True = *hidden*.

    Args:
        attn_mask: (L, S) or (B * num_heads, L, S); bool True = hidden, or floats to add to the scores.
        key_padding_mask: (B, S); bool True = padding, or floats to add.
        is_causal: torch takes it as a hint and may ignore it; here it always hides the future, aligned
            top-left as torch does.
        num_heads: needed for a three-axis `attn_mask`.

    Returns:
        (mask or None, attn_bias or None), to be passed on as ``mask=, attn_bias=``. Adding -inf hides.

    Shapes:
        attn_bias (L, S), (B, num_heads, L, S), (B, 1, 1, S), or what these broadcast to.

    Raises:
        MaskError: other shapes or dtypes.

    Example:
        >>> mask_from_mha(key_padding_mask=torch.tensor([[False, False, True]]))
        (KeyPadding(real=[[True, True, False]]), None)
    """
    masks: list[Mask] = [Causal(align="start")] if is_causal else []
    biases: list[Tensor] = []
    for name, tensor in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        _check_tensor(name, tensor)
    if attn_mask is not None:
        if attn_mask.ndim == 3:
            if not isinstance(num_heads, Integral) or num_heads < 1 or attn_mask.shape[0] % num_heads:
                raise MaskError(
                    f"attn_mask {tuple(attn_mask.shape)} has the axes (B * num_heads, L, S): give num_heads, a "
                    f"divisor of {attn_mask.shape[0]}, not {num_heads!r}."
                )
            attn_mask = attn_mask.unflatten(0, (-1, num_heads))
        elif attn_mask.ndim != 2:
            raise MaskError(f"attn_mask must be (L, S) or (B * num_heads, L, S), not {tuple(attn_mask.shape)}.")
        if _is_flags("attn_mask", attn_mask):
            masks.append(Blocked(attn_mask, axes="qk" if attn_mask.ndim == 2 else "bhqk"))
        else:
            biases.append(attn_mask)
    if key_padding_mask is not None:
        if key_padding_mask.ndim != 2:
            raise MaskError(f"key_padding_mask must be (B, S), not {tuple(key_padding_mask.shape)}.")
        if _is_flags("key_padding_mask", key_padding_mask):
            masks.append(KeyPadding(real=~key_padding_mask))
        else:
            biases.append(key_padding_mask[:, None, None, :])
    return _all_of(masks), (sum(biases[1:], start=biases[0]) if biases else None)


def mask_from_sdpa(attn_mask: Tensor | None = None, is_causal: bool = False) -> tuple[Mask | None, Tensor | None]:
    """The mask and bias that arguments of ``F.scaled_dot_product_attention`` mean: there True = *may attend*.

    Args:
        attn_mask: (L, S) or (B|1, H|1, L|1, S|1); bool True = may attend, or floats to add to the scores.
        is_causal: hides the future, aligned top-left as torch does. Torch allows one of the two; here they add up.

    Returns:
        (mask or None, attn_bias or None), to be passed on as ``mask=, attn_bias=``. Adding -inf hides.

    Shapes:
        attn_bias as `attn_mask`.

    Raises:
        MaskError: three axes (their meaning depends on the query's shape), or another dtype.

    Example:
        >>> mask_from_sdpa(is_causal=True)
        (Causal(align='start'), None)
    """
    masks: list[Mask] = [Causal(align="start")] if is_causal else []
    bias = None
    _check_tensor("attn_mask", attn_mask)
    if attn_mask is not None:
        if attn_mask.ndim not in (2, 4):
            raise MaskError(
                f"attn_mask {tuple(attn_mask.shape)}: give it two axes (L, S) or four (B|1, H|1, L, S), e.g. by "
                f"m[:, None]; what three mean depends on the query's shape."
            )
        if _is_flags("attn_mask", attn_mask):
            masks.append(Allowed(attn_mask, axes="qk" if attn_mask.ndim == 2 else "bhqk"))
        else:
            bias = attn_mask
    return _all_of(masks), bias


def _check_tensor(name: str, tensor: object) -> None:
    if tensor is not None and not isinstance(tensor, Tensor):
        raise MaskError(f"{name} must be a tensor or None, not {type(tensor).__name__}: torch.tensor(...) makes one.")


def _is_flags(name: str, tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return True
    if tensor.is_floating_point():
        return False
    raise MaskError(f"{name} must be bool or floating point, not {tensor.dtype}.")


def _all_of(masks: list[Mask]) -> Mask | None:
    if not masks:
        return None
    mask, *rest = masks
    for part in rest:
        mask = mask & part
    return mask
