"""`Recording`: what every attention layer of a model did, layer by layer and call by call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clearhead.observe import Seen
from clearhead.panels import Labels, labels_for, panels_of
from clearhead.view.report import render


class Recording(Mapping[str, Seen]):
    """What was recorded: the last call's `Seen` of each attention layer, by module name or layer number.

    ``recording["encoder.layer.3.attention.self"]`` and ``recording[3]`` are the same if it is the fourth
    attention layer (in the model's order) that was called; ``recording.calls(name)`` has all calls of a layer.

    Shapes:
        those of `Observe`, for each layer's own (B, Hq, L, S).

    Example:
        >>> layer = MultiHeadAttention(8, 2)
        >>> with record(layer, Observe(entropy=True)) as recording:
        ...     _ = layer(torch.randn(1, 3, 8))
        >>> recording[0].entropy.shape
        torch.Size([1, 2, 3])
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._calls: dict[str, list[Seen]] = {name: [] for name in layers}

    def add(self, layer: str, seen: Seen) -> None:
        """Keep one more call of a layer."""
        self._calls[layer].append(seen)

    def calls(self, layer: str | int) -> list[Seen]:
        """Every recorded call of a layer, oldest first.

        Raises:
            KeyError: no layer of that name or number was called.
        """
        return list(self._calls[self._name(layer)])

    def __getitem__(self, layer: str | int) -> Seen:
        return self._calls[self._name(layer)][-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        if not len(self):
            return "Recording(nothing was called yet)"
        names = ", ".join(name or "the model itself" for name in self)
        return f"Recording(layers: {len(self)}, calls: {sum(map(len, self._calls.values()))}; {names})"

    def to_html(
        self,
        path: str | Path,
        tokens: Labels | Sequence[str] | None = None,
        *,
        key_tokens: Labels | Sequence[str] | None = None,
        title: str = "Attention",
        notes: Sequence[str] = (),
        overwrite: bool = False,
    ) -> Path:
        """Write one HTML file that shows every layer and head; it works offline and loads nothing.

        Args:
            path: the file to write.
            tokens: a list of labels for each batch item (or one list, for a batch of one); None = numbers.
            key_tokens: the same for the keys of cross-attention; None = the tokens.
            title: the page's title.
            notes: lines shown under it.
            overwrite: whether an existing file may be replaced.

        Raises:
            ValueError: nothing recorded, neither ``weights`` nor ``pooled`` among it, or label counts that
                don't fit.
            FileExistsError: the file exists.

        Example:
            >>> layer = MultiHeadAttention(8, 2)
            >>> with record(layer, Observe(weights=True)) as recording:
            ...     _ = layer(torch.randn(1, 3, 8))
            >>> import tempfile
            >>> recording.to_html(tempfile.mkdtemp() + "/report.html", tokens=["a", "b", "c"]).name
            'report.html'
        """
        panels = panels_of(list(self.items()))
        B, _, L, S = next(iter(self.values())).sizes
        page = render(
            panels,
            labels_for(tokens, B, L),
            key_tokens=None if key_tokens is None and S == L else labels_for(key_tokens, B, S),
            title=title,
            notes=notes,
        )
        path = Path(path)
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                file.write(page)
        except FileExistsError:
            raise FileExistsError(f"{path} exists: choose another name, or pass overwrite=True.") from None
        return path

    def _name(self, layer: str | int) -> str:
        recorded = list(self)
        if isinstance(layer, int):
            if not -len(recorded) <= layer < len(recorded):
                raise KeyError(f"there is no layer {layer}: {len(recorded)} layers were called while recording.")
            return recorded[layer]
        if layer not in recorded:
            reason = "was not called while recording" if layer in self._calls else "is no attention layer here"
            raise KeyError(f"{layer!r} {reason}. Recorded: {', '.join(recorded) or 'nothing'}.")
        return layer
