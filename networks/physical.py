"""A network that includes the transforms of its channels: physical values in, physical values out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class PhysicalNetwork(nn.Module):
    """[N, C, X, Y, Z] -> [N, K, X, Y, Z] in the units of `inputs` and `targets`; `network` maps their channels.

    Both have is_log, from_physical() and to_physical(), as `Channel` of utils/config/channels.py. Inputs below their
    number in `floors`, which is above zero, are raised to it; None: as they are.
    """

    def __init__(
        self, network: nn.Module, inputs: Sequence[Any], targets: Sequence[Any], floors: Sequence[float | None]
    ) -> None:
        super().__init__()
        self.network, self.inputs, self.targets, self.floors = network, inputs, targets, floors

    def forward(self, fields: torch.Tensor, conditions: torch.Tensor | None = None) -> torch.Tensor:
        inputs = zip(self.inputs, self.floors, fields.split(1, dim=1), strict=True)
        raised = [(channel, values if floor is None else values.clamp(min=floor)) for channel, floor, values in inputs]
        channels = torch.cat([channel.from_physical(values) for channel, values in raised], dim=1)
        predicted = self.network(channels) if conditions is None else self.network(channels, conditions)
        targets = zip(self.targets, predicted.split(1, dim=1), strict=True)
        return torch.cat([channel.to_physical(values) for channel, values in targets], dim=1)
