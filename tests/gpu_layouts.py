"""Convolutions on the CPU with the memory format that a GPU gives their results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GpuLayouts(TorchDispatchMode):
    """Results of convolutions are channels-last; oneDNN chooses the format by the processor's instructions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default and result.dim() == 5:
            return result.contiguous(memory_format=torch.channels_last_3d)
        return result
