"""What to look at (`Observe`, `At`) and what was seen (`Seen`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.masks import Mask, living_rows, visible_cells
from clearhead.masks.intervals import FAR
from clearhead.masks.values import as_lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Choice = int | Sequence[int] | slice | None

STATISTICS = (
    "lse", "entropy", "max_weight", "max_score", "distance", "received", "received_mean", "value_weighted",
    "contribution", "agreement", "rest", "top_k", "mass", "patterns", "lookback", "offsets", "pooled",
)  # fmt: skip
PER_QUERY = ("lse", "entropy", "max_weight", "max_score", "distance", "rest", "lookback")  # (B, Hq, L)
PER_KEY = ("received", "received_mean", "value_weighted", "contribution")  # (B, Hq, S)
MAPS = ("scores", "masked_scores", "weights", "dropped_weights")
SPLIT = ("query", "key", "value", "context")
# What turns them on, where it isn't True.
FLAGS = {
    "top_k": "8", "mass": "{...}", "patterns": "{...}", "lookback": "32", "offsets": "[...]", "pooled": "256",
}  # fmt: skip
# More than any text has: what is larger asks for more memory than there is.
MOST = {"top_k": 2**20, "pooled": 2**13}
MODULE = ("query_projected", "key_projected", "value_projected", "merged", "output")


@dataclass(frozen=True)
class At:
    """Which part of an attention map to keep; the axes (B, heads, queries, keys) always stay.

    Args:
        heads: an int (negative from the end), a list of ints, a slice, or None for all.
        queries: the same for the queries.
        keys: the same for the keys.
        last_real: each batch item's last query that sees anything, instead of `queries`. Padded queries still
            see the real keys unless the mask has a `QueryPadding`: add it where the padding is on the right.

    Raises:
        IndexError: in a call, an index outside the inputs.
        ValueError: both `queries` and `last_real`.

    Example:
        >>> x = torch.randn(1, 4, 5, 8)
        >>> _, seen = attention(x, x, x, observe=Observe(weights=At(heads=2, queries=[-1])))
        >>> seen.weights.shape
        torch.Size([1, 1, 1, 5])
    """

    heads: Choice = None
    queries: Choice = None
    keys: Choice = None
    last_real: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "queries", "keys"):
            choice = getattr(self, name)
            if isinstance(choice, Iterable) and not isinstance(choice, str | Tensor):
                object.__setattr__(self, name, tuple(choice))  # what is read once would be empty the second time
        if self.last_real and self.queries is not None:
            raise ValueError("At takes either queries= or last_real=True, not both.")


def indices(name: str, choice: Choice, size: int) -> Tensor | None:
    """The chosen positions as a 1-D tensor, None for all; IndexError with the numbers if out of range."""
    if choice is None:
        return None
    wrong = TypeError(f"At({name}=...) takes an int, a list of ints, a slice or None, not {choice!r}.")
    if isinstance(choice, slice):
        try:
            return torch.tensor(range(size)[choice], dtype=torch.int64)
        except (TypeError, ValueError):
            raise wrong from None
    if isinstance(choice, Tensor) or not isinstance(choice, Integral | Iterable):
        raise wrong
    chosen: list[Any] = [choice] if isinstance(choice, Integral) else list(choice)
    for i in chosen:
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise wrong
        if not -size <= int(i) < size:
            raise IndexError(f"At({name}={i}) is out of range: there are {size} {name} ({-size} to {size - 1}).")
    return torch.tensor([int(i) % size for i in chosen], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)  # it may hold tensors: equal is what is the same
class Observe:
    """What to look at during a call; everything is off by default.

    All of it is after the softmax and before dropout, float32 (float64 for float64 input), and detached unless
    `grad`. A dead row (a query that sees nothing) has weights 0, entropy 0, lse -inf and counts in no mean.

    Args:
        lse: log of the sum of exponentiated scores, the sink's among them, (B, Hq, L).
        entropy: of the weights, in nats: ``-sum_j w_j log w_j``, (B, Hq, L). Clark et al. 2019 (1906.04341).
        max_weight: the largest weight of each query, (B, Hq, L). Voita et al. 2019 (1905.09418).
        max_score: the largest visible score of each query, after scale and bias, (B, Hq, L); -inf in dead rows. The
            "max logit" that QK-Clip watches: Kimi K2, 2025 (2507.20534).
        distance: mean |query position - key position|, in tokens, (B, Hq, L). Vig & Belinkov 2019 (1906.04284).
        received: attention that each key receives, summed over the queries, (B, Hq, S). H2O (2306.14048).
            Padded queries count unless the mask hides them by a `QueryPadding`, as `record` adds one.
        received_mean: ``received_j`` divided by the number of queries that may see key j, 0 where none may,
            (B, Hq, S): what a query gives the key on average, whether few or many see it.
        value_weighted: ``sum_i w_ij ||v_j||`` of each key, in units of the values, (B, Hq, S). Kobayashi et al.
            2020 (2004.10102).
        contribution: ``sum_i w_ij <v_j, o_i> / ||o_i||^2`` of each key, (B, Hq, S), with o_i the context of query i
            before dropout: the share of each context that the key makes up, by its projection. The shares of one
            query sum to 1 (to 0 where its context is 0) and may be negative.
        agreement: Jensen-Shannon divergence between the weights of every two heads, in nats (0: the same; at most
            log 2), ``H((w + w') / 2) - (H(w) + H(w')) / 2``, averaged over the queries that see something in both,
            (B, Hq, Hq); what goes to a sink counts as one more key. It takes Hq times the work of an entropy.
            Clark et al. 2019 (1906.04341), section 6.
        rest: 1 - the sum of a row's weights, the share of its head's sink, (B, Hq, L); 0 without sinks and in dead
            rows. The other statistics are sums over the keys. Xiao et al. 2023 (2309.17453).
        top_k: the k strongest keys of each query: a pair (weights, int32 key indices), each (B, Hq, L, k);
            short rows are filled with weight 0 and index -1.
        mass: ``{name: bool (B|1, S)}``: the weight that falls on each group of keys, a dict of (B, Hq, L).
        patterns: ``{name: Mask}``: the weight that each query puts on the pairs that a mask allows,
            ``sum_j w_ij [mask allows (i, j)]``, a dict of (B, Hq, L): the score of a head for a pattern. Any mask
            that fits the call; `clearhead.patterns` has those of token ids. Olsson et al. 2022 (2209.11895).
        lookback: n, or n of each item, (B|1,): the first n keys are context, and what follows is newer. The lookback
            ratio of each query, ``c / (c + r)`` with c and r its mean weight on a visible key of either kind,
            (B, Hq, L); 0 where no context is visible, 1 where nothing newer is. Chuang et al. 2024 (2407.07071).
        offsets: distances d; the weight on the key d to the left of the query's position (d < 0: to the
            right), (B, Hq, L, len(offsets)).
        pooled: n; a pair (mean, max) of n x n maps that cover the whole head, (B, Hq, n, n), cut as
            ``adaptive_avg_pool2d`` does; dead rows count in no mean.
        weights: attention weights; True for all of them, or an `At`. (B, heads, queries, keys)
        scores: scaled scores, capped, with the bias, before the mask; True or an `At`.
        masked_scores: the same with -inf where hidden; True or an `At`.
        dropped_weights: weights after dropout, as multiplied with the values; True or an `At`.
        query: split into heads, (B, Hq, L, E).
        key: split, (B, Hkv, S, E).
        value: split, (B, Hkv, S, Ev).
        context: per head, (B, Hq, L, Ev).
        query_projected: before the split, (B, L, Hq * E); this and what follows only in the module.
        key_projected: before the split, (B, S, Hkv * E).
        value_projected: before the split, (B, S, Hkv * Ev).
        merged: the heads' contexts side by side, (B, L, Hq * Ev).
        output: after the output projection, (B, L, D).
        grad: keep the graph, so that a loss may use what was seen.
        allow_bytes: the most that may be kept of a call. What takes more is a `TooLargeError`, before any work.

    Raises:
        ValueError: a wrong kind of argument, e.g. top_k=0.

    Example:
        >>> x = torch.randn(2, 4, 5, 8)
        >>> out, seen = attention(x, x, x, Causal(), observe=Observe(entropy=True, top_k=3))
        >>> seen.entropy.shape, seen.top_k[1].shape
        (torch.Size([2, 4, 5]), torch.Size([2, 4, 5, 3]))
        >>> seen.weights
        Traceback (most recent call last):
        AttributeError: weights was not asked for: observe=Observe(weights=True) keeps it. Seen: entropy, top_k.
    """

    lse: bool = False
    entropy: bool = False
    max_weight: bool = False
    distance: bool = False
    max_score: bool = False
    received: bool = False
    received_mean: bool = False
    value_weighted: bool = False
    contribution: bool = False
    agreement: bool = False
    rest: bool = False
    top_k: int | None = None
    mass: Mapping[str, Tensor] | None = None
    patterns: Mapping[str, Mask] | None = None
    lookback: int | Tensor | None = None
    offsets: Sequence[int] | None = None
    pooled: int | None = None
    weights: bool | At = False
    scores: bool | At = False
    masked_scores: bool | At = False
    dropped_weights: bool | At = False
    query: bool = False
    key: bool = False
    value: bool = False
    context: bool = False
    query_projected: bool = False
    key_projected: bool = False
    value_projected: bool = False
    merged: bool = False
    output: bool = False
    grad: bool = False
    allow_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        for name in ("top_k", "pooled", "allow_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Observe({name}=...) takes a number >= 1, not {value!r}.")
            if value is not None and value > MOST.get(name, value):
                raise ValueError(f"Observe({name}=...) takes a number up to {MOST[name]}, not {value}.")
        for f in fields(self):
            if f.default is False and f.name not in MAPS and not isinstance(getattr(self, f.name), bool):
                raise ValueError(f"Observe({f.name}=...) takes True or False, not {getattr(self, f.name)!r}.")
        for name in MAPS:
            if not isinstance(getattr(self, name), bool | At):
                raise ValueError(f"Observe({name}=...) takes True or an At, not {getattr(self, name)!r}.")  # noqa: TRY004
        if self.offsets is not None:
            offsets = tuple(self.offsets) if isinstance(self.offsets, Iterable) else (None,)
            if not all(isinstance(d, Integral) and not isinstance(d, bool) and abs(d) < FAR for d in offsets):
                raise ValueError(
                    f"Observe(offsets=...) takes a list of distances (ints below 2**62), not {self.offsets!r}."
                )
            object.__setattr__(self, "offsets", tuple(map(int, offsets)))
        if self.mass is not None and not isinstance(self.mass, Mapping):
            raise ValueError(f"Observe(mass=...) takes a dict of bool tensors (B|1, S), not {self.mass!r}.")
        for name, keys in (self.mass or {}).items():
            if not isinstance(keys, Tensor) or keys.dtype != torch.bool or keys.ndim != 2:
                raise ValueError(f"Observe(mass={{{name!r}: ...}}) takes a bool tensor (B|1, S).")
        if self.patterns is not None and not isinstance(self.patterns, Mapping):
            raise ValueError(f"Observe(patterns=...) takes a dict of masks, not {self.patterns!r}.")
        for name, pattern in (self.patterns or {}).items():
            if not isinstance(pattern, Mask):
                kind = type(pattern).__name__
                raise ValueError(  # noqa: TRY004
                    f"Observe(patterns={{{name!r}: ...}}) takes a mask, not {kind}: a bool tensor is one as "
                    f"Allowed(tensor, axes='qk')."
                )
        if self.lookback is not None:
            object.__setattr__(self, "lookback", as_lengths("Observe(lookback=...)", self.lookback))

    @classmethod
    def all(cls, *, grad: bool = False, allow_bytes: int = 2 * 2**30) -> Observe:
        """Every intermediate, and every statistic that needs no argument.

        Example:
            >>> x = torch.randn(2, 4, 5, 8)
            >>> sorted(attention(x, x, x, observe=Observe.all())[1])[:4]
            ['agreement', 'context', 'contribution', 'distance']
        """
        on = [f.name for f in fields(cls) if f.default is False and f.name != "grad"]
        flags: dict[str, Any] = dict.fromkeys(on, True)
        return cls(grad=grad, allow_bytes=allow_bytes, **flags)

    def whole(self, name: str) -> bool:
        """Whether a map is asked for as a whole, not a choice of it."""
        return getattr(self, name) in (True, At())

    def asks(self, name: str) -> bool:
        """Whether the field is asked for."""
        value = getattr(self, name)
        return value is not None and value is not False


@dataclass(frozen=True, eq=False, repr=False)
class Seen(Mapping[str, Any]):
    """What a call has shown: the fields that `Observe` asked for, as attributes or by name.

    Attributes:
        fields: the values by name.
        mask: the mask of the call (None = everything visible), to tell a hidden weight from a zero.
        sizes: (B, Hq, L, S) of the call.
        observe: what was asked for.
        known: what a loaded recording knows in place of the mask, ``"alive"`` and ``"visible"``.

    Example:
        >>> x = torch.randn(1, 2, 3, 4)
        >>> _, seen = attention(x, x, x, observe=Observe(weights=True))
        >>> seen
        Seen(weights (1, 2, 3, 3))
        >>> torch.allclose(seen["weights"].sum(-1), torch.ones(1, 2, 3))
        True
    """

    fields: dict[str, Any]
    mask: Mask | None = None
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    observe: Observe = Observe()
    known: Mapping[str, Tensor] = field(default_factory=dict)

    def with_fields(self, fields: Mapping[str, Any]) -> Seen:
        """The same with more fields."""
        return Seen({**self.fields, **fields}, self.mask, self.sizes, self.observe, self.known)

    @cached_property
    def alive(self) -> Tensor:
        """Which queries see any key, bool (B, Hq, L): the others, dead or padded, count in no mean.

        Example:
            >>> x = torch.randn(2, 1, 3, 4)
            >>> _, seen = attention(x, x, x, QueryPadding(lengths=[3, 2]), observe=Observe(entropy=True))
            >>> seen.alive.tolist()
            [[[True, True, True]], [[True, True, False]]]
        """
        B, H, L, S = self.sizes
        if "alive" in self.known:
            return self.known["alive"]
        rows = living_rows(self.mask, L, S).expand(B, H, L)
        # A bias hides, too, by -inf: of these two, dead rows have a value that no other has.
        for name, of_dead in (("lse", -torch.inf), ("max_weight", 0.0)):
            if name in self.fields:
                rows = rows.to(self.fields[name].device) & (self.fields[name] != of_dead).reshape(B, H, L)
        return rows

    @property
    def whole_heads(self) -> list[int] | None:
        """The heads whose weights were kept for all queries and keys; None where there are none."""
        at = self.observe.weights
        if "weights" not in self.fields or (isinstance(at, At) and at != At(heads=at.heads)):
            return None
        chosen = indices("heads", at.heads if isinstance(at, At) else None, self.sizes[1])
        return list(range(self.sizes[1])) if chosen is None else chosen.tolist()

    def visible(self, n: int | None = None) -> Tensor:
        """Which pairs the mask leaves, bool (B|1, Hq|1, L, S); with n, which of n x n cells hold one of them."""
        _, _, L, S = self.sizes
        if "visible" in self.known:
            return self.known["visible"]
        if n is not None:
            return visible_cells(self.mask, L, S, n)
        return torch.ones(1, 1, L, S, dtype=torch.bool) if self.mask is None else self.mask.dense(L, S)

    def plot(
        self,
        *,
        heads: Choice = None,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
    ) -> Figure:
        """Heat maps of the weights with matplotlib, one for each head; hidden pairs are grey.

        Args:
            heads: which heads, as in `At`; None = all.
            batch: the batch item.
            tokens: labels of the queries; None = numbers.
            key_tokens: labels of the keys; None = `tokens` where there are as many keys as queries.

        Raises:
            AttributeError: the weights were not asked for.
            ValueError: weights of a selection (an `At`), or label counts that don't fit.
            IndexError: a head or batch item out of range.

        Example:
            >>> x = torch.randn(1, 2, 3, 4)
            >>> _, seen = attention(x, x, x, Causal(), observe=Observe(weights=True))
            >>> figure = seen.plot(tokens=["The", "cat", "sat"])
            >>> len([axes for axes in figure.axes if axes.get_title().startswith("head")])
            2
        """
        from clearhead.view.plot import plot_weights

        B, H, L, S = self.sizes
        weights: Tensor = self.weights
        if not self.observe.whole("weights"):
            raise ValueError(
                f"plot shows whole maps, but {self.observe.weights} chose a part: ask for Observe(weights=True)."
            )
        if not -B <= batch < B:
            raise IndexError(f"batch item {batch} is out of range: there are {B}.")
        chosen = indices("heads", heads, H)
        shown = list(range(H)) if chosen is None else chosen.tolist()
        return plot_weights(
            weights.reshape(B, H, L, S)[batch, shown],
            self.visible().expand(B, H, L, S)[batch, shown],
            [f"head {head}" for head in shown],
            tokens,
            tokens if key_tokens is None and L == S else key_tokens,
        )

    # Tensors have no truth to compare by: what was seen equals only itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "fields":
            raise AttributeError(name)
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(self._missing(name)) from None

    def _missing(self, name: str) -> str:
        here = f"Seen: {', '.join(self.fields) or 'nothing'}."
        if name == "dropped_weights":
            keeps = "observe=Observe(dropped_weights=True) keeps it, but for record, which sees no dropout"
            return f"dropped_weights was not asked for: {keeps}. {here}"
        if name in MODULE:
            return f"{name} was not asked for, or doesn't exist here: only MultiHeadAttention keeps it. {here}"
        if name in STATISTICS + MAPS + SPLIT:
            flag = FLAGS.get(name, "True")
            return f"{name} was not asked for: observe=Observe({name}={flag}) keeps it. {here}"
        return f"there is no field {name!r}. {here}"

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.fields]

    def __repr__(self) -> str:
        return f"Seen({', '.join(f'{name} {_shape(value)}' for name, value in self.fields.items())})"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} {_shape(part)}" for name, part in value.items()) + "}"
    return " + ".join(_shape(part) for part in value)
