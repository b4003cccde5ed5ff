"""The results of one evaluation: plain arrays, saved as an .npz file without pickled objects."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from analysis.lyman_alpha.results import Flux, quotient
from utils.files import atomic_write
from utils.run import tags
from utils.run.directory import RunDirectory
from utils.volumes.channels import Channel

LOG_DENSITY = "log density"
LEVELS = (0.9, 0.5)  # of r and T, whose wavenumbers are the effective resolution
PICTURES = "slices", "spectra", "distributions", "phase_diagram", "flux", "flux_3d", "bispectrum", "coverage"
COVERED = (1.0, 1.96)  # standard deviations, within which 68 and 95 % of Gaussian errors are
DENSITIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # / mean, ends of the bins of the coverage
ARRAY = "stored array"  # key of a JSON object that refers to an array


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
        return quotient(self.predicted, self.target)

    @property
    def correlation(self) -> np.ndarray:
        """r(k) = P_cross / √(P_predicted · P_target); 1 if all structure is in the right place."""
        with np.errstate(invalid="ignore"):
            return quotient(self.cross, np.sqrt(self.predicted * self.target))

    def resolution(self, curve: np.ndarray, level: float) -> float | None:
        """The k at which a curve falls below a level first, interpolated; None if it does not.

        The first k if the curve begins below, and that of a shell whose value is NaN.
        """
        low = np.flatnonzero(~(curve >= level))
        if not low.size:
            return None
        shell = int(low[0])
        if shell == 0 or np.isnan(curve[shell]):
            return float(self.k[shell])
        pair = slice(shell - 1, shell + 1)
        return float(np.interp(-level, -curve[pair], self.k[pair]))

    @property
    def resolutions(self) -> dict[str, float | None]:
        """`resolution` of r, and of T = √ratio or 1 / T, whichever is smaller, at each of LEVELS, by name."""
        transfer = np.sqrt(self.ratio)
        with np.errstate(divide="ignore"):
            curves = {"r": self.correlation, "T": np.minimum(transfer, 1 / transfer)}
        return {
            f"{name} = {level}": self.resolution(curve, level) for name, curve in curves.items() for level in LEVELS
        }


@dataclass(frozen=True)
class Bispectrum:
    """Equilateral bispectrum of prediction and target, arrays [shells]; in the unit of length to the power of six."""

    k: np.ndarray
    predicted: np.ndarray
    target: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        return quotient(self.predicted, self.target)

    @property
    def reference_ratios(self) -> dict[float, float]:
        """The ratio at large, middle and small scales, by k."""
        shells = reference_shells(self.k) if np.isfinite(self.k).any() else []
        return {float(self.k[shell]): float(self.ratio[shell]) for shell in shells}


def reference_shells(k: np.ndarray) -> list[int]:
    """Large, middle and small scales: the shells closest to twice the first k, and to 1/4 and 1/2 of the last k.

    Fewer in a small volume, in which some of them are the same.
    """
    first, last = k[np.isfinite(k)][[0, -1]]
    return sorted({int(np.nanargmin(np.abs(k - wanted))) for wanted in (min(2 * first, last), last / 4, last / 2)})


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
class Results:
    """All results of one evaluation; arrays [C, …] follow the order of `channels`, the target's channels."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # `load` takes numpy's arrays as they are

    channels: tuple[Channel, ...]
    input_channels: tuple[Channel, ...]
    cell: float | None  # side of a cell in Mpc/h, if known
    l1: np.ndarray  # [C] mean |prediction − target| of the channel values
    copied_l1: np.ndarray  # [C] that of copying the input's channel; NaN for channels that the input does not have
    r2: np.ndarray  # [C] 1 − Σ(prediction − target)² / Σ(target − mean)² of the channel values
    spectra: dict[str, Spectrum]  # by field: "density", "log density", "velocity", "divergence", "log temperature" …
    distributions: dict[str, Distribution]  # by channel name, and "velocity divergence"
    phase_diagram: PhaseDiagram | None  # None if density or temperature have no physical units
    divergence_r2: float  # R² of the velocity divergence; NaN if there is no velocity
    mass_ratio: float  # mean gas density of the prediction relative to the target's; NaN if its unit is unknown
    bispectrum: Bispectrum | None  # of the log density; None if its unit is unknown
    slices: dict[str, np.ndarray]  # the middle plane: "input" [C_in, Y, Z], "target" and "predicted" [C, Y, Z]
    metadata: Mapping[str, Any]  # epoch, step, checkpoint, input, …: plain values
    flux: Flux | None = None  # None if it was not computed
    # [2, C, bins + 1] shares of cells whose error is within COVERED standard deviations, in bins of predicted density
    # (one bin if its unit is unknown) and, last, in all; None if the prediction has none
    coverage: np.ndarray | None = None

    @property
    def wavenumber_unit(self) -> str:
        return "rad/cell" if self.cell is None else "h/Mpc"

    @property
    def pictures(self) -> list[str]:
        """Those of PICTURES for which there are data."""
        missing = {name for name in ("phase_diagram", "flux", "bispectrum", "coverage") if getattr(self, name) is None}
        missing |= set() if self.flux and self.flux.p3d_k.size else {"flux_3d"}
        return [name for name in PICTURES if name not in missing]

    @property
    def run(self) -> RunDirectory | None:
        """The directory of the training run, if the results name it or one of its checkpoints."""
        if "run" in self.metadata:
            return RunDirectory(Path(self.metadata["run"]))
        checkpoints = Path(self.metadata.get("checkpoint", "")).parent.parent
        run = RunDirectory(checkpoints.parent)
        return run if run.checkpoints == checkpoints else None

    @property
    def title(self) -> str:
        """The run or the file, epoch and step: "demo/2ranks/00, epoch 4, step 800"."""
        files = (Path(self.metadata.get(key) or "").name for key in ("checkpoint", "prediction"))
        source = self.run.title if self.run else next(filter(None, files), "")
        numbers = (f"{key} {self.metadata[key]}" for key in ("epoch", "step") if key in self.metadata)
        return ", ".join(filter(None, (source, *numbers)))

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        scalars = {tags.evaluation("L1", "all channels"): float(self.l1.mean())}
        for channel, l1, r2 in zip(self.channels, self.l1, self.r2, strict=True):
            scalars[tags.evaluation("L1", channel.name)] = float(l1)
            scalars[tags.evaluation("R2", channel.name)] = float(r2)
        if np.isfinite(self.divergence_r2):
            scalars[tags.evaluation("R2", "velocity divergence")] = self.divergence_r2
        if np.isfinite(self.mass_ratio):
            scalars[tags.evaluation("mass", "mean density / target's")] = self.mass_ratio
        for name, spectrum in self.spectra.items():
            for level, k in spectrum.resolutions.items():
                if k is not None:
                    scalars[tags.evaluation("resolution", f"{name}, {level}")] = k
            for shell in reference_shells(spectrum.k):
                curve = f"{name} at k = {spectrum.k[shell]:.3g}"
                scalars[tags.evaluation("r", curve)] = float(spectrum.correlation[shell])
                scalars[tags.evaluation("P ratio", curve)] = float(spectrum.ratio[shell])
        for k, ratio in self.bispectrum.reference_ratios.items() if self.bispectrum else ():
            scalars[tags.evaluation("B ratio", f"log density at k = {k:.3g}")] = ratio
        return scalars | (self.flux.scalars() if self.flux else {})


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
    path.parent.mkdir(exist_ok=True)
    with atomic_write([path]) as (partial,), open(partial, "wb") as file:
        np.savez_compressed(file, text=np.array(text), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Results:
    """Reads a file that `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    values = json.loads(str(arrays["text"]), object_hook=lambda part: arrays[part[ARRAY]] if ARRAY in part else part)
    return TypeAdapter(Results).validate_python(values)
