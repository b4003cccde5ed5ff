"""The results of one evaluation: plain arrays, saved as an .npz file without pickled objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.channels import Channel
from utils.errors import UserError
from utils.files import atomic_write
from utils.training import evaluations, tags

ARRAY = "stored array"  # key of a JSON object that refers to an array
TARGET, PREDICTION = "target", "prediction"  # names of fields of the flux, and of its baseline:
FGPA, REAL_FGPA = "FGPA", "FGPA in real space"  # with the dark matter's peculiar velocities, and without
FLUX_LARGEST_K = 0.1  # s/km; beyond it, metal lines and thermal broadening dominate measured spectra

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spectrum:
    """Isotropic power of prediction and target, and their cross power, in shells of wavenumber; arrays [shells].

    k is the mean over a shell's modes, in radians per unit of length. Powers are in the square of the field's unit,
    times the unit of length cubed.
    """

    k: np.ndarray
    modes: np.ndarray  # number of modes per shell, both halves of the transform counted
    predicted: np.ndarray
    target: np.ndarray
    cross: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """P_predicted / P_target; 1 if the prediction has the right amount of structure."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.predicted / self.target

    @property
    def correlation(self) -> np.ndarray:
        """r(k) = P_cross / √(P_predicted · P_target); 1 if all structure is in the right place."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.cross / np.sqrt(self.predicted * self.target)

    @property
    def reference_shells(self) -> list[int]:
        """Large, middle and small scales: the shells closest to twice the first k, and to 1/4 and 1/2 of the last k."""
        first, last = self.k[[0, -1]]
        return [int(np.abs(self.k - k).argmin()) for k in (min(2 * first, last), last / 4, last / 2)]


@dataclass(frozen=True)
class Distribution:
    """Histograms of a physical value (or of the channel, if its transform is unknown) in bins of equal width.

    `edges` [n + 1] are decimal logarithms if `is_log`. Values outside the edges are in the first or last bin.
    """

    edges: np.ndarray
    predicted: np.ndarray  # counts [n]
    target: np.ndarray
    unit: str | None
    is_log: bool


@dataclass(frozen=True)
class PhaseDiagram:
    """Counts [n, m] of cells by log10 of density (in units of the mean) and of temperature (K)."""

    density_edges: np.ndarray
    temperature_edges: np.ndarray
    predicted: np.ndarray
    target: np.ndarray


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
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: field.power / self.fields[TARGET].power for name, field in self._others.items()}

    @property
    def largest_k(self) -> float:
        """The largest wavenumber of `power_errors`: half of Nyquist's, at most FLUX_LARGEST_K."""
        return max(float(self.k[0]), min(FLUX_LARGEST_K, float(self.k[-1]) / 2))

    @property
    def power_errors(self) -> dict[str, float]:
        """Mean |P1D / that of the target − 1| up to `largest_k`."""
        used = self.k <= self.largest_k
        return {name: float(np.abs(ratio[used] - 1).mean()) for name, ratio in self.ratios.items()}

    @property
    def pdf_distances(self) -> dict[str, float]:
        """Half the integral of |PDF − that of the target|: the share of pixels in the wrong bin, from 0 to 1."""
        widths, target = np.diff(self.edges), self.fields[TARGET].pdf
        return {name: float(np.abs(field.pdf - target) @ widths) / 2 for name, field in self._others.items()}

    @property
    def reference_modes(self) -> list[int]:
        """Large, middle and small scales: the modes closest to twice the first k, half of `largest_k`, and that."""
        wanted = (min(2 * self.k[0], self.largest_k), self.largest_k / 2, self.largest_k)
        return [int(np.abs(self.k - k).argmin()) for k in wanted]

    @property
    def _others(self) -> dict[str, FluxField]:
        return {name: field for name, field in self.fields.items() if name != TARGET}

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        scalars = {}
        for name, ratio in self.ratios.items():
            for mode in self.reference_modes:
                scalars[tags.evaluation(f"flux P1D ratio at k = {self.k[mode]:.3g}, {name}")] = float(ratio[mode])
            scalars[tags.evaluation(f"flux P1D error, {name}")] = self.power_errors[name]
            scalars[tags.evaluation(f"flux PDF distance, {name}")] = self.pdf_distances[name]
        for name, field in self.fields.items():
            scalars[tags.evaluation(f"flux mean before rescaling, {name}")] = field.unscaled_mean
        return scalars

    def lines(self) -> list[str]:
        """The main results as lines of a log."""
        means = ", ".join(f"{name} {field.unscaled_mean:.4f}" for name, field in self.fields.items())
        lines = [
            f"Lyman-alpha flux: mean {self.mean_flux:.4f} at redshift {self.redshift:g}; before rescaling: {means}"
        ]
        for name, ratio in self.ratios.items():
            modes = "; ".join(f"k = {self.k[mode]:.3g} s/km: {ratio[mode]:.3f}" for mode in self.reference_modes)
            error = f"mean error {self.power_errors[name]:.4f} up to {self.largest_k:.3g} s/km"
            lines.append(f"flux, {name}: P1D ratio at {modes}; {error}; PDF distance {self.pdf_distances[name]:.4f}")
        return lines


@dataclass(frozen=True)
class Results:
    """All results of one evaluation; arrays [C, …] follow the order of `channels`, the target's channels."""

    channels: tuple[Channel, ...]
    input_channels: tuple[Channel, ...]
    cell: float | None  # side of a cell in Mpc/h, if known
    l1: np.ndarray  # [C] mean |prediction − target| of the channel values
    r2: np.ndarray  # [C] 1 − Σ(prediction − target)² / Σ(target − mean)² of the channel values
    spectra: dict[str, Spectrum]  # by field: "density", "log density", "velocity", "divergence", "log temperature" …
    distributions: dict[str, Distribution]  # by channel name, and "velocity divergence"
    phase_diagram: PhaseDiagram | None  # None if density or temperature have no physical units
    divergence_r2: float  # R² of the velocity divergence; NaN if there is no velocity
    slices: dict[str, np.ndarray]  # the middle plane: "input" [C_in, Y, Z], "target" and "predicted" [C, Y, Z]
    metadata: Mapping[str, Any]  # epoch, step, checkpoint, input, …: plain values
    flux: Flux | None = None  # None if it was not computed

    @property
    def wavenumber_unit(self) -> str:
        return "rad/cell" if self.cell is None else "h/Mpc"

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        scalars = {tags.evaluation("L1"): float(self.l1.mean())}
        for channel, l1, r2 in zip(self.channels, self.l1, self.r2, strict=True):
            scalars[tags.evaluation(f"L1 {channel.name}")] = float(l1)
            scalars[tags.evaluation(f"R2 {channel.name}")] = float(r2)
        if np.isfinite(self.divergence_r2):
            scalars[tags.evaluation("R2 velocity divergence")] = self.divergence_r2
        for name, spectrum in self.spectra.items():
            for shell in spectrum.reference_shells:
                suffix = f"at k = {spectrum.k[shell]:.3g}, {name}"
                scalars[tags.evaluation(f"r {suffix}")] = float(spectrum.correlation[shell])
                scalars[tags.evaluation(f"P ratio {suffix}")] = float(spectrum.ratio[shell])
        return scalars | (self.flux.scalars() if self.flux else {})

    def lines(self) -> list[str]:
        """The main results as lines of a log."""
        width = max(len(channel.name) for channel in self.channels)
        lines = [
            f"{channel.name:<{width}}  L1 {l1:.6f}, R² {r2:.4f}"
            for channel, l1, r2 in zip(self.channels, self.l1, self.r2, strict=True)
        ]
        for name, spectrum in self.spectra.items():
            shells = (
                f"k = {spectrum.k[shell]:.3g} {self.wavenumber_unit}: r {spectrum.correlation[shell]:.4f}, "
                f"P ratio {spectrum.ratio[shell]:.3f}"
                for shell in spectrum.reference_shells
            )
            lines.append(f"{name}: {'; '.join(shells)}")
        return lines + (self.flux.lines() if self.flux else [])


def save(results: Results, path: Path) -> None:
    """Writes an .npz file atomically: each array under its path, such as "spectra/density/k", and `text`, the rest."""
    arrays: dict[str, np.ndarray] = {}

    def store(value: Any, name: str) -> Any:
        """Returns `value` for JSON; moves its arrays to `arrays` and refers to them by name."""
        if isinstance(value, dict):
            return {key: store(part, f"{name}/{key}" if name else key) for key, part in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        arrays[name] = value
        return {ARRAY: name}

    text = json.dumps(store(asdict(results), ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,), open(partial, "wb") as file:
        np.savez_compressed(file, text=np.array(text), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Results:
    """Reads a file that `save` wrote; UserError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        values = json.loads(
            str(arrays["text"]), object_hook=lambda part: arrays[part[ARRAY]] if ARRAY in part else part
        )
        for name in ("channels", "input_channels"):
            values[name] = tuple(Channel(**channel) for channel in values[name])
        for name, kind in (("spectra", Spectrum), ("distributions", Distribution)):
            values[name] = {key: kind(**parts) for key, parts in values[name].items()}
        if values["phase_diagram"] is not None:
            values["phase_diagram"] = PhaseDiagram(**values["phase_diagram"])
        if values["flux"] is not None:
            fields = {name: FluxField(**parts) for name, parts in values["flux"]["fields"].items()}
            values["flux"] = Flux(**{**values["flux"], "fields": fields})
        evaluation = Results(**values)
        evaluation.scalars(), evaluation.lines()  # fail if a value is of another type or shape
        return evaluation
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:  # for a damaged archive, zipfile, zlib and numpy raise many types
        reason = " ".join(str(error).split())[:300]  # numpy's may contain the whole header
        raise UserError(f"{path} holds no evaluation ({reason}); recreate it with evaluate.py") from None


# --- the evaluations of a run ----------------------------------------------------------------------------------------


def load_history(folder: Path) -> list[Results]:
    """All evaluations in a folder, ordered by step; damaged files are skipped with a warning."""
    history = []
    for path in sorted(folder.glob(evaluations.FILES)):
        try:
            history.append(load(path))
        except UserError as error:
            log.warning("An evaluation is missing in the report: %s", error)
    return history
