"""Times of both sides of a race, measured interleaved in one process, after a proof that they do the same work."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.race import Race, Row

FEWEST = 5  # rounds
SAMPLE = 2e-4  # seconds: what is faster is repeated within a round, so that reading the clock costs nothing


class DifferentError(AssertionError):
    """Both sides don't compute the same: what they take says nothing."""


@dataclass(frozen=True)
class Times:
    """Seconds of each round."""

    ours: list[float]
    theirs: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def least(self) -> float:
        return min(self.ours) / min(self.theirs)


def measure(row: Row, threads: Sequence[int], seconds: float) -> dict[int, Times]:
    """The times at each number of threads; 0 seconds = one round, which only proves that the row runs."""
    torch.manual_seed(0)
    race = row.build()
    before = torch.get_num_threads()
    found = {}
    try:
        for number in threads:
            torch.set_num_threads(number)
            prove_same_work(race)
            found[number] = times(race, seconds)
    finally:
        torch.set_num_threads(before)
    return found


def prove_same_work(race: Race) -> None:
    """Compare what both sides compute.

    Raises:
        DifferentError: they lie further apart than the race allows.
    """
    if race.stated:
        return
    for number, (ours, truth) in enumerate(race.pairs(race.ours(), race.theirs())):
        if ours.shape != truth.shape:
            raise DifferentError(f"result {number}: ours is {tuple(ours.shape)}, theirs {tuple(truth.shape)}")
        ours, truth = ours.detach().double(), truth.detach().double()
        error = ((ours - truth).abs().max() / truth.abs().max()).item()
        if not error <= race.tolerance:  # NaN is no agreement
            raise DifferentError(f"result {number}: relative error {error:.1e}, allowed {race.tolerance:.0e}")


def times(race: Race, seconds: float) -> Times:
    """Ours, theirs, ours, theirs, ... for about so many seconds, with the garbage collector off."""
    theirs = (lambda repeats: race.theirs()) if race.stated else _timed(race.theirs)
    ours = _timed(race.ours)
    gc.collect()
    gc.disable()
    try:
        first = ours(1), theirs(1)  # warms up
        if seconds == 0:
            return Times([first[0]], [first[1]])
        repeats = math.ceil(SAMPLE / min(first))
        found = Times([], [])
        end = time.perf_counter() + seconds
        while len(found.ours) < FEWEST or time.perf_counter() < end:
            found.ours.append(ours(repeats))
            found.theirs.append(theirs(repeats))
    finally:
        gc.enable()
    return found


def _timed(work: Callable[[], object]) -> Callable[[int], float]:
    def seconds(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats

    return seconds
