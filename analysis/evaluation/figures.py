"""Figures of one evaluation: slices, spectra, distributions, phase diagram, and Lyman-alpha flux."""

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.image import AxesImage, imsave
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.evaluation.results import DENSITIES, Distribution, Results
from analysis.evaluation.tables import residual_unit
from analysis.lyman_alpha.results import FGPA, FITTED, PREDICTION, SHAPES, TARGET, TRANSFER, Flux
from utils.volumes.channels import DARK_MATTER, DENSITY_UNIT, GAS, TEMPERATURE_UNIT, Channel

# A palette that the color-blind can distinguish (Okabe & Ito 2008).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
COLORS = {TARGET: "black", PREDICTION: PALETTE[1], TRANSFER: PALETTE[2], f"{FGPA}, {FITTED}": PALETTE[5]}
COLOR_MAPS = {"density": "magma", "velocity": "RdBu_r", "temperature": "inferno"}  # by a word of the channel's name
RESIDUAL_COLORS = "PuOr_r"
LOGARITHMS = {DENSITY_UNIT: r"$\log_{10}(\rho/\bar\rho)$", TEMPERATURE_UNIT: r"$\log_{10}(T/\mathrm{K})$"}
NEAR_ONE, LARGEST_RATIO = (0.5, 1.5), 1e3  # of an axis of ratios: its linear part, and the end of its logarithmic one
DECADE = 0.25  # length of a factor of ten in the logarithmic part, in units of the linear one
DOTS_PER_INCH = 110
BARS = 3, 5  # columns of the color bars among the panels of slices


def draw(name: str, results: Results) -> Figure:
    """The picture of this name; the results must have data for it."""
    figure = PICTURES[name](results)
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


# --- spectra ---------------------------------------------------------------------------------------------------------


def spectra(results: Results) -> Figure:
    """Power relative to the target, and correlation with the target, by wavenumber."""
    figure = new_figure(8, 8)
    above, below = figure.subplots(2, sharex=True, height_ratios=(4, 3))
    for axes in (above, below):
        axes.set_prop_cycle(color=PALETTE)
        axes.axhline(1, color="0.3", linewidth=0.8, zorder=0.5)
        axes.grid(alpha=0.25)
    for name, spectrum in results.spectra.items():
        above.plot(spectrum.k, spectrum.ratio, label=name)
        below.plot(spectrum.k, spectrum.correlation)
    below.axhline(0.9, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    _scale_ratios(above)
    above.set_ylabel(r"$P_\mathrm{prediction}\,/\,P_\mathrm{target}$")
    below.set_ylabel("correlation r with the target")
    _scale_wavenumbers(below, spectrum.k, results.wavenumber_unit)
    figure.align_ylabels()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _scale_ratios(*panels: Axes) -> None:
    """The vertical axis of panels, on which no ratio leaves them: linear near 1, logarithmic beyond."""
    (low, high), ends = NEAR_ONE, (1 / LARGEST_RATIO, LARGEST_RATIO)

    def place(ratio: np.ndarray) -> np.ndarray:
        inner, outer = np.clip(ratio, low, high), np.clip(ratio, *ends)
        return inner + DECADE * np.log10(outer / inner)

    def ratio(place: np.ndarray) -> np.ndarray:
        inner = np.clip(place, low, high)
        return inner * 10 ** ((place - inner) / DECADE)

    shown = np.clip([axes.dataLim.intervaly for axes in panels], *ends)
    for axes in panels:
        axes.set_yscale("function", functions=(place, ratio))
        axes.set_yticks([0.001, 0.01, 0.1, 0.5, 0.75, 1, 1.25, 1.5, 10, 100, 1000])
        axes.set_ylim(min(shown.min(), low), max(shown.max(), high))
        axes.yaxis.set_major_formatter("{x:g}")
        for edge in NEAR_ONE:
            axes.axhline(edge, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)


def _scale_wavenumbers(axes: Axes, k: np.ndarray, unit: str) -> None:
    """A logarithmic axis over all k, also if a diverged network leaves nothing to plot; labels 1, 2, 5 per decade."""
    axes.set(xscale="log", xlabel=f"wavenumber k ({unit})", xlim=(np.nanmin(k) / 1.1, np.nanmax(k) * 1.1))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


# --- distributions and phase diagram ---------------------------------------------------------------------------------


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
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_distribution(axes: Axes, distribution: Distribution) -> None:
    edges = distribution.edges
    target, predicted = (
        counts / (counts.sum() * np.diff(edges)) for counts in (distribution.target, distribution.predicted)
    )
    axes.stairs(target, edges, fill=True, color="0.8", label="target")
    axes.stairs(target, edges, color="black", linewidth=0.8)
    axes.stairs(predicted, edges, color=PALETTE[1], linewidth=1.5, label="prediction")
    both = np.concatenate([target, predicted])
    axes.set(yscale="log", ylim=(both[both > 0].min() / 2, both.max() * 2), xlim=_occupied(target + predicted, edges))
    axes.set(xlabel=_value_label(distribution.unit, distribution.is_log), ylabel="probability density")
    axes.grid(alpha=0.25)


def phase_diagram(results: Results) -> Figure:
    """Temperature against density: target and prediction on one color scale."""
    counts = results.phase_diagram
    assert counts is not None, "a phase diagram needs physical units"
    figure = new_figure(8, 4.3)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    edges = counts.density_edges, counts.temperature_edges
    area = np.outer(*(np.diff(axis_edges) for axis_edges in edges))
    target, predicted = (cells / (cells.sum() * area) for cells in (counts.target, counts.predicted))
    both = np.concatenate([target, predicted])
    norm = LogNorm(both[both > 0].min(), both.max())
    for axes, density, title in zip(panels, (target, predicted), ("target", "prediction"), strict=True):
        mesh = axes.pcolormesh(*edges, np.ma.masked_equal(density, 0).T, norm=norm, rasterized=True)
        axes.set_title(title)
    figure.colorbar(mesh, ax=list(panels), label="fraction of cells per dex²", location="bottom", shrink=0.6, aspect=25)
    for axes in panels:
        axes.set_xlabel(LOGARITHMS[DENSITY_UNIT])
    panels[0].set_ylabel(LOGARITHMS[TEMPERATURE_UNIT])
    xlim, ylim = (_occupied((target + predicted).sum(1 - axis), edges[axis]) for axis in (0, 1))
    axes.set(xlim=xlim, ylim=ylim)
    return figure


def _occupied(values: np.ndarray, edges: np.ndarray) -> tuple[float, float]:
    """The outer edges of the bins whose value is not zero."""
    bins = np.flatnonzero(values)
    return edges[bins[0]], edges[bins[-1] + 1]


# --- Lyman-alpha flux ------------------------------------------------------------------------------------------------


def flux(results: Results) -> Figure:
    """Power spectrum P1D and distribution of the flux, and the flux along one sight-line."""
    flux_results = results.flux
    assert flux_results is not None, "the flux was not computed"
    figure = new_figure(10, 7.5)
    panels = figure.subplot_mosaic([["power", "pdf"], ["ratio", "pdf"], ["line", "line"]], height_ratios=[3, 2, 2])
    for name, field in flux_results.fields.items():
        color = COLORS.get(name, PALETTE[0])
        panels["power"].plot(flux_results.k, flux_results.k * field.power / math.pi, color=color, label=name)
        panels["pdf"].stairs(field.pdf, flux_results.edges, baseline=None, color=color, linewidth=1.5)
        panels["line"].plot(flux_results.velocity, field.sightline, color=color, linewidth=1.2)
        if name != TARGET:
            panels["ratio"].plot(flux_results.k, flux_results.ratios[name], color=color)
    _draw_axes_of_target(panels["ratio"], flux_results)
    for axes in panels.values():
        axes.grid(alpha=0.25)
    for name in ("power", "ratio"):
        _scale_wavenumbers(panels[name], flux_results.k, "s/km")
    panels["power"].set(yscale="log", xlabel="", ylabel=r"$k\,P_\mathrm{1D}(k)\,/\,\pi$")
    panels["power"].tick_params(labelbottom=False)
    panels["ratio"].set_ylabel("ratio to target")
    _scale_ratios(panels["ratio"])
    panels["pdf"].set(yscale="log", xlim=(0, 1), xlabel="flux F", ylabel="probability density")
    panels["line"].set_xlim(0, flux_results.velocity[-1])
    panels["line"].set(ylim=(-0.05, 1.05), xlabel="velocity along z (km/s)", ylabel="flux F")
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
    panels = {
        field: dict(zip(names, zip(k, ratio, strict=True), strict=True))
        for field, ratio in flux_results.ratios_of("p3d").items()
    }
    return _ratio_panels(panels, dict(zip(names, PALETTE, strict=False)), r"$P_\mathrm{3D}(k, \mu)$", "h/Mpc")


def bispectrum(results: Results) -> Figure:
    """Bispectra relative to those of the target, of log density and, if they are known, of the flux."""
    density, flux_results = results.bispectrum, results.flux
    assert density is not None, "the unit of density is unknown"
    panels = {f"log density, {SHAPES[0]}": {PREDICTION: (density.k, density.ratio)}}
    if flux_results and flux_results.flux_bispectrum_k.size:
        for number, shape in enumerate(SHAPES):
            ratios = {name: ratio[number] for name, ratio in flux_results.ratios_of("flux_bispectrum").items()}
            panels[f"flux, {shape}"] = {name: (flux_results.flux_bispectrum_k, ratio) for name, ratio in ratios.items()}
    return _ratio_panels(panels, COLORS, "$B$", results.wavenumber_unit)


def _ratio_panels(
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    colors: Mapping[str, str],
    quantity: str,
    unit: str,
) -> Figure:
    """A panel per title: wavenumbers and ratios to the target by label; lines continue across bins without a mode."""
    figure = new_figure(2 + 4 * len(panels), 4.3)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        axes.axhline(1, color="0.3", linewidth=0.8)
        for name, (k, ratio) in curves.items():
            shown = np.isfinite(k)
            axes.plot(k[shown], ratio[shown], color=colors.get(name, PALETTE[0]), label=name, marker=".")
        axes.set_title(title)
        _scale_wavenumbers(axes, np.concatenate([k for k, _ in curves.values()]), unit)
        axes.grid(alpha=0.25)
    _scale_ratios(*row)
    row[0].set_ylabel(f"{quantity} relative to the target")
    figure.legend(*row[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


# --- slices ----------------------------------------------------------------------------------------------------------


def _slices_layout(rows: int) -> tuple[Figure, np.ndarray]:
    """A figure with axes [rows, 6]: three panels and their color bar, and a fourth panel and its color bar.

    All places are given: matplotlib would need longer to find them than to draw.
    """
    panel, gap, bar, label, title, ticks = 1.7, 0.18, 0.1, 0.75, 0.95, 0.5  # in inches
    widths, margin = [*[panel, gap] * 3, bar, label, panel, gap, bar], 0.85
    width, height = margin + sum(widths) + label, title + rows * (panel + gap) - gap + ticks
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH)
    edges = margin / width, ticks / height, 1 - label / width, 1 - title / height
    place = GridSpec(rows, len(widths), figure, *edges, 0.0, gap / panel, width_ratios=widths)
    grid = np.empty((rows, 6), dtype=object)
    for row, column in np.ndindex(grid.shape):
        first = None if column in BARS else grid[0, 0]
        grid[row, column] = axes = figure.add_subplot(place[row, 2 * column], sharex=first, sharey=first)
        if column not in BARS:
            axes.tick_params(labelbottom=row == rows - 1, labelleft=column == 0)
            axes.locator_params(nbins=3)  # each tick of 20 panels takes time
    return figure, grid


def slices(results: Results) -> Figure:
    return draw_slices(results.input_channels, results.channels, results.slices, results.cell)


def draw_slices(
    inputs: Sequence[Channel],
    targets: Sequence[Channel],
    planes: Mapping[str, np.ndarray],
    cell: float | None,
    title: str = "",
) -> Figure:
    """Planes "input", "target" and "predicted" [C, Y, Z] and the residual as columns; one row per target channel.

    `cell` is the side of a cell in Mpc/h; None: lengths are in cells.
    """
    figure, grid = _slices_layout(len(targets))
    sides = [side * (cell or 1.0) for side in planes["target"].shape[1:]]
    extent = (0.0, sides[0], 0.0, sides[1])
    for number, (row, channel) in enumerate(zip(grid, targets, strict=True)):
        target, predicted = (display_values(channel, planes[name][number]) for name in ("target", "predicted"))
        panels = [(row[1], target), (row[2], predicted)]
        if number < len(inputs) and inputs[number].unit == channel.unit:
            panels.insert(0, (row[0], display_values(inputs[number], planes["input"][number])))
        else:
            row[0].set(box_aspect=1)
            row[0].text(0.5, 0.5, "not in the input", ha="center", va="center", transform=row[0].transAxes)
        colors = next((colors for word, colors in COLOR_MAPS.items() if word in channel.name), "viridis")
        limits = float(target.min()), float(target.max())
        if "velocity" in channel.name:
            limits = -float(np.abs(target).max()), float(np.abs(target).max())
        for axes, values in panels:
            image = _draw_plane(axes, values, extent, colors, limits)
        figure.colorbar(image, cax=row[BARS[0]], extend="both", label=_value_label(channel.unit, channel.is_log))
        with np.errstate(invalid="ignore"):
            residual = predicted - target
        finite = np.abs(residual[np.isfinite(residual)])
        # A perfect prediction has no residuals, a diverged one may have no finite ones.
        limit = (float(np.percentile(finite, 99.5)) if finite.size else 0.0) or 1.0
        image = _draw_plane(row[4], residual, extent, RESIDUAL_COLORS, (-limit, limit))
        figure.colorbar(image, cax=row[BARS[1]], extend="both", label=residual_unit(channel))
    unit = "cells" if cell is None else "Mpc/h"
    source = "dark matter" if inputs[0].name.startswith(DARK_MATTER) else "input"
    names = source, "target", "prediction", "", "prediction − target"
    for axes, name in zip(grid[0], names, strict=False):
        axes.set_title(name)
    for axes, channel in zip(grid[:, 0], targets, strict=True):
        axes.set_ylabel(f"{channel.name.removeprefix(GAS)}\nz ({unit})")
    for axes in np.delete(grid[-1], BARS):
        axes.set_xlabel(f"y ({unit})")
    figure.suptitle(title)
    return figure


def display_values(channel: Channel, values: np.ndarray) -> np.ndarray:
    """Physical values of a channel, as decimal logarithms if the channel is logarithmic."""
    with np.errstate(over="ignore"):  # the output of a diverged network is drawn as non-finite
        physical = channel.to_physical(values.astype(np.float64))
    return np.log10(physical) if channel.is_log else physical


def _value_label(unit: str | None, is_log: bool) -> str:
    """Label of an axis of physical values."""
    if unit is None:
        return "channel value"
    return LOGARITHMS[unit] if is_log else unit


def _draw_plane(
    axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float], colors: str, limits: tuple[float, float]
) -> AxesImage:
    """Draws a plane [Y, Z] with y to the right and z upwards; non-finite values are gray."""
    axes.set_facecolor("0.5")
    return axes.imshow(values.T, origin="lower", extent=extent, cmap=colors, vmin=limits[0], vmax=limits[1])


def coverage(results: Results) -> Figure:
    """Shares of errors within the standard deviations, by predicted density."""
    assert results.coverage is not None
    figure = new_figure(8, 4.3)
    axes = figure.subplots()
    places = np.append(DENSITIES, 3 * DENSITIES[-1])[-(results.coverage.shape[2] - 1) :] / math.sqrt(3)
    for one, two, channel, color in zip(*results.coverage, results.channels, itertools.cycle(PALETTE), strict=False):
        axes.plot(places, one[:-1], "o-", markersize=3, color=color, label=channel.name)
        axes.plot(places, two[:-1], "o--", markersize=3, color=color)
    for share, style, label in ((0.6827, "-", "within σ"), (0.95, "--", "within 1.96 σ")):
        axes.plot([], [], style, color="0.3", label=label)
        axes.axhline(share, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    axes.set(xscale="log", ylim=(0, 1), xlabel="predicted density / mean", ylabel="share of cells")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


DRAWN = slices, spectra, distributions, phase_diagram, flux, flux_3d, bispectrum, coverage
PICTURES: dict[str, Callable[[Results], Figure]] = {picture.__name__: picture for picture in DRAWN}
