"""The results of one evaluation: plain arrays, saved as an .npz file without pickled objects."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from analysis.evaluation.base import LOG_DENSITY, EvaluatedVolume, Statistic, reference_shells
from analysis.evaluation.statistics import STATISTICS
from analysis.lyman_alpha.results import quotient
from utils.config.channels import GAS, UNKNOWN, Channels, density_place, temperature_place, vectors_of, velocity_places
from utils.files import atomic_write
from utils.run import tags
from utils.run.directory import RunDirectory

DIVERGENCE = "divergence"
SPECTRA = ("density", LOG_DENSITY, "velocity", DIVERGENCE, "log temperature")  # of the gas, in this order
LEVELS = (0.9, 0.5)  # of r and T, whose wavenumbers are the effective resolution
PICTURES = "slices", "spectra", "distributions", *STATISTICS, "flux", "flux_3d"  # all that there may be
ARRAY = "stored array"  # key of a JSON object that refers to an array


@dataclass(frozen=True)
class Spectrum:
    """Isotropic power of prediction and target, and cross power, [shells], in the field's unit² times length³."""

    k: np.ndarray  # mean wavenumber of a shell's modes, in radians per unit of length
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
        """The k at which a curve falls below a level first, interpolated, or is first not finite; None if never."""
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
        pairs = itertools.product(curves, LEVELS)
        return {f"{name} = {level}": self.resolution(curves[name], level) for name, level in pairs}


def spectrum_names(channels: Channels) -> list[str]:
    """The name of the spectrum of each channel: one of SPECTRA, that of its vector, or its own."""
    own = [channel.name for channel in channels]
    names = dict(enumerate(f"{UNKNOWN}{name}" if name in SPECTRA else name for name in own))
    for vector, places in vectors_of(channels).items():
        names |= dict.fromkeys(places, f"vector {vector}" if vector in (*SPECTRA, *own) else vector)
    names |= dict.fromkeys(velocity_places(channels, GAS), "velocity")
    for place, name in ((density_place(channels, GAS), LOG_DENSITY), (temperature_place(channels), "log temperature")):
        names |= {} if place is None else {place: name}
    return [*names.values()]


@dataclass(frozen=True)
class Distribution:
    """Histograms of a physical value, or of the channel if its transform is unknown, in bins of equal width."""

    edges: np.ndarray  # [n + 1], decimal logarithms if is_log; the outer bins also hold the values outside
    predicted: np.ndarray  # counts [n]
    target: np.ndarray
    unit: str | None
    is_log: bool


@dataclass(frozen=True, kw_only=True)
class Results(EvaluatedVolume):
    """All results of one evaluation; arrays [C, …] follow the order of `channels`, the target's channels."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # `load` takes numpy's arrays as they are

    l1: np.ndarray  # [C] mean |prediction − target| of the channel values
    copied_l1: np.ndarray  # [C] that of copying the input's channel; NaN for channels that the input does not have
    r2: np.ndarray  # [C] 1 − Σ(prediction − target)² / Σ(target − mean)² of the channel values
    spectra: dict[str, Spectrum]  # by field: SPECTRA, then those of other vectors and channels
    distributions: dict[str, Distribution]  # by channel name, and "velocity divergence"
    divergence_r2: float  # R² of the velocity divergence; NaN if there is no velocity
    mass_ratio: float  # mean gas density of the prediction relative to the target's; NaN if its unit is unknown
    slices: dict[str, np.ndarray]  # the middle plane: "input" [C_in, Y, Z], "target" and "predicted" [C, Y, Z]
    metadata: Mapping[str, Any]  # epoch, step, checkpoint, input, …: plain values
    statistics: dict[str, Statistic]  # those of STATISTICS that the channels allow

    @property
    def pictures(self) -> list[str]:
        """Those for which there are data, by name."""
        flux = ["flux", *(["flux_3d"] if self.flux.p3d_k.size else [])] if self.flux else []
        return ["slices", "spectra", "distributions", *self.statistics, *flux]

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
        for statistic in self.statistics.values():
            scalars |= statistic.scalars()
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

    values = asdict(results)
    text = json.dumps(store(values | values.pop("statistics"), ""))
    path.parent.mkdir(exist_ok=True)
    with atomic_write([path]) as (partial,), open(partial, "wb") as file:
        np.savez_compressed(file, text=np.array(text), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Results:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    values = json.loads(str(arrays["text"]), object_hook=lambda part: arrays[part[ARRAY]] if ARRAY in part else part)
    statistics = {}
    for name, kind in STATISTICS.items():
        if (part := values.get(name)) is not None:
            # Earlier files have the coverage as one array.
            part = part if isinstance(part, dict) else {fields(kind)[0].name: part}  # type: ignore[arg-type]
            statistics[name] = TypeAdapter(kind).validate_python(part)
    return TypeAdapter(Results).validate_python(values | {"statistics": statistics})
