"""Marks of tests that need a GPU."""

from typing import Any

import pytest
import torch

ON_GPU = pytest.mark.gpu  # without a GPU, conftest.py skips tests with this mark
GPU_TYPES = [pytest.param("on_device", dtype, marks=ON_GPU) for dtype in (torch.float16, torch.bfloat16)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


def half_precision(interpreter: str) -> Any:
    """Parametrizes `place` and `dtype`: a fixture of the interpreter, which multiplies bfloat16 wrongly, and a GPU."""
    return pytest.mark.parametrize(("place", "dtype"), [(interpreter, torch.float16), *GPU_TYPES], ids=str)
