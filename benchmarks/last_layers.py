"""U-Nets with other last layers, for the study `networks`.

python train.py --config=demo --set network.name=benchmarks.last_layers.SubPixelUNet
"""

import torch
from torch import nn
from torch.nn import functional as F

from networks.layers import convolve_to_float32, with_bias
from networks.unet import Layer, UNet


class SubPixelConv3d(nn.Conv3d):
    """A convolution with stride 1 whose channels [C, 2, 2, 2] become C channels of blocks of 2³ cells.

    Shi et al. 2016, arXiv:1609.05158. Under bfloat16 autocast the result is float32, as that of unet's last layer.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        blocks = with_bias(convolve_to_float32(input, self.weight), self.bias).unflatten(1, (-1, 2, 2, 2))
        # [N, C, 2, 2, 2, D, H, W] -> [N, C, D, 2, H, 2, W, 2] -> [N, C, 2D, 2H, 2W]
        return blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class InterpolatedConv3d(nn.Conv3d):
    """A convolution with stride 1 whose result is interpolated to twice the cells along each axis, linearly.

    Neighboring cells have the same weights, so the layer leaves no pattern of the grid.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        coarse = with_bias(convolve_to_float32(input, self.weight), self.bias)
        return F.interpolate(coarse, scale_factor=2.0, mode="trilinear")


class SubPixelUNet(UNet):
    """`last` is a `SubPixelConv3d`: 3³ cells determine each cell, instead of 2³."""

    def _add_layer(self, name: str, kind: type[Layer], before: int, after: int) -> None:
        if name == "last":
            self.last = SubPixelConv3d(before, 8 * after, 3, padding=1)
        else:
            super()._add_layer(name, kind, before, after)


class InterpolatedUNet(UNet):
    """`last` is an `InterpolatedConv3d`, which computes on the grid of half the size."""

    def _add_layer(self, name: str, kind: type[Layer], before: int, after: int) -> None:
        if name == "last":
            self.last = InterpolatedConv3d(before, after, 3, padding=1)
        else:
            super()._add_layer(name, kind, before, after)
