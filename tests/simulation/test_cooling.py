"""Heating and cooling against closed forms, direct integration, and the measured temperature of the gas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")

from scipy import integrate

from utils.lyman_alpha.flux import TEMPERATURE_DENSITY
from utils.simulation import cooling, ionization, linear_theory
from utils.simulation.cooling import PrimordialGas
from utils.simulation.ionization import CollisionRates, Equilibrium

COSMOLOGY = linear_theory.make_cosmology("planck18")
# Gaikwad et al. 2021 state 1322 K and 0.120 at z = 3; parcels, unlike gas, are not heated by shocks and flows.
TEMPERATURE_ERROR, SLOPE_ERROR = 2700.0, 0.15


@pytest.fixture(scope="module")
def gas() -> PrimordialGas:
    return PrimordialGas(COSMOLOGY)


def parcels(gas: PrimordialGas, theta: Tensor, redshifts: list[float]) -> np.ndarray:
    """T0 and gamma at all but the first redshift, [redshifts, 2], of parcels whose ln(density) grows as D."""
    final, result = torch.tensor([0.3, 0.6, 1.0, 1.7, 3.0]), []
    for start, stop in itertools.pairwise(redshifts):
        for first, last in itertools.pairwise(np.geomspace(1 + start, 1 + stop, 5) - 1):
            growth = COSMOLOGY.growthFactor(np.array([first, last])) / COSMOLOGY.growthFactor(redshifts[-1])
            density, compressed = (final ** float(power) for power in growth)
            theta = theta * gas.change(first, last, 0.03).factor(density, theta) * ((1 + last) / (1 + first)) ** 2
            theta *= (compressed / density) ** (2 / 3)
        temperature = gas.temperature(compressed, theta, last)
        slope, height = np.polyfit(compressed.log(), temperature.log(), 1)
        result.append((math.exp(height), 1 + slope))
    return np.array(result)


def test_photo_ionized_and_collisional_hydrogen_follow_closed_forms() -> None:
    temperature, density = torch.tensor([1e4, 3e4], dtype=torch.float64), torch.tensor([[1e-6]], dtype=torch.float64)
    rates = CollisionRates.at(temperature)
    light = Equilibrium.of(density, 2.0, rates)
    expected = rates.recombination[0] * density * light.electrons / ionization.background(2.0)[0, 0]
    torch.testing.assert_close(light.ions[0], expected, rtol=2e-4, atol=0)
    dark = Equilibrium.of(density, 9.0, rates)
    torch.testing.assert_close(dark.ions[1] / dark.ions[0], (rates.ionization[0] / rates.recombination[0])[None])


def test_iterated_electrons_are_those_of_the_ions(gas: PrimordialGas) -> None:
    for redshift in (9.0, 7.5, 3.4, 2.0):
        state = gas._equilibrium(redshift)
        _, hydrogen, neutral, singly, doubly = state.ions
        torch.testing.assert_close(state.electrons, hydrogen + singly + 2 * doubly, rtol=0, atol=1e-12)
        again = Equilibrium.of(gas._hydrogen * (1 + redshift) ** 3, redshift, gas._rates, 2 * ionization.ITERATIONS)
        torch.testing.assert_close(state.electrons, again.electrons, rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(neutral + singly + doubly, torch.full_like(neutral, ionization.HELIUM))


def test_expansion_alone_keeps_theta_times_the_squared_scale_factor(gas: PrimordialGas) -> None:
    cold = cooling.THETAS.exp() < 1000
    assert gas.change(30.0, 20.0).logarithm[:, cold].abs().max() < 1e-6


@pytest.mark.parametrize("end", [7.5, 7.499])
def test_reionization_heats_cold_gas_to_its_temperature_and_keeps_hot_gas(gas: PrimordialGas, end: float) -> None:
    """A step across it is one before and one after it: gas cools as soon as it is ionized, not at the end."""
    density, theta = torch.tensor([0.1, 1.0, 10.0, 1.0]), torch.tensor([0.1, 2.0, 100.0, 3e6])
    ionized = theta * gas.change(7.7, end).factor(density, theta) * ((1 + end) / 8.7) ** 2
    temperature = gas.temperature(density, ionized, end)
    torch.testing.assert_close(temperature[:3], torch.full((3,), 2e4), rtol=0.01, atol=0)
    assert 1.5e6 < temperature[3] < 1.8e6
    at_once = theta * gas.change(7.7, 7.2).factor(density, theta)
    after = ionized * gas.change(end, 7.2).factor(density, ionized) * (8.7 / (1 + end)) ** 2
    torch.testing.assert_close(at_once, after, rtol=0.01, atol=0)


def test_outside_the_table_the_nearest_edge_is_used(gas: PrimordialGas) -> None:
    table = gas.change(3.1, 3.0)
    edges = torch.tensor([[1e-3, 1e5, 1.0, 1.0], [1e4, 1e4, 1e-2, 1e9]])
    outside = torch.tensor([[1e-6, 1e8, 1.0, 1.0], [1e4, 1e4, 1e-5, 1e12]])
    torch.testing.assert_close(table.factor(*outside), table.factor(*edges), rtol=1e-4, atol=0)


def test_flow_of_a_linear_rate_is_an_exponential() -> None:
    nodes = torch.linspace(-2, 3, 40, dtype=torch.float64).sinh()[None]
    start = torch.linspace(-3, 9, 50, dtype=torch.float64)[None]
    for speed, duration in ((1.0, 0.7), (1e6, 1e-6), (1e6, 1.0)):
        expected = 1.5 + (start - 1.5) * math.exp(-speed * duration)
        torch.testing.assert_close(cooling.flow(nodes, speed * (1.5 - nodes), start, duration), expected)


@pytest.mark.parametrize(("start", "end"), [(4.0, 3.9), (2.1, 2.0), (7.7, 7.4)])
def test_twice_the_substeps_change_no_entry_by_a_percent(gas: PrimordialGas, start: float, end: float) -> None:
    change, finer = gas.change(start, end), gas.change(start, end, cooling.LONGEST_SUBSTEP / 2)
    assert (change.logarithm - finer.logarithm).abs().max() < 0.01


def test_interpolated_change_is_that_of_direct_integration(gas: PrimordialGas) -> None:
    nodes = torch.linspace(math.log(300), math.log(1e8), 4000, dtype=torch.float64)
    rates = CollisionRates.at(nodes.exp())
    mean = float(gas._hydrogen[0, 0]) / 1e-3  # hydrogen nuclei per cm³ at the mean density today
    generator = np.random.default_rng(1)
    table, first, last = gas.change(3.1, 3.0), math.log(4.1), math.log(4.0)
    for density, theta in np.exp(generator.uniform(np.log([0.05, 2e3]), np.log([30.0, 2e6]), (12, 2))):

        def slope(time: float, value: np.ndarray, density: float = density) -> float:
            """d ln(a² theta) / d ln(1 + z)."""
            scale = math.exp(time)
            state = Equilibrium.of(torch.tensor([[density * mean * scale**3]]).double(), scale - 1, rates)
            rising = ionization.HELIUM * cooling.HELIUM_HEAT * ionization.ELECTRONVOLT
            rising *= scale / abs(np.subtract(*ionization.HELIUM_REDSHIFTS))
            heat = state.heating() / (COSMOLOGY.Hz(scale - 1) / cooling.MEGAPARSEC) + rising
            return -np.interp(value[0] + 2 * time, state.theta_logarithms()[0], (heat / state.energy())[0])

        initial = math.log(theta) - 2 * first
        end = integrate.solve_ivp(slope, (first, last), [initial], method="LSODA", rtol=1e-5, atol=1e-6).y[0, -1]
        found = table.factor(torch.tensor([density]).float(), torch.tensor([theta]).float()).log().item()
        assert found == pytest.approx(end - initial, abs=0.01), (density, theta)


def test_gas_forgets_its_temperature_and_approaches_the_asymptotic_slope(
    gas: PrimordialGas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T is proportional to density**0.6 long after an ionization (Hui & Gnedin 1997); here helium's is suppressed."""
    monkeypatch.setattr(cooling, "HELIUM_HEAT", 0.0)
    cool, hot = (parcels(gas, torch.full((5,), theta), [6.0, 5.5, 2.0, 0.5]) for theta in (1e4, 5e4))
    assert hot[0, 0] / cool[0, 0] > 1.5
    assert hot[-1, 0] / cool[-1, 0] == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose((cool[-1, 1], hot[-1, 1]), 1.6, atol=0.04)


def test_parcels_have_the_measured_temperature_and_slope(gas: PrimordialGas) -> None:
    found = parcels(gas, torch.full((5,), 1.0), [8.0, 5.0, 3.8, 3.4, 3.0, 2.4, 2.0])[1:]
    measured = [np.interp([3.8, 3.4, 3.0, 2.4, 2.0], TEMPERATURE_DENSITY[0], row) for row in TEMPERATURE_DENSITY[1:]]
    assert (abs(found - np.transpose(measured)) < (TEMPERATURE_ERROR, SLOPE_ERROR)).all()
