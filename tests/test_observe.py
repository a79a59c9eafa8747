"""What is seen: every statistic and map, every way to choose a part, on every backend."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from cases import Case
from clearhead.backends import BACKENDS
from clearhead.observe import MODULE
from conformance import TILINGS, assert_near, check_seen, expected_reasons, tiling
from product import CASES


@pytest.mark.parametrize("items", [1, 2, 3])
def test_tiles_of_several_items(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # B = 3 in tiles of 1, 2 + 1, or 3 items: totals over queries (received, pooled) must stay apart.
    case = Case("keys", "gqa-wide")
    s = case.sizes
    monkeypatch.setattr("clearhead.plan.MIN_ROWS", 1)
    monkeypatch.setattr("clearhead.plan.MAX_ROWS", 2)
    monkeypatch.setattr("clearhead.plan.TILE_ELEMENTS", items * 8 * s.Hq * s.S)
    check_seen(case, "blockwise")


# -- parts of a map --------------------------------------------------------------------------------------------

CHOICES = [
    (ch.At(), [0, 1, 2, 3, 4, 5], range(7), range(5)),
    (ch.At(heads=2), [2], range(7), range(5)),
    (ch.At(heads=-1), [5], range(7), range(5)),
    (ch.At(heads=[4, 0, 4]), [4, 0, 4], range(7), range(5)),
    (ch.At(heads=slice(1, None, 2)), [1, 3, 5], range(7), range(5)),
    (ch.At(heads=[]), [], range(7), range(5)),
    (ch.At(queries=0), range(6), [0], range(5)),
    (ch.At(queries=[-1, 3, -7]), range(6), [6, 3, 0], range(5)),
    (ch.At(queries=slice(-2, None)), range(6), [5, 6], range(5)),
    (ch.At(queries=slice(None, None, -3)), range(6), [6, 3, 0], range(5)),
    (ch.At(queries=slice(5, 100)), range(6), [5, 6], range(5)),
    (ch.At(keys=[4, -4]), range(6), range(7), [4, 1]),
    (ch.At(keys=slice(1, 3)), range(6), range(7), [1, 2]),
    (ch.At(heads=[3, 1], queries=[2, 6], keys=-1), [3, 1], [2, 6], [4]),
]


@pytest.mark.parametrize("cut", TILINGS)
@pytest.mark.parametrize(("at", "heads", "queries", "keys"), CHOICES, ids=lambda value: repr(value)[:60])
@pytest.mark.parametrize("case", [Case("keys-real", "gqa"), Case("allowed-hqk", "gqa", "f32", "bias-hides")], ids=str)
def test_a_part_of_a_map(case: Case, at: ch.At, heads: object, queries: object, keys: object, cut: str) -> None:
    given, truth = case.inputs(), case.truth
    names = ("weights", "scores", "masked_scores", "dropped_weights")
    observe = ch.Observe(**dict.fromkeys(names, at))
    with tiling(cut):
        _, seen = ch.attention(given.query, given.key, given.value, **given.options(), observe=observe)
    maps = (truth.weights, truth.scores, truth.masked_scores, truth.weights)
    for name, whole in zip(names, maps, strict=True):
        part = whole[:, list(heads)][:, :, list(queries)][..., list(keys)]
        assert_near(seen[name], part, 1e-5 if case.dtype == "f32" else 1e-12, f"{name} {at}", scale=1.0)


@pytest.mark.parametrize(
    ("mask", "last"),
    [
        (None, [6, 6, 6]),
        (ch.QueryPadding(lengths=[3, 7, 1]), [2, 6, 0]),
        (ch.QueryPadding(lengths=[3, 0, 1], side="left"), [6, 6, 6]),  # one with no real query: the last of all
        (ch.QueryPadding(real=[[1, 0, 1, 0, 0, 0, 0], [1] * 7, [0, 0, 0, 0, 0, 1, 0]]), [2, 6, 5]),
        (ch.Segments([[1, 1, 1, 2, 2, 9, 9]] * 3, [[1, 1, 2, 2, 2]] * 3), [4, 4, 4]),
    ],
    ids=repr,
)
def test_the_last_real_query(mask: ch.Mask | None, last: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 7, 5, generator=generator)
    memory = torch.randn(3, 2, 5, 5, generator=generator)
    observe = ch.Observe(weights=ch.At(last_real=True, heads=[1]), scores=True)
    _, seen = ch.attention(query, memory, memory, mask, observe=observe)
    _, whole = ch.attention(query, memory, memory, mask, observe=ch.Observe(weights=True))
    assert seen.weights.shape == (3, 1, 1, 5)
    for item, row in enumerate(last):
        assert torch.allclose(seen.weights[item, 0, 0], whole.weights[item, 1, row], atol=1e-7)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (ch.At(heads=3), r"At\(heads=3\) is out of range: there are 3 heads \(-3 to 2\)"),
        (ch.At(heads=[0, -4]), r"At\(heads=-4\) is out of range"),
        (ch.At(queries=5), r"At\(queries=5\) is out of range: there are 5 queries"),
        (ch.At(keys=[0, 7]), r"At\(keys=7\) is out of range: there are 7 keys"),
    ],
    ids=repr,
)
def test_out_of_range(at: ch.At, message: str) -> None:
    query, memory = torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2)
    with pytest.raises(IndexError, match=message):
        ch.attention(query, memory, memory, observe=ch.Observe(weights=at))


def test_queries_and_last_real_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="either queries= or last_real=True"):
        ch.At(queries=[1], last_real=True)


# -- weights and output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "f64"][::5], ids=str)
def test_weights_times_values_are_the_context(case: Case) -> None:
    given = case.inputs()
    for backend in BACKENDS:
        if expected_reasons(case, backend):
            continue
        out, seen = ch.attention(
            given.query, given.key, given.value, **given.options(), backend=backend, observe=ch.Observe(weights=True)
        )
        weights, value = case.full(seen.weights), case.full(given.value)
        again = weights @ value.repeat_interleave(case.sizes.Hq // case.sizes.Hkv, dim=1)
        assert torch.allclose(case.full(out), again, rtol=0, atol=1e-13)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_dropped_weights_times_values_are_the_context(backend: str, p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 6, n, 5, generator=generator, dtype=torch.float64) for n in (7, 11, 11))
    observe = ch.Observe(dropped_weights=True, weights=True, entropy=True)
    for cut in TILINGS:
        with tiling(cut):
            out, seen = ch.attention(
                query, key[:, :3], value[:, :3], ch.Causal(), dropout_p=p, backend=backend, observe=observe
            )
        assert torch.allclose(out, seen.dropped_weights @ value[:, :3].repeat_interleave(2, dim=1), atol=1e-14)
        # Taken before dropout: whole rows, and the same as without.
        assert torch.allclose(seen.weights.sum(-1), torch.ones(2, 6, 7).double(), rtol=1e-14)
        _, still = ch.attention(query, key[:, :3], value[:, :3], ch.Causal(), observe=ch.Observe(entropy=True))
        assert torch.equal(seen.entropy, still.entropy) or torch.allclose(seen.entropy, still.entropy, rtol=1e-13)
        assert (seen.dropped_weights == 0).any()


def test_a_part_of_the_dropped_weights_is_the_part_that_was_used() -> None:
    x = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    at = ch.At(heads=[2, 0], queries=[-1, 3], keys=[5, 1])
    for observe in (ch.Observe(dropped_weights=True), ch.Observe(dropped_weights=at)):
        torch.manual_seed(5)
        out, seen = ch.attention(x, x, x, dropout_p=0.5, observe=observe)
        if observe.dropped_weights is True:
            whole, first = seen.dropped_weights, out
    assert torch.equal(out, first)
    assert torch.allclose(seen.dropped_weights, whole[:, [2, 0]][:, :, [6, 3]][..., [5, 1]], atol=1e-7)


# -- requests and records --------------------------------------------------------------------------------------


def test_all_keeps_everything_that_needs_no_argument() -> None:
    x = torch.randn(2, 3, 5, 7)
    _, seen = ch.attention(x, x, x, observe=ch.Observe.all())
    assert set(seen) == {
        "lse", "entropy", "max_weight", "max_score", "distance", "received", "received_mean", "value_weighted",
        "contribution", "agreement", "rest", "weights", "scores", "masked_scores", "dropped_weights",
        "query", "key", "value", "context",
    }  # fmt: skip


def test_nothing_asked_nothing_kept() -> None:
    x = torch.randn(2, 3, 5, 7)
    out, seen = ch.attention(x, x, x, observe=ch.Observe())
    assert torch.equal(out, ch.attention(x, x, x))
    assert len(seen) == 0


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("weights", r"Observe\(weights=True\)"),
        ("entropy", r"Observe\(entropy=True\)"),
        ("top_k", r"Observe\(top_k=\d+\)"),
        ("offsets", r"Observe\(offsets=\[\.\.\.\]\)"),
        ("mass", r"Observe\(mass=\{\.\.\.\}\)"),
        ("pooled", r"Observe\(pooled=\d+\)"),
        ("max_score", r"Observe\(max_score=True\)"),
        ("patterns", r"Observe\(patterns=\{\.\.\.\}\)"),
        ("lookback", r"Observe\(lookback=\d+\)"),
        ("dropped_weights", r"Observe\(dropped_weights=True\)"),
        ("context", r"Observe\(context=True\)"),
    ],
)
def test_a_field_not_asked_for_names_its_flag(name: str, way: str) -> None:
    x = torch.randn(2, 3, 5, 7)
    _, seen = ch.attention(x, x, x, observe=ch.Observe(lse=True))
    with pytest.raises(AttributeError, match=rf"{name} was not asked for: observe={way} keeps it[^.]*\. Seen: lse\."):
        getattr(seen, name)
    assert not hasattr(seen, name)


@pytest.mark.parametrize("name", MODULE)
def test_a_field_of_the_module_says_so(name: str) -> None:
    x = torch.randn(2, 3, 5, 7)
    _, seen = ch.attention(x, x, x, observe=ch.Observe.all())
    with pytest.raises(AttributeError, match=f"{name} was not asked for, or .*MultiHeadAttention"):
        getattr(seen, name)


def test_a_field_that_does_not_exist() -> None:
    x = torch.randn(2, 3, 5, 7)
    _, seen = ch.attention(x, x, x, observe=ch.Observe(lse=True))
    with pytest.raises(AttributeError, match="there is no field 'weight'"):
        _ = seen.weight
    with pytest.raises(KeyError):
        seen["weight"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 0}, r"top_k=\.\.\.\) takes a number >= 1, not 0"),
        ({"top_k": True}, "not True"),
        ({"pooled": -2}, "not -2"),
        ({"weights": 3}, r"weights=\.\.\.\) takes True or an At, not 3"),
        ({"mass": {"first": torch.ones(2, 3)}}, r"'first': \.\.\.\}\) takes a bool tensor"),
        ({"mass": {"first": torch.ones(3, dtype=torch.bool)}}, r"takes a bool tensor \(B\|1, S\)"),
    ],
    ids=repr,
)
def test_wrong_requests(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ch.Observe(**wrong)


def test_a_mass_that_does_not_fit() -> None:
    x = torch.randn(2, 3, 5, 7)
    keys = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ch.ShapeError, match=r"'first'.*must be \(B\|1, S\) with B=2, S=5, not \(2, 4\)"):
        ch.attention(x, x, x, observe=ch.Observe(mass={"first": keys}))


def test_dead_rows() -> None:
    query, memory = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 2, 7)
    observe = ch.Observe(lse=True, entropy=True, max_weight=True, distance=True, weights=True, top_k=2, pooled=5)
    out, seen = ch.attention(
        query, memory, memory, ch.Causal(), observe=observe
    )  # the first 3 of 5 queries see nothing
    assert not out[:, :, :3].any()
    assert (seen.lse[:, :, :3] == -torch.inf).all()
    for name in ("entropy", "max_weight", "distance", "weights"):
        assert not seen[name][:, :, :3].any()
    assert (seen.top_k[1][:, :, :4] == torch.tensor([[-1, -1]] * 3 + [[0, -1]])).all()
    assert not seen.top_k[0][:, :, :3].any()


def test_what_is_seen_remembers_its_mask() -> None:
    x = torch.randn(2, 3, 5, 7)
    _, seen = ch.attention(x, x, x, ch.Causal(), observe=ch.Observe(weights=True))
    assert seen.mask == ch.Causal()


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_output_and_context_of_one_query_compiled(axes: int) -> None:
    # Both are views of one tensor, which torch's compiler makes anew: an axis of L = 1 was once squeezed instead.
    batch = (1,) * (axes - 2)
    query, memory = torch.randn(*batch, 1, 5, requires_grad=True), torch.randn(*batch, 7, 5)

    def call(query: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, seen = ch.attention(query, memory, memory, observe=ch.Observe(context=True))
        return out, seen.context

    for tensor in torch.compile(call, fullgraph=True, backend="aot_eager")(query, memory):
        assert tensor.shape == query.shape
