"""Triton's interpreter, which runs kernels on the CPU."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

KERNELS = "pointwise", "l1", "smoothing", *(f"hopper.{name}" for name in ("common", "strided", "edges"))


def kernel_modules() -> list[ModuleType]:
    pytest.importorskip("triton")
    return [importlib.import_module(f"networks.ops.{name}") for name in KERNELS]


def replace_launch(monkeypatch: pytest.MonkeyPatch, new: Callable[..., None]) -> Callable[..., None]:
    """Makes all modules launch kernels with `new`; returns what they used before."""
    modules = [module for module in kernel_modules() if hasattr(module, "launch")]
    before = modules[0].launch
    for module in modules:
        monkeypatch.setattr(module, "launch", new)
    return before


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Kernels run in the interpreter; yields triton.language, whose replaced parts Triton 3.4 does not restore."""
    language = pytest.importorskip("triton.language")  # imported first, without the interpreter
    owners = [language, language.core, language.math, language.tensor, language.dtype]
    before = [dict(vars(owner)) for owner in owners]
    interpreter, triton = (importlib.import_module(name) for name in ("triton.runtime.interpreter", "triton"))
    # Its checks for overflows of integers, which small tensors cannot have, take most of the time.
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    # `sum` is written in Triton itself and was built for the compiler when triton was imported.
    monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, language.standard._sum_combine))
    for module in kernel_modules():
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.JITFunction):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(kernel.fn))
    yield language
    for owner, names in zip(owners, before, strict=True):
        for name, value in list(vars(owner).items()):
            if name in names and value is not names[name]:
                setattr(owner, name, names[name])
            elif name not in names and isinstance(owner, type):  # not submodules that were imported
                delattr(owner, name)


@contextlib.contextmanager
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the interpreter with several tiles and few programs."""
    values = {"pointwise": {"LANES": 64, "TILE": 256, "PROGRAMS": 4}, "l1": {"BLOCKS_TILE": 256}}
    values |= {"hopper.edges": {"CHUNK": 16, "PROCESSORS": 3}, "smoothing": {"TILE": 64}}
    with interpreted(monkeypatch):
        set_values(monkeypatch, values)
        yield


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of `small_kernels`: Hopper's kernels compute convolutions of multiples of 16 channels, on every GPU."""
    owners = ("hopper.common", "hopper.strided", "hopper.layers", "hopper.edges")
    set_values(monkeypatch, {name: {"BLOCK": 16} for name in owners})
    # Last: a module that is imported afterward would keep it.
    set_values(monkeypatch, {"hopper.tiles": {"BLOCK": 16, "PROCESSORS": 6}, "plan": {"not_hopper": lambda device: ""}})


def set_values(monkeypatch: pytest.MonkeyPatch, values: dict[str, dict[str, Any]]) -> None:
    for module, names in values.items():
        for name, value in names.items():
            monkeypatch.setattr(importlib.import_module(f"networks.ops.{module}"), name, value)
