"""`intervene`: change what attention layers of a model do while it runs, at any length: no L x L matrix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.compat.call import Call, Run
from clearhead.compat.cores import handling_core, has_core
from clearhead.compat.torch_layers import attention_modules
from clearhead.compat.transformers import Handler, handling
from clearhead.compat.transformers_layers import attention_layers
from clearhead.errors import ShapeError
from clearhead.layers import choose_layers
from clearhead.masks import Allowed, Mask
from clearhead.observe import At, Choice, indices


@dataclass(frozen=True, eq=False)
class Knockout:
    """Cut edges: what the mask allows can't be attended to, and the rest of each query's weights sum to 1 again.

    A query that is left without any key is a dead row: its context is zero.

    Args:
        mask: the pairs to cut, in the language of masks.
        heads: in which heads, as in `At`; None = all.

    Raises:
        TypeError: no mask.

    References:
        Geva et al. 2023, "Dissecting Recall of Factual Associations" (2304.14767).

    Example:
        >>> Knockout(Window(left=1, right=0), heads=[3])  # head 3 sees neither the query's own key nor the one before
        Knockout(mask=Window(left=1, right=0), heads=(3,))
    """

    mask: Mask
    heads: Choice = None

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(
                f"Knockout takes a mask, as in Knockout(Causal()) or, of a bool tensor, Knockout(Allowed(tensor, "
                f"axes='qk')), not {type(self.mask).__name__}."
            )
        object.__setattr__(self, "heads", At(heads=self.heads).heads)

    def before(self, call: Call) -> Call:
        """The call without the edges."""
        cut = self.mask
        H = call.query.shape[1]
        chosen = indices("heads", self.heads, H)
        if chosen is not None:
            heads = torch.zeros(H, dtype=torch.bool, device=call.query.device)
            heads[chosen.to(heads.device)] = True
            cut = cut & Allowed(heads, axes="h")
        return call._replace(mask=~cut if call.mask is None else call.mask & ~cut)

    def after(self, call: Call, context: Tensor) -> Tensor:
        """The context as it is."""
        return context


@dataclass(frozen=True, eq=False)
class ScaleHeads:
    """Scale what heads pass on: the context of a head times a factor; 0 silences it.

    Args:
        factors: ``{head: factor}``, the others as they are (a negative head counts from the end); or a factor for
            every head, (Hq,).

    Raises:
        TypeError: neither.

    References:
        Michel et al. 2019, "Are Sixteen Heads Really Better than One?" (1905.10650).

    Example:
        >>> ScaleHeads({0: 0.0, -1: 2.0})
        ScaleHeads(factors={0: 0.0, -1: 2.0})
    """

    factors: Mapping[int, float] | Sequence[float] | Tensor

    def __post_init__(self) -> None:
        factors: Any = self.factors
        if isinstance(factors, Mapping):
            good = all(isinstance(factor, Real) for factor in factors.values())
            At(heads=list(factors))
        elif isinstance(factors, Tensor):
            good = factors.ndim == 1 and factors.is_floating_point()
        else:
            good = isinstance(factors, Sequence) and all(isinstance(factor, Real) for factor in factors)
        if not good:
            raise TypeError(f"ScaleHeads takes {{head: factor}}, or a factor for every head, not {factors!r}.")

    def before(self, call: Call) -> Call:
        """The call as it is; factors that don't fit are refused before anything is computed."""
        self._by_head(call)
        return call

    def after(self, call: Call, context: Tensor) -> Tensor:
        """The context of each head, scaled."""
        return context * self._by_head(call)[:, None, None]

    def _by_head(self, call: Call) -> Tensor:
        H = call.query.shape[1]
        options: dict[str, Any] = {"dtype": call.query.dtype, "device": call.query.device}
        if isinstance(self.factors, Mapping):
            found = torch.ones(H, **options)
            chosen = _once("heads", list(self.factors), H)
            found[chosen] = torch.tensor(list(self.factors.values()), **options)
            return found
        found = torch.as_tensor(self.factors, **options)
        if len(found) != H:
            raise ShapeError(f"ScaleHeads has {len(found)} factors, and the layer {H} heads: give one for each.")
        return found


@dataclass(frozen=True, eq=False)
class Patch:
    """Put weights of your own in the place of some rows: the context of those queries becomes ``rows @ value``.

    Args:
        rows: the weights, (B|1, heads, queries, S), of the heads and queries chosen; they need not sum to 1.
        heads: which heads, as in `At`; None = all.
        queries: which queries; None = all.

    Raises:
        TypeError: rows that are no tensor of floats with four axes.

    References:
        Wang et al. 2022, "Interpretability in the Wild" (2211.00593).

    Example:
        >>> uniform = torch.full((1, 1, 1, 5), 1 / 5)
        >>> Patch(uniform, heads=2, queries=-1)  # the last query of head 2 looks at everything alike
        Patch(rows=(1, 1, 1, 5), heads=2, queries=-1)
    """

    rows: Tensor
    heads: Choice = None
    queries: Choice = None

    def __post_init__(self) -> None:
        rows: Any = self.rows
        if not isinstance(rows, Tensor) or rows.ndim != 4 or not rows.is_floating_point():
            shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"Patch takes weights as floats (B|1, heads, queries, S), not {shape}.")
        at = At(heads=self.heads, queries=self.queries)
        object.__setattr__(self, "heads", at.heads)
        object.__setattr__(self, "queries", at.queries)

    def __repr__(self) -> str:
        return f"Patch(rows={tuple(self.rows.shape)}, heads={self.heads}, queries={self.queries})"

    def before(self, call: Call) -> Call:
        """The call as it is; rows that don't fit are refused before anything is computed."""
        B, H, L, _ = call.query.shape
        heads, queries = self._chosen(call)
        wanted = (len(heads), len(queries), call.key.shape[2])
        if self.rows.shape[0] not in (1, B) or tuple(self.rows.shape[1:]) != wanted:
            raise ShapeError(
                f"Patch(heads={self.heads}, queries={self.queries}) needs rows of (B|1, heads, queries, S) = "
                f"({B}|1, {', '.join(map(str, wanted))}) in a layer of {H} heads and {L} queries, not "
                f"{tuple(self.rows.shape)}."
            )
        return call

    def after(self, call: Call, context: Tensor) -> Tensor:
        """The context with those rows in it."""
        heads, queries = self._chosen(call)
        group = call.query.shape[1] // call.value.shape[1]
        values = call.value[:, heads // group]
        patched = context.clone()
        patched[:, heads[:, None], queries] = (self.rows.to(values) @ values).to(context.dtype)
        return patched

    def _chosen(self, call: Call) -> tuple[Tensor, Tensor]:
        _, H, L, _ = call.query.shape
        heads, queries = _once("heads", self.heads, H), _once("queries", self.queries, L)
        device = call.query.device
        return (
            torch.arange(H, device=device) if heads is None else heads.to(device),
            torch.arange(L, device=device) if queries is None else queries.to(device),
        )


def _once(name: str, choice: Choice, size: int) -> Tensor | None:
    """As `indices`, where what is chosen twice would have to become two things at once."""
    chosen = indices(name, choice, size)
    if chosen is not None and len(chosen.unique()) < len(chosen):
        raise ShapeError(f"{name}={choice!r} names the same of {size} {name} twice: give each one once.")
    return chosen


Intervention = Knockout | ScaleHeads | Patch


@contextmanager
def intervene(
    model: nn.Module, interventions: Mapping[int | str, Intervention | Sequence[Intervention]]
) -> Iterator[None]:
    """While this lasts, some attention layers of a model do something else; all others stay as they are.

    Edges are cut first; then heads are scaled and rows patched, in the order given. A layer whose edges are cut
    computes its attention by clearhead's kernels, with all else as the model has it. `record` inside or outside of it
    sees the weights without the cut edges; it sees nothing of scaled heads and patched rows, for they come after.

    Args:
        model: as for `record`: transformers models, and modules built on clearhead's; of torch's own layers those
            that `clearhead.convert` has made clearhead's.
        interventions: by layer: its name, the beginning of names (``"decoder"``), or its number in the model's
            order, negative from the end.

    Raises:
        KeyError: there is no such layer; the message lists them.
        ValueError: a layer of torch's own, or nothing to intervene in.
        TypeError: something else than interventions.
        ShapeError: when the model runs, an intervention that doesn't fit its inputs. A ValueError.
        IndexError: when the model runs, heads or queries out of range.

    Warns:
        UserWarning: layers that ran, and not through the registry, by name: nothing was changed in them.

    Example:
        >>> layer, x = MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
        >>> with intervene(layer, {0: [Knockout(KeyPadding([3], side="left")), ScaleHeads({1: 0.0})]}):
        ...     changed = layer(x)  # without the last three keys, and without head 1
        >>> torch.equal(changed, layer(x))
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"intervene takes a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(interventions, Mapping):
        raise TypeError(f"intervene takes {{layer: intervention}}, not {type(interventions).__name__}.")
    names = dict(model.named_modules())
    foreign, _ = attention_layers(model)
    torchs, _ = attention_modules(model)
    there = {*foreign, *torchs, *(module for module in names.values() if has_core(module))}
    layers = {name: module for name, module in names.items() if module in there}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer to intervene in: see clearhead.record.")
    wanted: dict[nn.Module, list[Intervention]] = {}
    for layer, asked in interventions.items():
        several = list(asked) if isinstance(asked, Sequence) else [asked]
        for one in several:
            if not isinstance(one, Intervention):
                raise TypeError(f"intervene takes Knockout, ScaleHeads and Patch for layer {layer!r}, not {one!r}.")
        for module in choose_layers(layers, layer):
            wanted.setdefault(module, []).extend(several)
    if left := [name for name, module in layers.items() if module in torchs and module in wanted]:
        raise ValueError(
            f"torch's own attention at {', '.join(map(repr, left))} can't be changed while it runs: "
            f"clearhead.convert(model) makes it clearhead's."
        )

    def handle(call: Call, run: Run) -> Tensor:
        return _changed(wanted[call.module], call, run)

    with ExitStack() as stack:
        mine, handler = set(wanted).intersection(foreign), None
        if mine:
            handler = stack.enter_context(handling(model, Handler(handle, mine)))
        for module, what in wanted.items():
            if module not in mine:
                stack.enter_context(handling_core(module, partial(_changed, what)))
        yield
        if handler is not None and (missed := handler.ran - handler.handled):
            warnings.warn(
                f"not changed, for they don't use transformers' attention registry, or were given another "
                f"implementation meanwhile: {', '.join(name for name, module in names.items() if module in missed)}.",
                stacklevel=3,
            )


def _changed(what: Sequence[Intervention], call: Call, run: Run) -> Tensor:
    changed = call
    for one in what:
        changed = one.before(changed)
    context, _ = run(changed)
    for one in what:
        context = one.after(changed, context)
    return context
