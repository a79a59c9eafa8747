"""The native kernels compute in float32: so do the checks that a test makes of them."""

import pytest
import torch

from pains import encoder


@pytest.fixture(autouse=True)
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the test builds."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == "native":
        monkeypatch.setattr(encoder, "DTYPE", torch.float32)
        monkeypatch.setitem(encoder.DTYPES, "f64", torch.float32)
