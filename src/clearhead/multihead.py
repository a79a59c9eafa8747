"""`MultiHeadAttention`: project, split, attend, merge, project."""

from __future__ import annotations

import math
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from clearhead.errors import ShapeError
from clearhead.functional import attention
from clearhead.masks import Mask
from clearhead.observe import MODULE, Observe, Seen


class Core(nn.Module):
    """Attention on split heads; no parameters. A place for hooks, and for sharding the heads."""

    @overload
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, observe: None = None, **options: Any
    ) -> Tensor: ...
    @overload
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, observe: Observe, **options: Any
    ) -> tuple[Tensor, Seen]: ...
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, observe: Observe | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Seen]:
        """`clearhead.attention` on (B, H, L, E) inputs, with its options."""
        return attention(query, key, value, observe=observe, **options)


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention: several attentions side by side, each in a subspace of its own.

        head_h = attention(query W_q[h], key W_k[h], value W_v[h])
        output = [head_1 ... head_H] W_o

    The four projections are modules, called as such: replace them to add an activation
    (``mha.q_proj = nn.Sequential(mha.q_proj, nn.ReLU())``), hook them, or wrap them. Initial weights are Xavier
    uniform on each projection, biases zero.

    Args:
        embed_dim: model width D of queries and output.
        num_heads: query heads Hq.
        num_kv_heads: key/value heads Hkv; None = num_heads. Fewer is grouped-query attention, 1 multi-query.
        head_dim: width E of a query/key head; None = embed_dim // num_heads, which then must divide evenly.
        value_head_dim: width Ev of a value head; None = head_dim.
        kdim: width of the keys; None = embed_dim.
        vdim: width of the values; None = kdim, so that one memory serves as both.
        bias: whether the projections have one.
        dropout_p: the share of attention weights dropped while training; none in eval.
        scale: the factor on the scores; None = ``head_dim ** -0.5``.
        device: of the parameters.
        dtype: of the parameters.

    Shapes:
        query (B, L, D), key (B, S, kdim), value (B, S, vdim) -> (B, L, D).

    Raises:
        ValueError: embed_dim not divisible by num_heads, or num_heads by num_kv_heads; sizes below 1.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2: q_proj, k_proj, v_proj are
        :math:`W^Q, W^K, W^V` with all heads side by side, out_proj is :math:`W^O`.

    Example:
        >>> mha = MultiHeadAttention(embed_dim=64, num_heads=8)
        >>> x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
        >>> mha(x).shape, mha(x, memory, mask=KeyPadding(lengths=[7, 4])).shape
        (torch.Size([2, 5, 64]), torch.Size([2, 5, 64]))
        >>> y, seen = mha(x, mask=Causal(), observe=Observe.all())
        >>> seen.weights.shape, seen.merged.shape
        (torch.Size([2, 8, 5, 5]), torch.Size([2, 5, 64]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout_p: float = 0.0,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads: {num_heads} is not one of {num_kv_heads}."
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim must be divisible by num_heads, but {embed_dim} = {embed_dim // num_heads} x "
                    f"{num_heads} + {embed_dim % num_heads}: change one of them, or give head_dim."
                )
            head_dim = embed_dim // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        kdim = embed_dim if kdim is None else kdim
        vdim = kdim if vdim is None else vdim
        widths = {"head_dim": head_dim, "value_head_dim": value_head_dim, "kdim": kdim, "vdim": vdim}
        for name, size in widths.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}.")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, not {scale}.")
        if not 0.0 <= dropout_p <= 1.0:
            raise ValueError(f"dropout_p must be between 0 and 1, not {dropout_p}.")
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.dropout_p = dropout_p
        self.scale = scale

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj: nn.Module = linear(embed_dim, num_heads * self.head_dim)
        self.k_proj: nn.Module = linear(kdim, num_kv_heads * self.head_dim)
        self.v_proj: nn.Module = linear(vdim, num_kv_heads * self.value_head_dim)
        self.out_proj: nn.Module = linear(num_heads * self.value_head_dim, embed_dim)
        self.core = Core()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights on each projection, zero biases; of replaced projections nothing is touched."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        attn_bias: Tensor | None = None,
        observe: None = None,
        backend: str | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        attn_bias: Tensor | None = None,
        observe: Observe,
        backend: str | None = None,
    ) -> tuple[Tensor, Seen]: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        attn_bias: Tensor | None = None,
        observe: Observe | None = None,
        backend: str | None = None,
    ) -> Tensor | tuple[Tensor, Seen]:
        """Attend.

        Args:
            query: (B, L, D).
            key: (B, S, kdim), the memory of cross-attention; None = the query itself (self-attention).
            value: (B, S, vdim); None = the key.
            mask: a `Mask`, or a bool tensor (L, S) or (B|1, Hq|1, L, S); True = may attend.
            attn_bias: floats added to the scaled scores, (L|1, S|1) or (B|1, Hq|1, L|1, S|1).
            observe: what to look at.
            backend: as in `clearhead.attention`.

        Returns:
            (B, L, D); with `observe` a pair (output, `Seen`). A query that sees nothing gives ``out_proj(0)``.

        Raises:
            TypeError: a mask in the place of key or value.
            ShapeError, MaskError, BackendError: as in `clearhead.attention`.
        """
        _check_inputs(query, key, value)
        key = query if key is None else key
        value = key if value is None else value
        for name, given, projection in (
            ("query", query, self.q_proj),
            ("key", key, self.k_proj),
            ("value", value, self.v_proj),
        ):
            _check_fits(name, given, projection)
        projected = {
            "query_projected": self.q_proj(query),
            "key_projected": self.k_proj(key),
            "value_projected": self.v_proj(value),
        }
        q = _split(projected["query_projected"], self.head_dim)
        k = _split(projected["key_projected"], self.head_dim)
        v = _split(projected["value_projected"], self.value_head_dim)
        options: dict[str, Any] = {
            "mask": mask,
            "attn_bias": attn_bias,
            "scale": self.scale,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "backend": backend,
        }
        if observe is None:
            return cast("Tensor", self.out_proj(_merge(self.core(q, k, v, **options))))
        context, seen = self.core(q, k, v, observe=observe, **options)
        merged = _merge(context)
        output = self.out_proj(merged)
        parts = {**projected, **seen, "merged": merged, "output": output}
        kept = {
            name: part if name not in MODULE or observe.grad else part.detach()
            for name, part in parts.items()
            if observe.asks(name)
        }
        return output, Seen(kept, seen.mask, seen.sizes)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same attention as a ``torch.nn.MultiheadAttention``: weights copied, same device and dtype.

        The result takes (B, L, D) whatever the module's ``batch_first``, and clearhead's masks: convert the
        module's own mask arguments with `mask_from_mha`.

        Args:
            module: with packed (``in_proj_weight``) or separate (``kdim``, ``vdim``) projections.

        Raises:
            ValueError: ``add_bias_kv`` or ``add_zero_attn``, which have no counterpart here.

        Example:
            >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(1, 3, 8)
            >>> torch.allclose(MultiHeadAttention.from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
            True
        """
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise ValueError(
                "from_torch can't carry over add_bias_kv or add_zero_attn: they add keys that are in no input."
            )
        parameter = module.out_proj.weight
        mha = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout_p=module.dropout,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        projections = [cast("nn.Linear", p) for p in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)]
        sources = [*zip(weights, biases, strict=True), (module.out_proj.weight, module.out_proj.bias)]
        with torch.no_grad():
            for projection, (weight, bias) in zip(projections, sources, strict=True):
                projection.weight.copy_(weight)
                projection.weight.requires_grad_(weight.requires_grad)
                if bias is not None:
                    projection.bias.copy_(bias)
                    projection.bias.requires_grad_(bias.requires_grad)
        return mha.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as a ``torch.nn.MultiheadAttention`` with ``batch_first=True``.

        Raises:
            ValueError: grouped heads, other head widths, another scale, or replaced projections: torch's module
                has none of these.

        Example:
            >>> mha = MultiHeadAttention(8, 2).eval()
            >>> x = torch.randn(1, 3, 8)
            >>> torch.allclose(mha.to_torch()(x, x, x)[0], mha(x), atol=1e-6)
            True
        """
        projections = (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        if not all(type(projection) is nn.Linear for projection in projections):
            raise ValueError("to_torch needs the four projections to be plain nn.Linear: one was replaced.")
        q, k, v, out = (cast("nn.Linear", projection) for projection in projections)
        D = out.out_features
        heads, kv_heads = q.out_features // self.head_dim, k.out_features // self.head_dim
        if heads != kv_heads or heads * self.head_dim != D or self.value_head_dim != self.head_dim:
            raise ValueError(
                f"torch's module needs heads x width = embed_dim for query, key and value: here D={D}, "
                f"{heads} query and {kv_heads} key/value heads, widths E={self.head_dim}, Ev={self.value_head_dim}."
            )
        if self.scale is not None and self.scale != self.head_dim**-0.5:
            raise ValueError(f"torch's module scales by head_dim ** -0.5, not by {self.scale}.")
        module = nn.MultiheadAttention(
            D,
            heads,
            dropout=self.dropout_p,
            bias=q.bias is not None,
            kdim=k.in_features,
            vdim=v.in_features,
            batch_first=True,
            device=q.weight.device,
            dtype=q.weight.dtype,
        )
        with torch.no_grad():
            if module.in_proj_weight is not None:
                module.in_proj_weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
            else:
                module.q_proj_weight.copy_(q.weight)
                module.k_proj_weight.copy_(k.weight)
                module.v_proj_weight.copy_(v.weight)
            module.out_proj.weight.copy_(out.weight)
            if q.bias is not None:
                module.in_proj_bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
                module.out_proj.bias.copy_(out.bias)
        _freeze_alike(module, q, k, v, out)
        return module.train(self.training)

    def extra_repr(self) -> str:
        """What the projections don't show."""
        return f"head_dim={self.head_dim}, value_head_dim={self.value_head_dim}, dropout_p={self.dropout_p}"


def _freeze_alike(module: nn.MultiheadAttention, q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear) -> None:
    """What is frozen stays frozen; a packed parameter is frozen if all its parts are."""
    if module.in_proj_weight is not None:
        module.in_proj_weight.requires_grad_(any(p.weight.requires_grad for p in (q, k, v)))
    else:
        module.q_proj_weight.requires_grad_(q.weight.requires_grad)
        module.k_proj_weight.requires_grad_(k.weight.requires_grad)
        module.v_proj_weight.requires_grad_(v.weight.requires_grad)
    module.out_proj.weight.requires_grad_(out.weight.requires_grad)
    if module.in_proj_bias is not None:
        module.in_proj_bias.requires_grad_(any(p.bias.requires_grad for p in (q, k, v)))
        module.out_proj.bias.requires_grad_(out.bias.requires_grad)


def _split(projected: Tensor, head_dim: int) -> Tensor:
    """(B, L, H * E) -> (B, H, L, E); H is read from the width, so a shard of the heads works as well."""
    if projected.shape[-1] % head_dim:
        raise ShapeError(
            f"a projection gives {projected.shape[-1]} features, not a multiple of the head width {head_dim}."
        )
    split: Tensor = projected.unflatten(-1, (-1, head_dim))
    return split.transpose(-3, -2)


def _merge(context: Tensor) -> Tensor:
    """(B, H, L, Ev) -> (B, L, H * Ev)."""
    return context.transpose(-3, -2).flatten(-2)


def _check_fits(name: str, given: Tensor, projection: nn.Module) -> None:
    """A replaced projection takes what it likes; of a plain one the width and dtype are known."""
    if type(projection) is not nn.Linear:
        return
    weight = projection.weight
    if given.shape[-1] != projection.in_features:
        raise ShapeError(
            f"{name} must be (batch, length, {projection.in_features}), not {tuple(given.shape)}: its last axis is "
            f"{given.shape[-1]} wide."
        )
    if given.dtype != weight.dtype and not torch.is_autocast_enabled(given.device.type):
        raise ShapeError(
            f"{name} is {given.dtype} and the parameters are {weight.dtype}: convert one of them with .to()."
        )


def _check_inputs(query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if isinstance(tensor, Mask) or (isinstance(tensor, Tensor) and tensor.dtype == torch.bool):
            raise TypeError(f"got a mask in the place of {name}: pass it by name, mask=...")
    if key is None and value is not None:
        raise TypeError("value was given without key: pass both, or the memory alone as key.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
        if tensor.ndim != 3:
            raise ShapeError(
                f"{name} must be (batch, length, width), batch first, not {tuple(tensor.shape)}: "
                f"a single sequence is {name}[None]."
            )
