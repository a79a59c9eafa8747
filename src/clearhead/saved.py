"""Recordings as safetensors files: tensors by name, and a JSON header that says what they are. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.files import written
from clearhead.heads import GROUPS, Layers
from clearhead.observe import MAPS, MODULE, PER_KEY, PER_QUERY, SPLIT, At, Observe, Seen

VERSION = 1
HEADER = "clearhead"
PAIRS = {"top_k": ("weights", "keys"), "pooled": ("mean", "max")}
LARGEST = 2**24  # more heads, queries or keys than any call has
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NEEDS = "saving recordings needs safetensors: pip install 'clearhead[hf]'."


class UnreadableError(Exception):
    """Why a file is no recording."""


def save(path: Path, layers: Layers, notes: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write all calls of all layers.

    Raises:
        FileExistsError: the file exists, and may not be overwritten.
        ImportError: safetensors is not installed.
        ValueError: notes or names that JSON doesn't hold.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError(_NEEDS) from None
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    calls = []
    for number, (name, seens) in enumerate(layers):
        for call, seen in enumerate(seens):
            about, parts = _described(seen)
            calls.append({"layer": name, "call": call, **about})
            for key, part in parts.items():
                plain = part.detach().cpu().contiguous()
                if plain.untyped_storage().data_ptr() in storages:  # the format knows no views
                    plain = plain.clone()
                storages.add(plain.untyped_storage().data_ptr())
                tensors[_key(number, call, key)] = plain
    try:
        header = json.dumps({"version": VERSION, "notes": dict(notes), "calls": calls}, ensure_ascii=False)
        header.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes and names of a saved recording must be JSON and valid Unicode: {error}.") from None
    with written(path, overwrite=overwrite) as beside:
        try:
            save_file(tensors, beside, metadata={HEADER: header})
        except SafetensorError as error:  # a full disk
            raise OSError(f"can't write {path}: {error}") from None


def _key(number: int, call: int, name: str) -> str:
    """``layer.3.entropy``; of a layer's later calls ``call.1.layer.3.entropy``."""
    return f"call.{call}.layer.{number}.{name}" if call else f"layer.{number}.{name}"


def _described(seen: Seen) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the header says of a call, and its tensors by name."""
    parts: dict[str, Tensor] = {"alive": seen.alive}
    names: dict[str, list[str] | None] = {}
    for name, value in seen.items():
        if isinstance(value, Tensor):
            parts[name], names[name] = value, None
        else:
            inside = value if isinstance(value, dict) else dict(zip(PAIRS[name], value, strict=True))
            parts |= {f"{name}.{key}": part for key, part in inside.items()}
            names[name] = list(inside)
    if seen.whole_heads is not None:
        parts["visible"] = seen.visible()
    elif "pooled" in seen:
        parts["visible"] = seen.visible(seen.pooled[0].shape[-1])
    return {"sizes": list(seen.sizes), "fields": names, "observe": _asked(seen.observe)}, parts


def _asked(observe: Observe) -> dict[str, Any]:
    """What was asked for, as far as it is neither tensor nor mask."""
    asked: dict[str, Any] = {}
    for name in (f.name for f in fields(Observe)):
        value = getattr(observe, name)
        if isinstance(value, At):
            asked[name] = {
                "heads": _choice(value.heads),
                "queries": _choice(value.queries),
                "keys": _choice(value.keys),
                "last_real": value.last_real,
            }
        elif isinstance(value, bool | int) and name != "grad":
            asked[name] = value
        elif name == "offsets" and value is not None:
            asked[name] = list(value)
    return asked


def _choice(choice: Any) -> Any:
    if isinstance(choice, slice):
        return {"slice": [choice.start, choice.stop, choice.step]}
    return list(choice) if isinstance(choice, tuple) else choice


# -- reading: a file may hold anything ---------------------------------------------------------------------------


def load(path: Path) -> tuple[dict[str, list[Seen]], dict[str, Any]]:
    """All calls by layer, in order, and the notes.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: safetensors is not installed.
        ValueError: no recording: what is wrong with it.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(_NEEDS) from None
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        _need(path.is_file(), "it is no regular file")
        with safe_open(path, "pt") as file:
            header = _header((file.metadata() or {}).get(HEADER))
            layers = _layers(header["calls"], set(file.keys()), lambda key: _tensor(file, key))
        return layers, header["notes"]
    except (UnreadableError, SafetensorError, OSError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"{path} is no recording that can be read: {reason}. recording.save(path) writes one."
        ) from None


def _tensor(file: Any, key: str) -> Tensor:
    try:
        return cast("Tensor", file.get_tensor(key)).clone()  # of its own: the file may change
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UnreadableError(f"{key!r:.100} is no tensor that torch can hold") from None


def _header(text: str | None) -> dict[str, Any]:
    if text is None:
        raise UnreadableError(f"its header has no {HEADER!r}")
    try:
        header = json.loads(text)
    except ValueError:
        raise UnreadableError("its header is not JSON") from None
    _need(isinstance(header, dict), "its header is no object")
    version = header.get("version")
    _need(version == VERSION, f"its version is {version!r:.40}, and this clearhead reads version {VERSION}")
    _need(isinstance(header.get("notes"), dict), "its notes are no object")
    _need(isinstance(header.get("calls"), list), "its calls are no list")
    return cast("dict[str, Any]", header)


def _layers(calls: list[Any], keys: set[str], tensor: Callable[[str], Tensor]) -> dict[str, list[Seen]]:
    layers: dict[str, list[Seen]] = {}
    numbers: dict[str, int] = {}
    for call in calls:
        _need(isinstance(call, dict) and isinstance(call.get("layer"), str), "a call has no layer")
        seens = layers.setdefault(call["layer"], [])
        number = numbers.setdefault(call["layer"], len(numbers))
        _need(call.get("call") == len(seens), f"the calls of layer {number} are out of order")

        def part(name: str, number: int = number, index: int = len(seens)) -> Tensor:
            key = _key(number, index, name)
            _need(key in keys, f"{key!r:.100} is missing")
            keys.remove(key)
            return tensor(key)

        seens.append(_seen(call, part))
    _need(not keys, f"{next(iter(keys), '')!r:.100} belongs to no call")
    return layers


def _seen(call: dict[str, Any], part: Callable[[str], Tensor]) -> Seen:
    sizes, names = call.get("sizes"), call.get("fields")
    _need(isinstance(sizes, list) and len(sizes) == 4 and all(map(_is_size, sizes)), "sizes are not four counts")
    _need(isinstance(names, dict), "fields are no object")
    B, H, L, S = sizes = cast("list[int]", sizes)
    observe = _observe(call.get("observe"))
    seen: dict[str, Any] = {}
    for name, inside in cast("dict[str, Any]", names).items():
        _need(name in _KNOWN, f"there is no field {name!r:.100}")
        if name in GROUPS or name in PAIRS:
            _need(isinstance(inside, list) and all(isinstance(key, str) for key in inside), f"{name} names no parts")
            found = {key: part(f"{name}.{key}") for key in inside}
            _need(name in GROUPS or tuple(found) == PAIRS[name], f"{name} has other parts than its own")
            seen[name] = found if name in GROUPS else tuple(found.values())
        else:
            _need(inside is None, f"{name} is one tensor, not parts")
            seen[name] = part(name)
        _check(name, seen[name], (B, H, L, S), observe)
    loaded = Seen(seen, None, (B, H, L, S), observe)
    alive = part("alive")
    _need(alive.dtype == torch.bool and alive.shape == (B, H, L), "alive is no bool (B, Hq, L)")
    known = {"alive": alive}
    shape = None if loaded.whole_heads is None else (L, S)
    if shape is None and "pooled" in seen:
        shape = tuple(seen["pooled"][0].shape[-2:])
    if shape is not None:
        known["visible"] = visible = part("visible")
        fits = visible.ndim == 4 and visible.shape[0] in (1, B) and visible.shape[1] in (1, H)
        _need(visible.dtype == torch.bool and fits and tuple(visible.shape[2:]) == shape, "visible has another shape")
    return replace(loaded, known=known)


def _observe(asked: Any) -> Observe:
    _need(isinstance(asked, dict), "observe is no object")
    names = {f.name for f in fields(Observe)} - {"grad"}
    for name in asked:
        _need(name in names, f"Observe has no field {name!r:.100}")
    try:
        flags: dict[str, Any] = {k: _at(value) if isinstance(value, dict) else value for k, value in asked.items()}
        return Observe(**flags)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UnreadableError(f"observe can't be: {str(error)[:200]}") from None


def _at(saved: dict[str, Any]) -> At:
    choices = {
        name: slice(*choice["slice"]) if isinstance(choice, dict) else choice
        for name, choice in saved.items()
        if name != "last_real"
    }
    return At(**choices, last_real=saved.get("last_real") is True)


_KNOWN = {f.name for f in fields(Observe)} - {"grad", "allow_bytes"}


def _check(name: str, value: Any, sizes: tuple[int, int, int, int], observe: Observe) -> None:
    """That a field has the shape and dtype which it has in a call of these sizes."""
    B, H, L, S = sizes
    wanted: tuple[int | None, ...] | None = None  # None = any size
    if name in PER_QUERY or name in GROUPS:
        wanted = (B, H, L)
    elif name in PER_KEY:
        wanted = (B, H, S)
    elif name == "agreement":
        wanted = (B, H, H)
    elif name == "offsets":
        _need(observe.offsets is not None, "offsets were not asked for")
        wanted = (B, H, L, len(observe.offsets or ()))
    elif name == "top_k":
        wanted = (B, H, L, None)
    elif name == "pooled":
        wanted = (B, H, None, None)
    elif name in MAPS:
        wanted = (B, H, L, S) if observe.whole(name) else (B, None, None, None)
    elif name in SPLIT:
        wanted = (B, None, L if name in ("query", "context") else S, None)
    elif name in MODULE:
        wanted = (B, S if name.startswith(("key", "value")) else L, None)
    tensors = list(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    for index, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        fits = wanted is not None and len(shape) == len(wanted)
        fits = fits and all(size in (None, given) for size, given in zip(wanted or (), shape, strict=True))
        _need(fits and shape == tuple(tensors[0].shape), f"{name} {shape} does not fit (B, Hq, L, S) = {sizes}")
        _need(name != "pooled" or shape[-1] == shape[-2], f"pooled {shape} is not n x n")
        keys = name == "top_k" and index == 1
        _need(tensor.dtype == torch.int32 if keys else tensor.dtype in _FLOATS, f"{name} is {tensor.dtype}")
        if keys and tensor.numel():
            least, most = int(tensor.min()), int(tensor.max())
            _need(least >= -1 and most < S, f"its top_k names keys from {least} to {most}, and there are {S}")


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= LARGEST


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise UnreadableError(reason)
