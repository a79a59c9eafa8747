"""Induction, duplicate-token and previous-token heads, as told by eager weights and by hand-built heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="needs the hf extra")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=10, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=97,
    )  # fmt: skip
    made = transformers.LlamaModel(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    return made


def test_the_induction_ranking_on_a_random_sequence_repeated_twice_is_that_of_eager_weights() -> None:
    """Olsson et al. 2022: the weight on the diagonal that lies a period but one to the left."""
    llama, period = model(), 23
    half = torch.randperm(61, generator=torch.Generator().manual_seed(1))[:period]
    ids = half.repeat(1, 2)
    observe = ch.Observe(patterns=ch.patterns(ids), offsets=[1], received=True)
    with torch.no_grad(), ch.record(llama, observe) as recording:
        llama(ids)
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(llama(ids, output_attentions=True).attentions)[:, 0].double()  # (layers, H, L, L)
    L = 2 * period
    truth = {
        # From the second half on: the first key, at the beginning of this diagonal, has no token before it.
        "induction": weights.diagonal(1 - period, dim1=-2, dim2=-1)[..., 1:].sum(-1) / L,
        "duplicate": weights.diagonal(-period, dim1=-2, dim2=-1).sum(-1) / L,
        "previous": weights.diagonal(-1, dim1=-2, dim2=-1).mean(-1),
        "sink": weights[..., 0].mean(-1),
    }
    for kind, scores in truth.items():
        found = recording.find(kind)
        assert len({(head.number, head.head) for head in found}) == 18
        true = [float(scores[head.number, head.head]) for head in found]
        assert [head.score for head in found] == pytest.approx(true, abs=1e-6)
        assert true == pytest.approx(sorted(true, reverse=True), abs=1e-6), kind
        assert true[0] > true[-1] + 1e-3


def test_a_hand_built_induction_head_is_found() -> None:
    """Among random heads one whose weights are the pattern itself, given as a bias."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]])
    found = ch.patterns(ids)
    x = torch.randn(1, 5, 11, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(1, 5, 11, 11)
    for head, name in ((3, "induction"), (1, "duplicate"), (4, "previous")):
        bias[:, head] = 50.0 * found[name].dense(11, 11)[:, 0]
    _, seen = ch.attention(x, x, x, ch.Causal(), attn_bias=bias, observe=ch.Observe(patterns=found, offsets=[1]))
    recording = ch.Recording(["layer"])
    recording.add("layer", seen)
    for head, name in ((3, "induction"), (1, "duplicate"), (4, "previous")):
        assert recording.find(name)[0].head == head
    # Six of the eleven queries have no earlier copy, so the best mean there is ...
    able = found["induction"].dense(11, 11).any(-1).float().mean().item()
    assert recording.find("induction")[0].score == pytest.approx(able, abs=0.1)


def test_every_statistic_there_is_becomes_a_column_or_a_map() -> None:
    """What `Observe` can ask for is in `heads`, or known to be no number of a head."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    x = torch.randn(1, 3, 5, 4)
    flags: dict[str, Any] = {
        "top_k": 2, "pooled": 3, "offsets": [0], "lookback": 2, "mass": {"a": torch.ones(1, 5).bool()},
        "patterns": ch.patterns(ids),
    }  # fmt: skip
    everything = {name: True for name in ch.Observe.__dataclass_fields__ if getattr(ch.Observe.all(), name) is True}
    _, seen = ch.attention(x, x, x, observe=ch.Observe(**{**everything, **flags, "grad": False}))
    recording = ch.Recording(["layer"])
    recording.add("layer", seen)
    columns = set(recording.heads()[0])
    maps = {
        "top_k",
        "pooled",
        "weights",
        "scores",
        "masked_scores",
        "dropped_weights",
        "query",
        "key",
        "value",
        "context",
    }
    told = {
        "received": "sink",
        "received_mean": "sink",
        "value_weighted": "value_weighted.sink",
        "contribution": "contribution.sink",
        "patterns": "pattern.induction",
        "offsets": "offset.0",
        "mass": "mass.a",
    }
    for name in set(seen) - maps:
        assert told.get(name, name) in columns, name
    assert maps <= set(seen)


def test_what_falls_on_the_first_key_and_how_heads_differ() -> None:
    torch.manual_seed(0)
    x, value = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 5)
    observe = ch.Observe(
        weights=True, received=True, received_mean=True, value_weighted=True, contribution=True, agreement=True,
        max_score=True, lookback=3,
    )  # fmt: skip
    out, seen = ch.attention(x, x, value, ch.Causal() & ch.QueryPadding([7, 4]), observe=observe)
    recording = ch.Recording(["layer"])
    recording.add("layer", seen)
    w, out, value = seen.weights.double(), out.double(), value.double()
    live = [(0, i) for i in range(7)] + [(1, i) for i in range(4)]
    entropy = lambda p: torch.special.entr(p).sum()  # noqa: E731
    for row in recording.heads():
        h = row["head"]
        share = [w[b, h, i, 0] * (value[b, h, 0] @ out[b, h, i]) / out[b, h, i].square().sum() for b, i in live]
        assert row["contribution.sink"] == pytest.approx(float(sum(share)) / 11, abs=1e-5)
        norms = [w[b, h, i, 0] * value[b, h, 0].norm() for b, i in live]
        assert row["value_weighted.sink"] == pytest.approx(float(sum(norms)) / 11, rel=1e-5)
        apart = [
            entropy((w[b, h, i] + w[b, g, i]) / 2) - (entropy(w[b, h, i]) + entropy(w[b, g, i])) / 2
            for b, i in live
            for g in range(3)
            if g != h
        ]
        assert row["agreement"] == pytest.approx(float(sum(apart)) / len(apart), abs=1e-5)
        scores = [(x[b, h, i] @ x[b, h, : i + 1].T / 2).max() for b, i in live]
        assert row["max_score"] == pytest.approx(float(sum(scores)) / 11, rel=1e-5)
