"""Statistics beyond the conformance product: patterns of token ids, bytes before they are kept, NaN, counts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from cases import MASKS, SHAPES
from clearhead.backends import BACKENDS
from clearhead.budget import bytes_seen
from clearhead.checks import check
from clearhead.derived import queries_that_see
from conformance import TILINGS, tiling

# -- patterns of token ids ---------------------------------------------------------------------------------------

IDS = [[3, 5, 3, 3, 7, 5, 3], [2, 2, 0, 5, 0, 5, 2]]
REAL = [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]


def expected(name: str, ids: list[int], real: list[int], i: int, j: int) -> bool:
    """By the definitions, a pair at a time."""
    if not (real[i] and real[j]):
        return False
    if name == "previous":
        return j == i - 1
    if name == "duplicate":
        return j < i and ids[j] == ids[i]
    return 0 < j < i and bool(real[j - 1]) and ids[j - 1] == ids[i]


@pytest.mark.parametrize("real", [None, REAL], ids=["all real", "padded"])
def test_patterns_are_as_defined(real: list[list[int]] | None) -> None:
    found = ch.patterns(IDS, real=real)
    assert list(found) == ["previous", "duplicate", "induction"]
    for name, mask in found.items():
        dense = mask.dense(7, 7).expand(2, 1, 7, 7)
        for b, i, j in itertools.product(range(2), range(7), range(7)):
            wanted = expected(name, IDS[b], (real or [[1] * 7] * 2)[b], i, j)
            assert bool(dense[b, 0, i, j]) == wanted, f"{name} item {b}: query {i}, key {j}"
        assert dense.any(), name


def test_induction_on_a_random_text_repeated_twice_is_one_diagonal() -> None:
    once = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    dense = ch.patterns(torch.cat([once, once]))["induction"].dense(22, 22)[0, 0]
    assert dense.nonzero().tolist() == [[i, i - 10] for i in range(11, 22)]


def test_the_previous_token_is_a_run_of_keys() -> None:
    _, rest = ch.patterns(IDS)["previous"]._split(7, 7)
    assert rest is None  # kernels skip all else


def test_a_padding_token_matches_no_extreme_id() -> None:
    dense = ch.patterns([[-5, -5, -6, -7]], real=[[1, 1, 1, 0]])
    assert dense["duplicate"].dense(4, 4).nonzero().tolist() == [[0, 0, 1, 0]]
    assert ch.patterns(torch.zeros(0, 3, dtype=torch.int64))["induction"].dense(3, 3).shape == (0, 1, 3, 3)


@pytest.mark.parametrize(
    ("ids", "real", "message"),
    [
        ([[0.5]], None, "ids must be integers"),
        ([[1, 2]], [[1, 1, 1]], r"real must be \(B\|1, L\) with B=1, L=2 as the ids, not \(1, 3\)"),
        ([[1, 2]], [[1, 2]], "bool or 0/1 integers"),
        ([[[1]]], None, r"\(B, tokens\)"),
    ],
)
def test_wrong_ids(ids: list[list[int]], real: list[list[int]] | None, message: str) -> None:
    with pytest.raises(ch.MaskError, match=message):
        ch.patterns(ids, real=real)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pattern_scores_of_a_long_text(backend: str) -> None:
    """Where kernels go by blocks: the sum of the exact weights on the pattern."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, 300, 16, generator=generator) for heads in (4, 2, 2))
    text = ch.patterns(torch.randint(0, 29, (1, 300), generator=generator))
    mask = ch.Causal() & ch.KeyPadding(lengths=[290], side="left")
    observe = ch.Observe(patterns=text, weights=True)
    _, seen = ch.attention(query, key, value, mask, backend=backend, observe=observe)
    scores = query.double() @ key.double().repeat_interleave(2, dim=1).mT / 4
    scores = scores.masked_fill(~mask.dense(300, 300), -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    for name, pattern in text.items():
        truth = (weights * pattern.dense(300, 300)).sum(-1)
        assert truth.max() > 0.03
        assert torch.allclose(seen.patterns[name].double(), truth, rtol=0, atol=3e-6), name


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bytes_are_what_the_fields_take(dtype: torch.dtype) -> None:
    s = SHAPES["gqa"]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(s.B, heads, length, width, generator=generator).to(dtype)
        for heads, length, width in ((s.Hq, s.L, s.E), (s.Hkv, s.S, s.E), (s.Hkv, s.S, s.Ev))
    )
    keys = torch.ones(1, s.S, dtype=torch.bool)
    at = ch.At(heads=[0, 3], queries=slice(1, None), keys=[-1])
    for options in (
        {},
        {"weights": at, "scores": ch.At(last_real=True), "top_k": 2, "mass": {"a": keys, "b": keys}, "pooled": 3},
        {"offsets": [0, 1, 2], "patterns": {"near": ch.Window(1, 1)}, "lookback": 2},
    ):
        plain = ch.Observe.all() if not options else ch.Observe(**options)
        _, seen = ch.attention(query, key, value, observe=plain)
        taken = {name: sum(part.nbytes for part in tree_leaves(field)) for name, field in seen.items()}
        costs = bytes_seen(plain, (s.B, s.Hq, s.L, s.S), kv_heads=s.Hkv, widths=(s.E, s.Ev), dtype=dtype)
        assert {name: costs[name] for name in taken} == taken
        assert all(name.endswith("projected") or name in ("merged", "output") for name in set(costs) - set(taken))


def test_the_modules_fields_count_too() -> None:
    mha = ch.MultiHeadAttention(12, 4, num_kv_heads=2)
    _, seen = mha(torch.randn(2, 5, 12), observe=ch.Observe.all())
    costs = bytes_seen(ch.Observe.all(), (2, 4, 5, 5), kv_heads=2, widths=(3, 3))
    assert costs == {name: field.nbytes for name, field in seen.items()}


def test_a_huge_map_is_refused_before_anything_is_made() -> None:
    # 137 GB of weights, of inputs that take a few bytes.
    query = torch.zeros(1, 1, 1, 1).expand(1, 32, 32768, 64)
    with pytest.raises(ch.TooLargeError) as told:
        ch.attention(query, query, query, observe=ch.Observe(weights=True))
    assert isinstance(told.value, MemoryError)
    for part in ("137438953472 bytes (128 GiB", "L=32768", "allow_bytes is 2147483648 (2 GiB)", "At(", "pooled=256"):
        assert part in str(told.value)
    with pytest.raises(ch.TooLargeError):
        ch.MultiHeadAttention(2048, 32, device="meta")(
            torch.empty(1, 32768, 2048, device="meta"), observe=ch.Observe(scores=True)
        )


def test_what_is_allowed_is_done() -> None:
    x = torch.randn(1, 2, 5, 3)
    with pytest.raises(ch.TooLargeError, match="takes 200 bytes"):
        ch.attention(x, x, x, observe=ch.Observe(weights=True, allow_bytes=199))
    _, seen = ch.attention(x, x, x, observe=ch.Observe(weights=True, allow_bytes=200))
    assert seen.weights.nbytes == 200


# -- NaN, hidden and visible -------------------------------------------------------------------------------------

NEW = ("max_score", "received_mean", "value_weighted", "contribution")


def observed(backend: str, tensors: list[Tensor], mask: ch.Mask, **options: object) -> ch.Seen:
    observe = ch.Observe(
        **dict.fromkeys(NEW, True), agreement=True, lookback=2, patterns={"one": ch.Window(0, 0)}, **options
    )
    return ch.attention(*tensors, mask, backend=backend, observe=observe)[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_hidden_does_not_leak(backend: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 7, 8, generator=generator) for _ in range(3))
    mask = ch.KeyPadding(lengths=[5, 6]) & ch.QueryPadding(lengths=[4, 7])
    clean = observed(backend, [query, key, value], mask)
    hidden = ~torch.tensor([[1] * 5 + [0] * 2, [1] * 6 + [0]]).bool()
    dead = ~torch.tensor([[1] * 4 + [0] * 3, [1] * 7]).bool()
    dirty = [
        tensor.masked_fill(rows[:, None, :, None], bad)
        for tensor, rows in ((query, dead), (key, hidden), (value, hidden))
    ]
    for one, other in zip(tree_leaves(dict(clean)), tree_leaves(dict(observed(backend, dirty, mask))), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_visible_is_seen(backend: str) -> None:
    """A NaN in key 3 of head 1, seen by the queries from 3 on; one in value 5, which leaves weights alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 3, 7, 8, generator=generator) for _ in range(3))
    key[0, 1, 3], value[0, 2, 5] = math.nan, math.nan
    seen = observed(backend, [query, key, value], ch.Causal())
    nan = torch.zeros(3, 3, 7, dtype=torch.bool)
    nan[0, 1, 3:] = True  # by query: scores and weights
    assert torch.equal(seen.max_score[0].isnan(), nan[0])
    assert torch.equal(seen.lookback[0].isnan(), nan[0])
    assert torch.equal(seen.patterns["one"][0].isnan(), nan[0])
    nan[1, 1] = True  # by key: every key is seen by a query that is NaN
    assert torch.equal(seen.received_mean[0].isnan(), nan[1])
    nan[2, 1], nan[2, 2, 5] = True, True
    assert torch.equal(seen.value_weighted[0].isnan(), nan[2])
    nan[2, 2] = True  # queries 5 and 6 have a context of NaN, and see every key
    assert torch.equal(seen.contribution[0].isnan(), nan[2])
    assert torch.equal(seen.agreement[0].isnan(), torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]]).bool())


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_small_values(backend: str) -> None:
    """No square of them overflows or vanishes, and a hidden one doesn't count."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4, generator=generator) for _ in range(3))
    usual = observed(backend, [query, key, value], ch.Causal())
    for factor in (1e-30, 1e30):
        seen = observed(backend, [query, key, value * factor], ch.Causal())
        assert torch.allclose(seen.contribution, usual.contribution, rtol=1e-5, atol=1e-6)
        assert torch.allclose(seen.value_weighted / factor, usual.value_weighted, rtol=1e-5)
    mask = ch.Causal() & ch.KeyPadding(lengths=[4])
    hidden = value.clone()
    hidden[:, :, 4] = 3e38
    seen, usual = (observed(backend, [query, key, v], mask) for v in (hidden, value))
    for name in ("value_weighted", "contribution"):
        assert torch.allclose(seen[name], usual[name], atol=1e-6)


# -- what the definitions imply ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_agreement_and_lookback_in_closed_form(backend: str) -> None:
    x = torch.zeros(1, 2, 6, 3)  # scores of 0: weights are uniform over what is visible
    heads = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]]).bool()
    mask = ch.Allowed(heads, axes="hk")
    value = torch.ones(1, 2, 6, 3)
    observe = ch.Observe(contribution=True, agreement=True, lookback=1, received_mean=True, max_score=True)
    _, seen = ch.attention(x, x, value, mask, backend=backend, observe=observe)
    # Each of n visible keys makes up 1/n of six contexts.
    expected = heads / heads.sum(-1, keepdim=True)
    assert torch.allclose(seen.contribution[0], 6 * expected)
    assert torch.allclose(seen.received_mean[0], expected)
    assert torch.equal(seen.max_score, torch.zeros(1, 2, 6))
    # Heads that share no key are log 2 apart.
    assert torch.allclose(seen.agreement[0], math.log(2) * (1 - torch.eye(2)), atol=1e-6)
    # One key of context and one newer at the same weight; no context at all.
    assert torch.allclose(seen.lookback[0], torch.tensor([0.5, 0.0])[:, None].expand(2, 6))


@pytest.mark.parametrize("mask", [name for name in MASKS if not name.startswith("bare")])
@pytest.mark.parametrize("cut", TILINGS)
def test_counts_of_queries_that_see_a_key(mask: str, cut: str) -> None:
    """By runs and by tiles: what the dense mask has in its columns."""
    s = SHAPES["gqa-wide"]
    built, _ = MASKS[mask](s)
    query, key = torch.zeros(s.B, s.Hq, s.L, 1), torch.zeros(s.B, s.Hkv, s.S, 1)
    truth = torch.ones(1, 1, s.L, s.S).bool() if built is None else built.dense(s.L, s.S)
    truth = truth.expand(s.B, s.Hq, s.L, s.S)
    for bias in (
        None,
        torch.zeros(1, 1, 1, 1),
        torch.zeros(s.L, s.S).masked_fill_(torch.eye(s.L, s.S) > 0, -torch.inf),
    ):
        request = check(query, key, key, built, bias, None, 0.0)
        visible = truth if bias is None else truth & (bias != -torch.inf)
        with tiling(cut):
            counts = queries_that_see(request)
        assert torch.equal(counts.expand(s.B, s.Hq, s.S), visible.sum(dim=2))


@pytest.mark.parametrize("bias", [None, (2, 6, 7, 5), (1, 1, 7, 5), (2, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("mask", ["keys-real", "allowed-hqk", "segments-mixed", "causal"])
def test_scores_of_some_keys(mask: str, bias: tuple[int, ...] | None) -> None:
    s = SHAPES["gqa"]
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 7, 11, generator=generator), torch.randn(2, 3, 5, 11, generator=generator)
    added = None if bias is None else torch.randn(bias, generator=generator)
    at = ch.At(heads=[4, 0], queries=[6, 1], keys=[-1, 2])
    built, _ = MASKS[mask](s)
    observe = ch.Observe(scores=at, masked_scores=at)
    _, seen = ch.attention(query, key, key, built, attn_bias=added, observe=observe)
    scores = query @ key.repeat_interleave(2, dim=1).mT / 11**0.5 + (0.0 if added is None else added)
    visible = built.dense(7, 5).expand(2, 6, 7, 5)
    for whole, part in ((scores, seen.scores), (scores.masked_fill(~visible, -torch.inf), seen.masked_scores)):
        assert torch.allclose(part, whole[:, [4, 0]][:, :, [6, 1]][..., [4, 2]], atol=1e-5)
