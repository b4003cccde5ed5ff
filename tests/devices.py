"""Marks of tests that need a GPU, and convolutions on the CPU with the memory format that a GPU gives their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


class GpuLayouts(TorchDispatchMode):
    """Results of convolutions are channels-last; oneDNN chooses the format by the processor's instructions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default and result.dim() == 5:
            return result.contiguous(memory_format=torch.channels_last_3d)
        return result
