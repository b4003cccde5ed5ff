"""Floating-point operations are counted as PyTorch's own counter counts them, on what ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from networks import build_network
from utils.flops import counted, matmul_peak


class Several(nn.Module):
    """Strides, a linear layer, one dimension; groups if wanted."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 5, stride=2, padding=1, groups=groups)
        self.second = nn.ConvTranspose1d(8, 6, 3, stride=2, groups=groups)
        self.last = nn.Linear(6, 10)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.relu(self.first(fields))).mean(2))


@pytest.mark.parametrize(
    ("network", "inputs"),
    [
        (build_network("unet", 16, width=4, scales=3), torch.rand(2, 4, 16, 16, 16)),
        (Several(), torch.rand(3, 4, 33)),
    ],
)
def test_the_count_is_that_of_pytorchs_counter(network: nn.Module, inputs: torch.Tensor) -> None:
    with counted(network) as flops, torch.no_grad():
        network(inputs)
    with FlopCounterMode(display=False) as counter:
        network(inputs).sum().backward()
    assert flops.training == counter.get_total_flops() > 0


def test_groups_are_counted() -> None:
    """Forward: PyTorch's counter takes the backward pass of groups for one without."""
    network, inputs = Several(groups=2), torch.rand(3, 4, 33)
    with counted(network) as flops, FlopCounterMode(display=False) as counter, torch.no_grad():
        network(inputs)
    assert flops.forward == counter.get_total_flops() > 0


def test_rewritten_and_fused_networks_count_as_the_plain_one() -> None:
    counts = []
    for options in ({}, {"rewritten": ["down1", "last"]}, {"fused": True}):
        network = build_network("unet", 16, width=4, scales=3, **options)
        with counted(network) as flops, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            network(torch.rand(1, 4, 16, 16, 16))
        counts.append(flops)
    assert counts[0] == counts[1] == counts[2]


def test_nothing_is_counted_afterwards() -> None:
    network = nn.Linear(3, 2)
    with counted(network) as flops:
        network(torch.rand(5, 3))
    network(torch.rand(5, 3))
    assert flops.forward == 2 * 5 * 3 * 2
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_of_a_cpu_is_between_a_megaflop_and_a_petaflop(dtype: torch.dtype) -> None:
    assert 1e6 < matmul_peak(torch.device("cpu"), dtype, seconds=0.0) < 1e15
