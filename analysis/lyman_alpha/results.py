"""The Lyman-alpha flux of one evaluated volume: plain arrays, and the numbers derived from them."""

import math
from dataclasses import dataclass

import numpy as np

from utils.run import tags

TARGET, PREDICTION = "target", "prediction"  # names of fields, and of the baseline:
FGPA, REAL_FGPA = "FGPA", "FGPA in real space"  # with the dark matter's peculiar velocities, and without
FITTED, TRANSFER = "fitted", "transfer function"  # the first one follows the name of the baseline
SHAPES = ("equilateral", "squeezed")  # of the triangles of a bispectrum
BANDS = ((0.003, 0.01), (0.01, 0.03), (0.003, 0.03), (0.03, 0.1))  # s/km, of the errors of P1D
MEASURABLE = (0.05, 0.95)  # flux between the noise of a continuum and of saturated absorption
LARGEST_LINEAR_K = 1.0  # h/Mpc, of the fit of the bias
FLUX_LARGEST_K = 0.1  # s/km; beyond it, metal lines and thermal broadening dominate measured spectra


@dataclass(frozen=True)
class FluxField:
    """Lyman-alpha flux F = exp(-scale · τ) of one field; all values are NaN if its optical depth is not finite."""

    scale: float  # gives the field the common mean flux
    unscaled_mean: float  # mean flux with the published photo-ionization rate
    mean: float
    correlation: float  # Pearson's r of F with that of the target, over all pixels
    pdf: np.ndarray  # [bins] probability density of F
    power: np.ndarray  # [bins of k] P1D in km/s, the mean over the sight-lines along x, y and z
    axis_power: np.ndarray  # [3, bins of k] that of the sight-lines along each axis, at Flux.axis_k
    p3d: np.ndarray  # [bins of mu, bins of k] P(k, mu) in (Mpc/h)³, at Flux.p3d_k; NaN without a mode
    quadrupole: np.ndarray  # [bins of k] of P(k, mu)
    target_p3d: np.ndarray  # like p3d, of the cross power with the flux of the target
    matter_p3d: np.ndarray  # the same of that with the density contrast of the dark matter; NaN if it is unknown
    depth_error: float  # mean |ln(scale · τ) − that of the target| where the target's flux is in MEASURABLE
    flux_bispectrum: np.ndarray  # [2, shells] of F / ⟨F⟩ − 1, equilateral and squeezed, in (Mpc/h)⁶
    sightline: np.ndarray  # [cells] F along one sight-line through the middle of the box


@dataclass(frozen=True)
class Flux:
    """Lyman-alpha flux of target, prediction and baseline, all rescaled to the same mean flux."""

    redshift: float
    mean_flux: float
    sightlines: list[int]  # number along x, y and z
    smoothing: float  # of the baseline's density, standard deviation in comoving Mpc/h
    edges: np.ndarray  # [bins + 1] of F
    k: np.ndarray  # [bins of k] in s/km, the mean over the sight-lines along x, y and z
    axis_k: np.ndarray  # [3, bins of k] that of the mode of each axis; NaN where an axis shorter than others has none
    velocity: np.ndarray  # [cells] of the sight-line, Hubble flow in km/s
    mu_edges: np.ndarray  # [bins of mu + 1] of |mu|, the cosine of the angle between wave and sight-line
    p3d_k: np.ndarray  # [bins of mu, bins of k] in h/Mpc, the mean over a bin's modes; no bins without all sight-lines
    p3d_modes: np.ndarray  # [bins of mu, bins of k] number of modes, of sight-lines along x, y and z
    p3d_mu_square: np.ndarray  # [bins of mu, bins of k] their mean mu²
    matter_power: np.ndarray  # [bins of mu, bins of k] that of the dark matter, as FluxField.matter_p3d
    flux_bispectrum_k: np.ndarray  # [shells] in h/Mpc; no shells without all sight-lines
    fields: dict[str, FluxField]  # "target", "prediction" and, if the units of the input are known, FGPA or REAL_FGPA

    @property
    def ratios(self) -> dict[str, np.ndarray]:
        """P1D of each field but the target, relative to that of the target."""
        return self.ratios_of("power")

    def ratios_of(self, name: str) -> dict[str, np.ndarray]:
        """An array of each FluxField but the target's, such as its `p3d`, relative to that of the target."""
        values = {field_name: getattr(field, name) for field_name, field in self.fields.items()}
        target = values.pop(TARGET)
        return {field_name: quotient(value, target) for field_name, value in values.items()}

    @property
    def largest_k(self) -> float:
        """The largest wavenumber of `power_error`: half of Nyquist's, at most FLUX_LARGEST_K."""
        return max(float(self.k[0]), min(FLUX_LARGEST_K, float(self.k[-1]) / 2))

    @property
    def reference_modes(self) -> list[int]:
        """Large, middle and small scales: the modes closest to twice the first k, half of `largest_k`, and that."""
        wanted = (min(2 * self.k[0], self.largest_k), self.largest_k / 2, self.largest_k)
        return [int(np.abs(self.k - k).argmin()) for k in wanted]

    def power_error(self, name: str) -> float:
        """Mean |P1D / that of the target − 1| up to `largest_k`."""
        return float(np.abs(self.ratios[name][self.k <= self.largest_k] - 1).mean())

    def band_errors(self, name: str) -> dict[str, float]:
        """Rms of P1D / that of the target − 1 in each of BANDS that has a mode, by "0.003 to 0.01 s/km"."""
        errors = {}
        for low, high in BANDS:
            inside = (low <= self.k) & (self.k <= high)
            if inside.any():
                errors[f"{low:g} to {high:g} s/km"] = float(np.sqrt(np.mean((self.ratios[name][inside] - 1) ** 2)))
        return errors

    def structure(self, name: str) -> dict[str, float]:
        """Comparisons of P(k, mu) up to half of the largest k; none without P(k, mu)."""
        if not self.p3d_k.size:
            return {}
        largest = float(np.nanmax(self.p3d_k)) / 2
        used, shells = (self.p3d_modes > 0) & (self.p3d_k <= largest), np.nanmax(self.p3d_k, axis=0) <= largest
        own, target = (self.multipoles(field)[:, shells] for field in (name, TARGET))
        errors = {
            "P3D": self.ratios_of("p3d")[name][used] - 1,
            "monopole": quotient(own[0], target[0]) - 1,
            "quadrupole": quotient(own[1] - target[1], target[0]),
            "residual": np.sqrt(np.abs(self.residual(name)[used])),
        }
        reach = f"to {largest:.2g} h/Mpc"
        values = {f"{part} error, {reach}": float(np.sqrt(np.mean(error**2))) for part, error in errors.items()}
        (bias, beta), (true_bias, true_beta) = self.bias(name), self.bias(TARGET)
        if np.isfinite(true_bias):
            values |= {"bias ratio": bias / true_bias, "beta ratio": beta / true_beta}
        return values

    def multipoles(self, name: str) -> np.ndarray:
        """Monopole and quadrupole of P(k, mu), [2, bins of k], in (Mpc/h)³."""
        field = self.fields[name]
        monopole = np.nansum(self.p3d_modes * field.p3d, axis=0) / self.p3d_modes.sum(0)
        return np.stack([monopole, field.quadrupole])

    def correlation(self, name: str) -> np.ndarray:
        """r(k, mu) of a field's flux with that of the target, [bins of mu, bins of k]."""
        field, target = self.fields[name], self.fields[TARGET]
        return quotient(field.target_p3d, np.sqrt(field.p3d * target.p3d))

    def residual(self, name: str) -> np.ndarray:
        """Power of the difference of a field's flux and the target's, relative to the target's, by mu and k."""
        field, target = self.fields[name], self.fields[TARGET]
        return quotient(field.p3d - 2 * field.target_p3d + target.p3d, target.p3d)

    def bias(self, name: str) -> tuple[float, float]:
        """b and beta of Kaiser's b (1 + beta mu²), fitted to the ratio of cross power to power of the dark matter.

        The bins have up to LARGEST_LINEAR_K; NaN if there are too few.
        """
        ratio = quotient(self.fields[name].matter_p3d, self.matter_power)
        used = np.isfinite(ratio) & (self.p3d_k <= LARGEST_LINEAR_K)
        if len({*np.round(self.p3d_mu_square[used], 6)}) < 2:
            return math.nan, math.nan
        slope, bias = np.polyfit(self.p3d_mu_square[used], ratio[used], 1, w=np.sqrt(self.p3d_modes[used]))
        return float(bias), float(slope / bias)

    def bispectrum_errors(self, name: str) -> dict[str, float]:
        """Rms of k³ (B − that of the target) over the shells, relative to the target's, by shape; none without B.

        A target may pass zero, where a ratio says nothing. k³ gives all shells about the same weight.
        """
        ours, target = (self.flux_bispectrum_k**3 * self.fields[field].flux_bispectrum for field in (name, TARGET))
        shells = np.isfinite(target).all(0)
        difference, size = (np.linalg.norm(values[:, shells], axis=1) for values in (ours - target, target))
        return dict(zip(SHAPES, quotient(difference, size).tolist(), strict=True)) if shells.any() else {}

    def measures(self, name: str) -> dict[str, float]:
        """All comparisons of a field with the target, by name; ideal are ratios and a correlation of 1, errors of 0."""
        ratio = self.ratios[name]
        measures = {f"P1D ratio at k = {self.k[mode]:.3g}": float(ratio[mode]) for mode in self.reference_modes}
        measures["P1D error"] = self.power_error(name)
        measures |= {f"P1D error, {band}": error for band, error in self.band_errors(name).items()}
        measures |= self.structure(name)
        measures |= {f"bispectrum error, {shape}": error for shape, error in self.bispectrum_errors(name).items()}
        # The share of pixels in the wrong bin, from 0 to 1.
        distance = float(np.abs(self.fields[name].pdf - self.fields[TARGET].pdf) @ np.diff(self.edges)) / 2
        measures |= {"correlation": self.fields[name].correlation, "PDF distance": distance}
        return measures | {"optical depth error": self.fields[name].depth_error}

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        values = {f"{label}, {name}": value for name in self.ratios for label, value in self.measures(name).items()}
        values |= {f"mean before rescaling, {name}": field.unscaled_mean for name, field in self.fields.items()}
        return {tags.evaluation("flux", name): value for name, value in values.items()}


def quotient(values: np.ndarray, target: np.ndarray) -> np.ndarray:
    """NaN or infinite where the target is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return values / target
