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

from utils.distributed.world import World
from utils.files import GIB
from utils.log import once_per_job
from utils.progress import Progress
from utils.volumes.attributes import CELL, Simulation
from utils.volumes.channels import DARK_MATTER, GAS, Channel
from utils.volumes.hdf5 import FieldReader, Volume, cells_text, slab_planes
from utils.volumes.storage import reading

FEWEST_CELLS = 24  # along each side
BLOCKS = 32  # along each side at most; their means are compared
START_BYTES = GIB  # read at the start of a run: of a larger volume, the last planes of each block
HIGHEST, TIED = 100.0, 1e-4  # no channel of a density is beyond it; share of values that have the same extreme
WAVES = np.array([wave for wave in itertools.product((-1, 0, 1), repeat=3) if 0 < np.dot(wave, wave) < 3])  # [18, 3]
SLOPE, FIT = "slope of -div v / (a H f) on the density contrast, longest waves", "correlation of these two"
GRADIENT = "correlation of -dv_i/dx_i with the log density, worst axis"
MOMENTUM, FACES = "slope of ln v² on the log density", "step from the last to the first plane / largest step inside"
DENSITIES, GROWTH = (
    "correlation of the log densities of gas and dark matter",
    "slope of the gas on the dark-matter density",
)
VELOCITIES, SPEEDS = "correlation of their velocities, worst component", "slope of the gas on the dark-matter velocity"
BOUNDS = {
    **{SLOPE: (0.7, 1.18), FIT: (0.93, 1.0), GRADIENT: (0.22, 1.0), MOMENTUM: (-0.5, 1.2), FACES: (0.0, 1.5)},
    **{DENSITIES: (0.65, 1.0), GROWTH: (0.9, 1.1), VELOCITIES: (0.9, 1.0), SPEEDS: (0.85, 1.15)},
}
TYPICAL_SLOPE, FACTOR = 0.93, 1.4  # a unit is named if it explains the slope within this factor
SIMILAR = 0.7  # correlation of the log densities of the blocks if the gas fits after a rotation or shift

log = once_per_job(__name__)


@dataclass(frozen=True)
class CrossCheck:
    """The statistics by name, and warnings."""

    name: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """A table; empty if nothing is known."""
        bounds = [(name, value, *BOUNDS[name]) for name, value in self.values.items()]
        rows = [f"  {name}: {value:.3g} (expected {low:g} to {high:g})" for name, value, low, high in bounds]
        return [f"cross-check of {self.name}:", *rows] if rows else []

    def log(self) -> None:
        """Logs both on rank 0; they are equal on all ranks."""
        if self.lines:
            log.info("\n".join(self.lines))
        for line in self.warnings:
            log.warning(line)


class _Species:
    """Sums over cells of the dark matter or the gas, which slabs and ranks add."""

    def __init__(self, stored: Any, channels: Sequence[Channel], edges: Sequence[np.ndarray]) -> None:
        """`channels` are the density and, if it is known, the velocity; `edges` those of the blocks along each axis."""
        self.stored, self.channels, self.edges = stored, channels, edges
        self.blocks = np.zeros((len(channels), *(len(part) - 1 for part in edges)))  # physical values
        # Steps from each plane to the next one along x, y and z, of the channels of the density and the velocity.
        self.steps = [np.zeros((2, part[-1])) for part in edges]
        self.moments = np.zeros(5)  # sums of 1, x, ln v², x², x ln v²; x is the channel of the density
        self.missing = np.zeros(3)  # values that stand for "no value": their number and sum; number of all values

    def add(self, planes: slice) -> None:
        """Adds some planes of one block."""
        values, side = self.stored[: len(self.channels), planes], self.edges[0][-1]
        after = self.stored[: len(self.channels), (stop := planes.stop % side) : stop + 1]
        block = np.searchsorted(self.edges[0], planes.start, "right") - 1
        for number, (channel, part) in enumerate(zip(self.channels, values, strict=True)):
            rows = np.add.reduceat(channel.to_physical(part), self.edges[2][:-1], 2, np.float64)
            self.blocks[number, block] += np.add.reduceat(rows, self.edges[1][:-1], 1).sum(axis=0)
            self._add_missing(channel, part)
            for axis, steps in enumerate(self.steps):
                last = after[number] if axis == 0 else part.take([0], axis)
                step = np.abs(np.diff(part, axis=axis, append=last)).sum(tuple({0, 1, 2} - {axis}), np.float64)
                steps[min(number, 1), planes if axis == 0 else slice(None)] += step
        if len(values) > 1:
            square = np.square(values[1:]).sum(axis=0)
            a, b = (part[square > 0].astype(np.float64) for part in (values[0], np.log(square + 1e-30)))
            self.moments += len(a), a.sum(), b.sum(), a @ a, a @ b

    def _add_missing(self, channel: Channel, part: np.ndarray) -> None:
        """Of a velocity, the cells that share the lowest or the highest value count."""
        low, high = part.min(), part.max()
        mask = np.abs(part) > HIGHEST if channel.is_log else (part == low) | (part == high)
        count = (np.count_nonzero(mask) - (0 if channel.is_log else 2)) if low < high else 0
        self.missing += count, count * part[mask].mean(dtype=np.float64) if count > 0 else 0, part.size

    def add_ranks(self, world: World, cells: np.ndarray) -> None:
        """Adds the sums of all ranks; blocks become means, the density's relative to the volume's."""
        arrays = [self.blocks, *self.steps, self.moments, self.missing]
        total = world.sum(torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))).numpy()
        for array, part in zip(arrays, np.split(total, np.cumsum([array.size for array in arrays])[:-1]), strict=True):
            array[...] = part.reshape(array.shape)
        self.blocks /= cells
        self.blocks[0] /= self.blocks[0].mean()

    @property
    def speed_slope(self) -> float:
        """Slope of ln v² on ln density over the cells."""
        count, a, b, square, product = self.moments
        return (count * product - a * b) / (count * square - a * a) / self.channels[0].scale

    def waves(self, centers: Sequence[np.ndarray]) -> np.ndarray:
        """Amplitudes of the density contrast and the velocity, [channels, 18]; `centers` of blocks in sides."""
        result = self.blocks - self.blocks.mean(axis=(1, 2, 3), keepdims=True)
        phases = [np.exp(-2j * np.pi * np.outer(WAVES[:, axis], part)) for axis, part in enumerate(centers)]
        waves: np.ndarray = np.einsum("cxyz,nx,ny,nz->cn", result, *phases, optimize=True) / result[0].size
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
    limit: bytes that all ranks read.
    """
    shape = volume.shape
    used: list[tuple[Any, Sequence[Channel]]] = []
    for stored, known, prefix in zip(fields, channels, (DARK_MATTER, GAS), strict=False):
        names = [f"{prefix}{name}" for name in ("density", "velocity x", "velocity y", "velocity z")]
        named = [channel for channel, name in zip(known, names, strict=False) if channel.name == name and channel.unit]
        if named and named[0].is_log and len(named) in (1, len(names)):
            used.append((stored, named))
    plane = 4 * shape[1] * shape[2] * sum(len(named) for _, named in used)
    chunked = any(hasattr(stored, "chunks") for stored, _ in used)  # one plane needs all planes of its chunks
    if not used or used[0][0] is not fields[0] or min(shape) < FEWEST_CELLS or (chunked and plane * shape[0] > limit):
        return CrossCheck()
    # A plane is read with the next one.
    counts = [
        int(min(BLOCKS, side, max(8, limit / (2 * plane)) if axis == 0 else side)) for axis, side in enumerate(shape)
    ]
    edges = [np.arange(count + 1) * side // count for count, side in zip(counts, shape, strict=True)]
    depth = int(min(shape[0], max(1, limit / (plane * counts[0]) - 1)))
    read = np.array([(max(first, end - depth), end) for first, end in itertools.pairwise(edges[0].tolist())])
    species = [_Species(stored, named, edges) for stored, named in used]
    with world.raise_together(), reading(volume.path), np.errstate(over="ignore"):
        _add_slabs(species, read, world, volume.path)
    cells = np.diff(read)[:, :, None] * np.diff(edges[1])[:, None] * np.diff(edges[2])
    for one in species:
        one.add_ranks(world, cells)
    pairs = [read, *(np.stack([part[:-1], part[1:]], axis=1) for part in edges[1:])]
    centers = [pair.sum(axis=1) / (2 * side) for pair, side in zip(pairs, shape, strict=True)]
    return _Comparison(species, centers, shape, volume.simulation, volume.periodic).check(volume.path)


def _add_slabs(species: Sequence[_Species], read: np.ndarray, world: World, path: str) -> None:
    """Adds this rank's share of the blocks."""
    blocks = read[world.rank :: world.size].tolist()
    with Progress(f"cross-check of {path}", len(blocks), "blocks of planes") as progress:
        for first, end in blocks:
            for part in slab_planes((end - first, *species[0].stored.shape[2:])):
                for one in species:
                    one.add(slice(first + part.start, first + part.stop))
            progress.advance()


@dataclass(frozen=True)
class _Comparison:
    """The statistics of a volume from the sums over its cells, and what is wrong."""

    species: Sequence[_Species]  # dark matter, and gas if it is known
    centers: Sequence[np.ndarray]  # of the blocks along each axis, in sides
    shape: tuple[int, int, int]
    simulation: Simulation
    periodic: bool

    def check(self, name: str) -> CrossCheck:
        name = f"{name}, {cells_text(self.shape)} cells"
        count, total, every = np.sum([one.missing for one in self.species], axis=0)
        if count > TIED * every:
            text = (
                f"{count:.0f} values of about {total / count:.5g} (in units of the channels) seem to stand for no value"
            )
            return CrossCheck(name, {}, [f"{name}: {text}; fill or cut out these cells"])
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {name: float(value) for name, value in self._values().items() if np.isfinite(value)}
        wrong = [name for name, value in values.items() if not BOUNDS[name][0] <= value <= BOUNDS[name][1]]
        if FACES in wrong:  # waves are then no waves
            wrong = [name for name in wrong if name not in (SLOPE, FIT)]
        reasons: dict[str, list[str]] = {}
        for statistic in wrong:
            low, high = BOUNDS[statistic]
            text = f"{statistic} is {values[statistic]:.3g}, expected {low:g} to {high:g}"
            reasons.setdefault(self._reason(statistic, values, wrong), []).append(text)
        return CrossCheck(name, values, [f"{name}: {reason}? {'; '.join(found)}" for reason, found in reasons.items()])

    def _values(self) -> dict[str, float]:
        """The statistics that the volume allows."""
        dark, flow = self.species[0], self._flow
        values: dict[str, Any] = {}
        waves = [one.waves(self.centers) for one in self.species]
        if flow is not None:
            divergence = self._divergence(waves[self.species.index(flow)][1:])
            if divergence is not None and self.periodic:
                values |= {SLOPE: _slope(divergence, waves[0][0]), FIT: _correlation(divergence, waves[0][0])}
            values[GRADIENT] = self._gradients.diagonal().min()
            values[MOMENTUM] = max(one.speed_slope for one in self.species if len(one.channels) > 1)
        if len(waves) > 1:
            logs = [np.log(one.blocks[0]).ravel() for one in self.species]
            (dark_waves, *dark_flow), (gas_waves, *gas_flow) = waves
            values |= {DENSITIES: np.corrcoef(*logs)[0, 1], GROWTH: _slope(gas_waves, dark_waves)}
            if dark_flow and gas_flow:
                values[VELOCITIES] = min(map(_correlation, gas_flow, dark_flow))
                values[SPEEDS] = _slope(np.array(gas_flow), np.array(dark_flow))
        if self.periodic:
            values[FACES] = np.nanmax([steps[:, -1] / steps[:, :-1].max(axis=1) for steps in dark.steps])
        return values

    @property
    def _flow(self) -> _Species | None:
        """The species whose velocity is compared with the density of the dark matter."""
        return next((one for one in self.species if len(one.channels) > 1), None)

    def _divergence(self, velocity: np.ndarray) -> np.ndarray | None:
        """−div v / (a H f), from waves of the velocity; None if cosmology, redshift or size of a cell are unknown."""
        matter, redshift, cell = (self.simulation.get(key) for key in ("cosmology_Om0", "redshift", CELL))
        if not (isinstance(matter, float) and isinstance(redshift, float) and isinstance(cell, float)):
            return None
        vacuum = float(self.simulation.get("cosmology_Ode0", 1 - matter))
        square = matter * (1 + redshift) ** 3 + (1 - matter - vacuum) * (1 + redshift) ** 2 + vacuum  # (H / H0)²
        growth = (matter * (1 + redshift) ** 3 / square) ** 0.55  # f, Linder 2005, Phys. Rev. D 72, 043529
        unit = 100 * math.sqrt(square) / (1 + redshift) * growth  # a H f in km/s per comoving Mpc/h
        wavenumbers = 2 * math.pi * WAVES / (np.array(self.shape) * cell)
        divergence: np.ndarray = -1j * np.einsum("cn,nc->n", velocity, wavenumbers) / unit
        return divergence

    @cached_property
    def _gradients(self) -> np.ndarray:
        """Correlation of −dv_j/dx_i, from block to block, with the log density: [i, j]."""
        assert self._flow is not None
        result, density = np.zeros((3, 3)), np.log(self.species[0].blocks[0])
        for axis, component in itertools.product(range(3), repeat=2):
            middle = density.take(range(1, density.shape[axis]), axis) + density.take(
                range(density.shape[axis] - 1), axis
            )
            step = -np.diff(self._flow.blocks[1 + component], axis=axis)
            result[axis, component] = np.corrcoef(step.ravel(), middle.ravel())[0, 1]
        return result

    def _reason(self, statistic: str, values: Mapping[str, float], wrong: Sequence[str]) -> str:
        """The mistake that looks like a statistic beyond its bounds."""
        if statistic == FACES:
            return "a part cut out of a box (then set its attribute periodic to false)"
        if statistic in (DENSITIES, GROWTH, VELOCITIES, SPEEDS):
            if DENSITIES in wrong:
                return self._gas_reason()
            if GROWTH in wrong:
                return "gas and dark matter of one simulation at two redshifts"
            if VELOCITIES in wrong:
                return "components of one velocity swapped or of the wrong sign"
        if MOMENTUM in wrong:
            return "momentum in place of velocity"
        if statistic == SPEEDS:
            return "velocities of gas and dark matter in different units"
        return self._velocity_reason(values, wrong)

    def _velocity_reason(self, values: Mapping[str, float], wrong: Sequence[str]) -> str:
        gradients = self._gradients
        order = max(itertools.permutations(range(3)), key=lambda order: np.abs(gradients[range(3), order]).sum())
        flipped = [axis for axis, component in zip("xyz", gradients[range(3), order], strict=True) if component < 0]
        if order != (0, 1, 2):
            swapped = " and ".join(axis for axis, place in zip("xyz", order, strict=True) if "xyz"[place] != axis)
            return (
                f"velocity components {swapped} swapped, or the grids of all fields in Fortran order (x and z swapped)"
            )
        if flipped:
            return f"wrong sign of the velocity along {', '.join(flipped)}"
        if SLOPE not in wrong:
            return "velocity of another snapshot, or shifted"
        ratio, scale = values[SLOPE] / TYPICAL_SLOPE, 1 + float(self.simulation["redshift"])
        hubble = float(self.simulation.get("cosmology_H0", 70)) / 100
        units = {"velocities in √a units (Gadget)": scale**0.5, "comoving velocities": scale}
        units |= {"velocities times √a": scale**-0.5, "velocities times a": 1 / scale}
        units |= {"box size in Mpc, not Mpc/h": hubble, "box size times h": 1 / hubble}
        units |= {"box size in kpc/h, not Mpc/h": 1e-3, "velocities in m/s": 1e3, "velocities in cm/s": 1e5}
        near = [name for name, factor in units.items() if abs(math.log(abs(ratio) / factor)) < math.log(FACTOR)]
        return " or ".join(near) or "other units of velocities or lengths, or another redshift"

    def _gas_reason(self) -> str:
        """Looks for the rotation, reflection and shift with which the gas fits the dark matter."""
        dark, gas = (np.log(one.blocks[0]) for one in self.species)
        found = []
        for order, signs in itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)):
            turned = gas.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]
            if turned.shape == dark.shape:
                fits = np.fft.irfftn(
                    np.fft.rfftn(dark - dark.mean()) * np.fft.rfftn(turned).conj(), dark.shape, (0, 1, 2)
                )
                place = np.unravel_index(fits.argmax(), fits.shape)
                found.append((fits.max() / (dark.size * dark.std() * gas.std()), order, signs, place))
        correlation, order, signs, place = max(found)
        if correlation < SIMILAR:
            return "gas of another snapshot"
        reflected = [axis for axis, sign in zip("xyz", signs, strict=True) if sign < 0]
        shift = [int(part * side // count) for part, side, count in zip(place, self.shape, dark.shape, strict=True)]
        texts = [f"transposed to {', '.join('xyz'[axis] for axis in order)}"] if order != (0, 1, 2) else []
        texts += [f"reflected along {', '.join(reflected)}"] if reflected else []
        texts += [f"shifted by {', '.join(map(str, shift))} cells"] if max(shift) > 0 else []
        return f"gas {' and '.join(texts) or 'of another snapshot'}"


def _slope(dependent: np.ndarray, independent: np.ndarray) -> float:
    return float(np.vdot(independent, dependent).real / np.vdot(independent, independent).real)


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.vdot(first, second).real / (np.linalg.norm(first) * np.linalg.norm(second)))
