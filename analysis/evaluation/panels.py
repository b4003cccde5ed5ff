"""Parts of pictures that several figures and statistics share; matplotlib is that of their argument."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from analysis.lyman_alpha.results import FGPA, FITTED, PREDICTION, TARGET, TRANSFER
from utils.config.channels import DENSITY_UNIT, TEMPERATURE_UNIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A palette that the color-blind can distinguish (Okabe & Ito 2008).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
COLORS = {TARGET: "black", PREDICTION: PALETTE[1], TRANSFER: PALETTE[2], f"{FGPA}, {FITTED}": PALETTE[5]}
LOGARITHMS = {DENSITY_UNIT: r"$\log_{10}(\rho/\bar\rho)$", TEMPERATURE_UNIT: r"$\log_{10}(T/\mathrm{K})$"}
NEAR_ONE, LARGEST_RATIO = (0.5, 1.5), 1e3  # of an axis of ratios: its linear part, and the end of its logarithmic one
DECADE = 0.25  # length of a factor of ten in the logarithmic part, in units of the linear one


def plain(text: str) -> str:
    """A name or unit of a file, of which matplotlib shall read nothing as a formula."""
    return text.replace("$", r"\$")


def value_label(name: str, unit: str | None, is_log: bool) -> str:
    """Label of an axis of physical values."""
    if unit is None:
        return "channel value"
    return LOGARITHMS.get(unit, rf"$\log_{{10}}$({plain(name)} / {plain(unit)})") if is_log else plain(unit)


def scale_ratios(*panels: "Axes") -> None:
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


def scale_wavenumbers(axes: "Axes", k: np.ndarray, unit: str) -> None:
    """A logarithmic axis over all k, also if a diverged network leaves nothing to plot; labels 1, 2, 5 per decade."""
    axes.set(xscale="log", xlabel=f"wavenumber k ({unit})", xlim=(np.nanmin(k) / 1.1, np.nanmax(k) * 1.1))
    axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))  # type: ignore[call-arg]
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def occupied(values: np.ndarray, edges: np.ndarray) -> tuple[float, float]:
    """The outer edges of the bins whose value is not zero."""
    bins = np.flatnonzero(values)
    return edges[bins[0]], edges[bins[-1] + 1]


def draw_ratios(
    figure: "Figure",
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    colors: Mapping[str, str],
    quantity: str,
    unit: str,
) -> None:
    """A panel per title: wavenumbers and ratios to the target by label; lines continue across bins without a mode."""
    figure.set_size_inches(2 + 4 * len(panels), 4.3)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        axes.axhline(1, color="0.3", linewidth=0.8)
        for name, (k, ratio) in curves.items():
            shown = np.isfinite(k)
            axes.plot(k[shown], ratio[shown], color=colors.get(name, PALETTE[0]), label=name, marker=".")
        axes.set_title(title)
        scale_wavenumbers(axes, np.concatenate([k for k, _ in curves.values()]), unit)
        axes.grid(alpha=0.25)
    scale_ratios(*row)
    row[0].set_ylabel(f"{quantity} relative to the target")
    figure.legend(*row[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
