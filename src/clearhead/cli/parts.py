"""What to record of a model that reads, and the parts that its attention layers form: encoder, decoder, cross."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import Any

from clearhead.cli.reading import Reading, UserError
from clearhead.compat.transformers_layers import attention_layers
from clearhead.heads import Head, Row, find
from clearhead.observe import At, Seen
from clearhead.patterns import patterns
from clearhead.recording import Recording, is_cross
from clearhead.view.report import LIMIT_BYTES, fits

TOP_K = 8
_COARSEST = 16  # cells a side: a map of fewer shows nothing
_BY_NAME = {
    "effective_keys": "effective_keys",
    "sink": "sink",
    "previous": "offset.1",
    "next": "offset.-1",
    "self": "offset.0",
    "duplicate": "pattern.duplicate",
    "induction": "pattern.induction",
}
_FIELD = {"sink": "received", "effective_keys": "entropy"}
_USUAL = ("entropy", "max_weight", "distance", "sink", "offset.1", "offset.-1", "offset.0", "pattern.induction")
_PLAIN = ("lse", "entropy", "max_weight", "max_score", "distance", "rest")


@dataclass(frozen=True)
class Part:
    """Layers that look from one reading to another: all of a model, or an encoder, a decoder, or between the two.

    Attributes:
        name: "" where the model has one part.
        recording: of these layers.
        numbers: of each, its place among all layers that the model has in this part.
        queries: what is looked from.
        keys: what is looked at; the same object in self-attention.
        heads: those that were chosen; None = all.
    """

    name: str
    recording: Recording
    numbers: list[int]
    queries: Reading
    keys: Reading
    heads: list[int] | None

    @cached_property
    def rows(self) -> list[Row]:
        """`Recording.heads` of the chosen heads, with the layers' numbers."""
        return [
            {**row, "number": self.numbers[row["number"]]}
            for row in self.recording.heads()
            if self.heads is None or row["head"] in self.heads
        ]

    def find(self, kind: str) -> list[Head]:
        """As `Recording.find`, of the chosen heads; none where nothing was recorded that tells."""
        try:
            return find(self.rows, kind, None)
        except ValueError:
            return []

    def seen(self, number: int) -> Seen:
        """What was seen of a layer."""
        return self.recording[self.numbers.index(number)]


@dataclass(frozen=True)
class Wanted:
    """What was chosen on the command line.

    Attributes:
        stats: names of statistics to show of every head; None = the most telling heads.
        layers: numbers, or how names begin; None = all.
        heads: numbers; None = all.
        maps: whether a page is to be written.
    """

    stats: list[str] | None = None
    layers: list[str] | None = None
    heads: list[int] | None = None
    maps: bool = True


def column_of(stat: str) -> str:
    """The column of `Recording.heads` that a name on the command line stands for.

    Raises:
        UserError: there is no such statistic.

    Example:
        >>> column_of("previous"), column_of("entropy"), column_of("offset.7")
        ('offset.1', 'entropy', 'offset.7')
    """
    if stat in _BY_NAME or stat in _PLAIN:
        return _BY_NAME.get(stat, stat)
    if re.fullmatch(r"offset\.-?\d{1,9}", stat):
        return stat
    raise UserError(f"there is no statistic {stat!r}: --stat takes {', '.join((*_PLAIN, *_BY_NAME))}, offset.N.")


def statistics(wanted: Wanted, source: Reading | None, target: Reading | None) -> dict[str, Any]:
    """What to ask `Observe` for of numbers a head; groups of keys and patterns fit one length of keys only.

    Raises:
        UserError: there is no such statistic.
    """
    columns = set(_USUAL) if wanted.stats is None else {column_of(stat) for stat in wanted.stats}
    flags: dict[str, Any] = {_FIELD.get(name, name): True for name in columns if "." not in name}
    if offsets := [int(name.removeprefix("offset.")) for name in sorted(columns) if name.startswith("offset.")]:
        flags["offsets"] = offsets
    if source is not None and target is None:
        if wanted.stats is None and source.names:
            flags["mass"] = source.names
        if any(name.startswith("pattern.") for name in columns):
            flags["patterns"] = patterns(source.inputs["input_ids"], real=source.real)
    return flags


def maps(wanted: Wanted, count: int, length: int) -> tuple[dict[str, Any], str]:
    """What to ask `Observe` for of maps, and what a page of it holds.

    Args:
        wanted: what was chosen.
        count: how many maps there are: layers by heads by texts.
        length: of the longest text, in tokens.

    Returns:
        Flags, and what the page holds, in words; "" where even pooled maps would make it too large.
    """
    if not wanted.maps:
        return {}, ""
    if fits(1, 1, count, length, length):
        return {"weights": True if wanted.heads is None else At(heads=wanted.heads), "top_k": TOP_K}, "every weight"
    # Half of the page for pooled maps, mean and maximum; half for each query's strongest keys, weight and place.
    side, keys = isqrt(LIMIT_BYTES // (8 * count)), LIMIT_BYTES // (8 * count * length)
    if side < _COARSEST or keys < 1:
        return {"top_k": 1}, ""
    flags = {"pooled": min(256, side), "top_k": min(TOP_K, keys)}
    strongest = f"{flags['top_k']} strongest keys" if flags["top_k"] > 1 else "strongest key"
    return flags, f"pooled maps and each query's {strongest} (too long for every weight)"


def layers_of(network: Any, wanted: Wanted) -> dict[str, tuple[str, int]]:
    """The chosen attention layers of a transformers model: the part that each is in, and its number there.

    Raises:
        UserError: no such layer.
    """
    through, _ = attention_layers(network)
    modules = set(through)
    names = [name for name, module in network.named_modules() if module in modules]
    two = network.config.is_encoder_decoder
    counts: dict[str, int] = {}
    found = {}
    unknown = dict.fromkeys(wanted.layers or ())
    for name in names:
        part = kind_of(name) if two else ""
        number = counts.get(part, 0)
        counts[part] = number + 1
        fitting = [
            layer for layer in wanted.layers or () if layer in (str(number), name) or name.startswith(f"{layer}.")
        ]
        for layer in fitting:
            unknown.pop(layer, None)
        if fitting or wanted.layers is None:
            found[name] = (part, number)
    for layer in unknown:
        shown = ", ".join(names[:2])
        raise UserError(f"there is no layer {layer!r}: the {len(names)} attention layers are {shown} and so on.")
    return found


def parts_of(
    recording: Recording,
    layers: dict[str, tuple[str, int]],
    heads: list[int] | None,
    source: Reading,
    target: Reading | None,
) -> list[Part]:
    """The recorded layers by what they look from and at."""
    found: dict[str, Part] = {}
    for name in recording:
        kind, number = layers[name]
        if kind not in found:
            names = [name for name, (part, _) in layers.items() if part == kind]
            found[kind] = Part(kind, Recording(names), [], *_readings(kind, source, target), heads)
        found[kind].numbers.append(number)
        for seen in recording.calls(name):
            found[kind].recording.add(name, seen if kind != "cross" else _of_real_queries(seen, found[kind].queries))
    return list(found.values())


def _of_real_queries(seen: Seen, queries: Reading) -> Seen:
    """Without padded queries, which a layer between two texts is not told of; what sums over them all is left out."""
    if bool(queries.real.all()):
        return seen
    kept = {name: value for name, value in seen.items() if name != "received"}
    return replace(seen, fields=kept, known={"alive": seen.alive & queries.real[:, None]})


def kind_of(name: str) -> str:
    """Which part of an encoder-decoder model an attention layer is in."""
    if is_cross(name):
        return "cross"
    return "encoder" if re.search(r"(^|\.)encoder\.", name) else "decoder"


def _readings(kind: str, source: Reading, target: Reading | None) -> tuple[Reading, Reading]:
    if target is None or kind == "encoder":
        return source, source
    return (target, source) if kind == "cross" else (target, target)
