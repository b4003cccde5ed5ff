"""The evolution of dark matter and gas: kicks by their common gravity, drift, gas dynamics, heating and cooling.

Gravity is computed on a periodic mesh, with lengths in cells. Source: Hockney & Eastwood 1988.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simulation import cooling, hydro
from simulation.cooling import NEUTRAL_WEIGHT, PrimordialGas
from simulation.fourier import backward, forward, in_slabs, inverse_square, multiplied, one_thread
from simulation.hydro import GAMMA, Gas
from simulation.linear_theory import GrowthClock
from simulation.particle_mesh import Particles, deposit, kick_and_drift
from utils.constants import BOLTZMANN_J_PER_K, HYDROGEN_ATOM_KG
from utils.progress import Progress

KELVIN = HYDROGEN_ATOM_KG / BOLTZMANN_J_PER_K * 1e6  # m_H / k in K / (km/s)^2
LOWEST_DENSITY = 0.05  # of the initial gas: the linear contrast of a cell may be below -1
INITIAL_KELVIN = 0.02  # T / (1 + z)^2 of gas that has expanded since it decoupled from the radiation
# Radiation cools gas only as long as its Jeans length is at least this many cells. Denser gas would collapse into
# single cells, since nothing else, such as star formation, would stop it.
JEANS_CELLS = 2.0
# A cloud-in-cell deposit, and an interpolation, weakens waves by prod sinc^2(k_i / 2) = 1 - k^2 / 12 + ... The first
# term is corrected; a full division would amplify the noise near Nyquist.
SHARPENING = 1 / 8
NEAR, FAR = 8 / 12, 1 / 12  # weights of the four-point difference

# Solver and physics of the gas as HDF5 attributes; the names contain the units.
ATTRIBUTES: dict[str, Any] = {
    "gas_solver": "MUSCL-Hancock, HLLC, dual energy, no feedback, no self-shielding",
    "gas_adiabatic_index": GAMMA,
    "gas_courant_number": hydro.COURANT,
    "gas_cooling_needs_jeans_length_cells": JEANS_CELLS,
    **cooling.ATTRIBUTES,
}


@dataclass(frozen=True)
class GasPhysics:
    """Parameters of the evolution of gas: units of the mesh, fraction of the mass, gravity's strength, heat."""

    heat: PrimordialGas
    cell: float  # side in comoving Mpc/h
    fraction: float  # of the matter's mass
    omega_m: float  # today

    def velocity_unit(self, redshift: float) -> float:
        """Peculiar velocity in km/s of the super-comoving unit."""
        return 100 * self.cell * (1 + redshift)

    def theta(self, gas: Gas, redshift: float) -> Tensor:
        """T / mu in K, [n, n, n]."""
        return gas.pressure_per_density().mul_(KELVIN * self.velocity_unit(redshift) ** 2)

    def start(self, contrast: Tensor, particles: Particles, clock: GrowthClock, threads: int) -> Gas:
        """Gas with the density contrast [n, n, n] and velocity of linear theory, and uniform entropy."""
        state = torch.empty(5, *contrast.shape, device=contrast.device)
        torch.clamp(1 + contrast, min=LOWEST_DENSITY, out=state[0])
        state[0] /= state[0].mean(dtype=torch.float64)
        torch.mul(particles.velocity, clock.rate(clock.times[0]), out=state[1:4])
        state[1:4] *= state[0]
        state[4] = state[0] * (INITIAL_KELVIN / NEUTRAL_WEIGHT / KELVIN / self.velocity_unit(0.0) ** 2)
        return Gas(state, threads)

    def exchange_heat(self, gas: Gas, start_redshift: float, end_redshift: float) -> None:
        """Heats and cools the gas from `start_redshift` to `end_redshift`, at constant density."""
        theta = self.theta(gas, start_redshift)
        factor = cooling.tabulated(self.heat.change(start_redshift, end_redshift), gas.density, theta)
        # Jeans length^2 = pi c^2 / (G density) = 4 pi^2 c^2 / (3/2 Omega_m a density); gas counts as all matter here.
        square = (JEANS_CELLS / (2 * math.pi)) ** 2 * 1.5 * self.omega_m / (1 + end_redshift)
        lowest = gas.density * (square / GAMMA * KELVIN * self.velocity_unit(start_redshift) ** 2)
        factor = torch.maximum(factor, lowest.div_(theta).clamp_(max=1))
        gas.state[4] *= factor

    def fields(self, gas: Gas, redshift: float) -> Tensor:
        """Density in units of the mean, peculiar velocity in km/s, temperature in K: [5, n, n, n]."""
        fields = gas.state.clone()
        fields[1:4] *= self.velocity_unit(redshift) / gas.density
        fields[4] = self.heat.temperature(gas.density, self.theta(gas, redshift), redshift)
        return fields


def accelerations(dark: Tensor, gas: Tensor, gas_fraction: float, threads: int = 1) -> tuple[Tensor, Tensor]:
    """g = -grad laplacian^-1 delta for particles, to be interpolated, and for the gas of the cells, [3, n, n, n] each.

    `dark` is the deposited density of the particles, and `gas` the mean density of the cells, in units of their means.
    The potential is computed in Fourier space, its gradient is a four-point difference. Both are antisymmetric under
    exchange of two cells, and what acts on the particles is corrected as what they deposit, so that the total momentum
    is conserved.
    """
    modes = multiplied(forward(dark, threads), lambda *k: sharpened(*k) * (1 - gas_fraction), threads)
    modes.add_(forward(gas, threads), alpha=gas_fraction)
    modes = multiplied(modes, lambda *k: -inverse_square(*k), threads)
    particles = downhill(backward(multiplied(modes, sharpened, threads), threads), threads)
    return particles, downhill(backward(modes, threads), threads)


def sharpened(kx: Tensor, ky: Tensor, kz: Tensor) -> Tensor:
    """The factor that corrects one cloud-in-cell window."""
    return 1 + SHARPENING * (kx * kx + ky * ky + kz * kz)


def downhill(potential: Tensor, threads: int) -> Tensor:
    """-grad of a potential by four-point differences, [3, n, n, n]."""
    n = len(potential)
    field = torch.empty(3, n, n, n, device=potential.device)
    padded = torch.cat((potential[-2:], potential, potential[:2]))

    def work(rows: slice) -> None:
        for axis in range(3):
            if axis == 0:
                steps = [padded[2 + rows.start + step : 2 + rows.stop + step] for step in (1, -1, 2, -2)]
            else:
                steps = [potential[rows].roll(-step, axis) for step in (1, -1, 2, -2)]
            torch.sub(steps[2], steps[3], out=field[axis, rows]).mul_(FAR)
            field[axis, rows].add_(steps[0], alpha=-NEAR).add_(steps[1], alpha=NEAR)

    in_slabs(work, potential, threads)
    return field


@one_thread()
def evolve(particles: Particles, gas: Gas, physics: GasPhysics, clock: GrowthClock, progress: Progress) -> None:
    """Integrates by kick-drift-kick from clock.times[0] to clock.times[-1], in place."""
    # The half kicks at the end of one step and the start of the next have the same force and are combined.
    times, threads = clock.times, gas.threads
    for step, now in enumerate(times):
        start = now if step == 0 else 0.5 * (times[step - 1] + now)
        last = step == len(times) - 1
        end, drift = (now, 0.0) if last else (0.5 * (now + times[step + 1]), times[step + 1] - now)
        kept = clock.velocity_kept(start, end)
        gain = (1 - kept) / now
        dark = deposit(particles, threads)[0]
        force, gas_force = accelerations(dark, gas.density, physics.fraction, threads)
        gas.kick(gas_force, gain * clock.rate(end))
        kick_and_drift(particles, force, kept, gain, drift, threads)
        if not last:
            redshift = clock.redshift(times[step + 1])
            gas.advance(drift / clock.rate(end))
            physics.exchange_heat(gas, clock.redshift(now), redshift)
            progress.advance(1, f"z = {redshift:.1f}")
