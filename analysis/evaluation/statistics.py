"""Statistics of evaluations, each a class and a line of STATISTICS; docs/architecture.md says how to add one."""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.evaluation import base
from analysis.evaluation.base import Bins, Compared, EvaluatedVolume, Figure, Statistic, Table
from analysis.lyman_alpha.results import PREDICTION, SHAPES, quotient
from utils.config.channels import DENSITY_UNIT, GAS, TEMPERATURE_UNIT, density_place, temperature_place
from utils.run import tags

COVERED = (1.0, 1.96)  # standard deviations, within which 68 and 95 % of Gaussian errors are
DENSITIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # / mean, ends of the bins of Coverage


@dataclass(frozen=True)
class PhaseDiagram(Statistic):
    """Counts [n, m] of cells by log10 of density (in units of the mean) and of temperature (K)."""

    title = "Phase diagram"
    caption = "Cells by density and temperature."

    density_edges: np.ndarray
    temperature_edges: np.ndarray
    predicted: np.ndarray
    target: np.ndarray

    @classmethod
    def compute(cls, compared: Compared) -> "PhaseDiagram | None":
        targets, sides = compared.targets, compared.fields[1:]
        density, temperature = density_place(targets, GAS), temperature_place(targets)
        if density is None or temperature is None:
            return None
        rows, columns = Bins.of(targets[density]), Bins.of(targets[temperature])
        sizes = len(rows.edges) - 1, len(columns.edges) - 1

        def count(planes: slice, read: base.ReadPlanes) -> base.Tensor:
            rho, kelvin = (read(slice(place, place + 1), planes)[0] for place in (density, temperature))
            cells = rows.places(rho) * sizes[1] + columns.places(kelvin)
            return cells.flatten().bincount(minlength=math.prod(sizes)).view(sizes)

        predicted, target = (compared.total(sizes, functools.partial(count, read=read)) for read in sides)
        return cls(rows.edges, columns.edges, predicted.astype(np.int64), target.astype(np.int64))

    def summary(self, volume: EvaluatedVolume) -> dict[str, Any]:
        return {}  # it is large

    def draw(self, figure: Figure, volume: EvaluatedVolume) -> None:
        """Target and prediction on one color scale."""
        axes_row = figure.subplots(1, 2, sharex=True, sharey=True)
        edges = self.density_edges, self.temperature_edges
        area = np.outer(*(np.diff(axis_edges) for axis_edges in edges))
        target, predicted = (cells / (cells.sum() * area) for cells in (self.target, self.predicted))
        both = np.concatenate([target, predicted])
        limits = {"norm": "log", "vmin": both[both > 0].min(), "vmax": both.max()}
        for axes, density, title in zip(axes_row, (target, predicted), ("target", "prediction"), strict=True):
            mesh = axes.pcolormesh(*edges, np.ma.masked_equal(density, 0).T, rasterized=True, **limits)
            axes.set(title=title, xlabel=base.LOGARITHMS[DENSITY_UNIT])
        label = "fraction of cells per dex²"
        figure.colorbar(mesh, ax=list(axes_row), label=label, location="bottom", shrink=0.6, aspect=25)
        axes_row[0].set_ylabel(base.LOGARITHMS[TEMPERATURE_UNIT])
        xlim, ylim = (base.occupied((target + predicted).sum(1 - axis), edges[axis]) for axis in (0, 1))
        axes.set(xlim=xlim, ylim=ylim)


@dataclass(frozen=True)
class Bispectrum(Statistic):
    """Equilateral bispectrum of prediction and target, arrays [shells]; in the unit of length to the power of six."""

    title = "Bispectrum"
    caption = """The ratio of bispectra depends on the shapes of structures. They are shown relative to those of the
        target, on the axis of the power above; negative ratios lie on the lower edge. The sides of an equilateral
        triangle of waves have about the length k, those of a squeezed one k, k and the smallest length. The error in
        the table of the flux is the rms of k³ times the difference, relative to that of the target."""

    k: np.ndarray
    predicted: np.ndarray
    target: np.ndarray

    @classmethod
    def compute(cls, compared: Compared) -> "Bispectrum | None":
        from analysis.modes import Bispectra

        if (place := density_place(compared.targets, GAS)) is None:
            return None
        triangles = Bispectra(compared.slabs, compared.cell or 1.0)
        sides = (triangles.measure(compared.stored(read, place))[0] for read in compared.fields[1:])
        return cls(triangles.k, *sides)

    @property
    def reference_ratios(self) -> dict[float, float]:
        """The ratio at large, middle and small scales, by k."""
        shells = base.reference_shells(self.k) if np.isfinite(self.k).any() else []
        return {float(self.k[shell]): float(quotient(self.predicted, self.target)[shell]) for shell in shells}

    def scalars(self) -> dict[str, float]:
        ratios = self.reference_ratios.items()
        return {tags.evaluation("B ratio", f"{base.LOG_DENSITY} at k = {k:.3g}"): ratio for k, ratio in ratios}

    def table(self, volume: EvaluatedVolume) -> Table:
        ratios = self.reference_ratios.items()
        rows = [[f"ratio at {k:.2g}", base.number_text(ratio)] for k, ratio in ratios]
        return [[f"bispectrum (k in {volume.wavenumber_unit})", base.LOG_DENSITY], *rows]

    def draw(self, figure: Figure, volume: EvaluatedVolume) -> None:
        """Bispectra relative to those of the target, of log density and, if they are known, of the flux."""
        own, flux = {PREDICTION: (self.k, quotient(self.predicted, self.target))}, volume.flux
        curves = {f"{base.LOG_DENSITY}, {SHAPES[0]}": own}
        for number, shape in enumerate(SHAPES if flux and flux.flux_bispectrum_k.size else ()):
            assert flux is not None
            ratios = {name: ratio[number] for name, ratio in flux.ratios_of("flux_bispectrum").items()}
            curves[f"flux, {shape}"] = {name: (flux.flux_bispectrum_k, ratio) for name, ratio in ratios.items()}
        base.draw_ratios(figure, curves, base.COLORS, "$B$", volume.wavenumber_unit)


@dataclass(frozen=True)
class Coverage(Statistic):
    """Shares [2, C, bins + 1] of errors within COVERED standard deviations, by predicted density and, last, of all."""

    title = "Standard deviations"
    caption = """Share of cells whose error is at most one (lines) and 1.96 (dashed) of the file's standard deviations,
        by predicted density. Of Gaussian errors it would be 68 and 95 % (dotted)."""

    shares: np.ndarray

    @classmethod
    def compute(cls, compared: Compared) -> "Coverage | None":
        import torch

        deviation, targets, place = compared.deviation, compared.targets, density_place(compared.targets, GAS)
        if deviation is None:
            return None
        ends = np.empty(0) if place is None else targets[place].from_physical(np.array(DENSITIES))
        edges = torch.from_numpy(ends).float().to(compared.slabs.world.device)

        def count(planes: slice) -> torch.Tensor:
            """Cells [3, C, bins], and those within COVERED."""
            sigma, predicted, target = (read(slice(None), planes) for read in (deviation, *compared.fields[1:]))
            ratios, bins = (predicted - target).abs() / sigma, torch.bucketize(predicted[place or 0], edges)
            inside = (ratios[:, bins == number] for number in range(len(ends) + 1))  # [C, cells] of each bin
            limits = math.inf, *COVERED
            return torch.stack([torch.stack([(part <= limit).sum(1) for limit in limits]) for part in inside], dim=2)

        counts = compared.total((3, len(targets), len(ends) + 1), count)
        cells, *covered = np.concatenate([counts, counts.sum(2, keepdims=True)], axis=2)
        return cls(quotient(np.array(covered), cells))

    def table(self, volume: EvaluatedVolume) -> Table:
        shares = zip(volume.channels, *self.shares[..., -1], strict=True)
        rows = [[channel.name, f"{one:.1%}", f"{two:.1%}"] for channel, one, two in shares]
        return [["share of errors within", "σ (right: 68%)", "1.96 σ (right: 95%)"], *rows]

    def summary(self, volume: EvaluatedVolume) -> dict[str, Any]:
        shares = zip(volume.channels, *self.shares, strict=True)
        covered: dict[str, Any] = {channel.name: {"68 %": one, "95 %": two} for channel, one, two in shares}
        return covered | {"densities, then all": [*DENSITIES]}

    def draw(self, figure: Figure, volume: EvaluatedVolume) -> None:
        axes, colors = figure.subplots(), itertools.cycle(base.PALETTE)
        places = np.append(DENSITIES, 3 * DENSITIES[-1])[-(self.shares.shape[2] - 1) :] / math.sqrt(3)
        for one, two, channel, color in zip(*self.shares, volume.channels, colors, strict=False):
            axes.plot(places, one[:-1], "o-", markersize=3, color=color, label=base.plain(channel.name))
            axes.plot(places, two[:-1], "o--", markersize=3, color=color)
        for share, style, label in ((0.6827, "-", "within σ"), (0.95, "--", "within 1.96 σ")):
            axes.plot([], [], style, color="0.3", label=label)
            axes.axhline(share, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
        axes.set(xscale="log", ylim=(0, 1), xlabel="predicted density / mean", ylabel="share of cells")
        figure.legend(loc="outside right upper", frameon=False)


# By the name in evaluation.npz and evaluation.json, and of the picture; in the order of the report.
STATISTICS: dict[str, type[Statistic]] = {
    "phase_diagram": PhaseDiagram,
    "bispectrum": Bispectrum,
    "coverage": Coverage,
}
