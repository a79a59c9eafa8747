"""Saved recordings: what comes back, and what broken and hostile files are told."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.observe import Seen

safetensors = pytest.importorskip("safetensors.torch", reason="needs the hf extra")

STATISTICS: dict[str, Any] = {
    "lse": True,
    "entropy": True,
    "received": True,
    "offsets": [0, 2],
    "mass": {"a.b": torch.eye(11, dtype=torch.bool)[:1]},
    "top_k": 3,
    "pooled": 4,
    "key": True,
    "scores": ch.At(heads=[0, -1], queries=slice(2, 9, 3), keys=4),
    "masked_scores": ch.At(last_real=True),
}
MANY = torch.tensor([11, 5])


def recorded(**observe: Any) -> ch.Recording:
    torch.manual_seed(0)
    layers = nn.ModuleDict({"a": ch.MultiHeadAttention(12, 3), "b": ch.MultiHeadAttention(12, 4)})
    with torch.no_grad(), ch.record(layers, ch.Observe(**(observe or STATISTICS))) as recording:
        for name in ("a", "b", "b"):
            layers[name](torch.randn(2, 11, 12), mask=ch.Causal() & ch.KeyPadding(MANY, side="left"))
    return recording


def flat(seen: Seen) -> dict[str, Tensor]:
    found = {}
    for name, value in seen.items():
        parts = (
            value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, tuple) else {"": value}
        )
        found |= {f"{name} {key}": part for key, part in parts.items()}
    return found


@pytest.mark.parametrize("observe", [STATISTICS, {"weights": True, "entropy": True, "context": True}])
def test_what_comes_back_is_what_was_saved(tmp_path: Path, observe: dict[str, Any]) -> None:
    recording = recorded(**observe)
    recording.notes = {"texts": ["나는 \u2028"], "nested": [1, {"x": None}]}
    loaded = ch.Recording.load(recording.save(tmp_path / "seen.safetensors"))
    assert list(loaded) == list(recording) == ["a", "b"]
    assert loaded.notes == recording.notes
    for name in recording:
        assert len(loaded.calls(name)) == len(recording.calls(name)) == (2 if name == "b" else 1)
        for one, other in zip(loaded.calls(name), recording.calls(name), strict=True):
            assert one.sizes == other.sizes
            assert list(one) == list(other)
            assert torch.equal(one.alive, other.alive)
            before, after = flat(other), flat(one)
            assert list(before) == list(after)
            assert all(torch.equal(before[key], after[key]) for key in before)
            for field in ("offsets", "top_k", "weights", "scores", "masked_scores", "entropy"):
                assert getattr(one.observe, field) == getattr(other.observe, field)
    assert loaded.heads() == recording.heads()
    pages = [r.to_html(tmp_path / f"{number}.html") for number, r in enumerate((recording, loaded))]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    again = loaded.save(tmp_path / "again.safetensors")
    assert ch.Recording.load(again).heads() == recording.heads()
    if "lse" in observe:
        assert loaded.find("self") == recording.find("self")
    else:
        assert all(torch.equal(a, b) for a, b in zip(loaded.attentions, recording.attentions, strict=True))
        assert len(loaded["a"].plot(batch=1).axes) == 4


def test_other_programs_read_the_numbers_by_name(tmp_path: Path) -> None:
    recording = recorded()
    tensors = safetensors.load_file(recording.save(str(tmp_path / "seen.safetensors")))
    assert torch.equal(tensors["layer.0.entropy"], recording["a"].entropy)
    assert torch.equal(tensors["call.1.layer.1.mass.a.b"], recording["b"].mass["a.b"])
    assert torch.equal(tensors["layer.0.top_k.keys"], recording["a"].top_k[1])
    real = torch.arange(11) >= 11 - MANY[:, None]
    assert torch.equal(tensors["layer.0.alive"], real[:, None].expand(2, 3, 11))


def test_one_tensor_in_two_fields_and_views_are_saved(tmp_path: Path) -> None:
    recording = ch.Recording(["x"])
    both = torch.randn(1, 2, 3, 5).transpose(2, 3)
    recording.add(
        "x", Seen({"key": both, "value": both, "entropy": torch.ones(1).expand(1, 2, 5)}, None, (1, 2, 5, 5))
    )
    loaded = ch.Recording.load(recording.save(tmp_path / "seen.safetensors"))
    assert torch.equal(loaded["x"].key, both)
    assert torch.equal(loaded["x"].value, both)


def test_an_empty_recording_and_unusual_names(tmp_path: Path) -> None:
    nothing = ch.Recording.load(ch.Recording(["x"]).save(tmp_path / "nothing.safetensors"))
    assert len(nothing) == 0
    recording = ch.Recording(["../../etc/passwd", "", "layer.1.entropy"])
    for name in ("../../etc/passwd", "", "layer.1.entropy"):
        recording.add(
            name, Seen({"mass": {"../x": torch.ones(1, 2, 3), "": torch.ones(1, 2, 3)}}, None, (1, 2, 3, 3))
        )
    loaded = ch.Recording.load(recording.save(tmp_path / "names.safetensors"))
    assert list(loaded) == list(recording)
    assert loaded.heads() == recording.heads()
    assert {path.name for path in tmp_path.iterdir()} == {"nothing.safetensors", "names.safetensors"}


def test_files_are_replaced_only_when_told_and_never_left_half_written(tmp_path: Path) -> None:
    recording, path = recorded(entropy=True), tmp_path / "seen.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="choose another name, or pass overwrite=True"):
        recording.save(path)
    recording.notes = {"not": object()}
    with pytest.raises(ValueError, match="must be JSON"):
        recording.save(path, overwrite=True)
    recording.notes = {"lone": "\ud800"}
    with pytest.raises(ValueError, match="valid Unicode"):
        recording.save(path, overwrite=True)
    assert path.read_bytes() == b"mine"
    recording.notes = {}
    recording.save(path, overwrite=True)
    assert ch.Recording.load(path).heads() == recording.heads()
    assert os.listdir(tmp_path) == ["seen.safetensors"]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        recording.save(dangling)
    with pytest.raises(OSError):
        recording.save(tmp_path / "no" / "folder")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "seen.safetensors"]


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match="is no recording that can be read") as caught:
        ch.Recording.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ch.Recording.load(tmp_path / "nothing")
    for name, data in {
        "empty": b"",
        "text": b"hello " * 99,
        "zip": b"PK\x03\x04" + bytes(99),
        "huge header": (2**62).to_bytes(8, "little") + b"{}",
        "half a header": (20).to_bytes(8, "little") + b'{"a": ',
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        refused(path)
    assert "no regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe")
    safetensors.save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "its header has no 'clearhead'" in refused(tmp_path / "model.safetensors")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "evil").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path / "evil")
    assert not (tmp_path / "owned").exists()


def test_every_truncation_and_every_flipped_byte_of_the_header_is_an_error_or_harmless(tmp_path: Path) -> None:
    path = recorded(entropy=True, offsets=[1]).save(tmp_path / "seen.safetensors")
    data = path.read_bytes()
    broken = tmp_path / "broken"
    for length in [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]:
        broken.write_bytes(data[:length])
        refused(broken)
    end = 8 + int.from_bytes(data[:8], "little")
    outcomes = set()
    for at in range(0, end, 7):
        broken.write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        try:
            loaded = ch.Recording.load(broken)
        except ValueError as error:
            outcomes.add("refused")
            assert "is no recording that can be read" in str(error)  # noqa: PT017
        else:  # a name, or a number that nothing depends on
            outcomes.add("harmless")
            assert len(loaded.heads()) == 7
    assert "refused" in outcomes


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> str:
    """The message about a file whose header and tensors were changed."""
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["clearhead"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(header, tensors)
    hostile = path.with_name("hostile")
    safetensors.save_file(tensors, hostile, metadata={"clearhead": json.dumps(header)})
    return refused(hostile)


def put(tensors: dict[str, Tensor], name: str, value: Tensor) -> None:
    tensors[name] = value


CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "version": (lambda h, _: h.update(version=2), "its version is 2"),
    "a list": (lambda h, _: h.update(calls={}), "its calls are no list"),
    "notes": (lambda h, _: h.update(notes=[]), "its notes are no object"),
    "no layer": (lambda h, _: h["calls"][0].pop("layer"), "a call has no layer"),
    "order": (lambda h, _: h["calls"].reverse(), "out of order"),
    "twice": (lambda h, _: h["calls"].append(h["calls"][0]), "out of order"),
    "huge": (lambda h, _: h["calls"][0].update(sizes=[2, 2**40, 11, 11]), "sizes are not four counts"),
    "negative": (lambda h, _: h["calls"][0].update(sizes=[2, -3, 11, 11]), "sizes are not four counts"),
    "true": (lambda h, _: h["calls"][0].update(sizes=[2, True, 11, 11]), "sizes are not four counts"),
    "many heads": (lambda h, _: h["calls"][0].update(sizes=[2, 10**7, 11, 11]), "does not fit"),
    "nothing": (lambda h, _: h["calls"][0].update(sizes=[0, 10**7, 0, 0], fields={}), "alive is no bool"),
    "unknown field": (lambda h, _: h["calls"][0]["fields"].update(evil=None), "there is no field 'evil'"),
    "grad": (lambda h, _: h["calls"][0]["observe"].update(grad=True), "Observe has no field 'grad'"),
    "bad value": (lambda h, _: h["calls"][0]["observe"].update(top_k=-1), r"observe can't be"),
    "bad at": (lambda h, _: h["calls"][0]["observe"].update(scores={"evil": 1}), r"observe can't be"),
    "bad slice": (lambda h, _: h["calls"][0]["observe"].update(scores={"heads": {"slice": [1, 2, 3, 4]}}), "observe"),
    "many offsets": (lambda h, _: h["calls"][0]["observe"].update(offsets=[0, 1, 2]), "offsets .* does not fit"),
    "missing": (lambda _, t: t.pop("layer.0.entropy"), "'layer.0.entropy' is missing"),
    "left over": (lambda _, t: put(t, "layer.9.entropy", torch.ones(1)), "'layer.9.entropy' belongs to no call"),
    "shape": (lambda _, t: put(t, "layer.0.entropy", torch.ones(2, 3, 10)), "entropy .* does not fit"),
    "axes": (lambda _, t: put(t, "layer.0.entropy", torch.ones(66)), "entropy .* does not fit"),
    "no axes": (lambda _, t: put(t, "layer.0.entropy", torch.tensor(1.0)), "entropy .* does not fit"),
    "dtype": (
        lambda _, t: put(t, "layer.0.entropy", torch.ones(2, 3, 11, dtype=torch.int64)),
        "entropy is torch.int64",
    ),
    "keys": (lambda _, t: t["layer.0.top_k.keys"].fill_(11), "top_k names keys from 11 to 11, and there are 11"),
    "pooled": (lambda _, t: put(t, "layer.0.pooled.max", torch.ones(2, 3, 5, 4)), "pooled .* does not fit"),
    "visible": (lambda _, t: put(t, "layer.0.visible", torch.ones(1, 1, 9, 9).bool()), "visible has another shape"),
    "alive": (lambda _, t: put(t, "layer.0.alive", torch.ones(2, 1, 11).bool()), "alive is no bool"),
    "parts": (lambda h, _: h["calls"][0]["fields"].update(entropy=["x"]), "entropy is one tensor"),
    "no parts": (lambda h, _: h["calls"][0]["fields"].update(top_k=None), "top_k names no parts"),
    "other parts": (
        lambda h, _: h["calls"][0]["fields"].update(top_k=["keys", "weights"]),
        "other parts than its own",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_hostile_files_are_told_what_is_wrong(tmp_path: Path, case: str) -> None:
    change, message = CHANGES[case]
    path = recorded().save(tmp_path / "seen.safetensors")

    assert re.search(message, changed(path, change))


def test_deep_headers_and_shapes_beyond_the_file_are_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    safetensors.save_file({}, tmp_path / "deep", metadata={"clearhead": deep})
    refused(tmp_path / "deep")
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    (tmp_path / "wide").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path / "wide")
    empty = json.dumps(
        {
            "__metadata__": {
                "clearhead": json.dumps(
                    {
                        "version": 1,
                        "notes": {},
                        "calls": [
                            {"layer": "x", "call": 0, "sizes": [0, 3, 5, 5], "observe": {}, "fields": {"lse": None}}
                        ],
                    }
                )
            },
            "layer.0.lse": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]},
            "layer.0.alive": {"dtype": "BOOL", "shape": [0, 3, 5], "data_offsets": [0, 0]},
        }
    ).encode()
    (tmp_path / "empty").write_bytes(len(empty).to_bytes(8, "little") + empty)
    refused(tmp_path / "empty")


def test_without_safetensors_an_error_says_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (recorded(entropy=True).save, ch.Recording.load):
        with pytest.raises(ImportError, match=r"pip install 'clearhead\[hf\]'"):
            call(tmp_path / "x")
