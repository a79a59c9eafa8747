"""`MultiHeadAttention`: project, split, attend, merge, project."""

from __future__ import annotations

from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from clearhead.backends import choose
from clearhead.backends.nonfinite import by_rows
from clearhead.budget import check_observe
from clearhead.checks import (
    AUTOCAST,
    autocasting,
    check,
    check_count,
    check_dropout,
    check_inputs,
    check_scale,
    check_widths,
)
from clearhead.errors import ShapeError
from clearhead.functional import attention
from clearhead.layouts import copy_parameters, from_other_layouts, weights_in
from clearhead.linear import Linear
from clearhead.masks import Mask
from clearhead.observe import Observe, Seen

# Projections that do this and no more: no subclass of theirs.
PLAIN = (nn.Linear, Linear)


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

    `load_state_dict` also takes torch's layouts (``in_proj_weight``; ``q_proj_weight``, ...) and one packed
    ``qkv_proj``, grouped heads included; `to_torch` writes torch's.

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
        embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
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
        self.head_dim = check_count("head_dim", head_dim)
        self.value_head_dim = head_dim if value_head_dim is None else check_count("value_head_dim", value_head_dim)
        kdim = embed_dim if kdim is None else check_count("kdim", kdim)
        vdim = kdim if vdim is None else check_count("vdim", vdim)
        self.dropout_p = check_dropout(dropout_p)
        self.scale = None if scale is None else check_scale(scale)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj: nn.Module = linear(embed_dim, num_heads * self.head_dim)
        self.k_proj: nn.Module = linear(kdim, num_kv_heads * self.head_dim)
        self.v_proj: nn.Module = linear(vdim, num_kv_heads * self.value_head_dim)
        self.out_proj: nn.Module = linear(num_heads * self.value_head_dim, embed_dim)
        self.core = Core()
        self.register_load_state_dict_pre_hook(from_other_layouts)  # type: ignore[no-untyped-call]
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
        check_inputs(query, key, value)
        key = query if key is None else key
        value = key if value is None else value
        check_widths((query, key, value), (self.q_proj, self.k_proj, self.v_proj), PLAIN)
        options: dict[str, Any] = {
            "mask": mask,
            "attn_bias": attn_bias,
            "scale": self.scale,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "backend": backend,
        }
        self._check_call((query, key, value), observe, **options)
        q, k, v = by_rows((self.q_proj, self.k_proj, self.v_proj), (query, key, value))
        result = self.core(
            _split(q, self.head_dim),
            _split(k, self.head_dim),
            _split(v, self.value_head_dim),
            observe=observe,
            **options,
        )
        merged = _merge(result if observe is None else result[0])
        output: Tensor = self.out_proj(merged)
        if observe is None:
            return output
        seen: Seen = result[1]
        outer = {"query_projected": q, "key_projected": k, "value_projected": v, "merged": merged, "output": output}
        return output, seen.with_fields(
            {name: part if observe.grad else part.detach() for name, part in outer.items() if observe.asks(name)}
        )

    def _check_call(
        self, given: tuple[Tensor, Tensor, Tensor], observe: Observe | None, *, backend: str | None, **options: Any
    ) -> None:
        """Check the whole call before anything is projected: on tensors of one number, of the projected shapes.

        Where a projection was replaced, its width is not known before: the call is then checked behind it.
        """
        if (
            observe is None
            and backend is None
            and all(options[name] is None for name in ("mask", "attn_bias", "scale"))
        ):
            return  # nothing that could be wrong
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if not all(_has_known_width(projection) for projection in projections):
            return
        stand_ins = []
        for tensor, projection, width in zip(
            given, projections, (self.head_dim, self.head_dim, self.value_head_dim), strict=True
        ):
            (B, length, _), device = tensor.shape, tensor.device.type
            linear = cast("nn.Linear", projection)
            heads = _heads(linear.out_features, width)
            autocast = linear.weight.dtype in AUTOCAST and autocasting(device)
            dtype = torch.get_autocast_dtype(device) if autocast else tensor.dtype
            stand_ins.append(tensor.new_empty((), dtype=dtype).expand(B, heads, length, width))
        q, k, v = stand_ins
        request = check(q, k, v, **options)
        if observe is not None:
            check_observe(observe, request)
        choose(request, backend)

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
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"from_torch takes a torch.nn.MultiheadAttention, not {type(module).__name__}.")
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
            bias=module.in_proj_bias is not None or module.out_proj.bias is not None,
            dropout_p=module.dropout,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        packed = module.in_proj_weight is not None
        weights = module.in_proj_weight.chunk(3) if packed else tuple(weights_in(module))
        q, k, v, out = (cast("nn.Linear", p) for p in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj))
        for projection, weight in zip((q, k, v, out), (*weights, module.out_proj.weight), strict=True):
            copy_parameters([weight], [projection.weight])
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for projection, bias in zip((q, k, v, out), (*biases, module.out_proj.bias), strict=True):
            if bias is not None:  # one that is missing there stays zero here
                copy_parameters([bias], [projection.bias])
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
        if not all(_is_plain(projection) for projection in projections) or _hooks(self.core):
            raise ValueError(
                "to_torch needs the four projections to be plain nn.Linear, and no hooks on them or on core: one was "
                "replaced or hooked, and torch's module has no place for that."
            )
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
            bias=any(p.bias is not None for p in (q, k, v, out)),
            kdim=k.in_features,
            vdim=v.in_features,
            batch_first=True,
            device=q.weight.device,
            dtype=q.weight.dtype,
        )
        copy_parameters([q.weight, k.weight, v.weight], weights_in(module))
        copy_parameters([out.weight], [module.out_proj.weight])
        if module.in_proj_bias is not None:
            # Torch's module has all biases or none: one that is missing here is zero there.
            bias = [p.bias if p.bias is not None else p.weight.new_zeros(p.out_features) for p in (q, k, v, out)]
            copy_parameters(bias[:3], [module.in_proj_bias])
            copy_parameters(bias[3:], [module.out_proj.bias])
        return module.train(self.training)

    def extra_repr(self) -> str:
        """What the projections don't show."""
        return f"head_dim={self.head_dim}, value_head_dim={self.value_head_dim}, dropout_p={self.dropout_p}"


def _is_plain(projection: nn.Module) -> bool:
    """Whether it is a linear layer and nothing else."""
    return type(projection) in PLAIN and not _hooks(projection)


def _has_known_width(projection: nn.Module) -> bool:
    """Whether its features can be told beforehand: a linear layer, its weight not sharded, its output not hooked."""
    if not isinstance(projection, nn.Linear) or projection._forward_hooks:
        return False
    return type(projection.weight) is nn.Parameter or type(projection.weight) is Tensor


def _hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _split(projected: Tensor, head_dim: int) -> Tensor:
    """(B, L, H * E) -> (B, H, L, E); H is read from the width, so a shard of the heads works as well."""
    split: Tensor = projected.unflatten(-1, (_heads(projected.shape[-1], head_dim), head_dim))
    return split.transpose(-3, -2)


def _heads(features: int, head_dim: int) -> int:
    if features % head_dim:
        raise ShapeError(f"a projection gives {features} features, not a multiple of the head width {head_dim}.")
    return features // head_dim


def _merge(context: Tensor) -> Tensor:
    """(B, H, L, Ev) -> (B, L, H * Ev)."""
    return context.transpose(-3, -2).flatten(-2)
