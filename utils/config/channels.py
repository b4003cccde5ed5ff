"""The channels of a volume: name, unit, transform from physical values, and the vector of which it is a component.

A channel x holds ln(value) or the value itself, scaled: value = exp(center + scale · x), or center + scale · x.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from utils.errors import UserError

DENSITY_UNIT, VELOCITY_UNIT, TEMPERATURE_UNIT = "mean density", "km/s", "K"
# Plausible typical values; others are in other units, or the transform is another one.
PLAUSIBLE = {DENSITY_UNIT: (0.5, 2.0), VELOCITY_UNIT: (1.0, 3000.0), TEMPERATURE_UNIT: (100.0, 1e9)}
DARK_MATTER, GAS, UNKNOWN = "dark-matter ", "gas ", "channel "  # prefixes of names
AXES = "xyz"

Side = Literal["inputs", "targets"]
SIDES: tuple[Side, Side] = ("inputs", "targets")
Text = Annotated[str, Field(min_length=1, strict=True)]
Number = Annotated[float, Field(strict=True, ge=-1e30, le=1e30, allow_inf_nan=False)]


@dataclass(frozen=True)
class Channel:
    """One channel; `unit` is None if the transform, and so the physical values, are unknown."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Text
    unit: Text | None = None
    scale: Annotated[Number, Field(gt=0)] = 1.0
    center: Number = 0.0
    is_log: bool = False
    # the vector of which it is a component, and the axis, as in "gas velocity x"; a scalar has none
    component: Annotated[Text, Field(pattern=r"^.+ [xyz]$")] | None = None

    def to_physical(self, values: Any) -> Any:
        """Physical values of the channel's values, as numpy array or torch tensor like the argument."""
        linear = values * self.scale
        if self.is_log or self.center:
            linear = linear + self.center
        if not self.is_log:
            return linear
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
            value = f"(value - {self.center:.10g} {self.unit})" if self.center else "value"
            return f"{value} / ({self.scale:.10g} {self.unit})"
        if not self.center:
            return f"ln(value / {self.unit}) / {self.scale:.10g}"
        ten = math.log(10.0)
        return f"(log10(value / {self.unit}) - {self.center / ten:.10g}) / {self.scale / ten:.10g}"


Channels = Sequence[Channel]
Transform = Mapping[str, float | None]  # None: unknown, and so the physical values are
# The transforms of the published data, and of files that state no others: see `known_channels`.
TRANSFORM: Transform = {
    "density_log_scale": 14.0,  # x = ln(density / mean) / scale
    "velocity_scale_km_s": 900.0,  # x = velocity / scale
    "temperature_log10_center": 12.0 / math.log(10.0),  # x = (log10(T / K) - center) / scale
    "temperature_log10_scale": 8.0 / math.log(10.0),
}
# Quantities by number of channels, in files that do not name their channels.
QUANTITIES: Mapping[Side, Mapping[int, Sequence[str]]] = {
    "inputs": {4: ("density", "velocity"), 1: ("density",)},
    "targets": {
        5: ("density", "velocity", "temperature"),
        4: ("density", "velocity"),
        2: ("density", "temperature"),
        1: ("density",),
    },
}


def known_channels(
    side: Side, count: int, transform: Transform = TRANSFORM, vectors: Sequence[Sequence[int]] | None = None
) -> list[Channel]:
    """The channels of a dataset that does not name them; unknown ones for other numbers or other vectors."""
    usual = [[1, 2, 3]] if count > 3 else []  # the velocity
    triples, quantities = usual if vectors is None else [*map(list, vectors)], QUANTITIES[side].get(count, ())
    if quantities and triples == usual:
        prefix = DARK_MATTER if side == "inputs" else GAS
        return [channel for quantity in quantities for channel in _quantity(quantity, prefix, transform)]
    components = {
        place: f"vector {number} {axis}"
        for number, triple in enumerate(triples)
        for axis, place in zip(AXES, triple, strict=True)
    }
    return [Channel(f"{UNKNOWN}{number}", component=components.get(number)) for number in range(count)]


def _quantity(quantity: str, prefix: str, transform: Mapping[str, Any]) -> list[Channel]:
    if quantity == "density":
        scale, name = transform["density_log_scale"], f"{prefix}density"
        return [Channel(name) if scale is None else Channel(name, DENSITY_UNIT, scale, is_log=True)]
    if quantity == "velocity":
        scale = transform["velocity_scale_km_s"]
        unit = None if scale is None else VELOCITY_UNIT
        names = [f"{prefix}velocity {axis}" for axis in AXES]
        return [Channel(name, unit, scale or 1.0, component=name) for name in names]
    scale, center, ten = transform["temperature_log10_scale"], transform["temperature_log10_center"], math.log(10.0)
    if scale is None:
        return [Channel("temperature")]
    return [Channel("temperature", TEMPERATURE_UNIT, scale * ten, center * ten, is_log=True)]


def vectors_of(channels: Channels) -> dict[str, list[int]]:
    """The places of the x, y and z components of each vector, by its name; ValueError if one is missing or repeated."""
    places: dict[str, dict[str, int]] = {}
    for number, channel in enumerate(channels):
        if channel.component:
            vector, axis = channel.component.rsplit(" ", 1)
            if places.setdefault(vector, {}).setdefault(axis, number) != number:
                raise ValueError(f"two channels are the component {channel.component}; correct one")
    for vector, axes in places.items():
        if missing := [axis for axis in AXES if axis not in axes]:
            raise ValueError(f"the vector {vector} has no component {', '.join(missing)}; add it, or make all scalars")
        parts = [channels[number] for number in axes.values()]
        # Symmetries exchange components and negate them.
        alike = len({(part.unit, part.scale) for part in parts}) == 1
        if not alike or any(part.center or part.is_log for part in parts):
            raise ValueError(f"the components of {vector} need one unit, one scale, no center and no logarithm")
    return {vector: [axes[axis] for axis in AXES] for vector, axes in places.items()}


def place_of(channels: Channels, name: str, unit: str, is_log: bool = True) -> int | None:
    """The place of the channel with this name, unit and kind of transform; None if there is none."""
    wanted, rows = (name, unit, is_log), [(channel.name, channel.unit, channel.is_log) for channel in channels]
    return rows.index(wanted) if wanted in rows else None


def density_place(channels: Channels, prefix: str) -> int | None:
    return place_of(channels, f"{prefix}density", DENSITY_UNIT)


def temperature_place(channels: Channels) -> int | None:
    return place_of(channels, "temperature", TEMPERATURE_UNIT)


def velocity_places(channels: Channels, prefix: str) -> list[int]:
    """The places of the three components; empty if one is missing."""
    places = [place_of(channels, f"{prefix}velocity {axis}", VELOCITY_UNIT, is_log=False) for axis in AXES]
    return [place for place in places if place is not None] if None not in places else []


def copied_channels(inputs: Channels, targets: Channels) -> dict[int, int]:
    """The places of inputs that hold the quantity of a target, by the target's place; without names, the same place."""
    if any(channel.name.startswith(UNKNOWN) for channel in (*inputs, *targets)):
        return {number: number for number in range(min(len(inputs), len(targets)))}
    places = {channel.name.removeprefix(DARK_MATTER): number for number, channel in enumerate(inputs)}
    wanted = {number: channel.name.removeprefix(GAS) for number, channel in enumerate(targets)}
    return {number: places[name] for number, name in wanted.items() if name in places}


def check_physical_units(channels: Iterable[Channel], remedy: str) -> None:
    """Raises UserError if the physical values of a channel are unknown."""
    if unknown := [channel.name for channel in channels if channel.unit is None]:
        raise UserError(f"the physical values of {', '.join(unknown)} are unknown; {remedy}")
