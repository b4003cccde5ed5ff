"""Statistics of complete fields: spectra, the statistics of the divergence, and the ratio of masses.

A rank stores its planes of one field of prediction and target at a time. Sums are in float64.
"""

import math
from decimal import ROUND_CEILING, Context
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.base import LOG_DENSITY, Compared
from analysis.evaluation.results import DIVERGENCE, SPECTRA, Distribution, Spectrum, spectrum_names
from analysis.evaluation.spectra import KShells
from analysis.slabs import ReadPlanes
from utils.config.channels import GAS, VELOCITY_UNIT, Channels, velocity_places

DIVERGENCE_BINS = 160
DIVERGENCE_SIGMAS = 8.0  # standard deviations of the target on either side


class Field(NamedTuple):
    """A field of the prediction and the target, and the name of its spectrum, to which several fields may add."""

    spectrum: str
    channels: tuple[int, ...]  # one; three for the divergence of a vector
    is_exponential: bool = False  # of the channel's logarithm


class Fields:
    """Compares complete fields of prediction and target; the attributes are None or NaN without such a field.

    Spectra are computed for density, ln(density), ln(temperature), velocity (sum over its components) and velocity
    divergence of the gas. Each other vector has one, and each other channel, of its natural logarithm or its value.

    The divergence uses central differences, (v(x + 1) − v(x − 1)) / 2 cells per axis, which do not ring at shocks; they
    damp waves of a few cells' length in prediction and target alike. Its histogram extends to eight standard
    deviations of the target.
    """

    def __init__(self, compared: Compared) -> None:
        """`needed` are the fields to add."""
        self._compared, self._cell, self._slabs = compared, compared.cell, compared.slabs
        self._channels, self._world = compared.targets, compared.slabs.world
        self.needed = _fields(compared.targets)
        self._shells = KShells(self._slabs, self._cell or 1.0)
        size, order = (3, self._shells.number), [*SPECTRA, *spectrum_names(compared.targets)]
        names = sorted({field.spectrum for field in self.needed}, key=order.index)
        self._sums = {name: torch.zeros(size, dtype=torch.float64, device=self._world.device) for name in names}
        self.divergence: Distribution | None = None
        self.divergence_r2 = self.mass_ratio = math.nan

    def add(self, field: Field) -> None:
        reads = self._compared.fields[1:]
        if field.spectrum == DIVERGENCE:
            stored = [self._stored_divergence(read, field) for read in reads]
            self._compare_divergence(*stored)
        else:
            stored = [self._compared.stored(read, field.channels[0], field.is_exponential) for read in reads]
        if field.is_exponential:
            masses = torch.stack([values.sum(dtype=torch.float64) for values in stored])
            self.mass_ratio = float(torch.divide(*self._world.sum(masses)))
        self._world.pulse.advance()  # the transforms of a large volume take long
        self._sums[field.spectrum] += self._shells.sums(stored)

    def results(self) -> dict[str, Spectrum]:
        return {name: self._shells.spectrum(self._world.sum(sums)) for name, sums in self._sums.items()}

    def _stored_divergence(self, read: ReadPlanes, field: Field) -> Tensor:
        """The divergence of a vector in the own planes [n, Y, Z].

        The terms of a cell are added in the same order on any number of ranks: its bits do not depend on it.
        """
        slabs, (x, y, z), out = self._slabs, field.channels, self._slabs.empty()

        def planes(channel: int, some: slice) -> Tensor:
            values = read(slice(channel, channel + 1), some)[0] * self._channels[channel].scale
            return (values + self._channels[channel].center) / (2 * (self._cell or 1.0))

        with self._world.raise_together():
            edges = torch.zeros(2, *slabs.shape[1:], device=out.device)
            if slabs.count:
                for edge, plane in zip(edges, (slabs.planes.start, slabs.planes.stop - 1), strict=True):
                    edge.copy_(planes(x, slice(plane, plane + 1))[0])
        before, behind = slabs.neighbors(*edges)
        with self._world.raise_together():
            out.zero_()
            out[:1] -= before
            for piece in slabs.pieces():
                components = zip(*(planes(channel, piece) for channel in (x, y, z)), strict=True)
                for place, (along_x, along_y, along_z) in enumerate(components, slabs.local(piece).start):
                    for values, axis in ((along_y, 0), (along_z, 1)):
                        out[place] += values.roll(-1, axis) - values.roll(1, axis)
                    if place:
                        out[place - 1] += along_x
                    out[place + 1 : place + 2] -= along_x
            out[-1:] += behind
        return out

    def _compare_divergence(self, predicted: Tensor, target: Tensor) -> None:
        """R² of the divergence and its histograms."""
        total = self._world.sum
        sums = torch.zeros(2, dtype=torch.float64, device=target.device)
        for plane, true in zip(predicted, target, strict=True):
            sums[0] += (plane - true).square().sum(dtype=torch.float64)
            sums[1] += true.square().sum(dtype=torch.float64)  # its mean is zero: the field is periodic
        residual, variance = total(sums).cpu().numpy()
        edge = DIVERGENCE_SIGMAS * math.sqrt(variance / math.prod(self._slabs.shape)) or 1.0
        edge = float(Context(2, ROUND_CEILING).create_decimal_from_float(edge))  # bins do not depend on last bits
        counts = torch.zeros(2, DIVERGENCE_BINS, dtype=torch.float64, device=target.device)
        for row, field in zip(counts, (predicted, target), strict=True):
            for plane in field:
                place = (plane.double() + edge) * (DIVERGENCE_BINS / (2 * edge))
                bins = place.nan_to_num_(nan=0.0).clamp_(0, DIVERGENCE_BINS - 1).long()
                row += torch.bincount(bins.flatten(), minlength=DIVERGENCE_BINS)
        self.divergence_r2 = float(r2(residual, variance))
        edges, unit = np.linspace(-edge, edge, DIVERGENCE_BINS + 1), "cell" if self._cell is None else "Mpc/h"
        predictions, truths = total(counts).cpu().numpy().astype(np.int64)
        self.divergence = Distribution(edges, predictions, truths, f"{VELOCITY_UNIT} per {unit}", is_log=False)


def _fields(channels: Channels) -> list[Field]:
    """All fields to transform; the components of a vector in the order x, y, z, in which their powers are added."""
    names, velocity = spectrum_names(channels), velocity_places(channels, GAS)
    fields = [Field(DIVERGENCE, tuple(velocity))] if velocity else []
    for number in sorted(range(len(channels)), key=lambda place: channels[place].component or channels[place].name):
        fields.append(Field(names[number], (number,)))
        if names[number] == LOG_DENSITY:
            fields.append(Field("density", (number,), is_exponential=True))
    return fields


def r2(residual: Any, variance: Any) -> Any:
    """1 − Σ(prediction − target)² / Σ(target − mean)²; NaN if the target is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, 1 - residual / variance, np.nan)
