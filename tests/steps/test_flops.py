"""The operations of a training step per sample, counted without using the network or the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from networks import build_network
from utils.steps.flops import training_flops


class Several(nn.Module):
    """Strided layers in one dimension, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 5, stride=2, padding=1)
        self.second = nn.ConvTranspose1d(8, 6, 3, stride=2)
        self.last = nn.Linear(6, 10)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.relu(self.first(fields))).mean(2))


@pytest.mark.parametrize(
    ("network", "inputs"),
    [
        (build_network("unet", 16, width=4, scales=3), torch.rand(2, 4, 16, 16, 16)),
        (build_network("mnist_cnn", shape=(1, 28, 28), classes=10), torch.rand(2, 1, 28, 28)),
        (build_network("cifar_cnn", shape=(3, 32, 32), classes=10, norm="ghost(4)"), torch.rand(4, 3, 32, 32)),
        (build_network("reuters_cnn", shape=(50,), classes=46, vocabulary=9), torch.zeros(2, 50, dtype=torch.int64)),
        (Several(), torch.rand(3, 4, 33)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_count_is_what_a_real_forward_and_backward_pass_executes(network: nn.Module, inputs: torch.Tensor) -> None:
    counted = training_flops(network, inputs)
    with FlopCounterMode(display=False) as counter:
        network(inputs).sum().backward()
    assert counted == counter.get_total_flops() / len(inputs) > 0


def test_the_full_unet_needs_80_gflop_per_sample() -> None:
    """Three times the forward pass, except for the gradient with respect to the network's inputs."""
    network = build_network("unet", 64)
    assert (
        training_flops(network, torch.empty(1, 4, 64, 64, 64)) == 3 * 27_179_089_920 - 1_073_741_824 == 80_463_527_936
    )


def test_space_to_depth_and_fused_networks_count_as_the_plain_one() -> None:
    counts = set()
    for options in ({}, {"space_to_depth": ["down1", "last"]}, {"fused": True}, {"space_to_depth": ["down2", "up2"]}):
        network = build_network("unet", 16, width=4, scales=3, **options).requires_grad_(False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            counts.add(training_flops(network, torch.rand(1, 4, 16, 16, 16)))
    assert counts == {13_107_200}


def test_counting_leaves_the_network_and_the_random_state_unchanged() -> None:
    network = build_network("mnist_cnn", shape=(1, 28, 28), classes=10)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.get_rng_state()
    training_flops(network, torch.empty(2, 1, 28, 28))
    assert torch.equal(torch.get_rng_state(), random)
    assert network.training
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert "forward" not in vars(network.conv1)
