"""Shared parts of the figures: colours, labels, drawing of planes. Functions import matplotlib when they are called."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from utils.evaluation.results import Results
from utils.inference.channels import DENSITY_UNIT, TEMPERATURE_UNIT, Channel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Item = TypeVar("Item")
Extent = tuple[float, float, float, float]

# A palette that the colour-blind can distinguish (Okabe & Ito 2008).
BLUE, SKY, GREEN, VERMILION, ORANGE, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7"
COLOURS = {
    "density": BLUE,
    "gas density": BLUE,
    "log density": SKY,
    "velocity": VERMILION,
    "gas velocity x": VERMILION,
    "gas velocity y": ORANGE,
    "gas velocity z": PURPLE,
    "divergence": ORANGE,
    "temperature": GREEN,
    "log temperature": GREEN,
}
OTHER_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
COLOUR_MAPS = {"density": "magma", "velocity": "RdBu_r", "temperature": "inferno"}  # by a word of the channel's name
LOGARITHMS = {DENSITY_UNIT: r"$\log_{10}(\rho/\bar\rho)$", TEMPERATURE_UNIT: r"$\log_{10}(T/\mathrm{K})$"}
DOTS_PER_INCH = 110


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def encode_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
    return file.getvalue()


# --- values ----------------------------------------------------------------------------------------------------------


def display_values(channel: Channel, values: np.ndarray) -> np.ndarray:
    """Physical values of a channel, as decimal logarithms if the channel is logarithmic."""
    with np.errstate(over="ignore"):  # the output of a diverged network is drawn as non-finite
        physical = channel.to_physical(values.astype(np.float64))
    return np.log10(physical) if channel.is_log else physical


def residual(channel: Channel, predicted: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Prediction − target: in dex for a logarithmic channel, else in its unit."""
    with np.errstate(invalid="ignore"):
        return display_values(channel, predicted) - display_values(channel, target)


def residual_unit(channel: Channel) -> str:
    return "dex" if channel.is_log else channel.unit or "channel value"


def value_label(unit: str | None, is_log: bool) -> str:
    """Label of an axis of physical values."""
    if unit is None:
        return "channel value"
    return LOGARITHMS.get(unit, rf"$\log_{{10}}$(value / {unit})") if is_log else unit


def training_time(results: Results) -> str:
    """The epoch or step of an evaluation; empty if neither is known."""
    for name in ("epoch", "step"):
        if results.metadata.get(name) is not None:
            return f"{name} {results.metadata[name]}"
    return ""


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, count)]


def finite(*values: np.ndarray) -> np.ndarray:
    """All finite values, in one row."""
    joined = np.concatenate([np.ravel(each) for each in values]) if values else np.empty(0)
    return joined[np.isfinite(joined)]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS.get(name, OTHER_COLOURS[number % len(OTHER_COLOURS)]) for number, name in enumerate(names)}


# --- drawing ---------------------------------------------------------------------------------------------------------


def plane_geometry(results: Results) -> tuple[Extent, str, float]:
    """Edges of the plane along y and z, the unit of length, and the plane's x."""
    cell = results.metadata.get("cell")
    _, along_y, along_z = results.slices["target"].shape
    size, unit = (1.0, "cells") if cell is None else (float(cell), "Mpc/h")
    return (0.0, along_y * size, 0.0, along_z * size), unit, results.cells // 2 * size


def draw_field(axes: Axes, values: np.ndarray, channel: Channel, target: np.ndarray, extent: Extent) -> AxesImage:
    """Draws display values in the channel's colours over its target's range; symmetric about zero for a velocity."""
    colours = next((colours for word, colours in COLOUR_MAPS.items() if word in channel.name), "viridis")
    shown = finite(display_values(channel, target))
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    if "velocity" in channel.name:
        high = max(abs(low), abs(high))
        low = -high
    return draw_plane(axes, values, extent, colours, (low, high))


def draw_plane(axes: Axes, values: np.ndarray, extent: Extent, colours: str, limits: tuple[float, float]) -> AxesImage:
    """Draws a plane [Y, Z] with y to the right and z upwards; non-finite values are grey."""
    axes.set_facecolor("0.5")
    return axes.imshow(values.T, origin="lower", extent=extent, cmap=colours, vmin=limits[0], vmax=limits[1])


def add_colour_bar(
    figure: Figure, image: AxesImage, panels: Sequence[Axes], label: str, location: str = "bottom"
) -> None:
    figure.colorbar(
        image, ax=list(panels), label=label, location=location, extend="both", pad=0.01, shrink=0.9, aspect=15
    )


def use_plain_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis with 0.5 or 20 instead of powers of ten."""

    def minor(value: float, _: float) -> str:
        low, high = axis.get_view_interval()
        labelled = "123456789" if high < 10 * low else "25" if high < 1000 * low else ""
        return f"{value:g}" if f"{value:e}"[0] in labelled else ""

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(minor)
