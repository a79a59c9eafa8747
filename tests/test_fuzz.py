"""Calls that nobody would think of: sizes, strides, mask expressions, dtypes and observations drawn by hypothesis.

Each is compared with the double loop; then what is hidden is poisoned, which must change no bit. ``FUZZ=2000`` draws
that many, from a seed that is printed and can be given as ``FUZZ_SEED``; by default it's the same 100 every time.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
import oracle
from cases import BIASES, DTYPES, KINDS, LAYOUTS, SCALES, SINKS, SOFTCAPS, Built, Case, Inputs, Sizes
from clearhead.backends import BACKENDS
from conformance import TILINGS, check_run, error_of, expected_reasons, tiling
from poison import POISONS, check_hidden_poison
from product import DROPOUT_P, Run

EXAMPLES = int(os.environ.get("FUZZ", "100"))
SEED = int(os.environ.get("FUZZ_SEED", secrets.randbelow(2**32)))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == 100,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def seeded(test):  # type: ignore[no-untyped-def]
    """The seed of a long run, told where it fails."""
    return test if EXAMPLES == 100 else seed(SEED)(test)


@pytest.fixture(autouse=True)
def _tell_the_seed() -> None:
    if EXAMPLES != 100:
        print(f"repeat with FUZZ={EXAMPLES} FUZZ_SEED={SEED}")  # pytest shows it beside a failure


# -- what is drawn ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn(Case):
    """A case whose sizes, mask and strides are no levels of the product."""

    drawn: Sizes = field(kw_only=True)
    joined: Built = field(kw_only=True)
    strides: tuple[tuple[int, ...], ...] = field(
        kw_only=True
    )  # of query, key, value: the order of axes in memory, then steps

    __eq__ = object.__eq__  # not by the names of levels
    __hash__ = object.__hash__

    def __str__(self) -> str:
        levels = f"{self.dtype} {self.bias} {self.scale} {self.layout} {self.softcap} {self.sinks}"
        return f"{self.joined[0]!r} {self.drawn} {levels} {self.strides}"

    @property
    def sizes(self) -> Sizes:
        return self.drawn

    @property
    def built(self) -> Built:
        return self.joined

    def inputs(self) -> Inputs:
        """The same numbers, elsewhere in memory."""
        found = super().inputs()
        tensors = [
            _laid_out(tensor, plan)
            for tensor, plan in zip((found.query, found.key, found.value), self.strides, strict=True)
        ]
        return replace(found, query=tensors[0], key=tensors[1], value=tensors[2])


def _laid_out(tensor: Tensor, plan: tuple[int, ...]) -> Tensor:
    """A view whose axes lie in memory in another order and with gaps."""
    full = tensor[(None,) * (4 - tensor.ndim)]
    order, steps = plan[:4], plan[4:]
    room = torch.zeros([full.shape[axis] * step for axis, step in zip(order, steps, strict=True)], dtype=tensor.dtype)
    view = room[tuple(slice(None, None, step) for step in steps)].permute(*np.argsort(order).tolist())
    view.copy_(full)
    return view[(0,) * (4 - tensor.ndim)]


seldom = st.sampled_from([False] * 6 + [True])


def some_sizes(draw: st.DrawFn, layout: str) -> Sizes:
    B, Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    if layout in ("ble", "le"):
        Hkv = group = 1
    L, S, E = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 5))
    Ev = draw(st.sampled_from([E, E, E, 1, 3]))
    return Sizes(1 if layout == "le" else B, Hkv * group, Hkv, L, S, E, Ev)


def some_mask(draw: st.DrawFn, s: Sizes) -> Built:
    """An expression of & | ~ over all kinds of masks, and its rule; or none."""
    if draw(seldom):
        return None, oracle.everything()
    leaf = st.one_of(
        st.sampled_from(sorted(KINDS)).map(lambda name: KINDS[name](s)), windows(s), paddings(s), tables(s)
    )

    parts = [_perhaps_negated(draw, draw(leaf)) for _ in range(draw(st.integers(1, 4)))]
    while len(parts) > 1:
        at = draw(st.integers(0, len(parts) - 2))
        (one, rule), (two, other) = parts[at : at + 2]
        joined = (
            (one & two, oracle.both(rule, other)) if draw(st.booleans()) else (one | two, oracle.either(rule, other))
        )
        parts[at : at + 2] = [_perhaps_negated(draw, joined)]
    return parts[0]


def _perhaps_negated(draw: st.DrawFn, built: Built) -> Built:
    if draw(seldom):
        return ~built[0], oracle.negated(built[1])
    return built


def windows(s: Sizes) -> st.SearchStrategy[Built]:
    def build(left: int | None, right: int | None, align: str) -> Built:
        rule = oracle.window(left, right, s.S - s.L if align == "end" else 0)
        return ch.Window(left, right, align), rule

    width = st.none() | st.integers(0, 8)
    return st.builds(build, width, width, st.sampled_from(["end", "start"]))


def paddings(s: Sizes) -> st.SearchStrategy[Built]:
    def build(of_keys: bool, shares: list[float], side: str) -> Built:
        size = s.S if of_keys else s.L
        lengths = [min(size, int(share * (size + 1))) for share in shares]
        if of_keys:
            return ch.KeyPadding(lengths, side=side), oracle.key_padding(lengths, side, size)
        return ch.QueryPadding(lengths, side=side), oracle.query_padding(lengths, side, size)

    shares = st.lists(st.floats(0, 1), min_size=s.B, max_size=s.B)
    return st.builds(build, st.booleans(), shares, st.sampled_from(["right", "left"]))


def tables(s: Sizes) -> st.SearchStrategy[Built]:
    size = {"b": s.B, "h": s.Hq, "q": s.L, "k": s.S}

    def build(axes: list[str], ones: set[str], seed: int, share: float, blocked: bool) -> Built:
        shape = [1 if axis in ones else size[axis] for axis in axes]
        flags = np.random.default_rng(seed).random(shape) < share
        kind = ch.Blocked if blocked else ch.Allowed
        rule = oracle.table(~flags if blocked else flags, "".join(axes))
        return kind(torch.from_numpy(np.asarray(flags)), axes="".join(axes)), rule

    axes = st.lists(st.sampled_from("bhqk"), unique=True, min_size=1)
    share = st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])
    return st.builds(
        build, axes, st.sets(st.sampled_from("bhqk"), max_size=2), st.integers(0, 99), share, st.booleans()
    )


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    layout = draw(st.sampled_from(LAYOUTS))
    s = some_sizes(draw, layout)
    plan = st.permutations(range(4)).flatmap(
        lambda order: st.tuples(*(st.just(axis) for axis in order), *[st.integers(1, 3)] * 4)
    )
    return Drawn(
        "drawn",
        "drawn",
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.sampled_from(list(BIASES))),
        draw(st.sampled_from(["default", "default", *SCALES])),
        layout,
        draw(st.sampled_from(["no-cap", "no-cap", *SOFTCAPS])),
        draw(st.sampled_from(["no-sinks", "no-sinks", *SINKS])),
        drawn=s,
        joined=some_mask(draw, s),
        strides=tuple(draw(plan) for _ in range(3)),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    case = draw(cases())
    mode = draw(st.sampled_from(["eval", "train", "eval", "train", "drops"]))
    dropout_p = DROPOUT_P if mode == "drops" else 0.0
    able = [name for name in BACKENDS if not expected_reasons(case, name, dropout_p=dropout_p)]
    return Run(
        case,
        draw(st.sampled_from(able)),
        draw(st.sampled_from(["function", "module"]))
        if case.sinks + case.softcap == "no-sinksno-cap"
        else "function",
        mode,
        draw(st.sampled_from(["no-grad", "grad"])),
        draw(st.sampled_from(["nothing", "statistics", "maps"])),
        cut=draw(st.sampled_from(sorted(TILINGS))),
    )


# -- what must hold --------------------------------------------------------------------------------------------


@seeded
@fuzz
@given(runs(), st.sampled_from(POISONS))
def test_any_call_is_the_double_loops_and_hides_what_is_hidden(run: Run, number: float) -> None:
    check_run(run)
    with tiling(run.cut):
        check_hidden_poison(run.case, run.backend if run.mode != "drops" else None, number)


@seeded
@fuzz
@given(cases(), st.sampled_from(POISONS), st.booleans())
def test_a_module_with_any_mask(case: Drawn, number: float, train: bool) -> None:
    """Real projections: their products go through the double loop; hidden tokens of the memory are poisoned."""
    s, D, Dk, Dv = case.sizes, 3, 4, 5
    generator = torch.Generator().manual_seed(3)
    mha = ch.MultiHeadAttention(
        D, s.Hq, num_kv_heads=s.Hkv, head_dim=s.E, value_head_dim=s.Ev, kdim=Dk, vdim=Dv, dtype=torch.float64
    ).train(train)
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x, keys, values = (
        torch.randn(s.B, n, width, generator=generator, dtype=torch.float64)
        for n, width in ((s.L, D), (s.S, Dk), (s.S, Dv))
    )

    def heads(tensor: Tensor, projection: torch.nn.Module, width: int) -> np.ndarray:
        projected = tensor.numpy() @ projection.weight.detach().numpy().T + projection.bias.detach().numpy()
        return projected.reshape(*projected.shape[:2], -1, width).swapaxes(1, 2)

    truth = oracle.attend(
        heads(x, mha.q_proj, s.E), heads(keys, mha.k_proj, s.E), heads(values, mha.v_proj, s.Ev), case.built[1]
    )
    merged = truth.output.swapaxes(1, 2).reshape(s.B, s.L, -1)
    expected = merged @ mha.out_proj.weight.detach().numpy().T + mha.out_proj.bias.detach().numpy()
    out = mha(x, keys, values, mask=case.built[0])
    assert error_of(out, expected, str(case)) <= 1e-12

    hidden = torch.from_numpy(~truth.visible.any(axis=(1, 2)))[..., None]
    dirty = mha(x, keys.masked_fill(hidden, number), values.masked_fill(hidden, number), mask=case.built[0])
    # To the last bit but one: rows set aside may give a product another memory layout.
    torch.testing.assert_close(dirty, out, rtol=1e-13, atol=1e-14 * float(out.detach().abs().sum()))
