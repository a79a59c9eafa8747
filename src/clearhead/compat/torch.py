"""Torch's attention module and encoder layer on `clearhead.attention`: the same arguments, the same state dict."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.backends.nonfinite import by_rows
from clearhead.checks import check
from clearhead.compat import torch_masks
from clearhead.errors import MaskError, ShapeError
from clearhead.functional import in_own_precision, seen_of
from clearhead.linear import linear
from clearhead.masks import Allowed, Causal, Mask, mask_from_mha
from clearhead.multihead import PLAIN, Core
from clearhead.observe import At, Observe

ROWS = 512  # of a feed-forward block at a time


class MultiheadAttention(nn.MultiheadAttention):
    r"""``torch.nn.MultiheadAttention`` on `clearhead.attention`: same arguments, same state dict, same results.

    Where torch's results depend on the path it takes, or are not a number, these are one and defined:
    ``docs/torch.md`` has the list. Masks are torch's: True = *hidden*, floats are added to the scores.

    Args:
        embed_dim: model width D of queries and output.
        num_heads: heads H; embed_dim must be divisible by it.
        dropout: the share of attention weights dropped while training.
        bias: whether the projections have one.
        add_bias_kv: add a learned key and value to each sequence, behind the others, that every query sees.
        add_zero_attn: add a key and value of zeros to each sequence, behind the others, that every query sees.
        kdim: width of the keys; None = embed_dim.
        vdim: width of the values; None = embed_dim.
        batch_first: (B, L, D) instead of (L, B, D).
        device: of the parameters.
        dtype: of the parameters.

    Shapes:
        query (L, B, D), key (S, B, kdim), value (S, B, vdim) -> (L, B, D), with the batch first if so asked;
        query (L, D), key (S, kdim), value (S, vdim) -> (L, D). Or nested tensors, batch first.

    Raises:
        ValueError: sizes below 1, or embed_dim not divisible by num_heads.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2.

    Example:
        >>> mha = MultiheadAttention(embed_dim=8, num_heads=2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> output, weights = mha(x, x, x, is_causal=True)
        >>> output.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim > 0 and num_heads > 0 and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be divisible by num_heads, but {embed_dim} = {embed_dim // num_heads} x {num_heads} "
                f"+ {embed_dim % num_heads}: change one of them."
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.core = SlowPathCore()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (L, B, D), or (B, L, D) with `batch_first`, or (L, D).
            key: (S, B, kdim), (B, S, kdim) or (S, kdim).
            value: (S, B, vdim), (B, S, vdim) or (S, vdim).
            key_padding_mask: (B, S) or (S); True = padding, or floats to add to the scores.
            need_weights: whether to return the weights, too; it changes no bit of the output.
            attn_mask: (L, S) or (B * H, L, S); True = hidden, or floats to add to the scores.
            average_attn_weights: return their mean over the heads.
            is_causal: hide the future, from the first key on, whatever the other masks say.

        Returns:
            The output, and the weights (B, L, S), (B, H, L, S) or without B as the query; None if not asked for.
            A query that sees nothing gives the bias of ``out_proj``, and weights of zero.

        Raises:
            TypeError: query, key or value that is no tensor.
            ShapeError: inputs that don't fit. A ValueError.
            MaskError: masks that don't fit. A ValueError.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
        if query.is_nested or key.is_nested or value.is_nested:
            given = key_padding_mask is not None or attn_mask is not None
            return self._forward_nested(query, key, value, need_weights, average_attn_weights, is_causal, given)
        inputs = self._batched(query, key, value)
        B, L, S = self._sizes(*inputs)
        if query.ndim == 2 and key_padding_mask is not None and key_padding_mask.ndim == 1:
            key_padding_mask = key_padding_mask[None]
        added = (self.bias_k is not None) + bool(self.add_zero_attn)
        mask, bias = _meaning(attn_mask, key_padding_mask, is_causal, (B, self.num_heads, L, S), added)
        context, weights = self._attend(inputs, mask, bias, need_weights, average_attn_weights)
        output: Tensor = self.out_proj(self._merge(context))
        if query.ndim == 2:
            return output.squeeze(self._batch_axis), None if weights is None else weights[0]
        return output, weights

    @property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    def _batched(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """With a batch axis, where torch wants it."""
        if len({tensor.ndim for tensor in inputs}) > 1 or inputs[0].ndim not in (2, 3):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise ShapeError(f"query, key and value must all have 2 axes, or all 3 with the batch; got {shapes}.")
        return inputs if inputs[0].ndim == 3 else tuple(tensor.unsqueeze(self._batch_axis) for tensor in inputs)

    def _sizes(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
        """B, L, S of inputs that fit."""
        batch, length = self._batch_axis, 1 - self._batch_axis
        for name, tensor, width in zip(
            ("query", "key", "value"), (query, key, value), (self.embed_dim, self.kdim, self.vdim), strict=True
        ):
            if tensor.shape[-1] != width:
                raise ShapeError(f"{name} must be {width} wide, not {tensor.shape[-1]} as in {tuple(tensor.shape)}.")
        B, L, S = query.shape[batch], query.shape[length], key.shape[length]
        if not B == key.shape[batch] == value.shape[batch] or value.shape[length] != S:
            raise ShapeError(
                f"key and value must have the same length, and query, key and value the same batch: with "
                f"batch_first={self.batch_first}, query is {tuple(query.shape)}, key {tuple(key.shape)}, value "
                f"{tuple(value.shape)}."
            )
        return B, L, S

    def _attend(
        self, inputs: tuple[Tensor, ...], mask: Mask | None, bias: Tensor | None, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The context (B, H, L, E), and the weights."""
        query, key, value = (self._split(tensor) for tensor in by_rows(self._projections(), inputs))
        if self.bias_k is not None and self.bias_v is not None:
            key, value = self._with(key, self.bias_k), self._with(value, self.bias_v)
        if self.add_zero_attn:
            key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        dropout_p = self.dropout if self.training else 0.0
        context: Tensor = self.core(
            query, key, value, mask=mask, attn_bias=bias, scale=None, dropout_p=dropout_p, backend=None
        )
        if not need_weights:
            return context, None
        request = check(query, key, value, mask, bias, None, 0.0)

        def weights(heads: int | None) -> Tensor:
            with in_own_precision(request):
                found = seen_of(request, context, Observe(weights=At(heads=heads), grad=True)).weights
            return cast("Tensor", found).to(context.dtype)

        if not average:
            return context, weights(None)
        total = weights(0)
        for head in range(1, query.shape[1]):  # one at a time: all together would be H times as large
            total = total + weights(head)
        return context, (total / query.shape[1]).squeeze(1)

    def _projections(self) -> list[Any]:
        packed, bias = self.in_proj_weight, self.in_proj_bias
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [partial(linear, weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]

    def _split(self, projected: Tensor) -> Tensor:
        """(B, L, D) or (L, B, D) -> (B, H, L, E), a view."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _merge(self, context: Tensor) -> Tensor:
        """(B, H, L, E) -> (B, L, D) or (L, B, D)."""
        return (context.transpose(1, 2) if self.batch_first else context.permute(2, 0, 1, 3)).flatten(-2)

    def _with(self, heads: Tensor, learned: Tensor) -> Tensor:
        """(B, H, S, E) with the learned (1, 1, D) behind."""
        row = learned.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).to(heads.dtype)
        return torch.cat([heads, row.expand(heads.shape[0], -1, -1, -1)], dim=2)

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool,
        average: bool,
        is_causal: bool,
        masked: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Nested tensors: padded, their padding hidden, and nested again; the weights (B, ..., L, S) stay padded."""
        inputs = (query, key, value)
        if masked:
            raise MaskError("nested tensors carry their lengths: they take neither key_padding_mask nor attn_mask.")
        if not (self.batch_first and all(tensor.is_nested and tensor.dim() == 3 for tensor in inputs)):
            raise ShapeError(
                f"nested query, key and value must be nested all three, of sequences (length, width), with "
                f"batch_first=True; here batch_first={self.batch_first} and they have "
                f"{', '.join(str(tensor.dim()) for tensor in inputs)} axes."
            )
        sequences = {id(tensor): tensor.unbind() for tensor in inputs}
        padded = {at: nn.utils.rnn.pad_sequence(list(parts), batch_first=True) for at, parts in sequences.items()}
        lengths, of_keys, of_values = ([len(part) for part in sequences[id(tensor)]] for tensor in inputs)
        if of_keys != of_values:
            raise ShapeError(f"key and value must have the same lengths: {of_keys} and {of_values}.")
        output, weights = self.forward(  # not called: hooks on this module have one call
            padded[id(query)],
            padded[id(key)],
            padded[id(value)],
            key_padding_mask=_beyond(of_keys, query.device),
            need_weights=need_weights,
            average_attn_weights=average,
            is_causal=is_causal,
        )
        if weights is not None:
            beyond = _beyond(lengths, query.device)
            weights = weights.masked_fill(beyond[:, :, None] if average else beyond[:, None, :, None], 0.0)
        rows = [row[:length] for row, length in zip(output, lengths, strict=True)]
        if query.layout == torch.jagged and query.lengths() is None:  # type: ignore[attr-defined]
            # The very offsets of the query: else torch takes the two for tensors of other lengths.
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), query.offsets()), weights  # type: ignore[attr-defined]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer``; in eval its feed-forward block takes some rows at a time.

    That block is four times as wide as the model: with attention in O(L) memory it would need the most.
    """

    def _ff_block(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self._by_rows(x):
            return super()._ff_block(x)
        rows = x.reshape(-1, x.shape[-1])
        output = torch.empty_like(rows)
        for part, into in zip(rows.split(ROWS), output.split(ROWS), strict=True):
            into.copy_(super()._ff_block(part))
        return output.view(x.shape)

    def _by_rows(self, x: Tensor) -> bool:
        """Whether each row is by itself, and nobody listens who would be called for each part."""
        layers = (self.linear1, self.linear2, self.dropout, self.dropout2)
        return (
            not self.training
            and bool(self.activation_relu_or_gelu)
            and not (torch.compiler.is_compiling() or x.is_nested)
            and all(type(layer) in (*PLAIN, nn.Dropout) for layer in layers)
            and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        )


class SlowPathCore(Core):
    """A core that keeps torch's encoder layers from their fast path, which would pass the attention by.

    They take it in eval, reading the weights of ``self_attn`` themselves, unless a module inside has a hook.
    """

    def __init__(self) -> None:
        super().__init__()
        # Torch numbers hooks from 0: this one is never replaced, not even in a module that was pickled.
        self._forward_pre_hooks[-1] = _nothing


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that is there."""


def _meaning(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    sizes: tuple[int, int, int, int],
    added: int,
) -> tuple[Mask | None, Tensor | None]:
    """The mask and bias that torch's arguments mean, with structure where they have some.

    Args:
        attn_mask: (L, S) or (B * H, L, S).
        key_padding_mask: (B, S).
        is_causal: hide the future.
        sizes: (B, H, L, S).
        added: keys behind the others, which every query sees.
    """
    B, H, L, S = sizes
    shapes = [tuple(part.shape) for part in (attn_mask, key_padding_mask) if isinstance(part, Tensor)]
    if attn_mask is not None and shapes[0] not in ((L, S), (B * H, L, S)):
        raise MaskError(
            f"attn_mask must be (L, S) = {(L, S)} or (B * num_heads, L, S) = {(B * H, L, S)}, not {shapes[0]}."
        )
    if key_padding_mask is not None and shapes[-1] != (B, S):
        raise MaskError(f"key_padding_mask must be (B, S) = {(B, S)}, or (S,) without batch, not {shapes[-1]}.")
    if attn_mask is not None and torch_masks.is_causal(attn_mask):
        attn_mask, is_causal = None, True
    if key_padding_mask is not None:
        key_padding_mask = torch_masks.as_flags(key_padding_mask)
    if added:
        attn_mask, key_padding_mask = (
            part if part is None else F.pad(part, (0, added)) for part in (attn_mask, key_padding_mask)
        )
    mask, bias = mask_from_mha(attn_mask, key_padding_mask, num_heads=H)
    if is_causal:
        causal: Mask = Causal(align="start")
        if added:
            device = None if mask is None else mask.device
            causal = causal | Allowed(torch.arange(S + added, device=device) >= S, axes="k")
        mask = causal if mask is None else causal & mask
    return mask, bias


def _beyond(lengths: list[int], device: torch.device) -> Tensor:
    """(B, longest), True where a sequence is over."""
    positions = torch.arange(max(lengths, default=0), device=device)
    return positions >= torch.tensor(lengths, device=device).reshape(-1, 1)
