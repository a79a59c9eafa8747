"""`Recording`: what every attention layer of a model did, layer by layer and call by call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clearhead import heads, saved
from clearhead.files import written
from clearhead.heads import Head, Row
from clearhead.observe import Seen
from clearhead.panels import Labels, labels_for, panels_of
from clearhead.view.report import render

if TYPE_CHECKING:
    import pandas as pd


def is_cross(name: str) -> bool:
    """Whether a layer of that name is cross-attention, as transformers' models call theirs."""
    return re.search("cross|encdec|encoder_attn", name, re.IGNORECASE) is not None


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
        self.notes: dict[str, Any] = {}
        """What else to keep in a saved file, as JSON: texts, tokens, the model's name."""

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

    def heads(self, layer: str | int | None = None) -> list[Row]:
        """One row a head, with the mean of every recorded statistic.

        A mean is over all live queries of all batch items and calls alike, so a long text counts for more than a
        short one; dead and padded queries count in none. With N live queries i, and a_ij their weights:

        - ``"layer"``, ``"number"``, ``"head"``: the layer's name and number, and the head; ``"queries"``: N.
        - ``"lse"``, ``"entropy"``, ``"max_weight"``, ``"max_score"``, ``"distance"``, ``"rest"``, ``"lookback"``:
          ``sum_i x_i / N`` of the field x of that name.
        - ``"effective_keys"``: ``exp(entropy)``: a head that looks at so many keys alike has this entropy.
        - ``"mass.NAME"``, ``"pattern.NAME"``: of each group of keys and of each pattern, ``sum_i x_i / N``.
        - ``"offset.D"``: the mean of ``a_i,i-D`` over those queries that have a key there; in self-attention, a
          real one.
        - ``"sink"``: ``sum_i a_ik / N`` with k each item's first key that receives anything, from ``received`` (or
          ``received_mean``); ``"contribution.sink"``, ``"value_weighted.sink"``: what else falls on it, by N.
        - ``"agreement"``: the mean divergence from the layer's other heads.

        Args:
            layer: a name or number; None = all.

        Raises:
            KeyError: no layer of that name or number was called.

        References:
            The sink rate of Gu et al. 2024, "When Attention Sink Emerges" (arXiv 2410.10781), is the share of
            heads whose ``"sink"`` is above 0.3.

        Example:
            >>> layer = MultiHeadAttention(8, 2)
            >>> with record(layer, Observe(received=True, offsets=[1])) as recording:
            ...     _ = layer(torch.randn(1, 3, 8), mask=Causal())
            >>> sorted(recording.heads()[1])
            ['head', 'layer', 'number', 'offset.1', 'queries', 'sink']
        """
        if layer is None:
            return heads.rows_of([(name, self._calls[name]) for name in self])
        name = self._name(layer)
        return heads.rows_of([(name, self._calls[name])], first=list(self).index(name))

    def find(self, kind: str, most: int | None = None) -> list[Head]:
        """The heads that do one thing, most of it first: (score, layer, number, head), the score a mean of `heads`.

        - ``"previous"``, ``"next"``, ``"self"``: weight at offset 1, -1 and 0; the first else on that pattern of
          `clearhead.patterns`.
        - ``"duplicate"``, ``"induction"``: weight on that pattern of `clearhead.patterns`.
        - ``"sink"``: weight on ``mass["sink"]``, else on each text's first key.
        - ``"local"``, ``"distant"``: mean distance in tokens, smallest and largest first.
        - ``"focused"``, ``"diffuse"``: mean entropy in nats, smallest and largest first.
        - any other column of `heads`, largest first.

        Args:
            kind: one of these.
            most: how many heads at most; None = all.

        Raises:
            ValueError: none of these, or what it needs was not recorded: what to ask for.

        Example:
            >>> layer = MultiHeadAttention(8, 2)
            >>> with record(layer, Observe(entropy=True)) as recording:
            ...     _ = layer(torch.randn(1, 3, 8))
            >>> [head.number for head in recording.find("focused")]
            [0, 0]
        """
        return heads.find(self.heads(), kind, most)

    def to_dataframe(self) -> pd.DataFrame:
        """`heads` as a pandas table.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError(
                "to_dataframe needs pandas: pip install pandas, or take recording.heads(), the same as dicts."
            ) from None
        return pd.DataFrame(self.heads())

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """The weights of every self-attention layer's last call, each (B, Hq, L, S).

        As transformers gives them with ``output_attentions=True``, for BertViz and others; of an encoder-decoder
        model the encoder's layers, then the decoder's. `cross_attentions` has the others.

        Raises:
            ValueError: weights were not recorded, or only a part of them: what they would take.
        """
        return self._weights(cross=False)

    @property
    def cross_attentions(self) -> tuple[Tensor, ...]:
        """The same of every cross-attention layer, told by its name."""
        return self._weights(cross=True)

    def _weights(self, *, cross: bool) -> tuple[Tensor, ...]:
        chosen = [(name, seen) for name, seen in self.items() if is_cross(name) == cross]
        lacking = [name for name, seen in chosen if "weights" not in seen or not seen.observe.whole("weights")]
        if lacking:
            total = sum(B * H * L * S for B, H, L, S in (seen.sizes for _, seen in chosen))
            B, H, L, S = self[lacking[0]].sizes
            raise ValueError(
                f"attentions need all weights, and {lacking[0]!r} has {', '.join(self[lacking[0]]) or 'nothing'}: "
                f"record with Observe(weights=True). The {len(chosen)} layers here, such as {B} x {H} heads x {L:,} "
                f"x {S:,}, take {4 * total:,} bytes ({4 * total / 2**20:,.1f} MiB) in float32."
            )
        return tuple(seen.weights for _, seen in chosen)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write all that was recorded to a safetensors file, which holds no code.

        Tensors are named ``layer.3.entropy``, of a layer's later calls ``call.1.layer.3.entropy``; ``alive`` says
        which queries see anything. A JSON header under ``"clearhead"`` has names, sizes, what was asked for (but
        for tensors and masks) and `notes`. Masks themselves are not kept.

        Args:
            path: the file; it is there as a whole or not at all.
            overwrite: whether an existing file may be replaced.

        Raises:
            FileExistsError: the file exists.
            ImportError: safetensors is not installed.
            ValueError: `notes` that are no JSON.

        Example:
            >>> import tempfile
            >>> layer = MultiHeadAttention(8, 2)
            >>> with record(layer, Observe(entropy=True)) as recording:
            ...     _ = layer(torch.randn(1, 3, 8))
            >>> path = recording.save(tempfile.mkdtemp() + "/seen.safetensors")
            >>> Recording.load(path).heads() == recording.heads()
            True
        """
        saved.save(Path(path), [(name, self._calls[name]) for name in self], self.notes, overwrite=overwrite)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """What `save` wrote. Files of others are safe to load: they hold numbers only, and are checked.

        Raises:
            FileNotFoundError: there is no such file.
            ImportError: safetensors is not installed.
            ValueError: the file is no recording, or broken: what is wrong with it.
        """
        layers, notes = saved.load(Path(path))
        recording = cls(list(layers))
        recording._calls, recording.notes = layers, notes
        return recording

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
        with written(Path(path), overwrite=overwrite) as beside:
            beside.write_text(page, encoding="utf-8")
        return Path(path)

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
