"""The whole module, projections included, against torch's."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

import clearhead as ch
from benchmarks.race import Pairs, Race, Row, Rows

D, H = 512, 8


def rows() -> Rows:
    peer, fast = "nn.MultiheadAttention", "nn.MultiheadAttention, fast path"
    one, two = "nn.TransformerEncoderLayer, fast path", "nn.TransformerEncoder, fast path"
    return [
        Row("module", "module, L=512, B=4, eval", fast, partial(inference, 4, 512), 0.50),
        Row("module", "module, L=512, B=4, forward + backward", peer, partial(training, 4, 512), 0.60),
        Row("module", "module, L=4096, B=1, eval", fast, partial(inference, 1, 4096), 0.40, memory=1 / 10),
        Row("module", "module + its weights, L=512, B=4, eval", f"{peer}, need_weights", partial(weights, 4, 512)),
        Row("convert", "converted layer, L=4096, B=1, eval", one, partial(converted, 1), 0.60, memory=1 / 10),
        Row("convert", "converted encoder, 2 layers, L=4096, eval", two, partial(converted, 2), 0.60, memory=1 / 10),
    ]


def pair() -> tuple[ch.MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same parameters, biases included."""
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=D**-0.5)
    return ch.MultiHeadAttention.from_torch(theirs), theirs


def inference(B: int, L: int) -> Race:
    mine, torchs = (module.eval() for module in pair())
    x = torch.randn(B, L, D)

    def ours() -> Tensor:
        with torch.no_grad():
            return mine(x)

    def theirs() -> Tensor:
        with torch.no_grad():
            return torchs(x, x, x, need_weights=False)[0]

    return Race(ours, theirs)


def weights(B: int, L: int) -> Race:
    mine, torchs = (module.eval() for module in pair())
    x = torch.randn(B, L, D)
    observe = ch.Observe(weights=True)

    def ours() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, seen = mine(x, observe=observe)
        return out, seen.weights

    def theirs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return torchs(x, x, x, need_weights=True, average_attn_weights=False)

    return Race(ours, theirs)


def converted(layers: int, L: int = 4096) -> Race:
    """Torch's encoder as it is, and the same on clearhead."""
    layer = nn.TransformerEncoderLayer(D, H, 4 * D, batch_first=True)
    torchs = (layer if layers == 1 else nn.TransformerEncoder(layer, layers)).eval()
    mine = ch.convert(copy.deepcopy(torchs))
    x = torch.randn(1, L, D)

    def of(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(x)

    return Race(partial(of, mine), partial(of, torchs))


def training(B: int, L: int) -> Race:
    mine, torchs = pair()
    x, upstream = torch.randn(B, L, D, requires_grad=True), torch.randn(B, L, D)
    names = [f"{name}_proj.{kind}" for kind in ("weight", "bias") for name in ("q", "k", "v", "out")]
    my_leaves = [x, *(mine.get_parameter(name) for name in names)]
    its_leaves = [x, torchs.in_proj_weight, torchs.out_proj.weight, torchs.in_proj_bias, torchs.out_proj.bias]

    def ours() -> tuple[Tensor, ...]:
        out = mine(x)
        return out, *torch.autograd.grad(out, my_leaves, upstream)

    def theirs() -> tuple[Tensor, ...]:
        out = torchs(x, x, x, need_weights=False)[0]
        return out, *torch.autograd.grad(out, its_leaves, upstream)

    def pairs(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Pairs:
        out, dx, wq, wk, wv, wo, bq, bk, bv, bo = ours
        return zip([out, dx, torch.cat([wq, wk, wv]), wo, torch.cat([bq, bk, bv]), bo], theirs, strict=True)

    return Race(ours, theirs, pairs)
