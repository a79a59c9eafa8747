"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.checks import Request
from clearhead.observe import Observe


class Backend(ABC):
    """One way to compute attention; stateless.

    A backend gets a `Request` whose query, key, value and bias hold no NaN and no infinity (but -inf in the
    bias, which hides), and gives the context, (B, Hq, L, Ev), with zeros in dead rows.

    Attributes:
        name: what ``backend=`` calls it.
        careful: whether it keeps the rules for NaN and infinity by itself, and may be given any.
        tolerance: for each dtype, how far the output, a gradient or a statistic may lie from the float64
            reference, relative to the size of the terms it sums. Scores of size s may add two of their own
            roundings, ``2 s eps``. A backend that is not as exact declares its own.
    """

    name: ClassVar[str]
    careful: ClassVar[bool] = False
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-12,
        torch.float32: 2e-6,
        torch.float16: 2e-3,
        torch.bfloat16: 2e-2,
    }

    @abstractmethod
    def reasons(self, request: Request) -> list[str]:
        """Why this backend can't do the request, each in a few words; empty if it can."""

    @abstractmethod
    def run(self, request: Request) -> Tensor:
        """The context, (B, Hq, L, Ev), in the query's dtype."""

    def see(self, request: Request, observe: Observe | None) -> tuple[Tensor, dict[str, Any]]:
        """The context, and those statistics asked for that come in the same pass, by name."""
        return self.run(request), {}
