"""Figures over a training: losses, and the results and slices of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from utils.evaluation import plotting
from utils.evaluation.results import Results
from utils.runs import tags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_EVALUATIONS = 6
LINE: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.5}


def loss_curves(records: Sequence[Mapping[str, Any]], measure: str) -> Figure:
    """Losses over steps and, below them, the metrics of each validation; `measure` names the loss."""
    metrics = sorted({name for record in records for name in record if name.endswith(tags.VALID_SUFFIX)})
    metrics = [name for name in metrics if name != tags.VALID_LOSS]
    size, ratios = ((7, 6.4), [3, 2]) if metrics else ((7, 4.2), [1])
    figure = plotting.new_figure(*size)
    grid = figure.subplots(len(ratios), height_ratios=ratios, sharex=True, squeeze=False)
    _draw_losses(grid[0, 0], records)
    grid[0, 0].set(ylabel=f"loss ({measure})", yscale="log")
    if metrics:
        for name in metrics:
            points = _points_of(records, name)
            label = f"{name.removesuffix(tags.VALID_SUFFIX).lower()}, best {max(value for _, value in points):.4f}"
            grid[1, 0].plot(*zip(*points, strict=True), label=label, marker="o", markersize=4)
        grid[1, 0].set(ylabel="validation")
        grid[1, 0].grid(alpha=0.3)
        grid[1, 0].legend()
    grid[-1, 0].set(xlabel="step")
    return figure


def _draw_losses(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    lines: list[tuple[str, str, dict[str, Any]]] = [
        (tags.STEP_LOSS, "training, per interval", {"color": "0.7", "linewidth": 1}),
        (tags.TRAIN_LOSS, "training, per epoch", {"color": "tab:blue", "marker": "o", "markersize": 4}),
        (tags.VALID_LOSS, "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ]
    for name, label, style in lines:
        points = _points_of(records, name)
        if name != tags.VALID_LOSS:
            # The mean over an epoch or interval is drawn at its middle, not at its end.
            starts = [0, *(step for step, _ in points)]
            points = [((start + step) / 2, loss) for start, (step, loss) in zip(starts, points, strict=False)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.grid(alpha=0.3, which="both")
    if axes.has_data():
        axes.legend()


def _points_of(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def evaluation_curves(history: Sequence[Results]) -> Figure:
    """L1 and R² of each channel, and each field's correlation at three wavenumbers, over the training."""
    from matplotlib.ticker import MaxNLocator

    last = history[-1]
    label, points = _positions(history)
    figure = plotting.new_figure(9.5, 6.4)
    rows: list[Any] = [["L1"] * 3 + ["R2"] * 3, ["r 0"] * 2 + ["r 1"] * 2 + ["r 2"] * 2]
    panels = figure.subplot_mosaic(rows)
    _draw_errors(panels, history, points)
    figure.legend(*panels["R2"].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    _draw_correlations(panels, history, points)
    if last.spectra:
        figure.legend(*panels["r 2"].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    for axes in panels.values():
        axes.set(xlabel=label)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for name in ("R2", "r 0", "r 1", "r 2"):
        low, high = panels[name].get_ylim()
        if high > 0:
            panels[name].set_ylim(max(low, -0.5), min(high, 1.05))  # the first evaluations may be far below
    return figure


def _draw_errors(panels: Mapping[str, Axes], history: Sequence[Results], points: Sequence[float]) -> None:
    channels = history[-1].channels
    colours = plotting.colours_of(channel.name for channel in channels)
    for number, channel in enumerate(channels):
        for name, values in (
            ("L1", [each.l1[number] for each in history]),
            ("R2", [each.r2[number] for each in history]),
        ):
            panels[name].plot(points, values, color=colours[channel.name], label=channel.name, **LINE)
    panels["L1"].set(yscale="log", ylabel="L1 of the channel values")
    plotting.use_plain_numbers(panels["L1"].yaxis)
    panels["R2"].set(ylabel="R²")


def _draw_correlations(panels: Mapping[str, Axes], history: Sequence[Results], points: Sequence[float]) -> None:
    last = history[-1]
    colours = plotting.colours_of(last.spectra)
    for number, scale in enumerate(("large", "middle", "small")):
        axes = panels[f"r {number}"]
        axes.set(ylabel="correlation r")
        for name in last.spectra:
            values = [_correlation(each, name, number)[1] for each in history]
            axes.plot(points, values, color=colours[name], label=name, **LINE)
        if last.spectra:
            k = _correlation(last, next(iter(last.spectra)), number)[0]
            axes.set_title(f"{scale} scales, k = {k:.2g} {last.wavenumber_unit}", fontsize="medium")
            axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)


def _positions(history: Sequence[Results]) -> tuple[str, list[float]]:
    """Label and positions of the evaluations on the training's axis: epochs, or steps, or their number."""
    for name in ("epoch", "step"):
        points = [float(each.metadata[name]) for each in history if isinstance(each.metadata.get(name), (int, float))]
        if len(set(points)) == len(history):
            return name, points
    return "evaluation", [float(number + 1) for number in range(len(history))]


def _correlation(results: Results, name: str, number: int) -> tuple[float, float]:
    """(k, r) of a field at one of the three reference shells; NaN if there is no such field."""
    if name not in results.spectra:
        return math.nan, math.nan
    spectrum = results.spectra[name]
    shell = spectrum.reference_shells[number]
    return float(spectrum.k[shell]), float(spectrum.correlation[shell])


def slices_over_training(history: Sequence[Results]) -> Figure:
    """The middle plane of the first and last channel: up to six predictions of the training, and the target."""
    chosen, last = plotting.evenly_spaced(history, SHOWN_EVALUATIONS), history[-1]
    numbers = sorted({0, len(last.channels) - 1})  # density and temperature, if the channels are the default ones
    extent, unit, _ = plotting.plane_geometry(last)
    figure = plotting.new_figure(1.75 * (len(chosen) + 1) + 1.3, 1.75 * len(numbers) + 0.8)
    grid = figure.subplots(len(numbers), len(chosen) + 1, sharex=True, sharey=True, squeeze=False)
    for row, number in zip(grid, numbers, strict=True):
        channel, target = last.channels[number], last.slices["target"][number]
        planes = [*(each.slices["predicted"][number] for each in chosen), target]
        for axes, plane in zip(row, planes, strict=True):
            image = plotting.draw_field(axes, plotting.display_values(channel, plane), channel, target, extent)
        label = plotting.value_label(channel.unit, channel.is_log)
        plotting.add_colour_bar(figure, image, row, label, location="right")
        row[0].set_ylabel(f"{channel.name}\nz ({unit})")
    for axes, title in zip(grid[0], (*(plotting.training_time(each) for each in chosen), "target"), strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel(f"y ({unit})")
    return figure
