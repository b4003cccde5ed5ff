"""The last layer: float32 result and bfloat16 gradients under bfloat16 autocast."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch import nn

from networks.layers import OutputConvTranspose3d
from networks.space_to_depth import DepthToSpaceConvTranspose3d

LAST = pytest.mark.parametrize("kind", [OutputConvTranspose3d, DepthToSpaceConvTranspose3d])


def fields(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def last_layer(kind: type[nn.Module], device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layer = kind(8, 5, 4, stride=2, padding=1)
    nn.init.normal_(layer.weight, 0, 0.02)
    return layer.to(device)


@DEVICES
@LAST
def test_under_bfloat16_autocast_the_result_is_float32_and_more_precise_than_bfloat16(kind, device: str) -> None:
    """Compared with float64 for inputs that bfloat16 represents exactly; weights are rounded to float16 at most."""
    layer, x = last_layer(kind, device), fields(2, 8, 4, 4, 4).bfloat16().to(device)
    plain = last_layer(nn.ConvTranspose3d, device)
    exact = last_layer(nn.ConvTranspose3d, device).double()(x.double())
    for form in (torch.contiguous_format, torch.channels_last_3d):
        with torch.autocast(device, torch.bfloat16):
            precise, coarse = layer(x.contiguous(memory_format=form)), plain(x)
        assert (precise.dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
        errors = [float(((result - exact).norm() / exact.norm()).detach()) for result in (precise, coarse)]
        assert errors[0] < 4e-4 < 1e-3 < errors[1]
        assert precise.is_contiguous(memory_format=form)


@DEVICES
@LAST
def test_tiny_gradients_do_not_underflow_in_float16(kind, device: str) -> None:
    """Gradients of a mean over millions of cells are below 6e-8, the smallest positive float16."""
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
def test_the_caller_can_provide_the_precise_input(kind: type[nn.Module]) -> None:
    layer, x = last_layer(kind), fields(2, 8, 4, 4, 4).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x, precise=x.float()), layer(x))
        assert not layer(x, biased=False, precise=torch.zeros(x.shape)).any()
