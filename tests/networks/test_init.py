"""Initial weights: their distributions, drawn from the given generator only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from networks import build_network, initialize

KINDS = ["normal", "default", "glorot"]
LAYERS = [
    (lambda: nn.Conv1d(12, 40, 5), 60, 200),
    (lambda: nn.Conv2d(12, 40, 3), 108, 360),
    (lambda: nn.Conv3d(4, 20, 3), 108, 540),
    (lambda: nn.ConvTranspose3d(8, 16, 4), 1024, 512),  # torch's fan_in
    (lambda: nn.Linear(90, 60), 90, 60),
]


def drawn(layer: nn.Module, *arguments, seed: int = 0) -> nn.Module:
    initialize(layer, torch.Generator().manual_seed(seed), *arguments)
    return layer


def assert_uniform(values: torch.Tensor, bound: float) -> None:
    """Minimum, maximum and standard deviation are those of a uniform distribution within ±bound."""
    assert float(values.abs().max()) <= bound * (1 + 1e-6)
    assert float(values.max()) > 0.95 * bound
    assert float(values.min()) < -0.95 * bound
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.06)


@pytest.mark.parametrize(("make", "fan_in", "fan_out"), LAYERS)
def test_weights_and_biases_have_the_named_distribution(make, fan_in: int, fan_out: int) -> None:
    glorot = drawn(make(), "glorot", 0.02, 0.3)
    assert_uniform(glorot.weight.detach(), math.sqrt(6 / (fan_in + fan_out)))
    assert torch.equal(glorot.bias, torch.full_like(glorot.bias, 0.3))
    normal = drawn(make(), "normal", 0.5, -0.1)
    assert float(normal.weight.detach().std()) == pytest.approx(0.5, rel=0.06)
    assert torch.equal(normal.bias, torch.full_like(normal.bias, -0.1))
    default = drawn(make(), "default", 0.5, -0.1)
    assert_uniform(default.weight.detach(), fan_in**-0.5)
    assert float(default.bias.abs().max().detach()) <= fan_in**-0.5
    assert float(default.bias.detach().std()) > 0.3 * fan_in**-0.5


def test_embeddings_have_their_own_bounds() -> None:
    assert_uniform(drawn(nn.Embedding(500, 7), "glorot").weight.detach(), 0.05)
    for kind, deviation in (("normal", 0.3), ("default", 1.0)):
        weight = drawn(nn.Embedding(500, 7), kind, 0.3).weight.detach()
        assert float(weight.std()) == pytest.approx(deviation, rel=0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_given_generator_only(kind: str) -> None:
    options = {"shape": (300,), "classes": 46, "vocabulary": 100}
    torch.manual_seed(1)
    first = drawn(build_network("reuters_cnn", **options), kind).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    network = build_network("reuters_cnn", **options)
    torch.set_rng_state(before)
    second = drawn(network, kind).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    other = drawn(build_network("reuters_cnn", **options), kind, seed=5).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, other[name]) or (name.endswith("bias") and kind != "default")


def test_norms_keep_their_parameters_and_unknown_kinds_are_refused() -> None:
    for kind in KINDS:
        network = nn.Sequential(nn.BatchNorm2d(5), nn.GroupNorm(1, 5))
        before = {name: value.clone() for name, value in network.state_dict().items()}
        drawn(network, kind, 0.1, 0.7)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with pytest.raises(ValueError, match="unknown conv_init he; known: normal, default, glorot"):
        drawn(nn.Linear(2, 2), "he")


@pytest.mark.parametrize("kind", ["normal", "default"])
def test_the_u_nets_weights_are_drawn_in_the_order_of_its_layers(kind: str) -> None:
    """Layer by layer, weights before biases, so that a seed always gives the same weights."""
    network = drawn(build_network("unet", 8, width=4, scales=2), kind, 0.1, 0.05, seed=3)
    generator = torch.Generator().manual_seed(3)
    for name in ("down1", "down2", "up2", "last"):
        layer = network.get_submodule(name)
        weight, bias = torch.empty_like(layer.weight), torch.empty_like(layer.bias)
        if kind == "normal":
            expected = weight.detach().normal_(0.0, 0.1, generator=generator), torch.full_like(bias, 0.05)
        else:
            bound = layer.weight[0].numel() ** -0.5
            expected = tuple(part.detach().uniform_(-bound, bound, generator=generator) for part in (weight, bias))
        for ours, theirs in zip((layer.weight, layer.bias), expected, strict=True):
            assert torch.equal(ours, theirs), name
