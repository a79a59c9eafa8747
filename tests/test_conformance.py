"""Every case on every path against the double loop: `product` says what is crossed with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance import check_run
from conformance_report import families, float32_errors
from covering import covering, missing
from product import FACTORS, RUNS, STRENGTH, Run, excluded, rows


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_truth(run: Run) -> None:
    check_run(run)


@pytest.mark.parametrize("run", [run for run in RUNS if run.how == "eager"][::9], ids=str)
def test_the_default_backend_is_right_too(run: Run) -> None:
    check_run(replace(run, backend=None))


def test_the_worst_float32_error_is_no_more_than_twice_torchs() -> None:
    """In each group of cases; those that torch gets wrong are left out."""
    for group, (ours, torchs, _, _) in float32_errors(run.case for run in RUNS).items():
        assert ours <= 2 * torchs, f"{group}: {ours:.2e} is more than twice torch's {torchs:.2e}"


# -- the array -------------------------------------------------------------------------------------------------


def test_every_combination_of_levels_is_run() -> None:
    assert not missing(rows(STRENGTH), FACTORS, STRENGTH, excluded)


def test_every_mask_alone_with_every_shape_on_every_backend() -> None:
    names = list(FACTORS)
    at = [names.index(name) for name in ("mask", "shape", "backend", "second")]
    there = {tuple(row[i] for i in at) for row in rows(STRENGTH)}
    for mask in FACTORS["mask"]:
        for shape in FACTORS["shape"]:
            for backend in FACTORS["backend"]:
                if not excluded("shape", shape, "backend", backend):
                    assert (mask, shape, backend, "alone") in there, f"{mask} {shape} {backend}"


@pytest.mark.parametrize("strength", [2, 3])
def test_a_small_array(strength: int) -> None:
    factors = {
        name: dict.fromkeys(levels, 1.0) for name, levels in {"a": "123", "b": "45", "c": "678", "d": "9"}.items()
    }

    def never(f: str, a: str, g: str, b: str) -> bool:
        return (a, b) == ("1", "4")

    found = covering(factors, strength, never)
    assert not missing(found, factors, strength, never)
    assert not any(row[:2] == ("1", "4") for row in found)
    assert len(found) < 3 * 2 * 3 or strength == 3
    # What is missing is told: without its first row some combination is nowhere.
    assert missing(found[1:], factors, strength, never)


def test_each_family_of_masks_has_cases() -> None:
    assert {families(run.case)[0] for run in RUNS} == {
        "none", "causal", "window", "padding", "segments", "prefix", "tensors", "pairs",
    }  # fmt: skip
