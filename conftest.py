"""Names that docstring examples may use without importing them."""

import pytest
import torch

import clearhead


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(ch=clearhead, torch=torch)
    doctest_namespace.update({name: getattr(clearhead, name) for name in clearhead.__all__})
