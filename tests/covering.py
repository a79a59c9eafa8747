"""Covering arrays: few rows in which every combination of levels of any `strength` factors still occurs.

Greedy, one row at a time, as AETG does (Cohen et al. 1997, "The AETG System"): a row starts from a combination
that is still missing, and each further factor takes the level that covers most of what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

import numpy as np

Row = tuple[str, ...]


def covering(
    factors: Mapping[str, Mapping[str, float]],
    strength: int,
    excluded: Callable[[str, str, str, str], bool],
    start: Iterable[Mapping[str, str]] = (),
    seed: int = 0,
) -> list[Row]:
    """Rows of one level for each factor.

    Args:
        factors: levels by name, each with a weight: how often it is drawn where nothing is left to cover.
        strength: how many factors at a time.
        excluded: `excluded(f, a, g, b)`: whether level a of factor f can't stand beside level b of factor g.
        start: levels of some factors that must occur together, each in a row of its own.
        seed: of the draws.
    """
    rng = random.Random(seed)
    names = list(factors)
    levels = [list(part) for part in factors.values()]
    fits = _fitting(names, levels, excluded)
    missing = {group: _possible(group, fits) for group in combinations(range(len(names)), strength)}
    rows = []

    def complete(row: dict[int, int]) -> None:
        """Choose what the row leaves open, and note what it covers."""
        for f in rng.sample([f for f in range(len(names)) if f not in row], len(names) - len(row)):
            gain = np.zeros(len(levels[f]))
            for others in combinations(row, strength - 1):
                group = tuple(sorted((*others, f)))
                gain += missing[group][tuple(slice(None) if g == f else row[g] for g in group)]
            allowed = np.logical_and.reduce([fits[f, g][:, level] for g, level in row.items()])
            assert allowed.any(), f"no level of {names[f]} fits beside {row}"
            gain[~allowed] = -1
            best = np.flatnonzero(gain == gain.max()).tolist()
            row[f] = rng.choices(best, [factors[names[f]][levels[f][level]] for level in best])[0]
        for group, table in missing.items():
            table[tuple(row[g] for g in group)] = False
        rows.append(tuple(levels[f][row[f]] for f in range(len(names))))

    for part in start:
        at = {names.index(name): levels[names.index(name)].index(level) for name, level in part.items()}
        if all(fits[f, g][at[f], at[g]] for f, g in combinations(at, 2)):
            complete(at)
    for group, table in missing.items():
        for combination in np.argwhere(table):
            if table[tuple(combination)]:  # no row since has covered it
                complete(dict(zip(group, map(int, combination), strict=True)))
    return rows


def missing(
    rows: list[Row],
    factors: Mapping[str, Mapping[str, float]],
    strength: int,
    excluded: Callable[[str, str, str, str], bool],
) -> set[tuple[tuple[str, str], ...]]:
    """The combinations that could occur and do not: found by listing them all, not by the search above."""
    names = list(factors)
    there = {tuple(zip(key, part, strict=True)) for row in rows for key, part in _parts(names, row, strength)}
    found = set()
    for key in combinations(names, strength):
        wanted: list[tuple[tuple[str, str], ...]] = [()]
        for name in key:
            wanted = [
                (*before, (name, level))
                for before in wanted
                for level in factors[name]
                if not any(excluded(g, b, name, level) or excluded(name, level, g, b) for g, b in before)
            ]
        found |= set(wanted) - there
    return found


def _parts(names: list[str], row: Row, strength: int) -> list[tuple[tuple[str, ...], Row]]:
    keys, parts = combinations(names, strength), combinations(row, strength)
    return list(zip(keys, parts, strict=True))


def _fitting(
    names: list[str], levels: list[list[str]], excluded: Callable[[str, str, str, str], bool]
) -> dict[tuple[int, int], np.ndarray]:
    """For factors f and g, which levels may stand side by side."""
    fits = {}
    for f, g in combinations(range(len(names)), 2):
        fits[f, g] = np.array(
            [
                [not (excluded(names[f], a, names[g], b) or excluded(names[g], b, names[f], a)) for b in levels[g]]
                for a in levels[f]
            ]
        )
        fits[g, f] = fits[f, g].T
    return fits


def _possible(key: tuple[int, ...], fits: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Which combinations of the factors in `key` break no rule."""
    sizes = [fits[f, key[0] if f != key[0] else key[1]].shape[0] for f in key]
    table = np.ones(sizes, dtype=bool)
    for i, j in combinations(range(len(key)), 2):
        shape = [1] * len(key)
        shape[i], shape[j] = sizes[i], sizes[j]
        table &= fits[key[i], key[j]].reshape(shape)
    return table
