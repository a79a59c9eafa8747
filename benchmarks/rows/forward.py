"""One call of `attention`, forward, against torch's fused kernel."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.machine import isa, native
from benchmarks.race import Race, Row, Rows, UnavailableError

# How far apart two kernels may lie that are both right, relative to the largest value.
NEAR = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def rows() -> Rows:
    return [
        Row("dense", "dense, L=512", "SDPA", partial(dense, 512), 0.48),
        Row("dense", "dense, L=2048", "SDPA", partial(dense, 2048), 0.48),
        Row("dense", "dense, L=8192", "SDPA", partial(dense, 8192), 0.55),
        Row("causal", "causal, L=512", "SDPA is_causal", partial(causal, 512), 0.35),
        Row("causal", "causal, L=2048", "SDPA is_causal", partial(causal, 2048), 0.42),
        Row("padding", "causal & padding, 16 of 32..512", "SDPA, bool mask", padded, 0.25),
        Row("window", "window 512 & causal, L=8192", "SDPA, bool mask", partial(window, 8192), 0.04),
        Row("mask", "dense bool mask, L=2048", "SDPA, bool mask", partial(bool_mask, 2048), 0.60),
        Row("decode", "1 query, 32768 keys, 32/8 heads, E=128", "SDPA enable_gqa", decode, 0.30),
        Row("small", "4096 problems of L=16", "SDPA", small, 0.80),
        Row("half", "bfloat16 dense, L=2048", "SDPA, bfloat16", partial(dense, 2048, dtype=torch.bfloat16), 0.40),
        *(
            Row("widths", f"dense, L=2048, E={E}", "SDPA", partial(dense, 2048, E), 0.52)
            for E in (8, 32, 80, 128, 256)
        ),
        Row("widths", "dense, L=2048, E=64, Ev=128", "SDPA", partial(dense, 2048, Ev=128), 0.52),
        Row("avx2", "AVX2 forced, dense, L=2048", "SDPA", partial(forced, "avx2"), 0.90, isa="avx2"),
        Row("overhead", "(5, 2, 10, 4), no grad", "SDPA", tiny, 1.0),
    ]


def inputs(L: int, *, B: int = 1, H: int = 8, E: int = 64, Ev: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, L, E), torch.randn(B, H, L, E), torch.randn(B, H, L, E if Ev is None else Ev)


def dense(L: int, E: int = 64, Ev: int | None = None, dtype: torch.dtype = torch.float32) -> Race:
    q, k, v = (x.to(dtype) for x in inputs(L, E=E, Ev=Ev))
    sdpa = partial(F.scaled_dot_product_attention, q, k, v)
    return Race(partial(ch.attention, q, k, v), sdpa, tolerance=NEAR[dtype])


def causal(L: int) -> Race:
    q, k, v = inputs(L)
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return Race(partial(ch.attention, q, k, v, ch.Causal()), sdpa)


def padded() -> Race:
    lengths = torch.linspace(32, 512, 16).long()
    return masked(512, ch.Causal() & ch.KeyPadding(lengths), B=16)


def window(L: int) -> Race:
    return masked(L, ch.Causal() & ch.Window(left=511))


def masked(L: int, mask: ch.Mask, B: int = 1) -> Race:
    """The peer gets the mask as a tensor, made before the clock starts."""
    q, k, v = inputs(L, B=B)
    visible = mask.dense(L, L).contiguous()
    return Race(partial(ch.attention, q, k, v, mask), partial(F.scaled_dot_product_attention, q, k, v, visible))


def bool_mask(L: int) -> Race:
    q, k, v = inputs(L)
    visible = torch.rand(L, L) < 0.5
    return Race(partial(ch.attention, q, k, v, visible), partial(F.scaled_dot_product_attention, q, k, v, visible))


def decode() -> Race:
    q, (k, v) = torch.randn(1, 32, 1, 128), torch.randn(2, 1, 8, 32768, 128).unbind()
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    return Race(partial(ch.attention, q, k, v), sdpa)


def small() -> Race:
    q, k, v = inputs(16, B=512)
    return Race(partial(ch.attention, q, k, v), partial(F.scaled_dot_product_attention, q, k, v))


def forced(name: str) -> Race:
    """Only ours is held to an instruction set: the peer keeps the best it has."""
    if native() is None:
        raise UnavailableError("needs the native kernels, which were not built")
    if name not in str(isa()).lower():
        raise UnavailableError(f"needs kernels for {name}; this process runs those for {isa()}")
    return dense(2048)


def tiny() -> Race:
    q, k, v = torch.randn(3, 5, 2, 10, 4).unbind()
    return Race(partial(ch.attention, q, k, v), partial(F.scaled_dot_product_attention, q, k, v))
