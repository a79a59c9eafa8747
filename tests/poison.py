"""NaN, infinity and numbers that overflow, where nobody looks, and where somebody does: checks of a case and a
backend's name."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import clearhead as ch
from cases import Case
from conformance import assert_near, expected_tolerance, observe_of
from product import Run

NOT_FINITE = (math.nan, math.inf, -math.inf)
# Finite, but not their products; cut to what the dtype holds.
LARGE = (1e20, -sys.float_info.max)
POISONS = NOT_FINITE + LARGE


def held(number: float, dtype: torch.dtype) -> float:
    """The number, or the dtype's largest if it is finite and beyond that."""
    largest = torch.finfo(dtype).max
    return max(-largest, min(largest, number)) if math.isfinite(number) else number


def poisoned(case: Case, number: float) -> tuple[Tensor, ...]:
    """(query, key, value, bias) with `number` wherever no query of a live row can see it."""
    given, truth = case.inputs(), case.truth
    seen = truth.visible.any(axis=2)  # (B, Hq, S)
    seen_by_group = seen.reshape(*truth.key.shape[:2], -1, seen.shape[-1]).any(axis=2)
    hidden_keys = torch.from_numpy(case.plain(~seen_by_group))
    dead = torch.from_numpy(case.plain(~truth.alive))
    # Filled in place: the same memory layout, as another one may round otherwise.
    for tensor, where in ((given.query, dead), (given.key, hidden_keys), (given.value, hidden_keys)):
        tensor.masked_fill_(where[..., None], held(number, tensor.dtype))
    bias = given.attn_bias
    if bias is not None and bias.shape == case.plain(truth.scores).shape:
        # Where the bias itself hides, by -inf, it must stay.
        hidden = torch.from_numpy(case.plain(~truth.visible)) & (bias != -torch.inf)
        bias = bias.masked_fill(hidden, held(number, bias.dtype))
    return given.query, given.key, given.value, bias


def check_hidden_poison(case: Case, backend: str | None, number: float) -> None:
    """What nobody sees changes no bit of the output, nor of any gradient, nor of what is seen."""
    given = case.inputs()
    options = given.options()

    # Scores show the inputs as they came, poison and all.
    asked = replace(observe_of(Run(case, observe="statistics")), weights=True, dropped_weights=True)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[list[Tensor], ch.Seen]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        call = options | {"attn_bias": bias, "backend": backend}
        out, seen = ch.attention(*leaves, **call, observe=asked)
        return [out, *torch.autograd.grad(out, leaves, case.output_gradient())], seen

    clean, clean_seen = run(given.query, given.key, given.value, given.attn_bias)
    dirty, dirty_seen = run(*poisoned(case, number))
    for name, a, b in zip(("output", "query", "key", "value"), clean, dirty, strict=True):
        assert torch.equal(a, b), f"{case}: hidden {number} changed {name} or its gradient"
    for name in clean_seen:
        pairs = zip(pytree.tree_leaves(clean_seen[name]), pytree.tree_leaves(dirty_seen[name]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{case}: hidden {number} changed {name}"


def check_visible_poison(case: Case, backend: str | None, number: float) -> None:
    """NaN in one key, one value and one query gives NaN in the rows that see them, and only there."""
    given, truth = case.inputs(), case.truth
    s = case.sizes
    full = {name: case.full(getattr(given, name)).clone() for name in ("query", "key", "value")}
    bad = np.zeros((s.B, s.Hq, s.L), dtype=bool)
    group = s.Hq // s.Hkv
    for name, (b, h, i) in {
        "query": (s.B - 1, s.Hq - 1, s.L - 1),
        "key": (0, 0, s.S // 2),
        "value": (s.B - 1, 0, s.S - 1),
    }.items():
        full[name][b, h, i, 0] = number
        if name == "query":
            bad[b, h, i] |= truth.alive[b, h, i]
        else:
            bad[b, h * group : (h + 1) * group] |= truth.visible[b, h * group : (h + 1) * group, :, i]
    out = ch.attention(*(case.plain(full[n]) for n in ("query", "key", "value")), **given.options(), backend=backend)
    rows = torch.from_numpy(case.plain(bad))
    assert out[rows].isnan().all(), f"{case}: visible {number} does not show"
    expected = case.plain(truth.output)[~rows.numpy()]
    assert_near(
        out[~rows],
        expected,
        expected_tolerance(case, backend, case.torch_dtype),
        f"{case} beside {number}",
        np.abs(truth.output).max(),
    )
