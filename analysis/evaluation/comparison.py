"""Comparison of a predicted volume with the true one: errors, distributions, spectra, and all other statistics.

Each rank counts its own planes. Sums are in float64 and are added over the ranks.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.base import LOG_DENSITY, Bins, Compared, converted
from analysis.evaluation.results import DIVERGENCE, SPECTRA, Distribution, Results, Spectrum, spectrum_names
from analysis.evaluation.statistics import STATISTICS
from analysis.modes import PowerBins
from analysis.slabs import ReadPlanes, Slabs
from utils.config.channels import GAS, VELOCITY_UNIT, Channels, copied_channels, velocity_places

DIVERGENCE_BINS = 160
DIVERGENCE_SIGMAS = 8.0  # standard deviations of the target on either side


def errors(compared: Compared) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L1 of each channel, that of the input with the same quantity (NaN if there is none), and R²."""
    slabs, inputs, targets = compared.slabs, compared.inputs, compared.targets
    device, copied = slabs.world.device, copied_channels(inputs, targets)
    # The target in one cell: a large mean would hide the variance.
    shift = _plane(compared.fields.target, len(targets), 0, slabs)[:, :1, :1].double()
    # Σ|p − t|, Σ(p − t)², Σ(t − shift), Σ(t − shift)²; Σ|input − t|
    sums = torch.zeros(4, len(targets), dtype=torch.float64, device=device)
    copied_sums = torch.zeros(len(copied), dtype=torch.float64, device=device)
    with slabs.world.raise_together():
        for piece in slabs.pieces():
            values = (read(slice(None), piece).unbind(1) for read in compared.fields)
            # Plane by plane: the sums do not depend on the pieces, and temporaries are small.
            for source, predicted, target in zip(*values, strict=True):
                error, shifted = predicted - target, target - shift
                parts = error.abs(), error.square(), shifted, shifted.square()
                sums += torch.stack([part.sum((1, 2), dtype=torch.float64) for part in parts])
                if copied:
                    pairs = copied.items()
                    given = [converted(source[place], inputs[place], targets[own]) for own, place in pairs]
                    difference = torch.stack(given) - target[[*copied]]
                    copied_sums += difference.abs().sum((1, 2), dtype=torch.float64)
    cells, total = math.prod(slabs.shape), slabs.world.sum
    absolute, square, shifted_sum, shifted_square = total(sums).cpu().numpy()
    copied_l1 = np.full(len(targets), np.nan)
    copied_l1[[*copied]] = total(copied_sums).cpu().numpy() / cells
    return absolute / cells, copied_l1, r2(square, shifted_square - shifted_sum**2 / cells)


def distribution(compared: Compared, place: int) -> Distribution:
    """Histograms of a channel of prediction and target."""
    channel, bins = compared.targets[place], Bins.of(compared.targets[place])
    number = len(bins.edges) - 1

    def count(planes: slice) -> Tensor:
        sides = (read(slice(place, place + 1), planes) for read in compared.fields[1:])
        return torch.stack([bins.places(values).flatten().bincount(minlength=number) for values in sides])

    predicted, target = compared.total((2, number), count).astype(np.int64)
    return Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)


class Field(NamedTuple):
    """A field of the prediction and the target, and the name of its spectrum, to which several fields may add."""

    spectrum: str
    channels: tuple[int, ...]  # one; three for the divergence of a vector
    is_exponential: bool = False  # of the channel's logarithm


class Fields:
    """Compares complete fields of prediction and target; the attributes are None or NaN without such a field.

    Spectra are computed for density, ln(density), ln(temperature), velocity (sum over its components) and velocity
    divergence of the gas. Each other vector has one, and each other channel, of its natural logarithm or its value.
    A rank stores its planes of one field of prediction and target at a time.

    The divergence uses central differences, (v(x + 1) − v(x − 1)) / 2 cells per axis, which do not ring at shocks; they
    damp waves of a few cells' length in prediction and target alike.
    """

    def __init__(self, compared: Compared) -> None:
        self._compared, self._cell, self._slabs = compared, compared.cell, compared.slabs
        self._channels, self._world = compared.targets, compared.slabs.world
        self.divergence: Distribution | None = None
        self.divergence_r2 = self.mass_ratio = math.nan
        bins, sums = PowerBins(self._slabs, self._cell or 1.0), dict[str, Any]()
        for field in _fields(self._channels):
            stored = self._stored(field)
            self._world.pulse.advance()  # the transforms of a large volume take long
            sums[field.spectrum] = sums.get(field.spectrum, 0) + bins.sums(stored)[:, 0]
            self._world.pulse.meet()
        k, modes, order = bins.k[0], bins.modes[0], [*SPECTRA, *spectrum_names(self._channels)]
        self.spectra = dict[str, Spectrum]()
        for name in sorted(sums, key=order.index):
            powers = self._world.sum(sums[name]).cpu().numpy() * (bins.volume / modes)
            self.spectra[name] = Spectrum(k, modes, *powers)

    def _stored(self, field: Field) -> list[Tensor]:
        """Own planes of a field of prediction and target; compares them by other measures than their spectra."""
        reads = self._compared.fields[1:]
        if field.spectrum == DIVERGENCE:
            stored = [self._stored_divergence(read, field) for read in reads]
            self._compare_divergence(*stored)
            return stored
        stored = [self._compared.stored(read, field.channels[0], field.is_exponential) for read in reads]
        if field.is_exponential:
            masses = torch.stack([values.sum(dtype=torch.float64) for values in stored])
            self.mass_ratio = float(torch.divide(*self._world.sum(masses)))
        return stored

    def _stored_divergence(self, read: ReadPlanes, field: Field) -> Tensor:
        """The divergence of a vector in the own planes [n, Y, Z], with the same bits on any number of ranks."""
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


@torch.no_grad()
def volume_statistics(compared: Compared, metadata: Mapping[str, Any]) -> Results:
    """Compares a volume with the target; undefined values are NaN. Every rank calls it and gets the same results."""
    inputs, targets, fields, slabs = compared.inputs, compared.targets, compared.fields, compared.slabs
    l1, copied_l1, r2_by_channel = errors(compared)
    slabs.world.pulse.meet()
    distributions = {channel.name: distribution(compared, place) for place, channel in enumerate(targets)}
    complete = Fields(compared)
    computed = {}
    for name, statistic in STATISTICS.items():
        computed[name] = statistic.compute(compared)
        slabs.world.pulse.meet()
    distributions |= {"velocity divergence": complete.divergence} if complete.divergence else {}
    reads = {"input": (fields.inputs, inputs), "target": (fields.target, targets)}
    reads["predicted"] = fields.predicted, targets
    planes = {name: _plane(read, len(part), slabs.shape[0] // 2, slabs) for name, (read, part) in reads.items()}
    return Results(
        channels=tuple(targets),
        input_channels=tuple(inputs),
        cell=compared.cell,
        l1=l1,
        copied_l1=copied_l1,
        r2=r2_by_channel,
        spectra=complete.spectra,
        distributions=distributions,
        divergence_r2=complete.divergence_r2,
        mass_ratio=complete.mass_ratio,
        slices={name: plane.cpu().numpy() for name, plane in planes.items()},
        metadata=dict(metadata),
        statistics={name: result for name, result in computed.items() if result is not None},
    )


def _plane(read: ReadPlanes, channels: int, plane: int, slabs: Slabs) -> Tensor:
    """A plane of a field, [C, Y, Z], on every rank."""
    values = torch.zeros(channels, *slabs.shape[1:], device=slabs.world.device)
    with slabs.world.raise_together():
        if slabs.planes.start <= plane < slabs.planes.stop:
            values.copy_(read(slice(None), slice(plane, plane + 1))[:, 0])
    return slabs.world.sum(values)
