"""What any backend must do, as functions of a case and a backend's name: shared by conformance and sabotage.

Each raises AssertionError where the library differs from the truth. Errors are relative to the truth's scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import clearhead as ch
import oracle
from cases import MASKS as RULES
from cases import Built, Case
from clearhead import look, plan
from clearhead.backends import BACKENDS
from product import DROPOUT_P, Run

SEED = 13  # of what dropout draws

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


def expected_reasons(
    case: Case, backend: str | None, *, bias_grad: bool = False, dropout_p: float = 0.0
) -> list[str]:
    """Patterns of the reasons that `backend` must give for a case; none = it must do it."""
    s = case.sizes
    more = [name for name in ("softcap", "sinks") if not getattr(case, name).startswith("no-")]
    if backend == "native":
        return ["float64"] if case.dtype == "f64" else []
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
    return more + [pattern for pattern, applies in told.items() if applies]


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


# -- running ---------------------------------------------------------------------------------------------------


def expected_tolerance(case: Case, backend: str | None, dtype: torch.dtype) -> float:
    """The backend's own; and a score of size s is off by s times the precision it is kept in."""
    chosen = [BACKENDS[backend]] if backend is not None else list(BACKENDS.values())
    precision = torch.finfo(torch.float64 if case.dtype == "f64" else torch.float32).eps
    scores = case.truth.scores
    largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0.0))
    return max(one.tolerance[dtype] for one in chosen) + 2 * precision * largest


@dataclass(frozen=True)
class Found:
    """What a run gives, with the axes that the case has."""

    out: Tensor
    seen: dict[str, Any]
    gradients: dict[str, Tensor]


def perform(run: Run) -> Found:
    """The call, on the path that the run describes."""
    given = run.case.inputs()
    tensors = {"query": given.query, "key": given.key, "value": given.value}
    if given.attn_bias is not None:
        tensors["bias"] = given.attn_bias
    if given.sinks is not None:
        tensors["sinks"] = given.sinks
    bias_grad = not expected_reasons(run.case, run.backend, bias_grad=True)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if name != "bias" or bias_grad}
    call = _call_of(run, given.scale, given.softcap)
    if run.how == "compiled":
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(SEED)
    with tiling(run.cut), torch.set_grad_enabled(run.grad == "grad"):
        out, seen = call(given.query, given.key, given.value, given.mask, given.attn_bias, given.sinks)
        if run.form == "module":  # which always has all axes
            out, seen = pytree.tree_map(run.case.plain, (out, seen))
        gradients: dict[str, Tensor] = {}
        if run.grad == "grad":
            found = torch.autograd.grad(out, list(leaves.values()), run.case.output_gradient())
            gradients = dict(zip(leaves, found, strict=True))
    return Found(out, seen, gradients)


def _call_of(run: Run, scale: float | None, softcap: float | None) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """(query, key, value, mask, bias, sinks) -> (output, what is seen): by the function, or by a module that projects
    nothing."""
    case, observe = run.case, observe_of(run)
    s = case.sizes

    def function(
        query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Tensor | None, sinks: Tensor | None
    ) -> Any:
        dropout_p = DROPOUT_P if run.mode == "drops" else 0.0
        options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "backend": run.backend}
        options |= {"softcap": softcap, "sinks": sinks}
        if observe is None:
            return ch.attention(query, key, value, mask, attn_bias=bias, **options), {}
        out, seen = ch.attention(query, key, value, mask, attn_bias=bias, observe=observe, **options)
        return out, dict(seen)

    if run.form == "function":
        return function
    # In eval the module drops nothing, though it would in training.
    mha = ch.MultiHeadAttention(
        s.Hq * s.E,
        s.Hq,
        num_kv_heads=s.Hkv,
        head_dim=s.E,
        value_head_dim=s.Ev,
        dropout_p=0.0 if run.mode == "train" else DROPOUT_P,
        scale=scale,
    ).train(run.mode != "eval")
    mha.q_proj = mha.k_proj = mha.v_proj = mha.out_proj = torch.nn.Identity()

    def module(query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Tensor | None, _: None) -> Any:
        inputs = [case.full(tensor).transpose(1, 2).flatten(2) for tensor in (query, key, value)]
        bias = None if bias is None else case.full_bias(bias)
        found = mha(*inputs, mask=mask, attn_bias=bias, observe=observe, backend=run.backend)
        out, seen = found if observe is not None else (found, {})
        return out.unflatten(-1, (s.Hq, s.Ev)).transpose(1, 2), dict(seen)

    return module


def kept(run: Run) -> np.ndarray:
    """Which weights the run keeps, by what comes out for one-hot values: bool (B, Hq, L, S), hidden ones False."""
    s = run.case.sizes
    query, key = torch.zeros(s.B, s.Hq, s.L, 1), torch.zeros(s.B, s.Hkv, s.S, 1)
    one_hot = torch.eye(s.S).expand(s.B, s.Hkv, s.S, s.S)
    torch.manual_seed(SEED)
    with tiling(run.cut):
        weights = ch.attention(query, key, one_hot, run.case.built[0], dropout_p=DROPOUT_P, backend=run.backend)
    return (weights != 0).numpy()


# -- comparing -------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """How far one thing is from the truth, relative to its scale."""

    kind: str  # output, gradients or statistics
    what: str
    error: float
    allowed: float


def check_run(run: Run) -> None:
    """Everything the run gives is the truth's."""
    for found in measure(run):
        assert found.error <= found.allowed, (
            f"{run}: {found.what} is off by {found.error:.2e}, not {found.allowed:.2e}"
        )


def measure(run: Run) -> list[Measured]:
    """Errors of all that the run gives; AssertionError where it is wrong beyond rounding."""
    case, truth = run.case, run.case.truth
    if run.mode == "drops":
        truth = truth.dropped(kept(run), DROPOUT_P)
    found = perform(run)
    out, seen = found.out, found.seen
    assert out.dtype == case.torch_dtype, f"{run}: dtype {out.dtype}"
    assert out.requires_grad == (run.grad == "grad"), f"{run}: the output's requires_grad is {out.requires_grad}"
    allowed = expected_tolerance(case, run.backend, case.torch_dtype)
    # An output, too, may cancel to nothing: like a gradient it is measured by the size of its terms.
    error = error_of(out, case.plain(truth.output), f"{run} output", truth.output_size)
    measured = [Measured("output", "output", error, allowed)]
    dead = torch.from_numpy(case.plain(~truth.alive))
    assert not out[dead].any(), f"{run}: a dead row is not exactly zero"

    if found.gradients:
        expected, sizes = truth.gradients(case.full(case.output_gradient()).double().numpy())
        for name, gradient in found.gradients.items():
            what, wanted = f"gradient of {name}", expected[name]
            assert gradient.dtype == getattr(case.inputs(), "attn_bias" if name == "bias" else name).dtype, what
            if name == "bias":  # it was broadcast to L x S
                axes = tuple(axis for axis, size in enumerate(case.bias_shape) if size == 1)
                wanted = wanted.sum(axis=axes, keepdims=True)
                gradient = case.full_bias(gradient)
            elif name != "sinks":
                gradient = case.full(gradient)
            # Far below a bias of 100 a sink's share, and its gradient, are less than the dtype can hold.
            least = max(torch.finfo(case.torch_dtype).tiny, 1e-30) if name == "sinks" else 0.0
            error = error_of(gradient, wanted, f"{run} {what}", scale=max(sizes[name], least))
            measured.append(Measured("gradients", what, error, allowed))
    if seen:
        measured += _measure_seen(run, truth, seen)
        if run.how == "eager":
            alone = perform(replace(run, observe="nothing"))
            assert torch.equal(alone.out, out), f"{run}: looking changed the output"
            for name, gradient in alone.gradients.items():
                assert torch.equal(gradient, found.gradients[name]), f"{run}: looking changed the gradient of {name}"
    return measured


def error_of(got: Tensor, truth: np.ndarray, what: str, scale: float | None = None) -> float:
    """The largest error in units of the truth's largest number; same shape, infinities and NaN, or it fails."""
    found = got.detach().double().numpy()
    assert found.shape == truth.shape, f"{what}: shape {found.shape}, not {truth.shape}"
    finite = np.isfinite(truth)
    same = np.array_equal(found[~finite], truth[~finite], equal_nan=True)
    assert same, f"{what}: NaN or infinity in other places than they should be"
    assert np.isfinite(found[finite]).all(), f"{what}: NaN or infinity where there should be none"
    if not finite.any():
        return 0.0
    largest = float(np.abs(truth[finite]).max()) if scale is None else scale
    error = float(np.abs(found[finite] - truth[finite]).max())
    return error / largest if largest else float(np.inf if error else 0.0)


def assert_near(got: Tensor, truth: np.ndarray, tolerance: float, what: str, scale: float | None = None) -> None:
    """Same shape, infinities and NaN; all else within `tolerance` of the truth, in units of its largest."""
    error = error_of(got, truth, what, scale)
    assert error <= tolerance, f"{what}: error {error:.2e}, not {tolerance}"


def check_output(case: Case, backend: str | None) -> None:
    """The output is the truth's, in the inputs' dtype; dead rows are exactly zero."""
    check_run(Run(case, backend))


def check_gradients(case: Case, backend: str | None) -> None:
    """Gradients of query, key, value and bias, for a random gradient of the output."""
    check_run(Run(case, backend, grad="grad"))


def check_seen(case: Case, backend: str | None) -> None:
    """Looking leaves every bit of the output alone, and what is seen is the truth's."""
    check_run(Run(case, backend, observe="statistics"))
    check_run(Run(case, backend, observe="maps"))


# -- what is seen ----------------------------------------------------------------------------------------------

OFFSETS = (0, 1, 3, -1, -2, 50)
TOP_K, POOLED = 3, 4
MAPS = ("weights", "scores", "masked_scores", "dropped_weights")
SPLIT = ("query", "key", "value", "context")
STATISTICS = (
    "lse", "entropy", "max_weight", "max_score", "distance", "received", "received_mean", "value_weighted",
    "contribution", "agreement", "rest",
)  # fmt: skip


def observe_of(run: Run) -> ch.Observe | None:
    """All statistics, or all maps and parts, or nothing."""
    if run.observe == "maps":
        return ch.Observe(**dict.fromkeys((*MAPS, *SPLIT), True))
    if run.observe == "statistics":
        return ch.Observe(
            **dict.fromkeys(STATISTICS, True),
            top_k=TOP_K,
            mass=_groups_of_keys(run.case),
            patterns={name: mask for name, (mask, _) in _patterns(run.case).items()},
            lookback=torch.tensor(_lookback(run.case), dtype=torch.int64),
            offsets=OFFSETS,
            pooled=POOLED,
        )
    return None


def _groups_of_keys(case: Case) -> dict[str, Tensor]:
    s = case.sizes
    generator = torch.Generator().manual_seed(11)
    return {
        "each": torch.rand(s.B, s.S, generator=generator) < 0.5,
        "shared": torch.rand(1, s.S, generator=generator) < 0.3,
    }


def _patterns(case: Case) -> dict[str, Built]:
    """One that leaves runs of keys, one that leaves none, and one that differs over the heads."""
    s = case.sizes
    return {name: RULES[name](s) for name in ("window-past", "segments-mixed", "allowed-hqk")}


def _lookback(case: Case) -> list[int]:
    """Of each item another number of keys, from none to more than all."""
    s = case.sizes
    return [(s.S + 2) * item // max(1, s.B - 1) for item in range(s.B)] if s.B != 1 else [s.S // 2]


def _measure_seen(run: Run, truth: oracle.Truth, seen: dict[str, Any]) -> list[Measured]:
    """Each field that the run has seen."""
    case = run.case
    if run.observe == "maps":
        wanted = {name: getattr(truth, name) for name in MAPS}
        got = {name: seen[name] for name in MAPS}
        given = case.inputs()
        for name in ("query", "key", "value"):
            assert torch.equal(seen[name], getattr(given, name)), f"{run}: {name} seen is another"
        error = error_of(seen["context"], case.plain(truth.output), f"{run} context", truth.output_size)
        assert error <= expected_tolerance(case, run.backend, case.torch_dtype), f"{run}: context {error:.2e}"
        assert not seen["context"].requires_grad, f"{run}: the context seen is not detached"
    else:
        wanted = {name: getattr(truth, name) for name in STATISTICS} | {"offsets": truth.offsets(OFFSETS)}
        got = {name: seen[name] for name in wanted}
        for name, keys in _groups_of_keys(case).items():
            got[f"mass {name}"], wanted[f"mass {name}"] = seen["mass"][name], truth.mass(keys.numpy())
        for name, (_, allows) in _patterns(case).items():
            got[f"pattern {name}"], wanted[f"pattern {name}"] = seen["patterns"][name], truth.pattern(allows)
        got["lookback"], wanted["lookback"] = seen["lookback"], truth.lookback(_lookback(case))
        for name, part, expected in zip(("mean", "max"), seen["pooled"], truth.pooled(POOLED), strict=True):
            got[f"pooled {name}"], wanted[f"pooled {name}"] = part, expected
        got["top_k weights"], wanted["top_k weights"] = seen["top_k"][0], truth.top_k(TOP_K)[0]

    # Half precision is looked at in float32.
    dtype = torch.float64 if case.dtype == "f64" else torch.float32
    allowed = expected_tolerance(case, run.backend, dtype)
    measured = []
    for name, expected in wanted.items():
        assert got[name].dtype == dtype, f"{run} {name}: dtype {got[name].dtype}"
        assert not got[name].requires_grad, f"{run} {name}: not detached"
        # Weights are shares of 1, and so are the errors of what they make up; scores have a scale of their own.
        finite = np.abs(expected[np.isfinite(expected)])
        scale = max(float(finite.max(initial=0.0)), 1.0)
        if name == "contribution":
            scale = max(scale, truth.contribution_size)
        error = error_of(got[name], case.plain(expected), f"{run} {name}", scale)
        measured.append(Measured("statistics", name, error, allowed))
    dead = torch.from_numpy(case.plain(~truth.alive))
    for name in {"entropy", "max_weight", "distance", "rest", "weights"} & set(got):
        assert not got[name][dead].any(), f"{run} {name}: not exactly zero in a dead row"
    if run.observe == "maps":
        hidden = torch.from_numpy(case.plain(~truth.visible))
        assert not got["weights"][hidden].any(), f"{run}: weights that are hidden are not 0"
    else:
        _check_top_keys(run, truth, seen["top_k"][1], allowed)
    return measured


def _check_top_keys(run: Run, truth: oracle.Truth, keys: Tensor, tolerance: float) -> None:
    """The keys carry the weights they are said to; equal weights may come in any order."""
    assert keys.dtype == torch.int32
    found = run.case.full(keys).numpy()
    for at in np.ndindex(found.shape[:3]):
        row = found[at]
        count = min(TOP_K, int(truth.visible[at].sum()))
        assert (row[count:] == -1).all(), f"{run} top_k: {row} at {at} where {count} keys are visible"
        assert len(set(row[:count])) == count, f"{run} top_k: a key twice, {row}"
        assert truth.visible[at][row[:count]].all(), f"{run} top_k: a hidden key in {row}"
        expected = np.sort(truth.weights[at][truth.visible[at]])[::-1][:count]
        error = np.abs(truth.weights[at][row[:count]] - expected).max(initial=0.0)
        assert error <= tolerance, f"{run} top_k: keys {row} at {at} are not the strongest"


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
