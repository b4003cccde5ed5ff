"""The Lyman-alpha flux of one evaluated volume: plain arrays, and the numbers derived from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from utils.training import tags

TARGET, PREDICTION = "target", "prediction"  # names of fields, and of the baseline:
FGPA, REAL_FGPA = "FGPA", "FGPA in real space"  # with the dark matter's peculiar velocities, and without
FLUX_LARGEST_K = 0.1  # s/km; beyond it, metal lines and thermal broadening dominate measured spectra


@dataclass(frozen=True)
class FluxField:
    """Lyman-alpha flux F = exp(-scale · τ) of one field; all values are NaN if its optical depth is not finite."""

    scale: float  # gives the field the common mean flux
    unscaled_mean: float  # mean flux with the published photo-ionization rate
    mean: float
    pdf: np.ndarray  # [bins] probability density of F
    power: np.ndarray  # [bins of k] P1D in km/s, the mean over the sight-lines along x, y and z
    axis_power: np.ndarray  # [3, bins of k] that of the sight-lines along each axis, at Flux.axis_k
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
    fields: dict[str, FluxField]  # "target", "prediction" and, if the units of the input are known, FGPA or REAL_FGPA

    @property
    def ratios(self) -> dict[str, np.ndarray]:
        """P1D of each field but the target, relative to that of the target."""
        target = self.fields[TARGET].power
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: field.power / target for name, field in self.fields.items() if name != TARGET}

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

    def pdf_distance(self, name: str) -> float:
        """Half the integral of |PDF − that of the target|: the share of pixels in the wrong bin, from 0 to 1."""
        return float(np.abs(self.fields[name].pdf - self.fields[TARGET].pdf) @ np.diff(self.edges)) / 2

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        scalars = {}
        for name, ratio in self.ratios.items():
            for mode in self.reference_modes:
                scalars[tags.evaluation("flux", f"P1D ratio at k = {self.k[mode]:.3g}, {name}")] = float(ratio[mode])
            scalars[tags.evaluation("flux", f"P1D error, {name}")] = self.power_error(name)
            scalars[tags.evaluation("flux", f"PDF distance, {name}")] = self.pdf_distance(name)
        for name, field in self.fields.items():
            scalars[tags.evaluation("flux", f"mean before rescaling, {name}")] = field.unscaled_mean
        return scalars
