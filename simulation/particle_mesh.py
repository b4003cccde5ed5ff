"""Particles: Lagrangian initial conditions, deposit and interpolation as clouds, kick and drift.

Lengths are in cells of the mesh and cell i is centered on coordinate i. Time is D, the linear growth factor (1 at
z = 0), and particle velocities are dx/dD: in the Zel'dovich approximation particles move on straight lines at constant
speed. Source: Hockney & Eastwood 1988.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from simulation.fourier import backward, forward, in_order, in_slabs, inverse_square, multiplied, split_rows
from utils.progress import Progress

# Particles are deposited in this number of slabs of the initial lattice, and slabs are summed in order, for any number
# of threads. The result is therefore bitwise independent of the number of threads.
SLABS = {"cpu": 16, "cuda": 1}
# Particles at once; on a CPU their indices and weights fit in a core's cache, and larger arrays cause page faults.
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 23}
TRACERS_PER_SIDE = 3  # points per cell side that carry the final mass; fewer cause ripples in deep voids
ROUNDING = 0.01  # cells
# Cells per axis that a particle contributes to. Forces use three: with two, a small displacement from the center of a
# cell moves the mass by half a cell, which the lattice of the start turns into noise.
CLOUD, TRIANGLE = 2, 3

Offset = tuple[float, float, float]


@dataclasses.dataclass
class Particles:
    """Particles of equal mass that start from the centers of the cells; float32, in cells."""

    displacement: Tensor  # [3, n, n, n], from the lattice site, not wrapped
    velocity: Tensor  # [3, n, n, n], dx/dD

    @property
    def grid(self) -> int:
        """Particles, and cells of the mesh, per side: n."""
        return self.displacement.shape[1]

    def positions(self, rows: slice, offset: Offset = (0.0, 0.0, 0.0)) -> Tensor:
        """Positions [3, points], not wrapped, of the lattice sites in these rows, shifted by `offset` sites."""
        positions = torch.empty_like(self.displacement[:, rows])
        sites = torch.arange(self.grid, dtype=torch.float32, device=positions.device)
        for axis, part in enumerate((sites[rows, None, None], sites[:, None], sites)):
            torch.add(_between(self.displacement[axis], rows, offset), part + offset[axis], out=positions[axis])
        return positions.view(3, -1)

    def extents(self) -> tuple[list[float], list[float]]:
        """Lower and upper bounds of x for each row, the next row, and all points in between."""
        site = torch.arange(self.grid, device=self.displacement.device)
        lowest, highest = (find((1, 2)) for find in (self.displacement[0].amin, self.displacement[0].amax))
        lowest = torch.minimum(lowest, lowest.roll(-1) + 1) + site - ROUNDING
        highest = torch.maximum(highest, highest.roll(-1) + 1) + site + ROUNDING
        return lowest.tolist(), highest.tolist()

    def pieces(self, rows: slice) -> Iterator[slice]:
        """Yields these rows in pieces of about CHUNK particles."""
        step = max(1, CHUNK[self.displacement.device.type] // self.grid**2)
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))


def _between(field: Tensor, rows: slice, offset: Offset) -> Tensor:
    """A periodic lattice field [n, n, n] interpolated at the sites of `rows` shifted by `offset`: [rows, n, n]."""
    part = field[rows]
    if offset[0]:
        following = torch.arange(rows.start + 1, rows.stop + 1, device=field.device) % len(field)
        part = torch.lerp(part, field[following], offset[0])
    for axis in (1, 2):
        if offset[axis]:
            part = torch.lerp(part, part.roll(-1, axis), offset[axis])
    return part


def inverse_gradient(modes: Tensor, axis: int, threads: int) -> Tensor:
    """Component `axis` of -grad laplacian^-1 of the field with these modes, [n, n, n], in cells."""
    n = len(modes)

    def factor(*k: Tensor) -> Tensor:
        # An odd derivative of the Nyquist wave is not a real field and is set to zero.
        along = k[axis].masked_fill(k[axis].abs() > math.pi * (1 - 0.5 / n), 0) if n % 2 == 0 else k[axis]
        return 1j * (along * inverse_square(*k))

    return backward(multiplied(modes, factor, threads), threads)


def lpt_particles(modes: Tensor, start_growth: float, omega_m: float = 1.0, threads: int = 1) -> Particles:
    """Particles displaced by second-order Lagrangian perturbation theory (Scoccimarro 1998).

    x = q - D grad phi1 + D2 grad phi2, laplacian phi1 = delta, laplacian phi2 = sum_{i>j} (phi1,ii phi1,jj -
    phi1,ij^2), D2 = -3/7 D^2 omega_m^(-1/143). `modes` are the modes of delta at D = 1, `omega_m` is the value at the
    start.
    """

    def second_derivative(i: int, j: int) -> Tensor:
        return backward(multiplied(modes, lambda *k: k[i] * k[j] * inverse_square(*k), threads), threads)

    # Each product is added at once: two fields in memory in addition to the sum, instead of six.
    first, second = second_derivative(0, 0), second_derivative(1, 1)
    source = first * second
    source.addcmul_(first.add_(second), second_derivative(2, 2))
    del first, second
    for i, j in ((0, 1), (0, 2), (1, 2)):
        mixed = second_derivative(i, j)
        source.addcmul_(mixed, mixed, value=-1)
        del mixed
    source_modes = forward(source, threads)
    del source

    second_growth = 3 / 7 * start_growth**2 * omega_m ** (-1 / 143)
    displacement, velocity = (torch.empty(3, *[len(modes)] * 3, device=modes.device) for _ in range(2))
    for axis in range(3):
        velocity[axis] = inverse_gradient(modes, axis, threads)
        second_order = inverse_gradient(source_modes, axis, threads).mul_(second_growth)
        torch.add(second_order, velocity[axis], alpha=start_growth, out=displacement[axis])
        velocity[axis].add_(second_order, alpha=2 / start_growth)  # D2 grows as D^2
    return Particles(displacement, velocity)


def _weights(beyond: Tensor, width: int) -> tuple[Tensor, ...]:
    """Weights of two cells (cloud-in-cell) or three (triangular-shaped cloud) by the distance from the first one."""
    if width == CLOUD:
        return 1 - beyond, beyond
    beyond = beyond - 1
    return 0.5 * (0.5 - beyond).square_(), 0.75 - beyond * beyond, 0.5 * (0.5 + beyond).square_()


def _nearby(positions: Tensor, grid: int, base: int, rows: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields flat indices (int32) and weights (float32), each [particles], of the width^3 cells around every particle.

    Both are rewritten for the next cell: new memory would cost as much time as the arithmetic. The cells belong to
    `rows` rows, starting at row `base`, of a periodic mesh with `grid` cells per side.
    """
    indices, weights = [], []
    for axis, coordinate in enumerate(positions):
        lowest = torch.floor(coordinate - (width / 2 - 1))
        weights.append(_weights(coordinate - lowest, width))
        cells = [lowest + (step - (base if axis == 0 else 0)) for step in range(width)]
        if axis > 0 or rows == grid:
            cells = [torch.sub(cell, torch.floor(cell / grid), alpha=grid) for cell in cells]  # integers in [0, grid)
        indices.append([cell.int() * grid ** (2 - axis) for cell in cells])  # int32 is three times as fast as int64
    plane, plane_weight = torch.empty_like(indices[0][0]), torch.empty_like(weights[0][0])
    index, weight = torch.empty_like(plane), torch.empty_like(plane_weight)
    for i, j in itertools.product(range(width), repeat=2):
        torch.add(indices[0][i], indices[1][j], out=plane)
        torch.mul(weights[0][i], weights[1][j], out=plane_weight)
        for k in range(width):
            yield torch.add(plane, indices[2][k], out=index), torch.mul(plane_weight, weights[2][k], out=weight)


def add_particles(mesh: Tensor, positions: Tensor, values: Sequence[Tensor], grid: int, base: int, width: int) -> None:
    """Adds particles at positions [3, particles], in cells, to rows of a periodic mesh that start at row `base`.

    Each is a cloud of `width` cells per axis (Hockney & Eastwood 1981). `mesh` is [1 + len(values), rows * n * n]: the
    number of particles, and the sum of each of `values`, [particles].
    """
    rows, size = mesh.shape[1] // grid**2, CHUNK[mesh.device.type]
    for start in range(0, positions.shape[1], size):
        chunk = slice(start, start + size)
        part = torch.empty_like(positions[0, chunk])
        place = torch.empty_like(part, dtype=torch.int64)
        for index, weight in _nearby(positions[:, chunk], grid, base, rows, width):
            place.copy_(index)
            for target, value in zip(mesh, (None, *values), strict=True):
                source = weight if value is None else torch.mul(weight, value[chunk], out=part)
                if mesh.is_cuda:  # sorts the indices; atomic additions would vary from run to run
                    target.index_put_((place,), source, accumulate=True)
                else:
                    target.scatter_add_(0, place, source)


def deposit(
    particles: Particles,
    threads: int = 1,
    velocity: Sequence[Tensor] = (),
    per_side: int = 1,
    width: int = TRIANGLE,
    progress: Progress | None = None,
) -> Tensor:
    """Density in units of the mean, and density times each of `velocity`, [1 + len(velocity), n, n, n] float32.

    Each particle is replaced by `per_side`^3 points, interpolated between it and its neighbors on the lattice: it is a
    vertex of a sheet that carries the mass (Abel, Hahn & Kaehler 2012; Hahn, Angulo & Abel 2015). If only the particles
    were deposited, the lattice and empty cells would be visible in voids.
    """
    grid, device = particles.grid, particles.displacement.device
    slabs = min(SLABS[device.type], grid)
    fractions = [step / per_side for step in range(per_side)]
    lowest, highest = particles.extents()

    def deposit_slab(rows: slice) -> tuple[int, Tensor]:
        """First row of the mesh that the slab touches, and its deposit on the rows from there on, [k, rows, n, n]."""
        base = math.floor(min(lowest[rows]) - width / 2 + 1)
        touched = min(math.floor(max(highest[rows]) - width / 2 + 1) - base + width, grid)
        window = torch.zeros(1 + len(velocity), touched * grid * grid, device=device)
        for piece in particles.pieces(rows):
            for offset in itertools.product(fractions, fractions, fractions):
                values = [_between(component, piece, offset).reshape(-1) for component in velocity]
                add_particles(window, particles.positions(piece, offset), values, grid, base, width)
        return base, window.view(len(window), touched, grid, grid)

    total = torch.zeros(1 + len(velocity), grid, grid, grid, device=device)
    for done, (base, window) in enumerate(in_order(deposit_slab, split_rows(grid, slabs), threads)):
        for row in range(window.shape[1]):
            total[:, (base + row) % grid] += window[:, row]
        if progress:
            progress.advance(0, f"fields {done / slabs:.0%}")
    return total.mul_((1 / per_side) ** 3)


def interpolate(fields: Tensor, positions: Tensor) -> Tensor:
    """Fields [k, n, n, n] interpolated to positions [3, particles]: [k, particles], weights as in `deposit`."""
    grid, size = fields.shape[1], CHUNK[fields.device.type]
    flat = fields.reshape(len(fields), -1)
    result = torch.zeros(len(fields), positions.shape[1], device=fields.device)
    for start in range(0, positions.shape[1], size):
        outs = result[:, start : start + size].unbind()
        values = torch.empty_like(outs[0])
        for index, weight in _nearby(positions[:, start : start + size], grid, 0, grid, TRIANGLE):
            for field, out in zip(flat, outs, strict=True):
                out.addcmul_(weight, torch.index_select(field, 0, index, out=values))
    return result


def kick_and_drift(particles: Particles, force: Tensor, kept: float, gain: float, drift: float, threads: int) -> None:
    """Sets v = kept v + gain g(x), then x = x + drift v, in place."""

    def work(rows: slice) -> None:
        for piece in particles.pieces(rows):
            velocity = particles.velocity[:, piece]
            pull = interpolate(force, particles.positions(piece)).view(velocity.shape)
            velocity.mul_(kept).add_(pull, alpha=gain)
            particles.displacement[:, piece].add_(velocity, alpha=drift)

    in_slabs(work, particles.displacement[0], threads)
