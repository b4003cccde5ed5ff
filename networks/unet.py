"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

MAX_WIDENING = 8  # the channels double with each scale up to this many times the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D] in (-1, 1); D is a multiple of 2**scales.

    Each scale halves the grid on the way down (`down1`, `down2`, …) and doubles it on the way up (…, `up2`, `last`),
    where the output of the same scale's way down is concatenated.
    """

    def __init__(self, in_channels: int = 4, out_channels: int = 5, width: int = 64, scales: int = 6) -> None:
        super().__init__()
        if scales < 1:
            raise ValueError(f"a U-Net needs at least one scale, not {scales}")
        self.scales = scales
        channels = [width * min(2**scale, MAX_WIDENING) for scale in range(scales)]  # out of down1, down2, …
        for scale in range(1, scales + 1):
            before = in_channels if scale == 1 else channels[scale - 2]
            self.add_module(f"down{scale}", nn.Conv3d(before, channels[scale - 1], 4, stride=2, padding=1))
        for scale in range(scales, 0, -1):
            # The deepest scale has no skip connection to concatenate.
            before = channels[scale - 1] * (1 if scale == scales else 2)
            after = out_channels if scale == 1 else channels[scale - 2]
            name = "last" if scale == 1 else f"up{scale}"
            self.add_module(name, nn.ConvTranspose3d(before, after, 4, stride=2, padding=1))

    @property
    def downsampling(self) -> int:
        """A crop's side must be a multiple of this."""
        return 2**self.scales

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        skips = []
        x = fields
        for scale in range(1, self.scales + 1):
            x = F.leaky_relu(self.get_submodule(f"down{scale}")(x), 0.01)
            skips.append(x)
        skips.pop()
        for scale in range(self.scales, 1, -1):
            x = F.relu(self.get_submodule(f"up{scale}")(x))
            x = torch.cat([x, skips.pop()], dim=1)
        return torch.tanh(self.get_submodule("last")(x))


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
