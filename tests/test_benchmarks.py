"""The harness of `make bench`: it refuses to race different work, and its memory is the process's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from benchmarks import harness, memory, rows, run, table
from benchmarks.fresh import fresh
from benchmarks.harness import DifferentError, Times
from benchmarks.race import Race, Row, UnavailableError
from benchmarks.rows import forward, looking, training

import clearhead as ch

ROWS = rows.all_rows()
MIB = 1 << 20


def row(build: Callable[[], Race], **options: object) -> Row:
    return replace(Row("group", "work", "peer", build), **options)


def sleeping(ours: float, theirs: float, calls: list[str]) -> Race:
    def sleep(name: str, seconds: float) -> torch.Tensor:
        calls.append(name)
        time.sleep(seconds)
        return torch.ones(1)

    return Race(partial(sleep, "ours", ours), partial(sleep, "theirs", theirs))


def test_ratio_and_order_of_a_race_that_is_known() -> None:
    calls: list[str] = []
    found = harness.times(sleeping(0.004, 0.016, calls), 0.2)
    assert len(found.ours) == len(found.theirs) >= harness.FEWEST
    assert calls == ["ours", "theirs"] * (len(calls) // 2)
    assert 0.2 < found.median < 0.5  # a busy machine only adds to both
    assert min(found.ours) >= 0.004


def test_at_least_five_rounds_however_short_the_time() -> None:
    assert len(harness.times(sleeping(0.002, 0.002, []), 1e-6).ours) == harness.FEWEST


def test_stated_seconds_are_taken_as_they_are() -> None:
    race = Race(lambda: time.sleep(0.002), lambda: 0.25, stated=True)
    assert set(harness.times(race, 0.01).theirs) == {0.25}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.001])),
        (torch.ones(3), torch.ones(1)),
        (torch.full((3,), torch.nan), torch.ones(3)),
        ([torch.ones(3), torch.zeros(2)], [torch.ones(3), torch.ones(2)]),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
    ],
)
def test_different_work_is_refused(ours: object, theirs: object) -> None:
    with pytest.raises((DifferentError, ValueError)):
        harness.prove_same_work(Race(lambda: ours, lambda: theirs))


def sabotaged(race: Race) -> list[Race]:
    """The same race, ours with one thing wrong."""
    attention = race.ours.func
    q, k, v, *rest = race.ours.args

    def wrong(q: torch.Tensor, *options: object) -> object:
        return partial(attention, q, k, v, *options, **race.ours.keywords)

    return [replace(race, ours=call) for call in (wrong(q * 1.01, *rest), wrong(q, ch.Window(left=40)))]


@pytest.mark.parametrize(
    "build", [partial(forward.dense, 67), partial(looking.keeping, 67), partial(forward.causal, 67)]
)
def test_a_wrong_scale_or_mask_is_different_work(build: Callable[[], Race]) -> None:
    torch.manual_seed(0)
    race = build()
    harness.prove_same_work(race)
    for wrong in sabotaged(race):
        with pytest.raises(DifferentError):
            harness.prove_same_work(wrong)


@pytest.mark.parametrize("dropped", ["forward", "backward", "nothing"])
def test_dropout_that_is_left_out_is_different_work(dropped: str) -> None:
    torch.manual_seed(0)
    race = training.dropping(257)
    _, leaves, upstream = race.ours.args
    dropping, keeping = partial(ch.attention, dropout_p=0.1), ch.attention

    def ours() -> tuple[torch.Tensor, ...]:
        out, *_ = training.both(dropping if dropped == "forward" else keeping, leaves, upstream)
        _, *gradients = training.both(dropping if dropped == "backward" else keeping, leaves, upstream)
        return out, *gradients

    race = replace(race, tolerance=0.03)  # a smaller sample than the row's
    harness.prove_same_work(race)
    with pytest.raises(DifferentError):
        harness.prove_same_work(replace(race, ours=ours))


def test_looking_must_not_change_the_output() -> None:
    race = looking.looking(67)
    harness.prove_same_work(race)
    with pytest.raises(AssertionError, match="changed the output"):
        harness.prove_same_work(replace(race, theirs=lambda: race.theirs() * (1 + 1e-6)))


def allocating(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MIB // 4)


def known_memory() -> Race:
    return Race(partial(allocating, 96), partial(allocating, 32))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the size of a process is read from /proc")
def test_memory_is_what_the_process_grows_by() -> None:
    peak = allocating(400)  # neither what this process had, nor what it has, counts
    ours, theirs = memory.extra_memory(row(known_memory), 1)
    assert peak.numel() == 100 * MIB
    # The system counts pages in batches: a few hundred KiB are missing or too many.
    assert 95 * MIB <= ours <= 104 * MIB
    assert 31 * MIB <= theirs <= 40 * MIB


def isa_asked() -> str:
    import os

    return os.environ["CLEARHEAD_ISA"]


def test_a_fresh_process_gets_its_environment_and_passes_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
    assert fresh({"CLEARHEAD_ISA": "avx2"}, isa_asked) == "avx2"
    with pytest.raises(KeyError):
        fresh({}, isa_asked)


def unavailable() -> Race:
    raise UnavailableError("needs a peer that isn't here")


def failing() -> Race:
    raise OSError("no such luck")


def different() -> Race:
    return Race(partial(torch.ones, 2), partial(torch.zeros, 2))


@pytest.mark.parametrize(
    ("build", "note", "failed"),
    [
        (unavailable, "skipped: needs a peer that isn't here", False),
        (failing, "FAILED: OSError: no such luck", True),
        (different, "DIFFERENT WORK: result 0: relative error inf, allowed 2e-05", True),
    ],
)
def test_a_row_that_cannot_be_measured_says_why(build: Callable[[], Race], note: str, failed: bool) -> None:
    (line,) = run.lines_of(row(build, target=0.5), [1], 0.0)
    assert (line.holds, line.failed) == (note, failed)
    assert "0 of 1 lines" in table.summary([line])


@pytest.mark.parametrize(
    ("ratio", "share", "holds"), [(0.6, False, "no"), (0.5, False, "yes"), (1.25, True, "yes"), (1.5, True, "no")]
)
def test_holds(ratio: float, share: bool, holds: str) -> None:
    target = 0.7 if share else 0.5
    found = {1: Times([0.1], [1.0]) if not share else Times([1.0], [1.0]), 2: Times([ratio, ratio, 9.0], [1.0] * 3)}
    line = table.timed(row(different, target=target, share=share), found)
    assert line.holds == holds
    markdown = table.as_markdown({"head": "facts"}, [line], [1, 2])
    assert (f"**{1 / ratio if share else ratio:.2f}**" in markdown) == (holds == "no")


def test_memory_holds_by_its_share() -> None:
    small = row(different, memory=1 / 50)
    assert table.remembered(small, 2 * MIB, 100 * MIB, 2).holds == "yes"
    assert table.remembered(small, 3 * MIB, 100 * MIB, 2).holds == "no"


def test_rows_are_chosen_by_group() -> None:
    assert {row.group for row in run.chosen(ROWS, "dense, decode")} == {"dense", "decode"}
    assert {row.group for row in run.chosen(ROWS, "")} == {row.group for row in ROWS} - {"smollm2"}
    assert {row.group for row in run.chosen(ROWS, "smollm2")} == {"smollm2"}  # it takes minutes
    with pytest.raises(typer.BadParameter, match="there is no nonsense: choose from dense, causal"):
        run.chosen(ROWS, "dense,nonsense")


def test_the_table_goes_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.START}\nold\n{table.END}\nafter\n")
    table.write(readme, "new")
    assert readme.read_text() == f"before\n{table.START}\nnew\n{table.END}\nafter\n"
    other = tmp_path / "notes.md"
    other.write_text("mine")
    with pytest.raises(FileExistsError):
        table.write(other, "new")
    assert other.read_text() == "mine"


def test_the_readme_has_a_place_for_the_table() -> None:
    text = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text()
    assert text.count(table.START) == text.count(table.END) == 1
