"""One table of wrong calls, each with what its message must say; and no work is done before it is said."""
# ruff: noqa: E501 - tables read by rows: one wrong call a line

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import (
    Allowed,
    At,
    BackendError,
    Blocked,
    Causal,
    KeyPadding,
    MaskError,
    Observe,
    Prefix,
    QueryPadding,
    Segments,
    ShapeError,
    Window,
)

B, H, L, S, E = 2, 3, 5, 7, 4


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def call(
    query: tuple[int, ...] = (B, H, L, E),
    key: tuple[int, ...] = (B, H, S, E),
    value: tuple[int, ...] | None = None,
    **options: Any,
) -> Callable[[], object]:
    return lambda: ch.attention(zeros(*query), zeros(*key), zeros(*(key if value is None else value)), **options)


def typed(*dtypes: torch.dtype) -> Callable[[], object]:
    q, k, v = (zeros(B, H, n, E, dtype=dtype) for n, dtype in zip((L, S, S), dtypes, strict=True))
    return lambda: ch.attention(q, k, v)


def masked(mask: Any, **shapes: tuple[int, ...]) -> Callable[[], object]:
    return call(mask=mask, **shapes)


SHOWN = r"query \(2, 3, 5, 4\), key \(2, 3, 7, 4\), value"

WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # Shapes.
    "width": (call(key=(B, H, S, 5)), ShapeError, r"same width E: 4 and 5 in query \(2, 3, 5, 4\), key \(2, 3, 7, 5\)"),
    "length": (call(value=(B, H, 6, E)), ShapeError, rf"same length S: 7 and 6 in {SHOWN} \(2, 3, 6, 4\)"),
    "batch": (call(key=(3, H, S, E)), ShapeError, r"same batch size B: got query \(2, 3, 5, 4\), key \(3, 3, 7, 4\)"),
    "batch of 1": (call(key=(1, H, S, E)), ShapeError, r"same batch size B: got .*key \(1, 3, 7, 4\)"),
    "heads of value": (call(value=(B, 1, S, E)), ShapeError, r"same number of heads: 3 and 1"),
    "groups": (call(key=(B, 2, S, E)), ShapeError, r"3 is not a multiple of 2 in .*Axes are \(B, H, L, E\)"),
    "heads last": (call((B, L, H, E), (B, S, H, E)), ShapeError, r"5 is not a multiple of 7 .*heads before length"),
    "more key heads": (call(key=(B, 6, S, E)), ShapeError, r"3 is not a multiple of 6"),
    "no heads": (call((B, 0, L, E), (B, 0, S, E)), ShapeError, r"0 is not a multiple of 0"),
    "no key heads": (call(key=(B, 0, S, E)), ShapeError, r"3 is not a multiple of 0"),
    "one axis": (call((E,), (E,)), ShapeError, r"expected query \(B, Hq, L, E\), .* got query \(4,\)"),
    "five axes": (call((1, B, H, L, E), (1, B, H, S, E)), ShapeError, r"got query \(1, 2, 3, 5, 4\)"),
    "mixed axes": (call(key=(B, S, E)), ShapeError, r"all three without the head axis.*key \(2, 7, 4\)"),
    # Dtypes and kinds.
    "dtypes": (typed(torch.float32, torch.float64, torch.float32), ShapeError, r"not float32, float64, float32"),
    "half value": (typed(torch.float32, torch.float32, torch.bfloat16), ShapeError, r"float32, float32, bfloat16"),
    "integers": (typed(*[torch.int64] * 3), ShapeError, r"one floating-point dtype .*, not int64, int64, int64"),
    "complex": (typed(*[torch.complex64] * 3), ShapeError, r"one floating-point dtype .*, not complex64"),
    "bool": (typed(*[torch.bool] * 3), ShapeError, r"one floating-point dtype .*, not bool"),
    "list": (lambda: ch.attention([[1.0]], zeros(1, 1), zeros(1, 1)), TypeError, r"query must be a torch.Tensor, not list"),  # type: ignore[call-overload]
    "no value": (lambda: ch.attention(zeros(1, 1), zeros(1, 1), None), TypeError, r"value must be a torch.Tensor, not NoneType"),  # type: ignore[call-overload]
    "devices": (
        lambda: ch.attention(zeros(L, E), zeros(S, E).to("meta"), zeros(S, E)),
        ShapeError,
        r"must be on one device, not cpu, meta, cpu",
    ),
    # Masks that don't fit.
    "lengths for another batch": (masked(KeyPadding([5, 3, 1])), MaskError, r"KeyPadding\(lengths=\[5, 3, 1\]\) is for 3 batch items, but the inputs have 2 batch items \(B=2, H=3, L=5, S=7\)"),
    "a length too long": (masked(KeyPadding([7, 8])), MaskError, r"KeyPadding\(lengths=\[7, 8\]\): a length of 8 is more than the 7 keys"),
    "a query length too long": (masked(QueryPadding([6, 1])), MaskError, r"a length of 6 is more than the 5 queries"),
    "real for other keys": (masked(KeyPadding(real=ones(B, 6))), MaskError, r"is for 6 keys, but the inputs have 7 keys"),
    "real of one key": (masked(KeyPadding(real=ones(B, 1))), MaskError, r"is for 1 keys, but the inputs have 7"),
    "real for other queries": (masked(QueryPadding(real=ones(B, S))), MaskError, r"is for 7 queries, but the inputs have 5 queries"),
    "segments": (masked(Segments(torch.zeros(B, L, dtype=torch.int64))), MaskError, r"is for 5 keys, but the inputs have 7 keys"),
    "segments of one": (masked(Segments([0] * L, [0])), MaskError, r"ids for 5 queries and 1 keys, but the inputs have L=5 and S=7"),
    "prefix too long": (masked(Prefix(8)), MaskError, r"Prefix\(lengths=\[8\]\): a prefix of 8 keys is longer than the 7 keys"),
    "allowed": (masked(Allowed(ones(4, 7), axes="hk")), MaskError, r"is for 4 heads, but the inputs have 3 heads"),
    "inside a joined mask": (masked(Causal() & ~(Window(1) | Prefix(8))), MaskError, r"a prefix of 8 keys is longer than the 7"),
    # Bare tensors.
    "ambiguous": (masked(ones(5, 5), query=(5, H, 5, E), key=(5, H, 5, E)), MaskError, r"a mask \(5, 5\) can mean \(L, S\) or \(B, S\) here, since B = L = 5: say which"),
    "bare (B, S)": (masked(ones(B, S)), MaskError, r"must be \(L, S\) = \(5, 7\) or \(B\|1, H\|1, L, S\) with four axes, not \(2, 7\): name its axes"),
    "bare (S, L)": (masked(ones(S, L)), MaskError, r"\(L, S\) = \(5, 7\) .* not \(7, 5\)"),
    "bare (B, L, S)": (masked(ones(B, L, S)), MaskError, r"with four axes, not \(2, 5, 7\): name its axes, as in Allowed\(m, axes='bqk'\)"),
    "bare (B*H, L, S)": (masked(ones(B * H, L, S)), MaskError, r"not \(6, 5, 7\)"),
    "bare 3-D, no heads": (masked(ones(B, L, S), query=(B, L, E), key=(B, S, E)), MaskError, r"not \(2, 5, 7\)"),
    "bare (S,)": (masked(ones(S)), MaskError, r"not \(7,\)"),
    "bare four axes": (masked(ones(B, 2, L, S)), MaskError, r"is for 2 heads, but the inputs have 3 heads"),
    "float mask": (masked(zeros(L, S)), MaskError, r"must be bool, True = may attend, not torch.float32 \(5, 7\): .*attn_bias=m"),
    "integer mask": (masked(torch.ones(L, S, dtype=torch.int64)), MaskError, r"must be bool, True = may attend, not torch.int64 \(5, 7\): .*Allowed\(m\.bool\(\)"),
    "float mask, four axes": (masked(zeros(B, 1, L, S)), MaskError, r"not torch.float32 \(2, 1, 5, 7\)"),
    "a list": (masked([[True]]), TypeError, r"mask must be a clearhead mask, a bool tensor or None, not list"),
    "a class": (masked(Causal), TypeError, r"mask must be a clearhead mask, a bool tensor or None, not type"),
    "text": (masked("causal"), TypeError, r"not str: for example Causal\(\)"),
    "mask elsewhere": (masked(KeyPadding([5, 3]).to("meta")), ShapeError, r"the mask is on meta, the query on cpu: use mask.to\('cpu'\)"),
    # Biases.
    "bias shape": (call(attn_bias=zeros(B, L, S)), ShapeError, r"\(L\|1, S\|1\) or \(B\|1, H\|1, L\|1, S\|1\) with B=2, H=3, L=5, S=7, not \(2, 5, 7\)"),
    "bias size": (call(attn_bias=zeros(L, 6)), ShapeError, r"with B=2, H=3, L=5, S=7, not \(5, 6\)"),
    "bias, no heads": (call((B, L, E), (B, S, E), attn_bias=zeros(3, L, S)), ShapeError, r"or \(B\|1, L\|1, S\|1\) with B=2, H=1, L=5, S=7, not \(3, 5, 7\)"),
    "bool bias": (call(attn_bias=ones(L, S)), ShapeError, r"added to the scores, not torch.bool. Flags go in mask="),
    "a number as bias": (call(attn_bias=1.0), ShapeError, r"must be a floating-point tensor, added to the scores, not float"),
    # Numbers.
    "dropout 2": (call(dropout_p=2), ValueError, r"dropout_p must be between 0 and 1, not 2"),
    "dropout -0.1": (call(dropout_p=-0.1), ValueError, r"dropout_p must be between 0 and 1, not -0.1"),
    "dropout nan": (call(dropout_p=math.nan), ValueError, r"dropout_p must be between 0 and 1, not nan"),
    "scale nan": (call(scale=math.nan), ValueError, r"scale must be a finite number, not nan"),
    "scale inf": (call(scale=-math.inf), ValueError, r"scale must be a finite number, not -inf"),
    "dropout none": (call(dropout_p=None), TypeError, r"dropout_p must be a number, not None"),
    "dropout text": (call(dropout_p="0.1"), TypeError, r"dropout_p must be a number, not '0.1'"),
    "dropout of two": (call(dropout_p=torch.tensor([0.1, 0.2])), TypeError, r"dropout_p must be a number, not tensor"),
    "scale text": (call(scale="a"), TypeError, r"scale must be a number, not 'a'"),
    "scale complex": (call(scale=1j), TypeError, r"scale must be a number, not 1j"),
    "scale beyond floats": (call(scale=10**400), ValueError, r"scale must be a finite number, not 1000"),
    "scale beyond float32": (call(scale=1e300), ValueError, r"scale must be finite in torch.float32, .* not 1e\+300: the most is 3.40282e\+38"),
    "softcap 0": (call(softcap=0), ValueError, r"softcap must be a number from 1.17549e-38 to 3.40282e\+38 \(torch.float32, which scores are computed in\), not 0: softcap=None leaves"),
    "softcap -1": (call(softcap=-1.0), ValueError, r"softcap must be a number from .*, not -1.0"),
    "softcap nan": (call(softcap=math.nan), ValueError, r"softcap must be a number from .*, not nan"),
    "softcap inf": (call(softcap=math.inf), ValueError, r"softcap must be a number from .*, not inf"),
    "softcap below floats": (call(softcap=1e-300), ValueError, r"softcap must be a number from 1.17549e-38 .* not 1e-300"),
    "softcap text": (call(softcap="50"), TypeError, r"softcap must be a number, not '50'"),
    "softcap tensor": (call(softcap=torch.tensor(50.0)), TypeError, r"softcap must be a number, not a tensor: softcap.item\(\)"),
    # Sinks.
    "sinks of key heads": (call(key=(B, 1, S, E), sinks=zeros(1)), ShapeError, r"sinks must be \(Hq,\) = \(3,\), one logit for each query head, not \(1,\): sinks.expand\(3\)"),
    "sinks of items": (call(sinks=zeros(B, H)), ShapeError, r"sinks must be \(Hq,\) = \(3,\), .* not \(2, 3\)"),
    "a number as sink": (call(sinks=0.0), ShapeError, r"sinks must be a dense tensor of float16, .* not float: convert"),
    "integer sinks": (call(sinks=zeros(H, dtype=torch.int64)), ShapeError, r"sinks must be .* not torch.int64 torch.strided"),
    "sparse sinks": (call(sinks=zeros(H).to_sparse()), ShapeError, r"sinks must be a dense .* not torch.float32 torch.sparse_coo: .*to_dense"),
    "sinks elsewhere": (call(sinks=zeros(H).to("meta")), ShapeError, r"sinks are on meta, the query on cpu: use sinks.to\(cpu\)"),
    "sdpa with softcap and sinks": (call(backend="sdpa", softcap=5.0, sinks=zeros(H)), BackendError, r"softcap: torch's kernels have none; sinks: torch's kernels have none"),
    # Kinds of tensors.
    "sparse": (lambda: ch.attention(*[zeros(B, L, E).to_sparse()] * 3), ShapeError, r"must be dense, not torch.sparse_coo, .*to_dense"),
    "mkldnn": (lambda: ch.attention(*[zeros(B, L, E).to_mkldnn()] * 3), ShapeError, r"must be dense, not torch._mkldnn"),
    "sparse mask": (masked(ones(L, S).to_sparse()), MaskError, r"a mask tensor must be dense, not torch.sparse_coo \(5, 7\)"),
    "sparse bias": (call(attn_bias=zeros(L, S).to_sparse()), ShapeError, r"attn_bias must be .* dense, not torch.float32 torch.sparse_coo"),
    "float8 bias": (call(attn_bias=zeros(L, S).to(torch.float8_e4m3fn)), ShapeError, r"attn_bias must be float16, .* not torch.float8_e4m3fn"),
    # Backends.
    "a list as backend": (call(backend=[]), ValueError, r"there is no backend \[\]: choose from"),
    "unknown backend": (call(backend="flash"), ValueError, r"there is no backend 'flash': choose from .*sdpa, .*blockwise, .*reference"),
    "sdpa with dropout": (call(backend="sdpa", dropout_p=0.5), BackendError, r"backend 'sdpa' can't do this call: dropout: torch would materialise L x S"),
    "sdpa with widths": (call(value=(B, H, S, 5), backend="sdpa"), BackendError, r"head widths differ \(E=4, Ev=5\)"),
    "sdpa with scale": (call(backend="sdpa", scale=-0.5), BackendError, r"scale -0.5 <= 0"),
    "every reason": (call(value=(B, H, S, 5), backend="sdpa", dropout_p=0.5, scale=0.0), BackendError, r"widths differ .*; dropout: .*; scale 0 <= 0"),
}  # fmt: skip


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the inputs' values raises."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was done before the error")

    for name in ("set_aside", "look"):
        monkeypatch.setattr(ch.functional, name, work)
    for backend in ch.backends.BACKENDS.values():
        monkeypatch.setattr(type(backend), "run", work)
        monkeypatch.setattr(type(backend), "see", work)


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_call(wrong: Callable[[], object], kind: type[Exception], message: str, no_work: None) -> None:
    with pytest.raises(kind, match=message) as caught:
        wrong()
    assert caught.type is kind


def test_a_message_stays_short_enough_to_read() -> None:
    with pytest.raises(MaskError, match="is for 32 queries") as caught:
        call(mask=Allowed(ones(32, 32), axes="qk"))()
    assert len(str(caught.value)) < 500


def test_the_spy_would_tell(no_work: None) -> None:
    with pytest.raises(AssertionError, match="work was done"):
        call()()


def test_a_value_of_four_million_rows(no_work: None) -> None:
    """Torch's kernel reads past the key's buffer here, and crashes; nothing may touch it before the error."""
    query, value = zeros(1, 1, 5, 8), torch.empty(4_000_000, 8)[None, None]
    with pytest.raises(ShapeError, match=r"same length S: 5 and 4000000 in .*value \(1, 1, 4000000, 8\)"):
        ch.attention(query, query, value)


@pytest.mark.parametrize(
    ("observe", "kind", "message"),
    [
        (Observe(weights=At(heads=3)), IndexError, r"At\(heads=3\) is out of range: there are 3 heads \(-3 to 2\)"),
        (Observe(mass={"cls": ones(1, 6)}), ShapeError, r"must be \(B\|1, S\) with B=2, S=7, not \(1, 6\)"),
        (Observe(patterns={"own": Segments([0] * 5)}), MaskError, r"is for 5 keys, but the inputs have 7 keys"),
        (Observe(patterns={"real": KeyPadding([1] * 3)}), MaskError, r"is for 3 batch items, but .* 2 batch items"),
        (Observe(lookback=torch.tensor([1, 2, 3])), ShapeError, r"number or \(B,\) with B=2, not \(3,\)"),
        (
            Observe(weights=True, scores=At(heads=[0], queries=[-1]), allow_bytes=895),
            ch.TooLargeError,
            r"takes 896 bytes \(896 bytes: weights 840 bytes, scores 56 bytes\) .*B=2, Hq=3, L=5, S=7.*allow_bytes=896",
        ),
    ],
)
def test_a_wrong_observation_is_told_before_the_work(
    observe: Observe, kind: type[Exception], message: str, no_work: None
) -> None:
    with pytest.raises(kind, match=message):
        call(observe=observe)()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (At(heads=3), r"At\(heads=3\) is out of range: there are 3 heads \(-3 to 2\)"),
        (At(heads=[0, -4]), r"At\(heads=-4\) is out of range: there are 3 heads"),
        (At(queries=5), r"At\(queries=5\) is out of range: there are 5 queries \(-5 to 4\)"),
        (At(keys=[7]), r"At\(keys=7\) is out of range: there are 7 keys \(-7 to 6\)"),
    ],
)
def test_at_out_of_range(at: At, message: str) -> None:
    for name in ("weights", "scores", "masked_scores", "dropped_weights"):
        with pytest.raises(IndexError, match=message):
            call(observe=Observe(**{name: at}))()


@pytest.mark.parametrize(
    "choice", [1.0, torch.tensor(1), "0", [[0]], [True], slice("a", 3), slice(0, 3, 0)], ids=repr
)
def test_at_takes_integers(choice: Any) -> None:
    with pytest.raises(TypeError, match=r"At\(heads=\.\.\.\) takes an int, a list of ints, a slice or None, not"):
        call(observe=Observe(weights=At(heads=choice)))()


def test_observe_is_an_observe() -> None:
    with pytest.raises(TypeError, match="observe"):
        call(observe=True)()


MALFORMED: dict[str, tuple[Callable[[], object], str]] = {
    "align": (lambda: Causal(align="middle"), r"Causal: align must be 'end' or 'start', not 'middle'"),  # type: ignore[arg-type]
    "window align": (lambda: Window(1, align="left"), r"Window: align must be 'end' or 'start', not 'left'"),  # type: ignore[arg-type]
    "negative width": (lambda: Window(left=-1), r"Window: left must be a number of keys >= 0, or None for no limit, not -1"),
    "float width": (lambda: Window(right=1.5), r"Window: right must be .* not 1.5"),  # type: ignore[arg-type]
    "bool width": (lambda: Window(right=True), r"Window: right must be .* not True"),
    "neither": (lambda: KeyPadding(), r"KeyPadding takes either lengths=\(B,\) or real=\(B, tokens\): exactly one"),
    "both": (lambda: QueryPadding([1], real=[[1]]), r"QueryPadding takes either lengths=\(B,\) or real=\(B, tokens\)"),
    "side": (lambda: KeyPadding([1], side="top"), r"KeyPadding: side must be 'right' or 'left', not 'top'"),  # type: ignore[arg-type]
    "side of real": (lambda: KeyPadding(real=[[1, 0]], side="left"), r"side goes with lengths=; real= already says"),
    "negative length": (lambda: KeyPadding([3, -2]), r"KeyPadding: lengths must be >= 0, but one is -2"),
    "float lengths": (lambda: KeyPadding([1.0]), r"KeyPadding: lengths must be integers, not torch.float32"),  # type: ignore[list-item]
    "two axes": (lambda: Prefix([[1, 2]]), r"Prefix: lengths must be an int or \(B,\), not \(1, 2\)"),  # type: ignore[list-item]
    "one axis of real": (lambda: KeyPadding(real=ones(3)), r"real must have two axes, \(batch, tokens\), not \(3,\)"),
    "float real": (lambda: KeyPadding(real=zeros(2, 3)), r"real must be bool or 0/1 integers, not torch.float32"),
    "ids as real": (lambda: KeyPadding(real=[[5, 0, 7]]), r"but it holds 0 to 7\. From token ids: KeyPadding.from_ids"),
    "negative real": (lambda: KeyPadding(real=[[1, -1]]), r"but it holds -1 to 1"),
    "float ids": (lambda: KeyPadding.from_ids(zeros(2, 3)), r"from_ids takes integer token ids \(B, L\), not \(2, 3\) torch.float32"),
    "flat ids": (lambda: QueryPadding.from_ids(torch.ones(3).long()), r"QueryPadding.from_ids takes integer token ids \(B, L\), not \(3,\)"),
    "list of ids": (lambda: KeyPadding.from_ids([[1, 0]]), r"not list"),  # type: ignore[arg-type]
    "segment batches": (lambda: Segments(torch.ones(2, 3).long(), torch.ones(3, 4).long()), r"query_ids \(2, 3\) and key_ids \(3, 4\) must have the same batch size"),
    "float segments": (lambda: Segments([0.5]), r"Segments: query_ids must be integers, not torch.float32"),  # type: ignore[list-item]
    "segment axes": (lambda: Segments(torch.ones(1, 2, 3).long()), r"query_ids must be \(B, tokens\) or \(tokens,\), not \(1, 2, 3\)"),
    "letters": (lambda: Allowed(ones(2, 3), axes="qx"), r"Allowed: axes must be letters of 'bhqk' .* not 'qx'"),
    "letters twice": (lambda: Blocked(ones(2, 3), axes="qq"), r"Blocked: axes must be .* each at most once, not 'qq'"),
    "too few letters": (lambda: Blocked(ones(2, 3), axes="k"), r"axes='k' names 1 axes, but the tensor \(2, 3\) has 2"),
    "number mask": (lambda: Allowed(zeros(2, 3), axes="qk"), r"Allowed takes a bool tensor, not torch.float32: .*attn_bias="),
    "0/1 mask": (lambda: Blocked([[0, 1]], axes="bk"), r"Blocked takes a bool tensor, not torch.int64: .*Blocked\(t.bool\(\)"),
    "sparse": (lambda: Allowed(ones(2, 3).to_sparse(), axes="qk"), r"Allowed takes a dense tensor, not torch.sparse_coo"),
    "a flag as prefix": (lambda: Prefix(True), r"Prefix: lengths must be integers, not torch.bool\.$"),
    "flags as segments": (lambda: Segments([True]), r"Segments: query_ids must be integers, not torch.bool\.$"),  # type: ignore[list-item]
    "flags as lengths": (lambda: KeyPadding([True]), r"not torch.bool. A flag for each token goes in KeyPadding\(real=\.\.\.\)"),  # type: ignore[list-item]
    "list from mha": (lambda: ch.mask_from_mha([1]), r"attn_mask must be a tensor or None, not list"),  # type: ignore[arg-type]
    "list of padding": (lambda: ch.mask_from_mha(key_padding_mask=[[1]]), r"key_padding_mask must be a tensor or None, not list"),  # type: ignore[arg-type]
    "list from sdpa": (lambda: ch.mask_from_sdpa([[True]]), r"attn_mask must be a tensor or None, not list"),  # type: ignore[arg-type]
    "negative heads": (lambda: ch.mask_from_mha(ones(4, 2, 2), num_heads=-1), r"give num_heads, a divisor of 4, not -1"),
    "heads as text": (lambda: ch.mask_from_mha(ones(4, 2, 2), num_heads="2"), r"give num_heads, a divisor of 4, not '2'"),  # type: ignore[arg-type]
    "heads as float": (lambda: ch.mask_from_mha(ones(4, 2, 2), num_heads=2.0), r"give num_heads, a divisor of 4, not 2.0"),  # type: ignore[arg-type]
    "ragged": (lambda: Allowed([[True], [True, False]], axes="qk"), r"Allowed takes a tensor or nested lists of equal lengths"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_mask(build: Callable[[], object], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        build()


def test_a_window_wider_than_an_int64() -> None:
    assert Window(left=2**63).dense(2, 2).any()


def test_no_advice_to_broadcast_one_token() -> None:
    with pytest.raises(MaskError, match="is for 6 keys") as caught:
        call(mask=KeyPadding(real=ones(B, 6)))()
    assert "with 1 to" not in str(caught.value)


OBSERVE: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"top_k": 0}, r"Observe\(top_k=\.\.\.\) takes a number >= 1, not 0"),
    "top_k flag": ({"top_k": True}, r"takes a number >= 1, not True"),
    "pooled": ({"pooled": 1.5}, r"Observe\(pooled=\.\.\.\) takes a number >= 1, not 1.5"),
    "weights": ({"weights": 3}, r"Observe\(weights=\.\.\.\) takes True or an At, not 3"),
    "mass": ({"mass": {"cls": [0]}}, r"Observe\(mass=\{'cls': \.\.\.\}\) takes a bool tensor \(B\|1, S\)"),
    "top_k beyond memory": (
        {"top_k": 2**40},
        r"Observe\(top_k=\.\.\.\) takes a number up to 1048576, not 1099511627776",
    ),
    "pooled beyond memory": ({"pooled": 2**40}, r"Observe\(pooled=\.\.\.\) takes a number up to 8192, not"),
    "offsets of flags": ({"offsets": [True]}, r"Observe\(offsets=\.\.\.\) takes a list of distances .* not \[True\]"),
    "offsets beyond int64": ({"offsets": [2**70]}, r"ints below 2\*\*62\), not \[1180591620717411303424\]"),
    "list of mass": ({"mass": [1]}, r"Observe\(mass=\.\.\.\) takes a dict of bool tensors \(B\|1, S\), not \[1\]"),
    "list of patterns": ({"patterns": [1]}, r"Observe\(patterns=\.\.\.\) takes a dict of masks, not \[1\]"),
    "tensor as a pattern": (
        {"patterns": {"own": ones(5, 7)}},
        r"Observe\(patterns=\{'own': \.\.\.\}\) takes a mask, not Tensor: .*Allowed\(tensor, axes='qk'\)",
    ),
    "negative lookback": ({"lookback": -1}, r"Observe\(lookback=\.\.\.\): lengths must be >= 0, but one is -1"),
    "float lookback": ({"lookback": 0.5}, r"Observe\(lookback=\.\.\.\): lengths must be integers"),
    "nothing allowed": ({"allow_bytes": 0}, r"Observe\(allow_bytes=\.\.\.\) takes a number >= 1, not 0"),
    "float mass": ({"mass": {"cls": zeros(1, 7)}}, r"takes a bool tensor"),
}


@pytest.mark.parametrize(("options", "message"), OBSERVE.values(), ids=OBSERVE.keys())
def test_malformed_observe(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Observe(**options)


def test_at_takes_one_choice_of_queries() -> None:
    with pytest.raises(ValueError, match="either queries= or last_real=True, not both"):
        At(queries=[0], last_real=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("entropy", r"entropy was not asked for: observe=Observe\(entropy=True\) keeps it\. Seen: lse"),
        ("top_k", r"observe=Observe\(top_k=8\)"),
        ("mass", r"observe=Observe\(mass=\{\.\.\.\}\)"),
        ("merged", r"merged was not asked for, or .*MultiHeadAttention"),
        ("wieghts", r"there is no field 'wieghts'\. Seen: lse"),
    ],
)
def test_a_field_not_asked_for(name: str, message: str) -> None:
    _, seen = ch.attention(zeros(1, 2, 3, 4), zeros(1, 2, 3, 4), zeros(1, 2, 3, 4), observe=Observe(lse=True))
    with pytest.raises(AttributeError, match=message):
        getattr(seen, name)


MODULE: dict[str, tuple[Callable[[ch.MultiHeadAttention], object], type[Exception], str]] = {
    "one sequence": (lambda m: m(zeros(5, 12)), ShapeError, r"query must be \(batch, length, width\), batch first, not \(5, 12\): a single sequence is query\[None\]"),
    "memory": (lambda m: m(zeros(2, 5, 12), zeros(5, 12)), ShapeError, r"key must be \(batch, length, width\), .*key\[None\]"),
    "value alone": (lambda m: m(zeros(2, 5, 12), value=zeros(2, 5, 12)), TypeError, r"value was given without key"),
    "list": (lambda m: m([[1.0]]), TypeError, r"query must be a torch.Tensor, not list"),
    "batch": (lambda m: m(zeros(2, 5, 12), zeros(3, 5, 12)), ShapeError, r"same batch size B"),
    "lengths": (lambda m: m(zeros(2, 5, 12), zeros(2, 5, 12), zeros(2, 6, 12)), ShapeError, r"same length S: 5 and 6"),
    "mask": (lambda m: m(zeros(2, 5, 12), mask=KeyPadding([6, 1])), MaskError, r"a length of 6 is more than the 5 keys"),
    "bare mask": (lambda m: m(zeros(2, 5, 12), mask=ones(2, 5, 5)), MaskError, r"not \(2, 5, 5\): name its axes"),
    "backend": (lambda m: m(zeros(2, 5, 12), backend="x"), ValueError, r"there is no backend 'x'"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), MODULE.values(), ids=MODULE.keys())
def test_wrong_module_call(
    wrong: Callable[[ch.MultiHeadAttention], object], kind: type[Exception], message: str, no_work: None
) -> None:
    with pytest.raises(kind, match=message) as caught:
        wrong(ch.MultiHeadAttention(12, 3))
    assert caught.type is kind


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((zeros(2, 5, 11),), r"query.*12.*11"),
        ((zeros(2, 5, 12), zeros(2, 7, 11)), r"key.*12.*11"),
        ((zeros(2, 5, 12, dtype=torch.float64),), r"float64.*float32"),
    ],
)
def test_wrong_widths_and_dtypes_are_named(inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ch.MultiHeadAttention(12, 3)(*inputs)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((8.0, 2), {}, TypeError, r"embed_dim must be a whole number, not 8.0"),
        ((8, "2"), {}, TypeError, r"num_heads must be a whole number, not '2'"),
        ((8, 2), {"kdim": 1.5}, TypeError, r"kdim must be a whole number, not 1.5"),
        ((8, 2), {"scale": "a"}, TypeError, r"scale must be a number, not 'a'"),
        ((8, 2), {"scale": 10**400}, ValueError, r"scale must be a finite number, not 1000"),
        ((8, 2), {"dropout_p": None}, TypeError, r"dropout_p must be a number, not None"),
    ],
)
def test_wrong_kinds_of_sizes(
    arguments: tuple[Any, Any], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ch.MultiHeadAttention(*arguments, **options)
