"""The gas solver against exact solutions, its conservation laws, its symmetry, and its bits on several threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")

from utils.errors import UserError
from utils.simulation import evolution, hydro, linear_theory
from utils.simulation.evolution import GasPhysics
from utils.simulation.hydro import GAMMA, Gas
from utils.simulation.particle_mesh import Particles


def gas_of(density: Tensor, velocity: Tensor, pressure: Tensor, threads: int = 1) -> Gas:
    """Gas [x, y, z] in the units of the mesh."""
    return Gas(torch.cat([density[None], density * velocity, (pressure * density ** (-2 / 3))[None]]), threads)


def sod(places: np.ndarray) -> np.ndarray:
    """Density at x / t of Sod's shock tube with gamma = 5/3: (1, 1) on the left, (0.125, 0.1) on the right (Toro 2009).

    The pressure between the waves is found by bisection.
    """
    left, right = (1.0, 1.0), (0.125, 0.1)  # density, pressure
    sound = [math.sqrt(GAMMA * pressure / density) for density, pressure in (left, right)]
    power, ratio = (GAMMA - 1) / (2 * GAMMA), (GAMMA - 1) / (GAMMA + 1)

    def speeds(pressure: float) -> tuple[float, float]:
        """Velocity behind the rarefaction, and behind the shock."""
        behind = math.sqrt(2 / (GAMMA + 1) / right[0] / (pressure + ratio * right[1]))
        return -2 * sound[0] / (GAMMA - 1) * ((pressure / left[1]) ** power - 1), (pressure - right[1]) * behind

    low, high = 0.1, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        rarefied, shocked = speeds(middle)
        low, high = (middle, high) if rarefied > shocked else (low, middle)
    velocity = speeds(low)[1]
    shock = sound[1] * math.sqrt((GAMMA + 1) / (2 * GAMMA) * low / right[1] + power)
    fan = left[0] * (2 / (GAMMA + 1) - ratio / sound[0] * places).clip(0) ** (2 / (GAMMA - 1))
    tail = velocity - sound[0] * (low / left[1]) ** power
    compressed = right[0] * (low / right[1] + ratio) / (ratio * low / right[1] + 1)
    edges = [places < -sound[0], places < tail, places < velocity, places < shock]
    return np.select(
        edges, [np.full_like(places, left[0]), fan, left[0] * (low / left[1]) ** (1 / GAMMA), compressed], right[0]
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sods_shock_tube(axis: int) -> None:
    """The tube of 100 cells is half of a periodic box, which has a second one with left and right exchanged."""
    n, shape, line = 100, [4, 4, 4], [1, 1, 1]
    shape[axis] = line[axis] = 2 * n
    dilute = torch.zeros(2 * n, dtype=torch.bool)
    dilute[n // 2 : n // 2 + n] = True
    density, pressure = (torch.where(dilute, low, 1.0).view(line).expand(shape) for low in (0.125, 0.1))
    gas = gas_of(density, torch.zeros(3, *shape), pressure)
    gas.advance(0.2 * n)
    found = gas.density.movedim(axis, 0)[:n, 0, 0].numpy()
    exact = sod((np.arange(n) + 0.5 - n / 2) / (0.2 * n))
    assert np.abs(found - exact).mean() < 0.012
    assert torch.equal(gas.density, gas.density.movedim(axis, 0)[:, :1, :1].movedim(0, axis).expand(shape))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_zeldovichs_pancake(axis: int) -> None:
    """A plane wave in dark matter and cold gas, before its caustic: density 1 / (1 - b cos kq), uniform entropy."""
    n, physics, shape = 48, GasPhysics(None, 0.5, 0.16, 1.0), [1, 1, 1]
    shape[axis] = n
    clock = linear_theory.GrowthClock(linear_theory.make_cosmology("EdS"), 49.0, 2.0, 40)
    k, amplitude = 2 * np.pi / n, 0.72 / clock.times[-1]
    displaced = np.zeros((3, n, n, n), np.float32)
    displaced[axis] = (-np.sin(k * np.arange(n)) / k * amplitude).reshape(shape)
    particles = Particles(displaced * np.float32(clock.times[0]), displaced)
    contrast = np.broadcast_to(amplitude * clock.times[0] * np.cos(k * np.arange(n)).reshape(shape), (n, n, n))
    gas = physics.start(contrast.astype(np.float32), particles, clock, 2, "cpu")
    entropy = float(gas.state[4].double().sum())
    evolution.evolve(particles, clock, 2, None, gas, physics)

    lagrange = np.arange(-n, 2 * n, 0.01)
    edges = lagrange - 0.72 / k * np.sin(k * lagrange)  # of equal masses
    exact = np.histogram(edges, np.arange(n + 1) - 0.5)[0] * 0.01
    found = gas.density.movedim(axis, 0)[:, 0, 0].numpy()
    assert np.abs(found - exact).mean() < 0.015
    assert float(gas.state[4].double().sum()) == pytest.approx(entropy, rel=0.01)


@pytest.mark.parametrize("shape", [(48, 4, 4), (32, 32, 32)])
def test_a_sound_wave_travels_around_the_box(shape: tuple[int, int, int]) -> None:
    """Second-order accuracy in a smooth flow: the wave is back, at a few percent of its amplitude.

    An oblique wave keeps equal velocities along all axes: the order of the axes alternates.
    """
    n, moving = shape[0], [side > 4 for side in shape]
    place = sum(torch.arange(n).view([n if other == axis else 1 for other in range(3)]) for axis in range(sum(moving)))
    wave = (1e-3 * torch.sin(2 * torch.pi * place / n)).expand(shape)
    velocity = torch.stack([wave * is_moving / math.sqrt(sum(moving)) for is_moving in moving])
    gas = gas_of(1 + wave, velocity, (1 + GAMMA * wave) / GAMMA)  # sound speed 1
    gas.advance(n / math.sqrt(sum(moving)))
    assert float((gas.density - 1 - wave).abs().mean()) < 0.06e-3
    if all(moving):
        assert float((gas.state[1:4] - gas.state[1]).abs().mean()) < 2e-6


def turbulence(n: int, mach: float, threads: int = 1) -> Gas:
    """Uniform gas of sound speed 1 with a random flow of the longest waves, whose rms is `mach`."""
    generator, place = torch.Generator().manual_seed(0), 2 * torch.pi * torch.arange(n) / n
    velocity = torch.zeros(3, n, n, n)
    for component in range(3):
        for axis in {0, 1, 2} - {component}:
            for waves in (1, 2):
                phase, size = torch.rand(2, generator=generator)
                shape = [n if other == axis else 1 for other in range(3)]
                velocity[component] += (size * torch.sin(waves * place + 6 * phase)).view(shape)
    velocity *= mach / velocity.square().sum(0).mean().sqrt()
    return gas_of(torch.ones(n, n, n), velocity, torch.full((n, n, n), 1 / GAMMA), threads)


def test_supersonic_turbulence_conserves_mass_momentum_and_energy() -> None:
    """The energy is conserved where the thermal one can be trusted: in shocks, which is nearly everywhere here."""

    def totals() -> np.ndarray:
        """Mass, momentum and energy."""
        density, *momentum, entropy = gas.state.double()
        energy = sum(part**2 for part in momentum) / density / 2 + entropy * density ** (2 / 3) / (GAMMA - 1)
        return np.array([float(part.sum()) for part in (density, *momentum, energy)])

    gas = turbulence(32, mach=8.0)
    before = totals()
    gas.advance(32 / 8.0 / 3)
    assert float(gas.density.std()) > 0.6, "there are shocks"
    np.testing.assert_allclose(totals()[:4], before[:4], rtol=1e-7, atol=1e-7 * 8 * before[0])
    assert totals()[4] == pytest.approx(before[4], rel=0.03)


def test_size_of_tiles_and_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for cells, threads in ((1 << 8, 4), (1 << 8, 1), (1 << 15, 1)):
        monkeypatch.setitem(hydro.CELLS_AT_ONCE, "cpu", cells)
        runs.append(turbulence(12, 3.0, threads))
        runs[-1].advance(4.0)
    assert all(torch.equal(runs[0].state, run.state) for run in runs[1:])


def test_density_stays_positive_where_fast_gas_meets_a_dense_cell() -> None:
    """The correction of a negative density at one face let more flow out through the other than the cell had."""
    density = torch.tensor([0.34, 0.4, 0.49, 27.4, 654.0, 251.0, 10.6, 3.8]).view(8, 1, 1)
    speed = torch.tensor([4.0, 4.4, 5.3, 5.9, 2.6, 0.5, -0.4, -0.9]).view(8, 1, 1)
    pressure = density * torch.tensor([0.02, 0.024, 0.09, 1.14, 4.5, 4.1, 2.2, 0.09]).view(8, 1, 1)
    gas = gas_of(density, torch.stack([speed, 0 * speed, 0 * speed]), pressure)
    hydro._sweep((gas.state[0], *gas.state[1:4], gas.state[4]), 0.09)
    assert float(gas.density[:7].min()) > 0
    assert float(gas.state[4].min()) > 0


def test_a_value_that_is_not_finite_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last of several tiles, too, which Python's max would pass over."""
    monkeypatch.setitem(hydro.CELLS_AT_ONCE, "cpu", 1 << 8)
    gas = turbulence(12, 3.0)
    gas.state[4, :, -1] = torch.nan
    with pytest.raises(UserError, match="not finite; give another --seed"):
        gas.advance(1.0)


def test_cold_gas_that_streams_together_stays_positive() -> None:
    """Entropy fell below zero where cold, fast gas met a shock: the flux of S took more than a cell had."""
    n, cold = 64, 1e-6
    velocity = torch.zeros(3, n, 4, 4)
    velocity[0] = torch.sin(2 * torch.pi * torch.arange(n) / n).view(n, 1, 1)
    gas = gas_of(torch.ones(n, 4, 4), velocity, torch.full((n, 4, 4), cold))
    gas.advance(0.6 * n)
    assert float(gas.density.max()) > 3
    assert float(gas.state[4].min()) > 0
