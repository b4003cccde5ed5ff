"""Simulated boxes of a study, and evaluations of its networks on them. A part of benchmarks/study.py.

A study in benchmarks/studies.yaml may have
    simulation: options of simulation for all boxes, with `cell` in Mpc/h instead of the size of the box; `train`,
        `valid` and `held_out` have the cells per side and the seeds: of the training boxes, the validation box, and the
        boxes for the evaluation
    evaluate: volumes on which all networks are evaluated, by name: a file, or changes of `simulation`. Of one that is
        `like` another, only the boxes for the evaluation are simulated, perhaps by another `module`;
        `calibrated: false`: predicted densities are not (benchmarks/forest.py)
A condition with `boxes` trains on boxes of these names.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from analysis.evaluation import results
from analysis.evaluation.baselines import volume_losses
from analysis.evaluation.volume import VolumeFields
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, build_predictor
from analysis.lyman_alpha.setup import FluxOptions
from benchmarks import common
from utils.data.loaders import Batch
from utils.steps import build

SIGHTLINES = 0  # all: P3D needs them
PARTS = ("train", "valid", "held_out")
FIELDS, WAVENUMBERS = ("log density", "velocity", "log temperature"), (1.0, 2.0, 3.0, 5.0, 10.0)  # h/Mpc
FLUX_LARGEST_K = (0.015, 0.08)  # s/km; about half of Nyquist's for cells of 1 and of 0.16 Mpc/h
COPYING = "copying density and velocities"
SPECIALIST = "trained on it alone"
MASS = "mean gas density / target's"
FLUX_ERROR = "flux P1D error to {:g} s/km, {}"
SHOWN = (
    *("L1", "R2 gas density", "R2 temperature", "R2 velocity divergence", MASS),
    *(f"r of log {field}, k = {k} h/Mpc" for field in ("density", "temperature") for k in (5, 10)),
    *(f"P ratio of log {field}, k = {k} h/Mpc" for field in ("density", "temperature") for k in (2, 5, 10)),
    *(FLUX_ERROR.format(k, field) for k in FLUX_LARGEST_K for field in ("prediction", "FGPA")),
)
Evaluations = Mapping[str, Mapping[str, Mapping[str, Any]]]  # `over_seeds` by volume, condition and measure


@dataclass(frozen=True)
class Boxes:
    """The boxes of a study, simulated in <runs>/boxes when they are needed."""

    simulation: Mapping[str, Any]
    volumes: Mapping[str, Any]
    runs: Path

    def files(self, name: str, part: str) -> list[str]:
        """The files of one of PARTS, of boxes like the volume `name`."""
        if isinstance(self.volumes[name], str):
            return [self.volumes[name]]
        volume = self.volumes[name]
        if "like" in volume and part != "held_out":
            return self.files(volume["like"], part)
        return [self._file(keys) for keys in self.boxes(name, part)]

    def boxes(self, name: str, part: str) -> list[dict[str, Any]]:
        """The options of the simulator for the boxes of `files`; `module` is another program."""
        given = {**self.simulation, **self.volumes[name]}
        shared = {key: value for key, value in given.items() if key not in ("cell", "like", "calibrated", *PARTS)}
        grid = given[part]["grid"]
        return [
            {**shared, "box_size": given["cell"] * grid, "grid": grid, "seed": seed} for seed in given[part]["seeds"]
        ]

    def simulate(self) -> None:
        """Simulates all boxes, one at a time of each of PARTS."""
        parts = itertools.product(self.volumes, PARTS)
        threads = len(PARTS) if self.simulation.get("device") == "cuda" else 1  # on a CPU a box uses all cores
        common.in_threads(lambda part: self.files(*part), parts, threads, common.GRACE_SECONDS)

    def _file(self, keys: Mapping[str, Any]) -> str:
        """The file of a box."""
        path = self.runs / "boxes" / f"{'_'.join(f'{key}={value}' for key, value in sorted(keys.items()))}.h5"
        if not path.exists():
            with common.logged(f"simulating {path}"):
                common.call(f"simulating {path}", simulation_command(keys, path), path.with_suffix(".log"))
        return str(path)

    def training_keys(self, names: Sequence[str]) -> dict[str, Any]:
        """Keys of the config for a training run on the boxes of these names; none without names."""
        if not names:
            return {}
        files = [file for name in names for file in self.files(name, "train")]
        (valid,) = self.files(names[0], "valid")
        grids = [self.simulation[part]["grid"] for part in ("train", "valid")]
        return {"train_path": files, "val_path": valid, "box_size": grids}

    def evaluations(self, checkpoints: Mapping[str, Sequence[Path]], specialists: Mapping[str, str]) -> Evaluations:
        """Mean and standard deviation of each measure over pairs of a network and a box, by volume and condition.

        specialists: by volume, the condition that trains on a box like it alone. Except for the first condition, its
        networks are evaluated on that volume only.
        """
        evaluated: dict[str, dict[str, Any]] = {}
        first = next(iter(checkpoints))
        general = [name for name in checkpoints if name == first or name not in specialists.values()]
        for name in self.volumes:
            files, used = self.files(name, "held_out"), dict(zip(general, general, strict=True))
            if specialists.get(name) in checkpoints:
                used[SPECIALIST] = specialists[name]
            evaluated[name] = {}
            for shown, condition in used.items():
                pairs = [(checkpoint, file) for checkpoint in checkpoints[condition] for file in files]
                spread = spreads([measures(evaluation(*pair, self.runs)) for pair in pairs])
                evaluated[name][shown] = {key: spread[key] for key in SHOWN if key in spread}
            evaluated[name][COPYING] = spreads([{"L1": copying_error(checkpoints[first][0], file)} for file in files])
        return evaluated


def simulation_command(keys: Mapping[str, Any], path: Path) -> list[str]:
    """The command that writes a box with these options to a file."""
    flags = [f"--{key}={value}" for key, value in keys.items() if key != "module"]
    return [sys.executable, "-m", keys.get("module", "simulation"), *flags, f"--output={path}"]


def evaluation(checkpoint: Path, file: str, runs: Path, calibrated: bool = False, **settings: Any) -> results.Results:
    """The evaluation of a network on a volume with these settings, which is kept as long as both are older.

    Studies compare what networks learn, so by default their densities are not calibrated.
    """
    kind = ["calibrated"] * calibrated
    stem = "_".join([Path(file).stem, *kind, *(f"{key}={Path(str(value)).name}" for key, value in settings.items())])
    path = runs / "evaluations" / checkpoint.parents[1].name / f"{stem}.npz"
    if path.exists() and path.stat().st_mtime > max(checkpoint.stat().st_mtime, Path(file).stat().st_mtime):
        return results.load(path)
    world = common.this_machine()
    with common.logged(f"evaluating {path.parent.name} on {Path(file).stem}"):
        trained = TrainedNetwork.load(checkpoint, world.device, calibrated=calibrated)
        options = FluxOptions(**{"sightlines": SIGHTLINES, **settings})
        with closing(VolumeFields(file, None, trained.config)) as fields:
            predictor = build_predictor(trained, fields.inputs, InferenceOptions(), world)
            result = fields.evaluate(predictor, {"input": file}, world, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        results.save(result, path)
    return result


def copying_error(checkpoint: Path, file: str) -> float:
    """The error of copying the input's density and velocity, with the best constant temperature."""
    world = common.this_machine()
    config = TrainedNetwork.load(checkpoint, world.device).config
    with closing(VolumeFields(file, None, config)) as fields:
        every = slice(None)
        whole = [torch.from_numpy(np.array(part.planes(every, every)))[None] for part in (fields.inputs, fields.target)]
        loader: Any = SimpleNamespace(epoch=lambda _: [Batch(*whole)])
        return volume_losses(loader, build.loss(config), world)[COPYING]


def measures(result: results.Results) -> dict[str, float]:
    """Errors, and spectra at wavenumbers that the box has."""
    kept = {"L1": float(result.l1.mean()), MASS: result.mass_ratio}
    for tag, value in result.scalars().items():
        if " at k = " not in tag:
            kept[tag.removeprefix("Evaluation ").replace("/", " ")] = value
    for field in FIELDS:
        spectrum = result.spectra[field]
        for k in (k for k in WAVENUMBERS if k <= spectrum.k[-1]):
            for name, values in (("r", spectrum.correlation), ("P ratio", spectrum.ratio)):
                kept[f"{name} of {field}, k = {k:g} h/Mpc"] = float(np.interp(k, spectrum.k, values))
    if result.flux:
        for largest in (k for k in FLUX_LARGEST_K if k <= result.flux.k[-1]):
            used = result.flux.k <= largest
            for name, ratio in result.flux.ratios.items():
                kept[FLUX_ERROR.format(largest, name)] = float(np.abs(ratio[used] - 1).mean())
    return kept


def spreads(values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean, standard deviation and values of each measure that all have: not every network reaches a scale."""
    shared = [name for name in values[0] if all(name in by_name for by_name in values)]
    return {name: common.over_seeds([by_name[name] for by_name in values]) for name in shared}


def draw(evaluations: Evaluations, path: Path) -> None:
    """L1 of the networks of each condition on each volume, with standard deviations."""
    with common.plot(path, (9, 4.6)) as (panel,):
        for number, name in enumerate(_conditions(evaluations)):
            volumes = enumerate(evaluations.values())
            errors = {place: by_condition[name]["L1"] for place, by_condition in volumes if name in by_condition}
            means, deviations = ([error[key] for error in errors.values()] for key in ("mean", "stdev"))
            places = [place + 0.12 * number - 0.24 for place in errors]
            panel.errorbar(places, means, deviations, fmt="o", markersize=4, label=name)
        panel.set(yscale="log", ylabel="L1", xticks=range(len(evaluations)))
        panel.set_xticklabels(evaluations, rotation=20, ha="right")
        panel.grid(alpha=0.3, which="both")


def _conditions(evaluations: Evaluations) -> list[str]:
    """The names of all conditions; not every volume has all of them."""
    return list(dict.fromkeys(name for by_condition in evaluations.values() for name in by_condition))


def markdown(evaluations: Evaluations) -> str:
    """A row per volume and condition, without measures that no volume has; first the L1 of several volumes alone."""
    every = [(volume, *pair) for volume, by_condition in evaluations.items() for pair in by_condition.items()]
    shown = [name for name in SHOWN if any(name in values for *_, values in every)]
    rows = [[*names, *(common.plus_minus(values.get(name), ".3g") for name in shown)] for *names, values in every]
    tables = [common.table(["volume", "condition", *shown], rows, left=2)]
    if len(evaluations) > 1:
        conditions, errors, ratios = _conditions(evaluations), [], []
        general = [name for name in conditions if name not in (SPECIALIST, COPYING)]
        for volume, measured in evaluations.items():
            spread = {name: values["L1"] for name, values in measured.items()}
            errors.append([volume, *(common.plus_minus(spread.get(name), ".5f") for name in conditions)])
            if alone := spread.get(SPECIALIST):
                ratios.append([volume, *(f"{spread[name]['mean'] / alone['mean']:.2f}" for name in general)])
        ratio_table = common.table([f"L1 / {SPECIALIST}", *general], ratios)
        tables = [common.table(["L1", *conditions], errors), ratio_table, *tables]
    return "\n\n".join(tables)
