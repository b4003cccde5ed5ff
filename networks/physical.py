"""A network with the channels' transforms inside: physical values in, physical values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

DENSITY_FLOOR = 1e-3  # of the mean, as the simulation's; empty cells have no logarithm


class Scaled(Protocol):
    """A channel x of a physical value: exp(center + scale · x) if `is_log`, else center + scale · x."""

    @property
    def scale(self) -> float: ...

    @property
    def center(self) -> float: ...

    @property
    def is_log(self) -> bool: ...


class PhysicalNetwork(nn.Module):
    """[N, C, X, Y, Z] -> [N, K, X, Y, Z] in the units of `inputs` and `targets`, by a network of their channels.

    Of inputs that are made of logarithms, densities, nothing below `density_floor` counts; ValueError unless that is
    above zero.
    """

    input_scale: torch.Tensor  # buffers, which go where the network goes; all [C, 1, 1, 1]
    input_center: torch.Tensor
    target_scale: torch.Tensor
    target_center: torch.Tensor

    def __init__(
        self,
        network: nn.Module,
        inputs: Sequence[Scaled],
        targets: Sequence[Scaled],
        density_floor: float = DENSITY_FLOOR,
    ) -> None:
        super().__init__()
        if not density_floor > 0:
            raise ValueError(f"density_floor {density_floor} has no logarithm; give one above zero")
        self.network = network
        self.density_floor = density_floor
        self.input_is_log = [channel.is_log for channel in inputs]
        self.target_is_log = [channel.is_log for channel in targets]
        for name, channels in (("input", inputs), ("target", targets)):
            self.register_buffer(f"{name}_scale", _column([channel.scale for channel in channels]))
            self.register_buffer(f"{name}_center", _column([channel.center for channel in channels]))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        linear = torch.cat(
            [
                part.clamp(min=self.density_floor).log() if is_log else part
                for part, is_log in zip(fields.split(1, dim=1), self.input_is_log, strict=True)
            ],
            dim=1,
        )
        predicted = self.network((linear - self.input_center) / self.input_scale)
        linear = predicted * self.target_scale + self.target_center
        # Part by part: the exponential of a velocity, computed and then not taken, would make gradients NaN.
        return torch.cat(
            [
                part.exp() if is_log else part
                for part, is_log in zip(linear.split(1, dim=1), self.target_is_log, strict=True)
            ],
            dim=1,
        )


def _column(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1)
