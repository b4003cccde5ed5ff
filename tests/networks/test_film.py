"""Conditions scale and shift the hidden layers of a U-Net; the identity at the start, with and without kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_cases import CHANNELS_LAST, assert_trains_like, batch, small_network, trained
from torch import nn
from torch.nn import functional as F

from networks import build_loss, build_network, initialize
from networks.film import Film, modulate
from networks.init import KINDS
from networks.losses import NetworkWithLoss
from networks.tail import NetworkWithFusedTail

RANGES = [[2.0, 4.0], [0.1, 0.3], [70.0, 70.0]]  # the last one is constant
CONDITIONS = torch.tensor([[2.0, 0.3, 70.0], [3.5, 0.15, 60.0]])


def modulated(network: nn.Module) -> nn.Module:
    """The network with random weights in place of the film's zeros."""
    generator = torch.Generator().manual_seed(0)  # float16 rounds no activation across zero
    with torch.no_grad():
        for parameter in network.get_submodule("film.layers").parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return network


class Conditioned(nn.Module):
    """A network with its loss for the same conditions in each call."""

    def __init__(self, fused: bool, **options: Any) -> None:
        super().__init__()
        network: Any = small_network(fused=fused, **options)
        torch.manual_seed(1)  # of the embedding
        network.condition_on(RANGES)
        modulated(network)
        self.model = NetworkWithLoss(network, build_loss("l1", fused=fused))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model(inputs, targets, CONDITIONS.to(inputs.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_at_the_start_a_conditioned_network_equals_the_unconditioned_one(kind: str, fused: bool) -> None:
    """Same random stream: the same bits in the weights they share, and in the output for any conditions."""
    networks = []
    for options in ({}, {"conditions": RANGES}):
        torch.manual_seed(1)
        network = build_network("unet", 8, width=4, scales=3, fused=fused, **options)
        initialize(network, torch.Generator().manual_seed(0), conv_init=kind, bias=0.1)
        networks.append(network)
    plain, conditioned = (network.state_dict() for network in networks)
    assert {name for name in conditioned if not name.startswith("film.")} == set(plain)
    assert all(torch.equal(conditioned[name], value) for name, value in plain.items())
    assert conditioned["film.embedding.0.weight"].abs().min() > 0
    inputs = torch.randn(2, 4, 8, 8, 8)
    assert torch.equal(networks[0](inputs), networks[1](inputs, 2 * CONDITIONS))


@pytest.mark.parametrize("norm", ["none", "group"])
def test_two_scales_equal_separate_operations(norm: str) -> None:
    """The modulation is after the norm, and the last layer has none."""
    network = build_network("unet", 8, width=4, scales=2, norm=norm, conditions=RANGES)
    initialize(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    film, layer = modulated(network).get_submodule("film"), dict(network.named_children())
    scaled = torch.tensor([[-1.0, 1.0, 0.0], [0.5, -0.5, 0.0]])
    embedded = film.get_submodule("embedding")(scaled) / 8  # the root of 64 features

    def hidden(name: str, x: torch.Tensor) -> torch.Tensor:
        x = layer[name](x) if norm == "none" else layer[f"{name}_norm"](layer[name](x))
        scale, shift = film.get_submodule(f"layers.{name}")(embedded)[..., None, None, None].chunk(2, dim=1)
        return x * (1 + scale) + shift

    x = torch.randn(2, 4, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    down1 = F.leaky_relu(hidden("down1", x), 0.01)
    up2 = F.relu(hidden("up2", F.leaky_relu(hidden("down2", down1), 0.01)))
    expected = torch.tanh(layer["last"](torch.cat([up2, down1], 1)))
    assert torch.allclose(network(x, CONDITIONS), expected, atol=1e-5)
    assert not torch.allclose(network(x, CONDITIONS.flip(0)), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"space_to_depth": ["down1", "down2", "up2", "last"]}], ids=str)
def test_a_fused_conditioned_network_trains_like_the_plain_one(
    interpreter: list[str], dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    """Losses and all gradients, those of the film among them; every layer has its kernel."""
    plain, fused = (Conditioned(kind, scales=2, **options) for kind in (False, True))
    x, targets = (part.contiguous(memory_format=CHANNELS_LAST) for part in batch(size=8))
    got = trained(fused, x, targets, dtype)
    assert interpreter == ["bias_activation"] * 4 + ["l1", "l1_backward"] + ["activation_backward"] * 4
    assert len(got) == 1 + len(list(fused.parameters()))
    assert_trains_like(got, plain, x, targets, dtype)


def test_the_fused_tail_gets_the_conditions_too() -> None:
    network = build_network("unet", width=4, scales=2, space_to_depth=["last"], conditions=RANGES)
    initialize(modulated(network), torch.Generator().manual_seed(0), scale=0.2)
    x, targets = batch(size=8)
    losses = [kind(network, build_loss("l1")) for kind in (NetworkWithLoss, NetworkWithFusedTail)]
    expected, found = (loss(x, targets, CONDITIONS) for loss in losses)
    assert torch.equal(found, expected)
    assert not torch.equal(found, losses[1](x, targets, CONDITIONS.flip(0)))


def test_modulations_are_computed_in_float32_under_autocast() -> None:
    """bfloat16 would round a redshift of 3.01 to 3.0."""
    film = Film([[2.0, 4.0]], {"one": 3})
    modulated(nn.ModuleDict({"film": film}))
    close = torch.tensor([[3.0], [3.001]])
    expected = film(close)["one"]
    with torch.autocast("cpu", torch.bfloat16):
        found = film(close)["one"]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not torch.equal(found.scale[0], found.scale[1])
    y = modulate(torch.ones(2, 3, 1, 1, 1, dtype=torch.bfloat16), found)
    assert y.dtype == torch.bfloat16


def test_networks_without_conditions_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"network lenet takes no conditions; remove network\.conditions"):
        build_network("lenet", shape=(1, 28, 28), classes=10, conditions=RANGES)
