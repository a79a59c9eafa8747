"""Masks as values: the laws of ``& | ~``, equality, hash, repr, copies, and what can't be done to them."""

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

import clearhead as ch
from clearhead import Allowed, Blocked, Causal, KeyPadding, Mask, Prefix, QueryPadding, Segments, Window
from clearhead.masks import parse_mask

B, L, S = 2, 3, 5
Predicate = Callable[[int, int, int], bool]  # (batch, query, key)
Meant = tuple[Mask, Tensor]  # a mask, and the bool tensor (B, L, S) that it stands for

bounded = settings(deadline=None, max_examples=120)


def meant(mask: Mask, visible: Predicate) -> Meant:
    return mask, torch.tensor([[[visible(b, q, k) for k in range(S)] for q in range(L)] for b in range(B)])


# -- random expressions, each with its meaning -----------------------------------------------------------------

widths = st.none() | st.integers(0, S)
aligns = st.sampled_from(["end", "start"])
sides = st.sampled_from(["right", "left"])


def bits(rows: int, columns: int) -> st.SearchStrategy[list[list[bool]]]:
    row = st.lists(st.booleans(), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


def lengths(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, most), min_size=B, max_size=B)


def causal(align: str) -> Meant:
    return meant(Causal(align), lambda b, q, k: k <= q + (S - L if align == "end" else 0))


def window(left: int | None, right: int | None, align: str) -> Meant:
    def visible(b: int, q: int, k: int) -> bool:
        apart = k - q - (S - L if align == "end" else 0)
        return (left is None or apart >= -left) and (right is None or apart <= right)

    return meant(Window(left, right, align), visible)


def keys(n: list[int], side: str) -> Meant:
    return meant(KeyPadding(n, side=side), lambda b, q, k: (k if side == "right" else S - 1 - k) < n[b])


def queries(n: list[int], side: str) -> Meant:
    return meant(QueryPadding(n, side=side), lambda b, q, k: (q if side == "right" else L - 1 - q) < n[b])


def segments(ids: list[int], own: list[int]) -> Meant:
    return meant(Segments(ids, own), lambda b, q, k: ids[q] == own[k])


atoms = st.one_of(
    st.builds(causal, aligns),
    st.builds(window, widths, widths, aligns),
    st.builds(keys, lengths(S), sides),
    st.builds(queries, lengths(L), sides),
    lengths(S).map(lambda n: meant(Prefix(n), lambda b, q, k: k < n[b])),
    bits(B, S).map(lambda t: meant(KeyPadding(real=t), lambda b, q, k: t[b][k])),
    bits(L, S).map(lambda t: meant(Allowed(t, axes="qk"), lambda b, q, k: t[q][k])),
    bits(S, B).map(lambda t: meant(Blocked(t, axes="kb"), lambda b, q, k: not t[k][b])),
    st.builds(
        segments,
        st.lists(st.integers(-1, 1), min_size=L, max_size=L),
        st.lists(st.integers(-1, 1), min_size=S, max_size=S),
    ),
)


def joined(inner: st.SearchStrategy[Meant]) -> st.SearchStrategy[Meant]:
    return st.one_of(
        st.builds(lambda a, b: (a[0] & b[0], a[1] & b[1]), inner, inner),
        st.builds(lambda a, b: (a[0] | b[0], a[1] | b[1]), inner, inner),
        st.builds(lambda a: (~a[0], ~a[1]), inner),
    )


masks = st.recursive(atoms, joined, max_leaves=8)


def dense(mask: Mask) -> Tensor:
    """(B, L, S) of a mask that is the same for every head."""
    whole = mask.dense(L, S)
    assert whole.shape[1] == 1
    return whole[:, 0].expand(B, L, S)


# -- laws ------------------------------------------------------------------------------------------------------


@bounded
@given(masks)
def test_an_expression_means_what_its_parts_mean(pair: Meant) -> None:
    mask, truth = pair
    assert torch.equal(dense(mask), truth)
    assert mask.visible_fraction(L, S) == pytest.approx(truth.double().mean().item(), abs=1e-12)
    for start, stop in itertools.combinations(range(L + 1), 2):
        seen = truth[:, start:stop].any(dim=0).any(dim=0).nonzero().flatten().tolist()
        assert set(seen) <= set(mask._reach(range(start, stop), L, S))


@bounded
@given(masks, masks, masks)
def test_boolean_laws(one: Meant, two: Meant, three: Meant) -> None:
    a, b, c = one[0], two[0], three[0]
    laws = {
        "De Morgan, and": (~(a & b), ~a | ~b),
        "De Morgan, or": (~(a | b), ~a & ~b),
        "double negation": (~~a, a),
        "idempotence, and": (a & a, a),
        "idempotence, or": (a | a, a),
        "commutativity, and": (a & b, b & a),
        "commutativity, or": (a | b, b | a),
        "associativity": (a & (b & c), (a & b) & c),
        "distributivity": (a & (b | c), (a & b) | (a & c)),
        "absorption": (a | (a & b), a),
    }
    for name, (left, right) in laws.items():
        assert torch.equal(dense(left), dense(right)), name
    assert not dense(a & ~a).any()
    assert dense(a | ~a).all()


@bounded
@given(masks)
def test_repr_and_copies_give_an_equal_mask_back(pair: Meant) -> None:
    mask, _ = pair
    copies = [
        eval(repr(mask), vars(ch)),  # repr is constructive
        parse_mask(repr(mask)),
        copy.copy(mask),
        copy.deepcopy(mask),
        pickle.loads(pickle.dumps(mask)),
        _pytree.tree_map(torch.clone, mask),
        mask.to("cpu"),
    ]
    for other in copies:
        assert other == mask
        assert hash(other) == hash(mask)
        assert repr(other) == repr(mask)
        assert torch.equal(dense(other), dense(mask))


@bounded
@given(masks, masks)
def test_equal_masks_mean_the_same(one: Meant, two: Meant) -> None:
    """Structure decides equality, so masks of one meaning may differ, but equal ones can't mean different things."""
    (a, truth_a), (b, truth_b) = one, two
    if a == b:
        assert torch.equal(truth_a, truth_b)
        assert hash(a) == hash(b)
        assert repr(a) == repr(b)
    assert ~~a == a
    assert a & b != a | b
    assert a != ~a


# -- values ----------------------------------------------------------------------------------------------------

ONE_OF_EACH: list[Mask] = [
    Causal(),
    Causal(align="start"),
    Window(),
    Window(left=2),
    Window(right=2),
    Window(left=2, right=0, align="start"),
    KeyPadding([3, 2]),
    KeyPadding([3, 2], side="left"),
    KeyPadding(real=[[True, False, True, False, True]]),
    QueryPadding([3, 2]),
    QueryPadding(real=[[1, 0, 1]]),
    Segments([0, 0, 1]),
    Segments([0, 0, 1], [0, 0, 1, 1, 1]),
    Segments([[0, 0, 1], [0, 1, 1]]),
    Prefix(2),
    Prefix([2, 3]),
    Allowed([[True, False, True], [False, False, True]], axes="hq"),
    Allowed([[True, False, True], [False, False, True]], axes="bq"),
    Blocked([[True, False, True], [False, False, True]], axes="bq"),
    Allowed(True, axes=""),  # type: ignore[arg-type]
    Causal() & Prefix(2),
    Prefix(2) & Causal(),
    Causal() | Prefix(2),
    ~(Causal() | Prefix(2)),
    ~Causal(),
    (Causal() | Prefix(2)) & KeyPadding([3, 2]),
    Causal() | Prefix(2) & KeyPadding([3, 2]),
]
names = [repr(mask)[:60] for mask in ONE_OF_EACH]
of_each = pytest.mark.parametrize("mask", ONE_OF_EACH, ids=names)


@of_each
def test_repr_is_constructive(mask: Mask) -> None:
    assert eval(repr(mask), vars(ch)) == mask
    assert parse_mask(repr(mask)) == mask


def test_all_are_different_and_work_in_sets() -> None:
    for one, two in itertools.combinations(ONE_OF_EACH, 2):
        assert one != two
    assert len(set(ONE_OF_EACH)) == len(ONE_OF_EACH)
    assert set(ONE_OF_EACH) == {copy.deepcopy(mask) for mask in ONE_OF_EACH}
    assert Causal() != "Causal()"
    assert Causal() is not None


def test_repr_of_a_chain_has_no_more_brackets_than_needed() -> None:
    assert repr(Causal() & Prefix(1) & Window(2)) == "Causal() & Prefix(lengths=[1]) & Window(left=2)"
    assert repr(~(Causal() | Window(right=0))) == "~(Causal() | Window(right=0))"
    assert repr((Causal() | Window(2)) & ~Prefix(1)) == "(Causal() | Window(left=2)) & ~Prefix(lengths=[1])"


def test_repr_of_a_large_tensor_names_its_shape() -> None:
    assert (
        repr(Allowed(torch.ones(64, 64, dtype=torch.bool), axes="qk")) == "Allowed(<bool tensor (64, 64)>, axes='qk')"
    )


@of_each
def test_immutable(mask: Mask) -> None:
    for field in fields(mask):
        before = getattr(mask, field.name)
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{field.name}'"):
            setattr(mask, field.name, None)
        with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{field.name}'"):
            delattr(mask, field.name)
        assert getattr(mask, field.name) is before


def test_no_new_attributes() -> None:
    for mask in ONE_OF_EACH:
        with pytest.raises(FrozenInstanceError):
            copy.copy(mask).anything = 1  # type: ignore[attr-defined]


@of_each
def test_no_truth_value(mask: Mask) -> None:
    with pytest.raises(TypeError, match=r"a mask has no truth value: .* Use &, \| and ~"):
        bool(mask)
    with pytest.raises(TypeError, match="no truth value"):
        mask and mask  # noqa: B018
    with pytest.raises(TypeError, match="no truth value"):
        not mask  # noqa: B018


@pytest.mark.parametrize("other", [None, True, 1, torch.ones(3, 5, dtype=torch.bool)])
def test_only_masks_combine_with_masks(other: object) -> None:
    with pytest.raises(TypeError):
        Causal() & other  # type: ignore[operator]
    with pytest.raises(TypeError):
        other | Causal()  # type: ignore[operator]


@of_each
def test_device(mask: Mask) -> None:
    leaves = _pytree.tree_leaves(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert mask.device == (torch.device("cpu") if leaves else None)
    moved = mask.to("meta")
    assert type(moved) is type(mask)
    assert mask.device == (torch.device("cpu") if leaves else None)  # the original stays
    if leaves:
        assert moved.device == torch.device("meta")
        assert moved != mask
        assert moved.dense(3, 3 if type(mask) is Segments and mask.key_ids is None else S).device.type == "meta"
    else:
        assert moved == mask


def test_masks_on_two_devices_do_not_combine() -> None:
    with pytest.raises(ch.MaskError, match="on one device, not on cpu and meta: move one"):
        Prefix(2) & KeyPadding([3, 2]).to("meta")


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (KeyPadding([3, 2]), Prefix([1, 2, 3]), r"agree in batch.* is for 2 batch items, .* for 3"),
        (QueryPadding(real=[[1, 1, 0]]), Segments([0, 0, 1, 1]), r"agree in queries.* is for 3 queries, .* for 4"),
        (Allowed([True] * 3, axes="h"), Blocked([True] * 5, axes="h"), r"agree in heads.* is for 3 heads, .* for 5"),
    ],
)
def test_masks_that_can_not_fit_together(one: Mask, two: Mask, message: str) -> None:
    for join in (lambda: one & two, lambda: one | two):
        with pytest.raises(ch.MaskError, match=message):
            join()


def test_a_chain_of_thousands_stays_flat() -> None:
    """No recursion once a part: dense, repr, hash and equality of a long chain."""
    chain = Causal()
    for n in range(3000):
        chain = chain & Window(left=n)
    assert len(chain.parts) == 3001
    assert torch.equal(chain.dense(4, 4), Window(0, 0).dense(4, 4))
    assert hash(chain) == hash(copy.copy(chain))
    assert chain == copy.copy(chain)


def test_a_mask_is_not_changed_by_changing_the_list_it_came_from() -> None:
    lengths = [3, 2]
    mask = KeyPadding(lengths)
    lengths[0] = 1
    assert mask == KeyPadding([3, 2])
