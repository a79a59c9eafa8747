"""Means and rankings of heads, against double loops over weights in NumPy; transformers' tuple of weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.masks import living_rows, visible_cells
from clearhead.observe import Seen

OFFSETS = [0, 1, -1, 4]
EVERYTHING = {
    "lse": True,
    "entropy": True,
    "max_weight": True,
    "distance": True,
    "received": True,
    "offsets": OFFSETS,
    "weights": True,
}


def recorded(*, side: str = "right", causal: bool = True, calls: int = 2, **observe: Any) -> ch.Recording:
    """Two layers of 3 and 4 heads on padded texts; each call has texts of other lengths."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"a": ch.MultiHeadAttention(12, 3), "b": ch.MultiHeadAttention(12, 4)})
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(2)  # sharp heads, that differ
    with torch.no_grad(), ch.record(layers, ch.Observe(**(observe or EVERYTHING))) as recording:
        for lengths in [(7, 4, 2), (11, 0, 5)][:calls]:
            mask: ch.Mask = ch.KeyPadding(list(lengths), side=side)  # type: ignore[arg-type]
            x = torch.randn(3, max(lengths), 12)
            for layer in layers.values():
                x = layer(x, mask=mask & ch.Causal() if causal else mask)
    return recording


def real_tokens(seen: Seen, lengths: tuple[int, ...], side: str) -> list[range]:
    L = seen.sizes[2]
    return [range(n) if side == "right" else range(L - n, L) for n in lengths]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [True, False])
def test_means_are_those_of_a_double_loop_over_the_weights(side: str, causal: bool) -> None:
    recording = recorded(side=side, causal=causal)
    rows = recording.heads()
    assert [(row["layer"], row["number"], row["head"]) for row in rows] == [
        *(("a", 0, head) for head in range(3)),
        *(("b", 1, head) for head in range(4)),
    ]
    for row in rows:
        found: dict[str, list[float]] = {}
        for seen, lengths in zip(recording.calls(row["layer"]), [(7, 4, 2), (11, 0, 5)], strict=True):
            weights = seen.weights[:, row["head"]].double().numpy()
            for item, tokens in enumerate(real_tokens(seen, lengths, side)):
                for i in tokens:
                    own = [weights[item, i, j] for j in tokens]
                    found.setdefault("max_weight", []).append(max(own))
                    found.setdefault("entropy", []).append(-sum(w * math.log(w) for w in own if w > 0))
                    found.setdefault("distance", []).append(
                        sum(w * abs(i - j) for w, j in zip(own, tokens, strict=True))
                    )
                    found.setdefault("sink", []).append(weights[item, i, tokens[0]])
                    for d in OFFSETS:
                        if i - d in tokens:
                            found.setdefault(f"offset.{d}", []).append(weights[item, i, i - d])
        for column, values in found.items():
            assert row[column] == pytest.approx(np.mean(values), abs=2e-6), column
        assert row["queries"] == 7 + 4 + 2 + 11 + 5
        assert row["effective_keys"] == pytest.approx(math.exp(np.mean(found["entropy"])), rel=1e-5)
        assert set(row) == {"layer", "number", "head", "queries", "lse", "effective_keys", *found}
        lse = [
            seen.lse[item, row["head"], i].item()
            for seen, lengths in zip(recording.calls(row["layer"]), [(7, 4, 2), (11, 0, 5)], strict=True)
            for item, tokens in enumerate(real_tokens(seen, lengths, side))
            for i in tokens
        ]
        assert row["lse"] == pytest.approx(np.mean(lse), rel=1e-5)


def test_one_layer_by_name_or_number_keeps_its_number() -> None:
    recording = recorded()
    assert recording.heads("b") == recording.heads(1) == recording.heads()[3:]
    with pytest.raises(KeyError, match="no layer 2"):
        recording.heads(2)


def test_groups_of_keys_and_patterns_are_columns() -> None:
    """A pattern is read by its name and shape, whoever fills it in."""
    recording = recorded(
        calls=1, mass={"sink": torch.eye(7, dtype=torch.bool)[:1], "odd.name": torch.ones(1, 7).bool()}
    )
    seen = recording["b"]
    B, H, L, _ = seen.sizes
    score = torch.rand(B, H, L)
    recording.add("b", seen.with_fields({"patterns": {"induction": score}}))
    row = recording.heads("b")[2]
    alive = torch.tensor([[True] * n + [False] * (7 - n) for n in (7, 4, 2)])
    assert row["pattern.induction"] == pytest.approx(score[:, 2][alive].mean().item(), rel=1e-5)
    assert row["mass.sink"] == pytest.approx(seen.mass["sink"][:, 2][alive].mean().item(), rel=1e-5)
    assert row["mass.odd.name"] == pytest.approx(1.0, abs=1e-6)
    best = recording.find("induction")
    assert [head.layer for head in best] == ["b"] * 4
    assert [head.score for head in best] == sorted((head.score for head in best), reverse=True)


def test_received_mean_stands_in_for_received() -> None:
    recording = recorded(calls=1, received=True)
    sinks = [row["sink"] for row in recording.heads()]
    normalised = ch.Recording(["a", "b"])
    queries = torch.tensor([7.0, 4.0, 2.0])[:, None, None]  # every real query sees the first key
    for name, seen in recording.items():
        fields = {"received_mean": seen.received / queries}
        normalised.add(name, Seen(fields, seen.mask, seen.sizes, seen.observe))
    assert [row["sink"] for row in normalised.heads()] == pytest.approx(sinks, rel=1e-5)


def test_heads_without_a_live_query_have_no_mean_and_no_rank() -> None:
    layer = ch.MultiHeadAttention(8, 2)
    with ch.record(layer, ch.Observe(entropy=True)) as recording:
        layer(torch.randn(1, 3, 8), mask=ch.KeyPadding([0]))
    assert all(math.isnan(row["entropy"]) and row["queries"] == 0 for row in recording.heads())
    assert recording.find("focused") == []


@pytest.mark.parametrize(
    ("kind", "column", "sign"),
    [
        ("previous", "offset.1", -1),
        ("next", "offset.-1", -1),
        ("self", "offset.0", -1),
        ("sink", "sink", -1),
        ("local", "distance", 1),
        ("distant", "distance", -1),
        ("focused", "entropy", 1),
        ("diffuse", "entropy", -1),
        ("max_weight", "max_weight", -1),
    ],
)
def test_a_ranking_is_the_order_of_its_means(kind: str, column: str, sign: int) -> None:
    recording = recorded(causal=False)
    rows = {(row["layer"], row["number"], row["head"]): row[column] for row in recording.heads()}
    found = recording.find(kind)
    assert {(head.layer, head.number, head.head): head.score for head in found} == rows
    assert [sign * head.score for head in found] == sorted(sign * score for score in rows.values())
    assert len(set(rows.values())) == 7
    assert recording.find(kind, most=2) == found[:2]


def test_what_is_missing_is_named_with_what_to_ask() -> None:
    recording = recorded(entropy=True)
    with pytest.raises(ValueError, match=r"find\('previous'\) reads .* record with Observe\(offsets=\[1\]\)"):
        recording.find("previous")
    with pytest.raises(ValueError, match=r"patterns=clearhead.patterns\(ids\)"):
        recording.find("induction")
    with pytest.raises(ValueError, match=r"find\('inductive'\) is no kind of head: there are previous, next"):
        recording.find("inductive")
    with pytest.raises(ValueError, match="queries"):
        recording.find("queries")


def test_the_table_of_pandas_has_the_same_rows() -> None:
    pytest.importorskip("pandas", reason="optional")
    recording = recorded()
    table = recording.to_dataframe()
    assert table.to_dict("records") == recording.heads()


def test_without_pandas_an_error_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas, or take recording.heads\(\)"):
        recorded().to_dataframe()


MASKS = [
    None,
    ch.Causal(),
    ch.Causal(align="start"),
    ch.Window(left=2, right=1),
    ch.KeyPadding([5, 0, 3]),
    ch.KeyPadding([5, 0, 3], side="left") & ch.Causal(),
    ch.QueryPadding([7, 2, 0]),
    ch.Allowed(torch.rand(3, 2, 7, 5, generator=torch.Generator().manual_seed(0)) > 0.7, axes="bhqk"),
    ch.Blocked(torch.eye(7, 5) > 0, axes="qk"),
    ch.Allowed(torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) > 0.5, axes="bq"),
    ~ch.Causal() | ch.Prefix([0, 1, 2]),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_living_rows_and_visible_cells_are_those_of_the_whole_mask(mask: ch.Mask | None, n: int) -> None:
    L, S = 7, 5
    dense = torch.ones(1, 1, L, S).bool() if mask is None else mask.dense(L, S)
    assert torch.equal(living_rows(mask, L, S).expand(3, 2, L), dense.any(-1).expand(3, 2, L))
    cells = visible_cells(mask, L, S, n).expand(3, 2, n, n)
    dense = dense.expand(3, 2, L, S)
    for i in range(n):
        for j in range(n):
            rows = slice(i * L // n, -(-(i + 1) * L // n))
            columns = slice(j * S // n, -(-(j + 1) * S // n))
            assert torch.equal(cells[:, :, i, j], dense[:, :, rows, columns].flatten(2).any(-1)), (i, j)


def test_living_rows_of_no_keys_and_of_a_hiding_bias() -> None:
    assert living_rows(ch.Causal(), 3, 0).tolist() == [[[False] * 3]]
    x = torch.randn(1, 2, 3, 4)
    bias = torch.zeros(3, 3).index_fill(0, torch.tensor(1), -math.inf)
    for field in ("lse", "max_weight"):
        _, seen = ch.attention(x, x, x, attn_bias=bias, observe=ch.Observe(**{field: True}))
        assert seen.alive.tolist() == [[[True, False, True]] * 2]


def test_attentions_are_the_tuple_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=5,
        max_position_embeddings=16, is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    inputs = {"input_ids": torch.arange(5)[None], "encoder_hidden_states": torch.randn(1, 7, 12)}
    with torch.no_grad():
        with ch.record(model, ch.Observe(weights=True)) as recording:
            model(**inputs)
        model.set_attn_implementation("eager")
        theirs = model(**inputs, output_attentions=True)
    for ours, eager in (
        (recording.attentions, theirs.attentions),
        (recording.cross_attentions, theirs.cross_attentions),
    ):
        assert len(ours) == len(eager) == 2
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_attentions_that_were_not_recorded_say_what_they_take() -> None:
    total = 3 * (3 + 4) * 11 * 11 * 4
    for observe in ({"entropy": True}, {"weights": ch.At(heads=0)}):
        with pytest.raises(ValueError, match=rf"Observe\(weights=True\)\. The 2 layers .* take {total:,} bytes"):
            _ = recorded(**observe).attentions
    assert recorded(entropy=True).cross_attentions == ()


@pytest.mark.parametrize("most", [-1, 1.5, True])
def test_find_takes_a_number_of_heads(most: Any) -> None:
    mha = ch.MultiHeadAttention(14, 2)
    with ch.record(mha, ch.Observe(entropy=True, weights=True)) as recording:
        mha(torch.randn(1, 5, 14))
    with pytest.raises(ValueError, match="at most"):
        recording.find("focused", most)
    assert len(recording.find("focused", 1)) == 1


@pytest.mark.parametrize("tokens", [torch.ones(1, 5), [[1, 2, 3, 4, 5]]], ids=["tensor", "numbers"])
def test_tokens_of_a_report_are_text(tokens: Any, tmp_path: Path) -> None:
    mha = ch.MultiHeadAttention(14, 2)
    with ch.record(mha, ch.Observe(weights=True)) as recording:
        mha(torch.randn(1, 5, 14))
    with pytest.raises(TypeError, match="tokens takes"):
        recording.to_html(tmp_path / "report.html", tokens=tokens)
    assert not list(tmp_path.iterdir())
