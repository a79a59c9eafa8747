"""``make conformance``: what was run, and how far from the truth the worst of it is.

Run as ``python -m conformance_report`` in `tests`; fails if a run is out of its backend's tolerance.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import clearhead as ch
from cases import DTYPES, KINDS, Case
from clearhead.backends import BACKENDS
from conformance import error_of, expected_reasons, measure, perform
from product import DROPOUT_P, RUNS, STRENGTH, Run

Errors = tuple[float, float, int, int]  # ours, torch's, how many cases, how many that torch gets wrong
WRONG = 1e-3  # a float32 error this large is no rounding
FAMILIES = {
    "causal": "causal",
    "window": "window",
    "keys": "padding",
    "queries": "padding",
    "segments": "segments",
    "prefix": "prefix",
    "allowed": "tensors",
    "blocked": "tensors",
    "bare": "tensors",
}


def families(case: Case) -> tuple[str, str]:
    """(of the mask, of the shape)."""
    alone = case.mask in KINDS or case.mask.startswith("bare")
    mask = FAMILIES[case.mask.split("-")[0]] if alone else "none" if case.mask == "none" else "pairs"
    return mask, case.shape


def float32_errors(cases: Iterable[Case]) -> dict[tuple[str, str], Errors]:
    """By (backend, family of masks or shapes) the worst errors of the output, relative to its largest number."""
    found: dict[tuple[str, str], Errors] = {}
    for case in dict.fromkeys(replace(case, dtype="f32") for case in cases):
        if (case.softcap, case.sinks) != ("no-cap", "no-sinks"):
            continue  # torch has neither
        if not case.truth.output.size or not np.abs(case.truth.output).max():
            continue  # nothing to be a part of
        torchs = _error_of_torch(case)
        for backend in BACKENDS:
            if expected_reasons(case, backend):
                continue
            ours = error_of(perform(Run(case, backend)).out, case.plain(case.truth.output), str(case))
            for family in families(case):
                worst, worst_torch, n, wrong = found.get((backend, family), (0.0, 0.0, 0, 0))
                if torchs > WRONG:
                    found[backend, family] = (worst, worst_torch, n, wrong + 1)
                else:
                    found[backend, family] = (max(worst, ours), max(worst_torch, torchs), n + 1, wrong)
    return found


def _error_of_torch(case: Case) -> float:
    """Of torch's own function given the same; infinite where it fails, or gives NaN."""
    given, s = case.inputs(), case.sizes
    query, key, value = (case.full(tensor) for tensor in (given.query, given.key, given.value))
    causal = isinstance(given.mask, ch.Causal) and s.L == s.S and given.attn_bias is None
    mask = None
    if given.mask is not None and not causal:
        mask = given.mask.dense(s.L, s.S) if isinstance(given.mask, ch.Mask) else given.mask
    if given.attn_bias is not None:
        bias = case.full_bias(given.attn_bias)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    try:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=given.scale, enable_gqa=s.Hq != s.Hkv
        )
        return error_of(out, case.truth.output, str(case))
    except (AssertionError, RuntimeError):
        return float("inf")


# -- tables ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Print the tables; the exit code says whether all is within its tolerance."""
    failures: list[str] = []
    worst: dict[tuple[str, str, str], float] = {}
    share: dict[tuple[str, str], float] = {}
    ran: Counter[tuple[str, str]] = Counter()
    declined: Counter[tuple[str, str]] = Counter()
    for run in tqdm(RUNS, desc="runs", disable=not sys.stderr.isatty()):
        assert run.backend is not None  # every run of the product names one
        at = (run.backend, run.case.dtype)
        for backend in BACKENDS:
            dropout_p = DROPOUT_P if run.mode == "drops" else 0.0
            declined[backend, run.case.dtype] += bool(expected_reasons(run.case, backend, dropout_p=dropout_p))
        ran[at] += 1
        try:
            measured = measure(run)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
            continue
        for part in measured:
            worst[*at, part.kind] = max(worst.get((*at, part.kind), 0.0), part.error)
            share[at] = max(share.get(at, 0.0), part.error / part.allowed)
            if part.error > part.allowed:
                failures.append(f"{run}: {part.what} is off by {part.error:.2e}, not {part.allowed:.2e}")

    kinds = ("output", "gradients", "statistics")
    print(f"{len(RUNS)} runs cover every {STRENGTH} levels. Errors are relative to the size of the terms summed up;")
    print(
        "statistics of half precision are float32. Allowed: the tolerance and two roundings of the largest score.\n"
    )
    print("| backend | dtype | run | declined | output | gradients | statistics | tolerance | worst of allowed |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for backend, chosen in BACKENDS.items():
        for name, dtype in DTYPES.items():
            errors = " | ".join(f"{worst.get((backend, name, kind), 0.0):.1e}" for kind in kinds)
            at = (backend, name)
            print(
                f"| {backend} | {name} | {ran[at]} | {declined[at]} | {errors} | {chosen.tolerance[dtype]:.0e} "
                f"| {share.get(at, 0.0):.0%} |"
            )

    print("\nThe worst float32 error of the output beside that of `F.scaled_dot_product_attention`, same cases:\n")
    print("| backend | cases with | run | torch is wrong | ours | torch's | ratio |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for (backend, family), (ours, torchs, n, wrong) in sorted(float32_errors(run.case for run in RUNS).items()):
        ratio = ours / torchs if torchs else float(ours > 0)
        print(f"| {backend} | {family} | {n} | {wrong} | {ours:.1e} | {torchs:.1e} | {ratio:.2f} |")
        if ratio > 2:
            failures.append(f"{backend} {family}: float32 error {ours:.1e} is over twice torch's {torchs:.1e}")

    print(f"\n{len(failures)} failures." if failures else "\nEverything is within its tolerance.")
    for failure in failures:
        print(f"- {failure}")
    return bool(failures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
