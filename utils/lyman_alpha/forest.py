"""Lyman-alpha flux of a predicted volume: mean, distribution and power, of target, prediction and a baseline.

The baseline is the fluctuating Gunn-Peterson approximation (FGPA; Croft et al. 1998, ApJ 495, 44): gas with the
density of the dark matter, smoothed as by its pressure, with the dark matter's velocity, and with the temperature of a
power law. Evenly spaced sight-lines along x, y and z are shared over the ranks. Each rank stores the optical depth of
its own ones, and the whole dark-matter density, which is to be smoothed. Optical depths are computed row by row, so
they depend neither on the number of ranks nor on the slabs' thickness: bit for bit on the CPU, to rounding on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from utils.distributed.world import World
from utils.errors import UserError
from utils.lyman_alpha.flux import fgpa_temperature, flux_power, optical_depth, power_sums, solve_scale
from utils.lyman_alpha.results import PREDICTION, TARGET, Flux, FluxField
from utils.lyman_alpha.setup import FluxSetup

PDF_BINS = 20  # of F in [0, 1]; as wide as those of published measurements (McDonald et al. 2000, ApJ 543, 1)
TRUNCATE = 4.0  # standard deviations at which the smoothing ends
VALUES_AT_ONCE = 2**20  # of optical depth, for temporary arrays of a few MiB


class Sightlines:
    """Evenly spaced sight-lines along one axis, in rows along the first of the two other axes. Ranks share the rows."""

    def __init__(self, axis: int, shape: tuple[int, int, int], limit: int, world: World) -> None:
        """`limit` is the largest number of lines; 0: one per cell."""
        self.axis, self.cells = axis, shape[axis]
        sides = [side for index, side in enumerate(shape) if index != axis]
        counts = _line_counts(sides[0], sides[1], limit)
        rows, columns = (
            [number * side // count for number in range(count)] for side, count in zip(sides, counts, strict=True)
        )
        self.count = len(rows) * len(columns)  # of all ranks
        self.rows = rows[world.rank :: world.size]
        self.columns = torch.tensor(columns, device=world.device)
        self.middle = (rows[len(rows) // 2], len(columns) // 2)  # a row, and a place in it

    def empty(self, *fields: int) -> Tensor:
        """Zeros for values along this rank's lines, [*fields, rows, columns, cells]."""
        return torch.zeros((*fields, len(self.rows), len(self.columns), self.cells), device=self.columns.device)

    def of_row(self, field: Tensor, row: int) -> Tensor:
        """The lines [columns, cells] of a row of a field [X, Y, Z]."""
        return field.movedim(self.axis, -1)[row][self.columns]

    def of_slab(self, fields: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Rows of lines along y or z in planes [C, n, Y, Z] from x = `start` on: place, lines [C, columns, cells]."""
        for place, x in enumerate(self.rows):
            if start <= x < start + fields.shape[1]:
                yield place, fields[:, x - start].movedim(self.axis, -1)[:, self.columns]


class FluxStatistics:
    """Accumulates a predicted volume and its target slab by slab. Every rank makes the same calls."""

    def __init__(self, setup: FluxSetup, world: World, known: Flux | None = None) -> None:
        """`known`: results of an earlier evaluation of this volume, of which all but the prediction is used again."""
        self._setup, self._world, self._known = setup, world, known
        self._lines = [Sightlines(axis, setup.shape, setup.options.sightlines, world) for axis in range(3)]
        names = [PREDICTION] if known else [TARGET, PREDICTION]
        # By field: optical depths along x, y and z; along x, channel values of density, velocity and temperature.
        self._depths = {name: [lines.empty() for lines in self._lines] for name in names}
        self._along_x = {name: self._lines[0].empty(3) for name in names}
        self._dark: Tensor | None = None  # density [X, Y, Z]
        if setup.dark and not known:
            self._dark = torch.zeros(setup.shape, device=world.device)
            self._depths[setup.baseline] = [lines.empty() for lines in self._lines]  # velocities, until `results`

    @torch.no_grad()
    def add(self, start: int, inputs: Tensor, predicted: Tensor, target: Tensor) -> None:
        """Adds the planes start, start + 1, … along x, [C, planes, Y, Z] of channel values, in any order."""
        for name, values in ((TARGET, target), (PREDICTION, predicted)):
            if name in self._depths:
                self._add_gas(name, start, values)
        if self._dark is not None:
            self._add_dark_matter(self._dark, start, inputs)

    @torch.no_grad()
    def results(self) -> Flux:
        """The results, equal on every rank; to be called once, after all planes."""
        setup, last = self._setup, self._lines[-1]
        for name, values in self._along_x.items():
            for row, out in enumerate(self._depths[name][0]):
                out.copy_(self._gas_depth(values[:, row], 0))
        self._along_x.clear()
        if self._dark is not None:
            self._compute_baseline(self._dark)
            self._dark = None
        measured = {}
        for name in list(self._depths):
            self._progress()
            measured[name] = self._measure(self._depths.pop(name))
        fields = {**(self._known.fields if self._known else {}), **measured}
        width = setup.universe.pixel_width(setup.cell)
        wavenumbers = [
            2 * math.pi / (lines.cells * width) * np.arange(1, lines.cells // 2 + 1) for lines in self._lines
        ]
        axis_k, k = self._average(wavenumbers)
        return Flux(
            redshift=setup.universe.redshift,
            mean_flux=setup.mean_flux,
            sightlines=[lines.count for lines in self._lines],
            smoothing=setup.smoothing,
            edges=np.linspace(0, 1, PDF_BINS + 1),
            k=k,
            axis_k=axis_k,
            velocity=width * np.arange(last.cells),
            fields=fields,
        )

    # --- optical depth ---

    def _add_gas(self, name: str, start: int, values: Tensor) -> None:
        for axis, lines in enumerate(self._lines):
            parts = values[[0, 1 + axis, 4]].to(self._world.device, torch.float32)  # density, velocity, temperature
            if axis == 0:
                along = parts[:, :, lines.rows][..., lines.columns]  # [3, n, rows, columns]
                self._along_x[name][..., start : start + values.shape[1]] = along.movedim(1, -1)
                continue
            for place, row in lines.of_slab(parts, start):
                self._depths[name][axis][place] = self._gas_depth(row, axis)

    def _add_dark_matter(self, density: Tensor, start: int, inputs: Tensor) -> None:
        density_channel, *velocity_channels = self._setup.dark
        inputs = inputs.to(self._world.device, torch.float32)
        for x, plane in enumerate(inputs[0], start):
            density[x] = density_channel.to_physical(plane)
        velocities = self._depths[self._setup.baseline]
        for lines, channel, field, out in zip(self._lines, velocity_channels, inputs[1:], velocities, strict=False):
            values = channel.to_physical(field)
            if lines.axis == 0:
                out[..., start : start + len(values)] = values[:, lines.rows][..., lines.columns].movedim(0, -1)
                continue
            for place, row in lines.of_slab(values[None], start):
                out[place] = row[0]

    def _gas_depth(self, values: Tensor, axis: int) -> Tensor:
        """Optical depth of one row, from its channel values [3, columns, cells]."""
        self._progress()  # a slab of hot gas takes minutes
        setup = self._setup
        channels = setup.gas[0], setup.gas[1 + axis], setup.gas[4]
        # Contiguous: torch may round exponentials of others differently.
        density, velocity, temperature = (
            channel.to_physical(part.contiguous()) for channel, part in zip(channels, values, strict=True)
        )
        return optical_depth(density, velocity, temperature, setup.universe, setup.cell)

    def _compute_baseline(self, dark: Tensor) -> None:
        """Replaces the velocities of the dark matter by optical depths."""
        setup = self._setup
        if setup.smoothing:
            smooth(dark, setup.smoothing / setup.cell)
        for lines, depths in zip(self._lines, self._depths[setup.baseline], strict=True):
            for row, velocity in zip(lines.rows, depths, strict=True):
                self._progress()
                density = lines.of_row(dark, row)
                temperature = fgpa_temperature(density, setup.universe.redshift)
                velocity.copy_(optical_depth(density, velocity, temperature, setup.universe, setup.cell))

    def _progress(self) -> None:
        self._world.heartbeat.progress("prediction")

    # --- flux ---

    def _measure(self, depths: list[Tensor]) -> FluxField:
        """The flux of one field, rescaled, from this rank's optical depths along x, y and z."""
        world, pixels = self._world, sum(lines.count * lines.cells for lines in self._lines)

        @functools.cache
        def mean_and_slope(scale: float) -> tuple[float, float]:
            sums = torch.zeros(2, dtype=torch.float64, device=world.device)
            for part in (part for depth in depths for part in _parts(depth)):
                flux = torch.exp(-scale * part)
                sums[0] += flux.sum(dtype=torch.float64)
                sums[1] -= flux.mul_(part).sum(dtype=torch.float64)
            mean, slope = (world.sum(sums) / pixels).tolist()
            return mean, slope

        try:
            scale = solve_scale(mean_and_slope, self._setup.mean_flux)
        except UserError:  # a diverged network may predict gas that does not absorb at all
            scale = math.nan
        mean = mean_and_slope(scale)[0]
        histogram = torch.zeros(PDF_BINS, dtype=torch.float64, device=world.device)
        powers = []
        for lines, depth in zip(self._lines, depths, strict=True):
            sums = torch.zeros(lines.cells // 2 + 1, dtype=torch.float64, device=world.device)
            for part in _parts(depth):
                flux = torch.exp(-scale * part)
                bins = (flux * PDF_BINS).nan_to_num_(nan=0.0).long().clamp_(0, PDF_BINS - 1)
                histogram += torch.bincount(bins.flatten(), minlength=PDF_BINS)
                sums += power_sums(flux / mean - 1)
            width = self._setup.universe.pixel_width(self._setup.cell)
            powers.append(flux_power(world.sum(sums), lines.count, lines.cells, width)[1].cpu().numpy())
        axis_power, power = self._average(powers)
        return FluxField(
            scale=scale,
            unscaled_mean=mean_and_slope(1.0)[0],
            mean=mean,
            pdf=world.sum(histogram).cpu().numpy() * (PDF_BINS / pixels if math.isfinite(mean) else math.nan),
            power=power,
            axis_power=axis_power,
            sightline=self._middle_line(depths[-1], scale),
        )

    def _middle_line(self, depth: Tensor, scale: float) -> np.ndarray:
        lines = self._lines[-1]
        row, place = lines.middle
        flux = torch.zeros(lines.cells, device=depth.device)
        if row in lines.rows:
            flux = torch.exp(-scale * depth[lines.rows.index(row), place])
        return self._world.sum(flux).cpu().numpy()

    def _average(self, values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Values of each axis' modes, [3, bins], and their means over all sight-lines, [bins].

        A bin is as wide as the first mode of the longest axis, so it holds at most one mode of each axis. An axis
        without a mode in a bin is NaN there.
        """
        longest = max(lines.cells for lines in self._lines)
        modes, sums = np.zeros((2, 3, longest // 2))
        for axis, (lines, value) in enumerate(zip(self._lines, values, strict=True)):
            nearest = (2 * longest * np.arange(1, len(value) + 1) + lines.cells) // (2 * lines.cells)
            bins = np.minimum(nearest, longest // 2) - 1  # Nyquist's mode of an even axis may be beyond an odd one's
            modes[axis, bins], sums[axis, bins] = 1, value
        counts = np.array([lines.count for lines in self._lines])
        return np.where(modes > 0, sums, math.nan), counts @ sums / (counts @ modes)


def smooth(field: Tensor, sigma: float) -> None:
    """Convolves a periodic field [X, Y, Z] in place with a Gaussian of `sigma` cells.

    In real space, where the weights are positive: a density stays positive next to a dense clump. If `sigma` is at
    least as long as a side, values along it become their mean.
    """
    along_x, along_y, along_z = (_smoothing_matrix(cells, sigma).to(field.device) for cells in field.shape)
    switches = torch.backends.cuda.matmul
    tf32, switches.allow_tf32 = switches.allow_tf32, False  # regardless of the precision of training
    for plane in field:
        plane.copy_(along_y @ plane @ along_z)
    for plane in field.unbind(1):
        plane.copy_(along_x @ plane)
    switches.allow_tf32 = tf32


def _smoothing_matrix(cells: int, sigma: float) -> Tensor:
    """The symmetric matrix [cells, cells] of the convolution along one axis."""
    if sigma >= cells:
        return torch.full((cells, cells), 1 / cells)
    reach = math.ceil(TRUNCATE * sigma)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-(offsets.double() ** 2) / (2 * sigma**2))
    row = torch.zeros(cells, dtype=torch.float64).index_add_(0, offsets % cells, weights / weights.sum())
    places = torch.arange(cells)
    return row.float()[(places[:, None] - places) % cells]


def _parts(depth: Tensor) -> Iterator[Tensor]:
    """Optical depths [rows, columns, cells] in parts [lines, cells] of bounded size; none if this rank has no rows."""
    lines = depth.flatten(0, 1)
    step = max(1, VALUES_AT_ONCE // lines.shape[1])
    return (lines[start : start + step] for start in range(0, len(lines), step))


def _line_counts(first: int, second: int, limit: int) -> tuple[int, int]:
    """Rows and columns of at most `limit` lines across an area in cells; 0: one line per cell."""
    if not limit:
        return first, second
    rows = min(first, limit, max(1, math.isqrt(limit * first // second)))
    columns = min(second, limit // rows)
    return min(first, limit // columns), columns
