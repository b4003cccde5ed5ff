"""Triton's interpreter in place of a GPU, for the tests of loaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton_interpreter import interpreted

from utils.data.loaders import crop_kernels


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compiled in the test run in Triton's interpreter."""
    with interpreted(monkeypatch):
        crop_kernels._kernel.cache_clear()
        yield
    crop_kernels._kernel.cache_clear()
