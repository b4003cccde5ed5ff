"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from networks import activated, fused
from networks.film import Film, Modulation, modulate
from networks.fused import NEGATIVE_SLOPE, bias_activation, bias_activation_twice, bias_relu_cat
from networks.layers import Conv3d, ConvTranspose3d, OutputConvTranspose3d, StridedLayer, autocast_dtype
from networks.norms import build_norm
from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d

Layer = nn.Conv3d | nn.ConvTranspose3d

# Layers that can be computed as dense convolutions over blocks; see space_to_depth.py.
SPACE_TO_DEPTH: dict[str, type[Layer]] = {"down1": SpaceToDepthConv3d, "last": DepthToSpaceConvTranspose3d}
MAX_WIDENING = 8  # channels double with each scale, up to this multiple of the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D] in (-1, 1); D is a multiple of 2**scales.

    The encoder halves the grid at each scale (`down1`, `down2`, …), the decoder doubles it (…, `up2`, `last`). Each
    decoder layer reads the previous one's output concatenated with the encoder's output of the same size.

    `space_to_depth` (names of layers) and `fused` (everything but the convolutions) change how results are computed,
    but not parameters, their names or the results. A `norm`, see norms.py, follows each convolution except the last,
    before the activation. `crop` is the side D, if known. After `condition_on`, the network also takes conditions.
    """

    last: Layer

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
        if crop is not None and crop % 2**scales:
            raise ValueError(f"data_size {crop} is not a multiple of {2**scales} (2**scales of the network)")
        if fused and norm != "none":
            raise ValueError(f"fused_pointwise cannot be combined with norm {norm}; turn one of them off")
        self.space_to_depth = tuple(space_to_depth)
        self.scales, self.fused, self.norm = scales, fused, norm
        self.film: Film | None = None
        # Channels of the grid at each scale: of the input, then of down1, down2, …
        channels = [in_channels, *(width * min(2**scale, MAX_WIDENING) for scale in range(scales))]
        for scale in range(1, scales + 1):
            self._add_layer(f"down{scale}", Conv3d, channels[scale - 1], channels[scale])
        # The deepest scale has no skip connection to concatenate.
        inputs = [count * (1 if scale == scales else 2) for scale, count in enumerate(channels)]
        for scale in range(scales, 1, -1):
            self._add_layer(f"up{scale}", ConvTranspose3d, inputs[scale], channels[scale - 1])
        self._add_layer("last", OutputConvTranspose3d, inputs[1], out_channels)

    def condition_on(self, ranges: Sequence[Sequence[float]]) -> None:
        """Adds conditions [N, K], with these ranges in training, that scale and shift all layers except the last.

        The last layer's input is modulated already, and the kernels after that layer add one bias to all samples.
        """
        layers = {name: layer for name, layer in self.named_children() if name.startswith(("down", "up"))}
        channels = {name: layer.out_channels for name, layer in layers.items() if isinstance(layer, Layer)}
        self.film = Film(ranges, channels)

    def _add_layer(self, name: str, kind: type[Layer], before: int, after: int) -> None:
        kind = SPACE_TO_DEPTH[name] if name in self.space_to_depth else kind
        self.add_module(name, kind(before, after, 4, stride=2, padding=1))
        if self.norm != "none" and name != "last":
            self.add_module(f"{name}_norm", build_norm(self.norm, after))

    def forward(self, fields: torch.Tensor, conditions: torch.Tensor | None = None) -> torch.Tensor:
        return self.output(self.before_last(fields, conditions))

    def before_last(self, fields: torch.Tensor, conditions: torch.Tensor | None = None) -> torch.Tensor:
        """The last layer's input."""
        modulations = {} if self.film is None else self.film(conditions)
        dtype = autocast_dtype(fields) or fields.dtype
        halves = self._halves(fields, dtype) if self.fused and not modulations else {}
        skips = []
        x = fields
        for scale in range(1, self.scales + 1):
            name = f"down{scale}"
            x, skip = self._down(name, x, modulations.get(name), halves.get(name))
            skips.append(skip)
        skips.pop()
        last: object = self.last  # a subclass may have another kind
        last_is_own = isinstance(last, StridedLayer) and last.plans_own(_shape(fields, 1), dtype, fields.device)
        for scale in range(self.scales, 1, -1):
            name = f"up{scale}"
            if name in halves:
                x = activated.up(self._strided(name), x, skips.pop(), halves[name], scale == 2 and last_is_own)
            else:
                x = self._up(name, x, modulations.get(name), skips.pop())
        return x

    def _halves(self, fields: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights, in dtype, of the layers that own kernels compute with their activations, by one operation."""
        if not fused.fusible(fields):
            return {}
        places = [(f"down{scale}", scale - 1) for scale in range(1, self.scales + 1)]
        places += [(f"up{scale}", scale) for scale in range(self.scales, 1, -1)]
        weights = {
            name: self._strided(name).weight.detach()
            for name, halvings in places
            if self._strided(name).plans_own(_shape(fields, halvings), dtype, fields.device)
        }
        form = torch.channels_last_3d
        halves = [torch.empty_like(weight, dtype=dtype, memory_format=form) for weight in weights.values()]
        if weights:
            torch._foreach_copy_(halves, list(weights.values()))
        return dict(zip(weights, halves, strict=True))

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """The network's result for `before_last`'s."""
        if self.fused:
            return bias_activation(*self._without_bias("last", x, None), "tanh")
        return torch.tanh(self.last(x))

    def _strided(self, name: str) -> StridedLayer:
        layer = self.get_submodule(name)
        assert isinstance(layer, StridedLayer)
        return layer

    def _down(
        self, name: str, x: torch.Tensor, film: Modulation | None, half: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The activations for the next scale, and for the skip connection."""
        if half is not None:
            return activated.down(self._strided(name), x, half)
        if self.fused:
            return bias_activation_twice(*self._without_bias(name, x, film), "leaky_relu")
        x = F.leaky_relu(self._normalized(name, x, film), NEGATIVE_SLOPE)
        return x, x

    def _up(self, name: str, x: torch.Tensor, film: Modulation | None, skip: torch.Tensor) -> torch.Tensor:
        """The activations for the next scale."""
        if self.fused:
            return bias_relu_cat(*self._without_bias(name, x, film), skip)
        return torch.cat([F.relu(self._normalized(name, x, film)), skip], dim=1)

    def _normalized(self, name: str, x: torch.Tensor, film: Modulation | None) -> torch.Tensor:
        """The convolution's result, after the norm and the modulation if there are any."""
        x = self.get_submodule(name)(x)
        return modulate(x if self.norm == "none" else self.get_submodule(f"{name}_norm")(x), film)

    def _without_bias(self, name: str, x: torch.Tensor, film: Modulation | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's result, modulated if it is to be, without its bias, and the bias."""
        layer = self.get_submodule(name)
        assert isinstance(layer.bias, torch.Tensor)
        return modulate(layer(x, biased=False), film, layer.bias), layer.bias


def _shape(fields: torch.Tensor, scale: int) -> tuple[int, ...]:
    """The shape of a grid after this many halvings; its channels do not count."""
    return (fields.shape[0], 1, *(side // 2**scale for side in fields.shape[2:]))
