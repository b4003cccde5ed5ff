"""Lyman-alpha flux against closed forms and plain float64 sums, in CGS units with constants of their own."""

import math

import numpy as np
import pytest
import torch
from devices import DEVICES
from scipy.optimize import brentq
from scipy.special import erf

from analysis.lyman_alpha import flux
from analysis.lyman_alpha.flux import Universe, fgpa_relation, neutral_fraction, optical_depth, power_law, solve_scale
from utils.errors import UserError

UNIVERSE = Universe(redshift=3.0, h=0.675, omega_m=0.31, omega_l=0.69, omega_b=0.0487)
FINE, COARSE = 0.02, 0.5  # Mpc/h: cells of Nyx, where lines span many pixels, and of the simulator
STRENGTH = math.pi * 4.80320471e-10**2 / (9.1093837e-28 * 2.99792458e10) * 0.4164 * 1215.67e-8  # π e² f λ / (m_e c)


def doppler(temperature: np.ndarray) -> np.ndarray:
    """sqrt(2 k T / m_H) in km/s."""
    return 1e-5 * np.sqrt(2 * 1.380649e-16 * temperature / 1.67353284e-24)


def hydrogen_and_hubble(universe: Universe) -> tuple[float, float]:
    """Mean hydrogen density in 1/cm³ and H in 1/s, from the critical density 1.87834e-29 h² g/cm³."""
    a = 1 + universe.redshift
    curvature = 1 - universe.omega_m - universe.omega_l
    expansion = math.sqrt(universe.omega_m * a**3 + curvature * a**2 + universe.omega_l)
    hydrogen = 0.76 * universe.omega_b * 1.87834e-29 * universe.h**2 * a**3 / 1.67353284e-24
    return hydrogen, universe.h * expansion * 3.2407793e-18  # 100 km/s/Mpc


def reference_fraction(density: float, temperature: float, universe: Universe) -> float:
    """Neutral fraction by bisection of the rate equation in ln x, with the rates of Hui & Gnedin 1997."""
    hydrogen = density * hydrogen_and_hubble(universe)[0]
    t = 2 * 157807 / temperature
    alpha = 1.269e-13 * t**1.503 / (1 + (t / 0.522) ** 0.47) ** 1.923
    beta = 21.11 * temperature**-1.5 * math.exp(-t / 2) * t**-1.089 / (1 + (t / 0.354) ** 0.874) ** 1.101
    gamma = flux.photoionization_rate(universe.redshift)

    def excess(log_x: float) -> float:
        x = math.exp(log_x)
        electrons = hydrogen * (1 - x + 0.24 / 0.76 / 2)
        return gamma * x + beta * electrons * x - alpha * electrons * (1 - x)

    return math.exp(brentq(excess, -60, 0, xtol=1e-13))


def reference_depth(density, velocity, temperature, universe: Universe, cell: float) -> np.ndarray:
    """Every cell's profile in every pixel and in all periodic images that it reaches, in float64."""
    hydrogen, hubble = hydrogen_and_hubble(universe)
    width = 100 * hubble / (universe.h * 3.2407793e-18) * cell / (1 + universe.redshift)  # km/s
    lines, cells = density.shape
    result = np.zeros((lines, cells))
    edges = np.arange(cells + 1) - 0.5
    for line, i in np.ndindex(lines, cells):
        fraction = reference_fraction(density[line, i], temperature[line, i], universe)
        depth = STRENGTH * hydrogen * density[line, i] * fraction / hubble
        b, center = doppler(temperature[line, i]) / width, (i + velocity[line, i] / width) % cells
        reach = math.ceil(6 * b / cells) + 1
        images = cells * np.arange(-reach, reach + 1)[:, None]
        integral = erf((edges + images - center) / b)
        result[line] += depth / 2 * (integral[:, 1:] - integral[:, :-1]).sum(0)
    return result


def random_fields(lines: int, cells: int, hottest: float = 3e7) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    density = np.exp(random.normal(-0.5, 1.2, (lines, cells)))
    velocity = random.normal(0, 300, (lines, cells))
    temperature = np.exp(random.uniform(np.log(3e3), np.log(hottest), (lines, cells)))
    return [field.astype(np.float32).astype(float) for field in (density, velocity, temperature)]


def tensors(fields: list[np.ndarray], device: str = "cpu") -> list[torch.Tensor]:
    return [torch.from_numpy(field).float().to(device) for field in fields]


@DEVICES
def test_neutral_fraction_solves_the_equilibrium(device: str) -> None:
    """From almost ionized to almost neutral gas, in float32."""
    density, temperature = np.meshgrid(np.logspace(-3, 9, 13), np.logspace(2, 8, 13))
    expected = np.vectorize(lambda d, t: reference_fraction(d, t, UNIVERSE))(density, temperature)
    assert expected.min() < 1e-10
    assert expected.max() > 0.99
    result = neutral_fraction(*tensors([density, temperature], device), UNIVERSE)
    np.testing.assert_allclose(result.cpu(), expected, rtol=1e-5)


def test_published_rates_temperatures_and_mean_flux() -> None:
    assert flux.photoionization_rate(2.4) == pytest.approx(1.0351e-12, rel=1e-4)
    assert flux.photoionization_rate(0.1) == flux.photoionization_rate(2.4)
    assert flux.photoionization_rate(9.0) == pytest.approx(10**-12.029)
    density = torch.tensor([0.0, 1.0, 10.0])
    assert power_law(density, *fgpa_relation(3.0)).tolist() == pytest.approx([0, 14750, 14750 * 10**0.225])
    assert power_law(density, *fgpa_relation(2.1)).tolist() == pytest.approx([0, 10250, 10250 * 10**0.4625])
    assert flux.published_mean_flux(3.5) == pytest.approx(math.exp(-0.619))
    assert flux.published_mean_flux(2.0) == pytest.approx(math.exp(-0.0023 * 3**3.65))
    for redshift in (0.0, 1.69, 4.86, math.nan):
        with pytest.raises(UserError, match="set mean_flux"):
            flux.published_mean_flux(redshift)


@DEVICES
@pytest.mark.parametrize("cell", [FINE, COARSE])
def test_optical_depth_equals_the_sum_over_all_cells_and_pixels(cell: float, device: str) -> None:
    """Hot gas wider than the line, velocities of several times its length, and an odd number of cells included."""
    fields = random_fields(3, 37)
    result = optical_depth(*tensors(fields, device), UNIVERSE, cell).cpu().double().numpy()
    expected = reference_depth(*fields, UNIVERSE, cell)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * expected.mean())
    np.testing.assert_allclose(result.sum(1), expected.sum(1), rtol=1e-5)


def test_groups_and_blocks_do_not_change_the_optical_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = tensors(random_fields(7, 48))
    tau = optical_depth(*fields, UNIVERSE, FINE)
    for values in (1, 1000, 10**7):
        monkeypatch.setattr(flux, "VALUES_AT_ONCE", values)
        assert torch.equal(optical_depth(*fields, UNIVERSE, FINE), tau)
    for cells in (1, 100, 10**6):
        monkeypatch.setattr(flux, "CELLS_AT_ONCE", cells)
        np.testing.assert_allclose(optical_depth(*fields, UNIVERSE, FINE), tau, rtol=1e-6)


@DEVICES
@pytest.mark.parametrize(("temperature", "velocity"), [(0.0, -1e6), (1e30, 1e6)])
def test_extreme_predictions_are_bounded(temperature: float, velocity: float, device: str) -> None:
    """Far beyond temperatures and velocities of gas: profiles become uniform instead of ever wider."""
    fields = [np.full((2, 16), value) for value in (1e6, velocity, temperature)]
    tau = optical_depth(*tensors(fields, device), UNIVERSE, FINE).cpu()
    assert tau.isfinite().all()
    np.testing.assert_allclose(tau, np.full((2, 16), tau.mean()), rtol=1e-5)


class Flux:
    """The mean of exp(-A τ) and its derivative, as `solve_scale` asks for them; counts the calls."""

    def __init__(self, tau: torch.Tensor) -> None:
        self.tau, self.calls = tau.double(), 0

    def __call__(self, scale: float) -> tuple[float, float]:
        self.calls += 1
        values = torch.exp(-scale * self.tau)
        return float(values.mean()), -float((self.tau * values).mean())


@pytest.mark.parametrize("target", [1e-4, 0.4, 0.9999])
@pytest.mark.parametrize("amplitude", [1e-6, 1.0, 1e5])
def test_rescaled_flux_has_the_mean_that_is_asked_for(target: float, amplitude: float) -> None:
    normal = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    for tau in (amplitude * torch.exp(2.5 * normal), torch.full((9,), 0.7 * amplitude)):
        mean = Flux(tau)
        scale = solve_scale(mean, target)
        assert mean.calls <= (7 if amplitude == 1 else 14)
        assert mean(scale)[0] == pytest.approx(target, rel=1e-6, abs=0)
    # Fixed: Newton's method cycled between gas of very different optical depth.
    mean = Flux(torch.tensor([4e-6, 5.0, 4000.0]).repeat_interleave(torch.tensor([31, 32, 44])))
    assert mean(solve_scale(mean, 0.415))[0] == pytest.approx(0.415, rel=1e-6)
    assert mean.calls < 20


def test_bad_mean_flux_is_refused() -> None:
    tau = torch.tensor([0.0, 1.0, 2.0, 3.0])  # a quarter of the pixels has no absorption
    for target in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(UserError, match="not between 0 and 1"):
            solve_scale(Flux(tau), target)
    assert solve_scale(Flux(tau), 0.26) > 1
    for target, values in ((0.2, tau), (0.5, 0 * tau)):
        mean = Flux(values)
        with pytest.raises(UserError, match="no factor of the optical depth gives a mean flux of"):
            solve_scale(mean, target)
        assert mean.calls < 30
    assert math.isnan(solve_scale(Flux(tau * math.nan), 0.5))
