"""Every kind of mask against a predicate in plain Python, pair by pair: whole, in tiles, in words, in pictures."""

import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import Allowed, Blocked, Causal, KeyPadding, Mask, Prefix, QueryPadding, Segments, Window
from clearhead.masks import Index, Tile

B, H = 2, 3
SIZES = [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1), (1, 1)]

Predicate = Callable[[int, int, int, int], bool]  # (batch, head, query, key) -> may attend


def loops(visible: Predicate, L: int, S: int) -> Tensor:
    """The predicate on every pair."""
    rows = [[[[visible(b, h, q, k) for k in range(S)] for q in range(L)] for h in range(H)] for b in range(B)]
    return torch.tensor(rows).reshape(B, H, L, S)


def holes(b: int, i: int) -> bool:
    """Real tokens with gaps between them, others in each item."""
    return (i + 2 * b) % 3 != 1


def segment(b: int, i: int) -> int:
    """Ids of packed documents, in runs of 2, shifted by one in the second item."""
    return (i + b) // 2


def table(f: Callable[[int, int], object], n: int) -> list[list[object]]:
    """f(batch, position) as rows."""
    return [[f(b, i) for i in range(n)] for b in range(B)]


def cases(L: int, S: int) -> Iterator[tuple[str, Mask, Predicate]]:
    """All kinds of masks for L queries and S keys, each with what it means."""
    shift = S - L
    n, m = min(3, S), min(2, L)  # lengths that fit

    yield "causal", Causal(), lambda b, h, q, k: k <= q + shift
    yield "causal start", Causal(align="start"), lambda b, h, q, k: k <= q
    yield "window", Window(left=2, right=1), lambda b, h, q, k: -2 <= k - (q + shift) <= 1
    yield "window 0", Window(left=0, right=0), lambda b, h, q, k: k == q + shift
    yield "window left", Window(left=1), lambda b, h, q, k: k >= q + shift - 1
    yield "window right", Window(right=2), lambda b, h, q, k: k <= q + shift + 2
    yield "window start", Window(left=1, right=2, align="start"), lambda b, h, q, k: q - 1 <= k <= q + 2
    yield "window open", Window(), lambda b, h, q, k: True

    yield "keys right", KeyPadding(lengths=[n, 0]), lambda b, h, q, k: k < (n, 0)[b]
    yield "keys left", KeyPadding([1, n], side="left"), lambda b, h, q, k: k >= S - (1, n)[b]
    yield "keys one length", KeyPadding(n), lambda b, h, q, k: k < n
    yield "keys tensor", KeyPadding(torch.tensor([0, S])), lambda b, h, q, k: k < (0, S)[b]
    yield "keys real", KeyPadding(real=torch.tensor(table(holes, S))), lambda b, h, q, k: holes(b, k)
    ints = [[int(real) for real in row] for row in table(holes, S)]
    yield "keys 0/1", KeyPadding(real=ints), lambda b, h, q, k: holes(b, k)
    ids = torch.tensor([[7 if real else 9 for real in row] for row in table(holes, S)])
    yield "keys from ids", KeyPadding.from_ids(ids, pad_id=9), lambda b, h, q, k: holes(b, k)

    yield "queries right", QueryPadding(lengths=[0, m]), lambda b, h, q, k: q < (0, m)[b]
    yield "queries left", QueryPadding([m, 1], side="left"), lambda b, h, q, k: q >= L - (m, 1)[b]
    yield "queries real", QueryPadding(real=torch.tensor(table(holes, L))), lambda b, h, q, k: holes(b, q)
    yield "queries one row", QueryPadding(real=[[holes(1, i) for i in range(L)]]), lambda b, h, q, k: holes(1, q)

    own_keys = table(lambda b, i: segment(b, i) % 2, S)
    queries, one_row = table(segment, L), [segment(1, i) for i in range(L)]
    yield "segments", Segments(queries, own_keys), lambda b, h, q, k: segment(b, q) == segment(b, k) % 2
    yield "segments 1-D", Segments(one_row, own_keys), lambda b, h, q, k: segment(1, q) == segment(b, k) % 2
    if L == S:
        yield "segments self", Segments(queries), lambda b, h, q, k: segment(b, q) == segment(b, k)

    yield "prefix", Prefix(n), lambda b, h, q, k: k < n
    yield "prefix per item", Prefix(torch.tensor([0, S])), lambda b, h, q, k: k < (0, S)[b]
    odd = torch.tensor([[[(b + h + k) % 2 == 1 for b in range(B)] for k in range(S)] for h in range(H)])
    yield "allowed", Allowed(odd, axes="hkb"), lambda b, h, q, k: (b + h + k) % 2 == 1
    yield "blocked", Blocked(odd, axes="hkb"), lambda b, h, q, k: (b + h + k) % 2 == 0

    yield (
        "and of intervals",
        Causal() & KeyPadding([n, 1]) & Window(left=1),
        lambda b, h, q, k: q + shift - 1 <= k <= q + shift and k < (n, 1)[b],
    )
    yield (
        "prefix-LM, padding closed again",
        (Causal() | Prefix([n, 1])) & KeyPadding([n, S]),
        lambda b, h, q, k: (k <= q + shift or k < (n, 1)[b]) and k < (n, S)[b],
    )
    yield (
        "negated",
        ~(Causal() & ~QueryPadding([0, m])) | ~Allowed(odd, axes="hkb"),
        lambda b, h, q, k: not (k <= q + shift and not q < (0, m)[b]) or (b + h + k) % 2 == 0,
    )
    yield "nothing", Window(0, 0) & ~Window(0, 0), lambda b, h, q, k: False


EVERY = [pytest.param(L, S, id=f"L{L}-S{S}") for L, S in SIZES]
per_case = pytest.mark.parametrize(
    ("L", "S", "name"),
    [pytest.param(L, S, name, id=f"{name}-L{L}-S{S}") for L, S in SIZES for name, *_ in cases(L, S)],
)


def case(L: int, S: int, name: str) -> tuple[Mask, Tensor]:
    """A mask and its independent truth, (B, H, L, S)."""
    mask, visible = next((mask, visible) for label, mask, visible in cases(L, S) if label == name)
    return mask, loops(visible, L, S)


# -- the whole mask --------------------------------------------------------------------------------------------


@per_case
def test_dense_is_the_predicate(L: int, S: int, name: str) -> None:
    mask, truth = case(L, S, name)
    dense = mask.dense(L, S)
    assert dense.dtype == torch.bool
    assert dense.ndim == 4
    assert dense.shape[0] in (1, B)
    assert dense.shape[1] in (1, H)
    assert torch.equal(dense.expand(B, H, L, S), truth)


@per_case
def test_attention_takes_the_mask_its_dense_form_and_the_truth_alike(L: int, S: int, name: str) -> None:
    mask, truth = case(L, S, name)
    generator = torch.Generator().manual_seed(L * S)
    q, k, v = (torch.randn(B, H, n, 4, dtype=torch.float64, generator=generator) for n in (L, S, S))
    scores = (q @ k.mT / 2).masked_fill(~truth, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    for given in (mask, mask.dense(L, S)):
        torch.testing.assert_close(ch.attention(q, k, v, given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("letters", [p for n in range(5) for p in map("".join, itertools.permutations("bhqk", n))])
def test_named_axes_in_any_order_and_of_size_one(letters: str) -> None:
    L, S = 5, 7
    sizes = {"b": B, "h": H, "q": L, "k": S}
    generator = torch.Generator().manual_seed(len(letters))
    for small in itertools.chain.from_iterable(itertools.combinations(letters, n) for n in range(len(letters) + 1)):
        shape = [1 if letter in small else sizes[letter] for letter in letters]
        tensor = torch.rand(shape, generator=generator) < 0.5
        cells = tensor.tolist()

        def visible(b: int, h: int, q: int, k: int, cells: object = cells, small: object = small) -> bool:
            at = {"b": b, "h": h, "q": q, "k": k}
            for letter in letters:
                cells = cells[0 if letter in small else at[letter]]  # type: ignore[index, operator]
            return bool(cells)

        truth = loops(visible, L, S)
        assert torch.equal(Allowed(tensor, axes=letters).dense(L, S).expand(B, H, L, S), truth)
        assert torch.equal(Blocked(tensor, axes=letters).dense(L, S).expand(B, H, L, S), ~truth)


def test_a_size_one_axis_stays_size_one_in_dense() -> None:
    assert Causal().dense(5, 7).shape == (1, 1, 5, 7)
    assert KeyPadding([3, 2]).dense(5, 7).shape == (2, 1, 5, 7)
    assert Allowed(torch.ones(3, 5, dtype=torch.bool), axes="hq").dense(5, 7).shape == (1, 3, 5, 7)
    assert (KeyPadding([3, 2]) & Allowed(torch.ones(3, 1, dtype=torch.bool), axes="hq")).dense(5, 7).shape[:2] == (
        2,
        3,
    )


@pytest.mark.parametrize(("L", "S"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(L: int, S: int) -> None:
    mask = Causal() & Window(left=1) & KeyPadding([0, 0]) | Prefix(0)
    assert mask.dense(L, S).shape == (2, 1, L, S)
    assert mask.visible_fraction(L, S) == 0.0
    x = torch.randn(2, 3, L, 4), torch.randn(2, 3, S, 4)
    assert torch.equal(ch.attention(x[0], x[1], x[1], mask), torch.zeros(2, 3, L, 4))


# -- parts of it -----------------------------------------------------------------------------------------------


def some_index(size: int, generator: torch.Generator) -> Index:
    """A slice, an empty one now and then, or a tensor of positions in any order, some twice."""
    if torch.rand((), generator=generator) < 0.5:
        start, stop = sorted(torch.randint(size + 1, (2,), generator=generator).tolist())
        return slice(start, stop)
    return torch.randint(size, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator)


@per_case
def test_a_tile_is_a_cut_of_the_whole(L: int, S: int, name: str) -> None:
    mask, truth = case(L, S, name)
    generator = torch.Generator().manual_seed(7)
    for _ in range(12):
        b, h, q, k = (some_index(size, generator) for size in (B, H, L, S))
        tile = mask._tile(Tile(b, h, q, k, L, S, torch.device("cpu")))
        cut = truth[b][:, h][:, :, q][..., k]
        assert tile.ndim == 4
        assert tile.dtype == torch.bool
        assert torch.equal(tile.expand(cut.shape) if cut.numel() else cut, cut), (b, h, q, k)


# Kinds that promise the smallest interval; the others promise no more than to cover what is visible.
TIGHT = {"causal", "causal start", "window", "window 0", "window left", "window right", "window start"}
TIGHT |= {"window open", "keys right", "keys left", "keys one length", "keys tensor", "keys real", "keys 0/1"}
TIGHT |= {"keys from ids", "and of intervals", "prefix", "prefix per item"}


@per_case
def test_reach_covers_every_visible_key_and_no_more_where_promised(L: int, S: int, name: str) -> None:
    mask, truth = case(L, S, name)
    for start, stop in itertools.combinations(range(L + 1), 2):
        reach = mask._reach(range(start, stop), L, S)
        assert 0 <= reach.start <= reach.stop <= S
        seen = truth[:, :, start:stop].any(dim=(0, 1, 2)).nonzero().flatten().tolist()
        assert set(seen) <= set(reach), (start, stop, reach)
        if name in TIGHT:
            assert len(reach) == (seen[-1] - seen[0] + 1 if seen else 0), (start, stop, reach, seen)


def test_masked_work_is_skipped_with_or_and_query_padding() -> None:
    """What `|` and QueryPadding leave out, though they don't promise the smallest interval."""
    assert (Window(1, 0) | Prefix(0))._reach(range(5, 6), 9, 9) == range(4, 6)
    assert not QueryPadding([3, 2])._reach(range(3, 9), 9, 9)
    assert not QueryPadding([3, 2], side="left")._reach(range(6), 9, 9)


# -- in words, in numbers, in pictures -------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 5)])
def test_explain_gives_the_verdict_of_every_pair(L: int, S: int) -> None:
    for name, mask, visible in cases(L, S):
        for b, h, q, k in itertools.product(range(B), range(H), range(0, L, 2), range(S)):
            first, *reasons = mask.explain(L, S, query=q, key=k, batch=b, head=h).splitlines()
            word = "may" if visible(b, h, q, k) else "may NOT"
            assert first == f"query {q} {word} attend to key {k} (batch {b}, head {h})", name
            assert reasons, name
            for line in reasons:
                mark, rest = re.fullmatch(r" +(yes|no )  (.*)", line).groups()
                parts = [*mask._leaves(), *(~leaf for leaf in mask._leaves())]
                part = next((part for part in parts if rest.strip().startswith(repr(part) + ": ")), None)
                if part is None:  # the heading of a joined part
                    assert re.match(r" *[&|~] \(", rest), line
                    continue
                dense = part.dense(L, S).expand(B, H, L, S)
                assert (mark == "yes") == bool(dense[b, h, q, k]), (name, line)


@pytest.mark.parametrize(
    ("mask", "at", "reason"),
    [
        (Causal(), {"query": 3, "key": 7}, "key 7 comes 2 after the query's position 5"),
        (Causal(), {"query": -1, "key": -1}, "key 8 is at the query's own position"),
        (Causal(align="start"), {"query": 3, "key": 1}, "key 1 comes 2 before the query's position 3"),
        (Window(4, 0), {"query": 6, "key": 1}, "comes 7 before the query's position 8; allowed before: 4, after: 0"),
        (Window(right=1), {"query": 0, "key": 2}, "allowed before: no limit, after: 1"),
        (KeyPadding([8, 5]), {"query": 0, "key": 6, "batch": 1}, "key 6 is padding, item 1 has 5 real keys"),
        (KeyPadding([8, 5], side="left"), {"query": 0, "key": 4, "batch": 1}, "key 4 is real, item 1 has 5 real"),
        (QueryPadding([2, 3]), {"query": 2, "key": 0}, "query 2 is padding, item 0 has 2 real queries"),
        (QueryPadding(real=[[1, 0, 1, 1, 0, 1, 1]]), {"query": 4, "key": 0}, "query 4 is padding, item 0 has 5 real"),
        (Segments([1] * 3 + [4] * 4, [4] * 9), {"query": 2, "key": 5}, "query 2 is in segment 1, key 5 in segment 4"),
        (Prefix([2, 6]), {"query": 0, "key": 5, "batch": 1}, "the first 6 keys are open"),
        (Allowed([[True, False]], axes="hb"), {"query": 0, "key": 5, "batch": 1, "head": 0}, "holds False at [0, 1]"),
    ],
)  # fmt: skip
def test_explain_names_the_numbers(mask: Mask, at: dict[str, int], reason: str) -> None:
    assert reason in mask.explain(7, 9, **at)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"query": 5, "key": 0}, r"query 5 is out of range: there are 5 \(query -5 to 4\)"),
        ({"query": 0, "key": -8}, r"key -8 is out of range: there are 7 \(key -7 to 6\)"),
        ({"query": 0, "key": 0, "batch": 2}, r"batch 2 is out of range: there are 2"),
    ],
)
def test_explain_out_of_range(at: dict[str, int], message: str) -> None:
    with pytest.raises(IndexError, match=message):
        KeyPadding([3, 2]).explain(5, 7, **at)


@per_case
def test_visible_fraction_is_the_mean(L: int, S: int, name: str) -> None:
    mask, truth = case(L, S, name)
    assert mask.visible_fraction(L, S) == pytest.approx(truth.double().mean().item(), abs=1e-12)


def test_visible_fraction_of_a_large_mask_in_closed_form() -> None:
    n = 3001  # more than one block of rows
    assert Causal().visible_fraction(n, n) == pytest.approx((n + 1) / (2 * n), abs=1e-12)


@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 5)])
def test_draw_shows_every_pair(L: int, S: int) -> None:
    for name, mask, visible in cases(L, S):
        for b, h in itertools.product(range(B), range(H)):
            expected = [" ".join("■" if visible(b, h, q, k) else "·" for k in range(S)) for q in range(L)]
            assert mask.draw(L, S, batch=b, head=h) == "\n".join(expected), name


def test_draw_pools_a_large_mask() -> None:
    lines = [line.split(" ") for line in Causal().draw(100, 60, max_cells=10).splitlines()]
    assert len(lines) == 10
    for i, j in itertools.product(range(10), range(10)):
        # Cell (i, j) covers queries 10 i .. 10 i + 9, which sit at key positions 40 lower, and keys 6 j .. 6 j + 5.
        pairs = [k <= q - 40 for q in range(10 * i, 10 * i + 10) for k in range(6 * j, 6 * j + 6)]
        assert lines[i][j] == ("■" if all(pairs) else "▒" if any(pairs) else "·")


def test_draw_out_of_range() -> None:
    with pytest.raises(IndexError, match="batch 2 is out of range: there are 2"):
        KeyPadding([3, 2]).draw(5, 7, batch=2)


def test_segments_of_an_empty_batch() -> None:
    one, none = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int64)
    assert Segments(one, none).dense(3, 5).shape == (0, 1, 3, 5)
    assert Segments(none, one).dense(5, 3).shape == (0, 1, 5, 3)
