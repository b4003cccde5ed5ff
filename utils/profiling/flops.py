"""How much arithmetic a training takes, counted while its network runs, and how much the device can do at best."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class Flops:
    """Floating-point operations of all that ran: a multiplication and an addition count as two."""

    forward: int = 0
    training: int = 0  # forward and backward


@contextlib.contextmanager
def counted(network: nn.Module) -> Iterator[Flops]:
    """Counts the network's convolutions and linear layers, which do nearly all of the work, as they run.

    A backward pass takes as much again for the gradient of a layer's weights, and as much for that of its inputs, which
    is left out for the layer that the data enter. A layer counts as what it is, however it is carried out.
    """
    flops = Flops()
    data: list[torch.Tensor] = []

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        data[:] = [argument for argument in arguments if isinstance(argument, torch.Tensor)]

    def count(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        inputs = arguments[0]
        operations = 2 * _multiplications(module, inputs, output)
        first = any(inputs is tensor for tensor in data)
        flops.forward += operations
        flops.training += operations * (2 if first else 3)

    hooks = [network.register_forward_pre_hook(enter)]
    for module in network.modules():
        if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)):
            hooks.append(module.register_forward_hook(count))
    try:
        yield flops
    finally:
        for hook in hooks:
            hook.remove()


def _multiplications(module: nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> int:
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    assert isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED))
    kernel = math.prod(module.kernel_size)
    if isinstance(module, _TRANSPOSED):
        return inputs.numel() * module.out_channels // module.groups * kernel
    return output.numel() * module.in_channels // module.groups * kernel


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of a large matrix product of random numbers: what this device gives at best, here and now.

    The best of many: whatever else runs on the machine only takes away.
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    generator = torch.Generator(device).manual_seed(0)
    # Zeros would run faster than data do.
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    product = a @ b
    batch = 10 if on_gpu else 1
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        started = _now(device)
        for _ in range(batch):
            torch.mm(a, b, out=product)
        best = min(best, (_now(device) - started) / batch)
        if time.perf_counter() >= end:
            return 2 * size**3 / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
