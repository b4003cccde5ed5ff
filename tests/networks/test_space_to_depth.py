"""The U-Net's convolutions equal torch's: the same parameters, outputs and gradients; the copies of space-to-depth."""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import GpuLayouts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d
from networks.space_to_depth import (
    DenseConvTranspose3d,
    DenseGradientConv3d,
    DepthToSpaceConvTranspose3d,
    SpaceToDepthConv3d,
    dense_transpose,
)

Layer = nn.Conv3d | nn.ConvTranspose3d

PAIRS = [
    (nn.Conv3d, SpaceToDepthConv3d),
    (nn.ConvTranspose3d, DepthToSpaceConvTranspose3d),
    (nn.Conv3d, DenseGradientConv3d),
    (nn.ConvTranspose3d, DenseConvTranspose3d),
]
BIAS_LATER = [(nn.Conv3d, Conv3d), (nn.ConvTranspose3d, ConvTranspose3d), (nn.ConvTranspose3d, OutputConvTranspose3d)]
KINDS = pytest.mark.parametrize(("plain", "space_to_depth"), PAIRS, ids=lambda kind: kind.__name__)
FORMATS = pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)


def pair(
    plain: type[Layer], space_to_depth: type[Layer], channels: tuple[int, int] = (4, 6), bias: bool = True
) -> tuple[Layer, Layer]:
    """Both layers with the same weights."""
    torch.manual_seed(1)
    layers = [kind(*channels, 4, stride=2, padding=1, bias=bias) for kind in (plain, space_to_depth)]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers[0], layers[1]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def results(layer: Layer, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    y = layer(x)
    upstream = random(*y.shape, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("plain", "space_to_depth"), [*PAIRS, *BIAS_LATER], ids=lambda kind: kind.__name__)
@FORMATS
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_parameters_outputs_and_gradients_equal_those_of_the_plain_layer(
    plain: type[Layer], space_to_depth: type[Layer], form: torch.memory_format, dtype: torch.dtype, error: float
) -> None:
    """For several channels and grids, and biases that are added, omitted or missing. The memory format is the same."""
    shapes = [((4, 6), (8, 8, 8)), ((3, 5), (6, 4, 10)), ((1, 7), (2, 2, 2)), ((5, 1), (6, 4, 4))]
    for (channels, size), bias in itertools.product(shapes, (True, False)):
        layers = [layer.to(dtype=dtype, memory_format=form) for layer in pair(plain, space_to_depth, channels, bias)]
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
def test_autocast_computes_in_bfloat16(
    plain: type[Layer], space_to_depth: type[Layer], form: torch.memory_format
) -> None:
    exact, layer = (layer.to(memory_format=form) for layer in pair(plain, space_to_depth))
    x = random(2, 4, 8, 8, 8).contiguous(memory_format=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(layer, x)
    # The transposed convolution is a last layer, with a float32 result; see test_layers.py.
    result = torch.float32 if space_to_depth is DepthToSpaceConvTranspose3d else torch.bfloat16
    assert [part.dtype for part in got] == [result, *[torch.float32] * 3]
    assert all(relative_error(ours, theirs) < 0.02 for ours, theirs in zip(got, results(exact, x), strict=True))


class Copies(TorchDispatchMode):
    """Records operations that write a tensor of more than `least` bytes, and those that leave channels_last_3d."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.copies, self.left, self.largest = least, list[str](), list[str](), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        name = function.name().removeprefix("aten::")
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.nbytes <= self.least or function.is_view:
                continue
            if "conv" not in name and not name.startswith("empty"):
                self.copies.append(name.split(".")[0])
                self.largest = max(self.largest, tensor.element_size())
            if tensor.dim() == 5 and not tensor.is_contiguous(memory_format=torch.channels_last_3d):
                self.left.append(name)
        return result


@KINDS
def test_large_tensors_stay_channels_last_and_each_shuffle_is_one_copy(
    plain: type[Layer], space_to_depth: type[Layer]
) -> None:
    """Forward and backward; blocks are filled with zeros first, because they extend beyond the grid."""
    _, layer = pair(plain, space_to_depth, bias=False)
    layer.to(memory_format=torch.channels_last_3d)
    x = random(4, 4, 16, 16, 16).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    upstream = random(*layer(x).shape).contiguous(memory_format=torch.channels_last_3d)
    with Copies(least=layer.weight.nbytes) as forward:
        y = layer(x)
    with Copies(least=layer.weight.nbytes) as backward:
        y.backward(upstream)
    assert forward.left + backward.left == []
    gather, scatter = ["zero_", "copy_"], ["copy_"]
    assert (forward.copies, backward.copies) == {
        SpaceToDepthConv3d: (gather, scatter),
        DepthToSpaceConvTranspose3d: (scatter, gather),
    }.get(space_to_depth, ([], []))  # copies within a custom operator are not recorded


@pytest.mark.parametrize("channels", [6, 8])
def test_a_dense_transposed_convolution_shuffles_once(channels: int) -> None:
    """In elements of 16 bytes if the channels of a cell fill them."""
    layer = DenseConvTranspose3d(4, channels, 4, stride=2, padding=1, dtype=torch.bfloat16).requires_grad_(False)
    x = random(4, 4, 8, 8, 8, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last_3d)
    with GpuLayouts(), Copies(least=layer.weight.nbytes) as trace:
        result = dense_transpose(x, layer.weight)
    assert (trace.copies, trace.left) == (["copy_"], [])
    assert trace.largest == (16 if channels == 8 else 2)
    plain = torch.nn.functional.conv_transpose3d(x.double(), layer.weight.double(), stride=2, padding=1)
    assert relative_error(result, plain) < 0.01


def test_the_input_is_cast_before_it_is_shuffled() -> None:
    """Under autocast, the shuffle reads float32 and writes bfloat16."""
    _, layer = pair(*PAIRS[0])
    x = random(2, 4, 8, 8, 8).contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16), Copies(least=layer.weight.nbytes) as trace:
            result = layer(x)
        assert trace.copies == ["zero_", "copy_"]
        assert trace.largest == result.element_size() == 2
