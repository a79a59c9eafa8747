"""The tests of the twenty rows can fail: each protection removed, the checks that the list names must not pass."""

from __future__ import annotations

from functools import partial

import pytest

from pains import encoder, sabotage_01_to_09, sabotage_10_to_20
from pains.sabotage import Removal

# Torch's own forward mode scripts its decompositions when first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

REMOVALS = [*sabotage_01_to_09.REMOVALS, *sabotage_10_to_20.REMOVALS]
PAIRS = [(removal, check) for removal in REMOVALS for check in removal.breaks]


def named(value: object) -> str:
    if isinstance(value, Removal):
        return value.name
    assert isinstance(value, partial)
    told = [*value.args, *(f"{name}={option}" for name, option in value.keywords.items())]
    return f"{value.func.__module__.split('.')[-1][5:]}.{value.func.__name__}({', '.join(map(str, told))})"


@pytest.mark.parametrize(("removal", "check"), PAIRS, ids=named)
def test_without_the_protection_the_check_fails(
    removal: Removal, check: partial[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder._built.cache_clear()  # a removal may be in what is built
    removal.apply(monkeypatch)
    with pytest.raises((removal.error, pytest.fail.Exception)):
        check()
    encoder._built.cache_clear()


def test_with_it_the_same_checks_pass() -> None:
    for check in {named(check): check for _, check in PAIRS}.values():
        check()


def test_every_row_has_a_protection_that_can_be_removed() -> None:
    assert set().union(*(removal.rows for removal in REMOVALS)) == set(range(1, 21))


def test_a_protection_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Removal("moved", encoder, "cut", "no such piece", "", ())
    with pytest.raises(LookupError, match="cut has no 'no such piece'"):
        moved.apply(monkeypatch)
