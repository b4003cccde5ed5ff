"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from networks.fused import NEGATIVE_SLOPE, bias_activation, bias_activation_twice, bias_relu_cat
from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d, precise_dtype
from networks.norms import build_norm
from networks.space_to_depth import (
    DenseConvTranspose3d,
    DenseGradientConv3d,
    DepthToSpaceConvTranspose3d,
    SpaceToDepthConv3d,
)

Layer = nn.Conv3d | nn.ConvTranspose3d

# Layers that can be computed as dense convolutions over blocks; see space_to_depth.py.
SPACE_TO_DEPTH: dict[str, type[Layer]] = {
    "down1": SpaceToDepthConv3d,
    "last": DepthToSpaceConvTranspose3d,
    "down2": DenseGradientConv3d,
    "up2": DenseConvTranspose3d,
    "up3": DenseConvTranspose3d,
    "up4": DenseConvTranspose3d,
}
MAX_WIDENING = 8  # channels double with each scale, up to this multiple of the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D] in (-1, 1); D is a multiple of 2**scales.

    The encoder halves the grid at each scale (`down1`, `down2`, …), the decoder doubles it (…, `up2`, `last`). Each
    decoder layer reads the previous one's output concatenated with the encoder's output of the same size.

    `space_to_depth` (names of layers) and `fused` (everything but the convolutions) change how results are computed,
    but not parameters, their names or the results. A `norm`, see norms.py, follows each convolution except the last,
    before the activation. `crop` is the side D, if known.
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
            raise ValueError(f"data_size {crop} is not a multiple of {2**scales} (2**scales of the network)")
        if fused and norm != "none":
            raise ValueError(f"fused_pointwise cannot be combined with norm {norm}; turn one of them off")
        present = [name for name in SPACE_TO_DEPTH if name == "last" or int(name[-1]) <= scales]
        for name in space_to_depth:
            if name not in present:
                raise ValueError(f"network.space_to_depth: {name} is not one of {', '.join(present)}")
        self.space_to_depth = tuple(space_to_depth)
        self.scales = scales
        self.fused = fused
        self.norm = norm
        channels = [width * min(2**scale, MAX_WIDENING) for scale in range(scales)]  # of down1, down2, …
        for scale in range(1, scales + 1):
            before = in_channels if scale == 1 else channels[scale - 2]
            name = f"down{scale}"
            kind = SPACE_TO_DEPTH[name] if name in space_to_depth else Conv3d
            self.add_module(name, kind(before, channels[scale - 1], 4, stride=2, padding=1))
            self._add_norm(name, channels[scale - 1])
        for scale in range(scales, 0, -1):
            # The deepest scale has no skip connection to concatenate.
            before = channels[scale - 1] * (1 if scale == scales else 2)
            after = out_channels if scale == 1 else channels[scale - 2]
            if scale == 1:
                self.last = self._output_layer(before, after, "last" in space_to_depth)
                continue
            name = f"up{scale}"
            kind = SPACE_TO_DEPTH[name] if name in space_to_depth else ConvTranspose3d
            self.add_module(name, kind(before, after, 4, stride=2, padding=1))
            self._add_norm(name, after)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.output(*self.before_last(fields))

    def before_last(self, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last layer's input, and a copy of it in `precise_dtype` if a fused kernel could write one."""
        skips = []
        x, precise = fields, None
        for scale in range(1, self.scales + 1):
            x, skip = self._down(f"down{scale}", x)
            skips.append(skip)
        skips.pop()
        for scale in range(self.scales, 1, -1):
            x, precise = self._up(f"up{scale}", x, skips.pop(), precise_dtype(x) if scale == 2 else None)
        return x, precise

    def output(self, x: torch.Tensor, precise: torch.Tensor | None = None) -> torch.Tensor:
        """The network's result for `before_last`'s."""
        layer = self._layer("last")
        if self.fused:
            return bias_activation(layer(x, biased=False, precise=precise), _bias(layer), "tanh")
        return torch.tanh(layer(x))

    def _output_layer(self, before: int, after: int, space_to_depth: bool) -> Layer:
        kind = SPACE_TO_DEPTH["last"] if space_to_depth else OutputConvTranspose3d
        return kind(before, after, 4, stride=2, padding=1)

    def _down(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The activations for the next scale, and for the skip connection."""
        layer = self._layer(name)
        if self.fused:
            return bias_activation_twice(layer(x, biased=False), _bias(layer), "leaky_relu")
        x = F.leaky_relu(self._normalize(name, layer(x)), NEGATIVE_SLOPE)
        return x, x

    def _up(
        self, name: str, x: torch.Tensor, skip: torch.Tensor, copy: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The activations for the next scale, and a copy of dtype `copy` if the fused kernel can make one."""
        layer = self._layer(name)
        if self.fused:
            return bias_relu_cat(layer(x, biased=False), _bias(layer), skip, copy)
        return torch.cat([F.relu(self._normalize(name, layer(x))), skip], dim=1), None

    def _add_norm(self, name: str, channels: int) -> None:
        if self.norm != "none":
            self.add_module(f"{name}_norm", build_norm(self.norm, channels))

    def _normalize(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if self.norm == "none" else self.get_submodule(f"{name}_norm")(x)

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d))  # PyTorch 2.8 does not compile a union here
        return layer


def _bias(layer: Layer) -> torch.Tensor:
    assert layer.bias is not None
    return layer.bias
