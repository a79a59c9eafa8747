"""Patterns that heads of language models are known for, as masks: of token ids, to be scored by `Observe`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks import KeyPadding, Mask, QueryPadding, Segments, Window
from clearhead.masks.values import id_rows, zero_one_rows

BEFORE = ~Window(left=0)  # the keys that come before the query


def patterns(
    ids: Tensor | Sequence[Sequence[int]], *, real: Tensor | Sequence[Sequence[int]] | None = None
) -> dict[str, Mask]:
    """The previous-token, duplicate-token and induction patterns of a text, for ``Observe(patterns=...)``.

    Query i, key j and token x, in self-attention:

    - ``"previous"``: ``j = i - 1``.
    - ``"duplicate"``: ``j < i`` and ``x_j = x_i``: earlier places of the query's token.
    - ``"induction"``: ``j < i`` and ``x_(j-1) = x_i``: what came right after an earlier place of the query's token.

    Padding is in no pattern: neither as query nor as key, nor as the token before a key.

    Args:
        ids: token ids, (B, L) or (L,) integers.
        real: (B|1, L) bool or 0/1 integers, True = a real token; None = all are.

    Shapes:
        each mask is for B items, L queries and L keys.

    Raises:
        MaskError: not integers, other axes, or `real` of another shape.

    References:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits" (previous token). Wang et al. 2022,
        "Interpretability in the Wild" (arXiv 2211.00593), section 3 (duplicate token). Olsson et al. 2022,
        "In-context Learning and Induction Heads" (arXiv 2209.11895), prefix matching (induction).

    Example:
        >>> found = patterns([7, 8, 9, 7, 8])
        >>> found["induction"].dense(5, 5).int()[0, 0].tolist()[3]  # the second 7 looks at the 8 after the first
        [0, 1, 0, 0, 0]
        >>> x = torch.randn(1, 2, 5, 4)
        >>> _, seen = attention(x, x, x, Causal(), observe=Observe(patterns=found))
        >>> seen.patterns["induction"].shape
        torch.Size([1, 2, 5])
    """
    ids = id_rows("ids", ids)
    before = ids.roll(1, dims=1)
    # Ids that no token has, another for queries and keys, so that they match nothing.
    low = ids.amin() if ids.numel() else ids.sum()
    queries, keys, previous = ids, ids, BEFORE & Window(left=1)
    known = torch.arange(ids.shape[1], device=ids.device) > 0  # whether the token before is
    if real is not None:
        flags = zero_one_rows("patterns", "real", real).to(ids.device)
        if flags.shape[1] != ids.shape[1] or flags.shape[0] not in (1, ids.shape[0]):
            raise MaskError(
                f"patterns: real must be (B|1, L) with B={ids.shape[0]}, L={ids.shape[1]} as the ids, not "
                f"{tuple(flags.shape)}."
            )
        queries, keys = ids.where(flags, low - 1), ids.where(flags, low - 2)
        previous = previous & KeyPadding(real=flags) & QueryPadding(real=flags)
        known = known & flags & flags.roll(1, dims=1)
    return {
        "previous": previous,
        "duplicate": Segments(queries, keys) & BEFORE,
        "induction": Segments(queries, before.where(known, low - 2)) & BEFORE,
    }
