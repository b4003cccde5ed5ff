"""What an evaluation of one predicted volume found: plain arrays, kept as an .npz file of numbers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.files import atomic_write
from utils.inference.channels import Channel


@dataclass(frozen=True)
class Spectrum:
    """Isotropic power of prediction and target, and their cross power, in shells of wavenumber; arrays [shells].

    k is the mean over a shell's modes, in radians per unit of length; powers are in the square of the field's unit,
    times the unit of length cubed.
    """

    k: np.ndarray
    modes: np.ndarray  # how many of them, both halves of the transform counted
    predicted: np.ndarray
    target: np.ndarray
    cross: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """P_predicted / P_target; 1 where the prediction has the right amount of structure."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.predicted / self.target

    @property
    def correlation(self) -> np.ndarray:
        """r(k) = P_cross / √(P_predicted · P_target); 1 where all structure is in the right place."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.cross / np.sqrt(self.predicted * self.target)

    def at(self, k: float) -> int:
        """The shell whose k is nearest."""
        return int(np.abs(self.k - k).argmin())


@dataclass(frozen=True)
class Distribution:
    """Histograms of a physical value (or of the channel, where the transform is unknown) over equal steps.

    `edges` [n + 1] are decimal logarithms if `is_log`. What lies outside is in the first or last bin.
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
    """All of it; fields [C, …] are of the target's channels, in the order of `channels`."""

    channels: tuple[Channel, ...]
    input_channels: tuple[Channel, ...]
    cells: int  # of the volume along x
    l1: np.ndarray  # [C] mean |prediction − target|, of the channels' values
    r2: np.ndarray  # [C] 1 − Σ(prediction − target)² / Σ(target − mean)², of the channels' values
    spectra: dict[str, Spectrum]  # by field: "density", "log density", "velocity", "divergence", "log temperature" …
    length_unit: str  # of 1/k: "Mpc/h", or "cells"
    distributions: dict[str, Distribution]  # by channel name, and "velocity divergence"
    plane: PhaseDiagram | None  # None where density or temperature have no physical units
    divergence_r2: float  # of the velocity's divergence; NaN where there is no velocity
    slices: dict[str, np.ndarray]  # "input" [C_in, Y, Z], "target" [C, Y, Z], "predicted" [C, Y, Z]: the middle plane
    about: Mapping[str, Any] = field(default_factory=dict)  # epoch, step, checkpoint, input, tiling …: plain values

    @property
    def wavenumber_unit(self) -> str:
        """Of k in the spectra."""
        return "h/Mpc" if self.length_unit == "Mpc/h" else "rad/cell"

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and metrics.jsonl, under their names there."""
        found = {"Evaluation/L1": float(self.l1.mean())}
        for channel, l1, r2 in zip(self.channels, self.l1, self.r2, strict=True):
            found[f"Evaluation/L1 {channel.name}"] = float(l1)
            found[f"Evaluation/R2 {channel.name}"] = float(r2)
        if np.isfinite(self.divergence_r2):
            found["Evaluation/R2 velocity divergence"] = self.divergence_r2
        for name, spectrum in self.spectra.items():
            for k in telling_wavenumbers(spectrum):
                shell = spectrum.at(k)
                place = f"at k = {spectrum.k[shell]:.3g}, {name}"
                found[f"Evaluation/r {place}"] = float(spectrum.correlation[shell])
                found[f"Evaluation/P ratio {place}"] = float(spectrum.ratio[shell])
        return found


def telling_wavenumbers(spectrum: Spectrum) -> tuple[float, float, float]:
    """Large, middle and small scales: twice the first shell, a quarter and half of the last one."""
    first, last = float(spectrum.k[0]), float(spectrum.k[-1])
    return min(2 * first, last), last / 4, last / 2


def save(results: Results, path: Path) -> None:
    """Writes an .npz, whole or not at all."""
    arrays: dict[str, np.ndarray] = {"l1": results.l1, "r2": results.r2}
    text: dict[str, Any] = {
        "channels": [asdict(channel) for channel in results.channels],
        "input_channels": [asdict(channel) for channel in results.input_channels],
        "cells": results.cells,
        "length_unit": results.length_unit,
        "divergence_r2": results.divergence_r2,
        "about": dict(results.about),
        "spectra": list(results.spectra),
        "distributions": {},
    }
    for number, spectrum in enumerate(results.spectra.values()):
        arrays |= {f"spectrum {number} {name}": value for name, value in vars(spectrum).items()}
    for number, (name, distribution) in enumerate(results.distributions.items()):
        for part in ("edges", "predicted", "target"):
            arrays[f"distribution {number} {part}"] = getattr(distribution, part)
        text["distributions"][name] = {"unit": distribution.unit, "is_log": distribution.is_log}
    if results.plane is not None:
        arrays |= {f"plane {name}": value for name, value in vars(results.plane).items()}
    arrays |= {f"slice {name}": value.astype(np.float32) for name, value in results.slices.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,), open(partial, "wb") as file:
        np.savez_compressed(file, text=np.array(json.dumps(text)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Results:
    """What `save` wrote; UserError for a file that is none of its."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text = json.loads(str(arrays["text"]))
        plane = {name[6:]: value for name, value in arrays.items() if name.startswith("plane ")}
        spectra = {
            name: Spectrum(**{part: arrays[f"spectrum {number} {part}"] for part in Spectrum.__dataclass_fields__})
            for number, name in enumerate(text["spectra"])
        }
        distributions = {
            name: Distribution(
                **{part: arrays[f"distribution {number} {part}"] for part in ("edges", "predicted", "target")}, **rest
            )
            for number, (name, rest) in enumerate(text["distributions"].items())
        }
        return Results(
            channels=tuple(Channel(**channel) for channel in text["channels"]),
            input_channels=tuple(Channel(**channel) for channel in text["input_channels"]),
            cells=text["cells"],
            l1=arrays["l1"],
            r2=arrays["r2"],
            spectra=spectra,
            length_unit=text["length_unit"],
            distributions=distributions,
            plane=PhaseDiagram(**plane) if plane else None,
            divergence_r2=text["divergence_r2"],
            slices={name[6:]: value for name, value in arrays.items() if name.startswith("slice ")},
            about=text["about"],
        )
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:  # a damaged archive raises whatever zipfile, zlib or numpy come upon
        raise UserError(f"{path} holds no evaluation ({error}); make it anew with evaluate.py") from None
