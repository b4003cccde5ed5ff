"""Figures of one evaluation: slices, spectra, distributions, and the phase diagram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.evaluation import plotting
from utils.evaluation.plotting import LOGARITHMS, finite, new_figure
from utils.evaluation.results import Distribution, PhaseDiagram, Results
from utils.inference.channels import DENSITY_UNIT, TEMPERATURE_UNIT, Channel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET_COLOUR, PREDICTION_COLOUR = "0.8", plotting.VERMILION
RESIDUAL_COLOURS = "PuOr_r"
EARLIER_SPECTRA = 3


def draw_all(results: Results) -> Iterator[tuple[str, Figure]]:
    """Name and figure for each entry of PICTURES that the results have data for."""
    for name, draw in PICTURES.items():
        if name != "phase_diagram" or results.phase_diagram is not None:
            yield name, draw(results)


def spectra(results: Results, earlier: Sequence[Results] = ()) -> Figure:
    """Power relative to the target and correlation with it, by wavenumber; a few earlier evaluations dashed."""
    figure = new_figure(7, 6)
    above, below = figure.subplots(2, sharex=True)
    faint = plotting.evenly_spaced(earlier, EARLIER_SPECTRA)
    colours = plotting.colours_of(results.spectra)
    for number, each in enumerate((*faint, results)):
        latest = each is results
        style: dict[str, Any] = {"linewidth": 1.8} if latest else {"linewidth": 0.9, "linestyle": "--"}
        style["alpha"] = 1.0 if latest else 0.25 + 0.4 * number / len(faint)
        for name, spectrum in each.spectra.items():
            style["color"] = colours.get(name, "0.5")
            above.plot(spectrum.k, spectrum.ratio, label=name if latest else None, **style)
            below.plot(spectrum.k, spectrum.correlation, **style)
    for axes in (above, below):
        axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)
        axes.grid(alpha=0.25)
    below.axhline(0.9, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    if faint:
        above.plot([], [], color="0.5", linewidth=0.9, linestyle="--", label=f"earlier: {_training_times(faint)}")
    _set_spectra_limits(above, below, results)
    for axis in (above.yaxis, below.xaxis):
        plotting.use_plain_numbers(axis)
    figure.align_ylabels()
    if above.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _set_spectra_limits(above: Axes, below: Axes, results: Results) -> None:
    """Sets ranges and labels by the latest evaluation: an untrained network's power may be orders of magnitude off."""
    found = results.spectra.values()
    ratios = finite(*(spectrum.ratio for spectrum in found))
    ratios = ratios[ratios > 0]
    low, high = (ratios.min(), ratios.max()) if ratios.size else (1.0, 1.0)
    ylabel = r"$P_\mathrm{prediction}\,/\,P_\mathrm{target}$"
    above.set(yscale="log", ylim=(min(0.5, low / 1.2), max(2.0, high * 1.2)), ylabel=ylabel)
    correlations = finite(*(spectrum.correlation for spectrum in found))
    lowest = correlations.min() if correlations.size else 0.0
    below.set(xscale="log", ylim=(min(0.0, lowest) - 0.04, 1.04), ylabel="correlation r with the target")
    ks = finite(*(spectrum.k for spectrum in found))
    below.set(xlim=(ks.min() / 1.2, ks.max() * 1.2), xlabel=f"wavenumber k ({results.wavenumber_unit})")


def _training_times(history: Sequence[Results]) -> str:
    for name in ("epoch", "step"):
        if all(each.metadata.get(name) is not None for each in history):
            return f"{name} " + ", ".join(str(each.metadata[name]) for each in history)
    return f"{len(history)} evaluations"


def distributions(results: Results) -> Figure:
    """Distribution of the values of each channel: target filled, prediction as a line."""
    count = len(results.distributions)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = new_figure(3.2 * columns, 2.6 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, distribution) in zip(grid.flat, results.distributions.items(), strict=False):
        _draw_distribution(axes, distribution)
        axes.set_title(name)
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_distribution(axes: Axes, distribution: Distribution) -> None:
    edges, widths = distribution.edges, np.diff(distribution.edges)
    target, predicted = (
        counts / (max(counts.sum(), 1) * widths) for counts in (distribution.target, distribution.predicted)
    )
    axes.stairs(target, edges, fill=True, color=TARGET_COLOUR, label="target")
    axes.stairs(target, edges, color="black", linewidth=0.8)
    axes.stairs(predicted, edges, color=PREDICTION_COLOUR, linewidth=1.5, label="prediction")
    occupied = (target > 0) | (predicted > 0)
    if occupied.any():
        both = np.concatenate([target, predicted])
        axes.set_ylim(both[both > 0].min() / 2, both.max() * 2)
        first, last = np.flatnonzero(occupied)[[0, -1]]
        axes.set_xlim(edges[first], edges[last + 1])
    unit = "dex" if distribution.is_log else distribution.unit or "unit"
    axes.set(yscale="log", xlabel=plotting.value_label(distribution.unit, distribution.is_log))
    axes.set_ylabel(f"fraction per ({unit})" if " " in unit or "(" in unit else f"fraction per {unit}")
    axes.grid(alpha=0.25)


def phase_diagram(results: Results) -> Figure:
    """Temperature against density: target and prediction on one colour scale, and their ratio."""
    from matplotlib.colors import LogNorm

    counts = results.phase_diagram
    assert counts is not None, "a phase diagram needs physical units"
    figure = new_figure(11, 4.3)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    edges = counts.density_edges, counts.temperature_edges
    area = np.outer(np.diff(edges[0]), np.diff(edges[1]))
    target, predicted = (cells / (max(cells.sum(), 1) * area) for cells in (counts.target, counts.predicted))
    both = np.concatenate([target[target > 0], predicted[predicted > 0]])
    norm = LogNorm(both.min(), both.max()) if both.size else LogNorm(0.1, 1)
    for axes, density, title in zip(panels, (target, predicted), ("target", "prediction"), strict=False):
        mesh = axes.pcolormesh(*edges, np.ma.masked_equal(density, 0).T, norm=norm, cmap="viridis", rasterized=True)
        axes.set_title(title)
    figure.colorbar(mesh, ax=panels[:2], label="fraction of cells per dex²", location="bottom", shrink=0.6, aspect=25)
    _draw_ratio(figure, panels[2], counts)
    for axes in panels:
        axes.set_xlabel(LOGARITHMS[DENSITY_UNIT])
    panels[0].set_ylabel(LOGARITHMS[TEMPERATURE_UNIT])
    occupied = (counts.target + counts.predicted) > 0
    limits = axes.set_xlim, axes.set_ylim
    for edge, bins, set_limits in zip(edges, (occupied.any(1), occupied.any(0)), limits, strict=True):
        if bins.any():
            first, last = np.flatnonzero(bins)[[0, -1]]
            set_limits(edge[first], edge[last + 1])
    return figure


def _draw_ratio(figure: Figure, axes: Axes, counts: PhaseDiagram) -> None:
    # One is added to both counts, so that the ratio is defined in bins where only one of the two has cells.
    ratio = np.log10((counts.predicted + 1) / (counts.target + 1))
    empty = (counts.predicted == 0) & (counts.target == 0)
    # The 99th percentile: a few extreme bins would otherwise set the colour scale.
    limit = max(1.0, float(np.percentile(np.abs(ratio[~empty]), 99))) if not empty.all() else 1.0
    edges, values = (counts.density_edges, counts.temperature_edges), np.ma.masked_where(empty, ratio).T
    mesh = axes.pcolormesh(*edges, values, vmin=-limit, vmax=limit, cmap=RESIDUAL_COLOURS, rasterized=True)
    axes.set_title("prediction / target")
    label = r"$\log_{10}$ [(predicted cells + 1) / (target cells + 1)]"
    figure.colorbar(mesh, ax=axes, label=label, location="bottom", extend="both")


def slices(results: Results) -> Figure:
    """The volume's middle plane: rows input, target, prediction and residual; one column per target channel."""
    channels = len(results.channels)
    figure = new_figure(2.25 * channels + 0.6, 10.6)
    grid = figure.subplots(4, channels, sharex=True, sharey=True, squeeze=False)
    _, unit, middle = plotting.plane_geometry(results)
    for number, (column, channel) in enumerate(zip(grid.T, results.channels, strict=True)):
        _draw_slices(figure, column, results, number, channel)
    for axes, title in zip(grid[:, 0], ("input", "target", "prediction", "prediction − target"), strict=True):
        axes.set_ylabel(f"{title}\nz ({unit})")
    for axes in grid[3]:
        axes.set_xlabel(f"y ({unit})")
    figure.suptitle(f"the plane at x = {middle:g} {unit}")
    return figure


def _draw_slices(figure: Figure, column: Sequence[Axes], results: Results, number: int, channel: Channel) -> None:
    """Draws one target channel and the input channel of the same unit, if there is one, into four axes."""
    extent = plotting.plane_geometry(results)[0]
    target, predicted = (results.slices[name][number] for name in ("target", "predicted"))
    column[1].set_title(channel.name)
    source = results.input_channels[number] if number < len(results.input_channels) else None
    if source is not None and source.unit == channel.unit:
        values = plotting.display_values(source, results.slices["input"][number])
        plotting.draw_field(column[0], values, channel, target, extent)
        column[0].set_title(source.name)
    else:
        column[0].set(box_aspect=1)
        column[0].text(0.5, 0.5, "not in the input", ha="center", va="center", transform=column[0].transAxes)
    for axes, plane in zip(column[1:3], (target, predicted), strict=True):
        image = plotting.draw_field(axes, plotting.display_values(channel, plane), channel, target, extent)
    plotting.add_colour_bar(figure, image, column[:3], plotting.value_label(channel.unit, channel.is_log))
    difference = plotting.residual(channel, predicted, target)
    magnitudes = np.abs(finite(difference))
    limit = float(np.percentile(magnitudes, 99.5)) if magnitudes.size else 0.0
    limit = limit or 1.0  # a perfect prediction has no residuals
    image = plotting.draw_plane(column[3], difference, extent, RESIDUAL_COLOURS, (-limit, limit))
    plotting.add_colour_bar(figure, image, column[3:], plotting.residual_unit(channel))


PICTURES: dict[str, Callable[[Results], Figure]] = {
    "slices": slices,
    "spectra": spectra,
    "distributions": distributions,
    "phase_diagram": phase_diagram,
}
