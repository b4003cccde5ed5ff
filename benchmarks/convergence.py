"""Convergence of the simulated gas: one box in cells of three sizes.

python -m benchmarks.convergence

The meshes start from the same long waves; a finer one has shorter waves, too. Shows the flux power of the Lyman-alpha
forest relative to the finest mesh, the relation of temperature and density, hot gas, time and memory.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from analysis.lyman_alpha.flux import Universe, flux_power, optical_depth, power_sums, published_mean_flux, solve_scale
from benchmarks import common

if TYPE_CHECKING:
    from simulation.simulate import SimulationOptions

WAVENUMBERS = (0.005, 0.01, 0.02, 0.04)  # s/km
LINES = 4096
HOT = 1e5  # K
BINS = np.linspace(-0.5, 0.5, 11)  # of log10(density / mean), for the relation of temperature and density


def of_waves(modes: np.ndarray, grid: int) -> np.ndarray:
    """The modes of a mesh with fewer cells per side: those that both have, without the smaller one's Nyquist waves."""
    half, finer = grid // 2, len(modes)
    if grid == finer:
        return modes
    keep = np.r_[0:half, finer - half : finer]
    coarse = modes[keep][:, keep][:, :, : half + 1] * np.float32((grid / finer) ** 3)
    coarse[half] = coarse[:, half] = coarse[:, :, half] = 0
    return coarse


def flux(gas: np.ndarray, options: "SimulationOptions") -> np.ndarray:
    """P1D in km/s at WAVENUMBERS, with the observed mean flux, over lines along z."""
    from simulation.linear_theory import make_cosmology

    cosmology, n = make_cosmology(options.cosmology), options.grid
    densities = {"omega_m": cosmology.Om0, "omega_l": cosmology.Ode0, "omega_b": cosmology.Ob0}
    universe = Universe(redshift=options.redshift, h=cosmology.h, **densities)
    chosen = np.linspace(0, n * n - 1, min(LINES, n * n)).astype(int)
    density, velocity, kelvin = (torch.from_numpy(gas[field].reshape(n * n, n)[chosen]) for field in (0, 3, 4))
    depth = optical_depth(density, velocity, kelvin, universe, options.cell).double()

    def mean_and_slope(scale: float) -> tuple[float, float]:
        flux = torch.exp(-scale * depth)
        return float(flux.mean()), -float((depth * flux).mean())

    values = torch.exp(-solve_scale(mean_and_slope, published_mean_flux(options.redshift)) * depth)
    sums = power_sums((values / values.mean() - 1).float())
    k, power = flux_power(sums, len(chosen), n, universe.pixel_width(options.cell))
    return np.exp(np.interp(np.log(WAVENUMBERS), np.log(k.numpy()), np.log(power.numpy())))


def relation(gas: np.ndarray) -> tuple[float, float]:
    """T0 in K and gamma, of a power law through the medians in BINS of the gas that is not hot."""
    logarithm, kelvin = np.log10(gas[0]).ravel(), gas[4].ravel()
    bins = np.digitize(logarithm, BINS)
    medians = [np.log10(np.median(kelvin[(bins == place) & (kelvin < HOT)])) for place in range(1, len(BINS))]
    slope, level = np.polyfit((BINS[1:] + BINS[:-1]) / 2, medians, 1)
    return float(10**level), float(1 + slope)


def main(argv: Sequence[str] | None = None) -> None:
    from simulation.linear_theory import make_cosmology
    from simulation.simulate import SimulationOptions, initial_modes, simulate_fields

    parser = common.Parser(__doc__, grids=(64, 128, 256), box_size=20.0, seed=1, threads=2)
    options = parser.parse_args(argv)
    shared = {"box_size": options.box_size, "seed": options.seed, "threads": options.threads}
    meshes = [SimulationOptions(grid=grid, **shared) for grid in options.grids]  # the last one is the finest
    modes = initial_modes(meshes[-1], make_cosmology(meshes[-1].cosmology))
    rows, powers = [], []
    for mesh in meshes:
        started, cpu = time.monotonic(), time.process_time()
        gas = simulate_fields(mesh, torch.from_numpy(of_waves(modes.numpy(), mesh.grid)))[1]
        row = {"grid": mesh.grid, "cell (Mpc/h)": mesh.cell, "seconds": time.monotonic() - started}
        row |= {"CPU seconds": time.process_time() - cpu, "peak GB": common.peak_bytes() / 1e9}
        row["T0 (K)"], row["gamma"] = relation(gas)
        hot = gas[4] > HOT
        row["hot mass (%)"] = 100 * float(gas[0][hot].sum() / gas[0].sum())
        row["hot volume (%)"] = 100 * float(hot.mean())
        rows.append(row)
        powers.append(flux(gas, mesh))
    for row, power in zip(rows, powers, strict=True):
        ratios = zip(WAVENUMBERS, power / powers[-1], strict=True)
        row |= {f"P1D ratio at {k:g} s/km": float(value) for k, value in ratios}
    text = common.table(list(rows[0]), [[f"{value:.3g}" for value in row.values()] for row in rows])
    common.publish("convergence", options, {"results": rows}, text)


if __name__ == "__main__":
    common.run(main)
