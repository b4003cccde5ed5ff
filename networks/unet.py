"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from networks import pointwise
from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d
from networks.rewrites import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d

Layer = nn.Conv3d | nn.ConvTranspose3d

# The layers with few channels, whose convolutions may be rewritten as others; see rewrites.py.
REWRITES: dict[str, type[Layer]] = {"down1": SpaceToDepthConv3d, "last": DepthToSpaceConvTranspose3d}
MAX_WIDENING = 8  # the channels double with each scale up to this many times the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D] in (-1, 1); D is a multiple of 2**scales.

    Each scale halves the grid on the way down (`down1`, `down2`, …) and doubles it on the way up (…, `up2`, `last`),
    where the output of the same scale's way down is concatenated. The layers in `rewritten` and, if `fused`, all that
    is not convolution compute the same in other ways; parameters and their names stay.
    """

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 5,
        width: int = 64,
        scales: int = 6,
        rewritten: Sequence[str] = (),
        fused: bool = False,
    ) -> None:
        super().__init__()
        if scales < 1:
            raise ValueError(f"a U-Net needs at least one scale, not {scales}")
        for name in rewritten:
            if name not in REWRITES:
                raise ValueError(f"network.rewritten: {name} cannot be rewritten, only {', '.join(REWRITES)} can")
        self.scales = scales
        self.fused = fused
        channels = [width * min(2**scale, MAX_WIDENING) for scale in range(scales)]  # out of down1, down2, …
        for scale in range(1, scales + 1):
            before = in_channels if scale == 1 else channels[scale - 2]
            name = f"down{scale}"
            kind = REWRITES[name] if name in rewritten else Conv3d
            self.add_module(name, kind(before, channels[scale - 1], 4, stride=2, padding=1))
        for scale in range(scales, 0, -1):
            # The deepest scale has no skip connection to concatenate.
            before = channels[scale - 1] * (1 if scale == scales else 2)
            after = out_channels if scale == 1 else channels[scale - 2]
            name = "last" if scale == 1 else f"up{scale}"
            plain = OutputConvTranspose3d if name == "last" else ConvTranspose3d
            kind = REWRITES[name] if name in rewritten else plain
            self.add_module(name, kind(before, after, 4, stride=2, padding=1))

    @property
    def downsampling(self) -> int:
        """A crop's side must be a multiple of this."""
        return 2**self.scales

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
        x = F.leaky_relu(layer(x), pointwise.NEGATIVE_SLOPE)
        return x, x

    def _up(self, name: str, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        layer = self._layer(name)
        if self.fused:
            return pointwise.bias_relu_cat(layer(x, biased=False), _bias(layer), skip)
        return torch.cat([F.relu(layer(x)), skip], dim=1)

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._layer("last")
        if self.fused:
            return pointwise.bias_activation(layer(x, biased=False), _bias(layer), "tanh")
        return torch.tanh(layer(x))

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer


def _bias(layer: Layer) -> torch.Tensor:
    assert layer.bias is not None
    return layer.bias


def initialise(
    network: nn.Module, generator: torch.Generator, conv_init: str = "normal", scale: float = 0.02, bias: float = 0.0
) -> None:
    """Convolution weights ~ N(0, scale²) and constant biases, as DCGAN draws them (Radford et al. 2016).

    conv_init 'default' draws torch's own uniform weights, from the same generator.
    """
    for module in network.modules():
        if not isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            continue
        with torch.no_grad():
            if conv_init == "normal":
                module.weight.normal_(0.0, scale, generator=generator)
                bound = None
            else:
                fan_in = module.weight[0].numel()
                bound = fan_in**-0.5
                module.weight.uniform_(-bound, bound, generator=generator)
            if module.bias is not None:
                if bound is None:
                    module.bias.fill_(bias)
                else:
                    module.bias.uniform_(-bound, bound, generator=generator)
