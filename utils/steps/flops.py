"""Floating-point operations of a training step per sample."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def training_flops(network: nn.Module, *inputs: torch.Tensor) -> int:
    """Floating-point operations of forward and backward pass for one sample of the network's `inputs`, each [N, ...].

    Counts convolutions and linear layers, a multiply-add as two operations. Runs a copy of the network on the meta
    device, where tensors have no data: the network itself, the device and the random generators are not used.
    Subclasses of torch's convolutions count as the convolution, however they compute it.
    """
    tensors = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in network.buffers()}
    for parameter in network.parameters():
        tensors[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    plain = copy.deepcopy(network, tensors).eval()  # the memo keeps deepcopy from copying data
    for module in plain.modules():
        for kind in CONVOLUTIONS:
            if isinstance(module, kind):
                module.forward = functools.partial(_forward, kind, module)  # type: ignore[method-assign]
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        plain(*(torch.empty_like(part[:1], device="meta") for part in inputs)).sum().backward()
    return counter.get_total_flops()


def _forward(kind: Any, module: nn.Module, x: torch.Tensor, **_: object) -> torch.Tensor:
    return kind.forward(module, x)
