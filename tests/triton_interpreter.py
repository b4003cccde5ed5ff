"""Triton's interpreter, which runs kernels on the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import networks
from networks import fused, strided


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
    for module in (fused, strided):
        module.kernels.cache_clear()
    for name in ("kernels", "strided_kernels", "block_kernels"):
        if sys.modules.pop(f"networks.{name}", None) is not None:
            delattr(networks, name)
