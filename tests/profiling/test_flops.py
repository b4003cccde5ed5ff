"""Floating-point operations are counted as PyTorch's own counter counts them, on what ran."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from networks import build_network
from utils.profiling.flops import counted, matmul_peak


class Several(nn.Module):
    """Strides, a linear layer, one dimension; groups if wanted."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 5, stride=2, padding=1, groups=groups)
        self.second = nn.ConvTranspose1d(8, 6, 3, stride=2, groups=groups)
        self.last = nn.Linear(6, 10)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.relu(self.first(fields))).mean(2))


def test_the_count_is_that_of_pytorchs_counter() -> None:
    for network, inputs in (
        (build_network("unet", 16, width=4, scales=3), torch.rand(2, 4, 16, 16, 16)),
        (Several(), torch.rand(3, 4, 33)),
    ):
        with counted(network) as flops, torch.no_grad():
            network(inputs)
        with FlopCounterMode(display=False) as counter:
            network(inputs).sum().backward()
        assert flops.training == counter.get_total_flops() > 0
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    # The forward pass alone: PyTorch's counter takes the backward pass of groups for one without.
    network = Several(groups=2)
    with counted(network) as flops, FlopCounterMode(display=False) as counter, torch.no_grad():
        network(inputs)
    assert flops.forward == counter.get_total_flops() > 0


def test_rewritten_and_fused_networks_count_as_the_plain_one() -> None:
    counts = []
    for options in ({}, {"space_to_depth": ["down1", "last"]}, {"fused": True}):
        network = build_network("unet", 16, width=4, scales=3, **options)
        with counted(network) as flops, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            network(torch.rand(1, 4, 16, 16, 16))
        counts.append(flops)
    assert counts[0] == counts[1] == counts[2]


def test_the_peak_of_a_cpu_is_between_a_megaflop_and_a_petaflop() -> None:
    assert 1e6 < matmul_peak(torch.device("cpu"), torch.bfloat16, seconds=0.0) < 1e15
