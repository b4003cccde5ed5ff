"""What an evaluation found, drawn: spectra, distributions, slices, and how they came about over the epochs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from utils.evaluation.results import Results, telling_wavenumbers
from utils.files import atomic_write
from utils.inference.channels import DENSITY_UNIT, TEMPERATURE_UNIT, Channel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from PIL.Image import Image

Item = TypeVar("Item")

# Told apart by the colour-blind, too (Okabe & Ito 2008); black is the target's.
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
TARGET_COLOUR, PREDICTION_COLOUR = "0.8", VERMILION
COLOUR_MAPS = {"density": "magma", "velocity": "RdBu_r", "temperature": "inferno"}  # by a word of the channel's name
RESIDUAL_COLOURS = "PuOr_r"
LOGARITHMS = {DENSITY_UNIT: r"$\log_{10}(\rho/\bar\rho)$", TEMPERATURE_UNIT: r"$\log_{10}(T/\mathrm{K})$"}
GRID_EPOCHS, EARLIER_SPECTRA, MOVIE_FRAMES = 6, 3, 30
PICTURE_DOTS_PER_INCH, MOVIE_DOTS_PER_INCH = 110, 80
PALETTE, PALETTE_STEPS, PALETTE_GREYS = 256, 64, 16  # colours in all, at most of one map, and for lines and letters
FRAME_MILLISECONDS, LAST_FRAME_MILLISECONDS = 350, 2000
MOVIE_BYTES = 1_200_000  # more than noise-free frames need; beyond it, frames are left out


def when(results: Results) -> str:
    """At which epoch, or step, of the training; empty where nobody has said."""
    for name in ("epoch", "step"):
        if results.about.get(name) is not None:
            return f"{name} {results.about[name]}"
    return ""


def shown(channel: Channel, values: np.ndarray) -> np.ndarray:
    """The channel's values as the figures show them: physical, and their decimal logarithms if it is logarithmic."""
    with np.errstate(over="ignore"):  # what a diverged network predicts is shown as no number
        physical = channel.to_physical(values.astype(np.float64))
    return np.log10(physical) if channel.is_log else physical


def residual(channel: Channel, predicted: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Prediction − target: in dex for a logarithmic channel, else in its unit."""
    with np.errstate(invalid="ignore"):
        return shown(channel, predicted) - shown(channel, target)


def residual_unit(channel: Channel) -> str:
    """Of `residual`."""
    return "dex" if channel.is_log else channel.unit or "channel value"


def of(results: Results) -> Iterator[tuple[str, Figure]]:
    """Each of PICTURES that there is something to show in, with its name."""
    for name, draw in PICTURES.items():
        if name != "plane" or results.plane is not None:
            yield name, draw(results)


def spectra(results: Results, earlier: Sequence[Results] = ()) -> Figure:
    """Power relative to the target's, and correlation with it, over wavenumber; a few of the earlier ones faintly."""
    figure = _figure(7, 6)
    above, below = figure.subplots(2, sharex=True)
    faint = _evenly(earlier, EARLIER_SPECTRA)
    colours = _colours(results.spectra)
    for number, each in enumerate((*faint, results)):
        latest = each is results
        style: dict[str, Any] = {"linewidth": 1.8} if latest else {"linewidth": 0.9, "linestyle": "--"}
        opacity = 1.0 if latest else 0.25 + 0.4 * number / len(faint)
        for name, spectrum in each.spectra.items():
            colour = colours.get(name, "0.5")
            label = name if latest else None
            above.plot(spectrum.k, spectrum.ratio, color=colour, alpha=opacity, label=label, **style)
            below.plot(spectrum.k, spectrum.correlation, color=colour, alpha=opacity, **style)
    for axes in (above, below):
        axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)
        axes.grid(alpha=0.25)
    below.axhline(0.9, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    if faint:
        above.plot([], [], color="0.5", linewidth=0.9, linestyle="--", label=f"earlier: {_names(faint)}")
    # The last one sets the range: an untrained network's spectrum may be orders of magnitude off.
    ratios = _finite(*(spectrum.ratio for spectrum in results.spectra.values()))
    ratios = ratios[ratios > 0]
    low, high = (ratios.min(), ratios.max()) if ratios.size else (1.0, 1.0)
    above.set(
        yscale="log",
        ylim=(min(0.5, low / 1.2), max(2.0, high * 1.2)),
        ylabel=r"$P_\mathrm{prediction}\,/\,P_\mathrm{target}$",
    )
    correlations = _finite(*(spectrum.correlation for spectrum in results.spectra.values()))
    lowest = correlations.min() if correlations.size else 0.0
    below.set(xscale="log", ylim=(min(0.0, lowest) - 0.04, 1.04), ylabel="correlation r with the target")
    ks = _finite(*(spectrum.k for spectrum in results.spectra.values()))
    below.set(xlim=(ks.min() / 1.2, ks.max() * 1.2), xlabel=f"wavenumber k ({results.wavenumber_unit})")
    for axis in (above.yaxis, below.xaxis):
        _plain_numbers(axis)
    figure.align_ylabels()
    if above.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def distributions(results: Results) -> Figure:
    """How often each value comes in the volume: of the target filled, of the prediction as a line."""
    count = len(results.distributions)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = _figure(3.2 * columns, 2.6 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, distribution) in zip(grid.flat, results.distributions.items(), strict=False):
        widths = np.diff(distribution.edges)
        target, predicted = (
            counts / (max(counts.sum(), 1) * widths) for counts in (distribution.target, distribution.predicted)
        )
        axes.stairs(target, distribution.edges, fill=True, color=TARGET_COLOUR, label="target")
        axes.stairs(target, distribution.edges, color="black", linewidth=0.8)
        axes.stairs(predicted, distribution.edges, color=PREDICTION_COLOUR, linewidth=1.5, label="prediction")
        there = (target > 0) | (predicted > 0)
        if there.any():
            found = np.concatenate([target, predicted])
            axes.set_ylim(found[found > 0].min() / 2, found.max() * 2)
            first, last = np.flatnonzero(there)[[0, -1]]
            axes.set_xlim(distribution.edges[first], distribution.edges[last + 1])
        unit = "dex" if distribution.is_log else distribution.unit or "unit"
        axes.set(yscale="log", title=name, xlabel=_value_label(distribution.unit, distribution.is_log))
        axes.set_ylabel(f"share per ({unit})" if " " in unit or "(" in unit else f"share per {unit}")
        axes.grid(alpha=0.25)
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def plane(results: Results) -> Figure:
    """Temperature over density: cells of target and prediction on one scale, and the ratio of the two."""
    from matplotlib.colors import LogNorm

    found = results.plane
    assert found is not None, "without physical units there is no such plane"
    figure = _figure(11, 4.3)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    edges = found.density_edges, found.temperature_edges
    area = np.outer(np.diff(edges[0]), np.diff(edges[1]))
    target, predicted = (counts / (max(counts.sum(), 1) * area) for counts in (found.target, found.predicted))
    both = np.concatenate([target[target > 0], predicted[predicted > 0]])
    norm = LogNorm(both.min(), both.max()) if both.size else LogNorm(0.1, 1)
    for axes, share, title in zip(panels, (target, predicted), ("target", "prediction"), strict=False):
        mesh = axes.pcolormesh(*edges, np.ma.masked_equal(share, 0).T, norm=norm, cmap="viridis", rasterized=True)
        axes.set_title(title)
    figure.colorbar(mesh, ax=panels[:2], label="share of cells per dex²", location="bottom", shrink=0.6, aspect=25)
    # One more cell in each, so that a bin where only one of the two has cells has a ratio, too.
    ratio = np.log10((found.predicted + 1) / (found.target + 1))
    empty = (found.predicted == 0) & (found.target == 0)
    # A few cells beside the others would have the colours to themselves.
    limit = max(1.0, float(np.percentile(np.abs(ratio[~empty]), 99))) if not empty.all() else 1.0
    mesh = panels[2].pcolormesh(
        *edges, np.ma.masked_where(empty, ratio).T, vmin=-limit, vmax=limit, cmap=RESIDUAL_COLOURS, rasterized=True
    )
    panels[2].set_title("prediction / target")
    figure.colorbar(
        mesh,
        ax=panels[2],
        label=r"$\log_{10}$ [(predicted cells + 1) / (target cells + 1)]",
        location="bottom",
        extend="both",
    )
    for axes in panels:
        axes.set_xlabel(LOGARITHMS[DENSITY_UNIT])
    panels[0].set_ylabel(LOGARITHMS[TEMPERATURE_UNIT])
    some = (found.target + found.predicted) > 0
    for edge, bins, limits in zip(edges, (some.any(1), some.any(0)), (axes.set_xlim, axes.set_ylim), strict=True):
        if bins.any():
            first, last = np.flatnonzero(bins)[[0, -1]]
            limits(edge[first], edge[last + 1])
    return figure


def slices(results: Results) -> Figure:
    """Rows input, target, prediction, residual; a column for each target channel: the middle plane of the volume."""
    channels = len(results.channels)
    figure = _figure(2.25 * channels + 0.6, 10.6)
    grid = figure.subplots(4, channels, sharex=True, sharey=True, squeeze=False)
    extent, unit, middle = _geometry(results)
    for number, (column, channel) in enumerate(zip(grid.T, results.channels, strict=True)):
        target, predicted = (results.slices[name][number] for name in ("target", "predicted"))
        column[1].set_title(channel.name)
        given = results.input_channels[number] if number < len(results.input_channels) else None
        if given is not None and given.unit == channel.unit:
            _field(column[0], shown(given, results.slices["input"][number]), channel, target, extent)
            column[0].set_title(given.name)
        else:
            column[0].set(box_aspect=1)
            column[0].text(0.5, 0.5, "not in the input", ha="center", va="center", transform=column[0].transAxes)
        for axes, values in zip(column[1:3], (target, predicted), strict=True):
            image = _field(axes, shown(channel, values), channel, target, extent)
        _colour_bar(figure, image, column[:3], _value_label(channel.unit, channel.is_log))
        difference = residual(channel, predicted, target)
        finite = np.abs(_finite(difference))
        limit = float(np.percentile(finite, 99.5)) if finite.size else 0.0
        limit = limit or 1.0  # a perfect prediction
        image = _image(column[3], difference, extent, RESIDUAL_COLOURS, (-limit, limit))
        _colour_bar(figure, image, column[3:], residual_unit(channel))
    for axes, title in zip(grid[:, 0], ("input", "target", "prediction", "prediction − target"), strict=True):
        axes.set_ylabel(f"{title}\nz ({unit})")
    for axes in grid[3]:
        axes.set_xlabel(f"y ({unit})")
    figure.suptitle(f"the plane at x = {middle:g} {unit}")
    return figure


PICTURES: dict[str, Callable[[Results], Figure]] = {
    "slices": slices,
    "spectra": spectra,
    "distributions": distributions,
    "plane": plane,
}


def over_epochs(history: Sequence[Results]) -> Figure:
    """Predictions of the first and the last channel at up to six points of the training, and the target."""
    chosen, last = _evenly(history, GRID_EPOCHS), history[-1]
    numbers = _first_and_last(last)
    extent, unit, _ = _geometry(last)
    figure = _figure(1.75 * (len(chosen) + 1) + 1.3, 1.75 * len(numbers) + 0.8)
    grid = figure.subplots(len(numbers), len(chosen) + 1, sharex=True, sharey=True, squeeze=False)
    for row, number in zip(grid, numbers, strict=True):
        channel, target = last.channels[number], last.slices["target"][number]
        planes = [*(each.slices["predicted"][number] for each in chosen), target]
        for axes, values in zip(row, planes, strict=True):
            image = _field(axes, shown(channel, values), channel, target, extent)
        _colour_bar(figure, image, row, _value_label(channel.unit, channel.is_log), location="right")
        row[0].set_ylabel(f"{channel.name}\nz ({unit})")
    for axes, title in zip(grid[0], (*(when(each) for each in chosen), "target"), strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel(f"y ({unit})")
    return figure


def movie(history: Sequence[Results], path: Path) -> None:
    """Writes `encoded_movie`, whole or not at all."""
    content = encoded_movie(history)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,):
        partial.write_bytes(content)


def encoded_movie(history: Sequence[Results]) -> bytes:
    """An animated GIF: up to 30 points of the training, the prediction of first and last channel above the target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL.Image import fromarray

    chosen, last = _evenly(history, MOVIE_FRAMES), history[-1]
    numbers = _first_and_last(last)
    extent, unit, _ = _geometry(last)
    figure = _figure(max(2.5 * len(numbers) + 0.6, 4.2), 6.6)
    figure.set_dpi(MOVIE_DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(numbers), sharex=True, sharey=True, squeeze=False)
    moving = []
    for column, number in zip(grid.T, numbers, strict=True):
        channel, target = last.channels[number], last.slices["target"][number]
        images = [_field(axes, shown(channel, target), channel, target, extent) for axes in column]
        moving.append(images[0])
        _colour_bar(figure, images[0], column, _value_label(channel.unit, channel.is_log))
        column[0].set_title(channel.name)
        column[1].set_xlabel(f"y ({unit})")
    for axes, title in zip(grid[:, 0], ("prediction", "target"), strict=True):
        axes.set_ylabel(f"{title}\nz ({unit})")
    heading = figure.suptitle(_caption(last), fontsize="medium")
    canvas.draw()
    figure.set_layout_engine("none")  # what stands still is stored once
    pictures = []
    for each in chosen:
        heading.set_text(_caption(each))
        for image, number in zip(moving, numbers, strict=True):
            image.set_data(shown(last.channels[number], each.slices["predicted"][number]).T)
        canvas.draw()
        pictures.append(fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    pictures = [_few_colours(picture, figure) for picture in pictures]
    content = b""
    for count in (MOVIE_FRAMES, MOVIE_FRAMES // 2, MOVIE_FRAMES // 4):
        frames = _evenly(pictures, count)
        durations = [FRAME_MILLISECONDS] * (len(frames) - 1) + [LAST_FRAME_MILLISECONDS]
        file = io.BytesIO()
        frames[0].save(file, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
        content = file.getvalue()
        if len(content) <= MOVIE_BYTES:
            break
    return content


def curves_over_epochs(history: Sequence[Results]) -> Figure:
    """L1 and R² of each channel, and each field's r at three wavenumbers, over the training."""
    from matplotlib.ticker import MaxNLocator

    last = history[-1]
    label, points = _points(history)
    figure = _figure(9.5, 6.4)
    rows: list[Any] = [["L1"] * 3 + ["R2"] * 3, ["r 0"] * 2 + ["r 1"] * 2 + ["r 2"] * 2]
    panels = figure.subplot_mosaic(rows)
    style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.5}
    colours = _colours(channel.name for channel in last.channels)
    for number, channel in enumerate(last.channels):
        for name, values in (
            ("L1", [each.l1[number] for each in history]),
            ("R2", [each.r2[number] for each in history]),
        ):
            panels[name].plot(points, values, color=colours[channel.name], label=channel.name, **style)
    panels["L1"].set(yscale="log", ylabel="L1 of the channel's values")
    _plain_numbers(panels["L1"].yaxis)
    panels["R2"].set(ylabel="R²")
    figure.legend(*panels["R2"].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    colours = _colours(last.spectra)
    for name in last.spectra:
        for number in range(3):
            values = [_correlation(each, name, number)[1] for each in history]
            panels[f"r {number}"].plot(points, values, color=colours[name], label=name, **style)
    for number, scale in enumerate(("large", "middle", "small")):
        axes = panels[f"r {number}"]
        axes.set(ylabel="correlation r")
        if last.spectra:
            k = _correlation(last, next(iter(last.spectra)), number)[0]
            axes.set_title(f"{scale} scales, k = {k:.2g} {last.wavenumber_unit}", fontsize="medium")
            axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)
    if last.spectra:
        figure.legend(*panels["r 2"].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    for axes in panels.values():
        axes.set(xlabel=label)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for name in ("R2", "r 0", "r 1", "r 2"):
        low, high = panels[name].get_ylim()
        if high > 0:
            panels[name].set_ylim(max(low, -0.5), min(high, 1.05))  # the first predictions may be far below
    return figure


def encoded(figure: Figure) -> bytes:
    """A PNG; of one with images in at most 256 colours, a third of the size."""
    from PIL.Image import open as open_picture

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=PICTURE_DOTS_PER_INCH)
    if any(axes.images for axes in figure.axes):
        picture = _few_colours(open_picture(file).convert("RGB"), figure)
        file = io.BytesIO()
        picture.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _few_colours(picture: Image, figure: Figure) -> Image:
    """The picture in the colours of the figure's maps, and greys."""
    from PIL.Image import Dither, new

    maps = {image.get_cmap().name: image.get_cmap() for axes in figure.axes for image in axes.images}
    steps = np.linspace(0, 1, min(PALETTE_STEPS, (PALETTE - PALETTE_GREYS) // len(maps)))
    colours = [colour_map(steps)[:, :3] for colour_map in maps.values()]
    colours.append(np.linspace(0, 1, PALETTE_GREYS)[:, None].repeat(3, axis=1))
    palette = new("P", (1, 1))
    palette.putpalette((np.concatenate(colours) * 255).round().astype(np.uint8).tobytes())
    return picture.quantize(palette=palette, dither=Dither.NONE)


def loss_curves(records: Sequence[Mapping[str, Any]], measure: str) -> Figure:
    """Losses over steps and, below them, what else was measured in each validation."""
    metrics = sorted({name for record in records for name in record if name.endswith("/valid")} - {"Loss/valid"})
    size, ratios = ((7, 6.4), [3, 2]) if metrics else ((7, 4.2), [1])
    figure = _figure(*size)
    grid = figure.subplots(len(ratios), height_ratios=ratios, sharex=True, squeeze=False)
    axes = grid[0, 0]
    for name in metrics:
        points = [(record["step"], record[name]) for record in records if name in record]
        label = f"{name.removesuffix('/valid').lower()}, best {max(value for _, value in points):.4f}"
        grid[1, 0].plot(*zip(*points, strict=True), label=label, marker="o", markersize=4)
    for name, label, style in (
        ("Step/loss", "training, per interval", {"color": "0.7", "linewidth": 1}),
        ("Loss/train", "training, per epoch", {"color": "tab:blue", "marker": "o", "markersize": 4}),
        ("Loss/valid", "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ):
        points = [(record["step"], record[name]) for record in records if name in record]
        if name != "Loss/valid":
            # The mean of an epoch, or an interval, belongs to its middle, not to its end.
            starts = [0, *(step for step, _ in points)]
            points = [((start + step) / 2, loss) for start, (step, loss) in zip(starts, points, strict=False)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(ylabel=f"loss ({measure})", yscale="log")
    axes.grid(alpha=0.3, which="both")
    if axes.has_data():
        axes.legend()
    if metrics:
        grid[1, 0].set(ylabel="validation")
        grid[1, 0].grid(alpha=0.3)
        grid[1, 0].legend()
    grid[-1, 0].set(xlabel="step")
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most so many of them, evenly spread, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, count)]


def _first_and_last(results: Results) -> list[int]:
    """Of the channels: density and temperature, if they are what they are by default."""
    return sorted({0, len(results.channels) - 1})


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS.get(name, OTHER_COLOURS[number % len(OTHER_COLOURS)]) for number, name in enumerate(names)}


def _finite(*values: np.ndarray) -> np.ndarray:
    """Those that are numbers, in one row."""
    joined = np.concatenate([np.ravel(each) for each in values]) if values else np.empty(0)
    return joined[np.isfinite(joined)]


def _value_label(unit: str | None, is_log: bool) -> str:
    """Of an axis of physical values."""
    if unit is None:
        return "channel value"
    return LOGARITHMS.get(unit, rf"$\log_{{10}}$(value / {unit})") if is_log else unit


def _geometry(results: Results) -> tuple[tuple[float, float, float, float], str, float]:
    """Edges of the plane (y, then z), the unit of length, and the plane's x."""
    cell = results.about.get("cell")
    _, along_y, along_z = results.slices["target"].shape
    size, unit = (1.0, "cells") if cell is None else (float(cell), "Mpc/h")
    return (0.0, along_y * size, 0.0, along_z * size), unit, results.cells // 2 * size


def _field(
    axes: Axes,
    values: np.ndarray,
    channel: Channel,
    target: np.ndarray,
    extent: tuple[float, float, float, float],
) -> AxesImage:
    """Draws values, as `shown`, in the channel's colours over its target's range; about zero for a velocity."""
    colours = next((colours for word, colours in COLOUR_MAPS.items() if word in channel.name), "viridis")
    finite = _finite(shown(channel, target))
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if "velocity" in channel.name:
        high = max(abs(low), abs(high))
        low = -high
    return _image(axes, values, extent, colours, (low, high))


def _image(
    axes: Axes,
    values: np.ndarray,
    extent: tuple[float, float, float, float],
    colours: str,
    limits: tuple[float, float],
) -> AxesImage:
    """Draws a plane [Y, Z]: y to the right, z upwards; what is no number stays grey."""
    axes.set_facecolor("0.5")
    return axes.imshow(values.T, origin="lower", extent=extent, cmap=colours, vmin=limits[0], vmax=limits[1])


def _colour_bar(figure: Figure, image: AxesImage, panels: Sequence[Axes], label: str, location: str = "bottom") -> None:
    figure.colorbar(
        image, ax=list(panels), label=label, location=location, extend="both", pad=0.01, shrink=0.9, aspect=15
    )


def _plain_numbers(axis: Axis) -> None:
    """Ticks of a logarithmic axis as 0.5 or 20, not as powers of ten."""

    def between(value: float, _: float) -> str:
        low, high = axis.get_view_interval()
        labelled = "123456789" if high < 10 * low else "25" if high < 1000 * low else ""
        return f"{value:g}" if f"{value:e}"[0] in labelled else ""

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(between)


def _names(results: Sequence[Results]) -> str:
    """When they were, in few words."""
    for name in ("epoch", "step"):
        if all(each.about.get(name) is not None for each in results):
            return f"{name} " + ", ".join(str(each.about[name]) for each in results)
    return f"{len(results)} evaluations"


def _points(history: Sequence[Results]) -> tuple[str, list[float]]:
    """Where on the training's axis they lie: epochs if these tell them apart, else steps, else their number."""
    for name in ("epoch", "step"):
        points = [float(each.about[name]) for each in history if isinstance(each.about.get(name), (int, float))]
        if len(set(points)) == len(history):
            return name, points
    return "evaluation", [float(number + 1) for number in range(len(history))]


def _correlation(results: Results, name: str, number: int) -> tuple[float, float]:
    """(k, r) of a field at one of the three telling wavenumbers; r is NaN where there is no such field."""
    if name not in results.spectra:
        return math.nan, math.nan
    spectrum = results.spectra[name]
    shell = spectrum.at(telling_wavenumbers(spectrum)[number])
    return float(spectrum.k[shell]), float(spectrum.correlation[shell])


def _caption(results: Results) -> str:
    """The epoch and, below it, how good the prediction is."""
    parts = [f"L1 {results.l1.mean():.4f}"]
    for name in list(results.spectra)[:1]:
        k, correlation = _correlation(results, name, 1)
        parts.append(f"{name} r {correlation:.3f} at k = {k:.2g} {results.wavenumber_unit}")
    return f"{when(results)}\n{', '.join(parts)}"
