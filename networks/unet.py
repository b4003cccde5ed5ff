"""The 3D U-Net of strided convolutions that maps dark matter to gas (Harrington et al. 2021, arXiv:2106.12662)."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from networks.film import Film, Modulation, modulate
from networks.layers import Down, Last, Up
from networks.norms import build_norm
from networks.ops import operations
from networks.ops.plan import halves
from networks.ops.reference import Between, smoothed

MAX_WIDENING = 8  # channels double with each scale, up to this multiple of the first width


class UNet(nn.Module):
    """[N, in_channels, D, D, D] -> [N, out_channels, D, D, D]; D is a multiple of 2**scales.

    The outputs are in (-1, 1), unless smoothed inputs are added: `added` has the input's number by the output's.

    The encoder halves the grid at each scale (`down1`, `down2`, …), the decoder doubles it (…, `up2`, `last`). Each
    decoder layer reads the previous one's output concatenated with the encoder's output of the same size.

    A `norm`, see norms.py, follows each convolution except the last, before the activation. `crop` is the side D, if
    known. After `condition_on`, the network also takes conditions.
    """

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 5,
        width: int = 64,
        scales: int = 6,
        norm: str = "none",
        crop: int | None = None,
        added: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__()
        if crop is not None and crop % 2**scales:
            raise ValueError(f"data_size {crop} is not a multiple of {2**scales} (2**scales of the network)")
        self.scales, self.has_norm = scales, norm != "none"
        self.added = [added.get(number) for number in range(out_channels)] if added else []
        self.film: Film | None = None
        # Channels of the grid at each scale: of the input, then of down1, down2, …
        channels = [in_channels, *(width * min(2**scale, MAX_WIDENING) for scale in range(scales))]
        for scale in range(1, scales + 1):
            self._add(f"down{scale}", Down(channels[scale - 1], channels[scale], scale - 1, self.has_norm), norm)
        # The deepest scale has no skip connection to concatenate.
        inputs = [count * (1 if scale == scales else 2) for scale, count in enumerate(channels)]
        for scale in range(scales, 1, -1):
            self._add(f"up{scale}", Up(inputs[scale], channels[scale - 1], scale - 1, self.has_norm), norm)
        self.last = Last(inputs[1], out_channels, halvings=0)

    def _add(self, name: str, layer: Down | Up, norm: str) -> None:
        self.add_module(name, layer)
        if self.has_norm:
            self.add_module(f"{name}_norm", build_norm(norm, layer.out_channels))

    def condition_on(self, ranges: Sequence[Sequence[float]]) -> None:
        """Adds conditions [N, K], with these ranges in training, that scale and shift all layers except the last."""
        # The last layer's input is modulated already, and the kernels after that layer add one bias to all samples.
        self.film = Film(ranges, {name: layer.out_channels for name, layer in self._layers().items()})

    def forward(self, fields: Tensor, conditions: Tensor | None = None) -> Tensor:
        outputs = self.last(self.before_last(fields, conditions))
        return outputs + smoothed(fields, self.added) if self.added else outputs

    def l1(self, fields: Tensor, targets: Tensor, conditions: Tensor | None = None) -> Tensor:
        """The mean of |outputs - targets|, by the kernel of the last layer."""
        if self.added:
            targets = operations(self.last.operation).minus_smoothed(targets, fields, self.added)
        return self.last.l1(self.before_last(fields, conditions), targets)

    def before_last(self, fields: Tensor, conditions: Tensor | None = None) -> Tensor:
        """The last layer's input."""
        layers = self._layers()
        modulations = {} if self.film is None else self.film(conditions)
        between = {name: self._between(name, modulations.get(name)) for name in layers}
        half = halves([*layers.values()])
        x = fields
        skips: list[Tensor] = []
        for name, layer in layers.items():
            if isinstance(layer, Down):
                x, skip = layer(x, half.get(layer), between[name])
                skips.append(skip)
            else:
                skips.pop()  # first that of the deepest scale, which has no skip connection
                x = layer(x, skips[-1], half.get(layer), between[name])
        return x

    def _layers(self) -> dict[str, Down | Up]:
        """The layers before the last one, in the order of the forward pass."""
        return {name: layer for name, layer in self.named_children() if isinstance(layer, Down | Up)}

    def _between(self, name: str, modulation: Modulation | None) -> Between:
        """The norm and the modulation between a layer's convolution and its activation, if there are any."""
        if self.has_norm:
            norm = self.get_submodule(f"{name}_norm")
            return lambda x, bias: modulate(norm(x), modulation)
        return None if modulation is None else lambda x, bias: modulate(x, modulation, bias)
