"""Simulates training data: dark matter on a particle mesh, and gas dynamics with heating and cooling (evolution.py).

    python -m simulation --output train.h5 --grid 128 --seed 1
    python -m simulation --output val.h5 --grid 128 --seed 2

Writes HDF5: `Nbody` float32 [4, x, y, z] = rho_DM, v_x, v_y, v_z, and `Hydro` float32 [5, x, y, z] = rho, v_x, v_y,
v_z, T, each roughly in [-1, 1]. The attributes contain the constants that recover physical values, and those of the
physics. With --format nyx it writes the physical fields instead, in the layout of Nyx's snapshots, which
utils.volumes.import_volume reads. The command needs about 150 bytes of memory per cell.
"""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from colossus.cosmology import cosmology as colossus
from scipy.ndimage import gaussian_filter
from torch import Tensor

from simulation import evolution
from simulation.cooling import PrimordialGas
from simulation.fourier import backward, forward, in_order, multiplied, one_thread
from simulation.linear_theory import COSMOLOGIES, GrowthClock, make_cosmology, velocity_unit
from simulation.particle_mesh import CLOUD, TRACERS_PER_SIDE, deposit, lpt_particles
from utils.cli import Parser, positive
from utils.config.channels import Channels, known_channels
from utils.distributed.threads import usable_cpus
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress
from utils.volumes.attributes import DENSITY_FLOOR, FLOOR, channel_attributes, write_attributes
from utils.volumes.hdf5 import DATASETS
from utils.volumes.page_cache import memory_limit
from utils.volumes.snapshots import FIELDS, FORMATS, nyx_attributes, nyx_datasets

FORMAT_VERSION = 2
DEFAULT_CELL = 0.15625  # Mpc/h
CELLS = 0.01, 20.0  # Mpc/h, smallest and largest; the gas of smaller ones needs too many steps
MEMORY = 150  # bytes per cell
LARGEST_CELL = 0.25  # Mpc/h; in larger cells, which gas is hot depends on the mesh and not on the physics
FEWEST_STEPS = 20  # fewer are for tests
START_REDSHIFT = 49.0  # of the initial conditions
GRIDS = 8, 1290  # cells per side; those of larger grids have numbers beyond int32
CORES = len(usable_cpus())
FILL_LENGTH = 2.0  # cells, distance over which velocities are extended into empty cells
FILL_WEIGHT = 1e-3  # weight of the extended velocity, relative to the density of the cell in units of the mean
# The channels lie roughly in [-1, 1]. They are not clipped, so that the physical values can be recovered.
TRANSFORM = {
    "density_log_scale": 14.0,
    "velocity_scale_km_s": 1000.0,
    "temperature_log10_center": 5.0,
    "temperature_log10_scale": 2.5,
}
CHANNELS = known_channels("inputs", 4, TRANSFORM), known_channels("targets", 5, TRANSFORM)


@dataclass(frozen=True)
class SimulationOptions:
    """Parameters of a simulation; the command's flags have the same names."""

    output: str = ""
    grid: int = 128
    box_size: float | None = None
    seed: int = 0
    cosmology: str = "planck18"
    redshift: float = 3.0
    n_steps: int = 40
    device: str = "cpu"
    format: str = "volume"
    paired: int = 0  # 1 and -1 for the members of a pair, whose initial fields sum to zero
    threads: int = CORES
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not GRIDS[0] <= self.grid <= GRIDS[1]:
            raise UserError(f"grid is {self.grid}; give {GRIDS[0]} to {GRIDS[1]} cells per side")
        low, high = (limit * self.grid for limit in CELLS)
        if not low <= self.box_length <= high:
            fault = f"box_size is {self.box_size}; for {self.grid} cells per side"
            raise UserError(f"{fault} give {low:g} to {high:g} Mpc/h")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; give a number from 0 to 2**63 - 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device is cuda, but PyTorch finds no GPU; give --device cpu")
        if not 0 <= self.redshift < START_REDSHIFT:
            raise UserError(f"redshift is {self.redshift}; give one from 0 to less than {START_REDSHIFT:g}")

    @property
    def box_length(self) -> float:
        """Side of the box in comoving Mpc/h."""
        return DEFAULT_CELL * self.grid if self.box_size is None else self.box_size

    @property
    def cell(self) -> float:
        """Side of a cell in comoving Mpc/h."""
        return self.box_length / self.grid


def initial_modes(options: SimulationOptions, cosmology: colossus.Cosmology) -> Tensor:
    """Modes of the linear density contrast, scaled to z = 0: [n, n, n // 2 + 1].

    They are white noise, drawn in real space by one generator, times sqrt(P(k)): <|delta_k|^2> = P(k) n^6 / V. Those of
    a pair have this power in each mode, not only in the mean (Angulo & Pontzen 2016, MNRAS 462, L1).
    """
    n, threads = options.grid, options.threads
    noise = np.random.default_rng(options.seed).standard_normal((n, n, n), dtype=np.float32)
    modes = forward(torch.from_numpy(noise), threads)
    del noise
    if options.paired:
        modes *= options.paired * n**1.5 / modes.abs()
    # colossus is slow for 10^8 wavenumbers, and log P(k) is smooth: a fine table is interpolated instead.
    fundamental = 2 * np.pi / options.box_length
    table = np.geomspace(0.9 * fundamental, 0.9 * fundamental * n, 4000)
    power = cosmology.matterPowerSpectrum(table, 0.0, model="eisenstein98")  # (Mpc/h)^3; Eisenstein & Hu 1998
    log_amplitude = 0.5 * np.log(power * n**3 / options.box_length**3)
    log_table = np.log(table)

    def amplitude(*k: Tensor) -> Tensor:
        kx, ky, kz = (part.numpy() for part in k)
        square = kx * kx + ky * ky + kz * kz
        with np.errstate(divide="ignore"):
            log_k = 0.5 * np.log(square) + np.float32(math.log(n / options.box_length))
        result = np.exp(np.interp(log_k, log_table, log_amplitude)).astype(np.float32)
        result[square == 0] = 0
        return torch.from_numpy(result)

    return multiplied(modes, amplitude, threads)


def simulate_fields(options: SimulationOptions, modes: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Dark matter [4, n, n, n], gas [5, n, n, n]: density / mean, km/s, kelvin. `modes` replace those of the seed."""
    cosmology, threads = make_cosmology(options.cosmology), options.threads if options.device == "cpu" else 1
    clock = GrowthClock(cosmology, START_REDSHIFT, options.redshift, options.n_steps)
    omega_m, fraction = float(cosmology.Om(START_REDSHIFT)), cosmology.Ob0 / cosmology.Om0
    physics = evolution.GasPhysics(PrimordialGas(cosmology), options.cell, fraction, float(cosmology.Om0))

    # The stages are the initial conditions, the time steps, and the fields of the dark matter.
    with Progress("simulating", total=options.n_steps + 2, unit="stages") as progress, one_thread():
        modes = (initial_modes(options, cosmology) if modes is None else modes).to(options.device)
        particles = lpt_particles(modes, float(clock.times[0]), omega_m, threads)
        contrast = backward(modes * float(clock.times[0]), threads)
        gas = physics.start(contrast, particles, clock, threads)
        del modes, contrast
        progress.advance(note=f"z = {START_REDSHIFT:.1f}")
        evolution.evolve(particles, gas, physics, clock, progress)
        baryons = physics.fields(gas, options.redshift).cpu().numpy()
        del gas
        dark = deposit(particles, threads, [*particles.velocity], TRACERS_PER_SIDE, CLOUD, progress).cpu().numpy()
        del particles
        mass_weighted_velocity(dark[0], dark[1:], options.threads)
        dark[1:] *= np.float32(velocity_unit(cosmology, options.redshift) * options.cell)
        progress.advance()
    return dark, baryons


def mass_weighted_velocity(density: np.ndarray, momentum: np.ndarray, threads: int = 1) -> np.ndarray:
    """Momentum / density, continued smoothly from the neighborhood into empty cells.

    v = (p + w <p>) / (rho + w <rho>) with < > a Gaussian of FILL_LENGTH cells and w = FILL_WEIGHT: the velocity of a
    cell with matter changes by about w / rho, an empty cell gets that of its neighbors (normalized convolution,
    Knutsson & Westin 1993). Overwrites and returns `momentum`. The number of threads does not change the result.
    """
    # In real space, where the weights are positive; each field by one thread.
    smoothed = functools.partial(gaussian_filter, sigma=FILL_LENGTH, mode="wrap", output=np.float32)
    around = in_order(smoothed, (density, *momentum), threads)
    weight = np.float32(FILL_WEIGHT)
    # The lower bound matters only in voids wider than the Gaussian, where the velocity becomes zero.
    total = np.maximum(density + weight * next(around), np.float32(1e-12))
    for component, neighbors in zip(momentum, around, strict=True):
        component += weight * neighbors
        component /= total
    return momentum


def to_channels(fields: np.ndarray, channels: Channels) -> np.ndarray:
    """Physical fields [C, x, y, z], the density first, to channels, in place."""
    np.maximum(fields[0], DENSITY_FLOOR, out=fields[0])
    for field, channel in zip(fields, channels, strict=True):
        field[...] = channel.from_physical(field)
    return fields


def simulate(options: SimulationOptions) -> list[np.ndarray]:
    """Nbody [4, n, n, n] and Hydro [5, n, n, n], float32, as CHANNELS."""
    return [*map(to_channels, simulate_fields(options), CHANNELS)]


def file_attributes(options: SimulationOptions) -> dict[str, Any]:
    """HDF5 attributes: the options, the cosmology and the constants of the physics, which determine the data."""
    cosmology = make_cosmology(options.cosmology)
    stored = ("grid", "seed", "cosmology", "redshift", "n_steps", "device")
    parameters = ("H0", "Om0", "Ode0", "Ob0", "sigma8", "ns")
    return {
        "made_by": "simulation: particle-mesh N-body simulation with gas dynamics",
        "format_version": FORMAT_VERSION,
        "box_size_mpc_h": options.box_length,
        "start_redshift": START_REDSHIFT,
        **{name: getattr(options, name) for name in (*stored, *(["paired"] if options.paired else []))},
        **{f"cosmology_{name}": float(getattr(cosmology, name)) for name in parameters},
        **evolution.ATTRIBUTES,
        "velocity_fill_length_cells": FILL_LENGTH,
        "velocity_fill_weight": FILL_WEIGHT,
        FLOOR: DENSITY_FLOOR,
    }


def write(target: Path, fields: Sequence[np.ndarray], options: SimulationOptions) -> None:
    """Writes what `simulate` or, for the layout nyx, `simulate_fields` returns, contiguous; the write is atomic."""
    datasets, attributes = dict(zip(DATASETS, fields, strict=True)), {"": file_attributes(options)}
    attributes |= zip(DATASETS, map(channel_attributes, CHANNELS), strict=True)
    if options.format == "nyx":
        datasets = nyx_datasets(dict(zip(FIELDS, itertools.chain(*fields), strict=True)))
        attributes = nyx_attributes(FIELDS, (options.grid,) * 3, options.cell, attributes[""])
    with atomic_write([target]) as (partial,), h5py.File(partial, "w") as file:
        for name, values in datasets.items():
            file[name] = values
        write_attributes(file, attributes)


def parse(argv: Sequence[str] | None = None) -> SimulationOptions:
    steps = f"time steps, equal in growth factor (%(default)s); fewer than {FEWEST_STEPS} are for tests"
    parser = Parser(__doc__)
    parser.prog = "python -m simulation"
    parser.add_argument("--output", required=True, help="HDF5 file to write")
    parser.add_argument("--grid", type=positive, default=128, help="cells per side of the box (%(default)s)")
    parser.add_argument("--box_size", type=float, help="side of the box in comoving Mpc/h (0.15625 times grid)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial conditions (%(default)s)")
    parser.add_argument("--cosmology", choices=COSMOLOGIES, default="planck18", help="%(default)s by default")
    parser.add_argument("--redshift", type=float, default=3.0, help="redshift of the fields (%(default)s)")
    parser.add_argument("--n_steps", type=positive, default=40, help=steps)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the simulation (%(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="volume", help="layout of the file (%(default)s)")
    text = "also write OUTPUT_paired with the opposite initial field; both have exactly the linear power in each mode"
    parser.add_argument("--paired", action="store_const", const=1, default=0, help=text)
    parser.add_argument("--threads", type=positive, default=CORES, help="they do not change the result (all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return SimulationOptions(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns 0; invalid options end with one line and exit code 2."""
    with one_line_errors():
        options = parse(argv)
        needed, memory = MEMORY * options.grid**3 / 1e9, memory_limit() / 1e9
        if needed > memory:
            raise UserError(f"the box needs {needed:.0f} GB of memory, of {memory:.0f} GB; give a smaller --grid")
        members = {Path(options.output): options}
        if options.paired:
            (target,) = members
            members[target.with_stem(f"{target.stem}_paired")] = replace(options, paired=-1)
        for target in members:
            check_target(target, options.overwrite)
        size = len(members) * 4 * 9 * options.grid**3
        make_output_directory(target.parent, size, "give another --output or a smaller --grid")
        if options.cell > LARGEST_CELL:
            fault = f"cells of {options.cell:g} Mpc/h are too large for the shocks that heat the gas"
            remedy = f"Give --box_size {LARGEST_CELL * options.grid:g} at most"
            sys.stderr.write(f"warning: {fault}, and its temperature depends on them. {remedy}\n")
        if options.n_steps < FEWEST_STEPS:
            sys.stderr.write(f"warning: {options.n_steps} steps are for tests only; give --n_steps 40\n")
        for target, member in members.items():
            fields = simulate(member) if member.format == "volume" else simulate_fields(member)
            write(target, fields, member)
            sides = f"{member.grid} cells and {member.box_length:g} Mpc/h per side"
            print(f"wrote {target}: {sides}, z = {member.redshift:g}")
    return 0
