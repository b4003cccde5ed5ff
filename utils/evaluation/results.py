"""The results of one evaluation: plain arrays, saved as an .npz file without pickled objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.files import atomic_write, recover
from utils.inference.channels import Channel
from utils.runs import tags

FOLDER = "evaluation"  # in a run directory: one file per evaluation during training


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

    def nearest_shell(self, k: float) -> int:
        """The shell whose wavenumber is closest to `k`."""
        return int(np.abs(self.k - k).argmin())

    @property
    def reference_shells(self) -> tuple[int, int, int]:
        """Large, middle and small scales: at twice the first wavenumber, and at a quarter and half of the last one."""
        first, last = float(self.k[0]), float(self.k[-1])
        large, middle, small = (self.nearest_shell(k) for k in (min(2 * first, last), last / 4, last / 2))
        return large, middle, small


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

    channels: tuple[Channel, ...]
    input_channels: tuple[Channel, ...]
    cells: int  # of the volume along x
    l1: np.ndarray  # [C] mean |prediction − target| of the channel values
    r2: np.ndarray  # [C] 1 − Σ(prediction − target)² / Σ(target − mean)² of the channel values
    spectra: dict[str, Spectrum]  # by field: "density", "log density", "velocity", "divergence", "log temperature" …
    length_unit: str  # "Mpc/h" or "cells"
    distributions: dict[str, Distribution]  # by channel name, and "velocity divergence"
    phase_diagram: PhaseDiagram | None  # None if density or temperature have no physical units
    divergence_r2: float  # R² of the velocity divergence; NaN if there is no velocity
    slices: dict[str, np.ndarray]  # the middle plane: "input" [C_in, Y, Z], "target" and "predicted" [C, Y, Z]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # epoch, step, checkpoint, input, …: plain values

    @property
    def wavenumber_unit(self) -> str:
        return "h/Mpc" if self.length_unit == "Mpc/h" else "rad/cell"

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
        return scalars

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
        return lines


def save(results: Results, path: Path) -> None:
    """Writes an .npz file atomically."""
    arrays: dict[str, np.ndarray] = {"l1": results.l1, "r2": results.r2}
    text: dict[str, Any] = {
        "channels": [asdict(channel) for channel in results.channels],
        "input_channels": [asdict(channel) for channel in results.input_channels],
        "cells": results.cells,
        "length_unit": results.length_unit,
        "divergence_r2": results.divergence_r2,
        "metadata": dict(results.metadata),
        "spectra": list(results.spectra),
        "distributions": {},
    }
    for number, spectrum in enumerate(results.spectra.values()):
        arrays |= {f"spectrum {number} {name}": value for name, value in vars(spectrum).items()}
    for number, (name, distribution) in enumerate(results.distributions.items()):
        for part in ("edges", "predicted", "target"):
            arrays[f"distribution {number} {part}"] = getattr(distribution, part)
        text["distributions"][name] = {"unit": distribution.unit, "is_log": distribution.is_log}
    if results.phase_diagram is not None:
        arrays |= {f"phase_diagram {name}": value for name, value in vars(results.phase_diagram).items()}
    arrays |= {f"slice {name}": value.astype(np.float32) for name, value in results.slices.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,), open(partial, "wb") as file:
        np.savez_compressed(file, text=np.array(json.dumps(text)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Results:
    """Reads a file that `save` wrote; UserError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text = json.loads(str(arrays["text"]))
        spectra = {
            name: Spectrum(**{part.name: arrays[f"spectrum {number} {part.name}"] for part in fields(Spectrum)})
            for number, name in enumerate(text["spectra"])
        }
        distributions = {
            name: Distribution(
                **{part: arrays[f"distribution {number} {part}"] for part in ("edges", "predicted", "target")}, **rest
            )
            for number, (name, rest) in enumerate(text["distributions"].items())
        }
        phase_diagram = _with_prefix(arrays, "phase_diagram ")
        return Results(
            channels=tuple(Channel(**channel) for channel in text["channels"]),
            input_channels=tuple(Channel(**channel) for channel in text["input_channels"]),
            cells=text["cells"],
            l1=arrays["l1"],
            r2=arrays["r2"],
            spectra=spectra,
            length_unit=text["length_unit"],
            distributions=distributions,
            phase_diagram=PhaseDiagram(**phase_diagram) if phase_diagram else None,
            divergence_r2=text["divergence_r2"],
            slices=_with_prefix(arrays, "slice "),
            metadata=text["metadata"],
        )
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:  # for a damaged archive, zipfile, zlib and numpy raise many types
        raise UserError(f"{path} holds no evaluation ({error}); recreate it with evaluate.py") from None


def _with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


# --- the evaluations of a run ----------------------------------------------------------------------------------------


def path_of_step(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.npz"


def load_history(folder: Path) -> list[Results]:
    """All evaluations in a folder, ordered by step; unreadable files are skipped."""
    history = []
    for path in sorted(folder.glob("step_*.npz")):
        try:
            history.append(load(path))
        except UserError:
            continue
    return history


def remove_after(folder: Path, step: int) -> None:
    """Removes the evaluations after the step at which a training resumes; -1 removes all of them."""
    if folder.is_dir():
        recover(folder)
    for path in folder.glob("step_*.npz"):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink(missing_ok=True)
