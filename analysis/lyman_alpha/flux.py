"""Lyman-alpha forest of simulated gas: neutral hydrogen, optical depth, flux, and its power along sight-lines (P1D).

Sight-lines are rows [lines, N] of periodic cells, in redshift space. Hydrogen is in photo-ionization equilibrium with a
uniform background. Each cell absorbs with a Gaussian (Doppler) profile at its Hubble plus peculiar velocity, integrated
over the pixels, so that the column density is conserved (Lukić et al. 2015, MNRAS 446, 3697). Damping wings, which
matter for columns above 1e18 / cm², are neglected. Optical depths are usually rescaled to an observed mean flux,
because the amplitude of the background is not known well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.constants import BOLTZMANN_J_PER_K, HYDROGEN_ATOM_KG, HYDROGEN_FRACTION, MEGAPARSEC_M
from utils.errors import UserError
from utils.powers import power
from utils.volumes.attributes import Simulation

# CODATA 2022 and IAU 2015, SI units.
ELECTRON_RADIUS = 2.8179403205e-15
LIGHT_SPEED = 2.99792458e8
GRAVITY = 6.67430e-11
# Lyman alpha: oscillator strength and wavelength (Morton 2003, ApJS 149, 205).
STRENGTH = 0.4164
WAVELENGTH = 1.21567e-7
# Integral of the cross-section over velocity, m³/s: π e² f λ / (4 π ε0 m_e c).
CROSS_SECTION = math.pi * ELECTRON_RADIUS * LIGHT_SPEED * STRENGTH * WAVELENGTH

# Electrons per hydrogen atom from helium, which is taken as doubly ionized, as it is after He II reionization (z < 3).
HELIUM_ELECTRONS = 2 * (1 - HYDROGEN_FRACTION) / (4 * HYDROGEN_FRACTION)
IONIZATION_KELVIN = 157807.0  # 13.6 eV / k_B
TEMPERATURE_RANGE = (3.0, 1e9)  # K, of the fit of the recombination rate; temperatures are clamped to it

# Becker & Bolton 2013, MNRAS 436, 1023: redshift, log10 of the photo-ionization rate in 1e-12 / s.
BACKGROUND = (
    (2.40, 2.80, 3.20, 3.60, 4.00, 4.40, 4.75),
    (0.015, -0.066, -0.103, -0.097, -0.072, -0.019, -0.029),
)
# Gaikwad et al. 2021, MNRAS 506, 4389: redshift, temperature at the mean density in K, gamma.
TEMPERATURE_DENSITY = (
    (2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6, 3.8),
    (9500.0, 11000.0, 12750.0, 13500.0, 14750.0, 14750.0, 12750.0, 11250.0, 10250.0, 9250.0),
    (1.5, 1.425, 1.325, 1.275, 1.25, 1.225, 1.275, 1.35, 1.4, 1.525),
)

SATURATION = 4.0  # erf is ±1 in float32 from here on: a profile ends exactly at this many Doppler widths
UNIFORM = 1.25  # a periodic Gaussian whose b is this many times the line's length is constant to 4e-7
CELLS_AT_ONCE = 2**18
VALUES_AT_ONCE = 2**17
WIDENING = 1.25  # of the profiles from the first to the last cell of a block
LARGEST_LOG_SCALE, LARGEST_STEP = 60.0, 5.0  # ln of factors of the optical depth that float32 can hold

# What a file must state of its simulation, in the order of Universe's fields.
STATED = ("redshift", "cosmology_H0", "cosmology_Om0", "cosmology_Ode0", "cosmology_Ob0")


@dataclass(frozen=True)
class Universe:
    """Redshift and cosmology of a snapshot: ΛCDM, flat or curved, without radiation."""

    redshift: float
    h: float
    omega_m: float
    omega_l: float
    omega_b: float

    @classmethod
    def of(cls, simulation: Simulation) -> "Universe":
        """The universe of a simulation that states all five numbers."""
        redshift, hubble, *densities = (float(simulation[name]) for name in STATED)
        return cls(redshift, hubble / 100, *densities)

    def pixel_width(self, cell: float) -> float:
        """Hubble flow in km/s across a cell whose side is `cell` comoving Mpc/h."""
        return 100 * self._expansion() * cell / (1 + self.redshift)

    def hubble_rate(self) -> float:
        """H(z) in 1/s."""
        return 1e5 * self.h * self._expansion() / MEGAPARSEC_M

    def hydrogen_density(self) -> float:
        """Mean number density of hydrogen nuclei, proper, per cm³."""
        critical = 3 * (1e5 * self.h / MEGAPARSEC_M) ** 2 / (8 * math.pi * GRAVITY)
        atoms = HYDROGEN_FRACTION * self.omega_b * critical / HYDROGEN_ATOM_KG
        return 1e-6 * atoms * (1 + self.redshift) ** 3

    def _expansion(self) -> float:
        """H(z) / H0."""
        a, curvature = 1 + self.redshift, 1 - self.omega_m - self.omega_l
        return math.sqrt(self.omega_m * a**3 + curvature * a**2 + self.omega_l)


def photoionization_rate(redshift: float) -> float:
    """Γ of neutral hydrogen per second at 2.4 ≤ z ≤ 4.75 (Becker & Bolton 2013); beyond, that of the nearest end."""
    return float(1e-12 * 10 ** np.interp(redshift, *BACKGROUND))


def neutral_fraction(density: Tensor, temperature: Tensor, universe: Universe) -> Tensor:
    """Neutral fraction of hydrogen in equilibrium of photo- and collisional ionization with recombination.

    `density` in units of the mean, `temperature` in K. The rates, case A, are the fits of Hui & Gnedin 1997, MNRAS 292,
    27, appendix A. With n_e = n_H (q - x), q = 1 + HELIUM_ELECTRONS, the equilibrium Γ x + β n_e x = α n_e (1 - x) is
    a x² - b x + c = 0. Its smaller root is computed without a difference of nearly equal numbers.
    """
    temperature = temperature.clamp(*TEMPERATURE_RANGE)
    ratio = 2 * IONIZATION_KELVIN / temperature
    recombination = 1.269e-13 * power(ratio, 1.503) / power(1 + power(ratio / 0.522, 0.470), 1.923)
    collisions = 21.11 * power(temperature, -1.5) * torch.exp(-ratio / 2) * power(ratio, -1.089)
    collisions = collisions / power(1 + power(ratio / 0.354, 0.874), 1.101)
    electrons = 1 + HELIUM_ELECTRONS
    scaled = density * (universe.hydrogen_density() / photoionization_rate(universe.redshift))  # n_H / Γ
    down, up = recombination * scaled, collisions * scaled
    b = 1 + up * electrons + down * (1 + electrons)
    c = down * electrons / b
    return 2 * c / (1 + (1 - 4 * c * (down + up) / b).sqrt())


def fgpa_relation(redshift: float) -> tuple[float, float]:
    """T0 in K and gamma of photo-ionized gas, whose temperature is T0 density**(gamma - 1), see `power_law`.

    They were measured at 2 ≤ z ≤ 3.8 (Gaikwad et al. 2021); beyond, those of the nearest end are used. Together
    with the density and velocity of dark matter this is the fluctuating Gunn-Peterson approximation.
    """
    redshifts, temperatures, gammas = TEMPERATURE_DENSITY
    kelvin, gamma = (float(np.interp(redshift, redshifts, values)) for values in (temperatures, gammas))
    return kelvin, gamma


def power_law(density: Tensor, kelvin: float, gamma: float) -> Tensor:
    """Temperature in K of gas of this density in units of the mean, which has `kelvin` at the mean density."""
    return kelvin * power(density, gamma - 1)


@torch.no_grad()
def optical_depth(density: Tensor, velocity: Tensor, temperature: Tensor, universe: Universe, cell: float) -> Tensor:
    """Optical depth of Lyman alpha along periodic sight-lines in redshift space, [lines, N], float32.

    `density` in units of the mean, peculiar `velocity` along the line in km/s, `temperature` in K, each [lines, N];
    `cell` in comoving Mpc/h. The pixels are as wide as the cells. The error of a cell's share in a pixel is about 1e-7
    of the cell's total. In addition, the velocity in pixels is rounded to float32, by up to 6e-8 of itself: 0.02 pixels
    at 1e5 km/s and 0.3 km/s per pixel. A non-finite value makes its line NaN. Lines are processed in groups, so the
    memory needed in addition to arguments and result does not grow with their number.
    """
    lines = max(1, CELLS_AT_ONCE // density.shape[1])
    result = torch.empty(density.shape, device=density.device)
    for *fields, out in zip(*(field.split(lines) for field in (density, velocity, temperature, result)), strict=True):
        out.copy_(_depth_of_group(fields, universe, cell))
    return result


def absorbers(fields: Sequence[Tensor], universe: Universe, cell: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each cell the sum of its optical depth over pixels, its peculiar velocity and its Doppler width, in pixels.

    `fields`: density, velocity and temperature, as in `optical_depth`.
    """
    (density, velocity, temperature), width = fields, universe.pixel_width(cell)
    uniform_depth = 1e6 * CROSS_SECTION * universe.hydrogen_density() / universe.hubble_rate()  # if all were neutral
    depth = uniform_depth * density * neutral_fraction(density, temperature, universe)
    kelvin = temperature.clamp(*TEMPERATURE_RANGE)
    return depth, velocity / width, (kelvin * (2 * BOLTZMANN_J_PER_K / HYDROGEN_ATOM_KG)).sqrt() / (1e3 * width)


def _depth_of_group(fields: Sequence[Tensor], universe: Universe, cell: float) -> Tensor:
    density, velocity, temperature = (field.float().contiguous() for field in fields)
    cells = density.shape[1]
    depth, shift, doppler = absorbers((density, velocity, temperature), universe, cell)
    finite = (depth.isfinite() & shift.isfinite() & temperature.isfinite()).all(1, keepdim=True)
    depth = torch.where(finite, depth, torch.nan)
    shift, doppler = torch.where(finite, shift, 0), torch.where(finite, doppler, 1)
    whole = shift.round()
    pixel = (torch.arange(cells, device=density.device) + whole.long()) % cells
    # Profiles that are constant over the line would be the slowest ones to sum.
    is_constant = doppler >= UNIFORM * cells
    constant = torch.where(is_constant, depth, 0).sum(1, keepdim=True) / cells
    depth, doppler = torch.where(is_constant, 0, depth), torch.where(is_constant, 1, doppler)
    return _sum_of_profiles(pixel, shift - whole, doppler, depth) + constant


def _sum_of_profiles(pixel: Tensor, offset: Tensor, doppler: Tensor, depth: Tensor) -> Tensor:
    """Sums the cells' Gaussians, averaged over each pixel, [lines, N].

    `offset` is the distance of a Gaussian's center from that of its `pixel`, `doppler` its b, both in pixels; `depth`
    is the sum of its values over all pixels. Cells are sorted by width and processed in blocks that fit into a CPU's
    cache. Profiles are zero beyond their own width and the sort is stable. So sums do not depend on the blocks: bit for
    bit on the CPU; to rounding on a GPU, which adds in any order.
    """
    lines, cells = pixel.shape
    half_widths, order = (SATURATION * doppler).ceil().int().flatten().sort(stable=True)
    half_widths = half_widths.cpu()
    wraps = -(-int(half_widths[-1]) // cells)
    images = 2 * wraps + 1  # of a line, side by side, so that the profiles need no modulo
    starts = torch.arange(lines, device=pixel.device)[:, None] * (images * cells) + wraps * cells
    pixel, half_depth = (starts + pixel).flatten()[order, None], (depth / 2).flatten()[order, None]
    offset, inverse = offset.flatten()[order, None], doppler.reciprocal().flatten()[order, None]
    sums = torch.zeros(lines * images * cells, device=pixel.device)
    start = 0
    while start < len(order):
        widest = int(half_widths[start] * WIDENING)
        most = start + max(1, VALUES_AT_ONCE // (2 * widest + 1))
        stop = min(most, int(torch.searchsorted(half_widths, widest, right=True)))
        block, half = slice(start, stop), int(half_widths[stop - 1])
        places = torch.arange(-half, half + 2, device=pixel.device)
        integral = (places - 0.5 - offset[block]).mul_(inverse[block]).erf_()  # at the edges of the pixels
        values = (integral[:, 1:] - integral[:, :-1]).mul_(half_depth[block])
        sums.scatter_add_(0, (pixel[block] + places[:-1]).flatten(), values.flatten())
        start = stop
    return sums.view(lines, images, cells).sum(1)


def published_mean_flux(redshift: float) -> float:
    """Observed mean flux exp(-τ_eff); UserError outside of 1.7 ≤ z ≤ 4.85.

    From z = 2.15, τ_eff is the fit of Becker et al. 2013, MNRAS 430, 2067; below, of Kim et al. 2007, MNRAS 382, 1657.
    """
    if 2.15 <= redshift <= 4.85:
        return math.exp(0.132 - 0.751 * ((1 + redshift) / 4.5) ** 2.90)
    if 1.7 <= redshift < 2.15:
        return math.exp(-0.0023 * (1 + redshift) ** 3.65)
    known = "only from 1.7 to 4.85"
    raise UserError(f"no fit of the observed mean flux at redshift {redshift:.4g} ({known}); set mean_flux")


def solve_scale(mean_and_slope: Callable[[float], tuple[float, float]], target: float) -> float:
    """The factor A with ⟨exp(-A τ)⟩ = `target` to a relative 1e-6, or NaN if the mean is NaN.

    `mean_and_slope(A)` returns that mean and its derivative in A. Newton's method for ln(-ln mean) as a function of
    ln A, which is nearly a straight line, needs about four calls; steps that leave the bracket are replaced by its
    middle. Raises UserError if there is no such factor.
    """
    if not 0 < target < 1:
        raise UserError(f"a mean flux of {target} is not between 0 and 1; choose another one")
    low, high, guess = -math.inf, math.inf, 0.0  # of ln A
    while abs(guess) < LARGEST_LOG_SCALE and high - low > 1e-12:
        scale = math.exp(guess)
        mean, slope = mean_and_slope(scale)
        if math.isnan(mean) or abs(mean / target - 1) < 1e-6:
            return math.nan if math.isnan(mean) else scale
        low, high = (guess, high) if mean > target else (low, guess)
        step = math.copysign(LARGEST_STEP, mean - target)
        if 0 < mean < 1 and slope < 0:
            newton = math.log(math.log(target) / math.log(mean)) * mean * math.log(mean) / (slope * scale)
            step = math.copysign(min(abs(newton), LARGEST_STEP), step)
        guess = guess + step if low < guess + step < high else (low + high) / 2
    raise UserError(f"no factor of the optical depth gives a mean flux of {target:.6g}; choose another mean flux")


def power_sums(flux_contrast: Tensor) -> Tensor:
    """Σ |FFT|² over lines [lines, N] of F / ⟨F⟩ - 1, for the modes m = 0 … N / 2: [N // 2 + 1], float64.

    P1D(k) = L / N² ⟨|FFT|²⟩ with L, the length of a line in km/s, and k = 2 π m / L.
    """
    sums = torch.zeros(flux_contrast.shape[1] // 2 + 1, dtype=torch.float64, device=flux_contrast.device)
    for part in flux_contrast.split(max(1, CELLS_AT_ONCE // flux_contrast.shape[1])):
        sums += torch.view_as_real(torch.fft.rfft(part)).double().square().sum((0, 2))
    return sums
