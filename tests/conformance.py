"""What any backend must do, as functions of a case and a backend's name: shared by conformance and sabotage.

Each raises AssertionError where the library differs from the truth. Errors are relative to the truth's scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from cases import Case
from clearhead import look, plan
from clearhead.backends import BACKENDS

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# How a call is cut, as (TILE_ELEMENTS, MAX_ROWS, MIN_ROWS): the small ones make small inputs many tiles.
TILINGS = {"whole": None, "rows": (2**19, 3, 1), "single": (1, 2, 1)}


@contextmanager
def tiling(name: str) -> Iterator[None]:
    """Cut calls into tiles as named."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = TILINGS[name]
        if sizes is not None:
            for constant, size in zip(("TILE_ELEMENTS", "MAX_ROWS", "MIN_ROWS"), sizes, strict=True):
                patch.setattr(plan, constant, size)
            patch.setattr(look, "TILE_ELEMENTS", sizes[0])
        yield


# -- which calls a backend may decline, and in what words ------------------------------------------------------


def expected_reasons(case: Case, backend: str, *, bias_grad: bool = False, dropout_p: float = 0.0) -> list[str]:
    """Patterns of the reasons that `backend` must give for a case; none = it must do it."""
    s = case.sizes
    if backend != "sdpa":
        return []
    scale = case.inputs().scale
    told = {
        "empty inputs": 0 in (s.B, s.L, s.S, s.E, s.Ev),
        rf"head widths differ \(E={s.E}, Ev={s.Ev}\)": s.Ev != s.E,
        "dropout": dropout_p > 0,
        r"scale \S+ <= 0": scale is not None and scale <= 0,
        "bias needs a gradient": bias_grad and case.bias != "no-bias",
    }
    return [pattern for pattern, applies in told.items() if applies]


def with_backends(cases: Iterable[Case]) -> list[tuple[Case, str]]:
    """Each case with every backend that does it."""
    return [(case, name) for case in cases for name in BACKENDS if not expected_reasons(case, name)]


def check_declines(case: Case, backend: str, reasons: Iterable[str], **options: object) -> None:
    """The backend gives exactly these reasons."""
    given = case.inputs()
    if options.pop("bias_grad", False) and given.attn_bias is not None:
        given.attn_bias.requires_grad_()
    with pytest.raises(ch.BackendError) as caught:
        ch.attention(given.query, given.key, given.value, **given.options(), **options, backend=backend)
    told = str(caught.value).split(": ", 1)[1].rstrip(".").split("; ")
    missing = [pattern for pattern in reasons if not any(re.search(pattern, reason) for reason in told)]
    assert not missing, f"{case}: {backend} does not name {missing}: {told}"
    assert len(told) == len(list(reasons)), f"{case}: {backend} gives other reasons: {told}"


# -- comparing -------------------------------------------------------------------------------------------------


def assert_near(got: Tensor, truth: np.ndarray, tolerance: float, what: str, scale: float | None = None) -> None:
    """Same shape, infinities and NaN; all else within `tolerance` of the truth, in units of its largest."""
    found = got.detach().double().numpy()
    assert found.shape == truth.shape, f"{what}: shape {found.shape}, not {truth.shape}"
    finite = np.isfinite(truth)
    same = np.array_equal(found[~finite], truth[~finite], equal_nan=True)
    assert same, f"{what}: NaN or infinity in other places than they should be"
    assert np.isfinite(found[finite]).all(), f"{what}: NaN or infinity where there should be none"
    if finite.any():
        largest = float(np.abs(truth[finite]).max()) if scale is None else scale
        error = float(np.abs(found[finite] - truth[finite]).max())
        assert error <= tolerance * largest, f"{what}: error {error:.2e} in units of {largest:.2e}, not {tolerance}"


# -- output and gradients --------------------------------------------------------------------------------------


def check_output(case: Case, backend: str | None) -> None:
    """The output is the truth's, in the inputs' dtype; dead rows are exactly zero."""
    given = case.inputs()
    out = ch.attention(given.query, given.key, given.value, **given.options(), backend=backend)
    assert out.dtype == case.torch_dtype, f"{case}: dtype {out.dtype}"
    truth = case.truth
    assert_near(out, case.plain(truth.output), _tolerance(case), f"{case} output")
    dead = torch.from_numpy(case.plain(~truth.alive))
    assert not out[dead].any(), f"{case}: a dead row is not exactly zero"


def check_gradients(case: Case, backend: str | None, *, bias_grad: bool = True) -> None:
    """Gradients of query, key, value and bias, for a random gradient of the output."""
    given = case.inputs()
    leaves = {"query": given.query, "key": given.key, "value": given.value}
    if bias_grad and given.attn_bias is not None:
        leaves["bias"] = given.attn_bias
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = ch.attention(given.query, given.key, given.value, **given.options(), backend=backend)
    found = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), case.output_gradient()), strict=True))

    truth, sizes = case.gradients
    for name, gradient in found.items():
        assert gradient.dtype == leaves[name].dtype
        expected = truth[name]
        if name == "bias":  # it was broadcast to L x S
            axes = tuple(axis for axis, size in enumerate(case.bias_shape) if size == 1)
            expected = expected.sum(axis=axes, keepdims=True)
            gradient = case.full_bias(gradient)
        else:
            gradient = case.full(gradient)
        assert_near(gradient, expected, _tolerance(case), f"{case} gradient of {name}", scale=sizes[name])


def _tolerance(case: Case) -> float:
    """Of the dtype; and a score of size s is off by s times the precision it is kept in."""
    precision = torch.finfo(torch.float64 if case.dtype == "f64" else torch.float32).eps
    scores = case.truth.scores
    return TOLERANCE[case.torch_dtype] + 2 * precision * float(np.abs(scores[np.isfinite(scores)]).max(initial=0.0))


# -- what is seen ----------------------------------------------------------------------------------------------

OFFSETS = (0, 1, 3, -1, -2, 50)
TOP_K, POOLED = 3, 4


def observe_all(case: Case) -> ch.Observe:
    """Everything there is to ask for in attention()."""
    return replace(ch.Observe.all(), top_k=TOP_K, mass=_groups_of_keys(case), offsets=OFFSETS, pooled=POOLED)


def _groups_of_keys(case: Case) -> dict[str, Tensor]:
    s = case.sizes
    generator = torch.Generator().manual_seed(11)
    return {
        "each": torch.rand(s.B, s.S, generator=generator) < 0.5,
        "shared": torch.rand(1, s.S, generator=generator) < 0.3,
    }


def check_seen(case: Case, backend: str | None) -> None:
    """Looking leaves every bit of the output alone, and what is seen is the truth's."""
    given = case.inputs()
    tensors = (given.query, given.key, given.value)
    alone = ch.attention(*tensors, **given.options(), backend=backend)
    out, seen = ch.attention(*tensors, **given.options(), backend=backend, observe=observe_all(case))
    assert torch.equal(alone, out), f"{case}: looking changed the output"
    assert torch.equal(seen.context, out), f"{case}: the context seen is not the output"
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        assert torch.equal(seen[name], tensor), f"{case}: {name} seen is another"
    check_statistics(case, seen)


def check_statistics(case: Case, seen: ch.Seen) -> None:
    """Each field of what was seen, by `observe_all`."""
    truth = case.truth
    wanted: dict[str, np.ndarray] = {
        name: getattr(truth, name)
        for name in ("lse", "entropy", "max_weight", "distance", "received", "weights", "scores", "masked_scores")
    }
    wanted |= {"dropped_weights": truth.weights, "offsets": truth.offsets(OFFSETS)}
    fields = {name: seen[name] for name in wanted}
    for name, keys in _groups_of_keys(case).items():
        fields[f"mass {name}"], wanted[f"mass {name}"] = seen.mass[name], truth.mass(keys.numpy())
    for name, got, expected in zip(("mean", "max"), seen.pooled, truth.pooled(POOLED), strict=True):
        fields[f"pooled {name}"], wanted[f"pooled {name}"] = got, expected
    fields["top_k weights"], wanted["top_k weights"] = seen.top_k[0], truth.top_k(TOP_K)[0]

    # Half precision is looked at in float32.
    dtype = torch.float64 if case.dtype == "f64" else torch.float32
    tolerance = _tolerance(case) - TOLERANCE[case.torch_dtype] + TOLERANCE[dtype]
    for name, expected in wanted.items():
        assert fields[name].dtype == dtype, f"{case} {name}: dtype {fields[name].dtype}"
        assert not fields[name].requires_grad, f"{case} {name}: not detached"
        # Weights are shares of 1, and so are the errors of what they make up; scores have a scale of their own.
        finite = np.abs(expected[np.isfinite(expected)])
        scale = max(float(finite.max(initial=0.0)), 1.0)
        assert_near(fields[name], case.plain(expected), tolerance, f"{case} {name}", scale)
    dead = torch.from_numpy(case.plain(~truth.alive))
    for name in ("entropy", "max_weight", "distance", "weights"):
        assert not seen[name][dead].any(), f"{case} {name}: not exactly zero in a dead row"
    assert not seen.weights[torch.from_numpy(case.plain(~truth.visible))].any(), f"{case}: hidden weight is not 0"
    _check_top_keys(case, seen.top_k, tolerance)


def _check_top_keys(case: Case, top_k: tuple[Tensor, Tensor], tolerance: float) -> None:
    """The keys carry the weights they are said to; equal weights may come in any order."""
    truth, (_, keys) = case.truth, top_k
    assert keys.dtype == torch.int32
    found = case.full(keys).numpy()
    for at in np.ndindex(found.shape[:3]):
        row = found[at]
        count = min(TOP_K, int(truth.visible[at].sum()))
        assert (row[count:] == -1).all(), f"{case} top_k: {row} at {at} where {count} keys are visible"
        assert len(set(row[:count])) == count, f"{case} top_k: a key twice, {row}"
        assert truth.visible[at][row[:count]].all(), f"{case} top_k: a hidden key in {row}"
        expected = np.sort(truth.weights[at][truth.visible[at]])[::-1][:count]
        error = np.abs(truth.weights[at][row[:count]] - expected).max(initial=0.0)
        assert error <= tolerance, f"{case} top_k: keys {row} at {at} are not the strongest"


# -- non-finite numbers ----------------------------------------------------------------------------------------


def poisoned(case: Case, number: float) -> tuple[Tensor, ...]:
    """(query, key, value, bias) with `number` wherever no query of a live row can see it."""
    given, truth = case.inputs(), case.truth
    seen = truth.visible.any(axis=2)  # (B, Hq, S)
    seen_by_group = seen.reshape(*truth.key.shape[:2], -1, seen.shape[-1]).any(axis=2)
    hidden_keys = torch.from_numpy(case.plain(~seen_by_group))
    dead = torch.from_numpy(case.plain(~truth.alive))
    # Filled in place: the same memory layout, as another one may round otherwise.
    for tensor, where in ((given.query, dead), (given.key, hidden_keys), (given.value, hidden_keys)):
        tensor.masked_fill_(where[..., None], number)
    bias = given.attn_bias
    if bias is not None and bias.shape == case.plain(truth.scores).shape:
        # Where the bias itself hides, by -inf, it must stay.
        hidden = torch.from_numpy(case.plain(~truth.visible)) & (bias != -torch.inf)
        bias = bias.masked_fill(hidden, number)
    return given.query, given.key, given.value, bias


def check_hidden_poison(case: Case, backend: str | None, number: float) -> None:
    """What nobody sees changes no bit of the output, nor of any gradient, nor of what is seen."""
    given = case.inputs()
    options = given.options()

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[list[Tensor], ch.Seen]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        call = options | {"attn_bias": bias, "backend": backend}
        out, seen = ch.attention(*leaves, **call, observe=ch.Observe(entropy=True, lse=True, received=True, top_k=2))
        return [out, *torch.autograd.grad(out, leaves, case.output_gradient())], seen

    clean, clean_seen = run(given.query, given.key, given.value, given.attn_bias)
    dirty, dirty_seen = run(*poisoned(case, number))
    for name, a, b in zip(("output", "query", "key", "value"), clean, dirty, strict=True):
        assert torch.equal(a, b), f"{case}: hidden {number} changed {name} or its gradient"
    for name in ("entropy", "lse", "received"):
        assert torch.equal(clean_seen[name], dirty_seen[name]), f"{case}: hidden {number} changed {name}"
    assert torch.equal(clean_seen.top_k[1], dirty_seen.top_k[1]), f"{case}: hidden {number} changed top_k"


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
    assert_near(out[~rows], expected, _tolerance(case), f"{case} beside {number}", np.abs(truth.output).max())


# -- dropout ---------------------------------------------------------------------------------------------------


def check_dropout_share(backend: str | None, p: float) -> None:
    """One value of 1 and the rest 0 show each key's weight: kept ones are 1 / (1 - p) times as large."""
    B, H, L, S = 2, 3, 64, 97
    x = torch.zeros(B, H, L, S, dtype=torch.float64)
    value = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    torch.manual_seed(0)
    weights = ch.attention(x, x[:, :, :1].expand(B, H, S, S), value, dropout_p=p, backend=backend)
    kept = weights != 0
    n = kept.numel()
    bound = 5 * (p * (1 - p) / n) ** 0.5
    share = kept.double().mean().item()
    assert abs(share - (1 - p)) <= bound, f"dropout {p}: a share of {share:.4f} is kept"
    expected = torch.full_like(weights, 1 / S / (1 - p))
    assert torch.allclose(weights[kept], expected[kept], rtol=1e-12), f"dropout {p}: kept weights are not scaled"


def check_table(check: Callable[[Case, str], None], cases: Iterable[Case], backend: str) -> None:
    """One check over many cases, as the parametrised tests do it."""
    for case in cases:
        check(case, backend)
