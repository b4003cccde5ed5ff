"""The U-Net's convolutions equal torch's: the same parameters, outputs and gradients; the copies of space-to-depth.

Under bfloat16 autocast the last layers have a float32 result and bfloat16 gradients.
"""

import itertools

import pytest
import torch
from devices import DEVICES
from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d

Layer = nn.Conv3d | nn.ConvTranspose3d
Kind = type[Layer]

DENSE = [SpaceToDepthConv3d, DepthToSpaceConvTranspose3d]
KINDS = pytest.mark.parametrize("kind", DENSE)
FORMATS = pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)
CHANNELS_LAST = torch.channels_last_3d


def pair(kind: Kind, channels: tuple[int, int] = (4, 6), bias: bool = True) -> tuple[Layer, Layer]:
    """torch's layer, and one of this kind with the same weights."""
    torch.manual_seed(1)
    plain = nn.ConvTranspose3d if issubclass(kind, nn.ConvTranspose3d) else nn.Conv3d
    layers = [layer_kind(*channels, 4, stride=2, padding=1, bias=bias) for layer_kind in (plain, kind)]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers[0], layers[1]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def results(layer: Layer, x: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """The output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    y = layer(x)
    upstream = scale * random(*y.shape, dtype=y.dtype).to(y.device)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", [*DENSE, Conv3d, ConvTranspose3d, OutputConvTranspose3d])
@FORMATS
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_parameters_outputs_and_gradients_equal_those_of_the_plain_layer(
    kind: Kind, form: torch.memory_format, dtype: torch.dtype, error: float
) -> None:
    """For several channels and grids, and biases that are added, omitted or missing. The memory format is the same."""
    shapes = [((4, 6), (8, 8, 8)), ((3, 5), (6, 4, 10)), ((1, 7), (2, 2, 2)), ((5, 1), (6, 4, 4))]
    for (channels, size), bias in itertools.product(shapes, (True, False)):
        layers = [layer.to(dtype=dtype, memory_format=form) for layer in pair(kind, channels, bias)]
        assert list(layers[0].state_dict()) == list(layers[1].state_dict())
        x = random(2, channels[0], *size, dtype=dtype).contiguous(memory_format=form)
        expected, got = (results(layer, x) for layer in layers)
        if channels == (4, 6) and expected[0].is_contiguous(memory_format=form):
            assert got[0].is_contiguous(memory_format=form)
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert relative_error(ours, theirs) < error, (channels, size, bias)
        if bias:
            with torch.no_grad():
                later = layers[1](x, biased=False) + layers[1].bias.view(-1, 1, 1, 1)
            assert relative_error(later, expected[0]) < error


@KINDS
@FORMATS
def test_autocast_computes_in_bfloat16(kind: Kind, form: torch.memory_format) -> None:
    exact, layer = (layer.to(memory_format=form) for layer in pair(kind))
    x = random(2, 4, 8, 8, 8).contiguous(memory_format=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(layer, x)
    result = torch.float32 if kind is DepthToSpaceConvTranspose3d else torch.bfloat16
    assert [part.dtype for part in got] == [result, *[torch.float32] * 3]
    assert all(relative_error(ours, theirs) < 0.02 for ours, theirs in zip(got, results(exact, x), strict=True))


@DEVICES
@pytest.mark.parametrize("kind", [OutputConvTranspose3d, DepthToSpaceConvTranspose3d])
def test_under_bfloat16_autocast_a_last_layer_is_more_precise_than_bfloat16_without_underflow(
    kind: Kind, device: str
) -> None:
    """Compared with float64 for inputs that bfloat16 represents exactly; weights are rounded to float16 at most.

    Gradients of a mean over millions of cells are below 6e-8, the smallest positive float16.
    """
    plain, layer = (layer.to(device) for layer in pair(kind))
    x = random(2, 4, 4, 4, 4).bfloat16().to(device)
    for form in (torch.contiguous_format, CHANNELS_LAST):
        x = x.contiguous(memory_format=form)
        with torch.autocast(device, torch.bfloat16):
            got, coarse = results(layer, x, 1e-8), plain(x).detach()
        assert (got[0].dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
        assert got[0].is_contiguous(memory_format=form)
        exact = results(plain.double(), x.double(), 1e-8)
        errors = [
            float((part - reference).norm() / reference.norm()) for part, reference in zip(got, exact, strict=True)
        ]
        assert errors[0] < 4e-4 < 1e-3 < float((coarse - exact[0]).norm() / exact[0].norm())
        assert max(errors[1:]) < 1e-2
        assert got[2].dtype == got[3].dtype == torch.float32
        plain.float()


class Copies(TorchDispatchMode):
    """Records operations that write a tensor of more than `least` bytes, and those that leave channels_last_3d."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.copies, self.left = least, list[str](), list[str]()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        name = function.name().removeprefix("aten::")
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.nbytes <= self.least or function.is_view:
                continue
            if "conv" not in name and not name.startswith("empty"):
                self.copies.append(name.split(".")[0])
            if tensor.dim() == 5 and not tensor.is_contiguous(memory_format=CHANNELS_LAST):
                self.left.append(name)
        return result


@KINDS
def test_large_tensors_stay_channels_last_and_each_shuffle_is_one_copy(kind: Kind) -> None:
    """Forward and backward; blocks are filled with zeros first, because they extend beyond the grid."""
    layer = pair(kind, bias=False)[1].to(memory_format=CHANNELS_LAST)
    x = random(4, 4, 16, 16, 16).contiguous(memory_format=CHANNELS_LAST).requires_grad_()
    upstream = random(*layer(x).shape).contiguous(memory_format=CHANNELS_LAST)
    with Copies(least=layer.weight.nbytes) as forward:
        y = layer(x)
    with Copies(least=layer.weight.nbytes) as backward:
        y.backward(upstream)
    assert forward.left + backward.left == []
    gather, scatter = ["zero_", "copy_"], ["copy_"]
    expected = (gather, scatter) if kind is SpaceToDepthConv3d else (scatter, gather)
    assert (forward.copies, backward.copies) == expected
