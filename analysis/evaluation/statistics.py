"""Statistics of a predicted volume against the true one: errors, spectra, distributions and the phase diagram.

Each rank counts its own planes. What needs a complete field, such as its spectrum, is computed field by field: a rank
stores its planes of one field of prediction and target at a time. Sums are in float64 and are added over the ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.bispectrum import equilateral_bispectrum
from analysis.evaluation.results import LOG_DENSITY, Bispectrum, Distribution, PhaseDiagram, Results
from analysis.evaluation.spectra import KShells
from analysis.slabs import ReadPlanes, SlabFields, Slabs
from utils.volumes.channels import DENSITY_UNIT, TEMPERATURE_UNIT, VELOCITY_UNIT, Channel, common_channels

# The bins are fixed before the first slab: decimal logarithms, from the emptiest voids to clusters.
LOG10_RANGES = {DENSITY_UNIT: (-4.0, 6.0), TEMPERATURE_UNIT: (2.0, 9.0)}
CHANNEL_RANGE = (-1.5, 1.5)  # values of all other channels; velocities up to 1500 km/s
BINS = {DENSITY_UNIT: 125, TEMPERATURE_UNIT: 140}
OTHER_BINS = 150
DIVERGENCE = "divergence"
DIVERGENCE_BINS = 160
DIVERGENCE_SIGMAS = 8.0  # standard deviations of the target on either side
SPECTRA = ("density", LOG_DENSITY, "velocity", DIVERGENCE, "log temperature")  # in this order, then all others


class _Field(NamedTuple):
    """A field of the prediction and the target, and the name of its spectrum, to which several fields may add."""

    spectrum: str
    channels: tuple[int, ...]  # one; three for the divergence of a vector
    is_exponential: bool = False  # of the channel's logarithm


class _Bins(NamedTuple):
    """Bins of equal width in log10 of the physical value, or in the value: a linear map of the channel value."""

    edges: np.ndarray
    slope: float  # bin = slope · channel + offset
    offset: float

    @property
    def number(self) -> int:
        return len(self.edges) - 1


class _Transformed(NamedTuple):
    """What needs complete fields."""

    sums: dict[str, Tensor]  # this rank's share of each spectrum
    divergence: Tensor  # its R² and histograms
    mass_ratio: float
    bispectrum: Bispectrum | None


class VolumeStatistics:
    """Compares a predicted volume with the target. Every rank makes the same calls.

    Spectra are computed for density, ln(density), ln(temperature), velocity (sum over its components) and velocity
    divergence, and for any other channel's physical value, or channel value if its unit is unknown.

    The divergence uses central differences, (v(x + 1) − v(x − 1)) / 2 cells per axis, which do not ring at shocks; they
    damp waves of a few cells' length in prediction and target alike. Its histogram extends to eight standard
    deviations of the target.
    """

    def __init__(
        self, channels: Sequence[Channel], input_channels: Sequence[Channel], cell: float | None, slabs: Slabs
    ) -> None:
        """`cell` in Mpc/h, None if unknown."""
        self._channels, self._input_channels = tuple(channels), tuple(input_channels)
        self._slabs, self._cell, self._world = slabs, cell, slabs.world
        world = slabs.world

        def zeros(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=world.device)

        def by_channel(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=world.device)[:, None, None]

        self._errors = zeros(4, len(channels))  # Σ|p − t|, Σ(p − t)², Σ(t − shift), Σ(t − shift)²
        self._copied = zeros(common_channels(input_channels, channels))  # Σ|input − t|
        self._shift = zeros(len(channels), 1, 1)  # the target in one cell: a large mean would hide the variance

        self._bins = [_bins(channel) for channel in channels]
        self._slope = by_channel([bins.slope for bins in self._bins])
        self._offset = by_channel([bins.offset for bins in self._bins])
        self._last = by_channel([bins.number - 1 for bins in self._bins])
        self._ends = list(itertools.accumulate(bins.number for bins in self._bins))  # all channels' bins in one row
        self._begins = by_channel([0, *self._ends[:-1]]).long()
        self._counts = zeros(2, self._ends[-1], dtype=torch.int64)

        units = [channel.unit for channel in channels]
        self._phase: tuple[int, int] | None = None  # the density and temperature channels
        self._phase_counts = zeros(2, 0, 0, dtype=torch.int64)
        if DENSITY_UNIT in units and TEMPERATURE_UNIT in units:
            self._phase = units.index(DENSITY_UNIT), units.index(TEMPERATURE_UNIT)
            numbers = (self._bins[channel].number for channel in self._phase)
            self._phase_counts = zeros(2, *numbers, dtype=torch.int64)

    @torch.no_grad()
    def results(self, fields: SlabFields, metadata: Mapping[str, Any]) -> Results:
        """The results, equal on every rank; to be called once.

        Undefined values are NaN: R² of a constant target, and whatever depends on non-finite predictions.
        """
        self._count_cells(fields)
        self._world.pulse.meet()
        shells = KShells(self._slabs, self._cell or 1.0)
        spectra, divergence, mass_ratio, bispectrum = self._transform(fields, shells)
        total, cells = self._world.sum, math.prod(self._slabs.shape)
        absolute, square, shifted, shifted_square = total(self._errors).cpu().numpy()
        copied = np.full(len(self._channels), np.nan)
        copied[: len(self._copied)] = total(self._copied).cpu().numpy() / cells
        all_counts = np.split(total(self._counts).cpu().numpy(), self._ends[:-1], axis=1)
        distributions = {
            channel.name: Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)
            for channel, bins, (predicted, target) in zip(self._channels, self._bins, all_counts, strict=True)
        }
        phase_diagram = None
        if self._phase:
            counts = total(self._phase_counts).cpu().numpy()
            phase_diagram = PhaseDiagram(*(self._bins[channel].edges for channel in self._phase), *counts)
        divergence_r2 = math.nan
        if DIVERGENCE in spectra:
            divergence_r2, edge, *histograms = divergence.tolist()
            edges = np.linspace(-edge, edge, DIVERGENCE_BINS + 1)
            predicted, target = np.array(histograms, dtype=np.int64).reshape(2, DIVERGENCE_BINS)
            unit = f"{VELOCITY_UNIT} per {'cell' if self._cell is None else 'Mpc/h'}"
            distributions["velocity divergence"] = Distribution(edges, predicted, target, unit, is_log=False)
        return Results(
            channels=self._channels,
            input_channels=self._input_channels,
            cell=self._cell,
            l1=absolute / cells,
            copied_l1=copied,
            r2=_r2(square, shifted_square - shifted**2 / cells),
            spectra={name: shells.spectrum(total(sums)) for name, sums in spectra.items()},
            distributions=distributions,
            phase_diagram=phase_diagram,
            divergence_r2=divergence_r2,
            mass_ratio=mass_ratio,
            bispectrum=bispectrum,
            slices=self._middle(fields),
            metadata=dict(metadata),
        )

    def _count_cells(self, fields: SlabFields) -> None:
        """Adds the own planes to the errors and histograms."""
        with self._world.raise_together():
            first = torch.zeros_like(self._shift)
            if self._world.rank == self._owner(0):
                first += fields.target(slice(None), slice(0, 1))[:, 0, :1, :1]
        self._shift = self._world.sum(first)
        with self._world.raise_together():
            for piece in self._slabs.pieces():
                values = (read(slice(None), piece) for read in (fields.inputs, fields.predicted, fields.target))
                # Plane by plane: the sums do not depend on the pieces, and temporaries are small.
                for planes in zip(*(part.unbind(1) for part in values), strict=True):
                    self._count(*planes)
                self._world.pulse.advance()

    def _owner(self, plane: int) -> int:
        """The rank that owns a plane."""
        return next(rank for rank, planes in enumerate(self._slabs.shares) if planes.start <= plane < planes.stop)

    def _middle(self, fields: SlabFields) -> dict[str, np.ndarray]:
        """The middle plane of each field, [C, Y, Z], on every rank."""
        plane, slices = self._slabs.shape[0] // 2, {}
        counts = {"input": len(self._input_channels), "target": len(self._channels), "predicted": len(self._channels)}
        reads = {"input": fields.inputs, "target": fields.target, "predicted": fields.predicted}
        for name, read in reads.items():
            values = torch.zeros(counts[name], *self._slabs.shape[1:], device=self._world.device)
            with self._world.raise_together():
                if self._world.rank == self._owner(plane):
                    values.copy_(read(slice(None), slice(plane, plane + 1))[:, 0])
            slices[name] = self._world.sum(values).cpu().numpy()
        return slices

    def _count(self, inputs: Tensor, predicted: Tensor, target: Tensor) -> None:
        """Adds one plane [C, Y, Z] to the errors and histograms."""
        copied = inputs[: len(self._copied)] - target[: len(self._copied)]
        self._copied += copied.abs().sum((1, 2), dtype=torch.float64)
        error, shifted = predicted - target, target - self._shift
        for row, values in zip(self._errors, (error.abs(), error.square(), shifted, shifted.square()), strict=True):
            row += values.sum((1, 2), dtype=torch.float64)
        for side, values in enumerate((predicted, target)):
            place = values * self._slope + self._offset
            # NaN belongs to no bin; it is counted in the first one.
            bins = torch.minimum(place.nan_to_num_(nan=0.0).clamp_(min=0.0), self._last).long()
            if self._phase:
                counts = self._phase_counts[side]
                density, temperature = (bins[channel] for channel in self._phase)
                cells = density * counts.shape[1] + temperature
                counts += torch.bincount(cells.flatten(), minlength=counts.numel()).view_as(counts)
            bins += self._begins
            self._counts[side] += torch.bincount(bins.flatten(), minlength=self._counts.shape[1])

    def _transform(self, fields: SlabFields, shells: KShells) -> _Transformed:
        needed = _fields(self._channels)
        present = [field.spectrum for field in needed]
        names = sorted({*present}, key=[*SPECTRA, *present].index)
        sums = {name: torch.zeros(3, shells.number, dtype=torch.float64, device=self._world.device) for name in names}
        divergence = torch.zeros(2 + 2 * DIVERGENCE_BINS, dtype=torch.float64)
        mass_ratio, bispectrum = math.nan, None
        for field in needed:
            store = self._stored_divergence if field.spectrum == DIVERGENCE else self._stored
            stored = [store(read, field) for read in (fields.predicted, fields.target)]
            if field.spectrum == DIVERGENCE:
                divergence = self._divergence_statistics(*stored)
            elif field.spectrum == LOG_DENSITY:
                bispectrum = equilateral_bispectrum(stored, self._slabs, self._cell or 1.0)
            elif field.is_exponential:
                masses = torch.stack([values.sum(dtype=torch.float64) for values in stored])
                mass_ratio = float(torch.divide(*self._world.sum(masses)))
            self._world.pulse.advance()  # the transforms of a large volume take long
            sums[field.spectrum] += shells.sums(stored)
            self._world.pulse.meet()
        return _Transformed(sums, divergence, mass_ratio, bispectrum)

    def _stored(self, read: ReadPlanes, field: _Field) -> Tensor:
        """The own planes [n, Y, Z] of a channel's physical values, or of their natural logarithms."""
        (number,), out = field.channels, self._slabs.empty()
        channel = self._channels[number]
        with self._world.raise_together():
            for piece in self._slabs.pieces():
                values = read(slice(number, number + 1), piece)[0] * channel.scale + channel.center
                out[self._slabs.local(piece)] = values.exp_() if field.is_exponential else values
        return out

    def _stored_divergence(self, read: ReadPlanes, field: _Field) -> Tensor:
        """The divergence of a vector in the own planes [n, Y, Z].

        The terms of a cell are added in the same order whatever the number of ranks: its bits do not depend on it.
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

    def _divergence_statistics(self, predicted: Tensor, target: Tensor) -> Tensor:
        """R² of the divergence, the outer edge of the histograms, and their counts, in one row."""
        total = self._world.sum
        sums = torch.zeros(2, dtype=torch.float64, device=target.device)
        for plane, true in zip(predicted, target, strict=True):
            sums[0] += (plane - true).square().sum(dtype=torch.float64)
            sums[1] += true.square().sum(dtype=torch.float64)  # its mean is zero: the field is periodic
        residual, variance = total(sums).cpu().numpy()
        edge = _rounded_up(DIVERGENCE_SIGMAS * math.sqrt(variance / math.prod(self._slabs.shape))) or 1.0
        counts = torch.zeros(2, DIVERGENCE_BINS, dtype=torch.float64, device=target.device)
        for row, field in zip(counts, (predicted, target), strict=True):
            for plane in field:
                place = (plane.double() + edge) * (DIVERGENCE_BINS / (2 * edge))
                bins = place.nan_to_num_(nan=0.0).clamp_(0, DIVERGENCE_BINS - 1).long()
                row += torch.bincount(bins.flatten(), minlength=DIVERGENCE_BINS)
        head = torch.tensor([float(_r2(residual, variance)), edge], dtype=torch.float64, device=target.device)
        return torch.cat((head, total(counts).flatten()))


def _fields(channels: Sequence[Channel]) -> list[_Field]:
    """All fields to transform."""
    velocity = tuple(number for number, channel in enumerate(channels) if channel.unit == VELOCITY_UNIT)  # all or none
    fields = [_Field(DIVERGENCE, velocity)] if velocity else []
    for number, channel in enumerate(channels):
        if channel.unit == DENSITY_UNIT:
            fields += [_Field(LOG_DENSITY, (number,)), _Field("density", (number,), is_exponential=True)]
        elif channel.unit == TEMPERATURE_UNIT:
            fields.append(_Field("log temperature", (number,)))
        else:
            fields.append(_Field("velocity" if number in velocity else channel.name, (number,)))
    return fields


def _bins(channel: Channel) -> _Bins:
    slope, offset = channel.scale, channel.center
    if channel.is_log:
        slope, offset = slope / math.log(10), offset / math.log(10)
    unit = channel.unit or "unknown"
    low, high = LOG10_RANGES.get(unit, tuple(slope * end + offset for end in CHANNEL_RANGE))
    number = BINS.get(unit, OTHER_BINS)
    step = (high - low) / number
    return _Bins(np.linspace(low, high, number + 1), slope / step, (offset - low) / step)


def _r2(residual: Any, variance: Any) -> Any:
    """1 − Σ(prediction − target)² / Σ(target − mean)²; NaN if the target is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, 1 - residual / variance, np.nan)


def _rounded_up(value: float) -> float:
    """Rounded up to two significant digits, so that the bins do not change with the last digits of the variance."""
    if value == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / digit) * digit
