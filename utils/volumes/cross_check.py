"""Cross-check of a volume: its velocities, densities, gas and opposite faces are compared with each other.

Right simulations are within BOUNDS, common mistakes are not; see docs/data.md and benchmarks/cross_check.py.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from utils.config.sections import TransformConfig
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.files import GIB
from utils.log import once_per_job
from utils.progress import Progress
from utils.volumes.attributes import CELL, Simulation
from utils.volumes.channels import DARK_MATTER, GAS, Channel, input_channels, target_channels, vectors_of
from utils.volumes.hdf5 import DATASETS, FieldReader, Volume, cells_text, slab_planes
from utils.volumes.storage import open_file, reading

FEWEST_CELLS = 24  # along each side; smaller volumes are not checked
BLOCKS, FEWEST_BLOCKS = 32, 8  # along each side at most, and along x at least; the means of blocks are compared
START_BYTES = GIB  # read at the start of a run: of a larger volume, the last planes of each block
HIGHEST, TIED = 100.0, 1e-4  # no channel of a density is beyond it; share of values that have the same extreme
SLOPE, FIT = "ratio of -div v / (a H f) to the density contrast, longest waves", "correlation of these two"
GRADIENT = "correlation of -dv_i/dx_i with the log density, worst axis"
MOMENTUM, FACES = "slope of ln v² on the log density", "step between opposite faces / largest step inside"
DENSITIES, GROWTH = "correlation of gas and dark-matter log density", "slope of gas on dark-matter density"
VELOCITIES = "correlation of gas and dark-matter velocity, worst component"
BOUNDS = {
    **{SLOPE: (0.7, 1.25), FIT: (0.88, 1.0), GRADIENT: (0.2, 1.0), MOMENTUM: (-0.5, 1.2), FACES: (0.0, 1.5)},
    **{DENSITIES: (0.65, 1.0), GROWTH: (0.9, 1.1), VELOCITIES: (0.6, 1.0)},
}
OF_GAS = (DENSITIES, GROWTH, VELOCITIES)
TYPICAL_SLOPE, FACTOR = 0.95, 1.4  # a unit is named if it explains the slope within this factor
SIMILAR = 0.7  # correlation of log densities if gas fits dark matter after a rotation, reflection or shift
WAVES = np.array([wave for wave in itertools.product((-1, 0, 1), repeat=3) if 0 < np.dot(wave, wave) < 3])  # [18, 3]

log = once_per_job(__name__)


@dataclass(frozen=True)
class CrossCheck:
    """The statistics of a volume by name, and warnings."""

    volume: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """A table; empty if there are no statistics."""
        bounds = [(name, value, *BOUNDS[name]) for name, value in self.values.items()]
        rows = [f"  {name}: {value:.3g} (expected {low:g} to {high:g})" for name, value, low, high in bounds]
        return [f"cross-check of {self.volume}:", *rows] if rows else []

    def log(self) -> None:
        """Logs both on rank 0; they are equal on all ranks."""
        if self.lines:
            log.info("\n".join(self.lines))
        for line in self.warnings:
            log.warning(line)


class _Species:
    """Dark matter or gas: sums over cells, which slabs and ranks add."""

    def __init__(self, stored: Any, channels: Sequence[Channel], edges: Sequence[np.ndarray]) -> None:
        """`channels`: of the density and, if it is known, the velocity; `edges`: of the blocks along each axis."""
        self.stored, self.channels, self.edges = stored, channels, edges
        self.has_velocity, (x, y, z) = len(channels) > 1, (len(part) - 1 for part in edges)
        sizes = [len(channels) * x * y * z, *(2 * part[-1] for part in edges), 3 * 5 * 5, 3 * 3, 3]
        self.sums = np.zeros(sum(sizes))
        blocks, *steps, gradients, speeds, self.missing = np.split(self.sums, np.cumsum(sizes)[:-1])  # views
        self.blocks = blocks.reshape(len(channels), x, y, z)  # physical values
        self.steps = [part.reshape(2, -1) for part in steps]  # to the next plane along each axis: density, velocity
        self.gradients = gradients.reshape(3, 5, 5)  # products of 1, density and steps of the velocity along each axis
        self.speeds = speeds.reshape(3, 3)  # products of 1, density and ln v²
        # `missing`: the number of values that stand for "no value", their sum, the number of all values.

    def add(self, planes: slice) -> None:
        """Adds some planes."""
        count, start = len(self.channels), planes.stop % self.edges[0][-1]
        values, after = self.stored[:count, planes], self.stored[:count, start : start + 1]
        blocks = np.searchsorted(self.edges[0], np.arange(planes.start, planes.stop), "right") - 1
        for number, (channel, part) in enumerate(zip(self.channels, values, strict=True)):
            rows = np.add.reduceat(channel.to_physical(part), self.edges[2][:-1], 2, np.float64)
            np.add.at(self.blocks[number], blocks, np.add.reduceat(rows, self.edges[1][:-1], 1))
            # No two cells have the same velocity as an extreme, but many have the lowest density.
            low, high = float(part.min()), float(part.max())
            count, value = max((int(np.count_nonzero(part == edge)), edge) for edge in (low, high))
            ties = count - 1 if low < high and (not channel.is_log or abs(value) > HIGHEST) else 0
            self.missing += ties, ties * value, part.size
        for axis in range(3):
            self._add_steps(axis, planes, values, after if axis == 0 else values.take([0], axis + 1))
        if self.has_velocity:
            square = np.square(values[1:]).sum(axis=0)
            self.speeds += _products(values[0][square > 0], np.log(square[square > 0]))

    def _add_steps(self, axis: int, planes: slice, values: np.ndarray, after: np.ndarray) -> None:
        """Adds the steps of some planes along an axis; `after` is the plane behind the last one, [channels, …]."""
        steps = np.diff(values, axis=axis + 1, append=after)
        sums = np.abs(steps).sum(tuple({1, 2, 3} - {axis + 1}), np.float64)
        self.steps[axis][:, planes if axis == 0 else slice(None)] += sums[0], sums[1:].sum(axis=0)
        if self.has_velocity:
            inside = slice(-1 if axis or planes.stop == self.edges[0][-1] else None)
            steps[0] = values[0] + steps[0] / 2
            self.gradients[axis] += _products(*(np.moveaxis(part, axis, 0)[inside].ravel() for part in steps))

    def finish(self, world: World, cells: np.ndarray) -> None:
        """Adds the sums of all ranks; blocks become means, those of the density relative to the volume's."""
        self.sums[:] = world.sum(torch.from_numpy(self.sums)).numpy()
        self.blocks /= cells
        self.blocks[0] /= self.blocks[0].mean()

    def waves(self, centers: Sequence[np.ndarray]) -> np.ndarray:
        """Amplitudes of the density contrast and the velocity, [channels, 18]; `centers` of blocks in sides."""
        fields = self.blocks - self.blocks.mean(axis=(1, 2, 3), keepdims=True)
        phases = [np.exp(-2j * np.pi * np.outer(WAVES[:, axis], part)) for axis, part in enumerate(centers)]
        waves: np.ndarray = np.einsum("cxyz,nx,ny,nz->cn", fields, *phases, optimize=True) / fields[0].size
        return waves


def cross_check(
    volume: Volume | FieldReader,
    fields: Sequence[Any],
    channels: Sequence[Sequence[Channel]],
    world: World,
    limit: float = math.inf,
) -> CrossCheck:
    """Compares the fields of a volume with each other. Every rank calls it, and returns the same.

    fields, channels: of the inputs and, if they are known, the targets; channels without a unit are not used.
    limit: bytes that all ranks read; larger volumes in chunks, of which no plane can be read alone, are not checked.
    """
    shape, used = volume.shape, []
    for stored, known, prefix in zip(fields, channels, (DARK_MATTER, GAS), strict=False):
        names = [f"{prefix}{name}" for name in ("density", "velocity x", "velocity y", "velocity z")]
        named = [channel for channel, name in zip(known, names, strict=False) if channel.name == name and channel.unit]
        if named and named[0].is_log and len(named) in (1, len(names)):
            used.append((stored, named))
    plane = 4 * shape[1] * shape[2] * sum(len(named) for _, named in used)
    chunk = next((stored.chunks[-3:] for stored, _ in used if getattr(stored, "chunks", None)), None)
    is_large = plane * shape[0] > limit
    if not used or used[0][0] is not fields[0] or min(shape) < FEWEST_CELLS or (chunk and is_large):
        return CrossCheck()
    most = max(FEWEST_BLOCKS, int(limit / (2 * plane))) if is_large else BLOCKS  # a plane is read with the next one
    counts = [min(BLOCKS, side, number) for side, number in zip(shape, (most, BLOCKS, BLOCKS), strict=True)]
    edges = [np.arange(count + 1) * side // count for count, side in zip(counts, shape, strict=True)]
    depth = max(1, int(limit / (plane * counts[0])) - 1) if is_large else shape[0]
    read = [(max(first, end - depth), end) for first, end in itertools.pairwise(edges[0].tolist())]
    species = [_Species(stored, named, edges) for stored, named in used]
    slabs = [slice(*pair) for pair in read] if is_large else slab_planes(shape, chunk)
    with world.raise_together(), reading(volume.path), np.errstate(over="ignore"):
        _add_slabs(species, slabs[world.rank :: world.size], volume.path)
    pairs = [np.array(read), *(np.stack([part[:-1], part[1:]], axis=1) for part in edges[1:])]
    x, y, z = (np.diff(part)[:, 0] for part in pairs)
    for one in species:
        one.finish(world, x[:, None, None] * y[:, None] * z)
    centers = [pair.sum(axis=1) / (2 * side) for pair, side in zip(pairs, shape, strict=True)]
    return _Comparison(species, centers, shape, volume.simulation, volume.periodic).check(volume.path)


def check_file(path: str, transform: TransformConfig) -> list[str]:
    """Lines of the cross-check of a file with inputs and perhaps targets, by one rank."""
    with open_file(path) as file:
        fields = [FieldReader(path, name, None, file=file) for name in DATASETS if name in file]
    counts = [field.values.shape[0] for field in fields]
    makers = zip((input_channels, target_channels), counts, strict=False)
    channels = [make(count, transform, vectors_of(count)) for make, count in makers]
    alone = World(Launch("cross-check"), torch.device("cpu"))
    check = cross_check(fields[0], [field.values for field in fields], channels, alone)
    return [*check.lines, *(f"warning: {line}" for line in check.warnings)]


def _add_slabs(species: Sequence[_Species], slabs: Sequence[slice], path: str) -> None:
    with Progress(f"cross-check of {path}", len(slabs), "slabs") as progress:
        for planes in slabs:
            for one in species:
                one.add(planes)
            progress.advance()


@dataclass(frozen=True)
class _Comparison:
    """The statistics of a volume, and the mistakes that they look like, from the sums over its cells."""

    species: Sequence[_Species]  # dark matter, and gas if it is known
    centers: Sequence[np.ndarray]  # of the blocks along each axis, in sides
    shape: tuple[int, int, int]
    simulation: Simulation
    periodic: bool

    def check(self, path: str) -> CrossCheck:
        volume = f"{path}, {cells_text(self.shape)} cells"
        count, total, every = np.sum([one.missing for one in self.species], axis=0)
        if count > TIED * every:
            text = (
                f"{count / every:.2%} of the values, about {total / count:.5g} in channel units, seem to mean no value"
            )
            return CrossCheck(volume, {}, [f"{volume}: {text}; fill these cells or cut them out"])
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {name: float(value) for name, value in self._values().items() if np.isfinite(value)}
        wrong = [name for name, value in values.items() if not BOUNDS[name][0] <= round(value, 6) <= BOUNDS[name][1]]
        reasons: dict[str, list[str]] = {}
        for name in wrong:
            low, high = BOUNDS[name]
            text = f"{name} is {values[name]:.3g}, expected {low:g} to {high:g}"
            reasons.setdefault(self._reason(name, values, wrong), []).append(text)
        return CrossCheck(volume, values, [f"{volume}: {key}? {'; '.join(texts)}" for key, texts in reasons.items()])

    def _values(self) -> dict[str, float]:
        """The statistics that the volume allows; some may be NaN."""
        values, moving = {}, [one for one in self.species if one.has_velocity]
        waves = [one.waves(self.centers) for one in self.species]
        products = np.array([[np.vdot(first[0], second[0]).real for first in waves] for second in waves])
        if moving:
            values[GRADIENT] = self._gradients.diagonal().min()
            rows = [(_covariance(one.speeds)[0], one.channels[0].scale) for one in moving]
            values[MOMENTUM] = max(both / (square * scale) for (square, both), scale in rows)
        if self.periodic:
            values[FACES] = np.fmax.reduce(
                [part[:, -1] / part[:, :-1].max(axis=1) for part in self.species[0].steps], axis=None
            )
            divergence = self._divergence(waves[self.species.index(moving[0])][1:]) if moving else None
            if divergence is not None and not values[FACES] > BOUNDS[FACES][1]:  # else these are no waves
                square, product = (np.vdot(divergence, part).real for part in (divergence, waves[0][0]))
                values |= {SLOPE: square / product, FIT: product / np.sqrt(square * products[0, 0])}
        if len(waves) > 1:
            fields = [one.blocks.reshape(len(one.blocks), -1) for one in self.species]
            values |= {GROWTH: products[0, 1] / products[0, 0]}
            values[DENSITIES] = np.corrcoef(*(np.log(field[0]) for field in fields))[0, 1]
        if len(moving) > 1:
            values[VELOCITIES] = min(
                np.corrcoef(*pair)[0, 1] for pair in zip(fields[0][1:], fields[1][1:], strict=True)
            )
        return values

    def _divergence(self, velocity: np.ndarray) -> np.ndarray | None:
        """−div v / (a H f), from waves of the velocity; None if cosmology, redshift or size of a cell are unknown."""
        matter, redshift, cell = (self.simulation.get(key) for key in ("cosmology_Om0", "redshift", CELL))
        if not (isinstance(matter, float) and isinstance(redshift, float) and isinstance(cell, float)):
            return None
        vacuum = float(self.simulation.get("cosmology_Ode0", 1 - matter))
        square = matter * (1 + redshift) ** 3 + (1 - matter - vacuum) * (1 + redshift) ** 2 + vacuum  # (H / H0)²
        growth = (matter * (1 + redshift) ** 3 / square) ** 0.55  # f; Linder 2005, Phys. Rev. D 72, 043529
        wavenumbers = 2 * math.pi * WAVES / (np.array(self.shape) * cell)
        unit = 100 * math.sqrt(square) / (1 + redshift) * growth  # a H f in km/s per comoving Mpc/h
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
            return "a part cut out of a box (if so, set its attribute periodic to false)"
        if statistic in OF_GAS and DENSITIES in wrong:
            return self._gas_reason()
        if statistic in OF_GAS and GROWTH in wrong:
            return "gas and dark matter of one simulation at two redshifts"
        if MOMENTUM in wrong:
            return "momentum in place of velocity"
        if statistic == VELOCITIES:
            return "components of the gas's or the dark matter's velocity swapped or of the wrong sign"
        return self._velocity_reason(values, wrong)

    def _velocity_reason(self, values: Mapping[str, float], wrong: Sequence[str]) -> str:
        """From the axes along which the components vary with the density, and the size of the velocity."""
        gradients = self._gradients
        order = max(itertools.permutations(range(3)), key=lambda order: np.abs(gradients[range(3), order]).sum())
        if order != (0, 1, 2):
            names = " and ".join(f"v_{'xyz'[axis]}" for axis, place in enumerate(order) if place != axis)
            return f"{names} swapped, or the grids of all fields with swapped axes (Fortran order)"
        if reversed_axes := [axis for axis, value in zip("xyz", gradients.diagonal(), strict=True) if value < 0]:
            return f"wrong sign of the velocity along {', '.join(reversed_axes)}"
        if SLOPE not in wrong:
            return "velocity of another snapshot, or shifted"
        ratio, scale = values[SLOPE] / TYPICAL_SLOPE, 1 + float(self.simulation["redshift"])
        hubble = float(self.simulation.get("cosmology_H0", 70)) / 100
        units = {"velocities in √a units (Gadget)": scale**0.5, "comoving velocities": scale, "velocities in m/s": 1e3}
        units |= {"box size in Mpc, not Mpc/h": hubble, "box size in kpc/h, not Mpc/h": 1e-3}
        near = [name for name, factor in units.items() if 1 / FACTOR < abs(ratio) / factor < FACTOR]
        return " or ".join(near) or "other units of velocities or lengths, or another redshift"

    def _gas_reason(self) -> str:
        """From the rotation, reflection and shift with which the gas fits the dark matter, if there is one."""
        dark, gas = (np.log(one.blocks[0]) - np.log(one.blocks[0]).mean() for one in self.species)
        found = []
        for order, signs in itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)):
            turned = gas.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]
            if turned.shape == dark.shape:
                fits = np.fft.irfftn(np.fft.rfftn(dark) * np.fft.rfftn(turned).conj(), dark.shape, (0, 1, 2))
                found.append((fits.max(), order, signs, np.unravel_index(fits.argmax(), fits.shape)))
        product, order, signs, place = max(found)
        shift = [int(part * side // count) for part, side, count in zip(place, self.shape, dark.shape, strict=True)]
        texts = [f"transposed to {', '.join('xyz'[axis] for axis in order)}"] if order != (0, 1, 2) else []
        texts += [f"reflected along {axis}" for axis, sign in zip("xyz", signs, strict=True) if sign < 0]
        texts += [f"shifted by {', '.join(map(str, shift))} cells"] if any(shift) else []
        fits_well = product > SIMILAR * np.linalg.norm(dark) * np.linalg.norm(gas)
        return f"gas {' and '.join(texts)}" if fits_well and texts else "gas of another snapshot"


def _products(*fields: np.ndarray) -> np.ndarray:
    """Sums of the products of 1 and fields of the same size."""
    rows = np.stack([np.ones(fields[0].size), *fields])  # float64
    return rows @ rows.T


def _covariance(products: np.ndarray) -> np.ndarray:
    """Covariances of the fields of `_products`, times their size."""
    return products[1:, 1:] - np.outer(products[0, 1:], products[0, 1:]) / products[0, 0]
