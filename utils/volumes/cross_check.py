"""Cross-check of a volume's velocities, densities, gas and faces; see docs/data.md and benchmarks/cross_check.py."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from utils.config.channels import DARK_MATTER, GAS, Channel, Channels, density_place, velocity_places
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.files import GIB
from utils.log import once_per_job
from utils.progress import Progress
from utils.volumes.attributes import CELL
from utils.volumes.hdf5 import DATASETS, FieldReader, Volume, cells_text, reading, slab_planes

FEWEST_CELLS = 24  # along each side; smaller volumes are not checked
BLOCKS, FEW_BLOCKS = 32, 8  # along each side at most, and along x of a large volume; the means of blocks are compared
START_BYTES = GIB  # read at the start of a run: of a larger volume, the last planes of each block
HIGHEST, TIED = 100.0, 1e-4  # no channel of a density is beyond it; share of values that have the same extreme
SLOPE, FIT = "ratio of -div v / (a H f) to the density contrast, longest waves", "correlation of these two"
GRADIENT = "correlation of -dv_i/dx_i with the log density, worst axis"
MOMENTUM, FACES = "slope of ln v² on the log density", "step between opposite faces / largest step inside"
DENSITIES, GROWTH = "correlation of gas and dark-matter log density", "slope of gas on dark-matter density"
VELOCITIES = "correlation of gas and dark-matter velocity, worst component"
OFFSET = "offset of gas from dark matter in cells, worst axis"
MEANS, SPEEDS = "mean density of the gas / of the dark matter", "slope of gas on dark-matter velocity"
BOUNDS = {  # between right boxes and mistakes of the study; a correlation's upper bound is never exceeded
    **{SLOPE: (0.7, 1.25), FIT: (0.82, 1.0), GRADIENT: (0.13, 1.0), MOMENTUM: (-0.5, 1.2), FACES: (0.0, 1.5)},
    **{DENSITIES: (0.65, 1.0), GROWTH: (0.9, 1.1), VELOCITIES: (0.6, 1.0), MEANS: (0.5, 2.0), SPEEDS: (0.7, 1.35)},
    OFFSET: (0.0, 0.6),
}
EXPECTED = {name: f"expected {low:g} to {high:g}" for name, (low, high) in BOUNDS.items()}
OF_GAS = (DENSITIES, OFFSET, GROWTH, VELOCITIES, SPEEDS)
THIN = 2.0  # mean densities; GRADIENT skips denser cells: in halos matter flows in all directions
TYPICAL_SLOPE, FACTOR = 0.95, 1.4  # a unit is named if it explains the slope within this factor
FINEST, TINY = 6, 1e-30  # number of waves along the box that OFFSET uses at most; smallest density with a logarithm
SIMILAR = 0.7  # correlation of log densities if gas fits dark matter after a rotation, reflection or shift
# Numbers of waves along each axis, [18, 3]: wavenumbers of at most √2 fundamental ones.
WAVES = np.array([wave for wave in itertools.product((-1, 0, 1), repeat=3) if 0 < np.dot(wave, wave) < 3])

log = once_per_job(__name__)


@dataclass(frozen=True)
class CrossCheck:
    """The statistics of a volume by name, and warnings."""

    volume: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def log(self) -> None:
        """Logs a table and the warnings on rank 0; they are equal on all ranks."""
        rows = [f"\n  {name}: {value:.3g} ({EXPECTED[name]})" for name, value in self.values.items()]
        if rows:
            log.info(f"cross-check of {self.volume}:{''.join(rows)}")
        for line in self.warnings:
            log.warning(line)


class _Species:
    """Dark matter or gas: sums over cells, which slabs and ranks add."""

    def __init__(self, stored: Any, channels: Mapping[int, Channel], places: Sequence[np.ndarray]) -> None:
        """`channels`, by number: density and, if it is known, velocity; `places`: first and end cells of the blocks."""
        self.stored, self.numbers, self.channels, self.places = stored, [*channels], [*channels.values()], places
        self.has_velocity = len(channels) > 1
        self.thin = self.channels[0].from_physical(np.float64(THIN))
        self.blocks = np.zeros([len(channels), *(part.shape[1] for part in places)])  # physical values
        self.steps = [np.zeros([2, side]) for side in stored.shape[1:]]  # to the next plane: density, velocity
        self.gradients = np.zeros([3, 5, 5])  # products of 1, density and steps of the velocity along each axis
        self.speeds = np.zeros([3, 3])  # products of 1, density and ln v²
        self.missing = np.zeros(3)  # number of values that stand for "no value", their sum, number of all values

    @np.errstate(over="ignore")
    def add(self, planes: slice) -> None:
        (x, y, z), after = self.places, planes.stop % self.stored.shape[1]
        values, behind = (self._read(part) for part in (planes, slice(after, after + 1)))
        rows = np.searchsorted(x[0], np.arange(planes.start, planes.stop), "right") - 1
        for channel, block, part in zip(self.channels, self.blocks, values, strict=True):
            columns = np.add.reduceat(channel.to_physical(part), z[0], 2, np.float64)
            np.add.at(block, rows, np.add.reduceat(columns, y[0], 1))
            # No two cells have the same velocity as an extreme, but many have the lowest density.
            low, high = float(part.min()), float(part.max())
            count, value = max((int(np.count_nonzero(part == edge)), edge) for edge in (low, high))
            ties = count - 1 if low < high and (not channel.is_log or abs(value) > HIGHEST) else 0
            self.missing += ties, ties * value, part.size
        for axis, sums in enumerate(self.steps):
            steps = np.diff(values, axis=axis + 1, append=values.take([0], axis + 1) if axis else behind)
            sizes = np.abs(steps).sum(tuple({1, 2, 3} - {axis + 1}), np.float64)
            sums[:, slice(None) if axis else planes] += sizes[0], sizes[1:].sum(axis=0)
            if self.has_velocity:
                inside = slice(-1 if axis or not after else None)
                steps[0] = values[0] + steps[0] / 2
                parts = [np.moveaxis(part, axis, 0)[inside].ravel() for part in steps]
                thin = parts[0] < self.thin
                self.gradients[axis] += _products(*(part[thin] for part in parts))
        if self.has_velocity:
            square = np.square(values[1:]).sum(axis=0)
            self.speeds += _products(values[0][square > 0], np.log(square[square > 0]))

    def _read(self, planes: slice) -> np.ndarray:
        if self.numbers == [*range(len(self.numbers))]:
            return np.asarray(self.stored[: len(self.numbers), planes])  # a view
        return np.stack([self.stored[number, planes] for number in self.numbers])

    def finish(self, world: World) -> None:
        """Adds the sums of all ranks; blocks become means, of the density relative ones; `waves` is [channels, 18]."""
        for sums in (self.blocks, *self.steps, self.gradients, self.speeds, self.missing):
            sums[:] = world.sum(torch.from_numpy(sums)).numpy()
        self.blocks /= np.einsum("x,y,z->xyz", *(end - first for first, end in self.places))
        self.mean = self.blocks[0].mean()
        self.blocks[0] /= self.mean
        contrasts = self.blocks - self.blocks.mean(axis=(1, 2, 3), keepdims=True)
        centers = [part.mean(axis=0) / side for part, side in zip(self.places, self.stored.shape[1:], strict=True)]
        phases = [np.exp(-2j * np.pi * np.outer(WAVES[:, axis], part)) for axis, part in enumerate(centers)]
        self.waves = np.einsum("cxyz,nx,ny,nz->cn", contrasts, *phases, optimize=True) / contrasts[0].size


def cross_check(
    volume: Volume | FieldReader,
    fields: Sequence[Any],
    channels: Sequence[Channels],
    world: World,
    limit: float = math.inf,
) -> CrossCheck:
    """Compares the fields of a volume with each other. Every rank calls it, and returns the same.

    fields, channels: of the inputs and, if they are known, the targets; channels without a unit are not used.
    limit: bytes that all ranks read; larger volumes in chunks, of which no plane can be read alone, are not checked.
    """
    shape, used = volume.shape, []
    for stored, known, prefix in zip(fields, channels, (DARK_MATTER, GAS), strict=False):
        if (density := density_place(known, prefix)) is not None:
            used.append((stored, {place: known[place] for place in (density, *velocity_places(known, prefix))}))
    plane = 4 * shape[1] * shape[2] * sum(len(named) for _, named in used)  # bytes
    chunk = next((stored.chunks[-3:] for stored, _ in used if getattr(stored, "chunks", None)), None)
    is_large = plane * shape[0] > limit
    if not used or used[0][0] is not fields[0] or min(shape) < FEWEST_CELLS or (chunk and is_large):
        return CrossCheck()
    most = FEW_BLOCKS if is_large else BLOCKS, BLOCKS, BLOCKS
    edges = [np.linspace(0, side, min(count, side) + 1, dtype=int) for count, side in zip(most, shape, strict=True)]
    places = [np.stack([part[:-1], part[1:]]) for part in edges]
    slabs = slab_planes(shape, chunk)
    if is_large:
        depth = max(1, int(limit / (plane * FEW_BLOCKS)) - 1)  # the plane behind them is read, too
        places[0][0] = np.maximum(places[0][0], places[0][1] - depth)
        slabs = [slice(*pair) for pair in places[0].T.tolist()]
    species = [_Species(stored, named, places) for stored, named in used]
    parts = [*itertools.product(slabs[world.rank :: world.size], species)]
    title = f"cross-check of {volume.path}"
    with world.raise_together(), reading(volume.path), Progress(title, len(parts), "slabs") as progress:
        for planes, one in parts:
            one.add(planes)
            progress.advance()
    for one in species:
        one.finish(world)
    return _Comparison(volume, species).check()


def check_file(path: str, channels: Sequence[Channels]) -> None:
    """Logs the cross-check of a file with inputs and perhaps targets, by one rank."""
    fields = [FieldReader(path, name, None) for name, _ in zip(DATASETS, channels, strict=False)]
    alone = World(Launch("cross-check"), torch.device("cpu"))
    cross_check(fields[0], [field.values for field in fields], channels, alone).log()


@dataclass(frozen=True)
class _Comparison:
    """The statistics of a volume, and the mistakes that they look like, from the sums over its cells."""

    volume: Volume | FieldReader
    species: Sequence[_Species]  # dark matter, and gas if it is known

    def check(self) -> CrossCheck:
        volume = f"{self.volume.path}, {cells_text(self.volume.shape)} cells"
        count, total, every = np.sum([one.missing for one in self.species], axis=0)
        if count > TIED * every:
            text = f"{count / every:.2%} of the values, about {total / count:.5g} in channel units, seem to mean"
            return CrossCheck(volume, {}, [f"{volume}: {text} no value; fill these cells or cut them out"])
        values = {name: float(value) for name, value in self._values().items() if np.isfinite(value)}
        wrong = [name for name, value in values.items() if not BOUNDS[name][0] <= round(value, 6) <= BOUNDS[name][1]]
        reasons = defaultdict[str, list[str]](list)
        for name in wrong:
            reasons[self._reason(name, values, wrong)].append(f"{name} is {values[name]:.3g}, {EXPECTED[name]}")
        return CrossCheck(volume, values, [f"{volume}: {key}? {'; '.join(texts)}" for key, texts in reasons.items()])

    @np.errstate(divide="ignore", invalid="ignore")
    def _values(self) -> dict[str, float]:
        """The statistics that the volume allows; some may be NaN."""
        values, moving = {}, [one for one in self.species if one.has_velocity]
        density, *gas = [one.waves[0] for one in self.species]
        power = np.vdot(density, density).real
        if moving:
            values[GRADIENT] = self._gradients.diagonal().min()
            rows = [(_covariance(one.speeds)[0], one.channels[0].scale) for one in moving]
            values[MOMENTUM] = max(both / (square * scale) for (square, both), scale in rows)
        if self.volume.periodic:
            steps = [part[:, -1] / part[:, :-1].max(axis=1) for part in self.species[0].steps]
            values[FACES] = np.fmax.reduce(steps, axis=None)
            if moving and not values[FACES] > BOUNDS[FACES][1]:  # else these are no waves
                divergence = self._divergence(moving[0].waves[1:])
                square, product = (np.vdot(divergence, part).real for part in (divergence, density))
                values |= {SLOPE: square / product, FIT: product / np.sqrt(square * power)}
        if gas:
            values |= {OFFSET: self._offset(), GROWTH: np.vdot(density, gas[0]).real / power}
            pairs = zip(*([np.log(one.blocks[0]), *one.blocks[1:]] for one in self.species), strict=False)
            values[DENSITIES], *velocities = [np.corrcoef(np.reshape(pair, (2, -1)))[0, 1] for pair in pairs]
            values[MEANS] = self.species[1].mean / self.species[0].mean
            if velocities:
                first, second = (one.blocks[1:].ravel() for one in self.species)
                values |= {VELOCITIES: min(velocities), SPEEDS: first @ second / (first @ first)}
        return values

    def _offset(self) -> float:
        """Cells by which the gas is shifted along the worst axis, from the phases of waves of both log densities."""
        if np.diff(self.species[0].places[0], axis=0).sum() < self.volume.shape[0]:
            return math.nan  # from few planes it is not exact enough
        dark, gas = (np.fft.fftn(np.log(np.maximum(one.blocks[0], TINY))) for one in self.species)
        counts = np.moveaxis(np.indices(dark.shape), 0, -1)
        counts -= dark.shape * (2 * counts > dark.shape)  # of waves along each axis
        chosen = (np.square(counts).sum(-1) <= FINEST**2) & (2 * np.abs(counts) < dark.shape).all(-1)
        products, turns = (dark * gas.conj())[chosen], 2 * np.pi * counts[chosen] / self.volume.shape  # per cell
        weights = np.sqrt(np.abs(products))
        cells = np.linalg.lstsq(turns * weights[:, None], np.angle(products) * weights, rcond=None)[0]
        return float(np.abs(cells).max())

    def _divergence(self, velocity: np.ndarray) -> np.ndarray:
        """−div v / (a H f), from waves of the velocity; NaN if cosmology, redshift or size of a cell are unknown."""
        known, keys = self.volume.simulation, ("cosmology_Om0", "redshift", CELL)
        matter, redshift, cell = np.array([known.get(key, math.nan) for key in keys], float)
        if not (redshift >= 0 and matter > 0):  # impossible ones get a warning elsewhere
            redshift = math.nan
        vacuum = float(known.get("cosmology_Ode0", 1 - matter))
        square = matter * (1 + redshift) ** 3 + (1 - matter - vacuum) * (1 + redshift) ** 2 + vacuum  # (H / H0)²
        growth = (matter * (1 + redshift) ** 3 / square) ** 0.55  # f; Linder 2005, Phys. Rev. D 72, 043529
        wavenumbers = 2 * math.pi * WAVES / (np.array(self.volume.shape) * cell)
        unit = 100 * np.sqrt(square) / (1 + redshift) * growth  # a H f in km/s per comoving Mpc/h
        divergence: np.ndarray = -1j * np.einsum("cn,nc->n", velocity, wavenumbers) / unit
        return divergence

    @cached_property
    def _gradients(self) -> np.ndarray:
        """Correlation of −dv_j/dx_i, from cell to cell, with the log density: [i, j]."""
        covariances = map(_covariance, next(one for one in self.species if one.has_velocity).gradients)
        return np.array([-part[0, 1:] / np.sqrt(part[0, 0] * part.diagonal()[1:]) for part in covariances])

    def _reason(self, statistic: str, values: Mapping[str, float], wrong: Sequence[str]) -> str:
        """The mistake that a statistic beyond its bounds looks like."""
        if statistic == FACES:
            return "a part cut out of a box (set its attribute periodic to false, or import it with --not_periodic)"
        if statistic == MEANS:
            return "densities divided by other means (--mean_density of the importer)"
        if statistic in OF_GAS and DENSITIES in wrong:
            return self._gas_reason()
        if statistic in OF_GAS and OFFSET in wrong:
            return "gas shifted"
        if statistic in OF_GAS and GROWTH in wrong:
            return "gas and dark matter of one simulation at two redshifts"
        if MOMENTUM in wrong:
            return "momentum in place of velocity"
        if statistic == SPEEDS and VELOCITIES not in wrong:
            return "gas velocity in other units than the dark matter's"
        if statistic in (VELOCITIES, SPEEDS):
            return "components of the gas's or the dark matter's velocity swapped or of the wrong sign"
        return self._velocity_reason(values, wrong)

    def _velocity_reason(self, values: Mapping[str, float], wrong: Sequence[str]) -> str:
        """From the axes along which the components vary with the density, and the size of the velocity."""
        order = max(itertools.permutations(range(3)), key=lambda order: np.abs(self._gradients[range(3), order]).sum())
        if order != (0, 1, 2):
            names = " and ".join(f"v_{'xyz'[axis]}" for axis, place in enumerate(order) if place != axis)
            return f"{names} swapped, or the grids of all fields with swapped axes (Fortran order)"
        if reversed_axes := [axis for axis, value in zip("xyz", self._gradients.diagonal(), strict=True) if value < 0]:
            return f"wrong sign of the velocity along {', '.join(reversed_axes)}"
        if SLOPE not in wrong:
            return "velocity of another snapshot, or shifted"
        ratio, scale = values[SLOPE] / TYPICAL_SLOPE, 1 + float(self.volume.simulation["redshift"])
        hubble = float(self.volume.simulation.get("cosmology_H0", 70)) / 100  # a typical h if it is unknown
        units = {"velocities in √a units (Gadget)": scale**0.5, "comoving velocities": scale, "velocities in m/s": 1e3}
        units |= {"box size in Mpc, not Mpc/h": hubble, "box size in kpc/h, not Mpc/h": 1e-3}
        near = [name for name, factor in units.items() if 1 / FACTOR < abs(ratio) / factor < FACTOR]
        return " or ".join(near) or "other units of velocities or lengths, or another redshift"

    def _gas_reason(self) -> str:
        """From the first reflection or order of axes with which the gas, perhaps shifted, fits the dark matter."""
        dark, gas = ((part - part.mean()) / part.std() for part in (np.log(one.blocks[0]) for one in self.species))
        for order, signs in itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)):
            turned = gas.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]
            if turned.shape == dark.shape:
                correlations = np.fft.ifftn(np.fft.fftn(dark) * np.fft.fftn(turned).conj()).real / dark.size
                if correlations.max() > SIMILAR:
                    return f"gas {'transposed' if order != (0, 1, 2) else 'reflected' if -1 in signs else 'shifted'}"
        return "gas of another snapshot"


def _products(*fields: np.ndarray) -> np.ndarray:
    """Sums of the products of 1 and fields of the same size."""
    rows = np.stack([np.ones(fields[0].size), *fields])  # float64
    return rows @ rows.T


def _covariance(products: np.ndarray) -> np.ndarray:
    """Covariances of the fields of `_products`, times their size."""
    return products[1:, 1:] - np.outer(products[0, 1:], products[0, 1:]) / products[0, 0]
