"""Masks from text: good expressions give the mask they write, hostile ones a MaskError, soon and without a trace."""

import builtins
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from clearhead import Allowed, Blocked, Causal, KeyPadding, Mask, MaskError, Prefix, QueryPadding, Segments, Window
from clearhead.masks import parse_mask

GOOD: list[tuple[str, Mask]] = [
    ("Causal()", Causal()),
    ("  Causal( )  ", Causal()),
    ("Causal('start')", Causal(align="start")),
    ("Window(256, 0)", Window(left=256, right=0)),
    ("Window(left=None, right=2)", Window(right=2)),
    ("KeyPadding([8, 5, 10])", KeyPadding([8, 5, 10])),
    ("KeyPadding(lengths=(8, 5), side='left')", KeyPadding([8, 5], side="left")),
    ("KeyPadding(real=[[1, 0], [True, True]])", KeyPadding(real=[[1, 0], [1, 1]])),
    ("QueryPadding(lengths=3)", QueryPadding(3)),
    ("Segments([0, 0, -1])", Segments([0, 0, -1])),
    ("Segments(query_ids=[[0], [1]], key_ids=[[0, 1], [1, 1]])", Segments([[0], [1]], [[0, 1], [1, 1]])),
    ("Prefix(lengths=[1, 2])", Prefix([1, 2])),
    ("Allowed([[True, False]], axes='bk')", Allowed([[True, False]], axes="bk")),
    ("Blocked(tensor=[[True, False]], axes='kq')", Blocked([[True, False]], axes="kq")),
    ("Allowed([[True, False]], axes='bk', )", Allowed([[True, False]], axes="bk")),
    ("(Causal() | Prefix(4)) & KeyPadding(lengths=[8, 5])", (Causal() | Prefix(4)) & KeyPadding([8, 5])),
    ("Causal() | Prefix(4) & ~Window(1)", Causal() | (Prefix(4) & ~Window(1))),
    ("~~Causal()", Causal()),
    ("((((~(Causal())))))", ~Causal()),
    ("(Causal() &\nWindow(3))", Causal() & Window(3)),
]


@pytest.mark.parametrize(("text", "mask"), GOOD, ids=[text for text, _ in GOOD])
def test_good(text: str, mask: Mask) -> None:
    assert parse_mask(text) == mask


def test_up_to_the_limits() -> None:
    """The limits named in the docstring are limits, not a guess above them."""
    assert len(parse_mask("&".join(["Causal()"] * 51)).parts) == 51  # type: ignore[attr-defined]
    assert parse_mask("(" * 49 + "Causal()" + ")" * 49) == Causal()
    text = f"KeyPadding(lengths=[{','.join('1' * 4989)}])"
    assert len(text) == 9_999
    assert parse_mask(text) == KeyPadding(torch.ones(4989, dtype=torch.int64))


HOSTILE: dict[str, tuple[str, str]] = {
    # Depth and size.
    "200,000 ~": ("~" * 200_000 + "Causal()", r"200,008 characters are more than the 10,000 allowed"),
    "9,000 ~": ("~" * 9_000 + "Causal()", r"9,000 levels or operators are more than the 50 allowed"),
    "5,000 &": ("Causal()" + "&Causal()" * 5_000, r"45,008 characters"),
    "51 &": ("Causal()" + "&Causal()" * 51, r"51 levels or operators are more than the 50"),
    "10,000 brackets": ("(" * 10_000 + "Causal()" + ")" * 10_000, r"20,008 characters"),
    "4,900 brackets": ("(" * 4_900 + "Causal()" + ")" * 4_900, r"4,901 levels"),
    "10,000 open brackets": ("[" * 10_000, r"10,000 levels"),
    "minus signs": (f"Prefix({'-' * 9_900}1)", r"^mask expression"),
    "many nots": ("not " * 2_400 + "Causal()", r"^mask expression"),
    "many lambdas": ("lambda:" * 1_400 + "1", r"^mask expression"),
    "many powers": ("1" + "**1" * 3_000, r"^mask expression"),
    "many attributes": ("a" + ".b" * 4_000, r"^mask expression"),
    "many calls": ("a" + "()" * 4_000, r"^mask expression"),
    "many subscripts": ("a" + "[0]" * 3_000, r"^mask expression"),
    "many conditions": ("1 if 1 else " * 800 + "1", r"^mask expression"),
    # Running something.
    "import": ("__import__('os').system('true')", r"column 1: only masks"),
    "import call": ("__import__('os')", r"column 1: '__import__' is not a mask. Masks are Allowed, .*Window"),
    "builtin": ("print(1)", r"'print' is not a mask"),
    "base class": ("Mask()", r"'Mask' is not a mask"),
    "attribute": ("Causal().__class__", r"only masks"),
    "method": ("Causal().dense(100000, 100000)", r"only masks"),
    "call of a call": ("Causal()()", r"only masks"),
    "lambda": ("(lambda: Causal())()", r"only masks"),
    "lambda argument": ("Prefix(lambda: 1)", r"column 8: arguments must be numbers, strings"),
    "comprehension": ("[Causal() for _ in [1]]", r"only masks"),
    "comprehension argument": ("Prefix([n for n in [1]])", r"arguments must be numbers"),
    "walrus": ("(m := Causal())", r"column 2: only masks"),
    "walrus argument": ("Prefix(n := 1)", r"arguments must be numbers"),
    "f-string": ("f'{Causal()}'", r"only masks"),
    "f-string argument": ("Causal(f'{1}')", r"arguments must be numbers"),
    "dict": ("{'a': Causal()}", r"only masks"),
    "dict argument": ("Prefix({1: 2})", r"arguments must be numbers"),
    "set argument": ("Prefix({1})", r"arguments must be numbers"),
    "mask argument": ("Prefix(Causal())", r"arguments must be numbers"),
    "name argument": ("Prefix(nan)", r"arguments must be numbers"),
    "expression argument": ("Prefix([0] * 99999999)", r"arguments must be numbers"),
    "power argument": ("Prefix(9**9**9)", r"arguments must be numbers"),
    "keywords **": ("KeyPadding(**{'lengths': [1]})", r"\*\* is not allowed"),
    "arguments *": ("KeyPadding(*[[1]])", r"arguments must be numbers"),
    "await": ("await Causal()", r"only masks"),
    "yield": ("(yield)", r"only masks"),
    "conditional": ("Causal() if 1 else Causal()", r"only masks"),
    "comparison": ("Causal() < Causal()", r"only masks"),
    "other operator": ("Causal() ^ Causal()", r"only masks"),
    "and": ("Causal() and Window(1)", r"combine masks with & \| ~, not with and, or, not"),
    "not": ("not Causal()", r"combine masks with & \| ~"),
    "uncalled": ("Causal & Window(1)", r"Causal is a kind of mask: call it, as in Causal\(\.\.\.\)"),
    "literal": ("Causal() & True", r"column 12: only masks"),
    "look-alike letter": ("К" + "eyPadding([1])", r"is not a mask"),
    # Numbers and other literals.
    "huge integer": ("Prefix(" + "9" * 30 + ")", r"column 8: too large a number"),
    "huge negative": ("Segments([-" + "9" * 30 + "])", r"too large a number"),
    "5,000 digits": ("Prefix(" + "9" * 5_000 + ")", r"mask expression"),
    "1e400": ("Prefix(1e400)", r"Prefix: lengths must be integers, not torch.float32"),
    "float width": ("Window(left=1e5)", r"left must be a number of keys >= 0, or None for no limit, not 100000.0"),
    "complex": ("Prefix(1j)", r"lengths must be integers"),
    "bytes": ("Prefix(b'ab')", r"Prefix takes a tensor or nested lists"),
    "ellipsis": ("Prefix(...)", r"Prefix takes a tensor or nested lists"),
    "none": ("Prefix(None)", r"Prefix takes a tensor or nested lists"),
    "text": ("Prefix('3')", r"Prefix takes a tensor or nested lists"),
    "bool length": ("Prefix(True)", r"lengths must be integers, not torch.bool"),
    "negative length": ("Prefix(-1)", r"lengths must be >= 0, but one is -1"),
    "negative text": ("Prefix(-'a')", r"- goes before a number"),
    "ragged lists": ("Segments([[1], [2, 3]])", r"nested lists of equal lengths"),
    "deep lists": (f"Segments({'[' * 45}{']' * 45})", r"query_ids must be \(B, tokens\)"),
    "unknown keyword": ("Causal(width=1)", r"Causal: got an unexpected keyword argument 'width'"),
    "private keyword": ("KeyPadding([1], _last=0)", r"KeyPadding: got an unexpected keyword argument '_last'"),
    "no arguments": ("Prefix()", r"Prefix: missing 1 required positional argument: 'lengths'"),
    "too many arguments": ("Prefix(" + ",".join("1" * 4_900) + ")", r"Prefix: takes 2 positional arguments but 4901"),
    # Not an expression at all.
    "empty": ("", r"invalid syntax\. Write e\.g\. Causal\(\)"),
    "blank": (" \t\n ", r"invalid syntax"),
    "unbalanced": ("(Causal()", r"column 1: '\(' was never closed"),
    "unbalanced other way": ("Causal())", r"column 9: unmatched '\)'"),
    "NUL": ("Causal()\0", r"null bytes"),
    "lone surrogate": ("Causal('\ud800')", r"not an expression"),
    "statement": ("import os", r"invalid syntax"),
    "two statements": ("Causal(); Causal()", r"column 9: invalid syntax"),
    "two lines": ("Causal()\nCausal()", r"invalid syntax"),
    "assignment": ("mask = Causal()", r"invalid syntax"),
    "comment": ("# Causal()", r"invalid syntax"),
}


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Whatever could run a text, or what it asks for, raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the text was run")

    doors = [(builtins, "eval"), (builtins, "exec"), (builtins, "print"), (os, "system")]
    kept = [getattr(module, name) for module, name in doors]
    try:
        for module, name in doors:
            setattr(module, name, refuse)
        yield
    finally:
        for (module, name), value in zip(doors, kept, strict=True):
            setattr(module, name, value)


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile(text: str, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(MaskError, match=message) as caught, nothing_runs():
        parse_mask(text)
    assert time.perf_counter() - start < 20  # milliseconds on an idle machine: only a blow-up is caught here
    assert len(str(caught.value)) < 500  # the message does not repeat a long text
    assert caught.value.__cause__ is None


def test_a_number_too_long_to_print() -> None:
    with pytest.raises(MaskError, match="too large a number"):
        parse_mask("Prefix(0x" + "f" * 5_000 + ")")


def test_a_keyword_given_twice_is_refused() -> None:
    with pytest.raises(MaskError, match="column 1: Causal: an argument is given twice"):
        parse_mask("Causal(align='start', align='end')")
