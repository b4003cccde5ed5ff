"""The phase diagram: cells by density and temperature."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.evaluation import panels
from analysis.evaluation.base import Bins, Compared, EvaluatedVolume, Figure, ReadPlanes, Statistic, Tensor
from utils.config.channels import DENSITY_UNIT, GAS, TEMPERATURE_UNIT, density_place, temperature_place


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

        def count(planes: slice, read: ReadPlanes) -> Tensor:
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
            axes.set(title=title, xlabel=panels.LOGARITHMS[DENSITY_UNIT])
        label = "fraction of cells per dex²"
        figure.colorbar(mesh, ax=list(axes_row), label=label, location="bottom", shrink=0.6, aspect=25)
        axes_row[0].set_ylabel(panels.LOGARITHMS[TEMPERATURE_UNIT])
        xlim, ylim = (panels.occupied((target + predicted).sum(1 - axis), edges[axis]) for axis in (0, 1))
        axes.set(xlim=xlim, ylim=ylim)
