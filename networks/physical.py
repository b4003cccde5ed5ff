"""A network that includes the transforms of its channels: physical values in, physical values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn


class ChannelTransform(Protocol):
    """The transform of a channel from and to physical values."""

    @property
    def is_log(self) -> bool: ...

    def from_physical(self, values: torch.Tensor) -> torch.Tensor: ...

    def to_physical(self, values: torch.Tensor) -> torch.Tensor: ...


class PhysicalNetwork(nn.Module):
    """[N, C, X, Y, Z] -> [N, K, X, Y, Z] in the units of `inputs` and `targets`; `network` maps their channels.

    Logarithmic inputs (densities) below `density_floor` are raised to it; ValueError unless it is above zero.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Sequence[ChannelTransform],
        targets: Sequence[ChannelTransform],
        density_floor: float,
    ) -> None:
        super().__init__()
        if not density_floor > 0:
            raise ValueError(f"density_floor must be above zero, not {density_floor}")
        self.network, self.inputs, self.targets, self.density_floor = network, inputs, targets, density_floor

    def forward(self, fields: torch.Tensor, conditions: torch.Tensor | None = None) -> torch.Tensor:
        floor, inputs = self.density_floor, zip(self.inputs, fields.split(1, dim=1), strict=True)
        raised = [(channel, values.clamp(min=floor) if channel.is_log else values) for channel, values in inputs]
        channels = torch.cat([channel.from_physical(values) for channel, values in raised], dim=1)
        predicted = self.network(channels) if conditions is None else self.network(channels, conditions)
        targets = zip(self.targets, predicted.split(1, dim=1), strict=True)
        return torch.cat([channel.to_physical(values) for channel, values in targets], dim=1)
