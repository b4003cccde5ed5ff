"""Figures of an evaluation, except those of STATISTICS: slices, spectra, distributions, flux; and losses of a run."""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage, imsave

from analysis.evaluation import base
from analysis.evaluation.results import Distribution, Results
from analysis.evaluation.tables import residual_unit
from analysis.lyman_alpha.results import TARGET, Flux
from utils.config.channels import DARK_MATTER, GAS, Channel, Channels, copied_channels
from utils.run import tags

COLOR_MAPS = {"density": "magma", "temperature": "inferno"}  # by a word of the channel's name
SIGNED_COLORS, RESIDUAL_COLORS = "RdBu_r", "PuOr_r"  # of vectors, and of differences
DOTS_PER_INCH = 110

LOSSES = {tags.STEP_LOSS: "training, per interval", tags.TRAIN_LOSS: "training, per epoch"}
STYLES: dict[str, dict[str, Any]] = {tags.STEP_LOSS: {"color": "0.7"}, tags.STEP_LEARNING_RATE: {"color": "black"}}
MEASURES = {"l1": "mean absolute error", "mse": "mean squared error"}

Records = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def draw(name: str, results: Results) -> Figure:
    """The picture of this name, a statistic's or a function's below; the results must have data for it."""
    if name in results.statistics:
        figure = new_figure(8, 4.3)
        results.statistics[name].draw(figure, results)
    else:
        figure = globals()[name](results)
    figure.suptitle(results.title)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches."""
    return Figure(figsize=(width, height), layout="constrained", dpi=DOTS_PER_INCH)


def encode_png(figure: Figure) -> bytes:
    file, canvas = io.BytesIO(), FigureCanvasAgg(figure)
    canvas.draw()  # once; savefig would draw twice
    imsave(file, np.asarray(canvas.buffer_rgba()), format="png")
    return file.getvalue()


def spectra(results: Results) -> Figure:
    """Power relative to the target, and correlation with the target, by wavenumber."""
    figure = new_figure(8, 8)
    above, below = figure.subplots(2, sharex=True, height_ratios=(4, 3))
    for axes in (above, below):
        axes.set_prop_cycle(color=base.PALETTE)
        axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)
        axes.grid(alpha=0.25)
    for name, spectrum in results.spectra.items():
        above.plot(spectrum.k, spectrum.ratio, label=base.plain(name))
        below.plot(spectrum.k, spectrum.correlation)
    below.axhline(0.9, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    base.scale_ratios(above)
    above.set_ylabel(r"$P_\mathrm{prediction}\,/\,P_\mathrm{target}$")
    below.set_ylabel("correlation r with the target")
    base.scale_wavenumbers(below, spectrum.k, results.wavenumber_unit)
    figure.align_ylabels()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def distributions(results: Results) -> Figure:
    """Distribution of the values of each channel: target filled, prediction as a line."""
    count = len(results.distributions)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = new_figure(3.2 * columns, 2.6 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, distribution) in zip(grid.flat, results.distributions.items(), strict=False):
        _draw_distribution(axes, name, distribution)
        axes.set_title(base.plain(name))
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_distribution(axes: Axes, name: str, distribution: Distribution) -> None:
    edges, sides = distribution.edges, (distribution.target, distribution.predicted)
    target, predicted = (counts / (counts.sum() * np.diff(edges)) for counts in sides)
    axes.stairs(target, edges, fill=True, color="0.8", label="target")
    axes.stairs(target, edges, color="black", linewidth=0.8)
    axes.stairs(predicted, edges, color=base.PALETTE[1], linewidth=1.5, label="prediction")
    both = np.concatenate([target, predicted])
    axes.set(yscale="log", ylim=(both[both > 0].min() / 2, both.max() * 2))
    axes.set_xlim(base.occupied(target + predicted, edges))
    axes.set(xlabel=base.value_label(name, distribution.unit, distribution.is_log), ylabel="probability density")
    axes.grid(alpha=0.25)


def flux(results: Results) -> Figure:
    """Power spectrum P1D and distribution of the flux, and the flux along one sight-line."""
    flux_results = results.flux
    assert flux_results is not None, "the flux was not computed"
    figure = new_figure(10, 7.5)
    mosaic = figure.subplot_mosaic([["power", "pdf"], ["ratio", "pdf"], ["line", "line"]], height_ratios=[3, 2, 2])
    for name, field in flux_results.fields.items():
        color = base.COLORS.get(name, base.PALETTE[0])
        mosaic["power"].plot(flux_results.k, flux_results.k * field.power / math.pi, color=color, label=name)
        mosaic["pdf"].stairs(field.pdf, flux_results.edges, baseline=None, color=color, linewidth=1.5)
        mosaic["line"].plot(flux_results.velocity, field.sightline, color=color, linewidth=1.2)
        if name != TARGET:
            mosaic["ratio"].plot(flux_results.k, flux_results.ratios[name], color=color)
    _draw_axes_of_target(mosaic["ratio"], flux_results)
    for axes in mosaic.values():
        axes.grid(alpha=0.25)
    for name in ("power", "ratio"):
        base.scale_wavenumbers(mosaic[name], flux_results.k, "s/km")
    mosaic["power"].set(yscale="log", xlabel="", ylabel=r"$k\,P_\mathrm{1D}(k)\,/\,\pi$")
    mosaic["power"].tick_params(labelbottom=False)
    mosaic["ratio"].set_ylabel("ratio to target")
    base.scale_ratios(mosaic["ratio"])
    mosaic["pdf"].set(yscale="log", xlim=(0, 1), xlabel="flux F", ylabel="probability density")
    mosaic["line"].set_xlim(0, flux_results.velocity[-1])
    mosaic["line"].set(ylim=(-0.05, 1.05), xlabel="velocity along z (km/s)", ylabel="flux F")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_axes_of_target(axes: Axes, flux: Flux) -> None:
    """The range of the target's P1D along x, y and z, where all have a mode: differences between axes are chance."""
    target, common = flux.fields[TARGET], np.isfinite(flux.axis_k).all(0)
    along = target.axis_power / np.interp(flux.axis_k, flux.k, target.power)
    low, high = along[:, common].min(0), along[:, common].max(0)
    axes.fill_between(flux.k[common], low, high, color="0.8", linewidth=0, label="target along x, y, z")
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.axvline(flux.largest_k, color="0.3", linewidth=0.8, linestyle=":")


def flux_3d(results: Results) -> Figure:
    """P(k, mu) of the flux relative to that of the target, by direction; one panel per field."""
    flux_results = results.flux
    assert flux_results is not None, "the flux was not computed"
    edges, k = flux_results.mu_edges, flux_results.p3d_k
    names = [f"$\\mu$ = {low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    ratios, colors = flux_results.ratios_of("p3d"), dict(zip(names, base.PALETTE, strict=False))
    curves = {field: dict(zip(names, zip(k, ratio, strict=True), strict=True)) for field, ratio in ratios.items()}
    figure = new_figure(8, 4.3)
    base.draw_ratios(figure, curves, colors, r"$P_\mathrm{3D}(k, \mu)$", "h/Mpc")
    return figure


def slices(results: Results) -> Figure:
    return draw_slices(results.input_channels, results.channels, results.slices, results.cell)


def draw_slices(
    inputs: Channels, targets: Channels, planes: Mapping[str, np.ndarray], cell: float | None, title: str = ""
) -> Figure:
    """A row per target channel: "input", "target", "predicted" [C, Y, Z] of `planes`, and residual; `cell` in Mpc/h."""
    figure, copied = new_figure(10, 1.9 * len(targets) + 0.8), copied_channels(inputs, targets)
    grid = figure.subplots(len(targets), 4, sharex=True, sharey=True, squeeze=False)
    width, height = (side * (cell or 1.0) for side in planes["target"].shape[1:])
    extent = (0.0, width, 0.0, height)
    for number, (row, channel) in enumerate(zip(grid, targets, strict=True)):
        target, predicted = (display_values(channel, planes[name][number]) for name in ("target", "predicted"))
        shown = [(row[1], target), (row[2], predicted)]
        place = copied.get(number)
        if place is not None and (inputs[place].unit, inputs[place].is_log) == (channel.unit, channel.is_log):
            shown.insert(0, (row[0], display_values(inputs[place], planes["input"][place])))
        else:
            row[0].set(box_aspect=1)
            row[0].text(0.5, 0.5, "not in the input", ha="center", va="center", transform=row[0].transAxes)
        colors = next((colors for word, colors in COLOR_MAPS.items() if word in channel.name), "viridis")
        limits = float(target.min()), float(target.max())
        if channel.component or "velocity" in channel.name:
            colors, limits = SIGNED_COLORS, (-float(np.abs(target).max()), float(np.abs(target).max()))
        for axes, values in shown:
            image = _draw_plane(axes, values, extent, colors, limits)
        _color_bar(figure, image, row[:3], base.value_label(channel.name, channel.unit, channel.is_log))
        with np.errstate(invalid="ignore"):
            residual = predicted - target
        finite = np.abs(residual[np.isfinite(residual)])
        # A perfect prediction has no residuals, a diverged one may have no finite ones.
        limit = (float(np.percentile(finite, 99.5)) if finite.size else 0.0) or 1.0
        image = _draw_plane(row[3], residual, extent, RESIDUAL_COLORS, (-limit, limit))
        _color_bar(figure, image, row[3], base.plain(residual_unit(channel)))
    unit = "cells" if cell is None else "Mpc/h"
    source = "dark matter" if all(channel.name.startswith(DARK_MATTER) for channel in inputs) else "input"
    for axes, name in zip(grid[0], (source, "target", "prediction", "prediction − target"), strict=True):
        axes.set_title(name)
    for axes, channel in zip(grid[:, 0], targets, strict=True):
        axes.set_ylabel(f"{base.plain(channel.name.removeprefix(GAS))}\nz ({unit})")
    for axes in grid[-1]:
        axes.set_xlabel(f"y ({unit})")
    figure.suptitle(title)
    return figure


def _color_bar(figure: Figure, image: AxesImage, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, extend="both", label=label, shrink=0.9, aspect=15)
    bar.ax.ticklabel_format(axis="y", scilimits=(-2, 4))  # longer numbers would leave no room for the label


def display_values(channel: Channel, values: np.ndarray) -> np.ndarray:
    """Physical values of a channel, as decimal logarithms if the channel is logarithmic."""
    with np.errstate(over="ignore"):  # the output of a diverged network is drawn as non-finite
        physical = channel.to_physical(values.astype(np.float64))
    return np.log10(physical) if channel.is_log else physical


def _draw_plane(
    axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float], colors: str, limits: tuple[float, float]
) -> AxesImage:
    """Draws a plane [Y, Z] with y to the right and z upwards; non-finite values are gray."""
    axes.set_facecolor("0.5")
    return axes.imshow(values.T, origin="lower", extent=extent, cmap=colors, vmin=limits[0], vmax=limits[1])


def loss_curves(records: Records, loss: str, run: str) -> Figure:
    """Losses over steps and, below them, the metrics of each validation and the learning rate; `loss` is its name."""
    names, begin = {name for record in records for name in record}, tags.VOLUME_LOSS
    volumes = {name: f"validation, {name.removeprefix(begin)}" for name in sorted(names) if name.startswith(begin)}
    losses = LOSSES | {tags.VALID_LOSS: "validation"} | volumes
    metrics = sorted({name for name in names if name.endswith(tags.VALID_SUFFIX)} - losses.keys())
    heights = [3.0, *([2.0] if metrics else []), 1.0]
    figure = new_figure(7, 1.5 * sum(heights))
    rows = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    _draw_curves(rows[0], records, losses)
    rows[0].set(ylabel=f"loss ({MEASURES.get(loss, loss.replace('_', '-'))})", yscale="log")
    if metrics:
        labels = {name: name.removesuffix(tags.VALID_SUFFIX).lower().replace("$", r"\$") for name in metrics}
        _draw_curves(rows[1], records, labels)
        rows[1].set(ylabel="validation")
    highest = _draw_curves(rows[-1], records, {tags.STEP_LEARNING_RATE: ""})
    # From zero: limits that follow the values would magnify the rounding of a constant rate.
    rows[-1].set(xlabel="step", ylabel="learning\nrate", ylim=(0, 1.15 * highest or 1))
    figure.suptitle(", ".join(filter(None, (run, tags.progress(records)))))
    figure.align_ylabels()
    return figure


def _draw_curves(axes: Axes, records: Records, labels: Mapping[str, str]) -> float:
    """Draws a curve for each tag that the records have, and returns the largest value."""
    highest = 0.0
    for tag, label in labels.items():
        points = [(record["step"], record[tag]) for record in records if tag in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **STYLES.get(tag, {"marker": "o", "markersize": 4}))
            highest = max(highest, *(value for _, value in points))
    axes.grid(alpha=0.3)
    if any(labels.values()) and axes.lines:
        axes.legend()
    return highest
