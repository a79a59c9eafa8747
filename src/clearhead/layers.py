"""Which layers of a model are meant: by name, by number, or all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

Layers = int | str | slice | Sequence[int | str] | None


def choose_layers(named: dict[str, nn.Module], layers: Layers) -> set[nn.Module]:
    """The layers that are asked for, by name or number.

    Raises:
        KeyError: there is no such layer.
        TypeError: neither names nor numbers.
    """
    everything = list(named)
    if layers is None:
        return set(named.values())
    found: set[str] = set()
    for layer in layers if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,):
        if isinstance(layer, slice):
            found.update(everything[layer])
        elif isinstance(layer, str):
            under = [name for name in everything if name == layer or name.startswith(f"{layer}.")]
            if not under:
                raise KeyError(f"there is no attention layer {layer!r}, and none below it: {_listed(everything)}.")
            found.update(under)
        elif isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(everything) <= layer < len(everything):
                raise KeyError(f"there is no attention layer {layer}: {_listed(everything)}.")
            found.add(everything[layer])
        else:
            raise TypeError(f"layers takes names, numbers, a list of them or a slice, not {layers!r}.")
    if not found:
        raise KeyError(f"layers={layers!r} chooses none: {_listed(everything)}.")
    return {named[name] for name in found}


def _listed(names: list[str]) -> str:
    return f"there are {len(names)}, {', '.join(map(repr, names))}"
