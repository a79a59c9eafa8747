"""The reference backend against what can be worked out by hand, and against itself under small changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import clearhead as ch
import oracle
from cases import Case
from product import CASES


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    return ch.attention(query, key, value, *args, **kwargs, backend="reference")


# -- by hand ---------------------------------------------------------------------------------------------------


def test_equal_scores_give_the_mean() -> None:
    value = torch.tensor([[1.0, 0.0], [2.0, 6.0], [6.0, 0.0]], dtype=torch.float64)
    out = attend(torch.zeros(2, 5).double(), torch.ones(3, 5).double(), value)
    assert torch.allclose(out, torch.tensor([[3.0, 2.0], [3.0, 2.0]]).double(), rtol=1e-15)


def test_scores_are_log_odds() -> None:
    # Scores ln 1, ln 2, ln 5 give weights 1/8, 2/8, 5/8.
    key = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    out = attend(torch.ones(1, 1).double(), key, torch.eye(3, dtype=torch.float64), scale=1.0)
    assert torch.allclose(out, torch.tensor([[1.0, 2.0, 5.0]]).double() / 8, rtol=1e-14)


def test_the_scale_is_one_over_the_root_of_the_width() -> None:
    # q . k = 4 ln 3 in width 16: a score of ln 3 against 0, so weights 3/4 and 1/4.
    query = torch.zeros(1, 16, dtype=torch.float64)
    query[0, 0] = 4 * math.log(3)
    key = torch.zeros(2, 16, dtype=torch.float64)
    key[0, 0] = 1.0
    out = attend(query, key, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(out, torch.tensor([[0.75, 0.25]]).double(), rtol=1e-14)


def test_a_bias_of_log_n_counts_a_key_n_times() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (3, 4, 4))
    bias = torch.tensor([[0.0, math.log(3), 0.0, 0.0]], dtype=torch.float64)
    thrice = [0, 1, 1, 1, 2, 3]
    expected = attend(query, key[thrice], value[thrice])
    assert torch.allclose(attend(query, key, value, attn_bias=bias), expected, rtol=1e-13)


def test_one_visible_key_gives_its_value_exactly() -> None:
    x = torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attend(x, x, x, ch.Window(0, 0)), x)


def test_causal_by_hand() -> None:
    # Uniform weights over 1, 2, 3 keys: running means.
    value = torch.tensor([[6.0], [0.0], [3.0]], dtype=torch.float64)
    out = attend(torch.zeros(3, 2).double(), torch.ones(3, 2).double(), value, ch.Causal())
    assert torch.allclose(out, torch.tensor([[6.0], [3.0], [3.0]]).double(), rtol=1e-15)


def test_query_heads_share_key_heads_in_runs() -> None:
    # Heads 0 and 1 use key/value head 0, heads 2 and 3 use head 1.
    value = torch.tensor([10.0, 20.0]).reshape(1, 2, 1, 1)
    out = attend(torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1), value)
    assert out.flatten().tolist() == [10.0, 10.0, 20.0, 20.0]


def test_huge_scores_neither_overflow_nor_round_in_half_precision() -> None:
    # 200 * 400 = 80,000 is beyond float16: two equal scores far above the third.
    query = torch.full((1, 1), 200.0, dtype=torch.float16)
    key = torch.tensor([[400.0], [400.0], [100.0]], dtype=torch.float16)
    value = torch.tensor([[1.0], [3.0], [50.0]], dtype=torch.float16)
    assert attend(query, key, value, scale=1.0).item() == 2.0


# -- the oracle itself, by hand --------------------------------------------------------------------------------


def test_the_oracle_by_hand() -> None:
    """Two queries, three keys, weights 1/8, 2/8, 5/8, and then a query that sees the last key alone."""
    query, key = np.ones((1, 1, 2, 1)), np.log([1.0, 2.0, 5.0]).reshape(1, 1, 3, 1)
    value = np.eye(3)[None, None]
    truth = oracle.attend(query, key, value, lambda b, h, q, k: q == 0 or k == 2, scale=1.0)
    weights = np.array([[1 / 8, 2 / 8, 5 / 8], [0, 0, 1]])
    assert np.allclose(truth.weights[0, 0], weights, rtol=1e-14)
    assert np.allclose(truth.output[0, 0], weights, rtol=1e-14)
    assert np.allclose(truth.lse[0, 0], [math.log(8), math.log(5)], rtol=1e-14)
    assert np.allclose(truth.entropy[0, 0], [math.log(8) - 2 / 8 * math.log(2) - 5 / 8 * math.log(5), 0], atol=1e-14)
    assert np.allclose(truth.max_weight[0, 0], [5 / 8, 1])
    # Query 0 stands at position 1, query 1 at position 2.
    assert np.allclose(truth.distance[0, 0], [1 / 8 + 5 / 8, 0])
    assert np.allclose(truth.received[0, 0], [1 / 8, 2 / 8, 13 / 8])
    assert np.allclose(truth.offsets([0, 1, -1])[0, 0], [[2 / 8, 1 / 8, 5 / 8], [1, 0, 0]])
    assert np.allclose(truth.mass(np.array([[True, False, True]]))[0, 0], [6 / 8, 1])
    strongest, keys = truth.top_k(2)
    assert np.allclose(strongest[0, 0], [[5 / 8, 2 / 8], [1, 0]])
    assert keys[0, 0].tolist() == [[2, 1], [2, -1]]
    mean, top = truth.pooled(2)  # the middle key falls in both columns
    assert np.allclose(mean[0, 0], [[3 / 16, 7 / 16], [0, 1 / 2]])
    assert np.allclose(top[0, 0], [[2 / 8, 5 / 8], [0, 1]])


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "f64"][::29], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_oracles_gradients_are_those_of_its_output(case: Case, p: float) -> None:
    rng = np.random.default_rng(0)
    kept, step = rng.random(case.truth.scores.shape) >= p, 1e-6
    truth = case.truth.dropped(kept, p)
    gradients, _ = truth.gradients(case.full(case.output_gradient()).double().numpy())
    by_output = case.full(case.output_gradient()).numpy()
    group = truth.query.shape[1] // truth.key.shape[1]
    products = np.einsum("bhqe,bhke->bhqk", truth.query, truth.key.repeat(group, axis=1))
    # A bias of -inf is left to `visible`: there is no difference to take.
    given = case.inputs()
    capped = truth.scale * products
    if given.softcap is not None:
        capped = given.softcap * np.tanh(capped / given.softcap)
    sinks = None if given.sinks is None else given.sinks.double().numpy()
    bias = np.where(np.isfinite(truth.scores), truth.scores - capped, 0.0)
    arrays = {"query": truth.query, "key": truth.key, "value": truth.value, "bias": bias}

    def total(query: np.ndarray, key: np.ndarray, value: np.ndarray, bias: np.ndarray) -> float:
        sees = lambda *at: bool(truth.visible[at])  # noqa: E731
        moved = oracle.attend(query, key, value, sees, bias, truth.scale, given.softcap, sinks)
        return float((moved.dropped(kept, p).output * by_output).sum())

    for name, array in arrays.items():
        away = rng.standard_normal(array.shape)
        ahead, behind = (total(**arrays | {name: array + sign * step * away}) for sign in (1, -1))
        slope = float((gradients[name] * away).sum())
        assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-6), name
