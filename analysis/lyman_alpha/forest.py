"""Lyman-alpha flux of a predicted volume: mean, distribution and power, of target, prediction and a baseline.

A baseline is the fluctuating Gunn-Peterson approximation (FGPA; Croft et al. 1998, ApJ 495, 44): gas with the
density of the dark matter, smoothed as by its pressure, with the dark matter's velocity, and with the temperature of a
power law. Evenly spaced sight-lines along x, y and z are shared over the ranks: a rank has those along y and z in its
own planes, and those along x in its own columns. Optical depths are computed row by row, so that they do not depend on
the number of ranks: bit for bit on the CPU, to rounding on a GPU.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from analysis.lyman_alpha.flux import fgpa_relation, optical_depth, power_law, power_sums, solve_scale
from analysis.lyman_alpha.results import (
    FITTED,
    MEASURABLE,
    PREDICTION,
    SHAPES,
    TARGET,
    TRANSFER,
    Flux,
    FluxField,
)
from analysis.lyman_alpha.setup import FluxSetup, GasFit, Placed
from analysis.modes import Bispectra, Modes, PowerBins
from analysis.slabs import ReadPlanes, SlabFields, Slabs
from utils.distributed.devices import tf32_products
from utils.errors import UserError

PDF_BINS = 20  # of F in [0, 1]; as wide as those of published measurements (McDonald et al. 2000, ApJ 543, 1)
MU_BINS = 4  # of P(k, mu), of equal width in |mu|, as published measurements have
K_RATIO = 1.25  # of the edges of a bin of k
TRUNCATE = 4.0  # standard deviations at which the smoothing ends
VALUES_AT_ONCE = 2**20  # of optical depth, for temporary arrays of a few MiB


class Sightlines:
    """Evenly spaced sight-lines along one axis, in rows along the first of the two other axes. Ranks share the rows."""

    def __init__(self, axis: int, slabs: Slabs, limit: int) -> None:
        """`limit` is the largest number of lines; 0: one per cell."""
        shape = slabs.shape
        self.axis, self.cells = axis, shape[axis]
        first, second = (side for index, side in enumerate(shape) if index != axis)
        limit = limit or first * second
        rows = min(first, limit, max(1, math.isqrt(limit * first // second)))
        places = min(second, limit // rows)
        pairs = (first, min(first, limit // places)), (second, places)
        self.all_rows, columns = ([number * side // count for number in range(count)] for side, count in pairs)
        self.count = len(self.all_rows) * len(columns)  # of all ranks
        # Rows are planes, except of lines along x.
        self.rows = [row for row in self.all_rows if slabs.planes.start <= row < slabs.planes.stop]
        if axis == 0:
            self.rows = self.all_rows[slabs.divide(len(self.all_rows))[slabs.world.rank]]
        self.columns = torch.tensor(columns, device=slabs.world.device)
        self.middle = (self.all_rows[len(self.all_rows) // 2], len(columns) // 2)  # a row, and a place in it

    def empty(self) -> Tensor:
        """Memory for values along this rank's lines, [rows, columns, cells]."""
        return torch.empty((len(self.rows), len(self.columns), self.cells), device=self.columns.device)


@dataclass
class KnownFlux:
    """The parts of an evaluation that later ones of the same volume use again; empty before the first one."""

    fields: dict[str, FluxField] = field(default_factory=dict)  # target and baseline
    target: list[Tensor] = field(default_factory=list)  # flux along this rank's lines of each axis, float16, on the CPU
    matter: Tensor | None = None  # contrast of the dark matter in the own planes, for P(k, mu), on the CPU


class FluxStatistics:
    """The flux of a predicted volume, its target and the baseline. Every rank makes the same calls."""

    def __init__(self, setup: FluxSetup, slabs: Slabs, known: KnownFlux | None = None) -> None:
        """`known` is that of earlier evaluations of this volume, and is filled by the first one."""
        self._setup, self._slabs, self._world, self._known = setup, slabs, slabs.world, known or KnownFlux()
        self._lines = [Sightlines(axis, slabs, setup.options.sightlines) for axis in range(3)]
        is_complete = all(lines.count * lines.cells == math.prod(slabs.shape) for lines in self._lines)
        self._power = PowerBins(slabs, setup.cell, K_RATIO, MU_BINS) if is_complete else None
        self._triangles = Bispectra(slabs, setup.cell) if is_complete else None

    @torch.no_grad()
    def results(self, fields: SlabFields) -> Flux:
        """The results, equal on every rank; to be called once."""
        setup, last, known = self._setup, self._lines[-1], self._known.fields
        if self._power and setup.dark and self._known.matter is None:
            self._known.matter = self._dark_matter(fields.inputs).sub_(1).cpu()
        if not known:
            known[TARGET] = self._measure(self._gas_depths(fields.target))
        prediction = self._measure(self._gas_depths(fields.predicted))
        if setup.dark and setup.baseline not in known:
            known |= {name: self._measure(depths) for name, depths in self._baselines(fields.inputs)}
        width = setup.universe.pixel_width(setup.cell)
        modes = ((lines.cells, np.arange(1, lines.cells // 2 + 1)) for lines in self._lines)
        axis_k, k = self._average([2 * math.pi / (cells * width) * numbers for cells, numbers in modes])
        return Flux(
            redshift=setup.universe.redshift,
            mean_flux=setup.mean_flux,
            sightlines=[lines.count for lines in self._lines],
            smoothing=setup.smoothing,
            edges=np.linspace(0, 1, PDF_BINS + 1),
            k=k,
            axis_k=axis_k,
            velocity=width * np.arange(last.cells),
            mu_edges=np.linspace(0, 1, MU_BINS + 1),
            p3d_k=self._power.k if self._power else np.empty((MU_BINS, 0)),
            p3d_modes=self._power.modes if self._power else np.empty((MU_BINS, 0)),
            p3d_mu_square=self._power.mu_square if self._power else np.empty((MU_BINS, 0)),
            matter_power=self._matter_power(),
            flux_bispectrum_k=self._triangles.k if self._triangles else np.empty(0),
            fields={TARGET: known[TARGET], PREDICTION: prediction} | known,
        )

    def _gas_depths(self, read: ReadPlanes) -> list[Tensor]:
        setup, (density, *velocity, temperature) = self._setup, self._setup.gas
        needed = [(density, component, temperature) for component in velocity]  # by the lines along each axis

        def depth(axis: int, row: Tensor) -> Tensor:
            parts = zip(needed[axis], row, strict=True)
            rho, v, kelvin = (channel.to_physical(values) for (_, channel), values in parts)
            return optical_depth(rho, v, kelvin, setup.universe, setup.cell)

        return self._depths(3, lambda axis, number, planes: _read(needed[axis][number], read, planes), depth)

    def _baselines(self, read: ReadPlanes) -> Iterator[tuple[str, list[Tensor]]]:
        """The optical depths of each baseline, by name."""
        setup, slabs, fit, dark = self._setup, self._slabs, self._setup.fit, self._dark_matter(read)
        gas = fit and _transferred(dark, fit, setup.cell, slabs)
        if setup.smoothing:
            dark = smooth(dark, setup.smoothing / setup.cell, slabs)
        yield setup.baseline, self._baseline_depths(dark, fgpa_relation(setup.universe.redshift), read)
        if fit and gas is not None:
            fitted = fit.kelvin, fit.gamma
            yield f"{setup.baseline}, {FITTED}", self._baseline_depths(dark, fitted, read)
            yield TRANSFER, self._baseline_depths(gas, fitted, read)

    def _dark_matter(self, read: ReadPlanes) -> Tensor:
        """Its density in the own planes, in units of the mean."""
        slabs, part, density = self._slabs, self._setup.dark[0], self._slabs.empty()
        with self._world.raise_together():
            for piece in slabs.pieces():
                density[slabs.local(piece)] = part[1].to_physical(_read(part, read, piece))
        return density

    def _baseline_depths(self, dark: Tensor, relation: tuple[float, float], read: ReadPlanes) -> list[Tensor]:
        """Of gas with this density in the own planes, the temperature that follows, and the velocity of dark matter."""
        (_, *velocities), setup, slabs = self._setup.dark, self._setup, self._slabs

        def values(axis: int, number: int, planes: slice) -> Tensor:
            return _read(velocities[axis], read, planes) if number else dark[slabs.local(planes)]

        def depth(axis: int, row: Tensor) -> Tensor:
            density = row[0]
            velocity = velocities[axis][1].to_physical(row[1]) if velocities else torch.zeros_like(density)
            return optical_depth(density, velocity, power_law(density, *relation), setup.universe, setup.cell)

        return self._depths(2 if velocities else 1, values, depth)

    def _depths(
        self, count: int, values: Callable[[int, int, slice], Tensor], depth: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Optical depths along this rank's lines, [rows, columns, cells], along x, y and z.

        values(axis, number, planes) -> [n, Y, Z] reads one of `count` fields that the lines along an axis need;
        depth(axis, [count, columns, cells]) -> [columns, cells] computes a row.
        """
        slabs, (along_x, *others) = self._slabs, self._lines
        y, z, columns = along_x.all_rows, along_x.columns, []
        for number in range(count):
            pieces = (values(0, number, piece)[:, y][..., z] for piece in slabs.pieces())
            columns.append(slabs.to_columns(pieces, len(y), len(z)))
        depths = [along_x.empty()]
        # Contiguous rows: torch may round exponentials of others differently.
        for row, out in enumerate(depths[0]):
            out.copy_(depth(0, torch.stack([field[:, row].T for field in columns])))
            self._world.pulse.advance()  # a slab of hot gas takes minutes
        del columns
        self._world.pulse.meet()
        for lines in others:
            depths.append(lines.empty())
            with self._world.raise_together():
                for x, out in zip(lines.rows, depths[-1], strict=True):
                    planes = [values(lines.axis, number, slice(x, x + 1))[0] for number in range(count)]
                    rows = [plane.movedim(lines.axis - 1, -1)[lines.columns] for plane in planes]
                    out.copy_(depth(lines.axis, torch.stack(rows)))
                    self._world.pulse.advance()
            self._world.pulse.meet()
        return depths

    def _measure(self, depths: list[Tensor]) -> FluxField:
        """The flux of one field, rescaled, from this rank's optical depths along x, y and z."""
        world, pixels = self._world, sum(lines.count * lines.cells for lines in self._lines)

        @functools.cache
        def mean_and_slope(scale: float) -> tuple[float, float]:
            sums = torch.zeros(2, dtype=torch.float64, device=world.device)
            world.pulse.advance()
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
        mean, width = mean_and_slope(scale)[0], self._setup.universe.pixel_width(self._setup.cell)
        fluxes = ((-scale * depth).exp_().to("cpu", torch.float16) for depth in depths)
        self._known.target = self._known.target or [*fluxes]
        histogram = torch.zeros(PDF_BINS, dtype=torch.float64, device=world.device)
        moments = torch.zeros(5, dtype=torch.float64, device=world.device)
        powers = []
        for lines, depth, target in zip(self._lines, depths, self._known.target, strict=True):
            sums = torch.zeros(lines.cells // 2 + 1, dtype=torch.float64, device=world.device)
            for part, true in zip(_parts(depth), _parts(target), strict=True):
                flux = torch.exp(-scale * part)
                bins = (flux * PDF_BINS).nan_to_num_(nan=0.0).long().clamp_(0, PDF_BINS - 1)
                histogram += torch.bincount(bins.flatten(), minlength=PDF_BINS)
                sums += power_sums(flux / mean - 1)
                moments += _moments(flux, true.to(flux), scale * part, self._setup.mean_flux)
            powers.append(world.sum(sums)[1:].cpu().numpy() * (width / (lines.cells * lines.count)))
        (axis_power, power), (structure, bispectrum) = self._average(powers), self._structure(depths, scale, mean)
        product, square, true_square, distance, measurable = world.sum(moments).tolist()
        return FluxField(
            scale=scale,
            unscaled_mean=mean_and_slope(1.0)[0],
            mean=mean,
            correlation=product / math.sqrt(square * true_square) if square * true_square else math.nan,
            pdf=world.sum(histogram).cpu().numpy() * (PDF_BINS / pixels if math.isfinite(mean) else math.nan),
            power=power,
            axis_power=axis_power,
            **structure,
            depth_error=distance / measurable if measurable else math.nan,
            flux_bispectrum=bispectrum,
            sightline=self._middle_line(depths[-1], scale),
        )

    def _structure(self, depths: list[Tensor], scale: float, mean: float) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Powers by their names in FluxField, and bispectra, means over the axes; no bins without all sight-lines."""
        names = "p3d", "target_p3d", "matter_p3d", "quadrupole"
        if self._power is None or self._triangles is None:
            bins = {name: np.empty(0 if name == "quadrupole" else (MU_BINS, 0)) for name in names}
            return bins, np.empty((len(SHAPES), 0))
        bispectra, matter, device = [], self._known.matter, self._world.device
        sums = torch.zeros(len(names), *self._power.modes.shape, dtype=torch.float64, device=device)
        for axis, (depth, target) in enumerate(zip(depths, self._known.target, strict=True)):
            contrast = self._planes((-scale * depth).exp_().div_(mean).sub_(1), axis)
            both = [contrast, self._planes(target.to(contrast).div_(self._setup.mean_flux).sub_(1), axis)]
            own, _, cross, quadrupole = self._power.sums(both, axis)  # which frees the second
            with_matter = own + math.nan if matter is None else self._power.sums([contrast, matter.to(device)], axis)[2]
            sums += torch.stack([own, cross, with_matter, quadrupole])
            bispectra.append(self._triangles.measure(contrast))
        powers = dict(zip(names, self._power_of(sums), strict=True))
        powers["quadrupole"] = np.nansum(powers["quadrupole"] * self._power.modes, axis=0) / self._power.modes.sum(0)
        return powers, np.mean(bispectra, axis=0)

    def _planes(self, values: Tensor, axis: int) -> Tensor:
        """The own planes [n, Y, Z] of values along all lines of an axis."""
        if axis == 0:  # [own y, z, x]
            return self._slabs.to_planes(values.permute(2, 0, 1), self._slabs.shape[1])
        return values.transpose(1, 2) if axis == 1 else values  # axis 1: [x, z, y]

    def _matter_power(self) -> np.ndarray:
        """The power of the dark matter, a mean over the axes, [bins of mu, bins of k]; NaN if it is unknown."""
        if self._power is None:
            return np.empty((MU_BINS, 0))
        if self._known.matter is None:
            return np.full(self._power.modes.shape, math.nan)
        matter = self._known.matter.to(self._world.device)
        return self._power_of(torch.stack([self._power.sums([matter], axis)[0] for axis in range(3)]).sum(0))

    def _power_of(self, sums: Tensor) -> np.ndarray:
        """Powers of this rank's sums over the modes of each bin; NaN without a mode."""
        assert self._power is not None
        with np.errstate(invalid="ignore"):
            return self._world.sum(sums).cpu().numpy() / self._power.modes * self._power.volume

    def _middle_line(self, depth: Tensor, scale: float) -> np.ndarray:
        lines = self._lines[-1]
        row, place = lines.middle
        flux = torch.zeros(lines.cells, device=depth.device)
        if row in lines.rows:
            flux = torch.exp(-scale * depth[lines.rows.index(row), place])
        return self._world.sum(flux).cpu().numpy()

    def _average(self, values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Values of each axis' modes, [3, bins], and their means over all sight-lines, [bins].

        A bin is as wide as the first mode of the longest axis, so it holds at most one mode of each axis; NaN: none.
        """
        longest = max(lines.cells for lines in self._lines)
        modes, sums = np.zeros((2, 3, longest // 2))
        for axis, (lines, value) in enumerate(zip(self._lines, values, strict=True)):
            nearest = (2 * longest * np.arange(1, len(value) + 1) + lines.cells) // (2 * lines.cells)
            bins = np.minimum(nearest, longest // 2) - 1  # Nyquist's mode of an even axis may be beyond an odd one's
            modes[axis, bins], sums[axis, bins] = 1, value
        counts = np.array([lines.count for lines in self._lines])
        return np.where(modes > 0, sums, math.nan), counts @ sums / (counts @ modes)


def _moments(flux: Tensor, true: Tensor, depth: Tensor, mean: float) -> Tensor:
    """Sums over pixels: products of the deviations from the mean; |difference of ln τ| where `true` is MEASURABLE."""
    deviation, true_deviation = (part.double() - mean for part in (flux, true))
    measurable = (true > MEASURABLE[0]) & (true < MEASURABLE[1])
    distance = depth[measurable].clamp(min=1e-30).log() - true[measurable].log().neg().log()
    products = deviation * true_deviation, deviation.square(), true_deviation.square(), distance.abs(), measurable
    return torch.stack([product.sum(dtype=torch.float64) for product in products])


def _read(part: Placed, read: ReadPlanes, planes: slice) -> Tensor:
    """Channel values of some planes [n, Y, Z]."""
    return read(slice(part[0], part[0] + 1), planes)[0]


def _transferred(dark: Tensor, fit: GasFit, cell: float, slabs: Slabs) -> Tensor:
    """The density of gas whose logarithm is that of dark matter, each mode times the fitted factor; its mean is 1."""
    fundamental = 2 * math.pi / (max(slabs.shape) * cell)

    def factor(k: Tensor) -> Tensor:
        return torch.from_numpy(np.interp(fundamental * k.cpu().numpy(), fit.k, fit.transfer)).to(k)

    density = Modes(slabs).filtered(dark.log(), factor).exp_()
    return density.mul_(math.prod(slabs.shape) / slabs.world.sum(density.sum(dtype=torch.float64)))


@tf32_products(False)  # regardless of the precision of training
def smooth(field: Tensor, sigma: float, slabs: Slabs) -> Tensor:
    """Convolves a periodic field, of which each rank has its own planes [n, Y, Z], with a Gaussian of `sigma` cells.

    Changes its argument. In real space, where the weights are positive: a density stays positive next to a dense clump.
    If `sigma` is at least as long as a side, values along it become their mean.
    """
    along_x, along_y, along_z = (_smoothing_matrix(cells, sigma).to(field.device) for cells in slabs.shape)
    for plane in field:
        plane.copy_(along_y @ plane @ along_z)
    columns = slabs.to_columns((field[slabs.local(piece)] for piece in slabs.pieces()), *slabs.shape[1:])
    for plane in columns.unbind(1):
        plane.copy_(along_x @ plane)
    return slabs.to_planes(columns, slabs.shape[1])


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
