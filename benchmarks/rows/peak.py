"""How much of the machine's multiply-add rate is reached."""

from __future__ import annotations

from functools import partial

import clearhead as ch
from benchmarks.limits import peak_name, seconds_at_peak
from benchmarks.race import Race, Row, Rows
from benchmarks.rows.forward import inputs


def rows() -> Rows:
    return [
        Row("peak", f"dense, L={L}: share reached", peak_name(), partial(share, L), 0.70, share=True)
        for L in (1024, 2048, 8192)
    ]


def share(L: int) -> Race:
    q, k, v = inputs(L)
    B, H, _, E = q.shape
    operations = 2 * 2 * B * H * L * L * E  # two products; what the softmax does is not counted
    return Race(partial(ch.attention, q, k, v), partial(seconds_at_peak, operations), stated=True)
