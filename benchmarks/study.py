"""Studies: training runs under several conditions and with several seeds, compared with the first condition.

python -m benchmarks.study digits          from a naive large batch to LAMB, 8 ranks, on 1,797 digits
python -m benchmarks.study time_to_quality recipes by samples and seconds to the final loss of demo_base
python -m benchmarks.study generalization  networks on other redshifts, cosmologies and cell sizes
python -m benchmarks.study examples --logs example_logs     the runs of example_logs; --logs keeps the first seed's logs

benchmarks/studies.yaml defines these and more. They train on the boxes of `make demo`, or simulate their own. Runs are
kept in --runs: an interrupted study resumes with the missing ones, and an interrupted run where it stopped. A run is
finished if its config is the same, regardless of its commit: remove it after a change to the training itself. A run
that fails, for example because it diverges, does not end the study.

The goal is the mean, over seeds, of the first condition's final values. As in MLPerf, a run reaches it at the first
validation that is as good; the first condition counts with its whole runs. Seconds are those of the epochs' steps with
their data; start, compilation, validations and checkpoints do not count. A table, a plot and all curves go to --output.
Spreads are standard deviations over seeds; each seed has its own weights and order of samples.
"""

import functools
import itertools
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import boxes, common
from benchmarks.common import over_seeds
from networks.losses import accuracy
from utils import config as configs
from utils.cli import read_changes
from utils.data.datasets import open_dataset
from utils.data.loaders import open_volumes
from utils.data.task import CLASSES, task_of
from utils.errors import UserError
from utils.run import tags
from utils.run.checkpoint import read_weights, saved_steps, step_directory
from utils.run.choice import first_directory
from utils.steps import build

LOSS, ACCURACY = "Loss/valid", "training accuracy"
LIMIT = 3600.0  # seconds of a run


@dataclass(frozen=True)
class Condition:
    """A way to train: a config with changes of its keys, perhaps on simulated boxes instead of its own files."""

    name: str
    config: str
    ranks: int = 1
    seeds: int | None = None  # at most
    changes: Mapping[str, Any] = field(default_factory=dict)
    boxes: Sequence[str] = ()
    script: Sequence[str] = ("train.py",)


@dataclass(frozen=True)
class Study:
    """Conditions that are compared with the first one by the scalar `measure`."""

    conditions: Sequence[Condition]
    measure: str = LOSS
    label: str = "validation loss (mean absolute error)"
    rises: bool = False  # larger is better
    seeds: int = 5  # unless --seeds is given
    simulation: Mapping[str, Any] = field(default_factory=dict)  # see benchmarks/boxes.py
    evaluate: Mapping[str, Any] = field(default_factory=dict)

    def simulated(self, runs: Path) -> boxes.Boxes:
        return boxes.Boxes(self.simulation, self.evaluate, runs)


def read_studies(path: Path) -> dict[str, Study]:
    """The studies of a YAML file."""
    studies = {}
    for name, values in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if not name.startswith("."):
            shared, listed = values.pop("changes", {}), values.pop("conditions")
            conditions = [{**given, "changes": {**shared, **given.get("changes", {})}} for given in listed]
            studies[name] = Study([Condition(**given) for given in conditions], **values)
    return studies


STUDIES = read_studies(Path(__file__).with_name("studies.yaml"))


class Training:
    """One condition with one seed."""

    def __init__(self, name: str, condition: Condition, seed: int, runs: Path, changes: Mapping[str, Any]) -> None:
        """`name` identifies the condition in file names."""
        self.condition, self.seed = condition, seed
        self.changes = {**condition.changes, **changes, "seed": seed, "expdir": str(runs)}
        self._run_num = f"{name}-seed{seed}"
        self._log = runs / f"{self._run_num}.log"
        self.config = configs.load(common.YAML, condition.config, self.changes).for_world(condition.ranks)
        self.directory = first_directory(self.config, condition.config, self._run_num, condition.ranks)
        self.checkpoint = step_directory(self.directory.checkpoints, self.config.total_steps)  # the last one

    def is_trained(self) -> bool:
        """True if the run is finished, with these settings and any commit."""
        return self.config.total_steps in self._saved_steps()

    def _saved_steps(self) -> list[int]:
        """Those of the checkpoints of a run with these settings and any commit."""
        try:
            config = configs.load(str(self.directory.config), self.condition.config)
            requested = open_volumes(self.config).config
        except (OSError, ValueError, UserError):
            return []
        same = config.for_world(self.condition.ranks) == requested
        return saved_steps(self.directory.checkpoints) if same else []

    def run(self) -> None:
        """Trains, or continues an interrupted run; UserError with the reason if that fails."""
        resume = self.directory.path if self._saved_steps() else "no"
        flags = [f"--config={self.condition.config}", f"--run_num={self._run_num}", f"--resume={resume}"]
        flags += [f"--set={key}={json.dumps(value)}" for key, value in self.changes.items()]
        command = [*common.launcher(self.condition.ranks), *self.condition.script, *flags]
        common.call(f"the run {self.condition.name}, seed {self.seed},", command, self._log, limit=LIMIT)

    def result(self) -> dict[str, Any]:
        """The scalars of each validation, the commit, and a classifier's accuracy on its training samples."""
        curve, seconds = [], 0.0
        for record in self.directory.read_metrics():
            if tags.ITERATIONS_PER_SECOND in record:
                seconds += self.config.steps_per_epoch / record[tags.ITERATIONS_PER_SECOND]
            if LOSS in record:
                step = record["step"]
                samples = step * (self.config.global_batch_size or 0)
                where = {"epoch": step / self.config.steps_per_epoch, "samples": samples, "step": step}
                scalars = {name: value for name, value in record.items() if "/" in name}
                curve.append({**where, "seconds": seconds, **scalars})
        commit = self.directory.read_provenance().get("git_commit")
        labeled = {ACCURACY: self._training_accuracy()} if task_of(self.config).name == CLASSES else {}
        return {"seed": self.seed, "curve": curve, "commit": commit, **labeled}

    def _training_accuracy(self) -> float:
        network = build.network(self.config)
        network.load_state_dict(read_weights(self.checkpoint)["network"])
        network.eval()
        dataset, splits = open_dataset(self.config.dataset)
        images, labels = (torch.from_numpy(values) for values in (splits["train"].inputs, splits["train"].labels))
        scale = dataset.scale if images.dtype == torch.uint8 else 1  # others are indices of words
        with torch.no_grad():
            batches = zip(images.split(500), labels.split(500), strict=True)
            right = sum(float(accuracy(network(scale * inputs), classes)) * len(classes) for inputs, classes in batches)
        return right / len(labels)


def training_runs_of(
    name: str, seeds: int, runs: Path, changes: Mapping[str, Any], first: int | None = None
) -> list[Training]:
    """The runs of a study, or of its `first` conditions, seed by seed, so that drift of the machine affects all."""
    study, conditions = STUDIES[name], STUDIES[name].conditions[:first]
    files = [study.simulated(runs).training_keys(condition.boxes) for condition in conditions]
    return [
        Training(f"{name}-{number}", condition, seed, runs, {**keys, **changes})
        for seed in range(seeds)
        for number, (condition, keys) in enumerate(zip(conditions, files, strict=True))
        if condition.seeds is None or seed < condition.seeds
    ]


def run_missing(training_runs: Sequence[Training]) -> UserError | None:
    """Trains what is not finished yet; returns an error if some runs failed."""
    missing, failures = [training for training in training_runs if not training.is_trained()], []
    kept = len(training_runs) - len(missing)
    sys.stderr.write(f"{kept} of {len(training_runs)} training runs are finished, regardless of their commit\n")
    for number, training in enumerate(missing):
        try:
            with common.logged(f"{number + 1}/{len(missing)}: {training.condition.name}, seed {training.seed}"):
                training.run()
        except UserError as error:
            failures.append(error)
            sys.stderr.write(f"warning: {error}\n")
    if not failures:
        return None
    return UserError(f"{len(failures)} of {len(training_runs)} training runs failed; {failures[0]}")


def trained(name: str, seeds: int, runs: Path, first: int | None = None) -> list[Training]:
    """The runs of a study, or of its `first` conditions, which it trains; UserError if some fail."""
    training_runs = training_runs_of(name, seeds, runs, {}, first)
    if failure := run_missing(training_runs):
        raise failure
    return training_runs


def to_goal(study: Study, results: Sequence[Any], reference: Sequence[Any]) -> dict[str, Any]:
    """Samples and seconds of each run to the goal, and as a share of the reference's whole run of the same seed.

    Without them if a run does not reach the goal: a mean over the others would be too good.
    """
    goal = statistics.fmean(result["curve"][-1][study.measure] for result in reference)
    sign = 1 if study.rises else -1
    whole = {result["seed"]: result["curve"][-1] for result in reference}
    reached = dict(whole) if results is reference else {}
    for result in results:
        for point in result["curve"]:
            if sign * point[study.measure] >= sign * goal:
                reached.setdefault(result["seed"], point)
    summary: dict[str, Any] = {"reached": len(reached)}
    if len(reached) == len(results) and reached.keys() <= whole.keys():
        for key in ("samples", "seconds"):
            summary[key] = over_seeds([point[key] for point in reached.values()])
            summary[f"share of {key}"] = over_seeds([point[key] / whole[seed][key] for seed, point in reached.items()])
    return summary


def summarize(study: Study, training_runs: Sequence[Training], results: Sequence[Any], reference: Any) -> Any:
    """One condition's final values, its way to the goal, and mean and spread of its curve at each epoch."""
    condition, config = training_runs[0].condition, training_runs[0].config
    points = []
    for parts in zip(*(result["curve"] for result in results), strict=True):
        where = {key: parts[0][key] for key in ("epoch", "samples", "step")}
        seconds = statistics.fmean(part["seconds"] for part in parts)
        points.append({**where, "seconds": seconds, **over_seeds([part[study.measure] for part in parts])})
    last = [{**result, **result["curve"][-1]} for result in results]
    measures = [study.measure, LOSS, "Loss/train", "seconds", *([ACCURACY] if ACCURACY in last[0] else [])]
    return {
        **{key: getattr(condition, key) for key in ("name", "config", "changes", "ranks", "script")},
        "global batch": config.global_batch_size,
        "steps": config.total_steps,
        "epochs": config.num_epochs,
        "seeds": [result["seed"] for result in results],
        "commits": [result["commit"] for result in results],
        **{key: over_seeds([values[key] for values in last]) for key in measures},
        "to the goal": to_goal(study, results, reference),
        "curve": points,
    }


def result_table(study: Study, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Final values of each condition, and its way to the goal."""
    measures = {study.measure: study.label} | ({ACCURACY: ACCURACY} if ACCURACY in summaries[0] else {})
    heads = ["condition", "batch", "epochs", "steps", "seconds", *measures.values(), "reach the goal"]
    heads += ["samples to the goal", "% of the first", "seconds to the goal", "% of the first"]
    rows = []
    for summary in summaries:
        goal, seconds = summary["to the goal"], f"{summary['seconds']['mean']:.0f}"
        cells = [summary["name"], summary["global batch"], summary["epochs"], summary["steps"], seconds]
        for key in measures:
            factor, form, unit = (100, ".1f", " %") if study.rises else (1, ".5f", "")
            cells.append(common.plus_minus(summary[key], form, factor) + unit)
        cells.append(f"{goal['reached']} of {len(summary['seeds'])}")
        for key, form in (("samples", ",.0f"), ("seconds", ",.1f")):
            share = goal.get(f"share of {key}")
            cells += [common.plus_minus(goal.get(key), form), common.plus_minus(share, ".1f", 100)]
        rows.append(cells)
    return common.table(heads, rows)


def draw(study: Study, summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Curves over samples, with standard deviations. The seconds, which other programs disturb, are in the table."""
    with common.plot(path, (9, 5)) as (panel,):
        for summary in summaries:
            # The untrained network is the same under all conditions.
            points = [point for point in summary["curve"] if point["step"]]
            places, means, deviations = ([point[name] for point in points] for name in ("samples", "mean", "stdev"))
            common.band(panel, places, means, deviations, marker="o", label=summary["name"])
        panel.axhline(summaries[0][study.measure]["mean"], color="black", linestyle="--", linewidth=1, label="goal")
        panel.grid(alpha=0.3, which="both")
        panel.set(xlabel="samples", ylabel=study.label, yscale="linear" if study.rises else "log")


def report(name: str, training_runs: Sequence[Training], runs: Path) -> tuple[dict[str, Any], str]:
    """Result and text of the finished runs; UserError if the first condition has none."""
    study, missing = STUDIES[name], []
    finished: dict[str, list[Training]] = {condition.name: [] for condition in study.conditions}
    for training in training_runs:
        if training.is_trained():
            finished[training.condition.name].append(training)
        else:
            missing.append(f"{training.condition.name}, seed {training.seed}")
    first, *_ = finished
    if not finished[first]:
        raise UserError(f"no training run of {first} is finished")
    finished = {name: trained for name, trained in finished.items() if trained}
    results = {name: [training.result() for training in trained] for name, trained in finished.items()}
    for trained_run in itertools.chain(*results.values()):  # an untrained network is not evaluated
        trained_run["curve"] = [point for point in trained_run["curve"] if study.measure in point]
    reference = results[first]
    summaries = [summarize(study, trained, results[name], reference) for name, trained in finished.items()]
    text = result_table(study, summaries)
    result: dict[str, Any] = {"study": name, "missing": missing, "conditions": summaries}
    if study.evaluate and study.simulation["held_out"]["seeds"]:
        checkpoints = {name: [training.checkpoint for training in trained] for name, trained in finished.items()}
        conditions = study.conditions if len(study.evaluate) > 1 else ()
        specialists = {condition.boxes[0]: condition.name for condition in conditions if len(condition.boxes) == 1}
        result["evaluations"] = study.simulated(runs).evaluations(checkpoints, specialists)
        text += f"\n\n{boxes.markdown(result['evaluations'])}"
    return result, text + (f"\n\nMissing: {'; '.join(missing)}." if missing else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, seeds=None, runs=common.RUNS)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--logs", type=Path, help="copy the logs of the first seed's runs to this directory")
    text = "set a key in all configs; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help=text)
    options = parser.parse_args(argv)
    for name in ("logs", "output", "runs"):  # logs and results name no directory of this machine
        if path := getattr(options, name):
            setattr(options, name, Path(os.path.relpath(path, common.REPOSITORY)))
    os.chdir(common.REPOSITORY)
    study, runs = STUDIES[options.study], options.runs
    options.seeds = options.seeds or study.seeds
    training_runs = training_runs_of(options.study, options.seeds, runs, read_changes(options.changes))
    failure = run_missing(training_runs)
    try:
        result, text = report(options.study, training_runs, runs)
    except UserError as error:
        raise failure or error from None
    drawing: common.Drawing | None = None
    if len(study.evaluate) > 1:
        drawing = functools.partial(boxes.draw, result["evaluations"])
    elif len({training.config.loss for training in training_runs}) == 1:  # others have curves of different scales
        drawing = functools.partial(draw, study, result["conditions"])
    common.publish(f"study_{options.study}", options, result, text, drawing)
    for training in training_runs[: len(study.conditions)] if options.logs else []:
        target, source = options.logs / training.condition.name, training.directory
        skipped = (source.checkpoints.name, source.evaluations.name, "*.html", ".*")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source.path, target, ignore=shutil.ignore_patterns(*skipped))
    if failure is not None:
        raise failure


if __name__ == "__main__":
    common.run(main)
