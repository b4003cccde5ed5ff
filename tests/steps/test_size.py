"""The operations of a training step per sample, counted without values."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from networks import build_network
from utils.steps.size import training_flops

UNET, FIELDS = {"crop": 16, "width": 4, "scales": 3}, torch.rand(2, 4, 16, 16, 16)


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        ("unet", UNET, FIELDS),
        ("cifar_cnn", {"shape": (3, 32, 32), "classes": 10, "norm": "ghost(4)"}, torch.rand(4, 3, 32, 32)),
        ("reuters_cnn", {"shape": (50,), "classes": 46, "vocabulary": 9}, torch.zeros(2, 50, dtype=torch.int64)),
    ],
)
def test_the_count_is_what_a_real_pass_executes(name: str, options: dict[str, Any], inputs: torch.Tensor) -> None:
    network = build_network(name, **options).to("meta")
    counted = training_flops(network, inputs.to("meta"))
    assert network.training
    with FlopCounterMode(display=False) as counter:
        build_network(name, **options)(inputs).sum().backward()
    assert counted == counter.get_total_flops() / len(inputs) > 0
