"""Particles: Lagrangian initial conditions, cloud-in-cell deposit and interpolation, kick and drift.

Lengths are in cells of the mesh and cell i is centered on coordinate i. Time is D, the linear growth factor (1 at
z = 0), and particle velocities are dx/dD: in the Zel'dovich approximation particles move on straight lines at constant
speed. Source: Hockney & Eastwood 1988.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

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
    split_rows,
)

# Particles are deposited in this number of slabs of the initial lattice, and slabs are summed in order, for any number
# of threads. The result is therefore bitwise independent of the number of threads.
SLABS = 16
CHUNK = 1 << 15  # particles; their indices and weights fit in a core's cache, and larger arrays cause page faults
TRACERS_PER_SIDE = 3  # points per cell side that carry the final mass; fewer cause ripples in deep voids
ROUNDING = 0.01  # cells
# Cells per axis that a particle contributes to. Forces use three: with two, a small displacement from the center of a
# cell moves the mass by half a cell, which the lattice of the start turns into noise.
CLOUD, TRIANGLE = 2, 3

Offset = tuple[float, float, float]


# --- particles ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Particles:
    """Particles of equal mass that start from the centers of the cells; float32, in cells."""

    displacement: np.ndarray  # [3, n, n, n], from the lattice site, not wrapped
    velocity: np.ndarray  # [3, n, n, n], dx/dD

    @property
    def grid(self) -> int:
        """Particles, and cells of the mesh, per side: n."""
        return self.displacement.shape[1]

    def positions(self, rows: slice, offset: Offset = (0.0, 0.0, 0.0)) -> np.ndarray:
        """Positions [3, points], not wrapped, of the lattice sites in these rows, shifted by `offset` sites."""
        positions = np.empty_like(self.displacement[:, rows])
        sites = np.arange(self.grid)
        for axis, part in enumerate(np.ix_(sites[rows], sites, sites)):
            site = (part + offset[axis]).astype(np.float32)
            np.add(_between(self.displacement[axis], rows, offset), site, out=positions[axis])
        return positions.reshape(3, -1)

    def extent(self, rows: slice) -> tuple[float, float]:
        """Lower and upper bound of x for these rows, the next row, and all points in between."""
        planes = [(row, self.displacement[0, row % self.grid]) for row in range(rows.start, rows.stop + 1)]
        lowest = min(row + float(plane.min()) for row, plane in planes)
        highest = max(row + float(plane.max()) for row, plane in planes)
        return lowest - ROUNDING, highest + ROUNDING

    def pieces(self, rows: slice) -> Iterator[slice]:
        """Yields these rows in pieces of about CHUNK particles."""
        step = max(1, CHUNK // self.grid**2)
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))


def _between(field: np.ndarray, rows: slice, offset: Offset) -> np.ndarray:
    """A periodic lattice field [n, n, n] interpolated at the sites of `rows` shifted by `offset`: [rows, n, n]."""
    part = field[rows]
    if offset[0]:
        following = field.take(np.arange(rows.start + 1, rows.stop + 1), axis=0, mode="wrap")
        part = part + np.float32(offset[0]) * (following - part)
    for axis in (1, 2):
        if offset[axis]:
            part = part + np.float32(offset[axis]) * (np.roll(part, -1, axis) - part)
    return part


def lpt_particles(modes: np.ndarray, start_growth: float, omega_m: float = 1.0, threads: int = 1) -> Particles:
    """Particles displaced by second-order Lagrangian perturbation theory (Scoccimarro 1998).

    x = q - D grad phi1 + D2 grad phi2, laplacian phi1 = delta, laplacian phi2 = sum_{i>j} (phi1,ii phi1,jj -
    phi1,ij^2), D2 = -3/7 D^2 omega_m^(-1/143). `modes` are the modes of delta at D = 1, `omega_m` is the value at the
    start.
    """
    n = len(modes)
    displacement, velocity = np.empty((3, n, n, n), np.float32), np.empty((3, n, n, n), np.float32)

    def second_derivative(i: int, j: int) -> np.ndarray:
        return backward(multiplied(modes, lambda *k: k[i] * k[j] * inverse_square(*k), threads), n, threads)

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

    second_growth = 3 / 7 * start_growth**2 * omega_m ** (-1 / 143)
    for axis in range(3):
        velocity[axis] = inverse_gradient(modes, axis, threads)
        second_order = inverse_gradient(source_modes, axis, threads)
        second_order *= np.float32(second_growth)
        np.multiply(velocity[axis], np.float32(start_growth), out=displacement[axis])
        displacement[axis] += second_order
        second_order *= np.float32(2 / start_growth)  # D2 grows as D^2
        velocity[axis] += second_order
    return Particles(displacement, velocity)


# --- mesh ---------------------------------------------------------------------------------------------------------


def _wrapped(cell: np.ndarray, grid: int) -> np.ndarray:
    """Integers stored as floats, as indices in [0, grid)."""
    return (cell - grid * np.floor(cell / grid)).astype(np.int64)


def _cloud(above: np.ndarray) -> tuple[np.ndarray, ...]:
    """Weights of two cells by the distance from the first one (cloud-in-cell)."""
    return 1 - above, above


def _triangle(beyond: np.ndarray) -> tuple[np.ndarray, ...]:
    """Weights of three cells by the distance from the middle one (triangular-shaped cloud)."""
    half = np.float32(0.5)
    return half * (half - beyond) ** 2, np.float32(0.75) - beyond * beyond, half * (half + beyond) ** 2


def _nearby(
    positions: np.ndarray, grid: int, base: int, rows: int, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields flat indices (int64) and weights (float32), each [particles], of the width^3 cells around every particle.

    The cells belong to `rows` rows, starting at row `base`, of a periodic mesh with `grid` cells per side.
    """
    indices, weights = [], []
    for axis, coordinate in enumerate(positions):
        lowest = np.floor(coordinate - np.float32(width / 2 - 1))
        beyond = coordinate - lowest
        weights.append(_cloud(beyond) if width == CLOUD else _triangle(beyond - 1))
        if axis == 0 and rows < grid:
            cell = (lowest - base).astype(np.int64)
        else:
            cell = _wrapped(lowest - base if axis == 0 else lowest, grid)
        stride, cells = grid ** (2 - axis), [cell]
        for _ in range(width - 1):
            cell = cell + 1
            if axis > 0 or rows == grid:
                cell[cell == grid] = 0
            cells.append(cell)
        indices.append([cell * stride for cell in cells])
    for i, j in itertools.product(range(width), repeat=2):
        plane, plane_weight = indices[0][i] + indices[1][j], weights[0][i] * weights[1][j]
        for k in range(width):
            yield plane + indices[2][k], plane_weight * weights[2][k]


def add_particles(
    mesh: torch.Tensor,
    positions: np.ndarray,
    values: Sequence[np.ndarray],
    grid: int,
    base: int = 0,
    width: int = TRIANGLE,
) -> None:
    """Adds particles at positions [3, particles], in cells, to rows of a periodic mesh that start at row `base`.

    Cloud-in-cell (Hockney & Eastwood 1981). `mesh` is [1 + len(values), rows * n * n]: the number of particles, and
    the sum of each of `values`, [particles].
    """
    rows = mesh.shape[1] // grid**2
    for start in range(0, positions.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        for index, weight in _nearby(positions[:, chunk], grid, base, rows, width):
            # torch's scatter_add_ is faster than np.bincount and np.add.at, and releases the GIL.
            for target, source in zip(mesh, [weight, *(weight * value[chunk] for value in values)], strict=True):
                target.scatter_add_(0, torch.from_numpy(index), torch.from_numpy(source))


def deposit(
    particles: Particles,
    threads: int = 1,
    velocity: Sequence[np.ndarray] = (),
    per_side: int = 1,
    width: int = TRIANGLE,
    progress: Progress | None = None,
) -> np.ndarray:
    """Density in units of the mean, and density times each of `velocity`, [1 + len(velocity), n, n, n] float32.

    Each particle is replaced by `per_side`^3 points, interpolated between it and its neighbors on the lattice.
    """
    grid, slabs = particles.grid, min(SLABS, particles.grid)
    fractions = [step / per_side for step in range(per_side)]

    def deposit_slab(rows: slice) -> tuple[int, np.ndarray]:
        """First row of the mesh that the slab touches, and its deposit on the rows from there on, [k, rows, n, n]."""
        lowest, highest = particles.extent(rows)
        base = math.floor(lowest - width / 2 + 1)
        touched = min(math.floor(highest - width / 2 + 1) - base + width, grid)
        window = torch.zeros(1 + len(velocity), touched * grid * grid)
        for piece in particles.pieces(rows):
            for offset in itertools.product(fractions, fractions, fractions):
                values = [_between(component, piece, offset).reshape(-1) for component in velocity]
                add_particles(window, particles.positions(piece, offset), values, grid, base, width)
        return base, window.numpy().reshape(len(window), touched, grid, grid)

    total = np.zeros((1 + len(velocity), grid, grid, grid), np.float32)
    deposits = in_order(deposit_slab, split_rows(grid, slabs), threads)
    for done, (base, window) in enumerate(deposits):
        for row in range(window.shape[1]):
            total[:, (base + row) % grid] += window[:, row]
        if progress:
            progress.advance(0, f"fields {done / slabs:.0%}")
    total *= np.float32((1 / per_side) ** 3)
    return total


def interpolate(fields: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Fields [k, n, n, n] interpolated to positions [3, particles]: [k, particles], weights as in `cic_deposit`."""
    grid = fields.shape[1]
    flat = fields.reshape(len(fields), -1)
    result = np.zeros((len(fields), positions.shape[1]), np.float32)
    for start in range(0, positions.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        for index, weight in _nearby(positions[:, chunk], grid, 0, grid, TRIANGLE):
            for field, out in zip(flat, result, strict=True):
                out[chunk] += weight * field.take(index, mode="clip")  # "clip" avoids the bounds check
    return result


def kick_and_drift(
    particles: Particles, force: np.ndarray, kept: float, gain: float, drift: float, threads: int
) -> None:
    """Sets v = kept v + gain g(x), then x = x + drift v, in place."""

    def work(rows: slice) -> None:
        for piece in particles.pieces(rows):
            pull = interpolate(force, particles.positions(piece))
            pull *= np.float32(gain)
            velocity = particles.velocity[:, piece]
            velocity *= np.float32(kept)
            velocity += pull.reshape(velocity.shape)
            particles.displacement[:, piece] += np.float32(drift) * velocity

    in_slabs(work, particles.grid, threads)


def mass_and_momentum(particles: Particles, threads: int = 1, progress: Progress | None = None) -> np.ndarray:
    """Density in units of the mean, and density times dx/dD: [4, n, n, n].

    The particles are vertices of a sheet that carries the mass (Abel, Hahn & Kaehler 2012; Hahn, Angulo & Abel 2015):
    points interpolated on the lattice between them are deposited, three per cell side, each with an equal share of the
    mass. If only the particles were deposited, the lattice and empty cells would be visible in voids.
    """
    return deposit(particles, threads, list(particles.velocity), TRACERS_PER_SIDE, CLOUD, progress)
