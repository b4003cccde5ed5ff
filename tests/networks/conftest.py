"""Places where the fused kernels run in tests: Triton's interpreter, and a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton_interpreter import import_kernels_again, interpreted_kernels, launched_kernels

from networks import fused, tail


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels run in Triton's interpreter, with several tiles and few programs; their names."""
    launched = launched_kernels(monkeypatch)
    with interpreted_kernels(monkeypatch):
        for name, value in (("LANES", 64), ("TILE", 256), ("PROGRAMS", 4)):
            monkeypatch.setattr(fused, name, value)
        monkeypatch.setattr(tail, "TILE", 256)
        yield launched


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are compiled, even after tests in the interpreter; float32 without TF32."""
    pytest.importorskip("triton")
    import_kernels_again()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return launched_kernels(monkeypatch)
