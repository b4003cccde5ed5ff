"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from networks import fused as pointwise
from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d
from networks.norms import build_norm
from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d

Layer = nn.Conv3d | nn.ConvTranspose3d

# The layers with few channels, whose convolutions may be rewritten as others; see space_to_depth.py.
REWRITES: dict[str, type[Layer]] = {"down1": SpaceToDepthConv3d, "last": DepthToSpaceConvTranspose3d}
MAX_WIDENING = 8  # the channels double with each scale up to this many times the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D] in (-1, 1); D is a multiple of 2**scales.

    Each scale halves the grid on the way down (`down1`, `down2`, …) and doubles it on the way up (…, `up2`, `last`),
    where the output of the same scale's way down is concatenated. The layers in `space_to_depth` and, if `fused`, all that
    is not convolution compute the same in other ways; parameters and their names stay.

    A `norm`, see norms.py, stands between each convolution, the first included, and its activation; the last has none.
    `crop` is the side D, if it is known.
    """

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 5,
        width: int = 64,
        scales: int = 6,
        space_to_depth: Sequence[str] = (),
        fused: bool = False,
        norm: str = "none",
        crop: int | None = None,
    ) -> None:
        super().__init__()
        if scales < 1:
            raise ValueError(f"a U-Net needs at least one scale, not {scales}")
        if crop is not None and crop % 2**scales:
            raise ValueError(
                f"data_size {crop} is not a multiple of {2**scales}, by which the network divides the grid"
            )
        if fused and norm != "none":
            raise ValueError(f"fused_pointwise leaves no place for norm {norm}; leave one of them out")
        for name in space_to_depth:
            if name not in REWRITES:
                raise ValueError(f"network.space_to_depth: {name} cannot be rewritten, only {', '.join(REWRITES)} can")
        self.scales = scales
        self.fused = fused
        self.norm = norm
        channels = [width * min(2**scale, MAX_WIDENING) for scale in range(scales)]  # out of down1, down2, …
        for scale in range(1, scales + 1):
            before = in_channels if scale == 1 else channels[scale - 2]
            name = f"down{scale}"
            kind = REWRITES[name] if name in space_to_depth else Conv3d
            self.add_module(name, kind(before, channels[scale - 1], 4, stride=2, padding=1))
            self._add_norm(name, channels[scale - 1])
        for scale in range(scales, 0, -1):
            # The deepest scale has no skip connection to concatenate.
            before = channels[scale - 1] * (1 if scale == scales else 2)
            after = out_channels if scale == 1 else channels[scale - 2]
            name = "last" if scale == 1 else f"up{scale}"
            plain = OutputConvTranspose3d if name == "last" else ConvTranspose3d
            kind = REWRITES[name] if name in space_to_depth else plain
            self.add_module(name, kind(before, after, 4, stride=2, padding=1))
            if name != "last":
                self._add_norm(name, after)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        skips = []
        x = fields
        for scale in range(1, self.scales + 1):
            x, skip = self._down(f"down{scale}", x)
            skips.append(skip)
        skips.pop()
        for scale in range(self.scales, 1, -1):
            x = self._up(f"up{scale}", x, skips.pop())
        return self._last(x)

    def _down(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The activations for the next scale, and for the concatenation."""
        layer = self._layer(name)
        if self.fused:
            return pointwise.bias_activation_twice(layer(x, biased=False), _bias(layer), "leaky_relu")
        x = F.leaky_relu(self._normalise(name, layer(x)), pointwise.NEGATIVE_SLOPE)
        return x, x

    def _up(self, name: str, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        layer = self._layer(name)
        if self.fused:
            return pointwise.bias_relu_cat(layer(x, biased=False), _bias(layer), skip)
        return torch.cat([F.relu(self._normalise(name, layer(x))), skip], dim=1)

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._layer("last")
        if self.fused:
            return pointwise.bias_activation(layer(x, biased=False), _bias(layer), "tanh")
        return torch.tanh(layer(x))

    def _add_norm(self, name: str, channels: int) -> None:
        if self.norm != "none":
            self.add_module(f"{name}_norm", build_norm(self.norm, channels, dimensions=3))

    def _normalise(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if self.norm == "none" else self.get_submodule(f"{name}_norm")(x)

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer


def _bias(layer: Layer) -> torch.Tensor:
    assert layer.bias is not None
    return layer.bias
