"""Conditions scale and shift the hidden layers of a U-Net; the identity at the start."""

import pytest
import torch
from fused_cases import CONDITIONS, RANGES, batch, modulated
from torch import Tensor, nn
from torch.nn import functional as F

from networks import build_loss, build_network, initialize
from networks.film import Film, modulate
from networks.losses import NetworkWithLoss
from networks.ops import plan


@pytest.mark.parametrize("kind", ["normal", "default", "glorot"])
def test_at_the_start_a_conditioned_network_equals_the_unconditioned_one(kind: str) -> None:
    """Same random stream: the same bits in the weights they share, and in the output for any conditions."""
    networks = []
    for options in ({}, {"conditions": RANGES}):
        torch.manual_seed(1)
        network = build_network("unet", crop=8, width=4, scales=3, **options)
        initialize(network, torch.Generator().manual_seed(0), conv_init=kind, bias=0.1)
        networks.append(network)
    plain, conditioned = (network.state_dict() for network in networks)
    assert {name for name in conditioned if not name.startswith("film.")} == set(plain)
    assert all(torch.equal(conditioned[name], value) for name, value in plain.items())
    assert conditioned["film.embedding.0.weight"].abs().min() > 0
    inputs = torch.randn(2, 4, 8, 8, 8)
    assert torch.equal(networks[0](inputs), networks[1](inputs, 2 * CONDITIONS))


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_two_scales_equal_separate_operations(norm: str) -> None:
    """The modulation is after the norm, and the last layer has none. A loss by the last layer gets the conditions."""
    network = build_network("unet", crop=8, width=4, scales=2, norm=norm)
    initialize(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    film = modulated(network).get_submodule("film")
    scaled = torch.tensor([[-1.0, 1.0, 0.0], [0.5, -0.5, 0.0]])
    embedded = film.get_submodule("embedding")(scaled) / 8  # the root of 64 features

    def convolved(name: str, x: Tensor) -> Tensor:
        layer, convolve = network.get_submodule(name), F.conv3d if "down" in name else F.conv_transpose3d
        return convolve(x, layer.weight, layer.bias, 2, 1)  # type: ignore[arg-type]

    def hidden(name: str, x: Tensor) -> Tensor:
        x = convolved(name, x) if norm == "none" else network.get_submodule(f"{name}_norm")(convolved(name, x))
        scale, shift = film.get_submodule(f"layers.{name}")(embedded)[..., None, None, None].chunk(2, dim=1)
        return x * (1 + scale) + shift

    x, targets = batch(size=8)
    down1 = F.leaky_relu(hidden("down1", x), 0.01)
    up2 = F.relu(hidden("up2", F.leaky_relu(hidden("down2", down1), 0.01)))
    expected = torch.tanh(convolved("last", torch.cat([up2, down1], 1)))
    assert torch.allclose(network(x, CONDITIONS), expected, atol=1e-5)
    assert not torch.allclose(network(x, CONDITIONS.flip(0)), expected, atol=1e-2)
    model = NetworkWithLoss(network, build_loss("l1"))
    usual, model.loss.operation = model(x, targets, CONDITIONS), plan.LAST
    assert torch.equal(model(x, targets, CONDITIONS), usual)


def test_modulations_are_computed_in_float32_under_autocast() -> None:
    """bfloat16 would round a redshift of 3.01 to 3.0."""
    film = Film([[2.0, 4.0]], {"one": 3})
    nn.init.normal_(film.layers["one"].weight)  # type: ignore[arg-type]
    close = torch.tensor([[3.0], [3.001]])
    expected = film(close)["one"]
    with torch.autocast("cpu", torch.bfloat16):
        modulation = film(close)["one"]
    assert all(torch.equal(*pair) for pair in zip(modulation, expected, strict=True))
    assert not torch.equal(modulation.scale[0], modulation.scale[1])
    assert modulate(torch.ones(2, 3, 1, 1, 1, dtype=torch.bfloat16), modulation).dtype == torch.bfloat16
