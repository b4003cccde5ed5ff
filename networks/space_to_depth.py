"""Strided convolutions computed as dense ones (space-to-depth): the same sums, with enough channels for tensor cores.

With kernel 4, stride 2 and padding 1, output cell o of a convolution reads the padded input at 2o + k = 2(o + a) + r
for k = 2a + r. If the cells r of each block of 2³ are moved to channels, this is a convolution over a with kernel 2 and
stride 1: an input of 4 channels becomes one of 32. The transposed convolution is the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from networks.layers import convolve_to_float32, with_bias


class SpaceToDepthConv3d(nn.Conv3d):
    """`nn.Conv3d` with kernel 4, stride 2, padding 1 for few input channels; ValueError for other geometries."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _check(self)

    def forward(self, input: torch.Tensor, biased: bool = True) -> torch.Tensor:
        bias = self.bias if biased else None
        return F.conv3d(_space_to_depth(F.pad(input, (1,) * 6)), _space_to_depth(self.weight), bias)


class DepthToSpaceConvTranspose3d(nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with kernel 4, stride 2, padding 1 for few output channels; ValueError for other geometries.

    For last layers: under bfloat16 autocast the result is float32, as that of layers.OutputConvTranspose3d.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _check(self)

    def forward(  # type: ignore[override] # no output_size
        self, input: torch.Tensor, biased: bool = True
    ) -> torch.Tensor:
        # Output cell 2b + r - 1 sums weight[2a + r] times input cell b - a: a convolution with the kernel reversed.
        weight = _space_to_depth(self.weight).transpose(0, 1).flip(2, 3, 4)
        blocks = convolve_to_float32(input, weight, (1,) * 3, (1,) * 3)
        form = torch.channels_last_3d if _channels_last(input) else torch.contiguous_format
        # Half of each outermost block lies in the padding.
        result = _depth_to_space(blocks, form)[:, :, 1:-1, 1:-1, 1:-1].contiguous(memory_format=form)
        return with_bias(result, self.bias if biased else None)


def _check(layer: nn.Conv3d | nn.ConvTranspose3d) -> None:
    geometry = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding
    if geometry != ((4,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, (0,) * 3) or layer.groups != 1:
        raise ValueError(f"{layer}: space-to-depth needs kernel 4, stride 2, padding 1, dilation 1 and one group")
    if layer.padding_mode != "zeros":
        raise ValueError(f"{layer}: space-to-depth needs padding with zeros")


def _channels_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()


def _space_to_depth(x: torch.Tensor) -> torch.Tensor:
    """[N, C, D, H, W] -> [N, 8C, D // 2, H // 2, W // 2] in the same memory format; channels are [2, 2, 2, C]."""
    blocks = x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2)  # [N, C, D/2, H/2, W/2, 2, 2, 2]
    if _channels_last(x):
        return blocks.permute(0, 2, 3, 4, 5, 6, 7, 1).flatten(4).permute(0, 4, 1, 2, 3)
    return blocks.permute(0, 5, 6, 7, 1, 2, 3, 4).flatten(1, 4)


def _depth_to_space(x: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
    """[N, 8C, D, H, W] -> [N, C, 2D, 2H, 2W] in memory format `form`; the inverse of `_space_to_depth`."""
    blocks = x.unflatten(1, (2, 2, 2, -1))  # [N, 2, 2, 2, C, D, H, W]
    if form == torch.channels_last_3d:
        cells = blocks.permute(0, 5, 1, 6, 2, 7, 3, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        return cells.permute(0, 4, 1, 2, 3)
    return blocks.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)
