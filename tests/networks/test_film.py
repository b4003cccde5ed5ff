"""Conditions scale and shift the hidden layers of a U-Net; the identity at the start. test_fused.py has the kernels."""

import pytest
import torch
from fused_cases import CONDITIONS, RANGES, batch, modulated
from networks.tail import NetworkWithFusedTail
from torch import nn
from torch.nn import functional as F

from networks import build_loss, build_network, initialize
from networks.film import Film, modulate
from networks.losses import NetworkWithLoss


@pytest.mark.parametrize("kind", ["normal", "default", "glorot"])
@pytest.mark.parametrize("fused", [False, True])
def test_at_the_start_a_conditioned_network_equals_the_unconditioned_one(kind: str, fused: bool) -> None:
    """Same random stream: the same bits in the weights they share, and in the output for any conditions."""
    networks = []
    for options in ({}, {"conditions": RANGES}):
        torch.manual_seed(1)
        network = build_network("unet", crop=8, width=4, scales=3, fused=fused, **options)
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
    """The modulation is after the norm, and the last layer has none. The fused tail gets the conditions, too."""
    network = build_network("unet", crop=8, width=4, scales=2, norm=norm, space_to_depth=["last"])
    initialize(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    film, layer = modulated(network).get_submodule("film"), dict(network.named_children())
    scaled = torch.tensor([[-1.0, 1.0, 0.0], [0.5, -0.5, 0.0]])
    embedded = film.get_submodule("embedding")(scaled) / 8  # the root of 64 features

    def hidden(name: str, x: torch.Tensor) -> torch.Tensor:
        x = layer[name](x) if norm == "none" else layer[f"{name}_norm"](layer[name](x))
        scale, shift = film.get_submodule(f"layers.{name}")(embedded)[..., None, None, None].chunk(2, dim=1)
        return x * (1 + scale) + shift

    x, targets = batch(size=8)
    down1 = F.leaky_relu(hidden("down1", x), 0.01)
    up2 = F.relu(hidden("up2", F.leaky_relu(hidden("down2", down1), 0.01)))
    expected = torch.tanh(layer["last"](torch.cat([up2, down1], 1)))
    assert torch.allclose(network(x, CONDITIONS), expected, atol=1e-5)
    assert not torch.allclose(network(x, CONDITIONS.flip(0)), expected, atol=1e-2)
    losses = [kind(network, build_loss("l1")) for kind in (NetworkWithLoss, NetworkWithFusedTail)]
    assert torch.equal(*(loss(x, targets, CONDITIONS) for loss in losses))


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


def test_networks_without_conditions_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"network lenet takes no conditions; remove network\.conditions"):
        build_network("lenet", shape=(1, 28, 28), classes=10, conditions=RANGES)
