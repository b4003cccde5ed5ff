"""A network that includes the transforms of its channels: physical values in, physical values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

DENSITY_FLOOR = 1e-3  # relative to the mean density, as in the simulation: the logarithm of an empty cell is infinite


class ChannelTransform(Protocol):
    """The physical value of a channel x: exp(center + scale · x) if `is_log`, else center + scale · x."""

    @property
    def scale(self) -> float: ...

    @property
    def center(self) -> float: ...

    @property
    def is_log(self) -> bool: ...


class PhysicalNetwork(nn.Module):
    """[N, C, X, Y, Z] -> [N, K, X, Y, Z] in the units of `inputs` and `targets`; `network` maps their channels.

    Logarithmic inputs (densities) below `density_floor` are raised to it; ValueError unless it is above zero.
    """

    input_scale: torch.Tensor  # buffers, which move with the network; all [C, 1, 1, 1]
    input_center: torch.Tensor
    target_scale: torch.Tensor
    target_center: torch.Tensor

    def __init__(
        self,
        network: nn.Module,
        inputs: Sequence[ChannelTransform],
        targets: Sequence[ChannelTransform],
        density_floor: float = DENSITY_FLOOR,
    ) -> None:
        super().__init__()
        if not density_floor > 0:
            raise ValueError(f"density_floor must be above zero, not {density_floor}")
        self.network = network
        self.density_floor = density_floor
        self.input_is_log = [channel.is_log for channel in inputs]
        self.target_is_log = [channel.is_log for channel in targets]
        for name, channels in (("input", inputs), ("target", targets)):
            for number in ("scale", "center"):
                column = torch.tensor([getattr(channel, number) for channel in channels], dtype=torch.float32)
                self.register_buffer(f"{name}_{number}", column.view(-1, 1, 1, 1))

    def forward(self, fields: torch.Tensor, conditions: torch.Tensor | None = None) -> torch.Tensor:
        linear = _map_channels(lambda density: density.clamp(min=self.density_floor).log(), fields, self.input_is_log)
        scaled = (linear - self.input_center) / self.input_scale
        predicted = self.network(scaled) if conditions is None else self.network(scaled, conditions)
        return _map_channels(torch.exp, predicted * self.target_scale + self.target_center, self.target_is_log)


def _map_channels(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, selected: Sequence[bool]
) -> torch.Tensor:
    """Applies the function to the selected channels of x.

    Not to all: an exponential of a velocity overflows, and makes gradients NaN even if torch.where discards it.
    """
    channels = zip(x.split(1, dim=1), selected, strict=True)
    return torch.cat([function(channel) if is_selected else channel for channel, is_selected in channels], dim=1)
