"""Convergence of the simulated gas: one box in cells of three sizes.

python -m benchmarks.convergence

The meshes start from the same long waves; a finer one has shorter waves, too. Shows the flux power of the Lyman-alpha
forest relative to the finest mesh, the relation of temperature and density, hot gas, time and memory.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks import common
from utils.errors import one_line_errors
from utils.lyman_alpha.flux import Universe, flux_power, optical_depth, power_sums, published_mean_flux, solve_scale

if TYPE_CHECKING:
    from utils.simulation.simulate import SimulationOptions

WAVENUMBERS = (0.005, 0.01, 0.02, 0.04)  # s/km
LINES = 4096
HOT = 1e5  # K
BINS = np.linspace(-0.5, 0.5, 11)  # of log10(density / mean), for the relation of temperature and density


def of_waves(modes: np.ndarray, grid: int) -> np.ndarray:
    """The modes of a mesh with fewer cells per side: those that both have, without the smaller one's Nyquist waves."""
    half, finer = grid // 2, len(modes)
    keep = np.r_[0:half, finer - half : finer]
    coarse = modes[keep][:, keep][:, :, : half + 1] * np.float32((grid / finer) ** 3)
    coarse[half] = coarse[:, half] = coarse[:, :, half] = 0
    return coarse


def flux(gas: np.ndarray, options: SimulationOptions) -> np.ndarray:
    """P1D in km/s at WAVENUMBERS, with the observed mean flux, over lines along z."""
    from utils.simulation.linear_theory import make_cosmology

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
    from utils.simulation.linear_theory import make_cosmology
    from utils.simulation.simulate import SimulationOptions, initial_modes, simulate_fields

    parser = common.Parser(__doc__)
    parser.add_argument("--grids", type=int, nargs="+", default=(64, 128, 256), help="cells per side, from few to many")
    parser.add_argument("--box_size", type=float, default=20.0, help="in Mpc/h (%(default)s)")
    parser.add_integers(seed=1, threads=2)
    options = parser.parse_args(argv)
    finest = SimulationOptions(grid=options.grids[-1], box_size=options.box_size, seed=options.seed)
    modes = initial_modes(finest, make_cosmology(finest.cosmology))
    rows = []
    for grid in options.grids:
        one = SimulationOptions(grid=grid, box_size=options.box_size, seed=options.seed, threads=options.threads)
        started, cpu = time.monotonic(), time.process_time()
        gas = simulate_fields(one, modes if grid == len(modes) else of_waves(modes, grid))[1]
        row = {"grid": grid, "cell (Mpc/h)": one.cell, "seconds": time.monotonic() - started}
        row |= {"CPU seconds": time.process_time() - cpu}
        row |= {"peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
        row["T0 (K)"], row["gamma"] = relation(gas)
        hot = gas[4] > HOT
        row |= {
            "hot mass (%)": 100 * float(gas[0][hot].sum() / gas[0].sum()),
            "hot volume (%)": 100 * float(hot.mean()),
        }
        rows.append((row, flux(gas, one)))
    results = []
    for row, power in rows:
        ratios = {
            f"P1D ratio at {k:g} s/km": float(value) for k, value in zip(WAVENUMBERS, power / rows[-1][1], strict=True)
        }
        results.append({**row, **ratios})
    text = common.table(list(results[0]), [[f"{value:.3g}" for value in row.values()] for row in results])
    common.publish("convergence", {"settings": common.settings(options), "results": results}, options.output, text)


if __name__ == "__main__":
    with one_line_errors():
        main()
