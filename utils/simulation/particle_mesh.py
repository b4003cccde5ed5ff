"""Particle mesh: cloud-in-cell deposit and interpolation, FFT gravity, kick and drift, Lagrangian initial conditions.

Lengths are in cells of the mesh and cell i is centred on coordinate i. Time is D, the linear growth factor (1 at
z = 0), and particle velocities are dx/dD: in the Zel'dovich approximation particles move on straight lines at constant
speed. Source: Hockney & Eastwood 1988.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from utils.progress import Progress
from utils.simulation.fourier import (
    backward,
    forward,
    in_order,
    in_slabs,
    inverse_gradient,
    inverse_square,
    multiplied,
    slab,
)
from utils.simulation.linear_theory import GrowthClock

# Particles are deposited in this number of slabs of the initial lattice, and slabs are summed in order, for any number
# of threads. The result is therefore bitwise independent of the number of threads.
SLABS = 16
CHUNK = 1 << 15  # particles; their indices and weights fit in a core's cache, and larger arrays cause page faults
TRACERS_PER_CELL_SIDE = 3  # points that carry the final mass; fewer points cause ripples in deep voids


# --- particles ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Particles:
    """Particles of equal mass that start from a cubic lattice; float32, in cells of the mesh."""

    displacement: np.ndarray  # [3, p, p, p], from the lattice site, not wrapped
    velocity: np.ndarray  # [3, p, p, p], dx/dD
    grid: int  # cells per side of the mesh

    @property
    def side(self) -> int:
        """Particles per side, p."""
        return self.displacement.shape[1]

    def lattice(self, rows: slice, offset: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> list[np.ndarray]:
        """x [rows, 1, 1], y [1, p, 1], z [1, 1, p] of lattice sites, shifted by `offset` sites."""
        spacing = self.grid / self.side
        sites = np.arange(self.side)
        shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
        return [
            ((part + shift) * spacing).astype(np.float32).reshape(shape)
            for part, shift, shape in zip((sites[rows], sites, sites), offset, shapes, strict=True)
        ]

    def positions(self, rows: slice) -> np.ndarray:
        """Positions of the particles in these rows of the lattice, [3, particles]; may lie outside the box."""
        positions = np.empty_like(self.displacement[:, rows])
        for axis, site in enumerate(self.lattice(rows)):
            np.add(self.displacement[axis, rows], site, out=positions[axis])
        return positions.reshape(3, -1)

    def extent(self, rows: slice) -> tuple[float, float]:
        """Lower and upper bound of x for these rows, the next row, and all points in between."""
        planes = [(row, self.displacement[0, row % self.side]) for row in range(rows.start, rows.stop + 1)]
        spacing, rounding = self.grid / self.side, 0.01
        lowest = min(row * spacing + float(plane.min()) for row, plane in planes)
        highest = max(row * spacing + float(plane.max()) for row, plane in planes)
        return lowest - rounding, highest + rounding

    def pieces(self, rows: slice) -> Iterator[slice]:
        """Yields these rows in pieces of about CHUNK particles."""
        step = max(1, CHUNK // self.side**2)
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))


def lpt_particles(
    modes: np.ndarray, grid: int, start_growth: float, omega_m: float = 1.0, threads: int = 1
) -> Particles:
    """Particles displaced by second-order Lagrangian perturbation theory (Scoccimarro 1998).

    x = q - D grad phi1 + D2 grad phi2, laplacian phi1 = delta, laplacian phi2 = sum_{i>j} (phi1,ii phi1,jj -
    phi1,ij^2), D2 = -3/7 D^2 omega_m^(-1/143). `modes` are the modes of delta at D = 1, `omega_m` is the value at the
    start.
    """
    p = len(modes)
    displacement, velocity = np.empty((3, p, p, p), np.float32), np.empty((3, p, p, p), np.float32)

    def second_derivative(i: int, j: int) -> np.ndarray:
        return backward(multiplied(modes, lambda *k: k[i] * k[j] * inverse_square(*k), threads), p, threads)

    # Each product is added at once: two fields in memory in addition to the sum, instead of six.
    first, second = second_derivative(0, 0), second_derivative(1, 1)
    source = first * second
    first += second
    del second
    source += first * second_derivative(2, 2)
    del first
    for i, j in ((0, 1), (0, 2), (1, 2)):
        mixed = second_derivative(i, j)
        source -= mixed * mixed
        del mixed
    source_modes = forward(source, threads)
    del source

    spacing = np.float32(grid / p)  # from cells of the lattice to cells of the mesh
    second_growth = 3 / 7 * start_growth**2 * omega_m ** (-1 / 143)
    for axis in range(3):
        velocity[axis] = inverse_gradient(modes, axis, threads)
        second_order = inverse_gradient(source_modes, axis, threads)
        velocity[axis] *= spacing
        second_order *= spacing * np.float32(second_growth)
        np.multiply(velocity[axis], np.float32(start_growth), out=displacement[axis])
        displacement[axis] += second_order
        second_order *= np.float32(2 / start_growth)  # D2 grows as D^2
        velocity[axis] += second_order
    return Particles(displacement, velocity, grid)


# --- mesh ---------------------------------------------------------------------------------------------------------


def _wrapped(cell: np.ndarray, grid: int) -> np.ndarray:
    """Integers stored as floats, as indices in [0, grid)."""
    return (cell - grid * np.floor(cell / grid)).astype(np.int64)


def _corners(positions: np.ndarray, grid: int, base: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields flat indices (int64) and weights (float32), each [particles], of the eight cells around every particle.

    The cells belong to `rows` rows, starting at row `base`, of a periodic mesh with `grid` cells per side.
    """
    lower_upper, weights = [], []
    for axis, coordinate in enumerate(positions):
        cell = np.floor(coordinate)
        above = coordinate - cell
        weights.append((1 - above, above))
        if axis == 0 and rows < grid:
            lower = (cell - base).astype(np.int64)
            upper = lower + 1
        else:
            lower = _wrapped(cell - base if axis == 0 else cell, grid)
            upper = lower + 1
            upper[upper == grid] = 0
        stride = grid ** (2 - axis)
        lower *= stride
        upper *= stride
        lower_upper.append((lower, upper))
    for i in range(2):
        for j in range(2):
            plane = lower_upper[0][i] + lower_upper[1][j]
            plane_weight = weights[0][i] * weights[1][j]
            for k in range(2):
                yield plane + lower_upper[2][k], plane_weight * weights[2][k]


Piece = tuple[np.ndarray, Sequence[np.ndarray | None]]  # positions [3, particles], values each [particles] or None
Block = tuple[float, float, Iterable[Piece]]  # bounds of x, and pieces


def _deposit_block(block: Block, grid: int, quantities: int) -> tuple[int, np.ndarray]:
    """First row that a block of particles touches, and its deposit on the rows from there on, [k, rows, n, n]."""
    lowest, highest, pieces = block
    base = math.floor(lowest)
    rows = min(math.floor(highest) - base + 2, grid)
    window = torch.zeros(quantities, rows * grid * grid)
    for positions, values in pieces:
        for start in range(0, positions.shape[1], CHUNK):
            chunk = slice(start, start + CHUNK)
            for index, weight in _corners(positions[:, chunk], grid, base, rows):
                # torch's scatter_add_ is faster than np.bincount and np.add.at, and releases the GIL.
                for target, value in zip(window, values, strict=True):
                    source = weight if value is None else weight * value[chunk]
                    target.scatter_add_(0, torch.from_numpy(index), torch.from_numpy(source))
    return base, window.numpy().reshape(quantities, rows, grid, grid)


def deposit_blocks(
    make_block: Callable[[int], Block],
    blocks: int,
    grid: int,
    quantities: int,
    threads: int,
    progress: Progress | None = None,
) -> np.ndarray:
    """Sum of the cloud-in-cell deposits of all blocks, [quantities, n, n, n] float32; blocks are added in order."""
    total = np.zeros((quantities, grid, grid, grid), np.float32)
    deposits = in_order(lambda index: _deposit_block(make_block(index), grid, quantities), blocks, threads)
    for done, (base, window) in enumerate(deposits):
        for row in range(window.shape[1]):
            total[:, (base + row) % grid] += window[:, row]
        if progress:
            progress.advance(0, f"fields {done / blocks:.0%}")
    return total


def cic_deposit(
    positions: np.ndarray, grid: int, values: Sequence[np.ndarray | None] = (None,), threads: int = 1
) -> np.ndarray:
    """Cloud-in-cell deposit (Hockney & Eastwood 1981) of particles at positions [3, particles], in cells.

    Each of `values` is [particles] or None for ones; the result is [len(values), n, n, n]. The mesh is periodic.
    """

    count = positions.shape[1]
    blocks = min(SLABS, count)

    def block(index: int) -> Block:
        part = slab(index, count, blocks)
        x = positions[0, part]
        return x.min(), x.max(), [(positions[:, part], [None if value is None else value[part] for value in values])]

    return deposit_blocks(block, blocks, grid, len(values), threads)


def cic_interpolate(fields: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Fields [k, n, n, n] interpolated to positions [3, particles]: [k, particles], weights as in `cic_deposit`."""
    grid = fields.shape[1]
    flat = fields.reshape(len(fields), -1)
    result = np.zeros((len(fields), positions.shape[1]), np.float32)
    for start in range(0, positions.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        for index, weight in _corners(positions[:, chunk], grid, 0, grid):
            for field, out in zip(flat, result, strict=True):
                out[chunk] += weight * field.take(index, mode="clip")  # "clip" avoids the bounds check
    return result


def mesh_density(particles: Particles, threads: int = 1) -> np.ndarray:
    """Density in units of the mean, [n, n, n]."""

    blocks = min(SLABS, particles.side)

    def block(index: int) -> Block:
        rows = slab(index, particles.side, blocks)
        return *particles.extent(rows), ((particles.positions(piece), (None,)) for piece in particles.pieces(rows))

    density = deposit_blocks(block, blocks, particles.grid, 1, threads)[0]
    density *= np.float32((particles.grid / particles.side) ** 3)
    return density


def gravity(density: np.ndarray, threads: int = 1) -> np.ndarray:
    """g = -grad laplacian^-1 delta on the mesh, [3, n, n, n], in cells.

    The potential is computed in Fourier space, its gradient is a four-point difference. Both are antisymmetric under
    exchange of two cells, so with the same CIC for mass and force the total momentum of the particles is conserved
    (Hockney & Eastwood 1981). Applying CIC twice weakens the force by prod sinc^4(k_i / 2) = 1 - k^2 / 6 + ...;
    1 / k^2 + 1 / 6 corrects the first term, while a full division would amplify the noise near Nyquist.
    """
    n, sharpening = len(density), np.float32(1 / 6)
    potential = backward(
        multiplied(forward(density, threads), lambda *k: -inverse_square(*k) - sharpening, threads), n, threads
    )
    field = np.empty((3, n, n, n), np.float32)

    def work(rows: slice) -> None:
        around = potential.take(np.arange(rows.start - 2, rows.stop + 2), axis=0, mode="wrap")
        centre = around[2:-2]
        near, far = np.float32(-8 / 12), np.float32(1 / 12)
        for axis in range(3):
            if axis == 0:
                steps = [around[2 + step : len(around) - 2 + step] for step in (1, -1, 2, -2)]
            else:
                steps = [np.roll(centre, -step, axis) for step in (1, -1, 2, -2)]
            field[axis, rows] = near * (steps[0] - steps[1]) + far * (steps[2] - steps[3])

    in_slabs(work, n, threads)
    return field


def kick_and_drift(
    particles: Particles, force: np.ndarray, kept: float, gain: float, drift: float, threads: int
) -> None:
    """Sets v = kept v + gain g(x), then x = x + drift v, in place."""

    def work(rows: slice) -> None:
        for piece in particles.pieces(rows):
            pull = cic_interpolate(force, particles.positions(piece))
            pull *= np.float32(gain)
            velocity = particles.velocity[:, piece]
            velocity *= np.float32(kept)
            velocity += pull.reshape(velocity.shape)
            particles.displacement[:, piece] += np.float32(drift) * velocity

    in_slabs(work, particles.side, threads)


def evolve(particles: Particles, clock: GrowthClock, threads: int = 1, progress: Progress | None = None) -> None:
    """Integrates by kick-drift-kick from clock.times[0] to clock.times[-1], in place.

    The half kicks at the end of one step and the start of the next have the same force and are combined.
    """
    times = clock.times
    for step, now in enumerate(times):
        start = now if step == 0 else 0.5 * (times[step - 1] + now)
        last = step == len(times) - 1
        end, drift = (now, 0.0) if last else (0.5 * (now + times[step + 1]), times[step + 1] - now)
        kept = clock.velocity_kept(start, end)
        force = gravity(mesh_density(particles, threads), threads)
        kick_and_drift(particles, force, kept, (1 - kept) / now, drift, threads)
        if progress and not last:
            progress.advance(1, f"z = {clock.redshift(times[step + 1]):.1f}")


def _between(field: np.ndarray, rows: slice, offset: tuple[float, float, float]) -> np.ndarray:
    """A periodic lattice field [p, p, p] interpolated at the sites of `rows` shifted by `offset`: [rows, p, p]."""
    part = field[rows]
    if offset[0]:
        following = field.take(np.arange(rows.start + 1, rows.stop + 1), axis=0, mode="wrap")
        part = part + np.float32(offset[0]) * (following - part)
    for axis in (1, 2):
        if offset[axis]:
            part = part + np.float32(offset[axis]) * (np.roll(part, -1, axis) - part)
    return part


def mass_and_momentum(particles: Particles, threads: int = 1, progress: Progress | None = None) -> np.ndarray:
    """Density in units of the mean, and density times dx/dD: [4, n, n, n].

    The particles are vertices of a sheet that carries the mass (Abel, Hahn & Kaehler 2012; Hahn, Angulo & Abel 2015):
    points interpolated on the lattice between them are deposited, at least three per cell side, each with an equal
    share of the mass. If only the particles were deposited, the lattice and empty cells would be visible in voids.
    """
    per_side = max(1, math.ceil(TRACERS_PER_CELL_SIDE * particles.grid / particles.side))
    fractions = [step / per_side for step in range(per_side)]
    offsets = [(x, y, z) for x in fractions for y in fractions for z in fractions]
    mass = np.float32((particles.grid / (particles.side * per_side)) ** 3)
    blocks = min(SLABS, particles.side)

    def tracers(rows: slice, offset: tuple[float, float, float]) -> Piece:
        positions = np.empty_like(particles.displacement[:, rows])
        for axis, site in enumerate(particles.lattice(rows, offset)):
            np.add(_between(particles.displacement[axis], rows, offset), site, out=positions[axis])
        velocity = [_between(component, rows, offset).reshape(-1) for component in particles.velocity]
        return positions.reshape(3, -1), (None, *velocity)

    def block(index: int) -> Block:
        rows = slab(index, particles.side, blocks)
        return *particles.extent(rows), (
            tracers(piece, offset) for piece in particles.pieces(rows) for offset in offsets
        )

    fields = deposit_blocks(block, blocks, particles.grid, 4, threads, progress)
    fields *= mass
    return fields
