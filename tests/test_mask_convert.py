"""Masks to and from torch: its own attention functions, FlexAttention, pytrees, compile and vmap."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask
from torch.utils import _pytree

import clearhead as ch
from clearhead import (
    Allowed,
    Blocked,
    Causal,
    KeyPadding,
    Mask,
    Prefix,
    QueryPadding,
    Segments,
    Window,
    mask_from_mha,
    mask_from_sdpa,
)

B, H, L, S, E = 2, 3, 5, 7, 4
GENERATOR = torch.Generator().manual_seed(11)


def flags(*shape: int) -> Tensor:
    """Random bool, the first entry of every row of the last axis False."""
    found = torch.rand(shape, generator=GENERATOR) < 0.4
    found[..., 0] = False
    return found


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def with_hidden(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -torch.inf)


# -- nn.MultiheadAttention: True = hidden ----------------------------------------------------------------------

PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 3 + [True] * 4])
BOTTOM = torch.ones(L, S, dtype=torch.bool).triu(1)  # torch's causal: top-left

MHA: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bool (L, S)": {"attn_mask": flags(L, S)},
    "bool (B*H, L, S)": {"attn_mask": flags(B * H, L, S)},
    "bool (B*H, L, S) and padding": {"attn_mask": flags(B * H, L, S), "key_padding_mask": PADDING},
    "bool padding": {"key_padding_mask": PADDING},
    "bool (L, S) and padding": {"attn_mask": flags(L, S), "key_padding_mask": PADDING},
    "float (L, S)": {"attn_mask": numbers(L, S)},
    "float (L, S) with -inf": {"attn_mask": with_hidden(numbers(L, S), flags(L, S))},
    "float (B*H, L, S)": {"attn_mask": numbers(B * H, L, S)},
    "float padding": {"key_padding_mask": numbers(B, S)},
    "float padding with -inf": {"key_padding_mask": with_hidden(numbers(B, S), PADDING)},
    "floats": {"attn_mask": numbers(L, S), "key_padding_mask": with_hidden(numbers(B, S), PADDING)},
    "floats (B*H, L, S)": {"attn_mask": numbers(B * H, L, S), "key_padding_mask": numbers(B, S)},
    "causal": {"attn_mask": BOTTOM, "is_causal": True},
    "causal and padding": {"attn_mask": BOTTOM, "key_padding_mask": PADDING, "is_causal": True},
}


@pytest.mark.parametrize("arguments", MHA.values(), ids=MHA.keys())
def test_mask_from_mha_gives_what_torch_gives(arguments: dict[str, Any]) -> None:
    theirs = nn.MultiheadAttention(H * E, H, batch_first=True, dtype=torch.float64).eval()
    ours = ch.MultiHeadAttention.from_torch(theirs)
    x, memory = numbers(B, L, H * E), numbers(B, S, H * E)
    # With weights asked for, torch takes its slow path, which does what its documentation says.
    expected, weights = theirs(x, memory, memory, **arguments, need_weights=True, average_attn_weights=False)
    assert torch.isfinite(expected).all()  # no dead rows: theirs are NaN

    mask, bias = mask_from_mha(**arguments, num_heads=H)
    output, seen = ours(x, memory, mask=mask, attn_bias=bias, observe=ch.Observe(weights=True))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen.weights, weights, rtol=1e-12, atol=1e-12)


def test_is_causal_alone_hides_the_future_top_left() -> None:
    """Torch's own module takes it as a hint and needs the mask beside it; here it is enough."""
    mask, bias = mask_from_mha(is_causal=True)
    assert bias is None
    assert mask is not None
    assert torch.equal(mask.dense(L, S)[0, 0], ~BOTTOM)
    assert torch.equal(mask.dense(S, L)[0, 0], torch.ones(S, L, dtype=torch.bool).tril())


def test_mixed_bool_and_float_masks_add_up() -> None:
    hidden, bias = flags(L, S), numbers(B, S)
    for given, (rows, keys) in (
        ({"attn_mask": hidden, "key_padding_mask": bias}, (hidden, bias)),
        ({"attn_mask": with_hidden(numbers(L, S) * 0, hidden), "key_padding_mask": bias}, (hidden, bias)),
    ):
        mask, found = mask_from_mha(**given)
        q, k = numbers(B, H, L, E), numbers(B, H, S, E)
        scores = with_hidden(q @ k.mT * E**-0.5 + keys[:, None, None], rows)
        _, seen = ch.attention(q, k, k, mask, attn_bias=found, observe=ch.Observe(weights=True))
        torch.testing.assert_close(seen.weights, torch.softmax(scores, -1), rtol=1e-12, atol=1e-12)


def test_three_axes_are_batch_major() -> None:
    """(B * heads, L, S): the heads of one item stand side by side, so no item's mask leaks into another's."""
    hidden = torch.zeros(B * H, L, S, dtype=torch.bool)
    hidden[1 * H + 2] = True  # item 1, head 2
    mask, _ = mask_from_mha(hidden, num_heads=H)
    assert mask is not None
    dense = mask.dense(L, S)
    assert dense.shape == (B, H, L, S)
    assert [tuple(i) for i in (~dense).any(-1).any(-1).nonzero().tolist()] == [(1, 2)]


def test_structure_is_kept() -> None:
    mask, bias = mask_from_mha(flags(L, S), PADDING, is_causal=True)
    assert bias is None
    assert [type(part) for part in mask.parts] == [Causal, Blocked, KeyPadding]  # type: ignore[union-attr]
    assert mask_from_mha() == (None, None)
    assert mask_from_sdpa() == (None, None)
    assert mask_from_sdpa(is_causal=True) == (Causal(align="start"), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": flags(6, 5, 7)}, r"\(6, 5, 7\) has the axes \(B \* num_heads, L, S\): give num_heads"),
        ({"attn_mask": flags(6, 5, 7), "num_heads": 4}, r"a divisor of 6, not 4"),
        ({"attn_mask": flags(2, 3, 5, 7)}, r"must be \(L, S\) or \(B \* num_heads, L, S\), not \(2, 3, 5, 7\)"),
        ({"attn_mask": flags(7)}, r"not \(7,\)"),
        ({"attn_mask": flags(5, 7).int()}, r"attn_mask must be bool or floating point, not torch.int32"),
        ({"key_padding_mask": flags(7)}, r"key_padding_mask must be \(B, S\), not \(7,\)"),
        (
            {"key_padding_mask": flags(2, 7).long()},
            r"key_padding_mask must be bool or floating point, not torch.int64",
        ),
    ],
)
def test_mask_from_mha_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ch.MaskError, match=message):
        mask_from_mha(**arguments)


# -- F.scaled_dot_product_attention: True = may attend ---------------------------------------------------------

SDPA: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bool (L, S)": {"attn_mask": ~flags(L, S)},
    "bool (1, S)": {"attn_mask": ~flags(1, S)},
    "bool (B, H, L, S)": {"attn_mask": ~flags(B, H, L, S)},
    "bool (B, 1, 1, S)": {"attn_mask": ~flags(B, 1, 1, S)},
    "bool (1, H, L, 1)": {"attn_mask": torch.ones(1, H, L, 1, dtype=torch.bool)},
    "float (L, S)": {"attn_mask": with_hidden(numbers(L, S), flags(L, S))},
    "float (L, 1)": {"attn_mask": numbers(L, 1)},
    "float (B, H, L, S)": {"attn_mask": with_hidden(numbers(B, H, L, S), flags(B, H, L, S))},
    "float (B, 1, 1, S)": {"attn_mask": numbers(B, 1, 1, S)},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize(("queries", "keys"), [(L, S), (S, L)])
@pytest.mark.parametrize("arguments", SDPA.values(), ids=SDPA.keys())
def test_mask_from_sdpa_gives_what_torch_gives(arguments: dict[str, Any], queries: int, keys: int) -> None:
    if queries == S:
        arguments = {name: a.mT if isinstance(a, Tensor) else a for name, a in arguments.items()}
    q, k, v = numbers(B, H, queries, E), numbers(B, H, keys, E), numbers(B, H, keys, E)
    expected = F.scaled_dot_product_attention(q, k, v, **arguments)
    mask, bias = mask_from_sdpa(**arguments)
    output = ch.attention(q, k, v, mask, attn_bias=bias)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_sdpa_arguments_that_torch_refuses_together_add_up() -> None:
    mask, _ = mask_from_sdpa(~flags(L, S), is_causal=True)
    assert mask is not None
    assert not (mask.dense(L, S)[0, 0] & BOTTOM).any()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (flags(2, 5, 7), r"attn_mask \(2, 5, 7\): give it two axes \(L, S\) or four"),
        (flags(7), r"attn_mask \(7,\)"),
        (flags(5, 7).int(), r"attn_mask must be bool or floating point, not torch.int32"),
    ],
)
def test_mask_from_sdpa_errors(mask: Tensor, message: str) -> None:
    with pytest.raises(ch.MaskError, match=message):
        mask_from_sdpa(mask)


# -- FlexAttention, pytrees, compile, vmap ---------------------------------------------------------------------

KINDS: list[Mask] = [
    Causal(),
    Window(left=2, right=1, align="start"),
    KeyPadding([6, 3]),
    KeyPadding([6, 3], side="left"),
    KeyPadding(real=~PADDING),
    QueryPadding([2, 5], side="left"),
    Segments([[0, 0, 1, 1, 1], [2, 2, 2, 3, 3]], [[0, 1, 1, 1, 1, 2, 2], [3, 3, 3, 2, 2, 2, 2]]),
    Prefix([1, 4]),
    Allowed(flags(H, L), axes="hq"),
    Blocked(flags(S, B), axes="kb"),
    Causal() | Prefix([1, 4]) & KeyPadding([6, 3]),
    Causal() & KeyPadding([6, 3]) & ~Blocked(~flags(L, S), axes="qk"),
    (Causal() | Prefix([1, 4])) & KeyPadding([6, 3]),
]
each_kind = pytest.mark.parametrize("mask", KINDS, ids=[repr(mask)[:40] for mask in KINDS])


@each_kind
def test_mask_mod_is_the_mask_in_flex_attention(mask: Mask) -> None:
    made = create_mask(mask.mask_mod(L, S), B, H, L, S, device="cpu")
    assert torch.equal(made, mask.dense(L, S).expand(B, H, L, S))


def test_mask_mod_is_checked_when_it_is_made() -> None:
    with pytest.raises(ch.MaskError, match="a length of 6 is more than the 5 keys"):
        KeyPadding([6, 3]).mask_mod(L, 5)


@each_kind
def test_masks_are_pytrees_with_tensor_leaves(mask: Mask) -> None:
    leaves, spec = _pytree.tree_flatten(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert _pytree.tree_unflatten(leaves, spec) == mask
    doubled = _pytree.tree_map(torch.clone, {"a": [mask], "b": mask})
    assert doubled == {"a": [mask], "b": mask}
    assert spec == _pytree.tree_flatten(copy.deepcopy(mask))[1]


def test_tree_map_changes_the_leaves_of_a_copy_only() -> None:
    mask = Causal() & KeyPadding(real=~PADDING)
    other = _pytree.tree_map(torch.logical_not, mask)
    assert other == Causal() & KeyPadding(real=PADDING) or other != mask  # the meaning below is what counts
    assert torch.equal(other.dense(1, S)[:, 0, 0], PADDING)
    assert torch.equal(mask.dense(1, S)[:, 0, 0], ~PADDING)


def attend(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    return ch.attention(q, k, k, mask)


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@each_kind
def test_compile_takes_a_mask_as_argument(mask: Mask, fresh_compiler: None) -> None:
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    q, k = numbers(B, H, L, E), numbers(B, H, S, E)
    torch.testing.assert_close(compiled(q, k, mask), attend(q, k, mask), rtol=1e-12, atol=1e-12)


def test_compile_sees_the_values_of_another_mask(fresh_compiler: None) -> None:
    """A compiled graph must not remember the first mask's numbers."""
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    q, k = numbers(B, H, L, E), numbers(B, H, S, E)
    for lengths in ([6, 3], [3, 6], [7, 1], [2, 2], [0, 1]):
        mask = Causal() & KeyPadding(lengths)
        torch.testing.assert_close(compiled(q, k, mask), attend(q, k, mask), rtol=1e-12, atol=1e-12)


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return attend(q, k, mask)


@pytest.mark.parametrize("mask", [Causal(), Causal() & KeyPadding([6, 3])])
def test_export_takes_a_mask_as_argument(mask: Mask) -> None:
    q, k = numbers(B, H, L, E), numbers(B, H, S, E)
    exported = torch.export.export(Attend(), (q, k, mask)).module()
    torch.testing.assert_close(exported(q, k, mask), attend(q, k, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's kernel has no batching rule of its own
@pytest.mark.parametrize(
    "masks",
    [
        [KeyPadding([6, 3]), KeyPadding([1, 6]), KeyPadding([6, 6])],
        [
            KeyPadding(real=real)
            for real in ([[1, 0, 1, 0, 0, 0, 1]], [[1, 1, 1, 1, 1, 1, 1]], [[1, 0, 0, 0, 0, 0, 1]])
        ],
        [Allowed(flags(L, S), axes="qk") & Causal() for _ in range(3)],
        [~Segments([0, 0, 1, 1, 1], [0, 1, 2, 2, 2, n, n]) | Prefix(n) for n in (3, 3, 3)],
    ],
    ids=["lengths", "real", "allowed", "segments"],
)
def test_vmap_over_the_leaves_of_a_mask(masks: list[Mask]) -> None:
    stacked = _pytree.tree_map(lambda *leaves: torch.stack(leaves), *masks)
    q, k = numbers(3, B, H, L, E), numbers(3, B, H, S, E)
    found = torch.vmap(attend)(q, k, stacked)
    expected = torch.stack([attend(q[i], k[i], mask) for i, mask in enumerate(masks)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
