"""The U-Net is the contract's: parameters, operations, shapes, initial weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from networks import VOLUME_NETWORKS, build_loss, build_network, initialise
from networks.unet import UNet


def test_full_network_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        network = UNet()
    assert sum(parameter.numel() for parameter in network.parameters()) == 116_977_029


def test_full_network_takes_80_gflop_a_sample_forward_and_backward() -> None:
    with torch.device("meta"):
        network, loss = UNet(), build_loss("l1")
        inputs, targets = torch.empty(1, 4, 64, 64, 64), torch.empty(1, 5, 64, 64, 64)
    with FlopCounterMode(display=False) as counter:
        loss(network(inputs), targets).backward()
    assert counter.get_total_flops() / 1e9 == pytest.approx(80.46, abs=0.01)


@pytest.mark.parametrize(("scales", "count"), [(5, 66_644_357)])
def test_without_full_scale_the_sixth_scale_is_left_out(scales: int, count: int) -> None:
    with torch.device("meta"):
        network = UNet(scales=scales)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_layers_are_those_of_the_contract() -> None:
    with torch.device("meta"):
        layers = {name: (layer.in_channels, layer.out_channels) for name, layer in UNet().named_children()}
    assert layers == {
        "down1": (4, 64),
        "down2": (64, 128),
        "down3": (128, 256),
        "down4": (256, 512),
        "down5": (512, 512),
        "down6": (512, 512),
        "up6": (512, 512),
        "up5": (1024, 512),
        "up4": (1024, 256),
        "up3": (512, 128),
        "up2": (256, 64),
        "last": (128, 5),
    }


def test_two_scales_compute_what_is_written_out_by_hand() -> None:
    network = build_network("unet", 8, in_channels=2, out_channels=3, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    x = torch.randn(2, 2, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    layer = dict(network.named_children())
    down1 = F.leaky_relu(layer["down1"](x), 0.01)
    down2 = F.leaky_relu(layer["down2"](down1), 0.01)
    up2 = F.relu(layer["up2"](down2))
    expected = torch.tanh(layer["last"](torch.cat([up2, down1], 1)))
    assert torch.equal(network(x), expected)
    assert expected.shape == (2, 3, 8, 8, 8)


@pytest.mark.parametrize("name", VOLUME_NETWORKS)
def test_every_network_for_volumes_keeps_the_grid(name: str) -> None:
    network = build_network(name, 8, in_channels=4, out_channels=5, width=4, scales=3)
    assert network(torch.zeros(1, 4, 8, 8, 8)).shape == (1, 5, 8, 8, 8)


def small(**options: Any) -> UNet:
    network = UNet(in_channels=3, out_channels=5, width=4, scales=3, **options)
    initialise(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    return network


def gradients(network: UNet, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and the gradients of all parameters."""
    output = network(x)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    return [output.detach(), *(parameter.grad for parameter in network.parameters() if parameter.grad is not None)]


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"rewritten": ["down1"]}, {"rewritten": ["down1", "last"]}, {"fused": True}],
    ids=lambda options: " ".join(options.get("rewritten", options)) or "plain",
)


@OPTIONS
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_options_change_neither_parameters_nor_results(options: dict[str, Any], form: torch.memory_format) -> None:
    plain, network = small(), small(**options).to(memory_format=form)
    weights = network.state_dict()
    assert list(weights) == list(plain.state_dict())
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    x = torch.randn(2, 3, 8, 8, 8, generator=torch.Generator().manual_seed(2))
    expected, got = gradients(plain, x), gradients(network, x.contiguous(memory_format=form))
    assert len(got) == 13
    assert got[0].is_contiguous(memory_format=form)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@OPTIONS
def test_compiler_and_tracer_see_one_graph(options: dict[str, Any]) -> None:
    network = small(**options)
    x = torch.randn(2, 3, 8, 8, 8, generator=torch.Generator().manual_seed(2))
    expected = network(x)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions advise against tracing as a whole
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(network, x[:1])
    assert torch.allclose(traced(x), expected, atol=1e-6)


def test_layers_that_cannot_be_rewritten_are_named() -> None:
    with pytest.raises(ValueError, match=r"network\.rewritten: up2 cannot be rewritten, only down1, last can"):
        build_network("unet", 8, width=4, scales=3, rewritten=["last", "up2"])


def test_weights_are_normal_and_biases_constant_and_the_seed_decides() -> None:
    networks = [build_network("unet", 8, width=8, scales=3) for _ in range(3)]
    for network, seed in zip(networks, (1, 1, 2), strict=True):
        initialise(network, torch.Generator().manual_seed(seed), "normal", 0.02, 0.25)
    first, same, other = (network.get_submodule("down3").weight.detach() for network in networks)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert float(first.std()) == pytest.approx(0.02, rel=0.05)
    assert float(first.mean()) == pytest.approx(0.0, abs=0.001)
    assert set(networks[0].get_submodule("last").bias.tolist()) == {0.25}


def test_a_crop_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="data_size 12 is not a multiple of 8"):
        build_network("unet", 12, width=4, scales=3)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown network vnet; known: unet"):
        build_network("vnet", 8)
    with pytest.raises(ValueError, match="unknown loss l2; known: l1"):
        build_loss("l2")


# --- norms -----------------------------------------------------------------------------------------------------------

NORMS = pytest.mark.parametrize("norm", ["batch", "sync_batch", "ghost(2)", "group"])


def test_a_norm_stands_between_convolution_and_activation_except_in_the_last_layer() -> None:
    """Written out by hand with torch's own batch norm."""
    network = build_network("unet", 8, in_channels=2, out_channels=3, width=4, scales=2, norm="batch")
    initialise(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    x = torch.randn(2, 2, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    layer = dict(network.named_children())

    def normal(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True)

    down1 = F.leaky_relu(normal(layer["down1"](x)), 0.01)
    down2 = F.leaky_relu(normal(layer["down2"](down1)), 0.01)
    up2 = F.relu(normal(layer["up2"](down2)))
    expected = torch.tanh(layer["last"](torch.cat([up2, down1], 1)))
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert [name for name in layer if name.endswith("norm")] == ["down1_norm", "down2_norm", "up2_norm"]


@NORMS
def test_with_a_norm_the_weights_of_convolutions_and_their_names_stay(norm: str) -> None:
    plain, network = small().state_dict(), small(norm=norm).state_dict()
    assert all(torch.equal(network[name], value) for name, value in plain.items())
    others = [name for name in network if name not in plain]
    assert others
    assert all(name.split(".")[0].endswith("_norm") for name in others)
    ones, zeros = (".weight", ".running_var"), (".bias", ".running_mean", ".num_batches_tracked")
    for name in others:
        assert name.endswith((*ones, *zeros))
        assert set(network[name].flatten().tolist()) == {1.0 if name.endswith(ones) else 0.0}


@NORMS
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_rewritten_layers_and_layouts_do_not_matter_to_a_norm(norm: str, form: torch.memory_format) -> None:
    # In float64: a norm makes up for how small the deepest activations are, and rounding would grow with them.
    plain = small(norm=norm).double()
    network = small(norm=norm, rewritten=["down1", "last"]).double().to(memory_format=form)
    x = torch.randn(4, 3, 16, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, got = gradients(plain, x), gradients(network, x.contiguous(memory_format=form))
    assert len(got) == 13 + 2 * 5
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-9 * max(float(theirs.abs().max()), 1.0)
    buffers = dict(plain.named_buffers())
    assert all(torch.allclose(value, buffers[name]) for name, value in network.named_buffers())


@NORMS
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_works_under_autocast_and_a_compiler(norm: str, compiled: bool) -> None:
    torch._dynamo.reset()
    exact, network = small(norm=norm), small(norm=norm)
    if compiled:
        network.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 3, 16, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        output = network(x)
    output.square().mean().backward()
    assert output.dtype == torch.float32
    expected = exact(x).detach()
    assert float((output.detach() - expected).norm() / expected.norm()) < 0.05
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


def test_a_norm_and_fused_layers_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="fused_pointwise leaves no place for norm group; leave one of them out"):
        build_network("unet", 8, width=4, scales=2, fused=True, norm="group")


def test_an_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="unknown norm layer; known: none, batch"):
        build_network("unet", 8, width=4, scales=2, norm="layer")
