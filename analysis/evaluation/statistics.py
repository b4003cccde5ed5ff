"""Statistics of a predicted volume against the true one: errors, spectra, distributions and the phase diagram.

Each rank counts its own planes. Sums are in float64 and are added over the ranks.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.fields import Fields, r2
from analysis.evaluation.results import COVERED, DENSITIES, Distribution, PhaseDiagram, Results
from analysis.lyman_alpha.results import quotient
from analysis.slabs import ReadPlanes, SlabFields, Slabs
from utils.volumes.channels import DENSITY_UNIT, TEMPERATURE_UNIT, Channel, common_channels

# The bins are fixed before the first slab: decimal logarithms, from the emptiest voids to clusters.
LOG10_RANGES = {DENSITY_UNIT: (-4.0, 6.0), TEMPERATURE_UNIT: (2.0, 9.0)}
CHANNEL_RANGE = (-1.5, 1.5)  # values of all other channels; velocities up to 1500 km/s
BINS = {DENSITY_UNIT: 125, TEMPERATURE_UNIT: 140}
OTHER_BINS = 150


class _Bins(NamedTuple):
    """Bins of equal width in log10 of the physical value, or in the value: a linear map of the channel value."""

    edges: np.ndarray
    slope: float  # bin = slope · channel + offset
    offset: float


class Errors:
    """L1 and R² of each channel, and the L1 of the input channel that the target has, too."""

    def __init__(self, copied: int, shift: Tensor, slabs: Slabs) -> None:
        """`copied` channels are common to input and target. `shift` [C, 1, 1] is the target in one cell: a large mean
        would hide the variance."""
        self._slabs, self._shift = slabs, shift
        # Σ|p − t|, Σ(p − t)², Σ(t − shift), Σ(t − shift)²
        self._sums = torch.zeros(4, len(shift), dtype=torch.float64, device=shift.device)
        self._copied = torch.zeros(copied, dtype=torch.float64, device=shift.device)  # Σ|input − t|

    def add(self, inputs: Tensor, predicted: Tensor, target: Tensor) -> None:
        """Adds one plane, [C, Y, Z] of each."""
        copied = inputs[: len(self._copied)] - target[: len(self._copied)]
        self._copied += copied.abs().sum((1, 2), dtype=torch.float64)
        error, shifted = predicted - target, target - self._shift
        for row, values in zip(self._sums, (error.abs(), error.square(), shifted, shifted.square()), strict=True):
            row += values.sum((1, 2), dtype=torch.float64)

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """L1, L1 of the input, and R² of each channel; NaN without such an input."""
        total, cells = self._slabs.world.sum, math.prod(self._slabs.shape)
        absolute, square, shifted, shifted_square = total(self._sums).cpu().numpy()
        copied = np.full(len(absolute), np.nan)
        copied[: len(self._copied)] = total(self._copied).cpu().numpy() / cells
        return absolute / cells, copied, r2(square, shifted_square - shifted**2 / cells)


class Histograms:
    """Histograms of prediction and target, of each channel and, if there are both, of density and temperature."""

    def __init__(self, channels: Sequence[Channel], slabs: Slabs) -> None:
        self._channels, self._world = channels, slabs.world
        device = slabs.world.device

        def by_channel(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None, None]

        self._bins = [_bins(channel) for channel in channels]
        numbers = [len(bins.edges) - 1 for bins in self._bins]
        self._slope = by_channel([bins.slope for bins in self._bins])
        self._offset = by_channel([bins.offset for bins in self._bins])
        self._last = by_channel([number - 1 for number in numbers])
        self._ends = list(itertools.accumulate(numbers))  # all channels' bins in one row
        self._begins = by_channel([0, *self._ends[:-1]]).long()
        self._counts = torch.zeros(2, self._ends[-1], dtype=torch.int64, device=device)
        units = [channel.unit for channel in channels]
        phase = [units.index(unit) for unit in (DENSITY_UNIT, TEMPERATURE_UNIT) if unit in units]
        self._phase = phase if len(phase) == 2 else []  # the density and temperature channels
        sizes = (numbers[channel] for channel in self._phase)
        self._phase_counts = torch.zeros(2, *sizes, dtype=torch.int64, device=device)

    def add(self, *fields: Tensor) -> None:
        """Adds one plane [C, Y, Z] of prediction and target."""
        for side, values in enumerate(fields):
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

    def results(self) -> tuple[dict[str, Distribution], PhaseDiagram | None]:
        total = self._world.sum
        all_counts = np.split(total(self._counts).cpu().numpy(), self._ends[:-1], axis=1)
        distributions = {
            channel.name: Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)
            for channel, bins, (predicted, target) in zip(self._channels, self._bins, all_counts, strict=True)
        }
        if not self._phase:
            return distributions, None
        density, temperature = (self._bins[channel].edges for channel in self._phase)
        return distributions, PhaseDiagram(density, temperature, *total(self._phase_counts).cpu().numpy())


@torch.no_grad()
def volume_statistics(
    inputs: Sequence[Channel],
    targets: Sequence[Channel],
    cell: float | None,
    fields: SlabFields,
    slabs: Slabs,
    metadata: Mapping[str, Any],
) -> Results:
    """Compares a predicted volume with the target; every rank calls it and gets the same results.

    `cell` in Mpc/h, None if unknown. Undefined values are NaN: R² of a constant target, and whatever depends on
    non-finite predictions.
    """
    first_cell = _plane(fields.target, len(targets), 0, slabs)[:, :1, :1].double()
    errors, histograms = Errors(common_channels(inputs, targets), first_cell, slabs), Histograms(targets, slabs)
    with slabs.world.raise_together():
        for piece in slabs.pieces():
            values = (read(slice(None), piece) for read in (fields.inputs, fields.predicted, fields.target))
            # Plane by plane: the sums do not depend on the pieces, and temporaries are small.
            for source, predicted, target in zip(*(part.unbind(1) for part in values), strict=True):
                errors.add(source, predicted, target)
                histograms.add(predicted, target)
    slabs.world.pulse.meet()
    complete = Fields(targets, cell, slabs)
    for field in complete.needed:
        complete.add(field, fields)
        slabs.world.pulse.meet()
    l1, copied_l1, r2_by_channel = errors.results()
    distributions, phase_diagram = histograms.results()
    distributions |= {"velocity divergence": complete.divergence} if complete.divergence else {}
    reads = {"input": (fields.inputs, inputs), "target": (fields.target, targets)}
    reads["predicted"] = fields.predicted, targets
    planes = {name: _plane(read, len(part), slabs.shape[0] // 2, slabs) for name, (read, part) in reads.items()}
    return Results(
        channels=tuple(targets),
        input_channels=tuple(inputs),
        cell=cell,
        l1=l1,
        copied_l1=copied_l1,
        r2=r2_by_channel,
        spectra=complete.results(),
        distributions=distributions,
        phase_diagram=phase_diagram,
        divergence_r2=complete.divergence_r2,
        mass_ratio=complete.mass_ratio,
        bispectrum=complete.bispectrum,
        slices={name: plane.cpu().numpy() for name, plane in planes.items()},
        metadata=dict(metadata),
    )


@torch.no_grad()
def coverage(targets: Sequence[Channel], deviation: ReadPlanes, fields: SlabFields, slabs: Slabs) -> np.ndarray:
    """`Results.coverage` of standard deviations in channel units; every rank calls it."""
    ends = targets[0].from_physical(np.array(DENSITIES)) if targets[0].unit else np.empty(0)
    edges = torch.from_numpy(ends).float().to(slabs.world.device)
    sums = torch.zeros(3, len(targets), len(ends) + 2, dtype=torch.float64, device=slabs.world.device)
    with slabs.world.raise_together():
        for piece in slabs.pieces():
            sigma, predicted, target = (read(slice(None), piece) for read in (deviation, *fields[1:]))
            ratios, bins = (predicted - target).abs() / sigma, torch.bucketize(predicted[0], edges)
            for number in range(len(ends) + 1):
                inside = ratios[:, bins == number]  # [C, cells]
                sums[:, :, number] += torch.stack([(inside <= limit).sum(1) for limit in (math.inf, *COVERED)])
    sums[..., -1] = sums.sum(2)
    cells, *covered = slabs.world.sum(sums).cpu().numpy()
    return quotient(np.array(covered), cells)


def _plane(read: ReadPlanes, channels: int, plane: int, slabs: Slabs) -> Tensor:
    """A plane of a field, [C, Y, Z], on every rank."""
    values = torch.zeros(channels, *slabs.shape[1:], device=slabs.world.device)
    with slabs.world.raise_together():
        if slabs.planes.start <= plane < slabs.planes.stop:
            values.copy_(read(slice(None), slice(plane, plane + 1))[:, 0])
    return slabs.world.sum(values)


def _bins(channel: Channel) -> _Bins:
    base = math.log(10) if channel.is_log else 1.0
    slope, offset = channel.scale / base, channel.center / base
    unit = channel.unit or "unknown"
    low, high = LOG10_RANGES.get(unit, tuple(slope * end + offset for end in CHANNEL_RANGE))
    number = BINS.get(unit, OTHER_BINS)
    step = (high - low) / number
    return _Bins(np.linspace(low, high, number + 1), slope / step, (offset - low) / step)
