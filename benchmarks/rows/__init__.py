"""Every line of the table."""

from __future__ import annotations

from benchmarks.race import Rows
from benchmarks.rows import forward, looking, models, modules, peak, peers, training


def all_rows() -> Rows:
    return [
        *forward.rows(),
        *looking.rows(),
        *training.rows(),
        *modules.rows(),
        *peak.rows(),
        *peers.rows(),
        *models.rows(),
    ]
