"""`clearhead mask`: what it draws, counts and explains, and what it refuses."""

import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from clearhead.cli import app


def run(*arguments, **env):
    return CliRunner().invoke(app, ["mask", *arguments], env={"COLUMNS": "100"} | env)


def drawn(text):
    """The picture's rows, as label and cells."""
    lines = [re.fullmatch(r" *(\d+) ([■·▒ ]+)", line) for line in text.splitlines()]
    return [(int(line[1]), line[2].split()) for line in lines if line]


def assert_one_line(result, message):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.fullmatch(r"Error: [^\n]+\n", result.stderr), result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.rstrip("\n").isprintable()
    assert len(result.stderr) < 700


def test_draws_the_batch_item_asked_for():
    lengths = [7, 3, 5]
    for batch in (0, 1, 2, -1):
        result = run(f"Causal() & KeyPadding(lengths={lengths})", "-L", "5", "-S", "7", "--batch", str(batch))
        assert result.exit_code == 0, result.output
        # Query i of 5 sits at key position i + 2 of 7.
        expected = [["■" if k <= q + 2 and k < lengths[batch] else "·" for k in range(7)] for q in range(5)]
        assert drawn(result.stdout) == list(enumerate(expected))
        assert f"batch item {batch % 3} of 3" in result.stdout
    assert result.stdout.startswith("Causal() & KeyPadding(lengths=[7, 3, 5])\n")
    assert "  0 1 2 3 4 5 6\n0 ■" in result.stdout


def test_draws_the_head_asked_for():
    mask = "Allowed([[[True, False, True]], [[False, True, True]]], axes='hqk')"
    assert drawn(run(mask, "-L", "1", "-S", "3", "--head", "0").stdout) == [(0, ["■", "·", "■"])]
    assert drawn(run(mask, "-L", "1", "-S", "3", "--head", "1").stdout) == [(0, ["·", "■", "■"])]


def test_as_many_keys_as_queries_if_not_given():
    assert [len(cells) for _, cells in drawn(run("Causal()", "-L", "7").stdout)] == [7] * 7


def test_the_visible_share_by_item_and_in_all():
    result = run("KeyPadding([2, 3, 5])", "-L", "7", "-S", "5")
    assert "visible: 66.67 % of 3 batch items x 7 queries x 5 keys\n" in result.stdout  # (2 + 3 + 5) / 15
    assert re.findall(r"item (\d)  (\S+ %)", result.stdout) == [("0", "40.00 %"), ("1", "60.00 %"), ("2", "100.00 %")]


def test_items_of_equal_share_are_not_listed():
    result = run("KeyPadding([2, 2])", "-L", "3")
    assert "visible: 66.67 % of 2 batch items x 3 queries x 3 keys\n" in result.stdout
    assert "item 0  " not in result.stdout


def test_many_items_are_summed_up():
    result = run(f"KeyPadding({[1] * 17 + [4, 2]})", "-L", "2", "-S", "4")
    listed = re.findall(r"item +(\d+)  (\S+ %)", result.stdout)
    assert sorted(int(item) for item, _ in listed) == list(range(16))
    assert "and 3 more; all are between 25.00 % and 100.00 %" in result.stdout


@pytest.mark.parametrize(
    ("mask", "S", "share"),
    [
        ("Prefix(2)", "7", "28.57 %"),
        ("Causal() & ~Causal()", "7", "0.00 %"),
        ("Causal() | ~Causal()", "7", "100.00 %"),
        ("Prefix(1)", "100000", "less than 0.01 %"),
        ("~Prefix(1)", "100000", "more than 99.99 %"),
    ],
)
def test_something_is_never_rounded_to_nothing(mask, S, share):
    assert f"visible: {share} of 2 queries" in run(mask, "-L", "2", "-S", S).stdout


@pytest.mark.parametrize(
    ("pair", "batch", "expected"),
    [
        ("3,5", 1, ["query 3 may NOT attend to key 5 (batch 1, head 0)", "no   Causal()", "no   KeyPadding"]),
        ("3, 2", 1, ["query 3 may attend to key 2 (batch 1, head 0)", "yes  Causal()", "yes  KeyPadding"]),
        ("-1,-1", 0, ["query 7 may attend to key 7 (batch 0, head 0)", "yes  Causal()", "yes  KeyPadding"]),
        ("-1,-1", 1, ["query 7 may NOT attend to key 7 (batch 1, head 0)", "yes  Causal()", "no   KeyPadding"]),
    ],
)
def test_explains_a_pair(pair, batch, expected):
    result = run("Causal() & KeyPadding([8, 5])", "-L", "8", "--explain", pair, "--batch", str(batch))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()[-3:]
    assert [line.strip().startswith(start) for line, start in zip(lines, expected, strict=True)] == [True] * 3


def test_a_large_mask_is_pooled():
    result = run("Causal()", "-L", "640")
    rows = drawn(result.stdout)
    assert [label for label, _ in rows] == list(range(0, 640, 20))
    assert [cells for _, cells in rows] == [["■"] * i + ["▒"] + ["·"] * (31 - i) for i in range(32)]
    assert "a cell is about 20 x 20 pairs" in result.stdout
    assert "▒ some of the cell's pairs may" in result.stdout
    assert "visible: 50.08 % of 640 queries x 640 keys" in result.stdout  # 641 / 1280


@pytest.mark.parametrize(("L", "S"), [(1, 1), (2, 47), (47, 2), (48, 48), (100, 99), (99_999, 5), (3, 100_000)])
def test_fits_a_terminal_of_100_columns(L, S):
    result = run("Window(left=3)", "-L", str(L), "-S", str(S))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert drawn(result.stdout)


def test_too_many_pairs_are_not_looked_at_one_by_one():
    start = time.perf_counter()
    result = run("Causal()", "-L", "100000", "--explain", "70000,70001")
    assert time.perf_counter() - start < 5  # 10 ** 10 pairs take longer
    assert result.exit_code == 0
    assert "visible: not drawn or counted, 10,000,000,000 pairs are more than the 500,000,000" in result.stdout
    assert "query 70000 may NOT attend to key 70001" in result.stdout


def test_an_item_is_drawn_where_the_batch_is_too_many():
    result = run(f"KeyPadding({[3] * 2500})", "-L", "1000")
    assert len(drawn(result.stdout)) == 32
    assert "visible: not counted, 2,500,000,000 pairs are more than" in result.stdout


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("~" * 200_000, "200,000 characters are more than the 10,000"),
        ("Causal()" + "&Causal()" * 5_000, "characters are more than"),
        ("Causal()" + "&Causal()" * 1_000, "1,000 levels or operators are more than the 50"),
        ("~" * 5_000 + "Causal()", "5,000 levels or operators"),
        ("(" * 4_000 + "Causal()" + ")" * 4_000, "levels or operators"),
        ("KeyPadding(" + "[" * 3_000 + "]" * 3_000 + ")", "levels or operators"),
        ("KeyPadding(" + "-" * 9_000 + "1)", "mask expression"),
        ("__import__('os').system('x')", "only masks"),
        ("__import__('os')", "'__import__' is not a mask"),
        ("Causal().__class__", "only masks"),
        ("Causal()()", "only masks"),
        ("(lambda: 1)()", "only masks"),
        ("[Causal() for x in (1,)][0]", "only masks"),
        ("Prefix(exec('1'))", "arguments must be"),
        ("Prefix(open)", "arguments must be"),
        ("f'{Causal()}'", "only masks"),
        ("Prefix(f'{1}')", "arguments must be"),
        ("((Causal()", "never closed"),
        ("Causal())", "unmatched"),
        ("Causal(", "never closed"),
        ("Causal() and Causal()", "with & | ~"),
        ("Causal() & 1", "only masks"),
        ("Causal", "call it"),
        ("Causal(x=1)", "unexpected keyword argument 'x'"),
        ("Causal(*[1])", "arguments must be"),
        ("Causal(**{'align': 'end'})", r"\*\* is not allowed"),
        ("", "mask expression"),
        ("   ", "mask expression"),
        ("Causal()\x00", "mask expression"),
        ("Causal()\udcff", "mask expression"),
        ("Causal('\udcff')", "mask expression"),
        ("Causal(align='\x1b[31m')", "Causal"),
        ("\x1b]0;title\x07", "mask expression"),
        ("Causal(align='[bold red]x[/]')", r"not '\[bold red\]x\[/\]'"),
        ("Causal(align='\u202eend')", "Causal"),
        ("Causal(align='\\d')", "Causal"),
        ("Causal()\nCausal()", "mask expression"),
        ("Prefix(" + "9" * 9_900 + ")", "digits"),
        ("Prefix(0x" + "f" * 9_900 + ")", "number|digits"),
        ("Prefix(99999999999999999999)", "too large a number"),
        ("Prefix(1e400)", "integers"),
        ("Prefix(1j)", "integers"),
        ("Prefix(None)", "Prefix"),
        ("KeyPadding(...)", "KeyPadding"),
        ("KeyPadding([[1], [2, 3]])", "KeyPadding"),
        ("KeyPadding([-1])", "lengths must be >= 0"),
        ("KeyPadding([11])", "11 is more than the 10 keys"),
        ("Prefix(11)", "a prefix of 11 keys is longer than the 10"),
        ("KeyPadding(real=[[1, 0]])", "is for 2 keys, but the inputs have 10"),
        ("Segments([0, 0, 1])", "3 queries"),
        ("Allowed([[True, False, True]], axes='qk')", "3 keys"),
        ("KeyPadding([1, 2]) & KeyPadding([1, 2, 3])", "must agree in batch|is for 3 batch"),
        ("KeyPadding(lengths=[])", "empty|nothing to draw"),
        ("KeyPadding(" + str([11] * 2_000) + ")", "11 is more than the 10 keys"),
    ],
)
def test_a_hostile_expression_is_one_line_and_fast(mask, message):
    start = time.perf_counter()
    result = run(mask, "-L", "10")
    assert time.perf_counter() - start < 2
    assert_one_line(result, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-L", "0"], "-L must be between 1 and 100,000, not 0"),
        (["-L", "100001"], "-L must be between 1 and 100,000, not 100,001"),
        (["-S", "0"], "-S must be between 1 and 100,000, not 0"),
        (["-S", "-5"], "-S must be between 1 and 100,000, not -5"),
        (["-L", "1" + "0" * 3_000], "-L must be between 1 and 100,000"),
        (["--batch", "2"], "batch 2 is out of range: there are 2"),
        (["--batch", "-3"], "batch -3 is out of range"),
        (["--batch", "1" + "0" * 3_000], "--batch .* is out of range"),
        (["--head", "1" + "0" * 30], "--head .* is out of range"),
        (["--explain", "3"], "--explain takes a query and a key, such as 3,5; not '3'"),
        (["--explain", "3,5,7"], "--explain takes"),
        (["--explain", "a,b"], "--explain takes"),
        (["--explain", ""], "--explain takes"),
        (["--explain", "--,1"], "--explain takes"),
        (["--explain", "１,2"], "--explain takes"),
        (["--explain", "\x1b[31m,1"], "--explain takes"),
        (["--explain", "9" * 10_000 + ",1"], "--explain takes"),
        (["--explain", "10,0"], "query 10 is out of range: there are 10"),
        (["--explain", "0,-11"], "key -11 is out of range"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message):
    assert_one_line(run("KeyPadding([5, 7])", *arguments), message)


@pytest.mark.parametrize("arguments", [[], ["Causal()", "Causal()"], ["Causal()", "-L", "x"], ["-x"]])
def test_a_wrong_call_is_a_usage_error(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_no_colour():
    arguments = ("Causal()", "-L", "3")
    plain = run(*arguments).stdout
    assert "\x1b" not in plain
    coloured = run(*arguments, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[36m" in coloured
    without = run(*arguments, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[(?:\d;)*[34]\d", without)
    for text in (coloured, without):
        assert re.sub(r"\x1b\[[\d;]*m", "", text) == plain


def test_as_a_program():
    command = [sys.executable, "-m", "clearhead", "mask"]
    done = subprocess.run([*command, "Causal()", "-L", "3"], capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert drawn(done.stdout) == [(0, ["■", "·", "·"]), (1, ["■", "■", "·"]), (2, ["■", "■", "■"])]
    # Bytes that are no text arrive as lone surrogates; a backslash makes Python's parser warn.
    done = subprocess.run([*command, b"Causal('\\d\xff')"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"Error: ")
    assert done.stderr.count(b"\n") == 1
