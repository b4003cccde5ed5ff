"""Generalization: networks trained on one simulated box, evaluated on boxes of other redshifts, cosmologies and cells.

python -m benchmarks.generalization

benchmarks/generalization.yaml defines the conditions. Networks trained on one condition, and networks trained on a
mixture of conditions with as many samples, are evaluated on held-out boxes of every condition. For some conditions, a
network is trained on that condition as well. Boxes, networks and evaluations are kept in --runs: an interrupted study
resumes with the missing ones. After changes to the evaluation, remove the directory `evaluations` in --runs. Spreads
are standard deviations over all pairs of a network and a box.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from benchmarks import common, convergence
from utils.cli import positive, read_changes
from utils.config.sections import EvaluationConfig
from utils.data import Batch, Loader
from utils.errors import one_line_errors
from utils.evaluation import results
from utils.evaluation.baselines import volume_losses
from utils.evaluation.results import Results
from utils.evaluation.volume import VolumeFields
from utils.inference.sliding_window import predicted_slabs
from utils.inference.trained_network import InferenceOptions, TrainedNetwork, build_predictor
from utils.lyman_alpha.results import FGPA, PREDICTION
from utils.steps import build
from utils.training.checkpoint import FOLDER, step_directory

PLAN = Path(__file__).with_name("generalization.yaml")
BASELINES = ("best constant per channel", "copying density and velocities")
NETWORK, REFERENCE, MIXTURE = "network", "trained on the condition", "trained on the mixture"
OTHERS = (REFERENCE, MIXTURE, *BASELINES)
FLUX = EvaluationConfig(sightlines=4096)
SCALARS = ("L1", "R2 gas density", "R2 temperature")
WAVENUMBERS = (1.0, 2.0)  # h/Mpc; all cells resolve them
FLUX_LARGEST_K = 0.015  # s/km; half of Nyquist's for the largest cells
FLUX_ERROR, FLUX_BASELINE = (f"flux P1D error to {FLUX_LARGEST_K:g} s/km, {name}" for name in (PREDICTION, FGPA))
SMALL_SCALES = f"P ratio at k = {WAVENUMBERS[-1]:g} h/Mpc"
PLOTTED = ("L1", "1 - R2 temperature", SMALL_SCALES, FLUX_ERROR)
COLUMNS = ("R2 gas density", "R2 gas velocity", "R2 temperature", SMALL_SCALES, FLUX_ERROR, FLUX_BASELINE)


class Condition(NamedTuple):
    """Parameters of a simulation; `cell` is the side of a cell in Mpc/h."""

    redshift: float
    cosmology: str
    cell: float

    @property
    def label(self) -> str:
        return f"{self.cosmology}_z{self.redshift:g}_cell{self.cell:g}"

    def box(self, folder: Path, grid: int, seed: int) -> Path:
        """A box of grid³ cells; it is simulated if it is missing."""
        path = folder / f"{self.label}_grid{grid}_seed{seed}.h5"
        if not path.exists():
            from utils.simulation.simulate import main as simulate  # needs colossus

            given = self._asdict()
            given["box_size"] = given.pop("cell") * grid
            given |= {"grid": grid, "seed": seed, "threads": torch.get_num_threads(), "output": path}
            simulate([f"--{name}={value}" for name, value in given.items()])
        return path


class Study:
    """The boxes, networks and evaluations of a plan; each is made when it is first needed, and kept."""

    def __init__(self, plan: Mapping[str, Any], options: argparse.Namespace) -> None:
        self._plan, self._folder, self._limit = plan, options.runs.absolute(), options.limit
        self._changes = read_changes(options.changes)
        self._seeds = options.seeds
        self._networks: dict[tuple[str, int], dict[str, Path]] = {}
        self._world = common.this_machine()
        self.trained = Condition(**plan["trained"])

    def panels(self) -> dict[str, dict[str, Condition]]:
        """The conditions of each panel by name."""
        return {
            panel: {name: self.trained._replace(**changed) for name, changed in conditions.items()}
            for panel, conditions in self._plan["panels"].items()
        }

    def boxes(self, condition: Condition) -> Iterator[Path]:
        """The held-out boxes of a condition."""
        held_out = self._plan["evaluation"]
        for seed in held_out["seeds"]:
            yield condition.box(self._folder / "boxes", held_out["grid"], seed)

    def networks(self, conditions: Sequence[Condition], seeds: int) -> dict[str, Path]:
        """The last checkpoints of runs on one box of each condition, by name; one per seed."""
        label = "+".join(condition.label for condition in conditions)
        if (label, seeds) not in self._networks:
            plan, folder = self._plan["training"], self._folder / "boxes"
            (grid, valid_grid), (box_seed, valid_seed) = plan["grid"], plan["seeds"]
            boxes = [str(condition.box(folder, grid, box_seed)) for condition in conditions]
            files = {
                "train_path": boxes if len(boxes) > 1 else boxes[0],
                "val_path": str(conditions[0].box(folder, valid_grid, valid_seed)),
                "box_size": plan["grid"],
            }
            recipe = convergence.Condition(label, plan["config"], 1, plan.get("changes", {}))
            training_runs = (
                convergence.Training(label, recipe, seed, self._folder, {**files, **self._changes})
                for seed in range(seeds)
            )
            self._networks[label, seeds] = {each.directory.name: self._checkpoint(each) for each in training_runs}
        return self._networks[label, seeds]

    def _checkpoint(self, training: convergence.Training) -> Path:
        """The last checkpoint of a run, which is trained first if it is missing."""
        if not training.is_trained():
            sys.stderr.write(f"training {training.directory.name}\n")
            training.run(self._limit)
        return step_directory(training.directory / FOLDER, training.config.total_steps)

    def evaluation(self, checkpoint: Path, network: str, box: Path) -> Results:
        """The evaluation of a network on a box; `network` names its directory."""
        path = self._folder / "evaluations" / network / f"{box.stem}.npz"
        if path.exists() and path.stat().st_mtime > max(each.stat().st_mtime for each in (checkpoint, box)):
            with contextlib.suppress(TypeError, KeyError):  # of an older version
                return results.load(path)
        trained = TrainedNetwork.load(checkpoint, self._world.device)
        config = trained.config.model_copy(update={"evaluation": FLUX})
        with closing(VolumeFields.open(str(box), None, config)) as fields:
            predictor = build_predictor(trained, fields.inputs, InferenceOptions(), self._world)
            slabs = predicted_slabs(predictor, f"{network} on {box.stem}")
            found = fields.evaluate(slabs, {"input": str(box)}, self._world)
        results.save(found, path)
        return found

    def summary(self, condition: Condition, mixture: Sequence[Condition], with_reference: bool) -> dict[str, Any]:
        """The measures of all networks on a condition, and the errors of predictors that learn nothing."""
        trained_on = {NETWORK: ([self.trained], self._seeds), MIXTURE: (mixture, self._seeds)}
        if with_reference:
            trained_on[REFERENCE] = [condition], 1
        found = {
            name: [
                measures(self.evaluation(checkpoint, network, box))
                for network, checkpoint in self.networks(conditions, seeds).items()
                for box in self.boxes(condition)
            ]
            for name, (conditions, seeds) in trained_on.items()
        }
        errors = [self._baselines(box) for box in self.boxes(condition)]
        found |= {name: [{"L1": each[name]} for each in errors] for name in BASELINES}
        return {**condition._asdict(), **{name: spreads(values) for name, values in found.items()}}

    def _baselines(self, box: Path) -> dict[str, float]:
        (checkpoint,) = self.networks([self.trained], 1).values()
        config = TrainedNetwork.load(checkpoint, self._world.device).config
        with closing(VolumeFields.open(str(box), None, config)) as fields:
            size = fields.inputs.shape[0]
            whole = (torch.from_numpy(np.array(each.planes(0, size)))[None] for each in (fields.inputs, fields.target))
            return volume_losses(OneBatch(Batch(*whole)), build.loss(config), self._world)


class OneBatch(Loader):
    """A loader of a single batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        yield self._batch


def measures(found: Results) -> dict[str, float]:
    """Errors, and spectra at wavenumbers that all boxes have."""
    scalars = {name.partition("/")[2]: value for name, value in found.scalars().items()}
    kept = {name: scalars[name] for name in SCALARS}
    kept["1 - R2 temperature"] = 1 - scalars["R2 temperature"]  # for a logarithmic axis
    kept["R2 gas velocity"] = float(np.mean([scalars[f"R2 gas velocity {axis}"] for axis in "xyz"]))
    spectrum = found.spectra["log density"]
    for k in WAVENUMBERS:
        for name, values in (("r", spectrum.correlation), ("P ratio", spectrum.ratio)):
            kept[f"{name} at k = {k:g} h/Mpc"] = float(np.interp(k, spectrum.k, values))
    if found.flux:
        used = found.flux.k <= FLUX_LARGEST_K
        for name, ratio in found.flux.ratios.items():
            kept[f"flux P1D error to {FLUX_LARGEST_K:g} s/km, {name}"] = float(np.abs(ratio[used] - 1).mean())
    return kept


def spreads(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean, standard deviation and number of values of each measure."""
    summaries = {name: convergence.spread([each[name] for each in found]) for name in found[0]}
    return {name: {key: summary[key] for key in ("mean", "stdev", "n")} for name, summary in summaries.items()}


# --- the report ------------------------------------------------------------------------------------------------------


def shown(values: Mapping[str, Any] | None, digits: int) -> str:
    return common.plus_minus(values, f".{digits}f") if values else ""


def result_table(panels: Mapping[str, Any]) -> str:
    """A row per condition."""
    heads = ["", "condition", "L1", "× as trained", *(f"L1, {name}" for name in OTHERS), *COLUMNS]
    rows = []
    for panel, conditions in panels.items():
        for name, summary in conditions.items():
            cells = [panel, name, shown(summary[NETWORK]["L1"], 4), f"{summary['L1 ratio']:.2f}"]
            cells += [shown(summary.get(other, {}).get("L1"), 4) for other in OTHERS]
            rows.append(cells + [shown(summary[NETWORK].get(column), 3) for column in COLUMNS])
    return common.table(heads, rows, left=2)


def draw(panels: Mapping[str, Any], trained: Condition, path: Path) -> None:
    """A row per measure, a column per panel."""
    sizes = [len(conditions) for conditions in panels.values()]
    size = 1.5 + 0.75 * sum(sizes), 2.5 * len(PLOTTED) + 1.6
    options = {"sharex": "col", "sharey": "row", "width_ratios": sizes}
    label = f"trained on z = {trained.redshift:g}, {trained.cosmology}, {trained.cell:g} Mpc/h"
    with common.plot(path, size, len(panels), len(PLOTTED), **options) as axes:
        for row, measure in zip(axes, PLOTTED, strict=True):
            row[0].set_ylabel(measure.replace(", ", ",\n"))
            for panel, conditions in zip(row, panels.values(), strict=True):
                panel.set_yscale("log")
                panel.grid(alpha=0.3, axis="y")
                draw_panel(panel, conditions, measure, label)
        for panel, title in zip(axes[0], panels, strict=True):
            panel.set_title(title)


def draw_panel(panel: Any, conditions: Mapping[str, Any], measure: str, label: str) -> None:
    """Means with standard deviations; the predictors that learn nothing have an L1 only."""
    series = [(label, NETWORK, measure, "o")]
    series += [(name, name, measure, marker) for name, marker in zip(OTHERS, ("s", "^", "_", "+"), strict=True)]
    if measure == FLUX_ERROR:
        series.append(("FGPA", NETWORK, FLUX_BASELINE, "x"))
    for name, key, value, marker in series:
        found = {place: each[key] for place, each in enumerate(conditions.values()) if value in each.get(key, {})}
        means, deviations = ([each[value][part] for each in found.values()] for part in ("mean", "stdev"))
        panel.errorbar(list(found), means, deviations, fmt=marker, capsize=3, markersize=5, label=name)
    panel.set_xticks(range(len(conditions)), list(conditions), rotation=35, ha="right")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--seeds", type=positive, default=3, help="networks per training condition (%(default)s)")
    convergence.add_options(parser, "generalization")
    options = parser.parse_args(argv)
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    study = Study(plan, options)
    named = study.panels()
    distinct = dict.fromkeys(condition for conditions in named.values() for condition in conditions.values())
    by_name = {name: condition for conditions in named.values() for name, condition in conditions.items()}
    mixture, references = ([by_name[name] for name in plan[key]] for key in ("mixture", "references"))
    summaries = {condition: study.summary(condition, mixture, condition in references) for condition in distinct}
    for summary in summaries.values():
        summary["L1 ratio"] = summary[NETWORK]["L1"]["mean"] / summaries[study.trained][NETWORK]["L1"]["mean"]
    panels = {
        panel: {name: summaries[condition] for name, condition in conditions.items()}
        for panel, conditions in named.items()
    }
    result = {"settings": common.settings(options), "plan": plan, "panels": panels}
    common.publish(
        "generalization", result, options.output, result_table(panels), lambda path: draw(panels, study.trained, path)
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
