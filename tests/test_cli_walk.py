"""`clearhead walk`: its shapes against the published ones, its numbers against loops in NumPy."""

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.journey import published

EXAMPLE = json.loads((Path(__file__).parent / "data" / "masked_attention_table.json").read_text())
WIDE = {"COLUMNS": "100"}


def run(*arguments, **env):
    return CliRunner().invoke(app, ["walk", *arguments], env=WIDE | env)


def steps(text):
    """The output cut into steps: name -> (shape, lines)."""
    found, lines = {}, []
    for line in text.splitlines():
        if match := re.fullmatch(r"── \d+\. (.+?) ─+ \((.+)\)", line):
            lines = []
            found[match[1]] = (tuple(map(int, match[2].split(","))), lines)
        else:
            lines.append(line)
    return found


def printed(lines, until=None, table=0):
    """A table under the title "in numbers", NaN where hidden; `until` is the title to the right of it."""
    top = next(i for i, line in enumerate(lines) if "in numbers" in line)
    left = [match.start() for match in re.finditer("in numbers", lines[top])][table]
    right = lines[top].index(until) if until else None
    rows = []
    for line in lines[top + 2 :]:
        part = line[left:right].strip()
        if not re.fullmatch(r"(\d+ +)?((-?\d+\.\d+|·)( +|$))+", part):  # a row's label may be in front
            break
        cells = [cell for cell in part.split() if not cell.isdigit()]
        rows.append([np.nan if cell == "·" else float(cell) for cell in cells])
    return np.array(rows)


@pytest.fixture(scope="module")
def walked():
    result = run()
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def learner(walked):
    """What someone holds who types the printed code."""
    names = {
        "torch": torch,
        "ch": ch,
        "sequences": EXAMPLE["sequences"],
        "target_sequences": EXAMPLE["target_sequences"],
    }
    for name, (_, lines) in steps(walked).items():
        if not name.startswith("check"):
            for line in lines:
                if line.startswith("  >>> "):
                    exec(line.removeprefix("  >>> "), names)
    return names


@pytest.fixture(scope="module")
def by_hand(learner):
    """Self-attention of item 0, head 0 in float64 loops, from nothing but the parameters."""
    ids = EXAMPLE["sequences"][0] + [0, 0]
    parameters = {n: p.detach().double().numpy() for n, p in learner["mha"].named_parameters()}
    x = learner["embedding"].weight.detach().double().numpy()[ids]
    q, k, v = (x @ parameters[f"{n}_proj.weight"].T + parameters[f"{n}_proj.bias"] for n in "qkv")
    scores, weights, context = np.zeros((2, 10, 10)), np.zeros((2, 10, 10)), np.zeros((10, 8))
    for h in range(2):
        for i in range(10):
            for j in range(10):
                scores[h, i, j] = sum(q[i, 4 * h + e] * k[j, 4 * h + e] for e in range(4)) / 2
            seen = [j for j in range(10) if j <= i and j < 8]
            total = sum(np.exp(scores[h, i, j]) for j in seen)
            for j in seen:
                weights[h, i, j] = np.exp(scores[h, i, j]) / total
                context[i, 4 * h : 4 * h + 4] += weights[h, i, j] * v[j, 4 * h : 4 * h + 4]
    y = context @ parameters["out_proj.weight"].T + parameters["out_proj.bias"]
    return {"x": x, "q": q, "scores": scores, "weights": weights, "context": context, "y": y}


def test_the_shapes_are_the_published_ones(walked):
    shapes = {name: shape for name, (shape, _) in steps(walked).items()}
    expected = {name: tuple(shape) for name, shape in EXAMPLE["shapes"].items()}
    assert shapes["pad"] == (5, 10)
    B, L, S = expected["mask"]
    assert shapes["mask"] == (B, 1, L, S)
    assert shapes["embed"] == shapes["project: q, k, v"] == shapes["merge the heads"] == expected["embedded"]
    assert shapes["split into heads"] == expected["q_k_v_split"]
    assert shapes["scores"] == shapes["masked scores"] == shapes["softmax: the weights"] == expected["scores"]
    assert shapes["context"] == expected["context"]
    assert shapes["output projection"] == expected["embedded"]
    assert shapes["cross-attention: the targets"] == expected["target"]
    assert shapes["cross-attention: q of the targets"] == expected["cross_q_split"]
    assert shapes["cross-attention: the weights"] == expected["cross_scores"]
    assert shapes["cross-attention: context"] == expected["cross_context"]
    assert shapes["cross-attention: output"] == (5, 12, 8)


def test_the_step_shapes_are_those_of_the_printed_code(walked, learner):
    shapes = {name: shape for name, (shape, _) in steps(walked).items()}
    assert learner["y"].shape == shapes["output projection"]
    assert learner["z"].shape == shapes["cross-attention: output"]
    assert learner["mask"].dense(10, 10).shape == shapes["mask"]


@pytest.mark.parametrize(
    ("step", "part", "half_digit"),
    [
        ("embed", lambda hand: hand["x"], 0.005),
        ("split into heads", lambda hand: hand["q"], 0.005),
        ("scores", lambda hand: hand["scores"][0], 0.005),
        ("context", lambda hand: hand["context"][:, :4], 0.005),
        ("merge the heads", lambda hand: hand["context"], 0.005),
        ("output projection", lambda hand: hand["y"], 0.005),
    ],
)
def test_numbers_equal_a_computation_by_hand(walked, by_hand, step, part, half_digit):
    lines = steps(walked)[step][1]
    if step == "split into heads":
        numbers = np.concatenate([printed(lines, until="q, head 1"), printed(lines, table=1)], axis=1)
    else:
        numbers = printed(lines)
    assert numbers.shape == part(by_hand).shape
    assert np.abs(numbers - part(by_hand)).max() <= half_digit + 1e-6


@pytest.mark.parametrize("step", ["masked scores", "softmax: the weights"])
def test_hidden_pairs_are_dots_and_the_others_numbers(walked, by_hand, step):
    numbers = printed(steps(walked)[step][1])
    causal = np.tril(np.ones((10, 10), bool))
    causal[:, 8:] = False
    assert (np.isnan(numbers) == ~causal).all()
    name, half_digit = ("scores", 0.005) if step == "masked scores" else ("weights", 0.0005)
    assert np.abs(numbers - by_hand[name][0])[causal].max() <= half_digit + 1e-6


def test_cross_attention_hides_the_sources_padding(walked, learner):
    numbers = printed(steps(walked)["cross-attention: the weights"][1])
    cross = {n: p.detach().double().numpy() for n, p in learner["cross"].named_parameters()}
    targets = EXAMPLE["target_sequences"][0] + [0] * 8
    t = learner["embedding"].weight.detach().double().numpy()[targets]
    y = learner["y"].detach().double().numpy()[0]
    q, k = t @ cross["q_proj.weight"].T[:, :4], y @ cross["k_proj.weight"].T[:, :4]  # the biases start at zero
    exponentials = np.exp(q @ k.T / 2)[:, :8]
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    assert numbers.shape == (12, 10)
    assert np.isnan(numbers[:, 8:]).all()
    assert np.abs(numbers[:, :8] - expected).max() <= 0.0005 + 1e-6


def test_the_drawn_mask_hides_what_the_published_table_hides(walked):
    lines = steps(walked)["mask"][1]
    top = next(i for i, line in enumerate(lines) if "both, by &" in line)
    left = lines[top].index("both, by &")
    drawn = [[cell == "■" for cell in line[left:].split()[1:]] for line in lines[top + 2 : top + 12]]
    assert drawn == [[score is not None for score in row] for row in EXAMPLE["tables"][0]["scores"]]


def test_the_padded_batch_is_shown(walked):
    lines = [line.split()[1:] for line in steps(walked)["pad"][1] if re.match(r" *\d+ +\d", line)]
    assert lines == [[*map(str, ids), *"·" * (10 - len(ids))] for ids in EXAMPLE["sequences"]]


def test_shades_follow_the_legend(walked):
    lines = steps(walked)["softmax: the weights"][1]
    numbers = printed(lines)
    top = next(i for i, line in enumerate(lines) if "in numbers" in line)
    for row, line in enumerate(lines[top + 2 : top + 12]):
        for column in range(10):
            cell, weight = line[3 + 3 * column :][:2], numbers[row, column]
            steps_up = [1.1, 0.4, 0.2, 0.1, 0.05, 0.0]
            if np.isnan(weight):
                assert cell == "· "
            elif min(abs(weight - step) for step in steps_up) > 0.001:  # where rounding can't move it
                assert cell == "█▓▒░ "[[weight > step for step in steps_up[1:]].index(True)] * 2


def test_the_published_table_is_checked(walked):
    note = next(line for line in walked.splitlines() if line.startswith("largest difference"))
    worst = 0.0
    for table in EXAMPLE["tables"]:
        for scores, weights in zip(table["scores"], table["attention"], strict=True):
            seen = np.exp([s for s in scores if s is not None])
            worst = max(worst, np.abs(seen / seen.sum() - weights[: len(seen)]).max(), *weights[len(seen) :], 0.0)
    assert float(re.search(r"0\.\d+", note)[0]) == pytest.approx(worst, abs=1e-6)
    assert worst < 1e-4
    assert "they agree" in note


@pytest.mark.parametrize(("field", "change"), [("attention", 0.001), ("scores", 0.01)])
def test_a_wrong_table_would_be_noticed(field, change):
    tables = json.loads(json.dumps(EXAMPLE["tables"]))
    tables[1][field][6][2] += change
    assert "they do NOT agree" in published(tables).notes[0]


def test_the_packaged_example_is_the_published_one():
    packaged = json.loads(resources.files("clearhead.cli").joinpath("walk.json").read_text(encoding="utf-8"))
    assert {"sequences", "target_sequences", "tables"} <= packaged.keys()
    assert packaged == {name: EXAMPLE[name] for name in packaged}


def test_the_seed_repeats_and_another_differs(walked):
    assert run("--seed", "0").stdout == walked
    other = steps(run("--seed", "1").stdout)
    assert np.abs(printed(other["scores"][1]) - printed(steps(walked)["scores"][1])).max() > 0.1


def test_the_global_generator_is_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["7"],
        ["5,7,11", "13,17"],
        ["3,5", "7,11"],
        [",".join(["98"] * length) for length in (32, 1, 31) * 5 + (2,)],
    ],
)
def test_fits_a_terminal_of_100_columns(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert len(steps(result.stdout)) == 17


def test_own_sequences_set_the_shapes():
    shapes = {name: shape for name, (shape, _) in steps(run("5, 7,11", "13", "17,19").stdout).items()}
    assert shapes["pad"] == (3, 3)
    assert shapes["scores"] == (3, 2, 3, 3)
    assert shapes["cross-attention: the weights"] == (3, 2, 12, 3)


def test_long_sequences_print_a_part_of_the_numbers():
    lines = steps(run(",".join(map(str, range(1, 24)))).stdout)["softmax: the weights"][1]
    assert any(line.endswith("(the first 12 x 14)") for line in lines)
    numbers = printed(lines)
    assert numbers.shape == (12, 14)
    assert np.nansum(numbers, axis=1) == pytest.approx(1, abs=12 * 0.0005)


def test_colour_only_repeats_what_the_shades_say(walked):
    ansi = re.compile(r"\x1b\[([0-9;]*)m")
    assert "\x1b" not in walked
    coloured = run(FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert ansi.sub("", coloured) == walked
    without = run(FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1").stdout
    assert ansi.sub("", without) == walked

    def colours(text):
        return {
            code for codes in ansi.findall(text) for code in codes.split(";") if code[:1] in "34" and len(code) > 1
        }

    assert colours(coloured)
    assert not colours(without)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0"], "sequence 1: ids are integers from 1 to 99"),
        (["5", "100"], "sequence 2: ids are integers from 1 to 99"),
        (["1,,2"], "not ''"),
        ([""], "not ''"),
        (["62;13"], "not '62;13'"),
        (["1.5"], "not '1.5'"),
        (["1_0"], "not '1_0'"),
        (["１２"], "ids are integers"),
        (["²"], "ids are integers"),
        (["9" * 10_000], "not '99999999999999999999'"),
        (["5,\x1b[31mred"], r"\\x1b\[31mred"),
        (["[bold]5[/bold]"], r"not '\[bold\]5\[/bold\]'"),
        (["\u202e5"], "ids are integers"),
        (["5\x00"], "ids are integers"),
        (["\udcff"], "ids are integers"),
        ([",".join(["5"] * 33)], "sequence 1 has 33 ids: at most 32"),
        (["1," * 100_000], "has 100,001 ids"),
        (["5"] * 17, "at most 16 sequences"),
        (["--seed", "-1"], "--seed must be an integer from 0"),
        (["--seed", str(2**63)], "--seed must be an integer from 0"),
    ],
)
def test_a_wrong_input_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"Error: [^\n]+\n", result.stderr)
    assert re.search(message, result.stderr)
    assert result.stderr.rstrip("\n").isprintable()
    assert len(result.stderr) < 700


@pytest.mark.parametrize("arguments", [["-5,3"], ["--sed", "1"], ["--seed", "x"], ["--seed", "9" * 10_000]])
def test_a_wrong_option_is_a_usage_error(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_terminal_without_shades_gets_ascii():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "walk", "5,7", "11"], capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    text = done.stdout.decode("ascii")
    assert "11 #  .\n" in text  # the first query's row of the causal mask
    assert "?" not in text.replace("match each key?", "")
