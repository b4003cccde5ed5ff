"""Places where the kernels run in tests: Triton's interpreter, and a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton_interpreter import replace_launch, small_kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all kernels that the test launches, in order."""
    names: list[str] = []

    def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    launch = replace_launch(monkeypatch, record)
    return names


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Iterator[list[str]]:
    """Kernels run in Triton's interpreter, with several tiles and few programs; their names."""
    with small_kernels(monkeypatch):
        yield launched


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> list[str]:
    """Kernels are compiled; float32 without TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return launched
