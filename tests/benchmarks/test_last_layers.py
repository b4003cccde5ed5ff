"""The networks with other last layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from benchmarks import common
from benchmarks.last_layers import InterpolatedUNet, SubPixelConv3d, SubPixelUNet
from utils import config as configs
from utils.steps import build


def test_a_sub_pixel_convolution_can_compute_the_strided_transposed_one() -> None:
    """Along an axis, cell 2i + p gets input i + t - 1 times the strided kernel's weight 3 - 2t + p."""
    strided, layer = nn.ConvTranspose3d(3, 2, 4, stride=2, padding=1), SubPixelConv3d(3, 16, 3, padding=1)
    assert strided.bias is not None
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias.copy_(strided.bias.repeat_interleave(8))
        weight = layer.weight.zero_().view(2, 2, 2, 2, 3, 3, 3, 3)  # [C, parts, inputs, taps]
        for part in itertools.product(range(2), repeat=3):
            for taps in itertools.product(range(3), repeat=3):
                x, y, z = (3 - 2 * t + p for t, p in zip(taps, part, strict=True))
                if {x, y, z} <= set(range(4)):
                    weight[(slice(None), *part, slice(None), *taps)] = strided.weight[:, :, x, y, z].T
    inputs = torch.randn(1, 3, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(inputs), strided(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.float32


@pytest.mark.parametrize("kind", [SubPixelUNet, InterpolatedUNet])
def test_a_config_names_the_network(kind: type[nn.Module]) -> None:
    name = f"benchmarks.last_layers.{kind.__name__}"
    config = configs.load(common.YAML, "test", {"network.name": name}).for_world(1)
    assert isinstance(build.network(config), kind)
    build.check_output(config)
