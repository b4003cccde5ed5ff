"""The operations of a training step per sample, counted without using the network or the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from networks import build_network
from utils.steps.flops import training_flops

UNET = {"crop": 16, "width": 4, "scales": 3}


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        ("unet", UNET, torch.rand(2, 4, 16, 16, 16)),
        ("cifar_cnn", {"shape": (3, 32, 32), "classes": 10, "norm": "ghost(4)"}, torch.rand(4, 3, 32, 32)),
        ("reuters_cnn", {"shape": (50,), "classes": 46, "vocabulary": 9}, torch.zeros(2, 50, dtype=torch.int64)),
    ],
)
def test_the_count_is_what_a_real_pass_executes_and_nothing_changes(
    name: str, options: dict[str, Any], inputs: torch.Tensor
) -> None:
    network = build_network(name, **options)
    before, random = {key: value.clone() for key, value in network.state_dict().items()}, torch.get_rng_state()
    counted = training_flops(network, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert network.training
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    with FlopCounterMode(display=False) as counter:
        network(inputs).sum().backward()
    assert counted == counter.get_total_flops() / len(inputs) > 0


def test_space_to_depth_and_fused_networks_count_as_the_plain_one() -> None:
    for options in ({}, {"space_to_depth": ["down1", "last"]}, {"fused": True}, {"space_to_depth": ["down2", "up2"]}):
        network = build_network("unet", **UNET, **options).requires_grad_(False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert training_flops(network, torch.rand(1, 4, 16, 16, 16)) == 13_107_200
