"""The channels of a volume: names, units, and the transform from physical values.

A channel x holds ln(value) or the value itself, scaled: value = exp(center + scale · x), or scale · x.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from utils.config.schema import Config
from utils.config.sections import TransformConfig
from utils.errors import UserError

DENSITY_UNIT, VELOCITY_UNIT, TEMPERATURE_UNIT = "mean density", "km/s", "K"
# Plausible typical values; others are in other units, or the transform is another one.
PLAUSIBLE = {DENSITY_UNIT: (0.5, 2.0), VELOCITY_UNIT: (1.0, 3000.0), TEMPERATURE_UNIT: (100.0, 1e9)}
DARK_MATTER, GAS, UNKNOWN = "dark-matter ", "gas ", "channel "  # prefixes of names

Vectors = Sequence[Sequence[int]]
VELOCITY: Vectors = ((1, 2, 3),)  # the channels of the velocity, in datasets that have one
# Quantities of the inputs and targets by number of channels. Files without a velocity or a temperature lack channels.
INPUTS = {4: ("density", "velocity"), 1: ("density",)}
TARGETS = {
    5: ("density", "velocity", "temperature"),
    4: ("density", "velocity"),
    2: ("density", "temperature"),
    1: ("density",),
}


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
        return linear.exp() if hasattr(linear, "exp") else np.exp(linear)

    def from_physical(self, values: Any) -> Any:
        """The inverse of `to_physical`; logarithmic values must be above zero."""
        if self.is_log:
            values = values.log() if hasattr(values, "log") else np.log(values)
        return (values - self.center) * (1 / self.scale)

    def formula(self) -> str:
        if self.unit is None:
            return "unknown"
        if not self.is_log:
            return f"value / ({self.scale:.10g} {self.unit})"
        if not self.center:
            return f"ln(value / {self.unit}) / {self.scale:.10g}"
        ten = math.log(10.0)
        return f"(log10(value / {self.unit}) - {self.center / ten:.10g}) / {self.scale / ten:.10g}"


def vectors_of(count: int) -> list[list[int]]:
    """The default vector_channels of a dataset: the velocity, if it has at least four channels."""
    return [list(triple) for triple in VELOCITY if max(triple) < count]


def _channels(
    known: Mapping[int, Sequence[str]], prefix: str, count: int, transform: TransformConfig, vectors: Vectors = VELOCITY
) -> tuple[Channel, ...]:
    """The channels of `known` if the vectors are as expected, else unknown ones."""
    quantities = known.get(count, ())
    if not quantities or [*map(list, vectors)] != vectors_of(count):
        return tuple(Channel(f"{UNKNOWN}{number}") for number in range(count))
    return tuple(channel for quantity in quantities for channel in _quantity(quantity, prefix, transform))


def _quantity(quantity: str, prefix: str, transform: TransformConfig) -> list[Channel]:
    if quantity == "density":
        scale, name = transform.density_log_scale, f"{prefix}density"
        return [Channel(name) if scale is None else Channel(name, DENSITY_UNIT, scale, is_log=True)]
    if quantity == "velocity":
        scale, names = transform.velocity_scale_km_s, [f"{prefix}velocity {axis}" for axis in "xyz"]
        return [Channel(name) if scale is None else Channel(name, VELOCITY_UNIT, scale) for name in names]
    scale, center, ten = transform.temperature_log10_scale, transform.temperature_log10_center, math.log(10.0)
    if scale is None:
        return [Channel("temperature")]
    return [Channel("temperature", TEMPERATURE_UNIT, scale * ten, center * ten, is_log=True)]


input_channels = partial(_channels, INPUTS, DARK_MATTER)  # of `Nbody`
target_channels = partial(_channels, TARGETS, GAS)  # of `Hydro`


def volume_channels(config: Config) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
    transform, vectors = config.transform, config.vector_channels
    inputs = input_channels(config.N_in_channels, transform, vectors.inputs)
    return inputs, target_channels(config.N_out_channels, transform, vectors.targets)


def common_channels(inputs: Sequence[Channel], targets: Sequence[Channel]) -> int:
    """Number of first channels that hold the same quantity of dark matter and gas; if unknown, all that both have."""
    pairs = list(zip(inputs, targets, strict=False))
    if any(channel.name.startswith(UNKNOWN) for channel in (*inputs, *targets)):
        return len(pairs)
    same = (first.name.removeprefix(DARK_MATTER) == second.name.removeprefix(GAS) for first, second in pairs)
    return sum(itertools.takewhile(bool, same))


def check_physical_units(channels: Iterable[Channel], remedy: str) -> None:
    """Raises UserError if the physical values of a channel are unknown."""
    if unknown := [channel.name for channel in channels if channel.unit is None]:
        raise UserError(f"the checkpoint's config does not define physical values of {', '.join(unknown)}; {remedy}")
