"""Conditioning on scalars: feature-wise scale and shift of activations (FiLM; Perez et al. 2018, arXiv:1709.07871)."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from networks.ops.precision import without_autocast

EMBEDDING = 64  # features of the conditions, shared by all layers; whole vectors, because SiLU rounds others by place


class Modulation(NamedTuple):
    """Scale - 1 and shift of a layer's channels for each sample, both [N, C]."""

    scale: Tensor
    shift: Tensor


class Film(nn.Module):
    """Conditions [N, K] -> the modulation of each layer by its name; the identity at the start.

    ranges: lowest and highest value of each condition in training, which are mapped to -1 and 1. A condition that is
      constant in training is mapped to 0, so it has no effect.
    channels: those of each layer.
    """

    def __init__(self, ranges: Sequence[Sequence[float]], channels: Mapping[str, int]) -> None:
        super().__init__()
        # Python numbers: DistributedDataParallel would broadcast buffers in each step.
        self.ranges = [(float(low), float(high)) for low, high in ranges]
        first, second = nn.Linear(len(ranges), EMBEDDING), nn.Linear(EMBEDDING, EMBEDDING)
        self.embedding = nn.Sequential(first, nn.SiLU(), second, nn.SiLU())
        self.layers = nn.ModuleDict({name: nn.Linear(EMBEDDING, 2 * count) for name, count in channels.items()})
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)

    def forward(self, conditions: Tensor) -> dict[str, Modulation]:
        with without_autocast(conditions):  # half precision would round the conditions
            scaled = [
                2 * (x - low) / (high - low) - 1 if high > low else torch.zeros_like(x)
                for x, (low, high) in zip(conditions.unbind(1), self.ranges, strict=True)
            ]
            # Optimizers like Adam change each weight of `layers` by about the learning rate. The sum over all features
            # must not change faster than other layers' outputs do.
            embedded = self.embedding(torch.stack(scaled, dim=1)) / math.sqrt(EMBEDDING)
            return {name: Modulation(*layer(embedded).chunk(2, dim=1)) for name, layer in self.layers.items()}


def modulate(x: Tensor, modulation: Modulation | None, bias: Tensor | None = None) -> Tensor:
    """x · (1 + scale) + shift in x's dtype, for x [N, C, D, H, W]; x itself if there is no modulation.

    With `bias` [C], which the caller adds to the result, that is the modulation of x + bias.
    """
    if modulation is None:
        return x
    scale, shift = modulation
    shift = shift if bias is None else shift + scale * bias
    factor, shift = ((part.to(x.dtype).view(*part.shape, 1, 1, 1)) for part in (1 + scale, shift))
    return torch.addcmul(shift, x, factor)
