"""What published tutorials build by hand, step by step, in this library's words: shapes, numbers, formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import At, Causal, MultiHeadAttention, Observe, QueryPadding

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "masked_attention_table.json").read_text())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_single_head_attention() -> None:
    query, key, value = torch.randn(3, 30, 128), torch.randn(3, 50, 128), torch.randn(3, 50, 256)
    output, seen = ch.attention(query, key, value, observe=Observe(weights=True))
    assert output.shape == (3, 30, 256)
    assert seen.weights.shape == (3, 30, 50)
    weights = torch.softmax(query.double() @ key.double().mT / 128**0.5, dim=-1)
    torch.testing.assert_close(seen.weights.double(), weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(output.double(), weights @ value.double(), rtol=0, atol=1e-5)


def test_five_heads_of_width_200_every_intermediate() -> None:
    B, L, D, H, E = 128, 32, 200, 5, 40
    mha = MultiHeadAttention(D, H)
    output, seen = mha(torch.randn(B, L, D), observe=Observe.all())
    assert {name: tuple(part.shape) for name, part in seen.items()} == {
        "query_projected": (B, L, D),
        "key_projected": (B, L, D),
        "value_projected": (B, L, D),
        "query": (B, H, L, E),
        "key": (B, H, L, E),
        "value": (B, H, L, E),
        "scores": (B, H, L, L),
        "masked_scores": (B, H, L, L),
        "weights": (B, H, L, L),
        "dropped_weights": (B, H, L, L),
        "context": (B, H, L, E),
        "merged": (B, L, D),
        "output": (B, L, D),
        "lse": (B, H, L),
        "entropy": (B, H, L),
        "max_weight": (B, H, L),
        "distance": (B, H, L),
        "received": (B, H, L),
        "max_score": (B, H, L),
        "received_mean": (B, H, L),
        "value_weighted": (B, H, L),
        "contribution": (B, H, L),
        "rest": (B, H, L),
        "agreement": (B, H, H),
    }
    assert output.shape == (B, L, D)


def test_a_width_that_five_heads_can_not_share() -> None:
    with pytest.raises(ValueError, match=r"embed_dim must be divisible by num_heads, but 128 = 25 x 5 \+ 3"):
        MultiHeadAttention(128, 5)


def test_scores_scaled_by_the_full_model_width() -> None:
    """Some tutorials divide by sqrt(d_model), not by sqrt(d_head): said with `scale`, it is that formula."""
    B, L, D, H, E = 7, 32, 200, 5, 40
    mha = MultiHeadAttention(D, H, scale=D**-0.5, dtype=torch.float64)
    x = torch.randn(B, L, D, dtype=torch.float64)
    output, seen = mha(x, observe=Observe(weights=True))
    query, key, value = (f(x).reshape(B, L, H, E).transpose(1, 2) for f in (mha.q_proj, mha.k_proj, mha.v_proj))
    weights = torch.softmax(query @ key.transpose(2, 3) / D**0.5, dim=-1)
    torch.testing.assert_close(seen.weights, weights, rtol=1e-12, atol=1e-12)
    expected = mha.out_proj((weights @ value).transpose(1, 2).reshape(B, L, D))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    by_head = MultiHeadAttention(D, H, dtype=torch.float64)
    by_head.load_state_dict(mha.state_dict())
    assert (by_head(x) - output).abs().max() > 1e-3


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16])
def test_16384_parameters_whatever_the_heads(num_heads: int) -> None:
    mha = MultiHeadAttention(64, num_heads, bias=False)
    assert sum(parameter.numel() for parameter in mha.parameters()) == 4 * 64 * 64 == 16_384


def test_eight_heads_look_at_different_things() -> None:
    mha = MultiHeadAttention(64, 8, bias=False)
    _, seen = mha(torch.randn(2, 5, 64), observe=Observe(weights=True))
    assert seen.weights.shape == (2, 8, 5, 5)
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(2, 8, 5), rtol=0, atol=1e-6)
    for one in range(8):
        for two in range(one):
            assert (seen.weights[:, one] - seen.weights[:, two]).abs().max() > 1e-2


def test_eight_heads_are_those_of_torch_with_the_same_weights() -> None:
    theirs = nn.MultiheadAttention(64, 8, bias=False, batch_first=True)
    ours = MultiHeadAttention(64, 8, bias=False)
    with torch.no_grad():
        for projection, weight in zip(
            (ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True
        ):
            projection.weight.copy_(weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 5, 64)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    output, seen = ours(x, observe=Observe(weights=True))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(seen.weights, weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(x), expected, rtol=0, atol=1e-6)


# -- a padded batch of five sentences, then a translation of them ----------------------------------------------

LENGTHS = [8, 5, 10, 4, 9]


def padding_and_causal() -> Tensor:
    """(5, 10, 10) by two loops: real keys, none of them in the future."""
    return torch.tensor([[[k < n and k <= q for k in range(10)] for q in range(10)] for n in LENGTHS])


def test_five_sentences_padded_and_masked() -> None:
    batch = ch.pad(PUBLISHED["sequences"], pad_id=PUBLISHED["pad_id"])
    assert batch.ids.shape == (5, 10)
    assert batch.lengths.tolist() == LENGTHS
    mask = batch.mask & Causal()
    assert mask.dense(10, 10).shape == (5, 1, 10, 10)
    assert mask.dense(10, 10)[:, 0].shape == tuple(PUBLISHED["shapes"]["mask"])
    assert torch.equal(mask.dense(10, 10)[:, 0], padding_and_causal())

    embedded = nn.Embedding(PUBLISHED["vocab_size"], 8)(batch.ids)
    mha = MultiHeadAttention(8, 2)
    output, seen = mha(embedded, mask=mask, observe=Observe.all())
    shapes = {name: tuple(shape) for name, shape in PUBLISHED["shapes"].items()}
    assert embedded.shape == shapes["embedded"]
    assert seen.query.shape == seen.key.shape == seen.value.shape == shapes["q_k_v_split"]
    assert seen.scores.shape == seen.weights.shape == shapes["scores"]
    assert seen.context.shape == shapes["context"]
    assert output.shape == embedded.shape
    hidden = ~padding_and_causal()[:, None].expand(5, 2, 10, 10)
    assert (seen.weights[hidden] == 0).all()
    assert (seen.weights[~hidden] > 0).all()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(5, 2, 10), rtol=0, atol=1e-6)


@pytest.mark.parametrize("table", PUBLISHED["tables"], ids=lambda t: f"item{t['item']}-head{t['head']}")
@pytest.mark.parametrize("backend", [None, "blockwise", "reference"])
def test_the_published_scores_give_the_published_attention(table: dict[str, Any], backend: str | None) -> None:
    item, head = table["item"], table["head"]
    batch = ch.pad(PUBLISHED["sequences"], pad_id=PUBLISHED["pad_id"])
    mask = batch.mask & Causal()
    visible = torch.tensor([[score is not None for score in row] for row in table["scores"]])
    assert torch.equal(mask.dense(10, 10)[item, 0], visible)  # the published blanks are where the mask hides

    # Zero queries score 0 with every key, so the published scores come in as the bias. One-hot values, one for
    # each key, make the output the weights, whatever kernel ran.
    scores = torch.zeros(5, 2, 10, 10)
    scores[item, head] = torch.tensor([[score or 0.0 for score in row] for row in table["scores"]])
    query, key, value = torch.zeros(5, 2, 10, 10), torch.randn(5, 2, 10, 10), torch.eye(10).expand(5, 2, 10, 10)
    observe = Observe(weights=At(heads=head))
    output, seen = ch.attention(query, key, value, mask, attn_bias=scores, backend=backend, observe=observe)
    published = torch.tensor(table["attention"])
    printed = 1e-4  # four decimals of the weights, five digits of the scores
    assert (seen.weights[item, 0] - published).abs().max() < printed
    assert (output[item, head] - published).abs().max() < printed
    assert (seen.weights[item, 0][~visible] == 0).all()


def translation() -> tuple[ch.Batch, ch.Batch, Tensor, Tensor]:
    source = ch.pad(PUBLISHED["sequences"], pad_id=PUBLISHED["pad_id"])
    target = ch.pad(PUBLISHED["target_sequences"], pad_id=PUBLISHED["pad_id"])
    embedding = nn.Embedding(PUBLISHED["vocab_size"], 8)
    return source, target, embedding(source.ids), embedding(target.ids)


def test_targets_attend_over_sources() -> None:
    source, target, memory, x = translation()
    shapes = {name: tuple(shape) for name, shape in PUBLISHED["shapes"].items()}
    assert target.ids.shape == shapes["target"] == (5, 12)
    output, seen = MultiHeadAttention(8, 2)(x, memory, mask=source.mask, observe=Observe.all())
    assert seen.query.shape == shapes["cross_q_split"] == (5, 2, 12, 4)
    assert seen.key.shape == (5, 2, 10, 4)
    assert seen.scores.shape == seen.weights.shape == shapes["cross_scores"] == (5, 2, 12, 10)
    assert seen.context.shape == shapes["cross_context"]
    assert output.shape == (5, 12, 8)
    for i, n in enumerate(LENGTHS):
        assert (seen.weights[i, :, :, n:] == 0).all()
        assert (seen.weights[i, :, :, :n] > 0).all()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(5, 2, 12), rtol=0, atol=1e-6)


def test_targets_padding_hidden_too() -> None:
    source, target, memory, x = translation()
    mha = MultiHeadAttention(8, 2)
    nn.init.normal_(mha.out_proj.bias)
    mask = source.mask & QueryPadding(target.lengths)
    output, seen = mha(x, memory, mask=mask, observe=Observe.all())
    plain = mha(x, memory, mask=source.mask)
    received = seen.received.sum(-1)  # each real query gives a weight of 1 in all
    for i, n in enumerate(len(sequence) for sequence in PUBLISHED["target_sequences"]):
        torch.testing.assert_close(output[i, :n], plain[i, :n], rtol=0, atol=1e-6)
        assert torch.equal(output[i, n:], mha.out_proj.bias.expand(12 - n, 8))
        assert (seen.weights[i, :, n:] == 0).all()
        assert (seen.weights[i, :, :n].sum(-1) - 1).abs().max() < 1e-6
        torch.testing.assert_close(received[i], torch.full((2,), float(n)), rtol=0, atol=1e-5)
    for i, n in enumerate(LENGTHS):
        assert (seen.weights[i, :, :, n:] == 0).all()


def test_a_decoder_looks_back_and_at_its_source() -> None:
    """A decoder's two attentions: padded and causal over the targets, padded over the sources."""
    source, target, memory, x = translation()
    own, cross = MultiHeadAttention(8, 2), MultiHeadAttention(8, 2)

    def decode(x: Tensor) -> Tensor:
        x = x + own(x, mask=Causal() & target.mask)
        return x + cross(x, memory, mask=source.mask)

    before = decode(x)
    changed = x.clone()
    changed[:, 7:] += 1.0  # the future
    assert torch.equal(decode(changed)[:, :7], before[:, :7])
    assert (decode(changed)[:, 7:] - before[:, 7:]).abs().max() > 0.1
