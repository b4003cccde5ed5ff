"""The last layer's result is finer than bfloat16, its gradients are bfloat16's, and compilers take it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from networks import build_loss, build_network, initialise
from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d
from networks.rewrites import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
LAST = pytest.mark.parametrize("kind", [OutputConvTranspose3d, DepthToSpaceConvTranspose3d])
FORMATS = pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)


def fields(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def last_layer(kind: type[nn.Module], device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layer = kind(8, 5, 4, stride=2, padding=1)
    nn.init.normal_(layer.weight, 0, 0.02)
    return layer.to(device)


@DEVICES
@LAST
@FORMATS
def test_under_bfloat16_the_result_is_float32_and_finer(kind, form, device: str) -> None:
    """Against float64 on inputs that bfloat16 holds, as activations are: weights are rounded to float16 at most."""
    layer, x = last_layer(kind, device), fields(2, 8, 4, 4, 4).bfloat16().to(device)
    plain = last_layer(nn.ConvTranspose3d, device)
    with torch.autocast(device, torch.bfloat16):
        fine, coarse = layer(x.contiguous(memory_format=form)), plain(x)
    exact = plain.double()(x.double())
    assert (fine.dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
    errors = [float(((result - exact).norm() / exact.norm()).detach()) for result in (fine, coarse)]
    assert errors[0] < 4e-4 < 1e-3 < errors[1]
    assert fine.is_contiguous(memory_format=form)


@DEVICES
@LAST
def test_gradients_survive_what_float16_would_round_to_nothing(kind, device: str) -> None:
    """Gradients of a mean over millions of cells are below 6e-8, the smallest number of float16."""
    layer, x = last_layer(kind, device), fields(2, 8, 4, 4, 4).bfloat16().to(device).requires_grad_()
    upstream = 1e-8 * fields(2, 5, 8, 8, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    got = torch.autograd.grad(y, [x, layer.weight, layer.bias], upstream)
    exact_x, exact_layer = x.detach().double().requires_grad_(), last_layer(nn.ConvTranspose3d, device).double()
    exact = torch.autograd.grad(exact_layer(exact_x), [exact_x, *exact_layer.parameters()], upstream.double())
    for one, other in zip(got, exact, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-2
    assert got[1].dtype == got[2].dtype == torch.float32


@LAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_autocast_it_is_the_plain_layer(kind, dtype: torch.dtype) -> None:
    layer, plain, x = (
        last_layer(kind).to(dtype),
        last_layer(nn.ConvTranspose3d).to(dtype),
        fields(2, 8, 4, 4, 4).to(dtype),
    )
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "channels"),
    [
        (Conv3d, 4),
        (ConvTranspose3d, 4),
        (SpaceToDepthConv3d, 4),
        (OutputConvTranspose3d, 8),
        (DepthToSpaceConvTranspose3d, 8),
    ],
)
def test_the_bias_can_be_left_out_and_a_call_is_seen_by_hooks(kind, channels: int) -> None:
    layer, seen = kind(channels, 5, 4, stride=2, padding=1), []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    x = fields(1, channels, 4, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, biased=False) + layer.bias.view(-1, 1, 1, 1), layer(x))
    assert len(seen) == 2


@pytest.mark.parametrize("rewritten", [(), ("down1", "last")])
def test_the_network_ends_in_float32_and_compiles_in_one_piece(rewritten: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    network = build_network("unet", 8, width=4, scales=2, rewritten=rewritten)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    loss, x, y = build_loss("l1"), fields(2, 4, 8, 8, 8), fields(2, 5, 8, 8, 8)

    def objective() -> torch.Tensor:
        outputs = network(x)
        assert outputs.dtype == torch.float32
        return loss(outputs, y)

    losses = []
    for run in (objective, torch.compile(objective, backend="aot_eager", fullgraph=True)):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = run()
        value.backward()
        losses.append([value.detach(), *(parameter.grad.clone() for parameter in network.parameters())])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)


def test_bfloat16_costs_the_loss_less_than_a_thousandth() -> None:
    """What rounding the result to bfloat16 would cost is several times as much."""
    network = build_network("unet", 16, width=8, scales=3)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    x = 0.5 * fields(4, 4, 16, 16, 16)
    with torch.no_grad():
        exact = network(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = network(x)
    assert half.dtype == torch.float32
    rounding = (exact.bfloat16().float() - exact).abs().mean()
    assert rounding > 0
    assert len(torch.unique(half)) > 10 * len(torch.unique(half.bfloat16())), "between the numbers that bfloat16 has"
