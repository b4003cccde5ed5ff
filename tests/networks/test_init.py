"""Initial weights: their distributions, drawn from the given generator only."""

import math

import pytest
import torch
from torch import nn

from networks import build_network, initialize

LAYERS = [
    (lambda: nn.Conv1d(12, 40, 5), 60, 200),
    (lambda: nn.Conv3d(4, 20, 3), 108, 540),
    (lambda: nn.ConvTranspose3d(8, 16, 4), 1024, 512),  # torch's fan_in
    (lambda: nn.Linear(90, 60), 90, 60),
]


def drawn(layer: nn.Module, *arguments, seed: int = 0) -> nn.Module:
    initialize(layer, torch.Generator().manual_seed(seed), *arguments)
    return layer.requires_grad_(False)


def assert_uniform(values: torch.Tensor, bound: float) -> None:
    """Minimum, maximum and standard deviation are those of a uniform distribution within ±bound."""
    assert 0.95 * bound < float(values.max()) <= bound * (1 + 1e-6)
    assert 0.95 * bound < float(-values.min()) <= bound * (1 + 1e-6)
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.06)


@pytest.mark.parametrize(("make", "fan_in", "fan_out"), LAYERS)
def test_weights_and_biases_have_the_named_distribution(make, fan_in: int, fan_out: int) -> None:
    glorot = drawn(make(), "glorot", 0.02, 0.3)
    assert_uniform(glorot.weight, math.sqrt(6 / (fan_in + fan_out)))
    assert torch.equal(glorot.bias, torch.full_like(glorot.bias, 0.3))
    normal = drawn(make(), "normal", 0.5, -0.1)
    assert float(normal.weight.std()) == pytest.approx(0.5, rel=0.06)
    assert torch.equal(normal.bias, torch.full_like(normal.bias, -0.1))
    default = drawn(make(), "default", 0.5, -0.1)
    assert_uniform(default.weight, fan_in**-0.5)
    assert 0.3 * fan_in**-0.5 < float(default.bias.std()) < float(default.bias.abs().max()) <= fan_in**-0.5


def test_embeddings_have_their_own_bounds_and_norms_keep_their_parameters() -> None:
    assert_uniform(drawn(nn.Embedding(500, 7), "glorot").weight, 0.05)
    for kind, deviation in (("normal", 0.3), ("default", 1.0)):
        weight = drawn(nn.Embedding(500, 7), kind, 0.3).weight
        assert float(weight.std()) == pytest.approx(deviation, rel=0.06)
        norm = drawn(nn.GroupNorm(1, 5), kind, 0.1, 0.7)
        assert [*norm.weight.tolist(), *norm.bias.tolist()] == [1.0] * 5 + [0.0] * 5


@pytest.mark.parametrize("kind", ["normal", "default", "glorot"])
def test_weights_depend_on_the_given_generator_only(kind: str) -> None:
    networks = [build_network("reuters_cnn", shape=(300,), classes=46, vocabulary=100) for _ in range(3)]
    before = torch.get_rng_state()
    pairs = zip(networks, (0, 0, 5), strict=True)
    first, second, reseeded = (drawn(network, kind, seed=seed).state_dict() for network, seed in pairs)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, reseeded[name]) or (name.endswith("bias") and kind != "default")


def test_the_u_nets_weights_are_drawn_in_the_order_of_its_layers() -> None:
    """Layer by layer, weights before biases, so that a seed always gives the same weights."""
    network = drawn(build_network("unet", crop=8, width=4, scales=2), "default", seed=3)
    generator = torch.Generator().manual_seed(3)
    for name in ("down1", "down2", "up2", "last"):
        layer = network.get_submodule(name)
        bound = layer.weight[0].numel() ** -0.5
        for part in (layer.weight, layer.bias):
            assert torch.equal(part, torch.empty_like(part).uniform_(-bound, bound, generator=generator)), name
