"""Simulates training data: particle-mesh dark matter, and gas computed from it by the closure in `gas.py`.

    python -m utils.simulation --output train.h5 --grid 128 --seed 1
    python -m utils.simulation --output val.h5 --grid 128 --seed 2

Writes HDF5: `Nbody` float32 [4, x, y, z] = rho_DM, v_x, v_y, v_z, and `Hydro` float32 [5, x, y, z] = rho, v_x, v_y,
v_z, T, each roughly in [-1, 1]. The attributes contain the constants that recover physical values. With --format nyx
it writes the physical fields instead, in the layout of Nyx's snapshots, which utils.data.import_volume reads. The
command needs about 60 bytes of memory per cell.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from colossus.cosmology import cosmology as colossus

from utils.cli import Parser
from utils.data.files.nyx import from_physical, layout_attributes
from utils.data.files.snapshots import FIELDS
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress
from utils.simulation import gas
from utils.simulation.fourier import forward, multiplied
from utils.simulation.linear_theory import (
    HIGHEST_REDSHIFT,
    GrowthClock,
    cosmology_names,
    hubble,
    linear_power,
    make_cosmology,
    velocity_unit,
)
from utils.simulation.particle_mesh import evolve, lpt_particles, mass_and_momentum

FORMAT_VERSION = 1
DEFAULT_CELL = 0.5  # Mpc/h
SMALLEST_GRID = 8
FORMATS = ("volume", "nyx")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class SimulationOptions:
    """Parameters of a simulation; the command's flags have the same names."""

    output: str | None = dataclasses.field(default=None, metadata={"help": "HDF5 file to write"})
    grid: int = dataclasses.field(default=128, metadata={"help": "cells per side of the box"})
    box_size: float | None = dataclasses.field(
        default=None, metadata={"help": "side of the box in comoving Mpc/h; by default 0.5 times grid"}
    )
    particles: int | None = dataclasses.field(default=None, metadata={"help": "particles per side; by default grid"})
    seed: int = dataclasses.field(default=0, metadata={"help": "seed of the initial conditions"})
    cosmology: str = dataclasses.field(default="planck18", metadata={"help": "name of a colossus cosmology"})
    start_redshift: float = dataclasses.field(default=24.0, metadata={"help": "redshift of the initial conditions"})
    redshift: float = dataclasses.field(default=2.0, metadata={"help": "redshift of the fields"})
    n_steps: int = dataclasses.field(default=20, metadata={"help": "time steps, equal in the growth factor"})
    fixed_amplitude: bool = dataclasses.field(
        default=False, metadata={"help": "every initial mode has exactly the mean power; only the phases are random"}
    )
    format: str = dataclasses.field(default="volume", metadata={"help": "layout of the file: volume or nyx"})
    threads: int = dataclasses.field(default=CORES, metadata={"help": "threads, which do not change the result"})
    overwrite: bool = dataclasses.field(default=False, metadata={"help": "replace an existing output"})

    def __post_init__(self) -> None:
        minimum = {"grid": SMALLEST_GRID, "particles": SMALLEST_GRID, "n_steps": 1, "threads": 1, "seed": 0}
        for name, least in minimum.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; give at least {least}")
        if self.seed >= 2**63:
            raise UserError(f"seed is {self.seed}; give a number below 2**63")
        if not (0 < self.box_length < math.inf):
            raise UserError(f"box_size is {self.box_size}; give a positive length in Mpc/h")
        if not 0 <= self.redshift <= HIGHEST_REDSHIFT:
            raise UserError(f"redshift is {self.redshift}; give a redshift from 0 to {HIGHEST_REDSHIFT:g}")
        if not self.redshift < self.start_redshift <= HIGHEST_REDSHIFT:
            raise UserError(
                f"start_redshift is {self.start_redshift}; give a redshift above redshift = {self.redshift} "
                f"and up to {HIGHEST_REDSHIFT:g}"
            )
        if self.cosmology not in cosmology_names():
            raise UserError(f"unknown cosmology '{self.cosmology}'; choose one of {', '.join(cosmology_names())}")
        if self.format not in FORMATS:
            raise UserError(f"unknown format '{self.format}'; choose one of {', '.join(FORMATS)}")

    @property
    def box_length(self) -> float:
        """Side of the box in comoving Mpc/h."""
        return DEFAULT_CELL * self.grid if self.box_size is None else self.box_size

    @property
    def cell(self) -> float:
        """Side of a cell in comoving Mpc/h."""
        return self.box_length / self.grid

    @property
    def particle_side(self) -> int:
        """Particles per side of the box."""
        return self.particles or self.grid


def initial_modes(options: SimulationOptions, cosmology: colossus.Cosmology) -> np.ndarray:
    """Modes of the linear density contrast, scaled to z = 0, on the particle lattice: [p, p, p // 2 + 1].

    They are white noise, drawn in real space by one generator, times sqrt(P(k)): <|delta_k|^2> = P(k) p^6 / V.
    """
    p, threads = options.particle_side, options.threads
    noise = np.random.default_rng(options.seed).standard_normal((p, p, p), dtype=np.float32)
    modes = forward(noise, threads)
    del noise
    # colossus is slow for 10^8 wavenumbers, and log P(k) is smooth: a fine table is interpolated instead.
    fundamental = 2 * np.pi / options.box_length
    table = np.geomspace(0.9 * fundamental, 0.9 * fundamental * p, 4000)
    log_amplitude = 0.5 * np.log(linear_power(cosmology, table) * p**3 / options.box_length**3)
    log_table = np.log(table)

    def amplitude(kx: np.ndarray, ky: np.ndarray, kz: np.ndarray) -> np.ndarray:
        square = kx * kx + ky * ky + kz * kz
        with np.errstate(divide="ignore"):
            log_k = 0.5 * np.log(square) + np.float32(math.log(p / options.box_length))
        result = np.exp(np.interp(log_k, log_table, log_amplitude)).astype(np.float32)
        result[square == 0] = 0
        return result

    if options.fixed_amplitude:  # Angulo & Pontzen 2016
        size = np.abs(modes)
        size[size == 0] = 1
        modes *= np.float32(p**1.5) / size
    return multiplied(modes, amplitude, threads)


def simulate_fields(options: SimulationOptions) -> tuple[np.ndarray, np.ndarray]:
    """Physical fields: dark matter [4, n, n, n] and gas [5, n, n, n]; density / mean, km/s, kelvin."""
    cosmology, threads = make_cosmology(options.cosmology), options.threads
    clock = GrowthClock(cosmology, options.start_redshift, options.redshift, options.n_steps)
    omega_m = float(cosmology.Om(options.start_redshift))

    # The stages are the initial conditions, the time steps, the fields of the dark matter, and the gas.
    with Progress("simulating", total=options.n_steps + 3, unit="stages") as progress:
        modes = initial_modes(options, cosmology)
        particles = lpt_particles(modes, options.grid, float(clock.times[0]), omega_m, threads)
        del modes
        progress.advance(note=f"z = {options.start_redshift:.1f}")
        evolve(particles, clock, threads, progress)
        dark = mass_and_momentum(particles, threads, progress)
        del particles
        gas.mass_weighted_velocity(dark[0], dark[1:], threads)
        dark[1:] *= np.float32(velocity_unit(cosmology, options.redshift) * options.cell)
        progress.advance(note="gas")
        expansion = 1 / (1 + options.redshift), hubble(cosmology, options.redshift)
        baryons = gas.gas_fields(dark[0], dark[1:], options.cell, *expansion, threads)
        progress.advance()
    return dark, baryons


def simulate(options: SimulationOptions) -> tuple[np.ndarray, np.ndarray]:
    """Nbody [4, n, n, n] and Hydro [5, n, n, n], float32, as the channels that `gas.py` defines."""
    nbody, hydro = simulate_fields(options)
    return gas.to_channels(nbody), gas.to_channels(hydro)


# --- output ------------------------------------------------------------------------------------------------------


def file_attributes(options: SimulationOptions) -> dict[str, Any]:
    """HDF5 attributes: the options, the cosmology and the constants of the closure, which determine the data."""
    cosmology = make_cosmology(options.cosmology)
    stored = ("grid", "seed", "cosmology", "start_redshift", "redshift", "n_steps", "fixed_amplitude")
    parameters = ("H0", "Om0", "Ode0", "Ob0", "sigma8", "ns")
    return {
        "made_by": "utils.simulation: particle-mesh N-body simulation with a gas closure",
        "format_version": FORMAT_VERSION,
        "box_size_mpc_h": options.box_length,
        "particles": options.particle_side,
        **{name: getattr(options, name) for name in stored},
        **{f"cosmology_{name}": float(getattr(cosmology, name)) for name in parameters},
        **gas.attributes(),
    }


def write(
    target: Path, fields: tuple[np.ndarray, np.ndarray], attributes: dict[str, Any], options: SimulationOptions
) -> None:
    """Writes what `simulate` or, for the layout nyx, `simulate_fields` returns, contiguous; the write is atomic."""
    datasets = dict(zip(("Nbody", "Hydro"), fields, strict=True))
    attributes_by_group: Mapping[str, Mapping[str, Any]] = {"/": attributes}
    if options.format == "nyx":
        channels = zip(FIELDS, (channel for field in fields for channel in field), strict=True)
        datasets = {f"native_fields/{name}": from_physical(name, channel) for name, channel in channels}
        attributes_by_group = layout_attributes(list(FIELDS), (options.grid,) * 3, options.cell, attributes)
    with atomic_write([target]) as (partial,), h5py.File(partial, "w") as file:
        for name, values in datasets.items():
            file[name] = values
        for place, described in attributes_by_group.items():
            owner = file[place or "/"] if (place or "/") in file else file.create_group(place)
            owner.attrs.update(described)


def parse(argv: Sequence[str] | None = None) -> SimulationOptions:
    """Parses the command line; every field of SimulationOptions is a flag."""
    parser = Parser(__doc__)
    parser.prog = "python -m utils.simulation"
    types: dict[str, type] = {"box_size": float, "start_redshift": float, "redshift": float}
    types |= dict.fromkeys(("output", "cosmology", "format"), str)
    for field in dataclasses.fields(SimulationOptions):
        text = field.metadata["help"]
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action="store_true", help=text)
            continue
        if field.default is not None:
            text = f"{text} (default: {field.default})"
        kind = types.get(field.name, int)
        required = field.name == "output"
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, required=required, help=text)
    return SimulationOptions(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns 0; invalid options end with one line and exit code 2."""
    with one_line_errors():
        options = parse(argv)
        assert options.output is not None  # argparse requires it
        target = Path(options.output)
        check_target(target, options.overwrite)
        make_output_directory(target.parent, 4 * 9 * options.grid**3, "give another --output or a smaller --grid")
        try:
            fields = simulate(options) if options.format == "volume" else simulate_fields(options)
        except MemoryError:
            raise UserError(f"grid {options.grid} does not fit in memory; give a smaller --grid") from None
        check_target(target, options.overwrite)  # another process may have created it
        write(target, fields, file_attributes(options), options)
        size = f"{options.grid} cells and {options.box_length:g} Mpc/h per side"
        print(f"wrote {target}: {size}, z = {options.redshift:g}")
    return 0
