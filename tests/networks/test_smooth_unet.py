"""The U-Net with an interpolated last layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from networks import build_network, initialize
from networks.smooth_unet import InterpolatedConv3d, interpolate


def fields(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def small(name: str = "smooth_unet", scales: int = 2) -> torch.nn.Module:
    network = build_network(name, in_channels=3, out_channels=5, width=4, scales=scales)
    initialize(network, torch.Generator().manual_seed(0), scale=0.2, bias=0.1)
    return network


def reference(x: torch.Tensor) -> torch.Tensor:
    """The interpolation as a transposed convolution of each channel."""
    weights = torch.tensor([1.0, 5.0, 10.0, 10.0, 5.0, 1.0], dtype=x.dtype) / 16
    kernel = weights[:, None, None] * weights[:, None] * weights
    padded = F.pad(x.flatten(0, 1)[:, None], (1,) * 6, mode="replicate")
    return F.conv_transpose3d(padded, kernel[None, None], stride=2, padding=4).unflatten(0, x.shape[:2])[:, :, 0]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_interpolation_equals_a_transposed_convolution(form: torch.memory_format) -> None:
    """Values and gradients, with three different sides."""
    x = fields(2, 3, 4, 6, 1).contiguous(memory_format=form).requires_grad_()
    expected, got = reference(x), interpolate(x)
    upstream = fields(*expected.shape)
    torch.testing.assert_close(got, expected)
    gradients = (torch.autograd.grad(y, x, upstream)[0] for y in (got, expected))
    torch.testing.assert_close(*gradients)


def ripple(name: str) -> float:
    """The largest difference of neighboring cells in the interior of a prediction, for fields without structure."""
    network = small(name, scales=1)
    with torch.no_grad():
        interior = network(torch.ones(1, 3, 16, 16, 16))[..., 6:-6, 6:-6, 6:-6]
    return float((interior[..., 1:] - interior[..., :-1]).abs().max())


def test_fields_without_structure_give_a_prediction_without_a_grid_pattern() -> None:
    assert ripple("smooth_unet") < 1e-6 < 1e-2 < ripple("unet")


def test_a_shift_by_two_to_the_scales_shifts_the_prediction() -> None:
    """Compared where the prediction does not depend on the padding."""
    network, x = small(), fields(1, 3, 64, 8, 8)
    with torch.no_grad():
        whole, shifted = network(x), network(x.roll(4, 2))
    torch.testing.assert_close(shifted[:, :, 24:44], whole[:, :, 20:40])


def test_the_result_is_float32_and_precise_under_autocast_and_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    layer, x = InterpolatedConv3d(8, 5, 3, padding=1), fields(2, 8, 4, 4, 4).bfloat16()
    with torch.no_grad():
        weight, bias = (parameter.double() for parameter in layer.parameters())
        exact = reference(F.conv3d(x.double(), weight, bias, padding=1))
        with torch.autocast("cpu", torch.bfloat16):
            for each in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
                result = each(x)
                assert result.dtype == torch.float32
                assert float((result - exact).norm() / exact.norm()) < 4e-4


def test_the_network_is_exported_for_volumes_of_any_shape() -> None:
    network, side = small(), 4 * torch.export.Dim("cells", min=2, max=16)
    program = torch.export.export(network, (fields(1, 3, 8, 8, 8),), dynamic_shapes=({2: side},)).module()
    x = fields(1, 3, 16, 8, 8)
    torch.testing.assert_close(program(x), network(x))
