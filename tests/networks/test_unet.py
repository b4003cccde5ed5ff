"""The U-Net: published size, norms, memory formats, operations, and conditions, the identity at the start."""

from typing import Any

import pytest
import torch
from fused_cases import CONDITIONS, RANGES, batch, modulated
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from networks import build_loss, build_network, initialize
from networks.film import Film, modulate
from networks.losses import NetworkWithLoss
from networks.ops import plan
from networks.unet import UNet


def small(**options: Any) -> nn.Module:
    network = build_network("unet", **{"in_channels": 3, "width": 4, "scales": 3, **options})
    initialize(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    return network


def fields(samples: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(samples, 3, *(size,) * 3, generator=torch.Generator().manual_seed(2), dtype=dtype)


def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    output = network(x)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, list(network.parameters()), upstream)]


def test_the_full_network_has_the_published_size_and_cost() -> None:
    with torch.device("meta"):
        network, shallow, loss = UNet(), UNet(scales=5), build_loss("l1")
        inputs, targets = torch.empty(1, 4, 64, 64, 64), torch.empty(1, 5, 64, 64, 64)
    assert sum(parameter.numel() for parameter in network.parameters()) == 116_977_029
    assert sum(parameter.numel() for parameter in shallow.parameters()) == 66_644_357
    with FlopCounterMode(display=False) as counter:
        loss(network(inputs), targets).backward()
    assert counter.get_total_flops() / 1e9 == pytest.approx(80.46, abs=0.01)
    channels = [4, 64, 128, 256, 512, 512, 512]
    sizes = {f"down{scale}": (channels[scale - 1], channels[scale]) for scale in range(1, 7)}
    sizes |= {"up6": (512, 512), "up5": (1024, 512), "up4": (1024, 256), "up3": (512, 128), "up2": (256, 64)}
    layers = {name: (layer.in_channels, layer.out_channels) for name, layer in network.named_children()}
    assert layers == {**sizes, "last": (128, 5)}


NORMS = [{}, *({"norm": norm} for norm in ("batch", "sync_batch", "ghost(2)", "group"))]


@pytest.mark.parametrize("options", NORMS, ids=str)
def test_the_memory_format_changes_no_results_and_norms_no_other_parameters(options: dict[str, Any]) -> None:
    form = torch.channels_last_3d
    # With norms in float64: they amplify the small activations of the deepest layers, and with them rounding errors.
    dtype, error, shape = (torch.float64, 1e-9, (4, 16)) if "norm" in options else (torch.float32, 1e-5, (2, 8))
    plain, network = small(**options).to(dtype), small(**options).to(dtype=dtype, memory_format=form)
    weights = network.state_dict()
    x = fields(*shape, dtype)
    expected, got = gradients(plain, x), gradients(network, x.contiguous(memory_format=form))
    assert len(got) == 13 + (2 * 5 if "norm" in options else 0)
    assert dtype == torch.float64 or got[0].is_contiguous(memory_format=form)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) < error * float(theirs.abs().max()) + 1e-9
    buffers = dict(plain.named_buffers())
    assert all(torch.allclose(value, buffers[name]) for name, value in network.named_buffers())
    for name, value in small().state_dict().items():
        assert torch.equal(weights[name], value.to(dtype)), "norms take no random numbers"


@pytest.mark.parametrize("options", [{}, {"norm": "ghost(2)"}], ids=str)
def test_a_network_compiles_to_one_graph(options: dict[str, Any]) -> None:
    """Forward and backward under bfloat16 autocast, where the result is float32."""
    torch._dynamo.reset()
    network, x = small(**options), fields(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(network, x)
        got = gradients(torch.compile(network, backend="aot_eager", fullgraph=True), x)
    assert got[0].dtype == torch.float32
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).norm()) < 2e-2 * float(theirs.norm())


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


def test_smoothed_inputs_are_added_to_the_outputs_and_a_loss_by_the_last_layer_equals_the_usual_one() -> None:
    plain, network = small(out_channels=4), small(out_channels=4, added={3: 0, 0: 2})
    x, targets = fields(2, 8), 2 * torch.ones(2, 4, 8, 8, 8)
    expected = plain(x)
    expected[:, [0, 3]] += F.pad(x, (1,) * 6).unfold(2, 3, 1).unfold(3, 3, 1).unfold(4, 3, 1).mean((5, 6, 7))[:, [2, 0]]
    inner = (..., *[slice(1, -1)] * 3)
    torch.testing.assert_close(network(x)[inner], expected[inner])
    same = network(torch.ones_like(x)) - plain(torch.ones_like(x))
    torch.testing.assert_close(same, torch.tensor([1.0, 0, 0, 1]).view(4, 1, 1, 1).expand_as(same), msg="at the faces")
    model = NetworkWithLoss(network, build_loss("l1"))
    usual, model.loss.operation = model(x, targets), plan.LAST
    torch.testing.assert_close(model(x, targets), usual)


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
