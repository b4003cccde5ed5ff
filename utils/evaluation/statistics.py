"""A predicted volume against the true one: errors, spectra, distributions, and the density–temperature plane.

Every rank sees every slab as it comes, and does a part of the work. What is counted cell by cell is shared out by
planes; what needs a whole field, such as its spectrum, by fields: a rank keeps the ones it is to transform, all others
are gone with their slab. Sums are in float64, and are added up over the ranks in the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.distributed.world import World
from utils.evaluation.results import Distribution, PhaseDiagram, Results
from utils.evaluation.spectra import KShells
from utils.inference.channels import DENSITY_UNIT, TEMPERATURE_UNIT, VELOCITY_UNIT, Channel

# Bins are fixed before the first slab is seen: log10 from the emptiest voids to clusters, and of the gas in both.
LOG10_RANGES = {DENSITY_UNIT: (-4.0, 6.0), TEMPERATURE_UNIT: (2.0, 9.0)}
CHANNEL_RANGE = (-1.5, 1.5)  # all other channels' values: velocities to 1500 km/s
BINS = {DENSITY_UNIT: 125, TEMPERATURE_UNIT: 140}
OTHER_BINS = 150
DIVERGENCE = "divergence"
DIVERGENCE_BINS = 160
DIVERGENCE_SIGMAS = 8.0  # of the target, to either side
SPECTRA = ("density", "log density", "velocity", DIVERGENCE, "log temperature")  # their order; then all others


class _Field(NamedTuple):
    """A field that some rank keeps whole, and the spectra it is for."""

    channels: tuple[int, ...]  # one; of a divergence the vector's three
    spectra: tuple[str, ...]  # the logarithm's first, then, if wanted, that of what it is the logarithm of


class _Bins(NamedTuple):
    """Equal steps of log10 of the physical value, or of the value itself: a linear map of the channel's values."""

    edges: np.ndarray
    slope: float  # bin = slope · channel + offset
    offset: float

    @property
    def number(self) -> int:
        return len(self.edges) - 1


class VolumeStatistics:
    """Gathers a predicted volume slab by slab and measures it against the target; every rank calls every method alike.

    Spectra are of density and of ln(density), of ln(temperature), of the velocity (its components' powers added up) and
    of its divergence; of a channel that is none of these, of its physical value, or its own where that is unknown.

    The divergence is made of central differences, (v(x + 1) − v(x − 1)) / 2 cells and so on, which do not ring at
    shocks; they damp waves of a few cells' length, the prediction's and the target's alike. Its histogram reaches to
    eight standard deviations of the target.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        input_channels: Sequence[Channel],
        shape: tuple[int, int, int],
        cell: float | None,
        world: World,
        vectors: Sequence[Sequence[int]] = ((1, 2, 3),),
    ) -> None:
        """`cell` in Mpc/h, None if unknown; `vectors` are triples of target channels that are components x, y, z."""
        self._channels, self._input_channels = tuple(channels), tuple(input_channels)
        self._shape, self._cell, self._world = shape, cell, world

        def zeros(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=world.device)

        def by_channel(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=world.device)[:, None, None]

        self._errors = zeros(4, len(channels))  # Σ|p − t|, Σ(p − t)², Σt, Σt², where t is less `_shift`
        self._shift = zeros(len(channels), 1, 1)  # one cell's target: a large mean would hide the variance

        self._bins = [_bins(channel) for channel in channels]
        self._slope = by_channel([bins.slope for bins in self._bins])
        self._offset = by_channel([bins.offset for bins in self._bins])
        self._last = by_channel([bins.number - 1 for bins in self._bins])
        self._ends = list(itertools.accumulate(bins.number for bins in self._bins))  # all channels' bins in one row
        self._begins = by_channel([0, *self._ends[:-1]]).long()
        self._counts = zeros(2, self._ends[-1], dtype=torch.int64)

        units = [channel.unit for channel in channels]
        self._plane: tuple[int, int] | None = None
        self._plane_counts = zeros(2, 0, 0, dtype=torch.int64)
        if DENSITY_UNIT in units and TEMPERATURE_UNIT in units:
            self._plane = units.index(DENSITY_UNIT), units.index(TEMPERATURE_UNIT)
            numbers = (self._bins[channel].number for channel in self._plane)
            self._plane_counts = zeros(2, *numbers, dtype=torch.int64)

        # Dealt out in turn; the ones with most work come first.
        self._fields = _fields(channels, vectors)[world.rank :: world.size]
        self._kept = [zeros(2, *shape, dtype=torch.float32) for _ in self._fields]  # prediction and target
        self._spectra = [name for field in _fields(channels, vectors) for name in field.spectra]
        self._slices: dict[str, np.ndarray] = {}
        self._planes_seen = 0

    @torch.no_grad()
    def add(self, start: int, inputs: np.ndarray | Tensor, predicted: Tensor, target: Tensor) -> None:
        """Planes start, start + 1, … along x; [C, planes, Y, Z] each, channel values.

        Slabs may be of any thickness and in any order, each plane once; `predicted` is the same on all ranks.
        """
        planes, middle = predicted.shape[1], self._shape[0] // 2
        assert predicted.shape == target.shape == (len(self._channels), planes, *self._shape[1:])
        if start <= middle < start + planes:
            for name, values in (("input", inputs), ("target", target), ("predicted", predicted)):
                self._slices[name] = _as_array(values[:, middle - start])
        predicted, target = (values.to(self._world.device, torch.float32) for values in (predicted, target))
        if not self._planes_seen:
            self._shift = target[:, :1, :1, 0].clone()
        # Plane by plane: sums are then the same for slabs of any thickness, and temporaries are small.
        for place in range(planes):
            x = start + place
            if x % self._world.size == self._world.rank:
                self._count(predicted[:, place], target[:, place])
            for field, kept in zip(self._fields, self._kept, strict=True):
                for whole, values in zip(kept, (predicted, target), strict=True):
                    self._keep(whole, x, values[:, place], field)
        self._planes_seen += planes

    @torch.no_grad()
    def results(self, about: Mapping[str, Any] | None = None) -> Results:
        """The same on every rank; to be called once, after all planes were added.

        What cannot be told is NaN: R² of a constant target, and whatever a prediction that is not finite spoils.
        """
        assert self._planes_seen == self._shape[0]
        total, device, cells = self._world.sum, self._world.device, math.prod(self._shape)
        shells = KShells(self._shape, self._cell or 1.0, device)
        names = sorted(set(self._spectra), key=[*SPECTRA, *self._spectra].index)
        sums = {name: torch.zeros(3, shells.number, dtype=torch.float64, device=device) for name in names}
        divergence = torch.zeros(2 + 2 * DIVERGENCE_BINS, dtype=torch.float64, device=device)
        for field in self._fields:
            self._world.watch.at("prediction")  # the transforms of a large box take their time
            kept = self._kept.pop(0)  # its memory goes when the next one comes
            if DIVERGENCE in field.spectra:
                divergence = _measured_divergence(kept)
            for number, name in enumerate(field.spectra):
                if number:
                    kept.exp_()
                sums[name] += shells.sums(*kept)
        absolute, square, moved, moved_square = total(self._errors).cpu().numpy()
        distributions = self._distributions(total(self._counts).cpu().numpy())
        plane = None
        if self._plane:
            counts = total(self._plane_counts).cpu().numpy()
            plane = PhaseDiagram(*(self._bins[channel].edges for channel in self._plane), *counts)
        divergence_r2 = math.nan
        if DIVERGENCE in names:
            divergence_r2, edge, *found = total(divergence).tolist()
            edges = np.linspace(-edge, edge, DIVERGENCE_BINS + 1)
            predicted, target = np.array(found, dtype=np.int64).reshape(2, DIVERGENCE_BINS)
            unit = f"{VELOCITY_UNIT} per {'cell' if self._cell is None else 'Mpc/h'}"
            distributions["velocity divergence"] = Distribution(edges, predicted, target, unit, is_log=False)
        return Results(
            channels=self._channels,
            input_channels=self._input_channels,
            cells=self._shape[0],
            l1=absolute / cells,
            r2=_r2(square, moved_square - moved**2 / cells),
            spectra={name: shells.spectrum(total(found)) for name, found in sums.items()},
            length_unit="cells" if self._cell is None else "Mpc/h",
            distributions=distributions,
            plane=plane,
            divergence_r2=divergence_r2,
            slices=self._slices,
            about=dict(about or {}),
        )

    def _count(self, predicted: Tensor, target: Tensor) -> None:
        """What is told cell by cell, of one plane [C, Y, Z]."""
        error, moved = predicted - target, target - self._shift
        for row, values in zip(self._errors, (error.abs(), error.square(), moved, moved.square()), strict=True):
            row += values.sum((1, 2), dtype=torch.float64)
        for side, values in enumerate((predicted, target)):
            place = values * self._slope + self._offset
            # A value that is no number has no bin: it is counted in the first one.
            bins = torch.minimum(place.nan_to_num_(nan=0.0).clamp_(min=0.0), self._last).long()
            if self._plane:
                counts = self._plane_counts[side]
                density, temperature = (bins[channel] for channel in self._plane)
                cells = density * counts.shape[1] + temperature
                counts += torch.bincount(cells.flatten(), minlength=counts.numel()).view_as(counts)
            bins += self._begins
            self._counts[side] += torch.bincount(bins.flatten(), minlength=self._counts.shape[1])

    def _keep(self, whole: Tensor, x: int, values: Tensor, field: _Field) -> None:
        """Writes plane x of a field [X, Y, Z], or adds its share to a divergence; from channels' values [C, Y, Z].

        Physical values, or natural logarithms of them.
        """
        parts = [values[part] * self._channels[part].scale + self._channels[part].center for part in field.channels]
        if DIVERGENCE not in field.spectra:
            whole[x] = parts[0]
            return
        # v_x belongs to the two neighbours' divergence, whichever of the three planes comes first.
        along_x, along_y, along_z = (part / (2 * (self._cell or 1.0)) for part in parts)
        whole[x - 1] += along_x
        whole[(x + 1) % self._shape[0]] -= along_x
        for part, axis in ((along_y, 0), (along_z, 1)):
            whole[x] += part.roll(-1, axis) - part.roll(1, axis)

    def _distributions(self, counts: np.ndarray) -> dict[str, Distribution]:
        found = {}
        for channel, bins, end in zip(self._channels, self._bins, self._ends, strict=True):
            predicted, target = counts[:, end - bins.number : end]
            found[channel.name] = Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)
        return found


def _fields(channels: Sequence[Channel], vectors: Sequence[Sequence[int]]) -> list[_Field]:
    """All there are to transform, the ones with most work first."""
    components = {number for number, channel in enumerate(channels) if channel.unit == VELOCITY_UNIT}
    velocity: tuple[int, ...] = next((tuple(parts) for parts in vectors if components.issuperset(parts)), ())
    found = [_Field(velocity, (DIVERGENCE,))] if velocity else []
    for number, channel in enumerate(channels):
        if channel.unit == DENSITY_UNIT:
            found.insert(0, _Field((number,), ("log density", "density")))
        elif channel.unit == TEMPERATURE_UNIT:
            found.append(_Field((number,), ("log temperature",)))
        else:
            found.append(_Field((number,), ("velocity" if number in velocity else channel.name,)))
    return found


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
    """1 − Σ(prediction − target)² / Σ(target − mean)²; NaN where the target is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, 1 - residual / variance, np.nan)


def _measured_divergence(fields: Tensor) -> Tensor:
    """R², the outer edge of the histograms, and their counts, all in one row, of [predicted, target] divergences."""
    sums = torch.zeros(2, dtype=torch.float64, device=fields.device)
    for predicted, target in zip(*fields, strict=True):
        sums[0] += (predicted - target).square().sum(dtype=torch.float64)
        sums[1] += target.square().sum(dtype=torch.float64)  # its mean is zero: the field is periodic
    residual, variance = sums.cpu().numpy()
    edge = _rounded_up(DIVERGENCE_SIGMAS * math.sqrt(variance / fields[0].numel())) or 1.0
    counts = torch.zeros(2, DIVERGENCE_BINS, dtype=torch.float64, device=fields.device)
    for row, field in zip(counts, fields, strict=True):
        for plane in field:
            place = (plane.double() + edge) * (DIVERGENCE_BINS / (2 * edge))
            bins = place.nan_to_num_(nan=0.0).clamp_(0, DIVERGENCE_BINS - 1).long()
            row += torch.bincount(bins.flatten(), minlength=DIVERGENCE_BINS)
    head = torch.tensor([float(_r2(residual, variance)), edge], dtype=torch.float64, device=fields.device)
    return torch.cat((head, counts.flatten()))


def _rounded_up(value: float) -> float:
    """To two significant digits: bins do not change with the last ones."""
    if value == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / digit) * digit


def _as_array(values: np.ndarray | Tensor) -> np.ndarray:
    return np.array(values.float().cpu().numpy() if isinstance(values, Tensor) else values, dtype=np.float32)
