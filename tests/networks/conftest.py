"""Places where the fused kernels run in tests: Triton's interpreter, and a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton_interpreter import import_kernels_again, small_kernels

from networks import fused


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all kernels that the test launches, in order."""
    names: list[str] = []
    launch = fused.launch

    def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(fused, "launch", record)
    return names


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Iterator[list[str]]:
    """Kernels run in Triton's interpreter, as for CUDA tensors, with several tiles and few programs; their names."""
    with small_kernels(monkeypatch):
        yield launched


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> list[str]:
    """Kernels are compiled, even after tests in the interpreter; float32 without TF32."""
    pytest.importorskip("triton")
    import_kernels_again()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return launched
