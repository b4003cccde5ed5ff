"""Triton's interpreter, which runs kernels on the CPU."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

import networks
from networks import blocks, fused, strided, tail


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Kernels that are imported in the block run in the interpreter; yields triton.language.

    The interpreter replaces parts of triton.language. Triton 3.4, that of PyTorch 2.8, does not restore them.
    """
    language = pytest.importorskip("triton.language")  # imported first, without the interpreter
    owners = [language, language.core, language.math, language.tensor, language.dtype]
    before = [dict(vars(owner)) for owner in owners]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Its checks for overflows of integers, which small tensors cannot have, take most of the time.
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    yield language
    for owner, names in zip(owners, before, strict=True):
        for name, value in list(vars(owner).items()):
            if name in names and value is not names[name]:
                setattr(owner, name, names[name])
            elif name not in names and isinstance(owner, type):  # not submodules that were imported
                delattr(owner, name)


@contextlib.contextmanager
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the interpreter, as for CUDA tensors, with several tiles and few programs."""
    with interpreted(monkeypatch) as language:
        # `sum` is written in Triton itself and was built for the compiler when triton was imported.
        monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, language.standard._sum_combine))
        monkeypatch.setattr(fused, "_on_gpu", lambda x: True)
        for name, value in (("LANES", 64), ("TILE", 256), ("PROGRAMS", 4)):
            monkeypatch.setattr(fused, name, value)
        monkeypatch.setattr(tail, "TILE", 256)
        for name, value in (("CHUNK", 16), ("PROCESSORS", 3)):
            monkeypatch.setattr(blocks, name, value)
        import_kernels_again()
        yield
    import_kernels_again()


def use_own_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of `small_kernels`: own kernels compute strided convolutions of multiples of 16 channels."""
    for name, value in (("BLOCK", 16), ("PROCESSORS", 6), ("unavailable", lambda device: "")):
        monkeypatch.setattr(strided, name, value)
    monkeypatch.setattr(blocks, "BLOCK", 16)


def import_kernels_again() -> None:
    """Triton decides whether to compile or to interpret a kernel when the module is imported."""
    for module in (fused, strided):
        module.kernels.cache_clear()
    for name in ("kernels", "strided_kernels", "block_kernels"):
        if sys.modules.pop(f"networks.{name}", None) is not None:
            delattr(networks, name)
