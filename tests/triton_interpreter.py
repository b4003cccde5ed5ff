"""Triton's interpreter, which runs kernels on the CPU, and the kernels of networks in it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import networks
from networks import fused


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Kernels that are imported in the block run in the interpreter; yields triton.language.

    The interpreter replaces parts of triton.language. Triton 3.4, that of PyTorch 2.8, does not restore them.
    """
    language = pytest.importorskip("triton.language")  # imported first, without the interpreter
    owners = [language, language.core, language.math, language.tensor, language.dtype]
    before = [dict(vars(owner)) for owner in owners]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield language
    for owner, names in zip(owners, before, strict=True):
        for name, value in list(vars(owner).items()):
            if name in names and value is not names[name]:
                setattr(owner, name, names[name])
            elif name not in names and isinstance(owner, type):  # not submodules that were imported
                delattr(owner, name)


def import_kernels_again() -> None:
    """Triton decides whether to compile or to interpret a kernel when the module is imported."""
    fused.kernels.cache_clear()
    if sys.modules.pop("networks.kernels", None) is not None:
        del networks.kernels  # type: ignore[attr-defined]


def launched_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all kernels of networks that are launched from now on, in order."""
    names: list[str] = []
    launch = fused.launch

    def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(fused, "launch", record)
    return names


@contextlib.contextmanager
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of networks run in the interpreter, as for CUDA tensors."""
    with interpreted(monkeypatch) as language:
        # `sum` is written in Triton itself and was built for the compiler when triton was imported.
        monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, language.standard._sum_combine))
        monkeypatch.setattr(fused, "_on_gpu", lambda x: True)
        import_kernels_again()
        yield
    import_kernels_again()
