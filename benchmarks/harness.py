"""Ratios of two ways to do the same work, measured interleaved in one process."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Race:
    """Ours against a peer on the same work; both take no arguments."""

    work: str
    peer: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


@dataclass(frozen=True)
class Result:
    race: Race
    ours: list[float]
    theirs: list[float]

    @property
    def row(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        low = min(self.ours) / min(self.theirs)
        return (
            f"| {self.race.work} | {self.race.peer} | {ours / theirs:.2f} | {low:.2f} | {ours * 1e3:.2f} | "
            f"{theirs * 1e3:.2f} |"
        )


def run(races: list[Race], *, rounds: int = 15, warmup: int = 3) -> list[Result]:
    results = []
    for race in tqdm(races, desc="races", unit="race"):
        result = Result(race, [], [])
        for number in range(warmup + rounds):
            # Who goes first alternates: neither always finds the caches of the other.
            pairs = [(race.ours, result.ours), (race.theirs, result.theirs)]
            for work, times in pairs if number % 2 else reversed(pairs):
                start = time.perf_counter()
                work()
                if number >= warmup:
                    times.append(time.perf_counter() - start)
        results.append(result)
    return results


def report(results: list[Result]) -> str:
    head = (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}\n\n"
        "Ratio = our time / peer's time; below 1 we are faster. Times in milliseconds, medians.\n\n"
        "| work | peer | ratio of medians | ratio of minima | ours | peer's |\n|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(result.row for result in results)])
