"""The channels of a volume: names, units, and the transform from physical values.

A channel x holds ln(value) or the value itself, scaled: value = exp(center + scale · x), or scale · x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from utils.config.schema import Config
from utils.config.sections import TransformConfig
from utils.errors import UserError

DENSITY_UNIT, VELOCITY_UNIT, TEMPERATURE_UNIT = "mean density", "km/s", "K"


@dataclass(frozen=True)
class Channel:
    """One channel; `unit` is None if the transform, and so the physical values, are unknown."""

    name: str
    unit: str | None = None
    scale: float = 1.0
    center: float = 0.0
    is_log: bool = False

    def to_physical(self, values: Any) -> Any:
        """Physical values of the channel's values, as numpy array or torch tensor like the argument."""
        if not self.is_log:
            return values * self.scale
        linear = values * self.scale + self.center
        return linear.exp() if isinstance(linear, torch.Tensor) else np.exp(linear)

    def formula(self) -> str:
        """The transform from physical values as a readable formula."""
        if self.unit is None:
            return "unknown"
        if not self.is_log:
            return f"value / ({self.scale:.10g} {self.unit})"
        if not self.center:
            return f"ln(value / {self.unit}) / {self.scale:.10g}"
        ten = math.log(10.0)
        return f"(log10(value / {self.unit}) - {self.center / ten:.10g}) / {self.scale / ten:.10g}"


def volume_channels(config: Config) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
    """The config's input and target channels."""
    return (
        input_channels(config.N_in_channels, config.transform),
        target_channels(config.N_out_channels, config.transform),
    )


def input_channels(count: int, transform: TransformConfig) -> tuple[Channel, ...]:
    """Channels of `Nbody`: dark-matter density and velocity if there are 4, else unknown ones."""
    if count != 4:
        return _unknown(count)
    return (_density("dark-matter density", transform), *_velocity("dark-matter velocity", transform))


def target_channels(count: int, transform: TransformConfig) -> tuple[Channel, ...]:
    """Channels of `Hydro`: gas density, velocity and temperature if there are 5, else unknown ones."""
    if count != 5:
        return _unknown(count)
    scale, center = transform.temperature_log10_scale, transform.temperature_log10_center
    temperature = Channel("temperature")
    if scale is not None:
        ten = math.log(10.0)
        temperature = Channel("temperature", TEMPERATURE_UNIT, scale * ten, center * ten, is_log=True)
    return (_density("gas density", transform), *_velocity("gas velocity", transform), temperature)


def check_physical_units(channels: Iterable[Channel], remedy: str) -> None:
    """Raises UserError if the physical values of a channel are unknown."""
    unknown = [channel.name for channel in channels if channel.unit is None]
    if unknown:
        raise UserError(f"the checkpoint's config does not define physical values of {', '.join(unknown)}; {remedy}")


def _unknown(count: int) -> tuple[Channel, ...]:
    return tuple(Channel(f"channel {number}") for number in range(count))


def _density(name: str, transform: TransformConfig) -> Channel:
    scale = transform.density_log_scale
    return Channel(name) if scale is None else Channel(name, DENSITY_UNIT, scale, is_log=True)


def _velocity(name: str, transform: TransformConfig) -> tuple[Channel, ...]:
    scale = transform.velocity_scale_km_s
    names = (f"{name} {axis}" for axis in "xyz")
    return tuple(Channel(each) if scale is None else Channel(each, VELOCITY_UNIT, scale) for each in names)
