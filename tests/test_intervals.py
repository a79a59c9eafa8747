"""What a mask says of itself, one run of keys per query and a rest, against the oracle's rules, pair by pair."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

import clearhead as ch
import oracle
from cases import EMPTY_SHAPES, KINDS, MASKS, PAIRS, SHAPES, Built, Sizes
from clearhead import Allowed, Blocked, Causal, KeyPadding, Mask, Prefix, QueryPadding, Segments, Window
from clearhead.masks import ALL, Tile
from clearhead.masks.intervals import Intervals
from test_fuzz import some_mask, some_sizes

ALL_SHAPES = SHAPES | EMPTY_SHAPES
Split = tuple[Intervals, Mask | None]


def at(limit: Tensor, b: int, q: int) -> int:
    """A limit's number; an axis of size 1 is for all."""
    assert limit.dtype == torch.int64
    assert limit.ndim == 2
    rows, columns = limit.shape
    return int(limit[b if rows != 1 else 0, q if columns != 1 else 0])


def in_run(run: Intervals, b: int, q: int, k: int) -> bool:
    """The definition of `Intervals`, on plain integers."""
    start = [q + run.left] if run.left is not None else []
    start += [at(run.first, b, q)] if run.first is not None else []
    stop = [q + run.right + 1] if run.right is not None else []
    stop += [at(run.behind, b, q)] if run.behind is not None else []
    return max(start, default=0) <= k < min(stop, default=math.inf)


def check_split(mask: Mask, sees: oracle.Sees, s: Sizes) -> Split:
    """``intervals & rest`` is the mask: of every pair."""
    run, rest = mask._split(s.L, s.S)
    left = torch.ones(1, 1, s.L, s.S, dtype=torch.bool) if rest is None else rest.dense(s.L, s.S)
    left = left.expand(s.B, s.Hq, s.L, s.S).numpy()
    whole = mask.dense(s.L, s.S).expand(s.B, s.Hq, s.L, s.S).numpy()
    for b, q, k in np.ndindex(s.B, s.L, s.S):
        inside = in_run(run, b, q, k)
        for h in range(s.Hq):
            assert (inside and left[b, h, q, k]) == sees(b, h, q, k) == whole[b, h, q, k], (
                mask,
                run,
                rest,
                b,
                h,
                q,
                k,
            )
    return run, rest


# -- every kind, every pair of kinds, random expressions -------------------------------------------------------


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("name", [name for name in MASKS if name in KINDS or "~" in name or "-" in name])
def test_every_kind(name: str, shape: str) -> None:
    s = ALL_SHAPES[shape]
    mask, sees = MASKS[name](s)
    if isinstance(mask, Mask):
        check_split(mask, sees, s)


@pytest.mark.parametrize("shape", ["mha", "gqa", "one-query", "no-batch"])
@pytest.mark.parametrize("first", [name for name in MASKS if isinstance(MASKS[name](SHAPES["mha"])[0], Mask)])
def test_every_pair(first: str, shape: str) -> None:
    s = ALL_SHAPES[shape]
    for name in PAIRS:
        if name.startswith((f"{first} & ", f"{first} | ")):
            mask, sees = PAIRS[name](s)
            check_split(mask, sees, s)
            check_split(~mask, oracle.negated(sees), s)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Built, Sizes]:
    s = some_sizes(draw, "bhle")
    mask, sees = some_mask(draw, s)
    # Runs in every item, which drawn flags and ids seldom are.
    for run, other in (_real_runs(draw, s), _packed(draw, s)):
        how = draw(st.sampled_from(["not", "and", "or", "and not"]))
        if mask is None or how == "not":
            mask, sees = ~run, oracle.negated(other)
        elif how == "or":
            mask, sees = mask | run, oracle.either(sees, other)
        else:
            negate = how == "and not"
            mask, sees = (
                mask & (~run if negate else run),
                oracle.both(sees, oracle.negated(other) if negate else other),
            )
    return (mask, sees), s


def _real_runs(draw: st.DrawFn, s: Sizes) -> Built:
    ends = draw(st.sampled_from(["any", "right", "left", "all"]))
    flags = np.zeros((s.B, s.S), dtype=bool)
    for row in flags:
        start, stop = sorted((draw(st.integers(0, s.S)), draw(st.integers(0, s.S))))
        row[0 if ends in ("right", "all") else start : s.S if ends in ("left", "all") else stop] = True
    return KeyPadding(real=torch.from_numpy(flags)), oracle.table(flags, "bk")


def _packed(draw: st.DrawFn, s: Sizes) -> Built:
    rows = draw(st.sampled_from([1, s.B])), draw(st.sampled_from([1, s.B]))
    order = draw(st.permutations([-3, 0, 5, 9]))

    def ids(count: int, size: int) -> list[list[int]]:
        found = []
        for _ in range(count):
            cuts = sorted(draw(st.lists(st.integers(0, size), min_size=3, max_size=3)))
            found.append([order[sum(cut <= i for cut in cuts)] for i in range(size)])
        return found

    queries, keys = ids(rows[0], s.L), ids(rows[1], s.S)
    return Segments(queries, keys), oracle.segments(queries, keys)


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(expressions())
def test_random_expressions(drawn: tuple[Built, Sizes]) -> None:
    (mask, sees), s = drawn
    check_split(mask, sees, s)


# -- the fast path, kind by kind: nobody loses it silently -----------------------------------------------------

L, S, B = 5, 7, 2
HOLES = [[True, False, True, False, True, True, True]] * B
PACKED = [[3, 3, 0, 0, 0], [3, 0, 0, 0, 9]], [[3, 3, 3, 0, 0, 1, 1], [0, 0, 3, 3, 9, 9, 9]]
TABLE = Allowed(torch.ones(L, S, dtype=torch.bool).tril(), axes="qk")
right_padded = KeyPadding(real=[[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]])
left_padded = KeyPadding(real=[[0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])

RUNS: list[tuple[Mask, str]] = [  # no rest, and the limits that the run has
    (Causal(), "right"),
    (Causal("start"), "right"),
    (Window(), ""),
    (Window(left=2), "left"),
    (Window(left=2, right=0), "left right"),
    (KeyPadding([3, 0]), "behind"),
    (KeyPadding(4), "behind"),
    (KeyPadding([3, 0], side="left"), "first"),
    (right_padded, "behind"),
    (left_padded, "first"),
    (KeyPadding(real=[[0] * S, [1, 1, 0, 0, 0, 0, 0]]), "behind"),
    (KeyPadding(real=[[0] * S, [0, 0, 0, 0, 0, 1, 1]]), "first"),
    (KeyPadding(real=[[0] * S, [0, 1, 1, 0, 0, 0, 0]]), "first behind"),
    (KeyPadding(real=[[0] * S] * B), "behind"),
    (KeyPadding(real=[[1] * S] * B), ""),
    (KeyPadding.from_ids(torch.tensor([[8, 8, 8, 4, 4, 4, 4]]), pad_id=4), "behind"),
    (QueryPadding([3, 0]), "behind"),
    (QueryPadding([3, 0], side="left"), "behind"),
    (QueryPadding(real=[[1, 0, 1, 0, 1]]), "behind"),
    (Segments(*PACKED), "first behind"),
    (Segments(PACKED[0][0], PACKED[1]), "first behind"),
    (Segments(PACKED[0], PACKED[1][0]), "first behind"),
    (Segments([5] * L, [0] * S), "first behind"),
    (Prefix(2), "behind"),
    (Prefix([2, 0]), "behind"),
    (Causal() & KeyPadding([3, 2]), "right behind"),
    (Causal() & KeyPadding([3, 2], side="left"), "right first"),
    (Causal() & right_padded, "right behind"),
    (Causal() & Window(left=2) & KeyPadding([3, 2]), "left right behind"),
    (Causal() & Segments(*PACKED) & QueryPadding([3, 2]), "right first behind"),
    (Causal() | Prefix([2, 3]), "behind"),
    ((Causal() | Prefix([2, 3])) & KeyPadding([3, 2]), "behind"),
    ((Causal() | Prefix(2)) & right_padded & Window(left=4), "left behind"),
    (Causal() & KeyPadding([5, 2]) | Prefix(2), "behind"),
    (Causal() | Window(right=2, align="start"), "right"),
    (Window(left=1) | Window(left=2), "left"),
    (KeyPadding([3, 2], side="left") | Window(left=1), "first"),
    (Prefix(2) | Window(), ""),
    (Window(left=1) | Window(), ""),
    (~Causal(), "left"),
    (~Window(left=2), "right"),
    (~Prefix([2, 0]), "first"),
    (~KeyPadding([3, 0]), "first"),
    (~KeyPadding([3, 0], side="left"), "behind"),
    (~right_padded, "first"),
    (~left_padded, "behind"),
    (~QueryPadding([3, 0]), "first"),
    (~(Causal() | Prefix(2)), "first"),
    (~(Causal() & Prefix(2)), "first"),
    (~(Window(left=1) & left_padded), "behind"),
    (~Window(), "right"),
]


@pytest.mark.parametrize(("mask", "limits"), RUNS, ids=[repr(mask)[:70] for mask, _ in RUNS])
def test_masks_that_are_runs_have_no_rest(mask: Mask, limits: str) -> None:
    run, rest = check_split(mask, dense_rule(mask), Sizes(B, 1, 1, L, S, 1, 1))
    assert rest is None
    assert {name for name in run._fields if getattr(run, name) is not None} == set(limits.split())


def dense_rule(mask: Mask) -> oracle.Sees:
    """What the mask says pair by pair, where the point is elsewhere than in its meaning."""
    whole = mask.dense(L, S)
    return lambda b, h, q, k: bool(whole[b % len(whole), 0, q, k])


RESTS: list[tuple[Mask, Mask, str]] = [  # a mask, its rest, and the limits of the run beside it
    (TABLE, TABLE, ""),
    (~TABLE, ~TABLE, ""),
    (Causal() & TABLE, TABLE, "right"),
    (TABLE & KeyPadding([3, 2]) & ~TABLE & Window(left=1), TABLE & ~TABLE, "left behind"),
    (KeyPadding(real=HOLES), KeyPadding(real=HOLES), ""),
    (KeyPadding(real=HOLES) & Causal(), KeyPadding(real=HOLES), "right"),
    (Segments([0, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1]), Segments([0, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1]), ""),
    (Prefix(2) | TABLE, Prefix(2) | TABLE, ""),
    (Prefix(2) | ~Causal(), Prefix(2) | ~Causal(), ""),  # a gap between the two
    ((Prefix(2) | TABLE) & Causal(), Prefix(2) | TABLE, "right"),
    (~Window(1, 1), ~Window(1, 1), ""),
    (~(TABLE & Causal()), ~(TABLE & Causal()), ""),
    (~Segments(*PACKED), ~Segments(*PACKED), ""),
]


@pytest.mark.parametrize(("mask", "expected", "limits"), RESTS, ids=[repr(mask)[:70] for mask, *_ in RESTS])
def test_the_rest_is_as_small_as_it_can_be(mask: Mask, expected: Mask, limits: str) -> None:
    run, rest = check_split(mask, dense_rule(mask), Sizes(B, 1, 1, L, S, 1, 1))
    assert rest == expected
    assert {name for name in run._fields if getattr(run, name) is not None} == set(limits.split())


def test_segments_that_only_a_query_would_tell_apart() -> None:
    """Keys of an id that no query has may lie anywhere; keys of one that a query has may not."""
    scattered = [0, 1, 0, 2, 2, 0, 0]
    assert Segments([1, 2, 2, 1, 7], scattered)._split(L, S)[1] is None
    assert Segments([1, 2, 2, 1, 0], scattered)._split(L, S)[1] is not None


def test_a_query_of_no_segment_widens_no_reach() -> None:
    mask = Segments([5, 0], [0, 1, 1])
    assert mask._reach(range(2), 2, 3) == range(1)
    assert not mask._reach(range(1), 2, 3)


def test_one_item_with_holes_leaves_the_run_to_the_rest() -> None:
    assert KeyPadding(real=[[1, 1, 0], [1, 1, 1]])._split(L, 3)[1] is None
    assert KeyPadding(real=[[1, 1, 0], [1, 0, 1]])._split(L, 3)[1] is not None


def test_lengths_are_not_copied() -> None:
    for mask in (KeyPadding([3, 2]), Prefix([3, 2])):
        assert mask._split(L, S)[0].behind.data_ptr() == mask.lengths.data_ptr()


@pytest.mark.parametrize("width", [2**31, 2**62, 2**63, 2**100])
def test_wide_windows_do_not_overflow(width: int) -> None:
    everything = Sizes(1, 1, 1, L, S, 1, 1)
    mask = Window(width, width)
    for joined in (
        mask,
        mask & Window(width, 3),
        mask & Prefix(3),
        ~Window(left=width),
        ~Window(right=width) | Causal(),
    ):
        run, _ = joined._split(L, S)
        for number in (run.left, run.right):
            assert number is None or -(2**63) + S <= number < 2**63 - S - 1
        check_split(joined, dense_rule(joined), everything)
    check_split(mask, oracle.everything(), everything)
    check_split(~Window(left=width), lambda b, h, q, k: False, everything)


# -- copies, devices -------------------------------------------------------------------------------------------

HOST_KNOWN = [right_padded, left_padded, Segments(*PACKED), Causal() & Segments(*PACKED) & right_padded]


@pytest.mark.parametrize("mask", HOST_KNOWN, ids=repr)
def test_copies_keep_the_run(mask: Mask) -> None:
    run, _ = mask._split(L, S)
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        found, rest = other._split(L, S)
        assert rest is None
        assert found[:2] == run[:2]
        for limit, expected in zip(found[2:], run[2:], strict=True):
            assert limit is expected is None or torch.equal(limit, expected)


@pytest.mark.parametrize(
    "mask", [mask for mask, _ in RUNS] + [mask for mask, *_ in RESTS], ids=lambda m: repr(m)[:70]
)
def test_elsewhere_it_is_the_same_and_reads_no_value(mask: Mask) -> None:
    """A tensor on the meta device has no values that could be read."""
    run, rest = mask._split(L, S)
    moved, moved_rest = mask.to("meta")._split(L, S)
    assert moved[:2] == run[:2]
    assert (moved_rest is None) == (rest is None)
    for limit, expected in zip(moved[2:], run[2:], strict=True):
        assert (limit is None) == (expected is None)
        if limit is not None:
            assert (limit.device.type, limit.shape) == ("meta", expected.shape)


# -- compiled, exported, vmapped -------------------------------------------------------------------------------


def as_tensor(mask: Mask, like: Tensor) -> Tensor:
    """``intervals & rest`` (B, 1, L, S), in operations that a compiler can follow; `like` is (L, S)."""
    L, S = like.shape
    run, rest = mask._split(L, S)
    q, k = torch.arange(L)[:, None], torch.arange(S)
    visible = torch.ones(1, 1, L, S, dtype=torch.bool)
    if run.left is not None:
        visible = visible & (k >= q + run.left)
    if run.right is not None:
        visible = visible & (k <= q + run.right)
    if run.first is not None:
        visible = visible & (k >= run.first[:, None, :, None])
    if run.behind is not None:
        visible = visible & (k < run.behind[:, None, :, None])
    if rest is not None:
        visible = visible & rest._tile(Tile(ALL, ALL, ALL, ALL, L, S, torch.device("cpu")))
    return visible


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED: list[Mask] = [
    Causal() & Causal("start") & Window(left=2),
    KeyPadding([3, 0]) & Causal(),
    KeyPadding([3, 1], side="left") & right_padded,
    QueryPadding([3, 0]) & QueryPadding([3, 1], side="left"),
    QueryPadding(real=[[1, 0, 1, 1, 0]]) & Segments(*PACKED),
    (Causal() | Prefix([2, 0])) & KeyPadding([3, 7]),
    ~(Causal() & Prefix(2)) & ~Window(right=1),
    Causal() & ~TABLE | Segments(*PACKED) & left_padded,
]


@pytest.mark.parametrize("mask", COMPILED, ids=repr)
def test_compiled_whole(mask: Mask, fresh_compiler: None) -> None:
    compiled = torch.compile(as_tensor, fullgraph=True, backend="aot_eager")
    found = compiled(mask, torch.zeros(L, S))
    assert torch.equal(found.expand(B, 1, L, S), mask.dense(L, S).expand(B, 1, L, S))


def test_a_compiled_program_serves_masks_that_are_runs_or_not(fresh_compiler: None) -> None:
    compiled = torch.compile(as_tensor, fullgraph=True, backend="aot_eager")
    like = torch.zeros(L, S)
    compiled(right_padded & Segments(*PACKED), like)
    mixed = Segments([[0, 1, 0, 1, 1]] * B, [[0, 1, 0, 1, 1, 1, 1]] * B)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for mask in (left_padded & mixed, KeyPadding(real=HOLES) & Segments(*PACKED)):
            assert torch.equal(compiled(mask, like), mask.dense(L, S))


@pytest.mark.parametrize("build", [
    lambda n: Causal() & Causal("start") & Window(left=2),
    lambda n: (Causal() | Prefix([2, 0])) & KeyPadding([3, 3], side="left"),
    lambda n: Causal() & KeyPadding(real=torch.arange(n).expand(2, n) % 5 != 1) & QueryPadding([2, 3]),
    lambda n: ~(Causal("start") & Prefix(2)) | ~Window(right=1),
])  # fmt: skip
def test_exported_for_any_length(build: Callable[[int], Mask]) -> None:
    leaves, spec = _pytree.tree_flatten(build(7))

    class Module(torch.nn.Module):
        def forward(self, leaves: list[Tensor], like: Tensor) -> Tensor:
            return as_tensor(_pytree.tree_unflatten(leaves, spec), like)

    length, keys = torch.export.Dim("length", min=2), torch.export.Dim("keys", min=2)
    dims = [{1: keys} if leaf.ndim == 2 else {} for leaf in leaves]
    inputs = (leaves, torch.zeros(5, 7))
    program = torch.export.export(Module(), inputs, dynamic_shapes=(dims, {0: length, 1: keys})).module()
    for sizes in ((5, 7), (11, 3), (3, 13)):
        mask = build(sizes[1])
        found = program(_pytree.tree_leaves(mask), torch.zeros(sizes))
        assert torch.equal(found, mask.dense(*sizes).expand_as(found)), sizes


def test_vmapped_over_lengths() -> None:
    lengths = torch.tensor([[3, 0], [5, 7], [1, 2]])
    found = torch.vmap(lambda n: as_tensor(n & Causal(), torch.zeros(L, S)))(
        _pytree.tree_map(lambda _: lengths, KeyPadding([1, 1]))
    )
    for one, row in zip(found, lengths, strict=True):
        assert torch.equal(one, (KeyPadding(row) & Causal()).dense(L, S))


# -- whether a rest has a tensor at hand -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", [
    TABLE,
    Blocked(TABLE.tensor, axes="qk"),
    TABLE & ~TABLE,
    TABLE | Blocked(TABLE.tensor, axes="qk"),
    KeyPadding(real=HOLES),
    KeyPadding(real=HOLES) | Prefix(2),
    Allowed([[True] * 5], axes="bk"),
], ids=repr)  # fmt: skip
def test_at_hand(mask: Mask) -> None:
    assert mask._is_at_hand()
    assert (~mask)._is_at_hand()


@pytest.mark.parametrize("mask", [
    ch.Causal(),
    Segments([0, 1, 0, 1, 1]),
    QueryPadding([2, 3]),
    TABLE & KeyPadding(real=HOLES),
    TABLE | Causal(),
    TABLE & Segments([0, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1]),
    Allowed([True] * 5, axes="q") | Prefix(2),
    Allowed([True] * 5, axes="q") & Allowed([True] * 7, axes="k"),
], ids=repr)  # fmt: skip
def test_not_at_hand(mask: Mask) -> None:
    assert not mask._is_at_hand()
    assert not (~mask)._is_at_hand()


def test_what_is_at_hand_takes_no_room_of_its_own() -> None:
    s = SHAPES["gqa-wide"]
    for name, build in (MASKS | PAIRS).items():
        mask = build(s)[0]
        if isinstance(mask, Mask) and mask._is_at_hand():
            held = max((leaf.numel() for leaf in _pytree.tree_leaves(mask)), default=0)
            made = mask._tile(Tile(ALL, ALL, ALL, ALL, s.L, s.S, torch.device("cpu"))).numel()
            assert made <= max(held, s.B * s.Hq * s.S), name
