"""The operations that optimizers add to a step, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.optimizer_cost import QR, measure, soap_operations
from utils import config as configs
from utils.config.sections import OptimizerConfig
from utils.optim.adam import is_weight
from utils.steps import build
from utils.steps.flops import training_flops

SHIPPED = "config/UNet.yaml"


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def test_soap_rotates_follows_and_renews() -> None:
    """A matrix m × n is rotated twice by both bases, and 1 in 10 updates renews them."""
    m, n = 6, 4
    rotation = 2 * m * n * (m + n)
    followed = 2 * m * n * (m + n)
    renewal = rotation + (2 + QR + 2) * (m**3 + n**3)
    expected = 2 * rotation + followed + renewal / 10
    assert soap_operations(OptimizerConfig(name="soap"), {"w": weight(m, n)}, 1) == pytest.approx(expected)
    # The rank with the longer side does more than the other.
    own = 2 * m**2 * n + (2 + QR) * m**3 / 10
    shared = 2 * rotation + own + (rotation + 2 * (m**3 + n**3)) / 10
    assert soap_operations(OptimizerConfig(name="soap"), {"w": weight(m, n)}, 2) == pytest.approx(shared)


def test_at_full_size_soap_adds_at_most_a_quarter_of_a_step_and_a_tenth_on_four_ranks() -> None:
    with torch.device("meta"):
        network = build.network(configs.load(SHIPPED, "bs64_fast", {"device": "cpu"}).for_world(1))
    weights = {name: each for name, each in network.named_parameters() if is_weight(name, each)}
    training = 64 * training_flops(network, torch.empty(1, 4, 64, 64, 64, device="meta"))
    one, four = (soap_operations(OptimizerConfig(name="soap"), weights, ranks) for ranks in (1, 4))
    assert 0.05 < one / (one + training) < 0.25
    assert 0.05 < four / (four + training) < 0.1


def test_bytes_of_adam_are_those_of_its_operands() -> None:
    """It reads weight, gradient and two moments, and writes all but the gradient. The norm reads the gradient."""
    changes = {"network.width": 4, "network.scales": 2, "data_size": 16, "local_batch_size": 2}
    config = configs.load(SHIPPED, "base", {**changes, "device": "cpu", "channels_last": True}).for_world(1)
    found = measure(config, {"name": "adam"}, 1.0)
    parameters = sum(parameter.numel() for parameter in build.network(config).parameters())
    assert found["gigabytes"] == pytest.approx(32e-9 * parameters, rel=0.01)
    assert found["1 ranks"] == found["4 ranks"] == {"operations": 0.0, "share": 0.0}
    more = measure(config, {"name": "soap"}, 1e6)
    assert more["gigabytes"] > 2 * found["gigabytes"] > 0
    assert 0 < more["4 ranks"]["share"] < more["1 ranks"]["share"] < 1
