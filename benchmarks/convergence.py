"""Convergence studies: conditions × ranks × seeds, each a separate run; mean and spread over seeds.

python -m benchmarks.convergence digits      from a naive large batch to LAMB, 8 ranks, on 1,797 digits
python -m benchmarks.convergence cifar10     the same on CIFAR-10, whose files must be in data/cifar10
python -m benchmarks.convergence unet        the U-Net at the demo's scale: 8 times the batch, learning-rate scaling
python -m benchmarks.convergence layers      the effect of norms and initialization on it
python -m benchmarks.convergence learning_rates   eight learning rates for Adam and for SOAP
python -m benchmarks.convergence recipe           one factor at a time for SOAP
python -m benchmarks.convergence start            the first 100 steps of SOAP
python -m benchmarks.convergence batch32          SOAP with a larger batch
python -m benchmarks.convergence scale            Adam and SOAP at other widths, depths and batches
python -m benchmarks.convergence demo             the config demo, and with a larger batch

benchmarks/studies.yaml defines the studies. Runs are kept in --runs: an interrupted study resumes with the missing
ones. A run counts as finished if its config is the same, regardless of its commit: remove it after a change to the
training itself. A run that fails, for example because it diverges, does not end the study. A table, a plot and all
curves go to --output. Spreads are standard deviations over seeds; each seed has its own weights and order of samples.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import common
from benchmarks.processes import failure_of, launcher
from networks.losses import accuracy
from utils import config as configs
from utils.cli import positive, read_changes
from utils.config import Config
from utils.data import get_loader
from utils.data.loaders.classification import ClassificationLoader, open_splits
from utils.data.plan import ShufflePlan
from utils.data.volumes import with_file_values
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.progress import format_duration
from utils.provenance import read_provenance
from utils.steps import build
from utils.training import tags
from utils.training.checkpoint import FOLDER, read_weights, saved_steps, step_directory
from utils.training.choice import run_directory
from utils.training.loggers.base import read_records


@dataclass(frozen=True)
class Condition:
    """A way to train; `changes` are keys of the config."""

    name: str
    config: str
    ranks: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Conditions that are compared with the first one by the scalar `measure`."""

    conditions: Sequence[Condition]
    measure: str
    label: str
    rises: bool  # larger is better
    per_sample: bool = False  # report the samples needed to be as good as the first one at its end
    first_seed: int = 0


def expand(listed: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[Condition]:
    """The condition that is listed; if it has a key `vary`, one for each value of each key in it instead."""
    changes = {**shared, **listed.get("changes", {})}
    condition = Condition(listed["name"], listed["config"], listed["ranks"], changes)
    if "vary" not in listed:
        yield condition
    for key, values in listed.get("vary", {}).items():
        for value in values:
            name = f"{condition.name}, {key.rpartition('.')[2]} {value}"
            yield replace(condition, name=name, changes={**changes, key: value})


def read_studies(path: Path) -> dict[str, Study]:
    """The studies of a YAML file."""
    studies = {}
    for name, values in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if not name.startswith("."):
            shared = values.pop("changes", {})
            conditions = [condition for one in values.pop("conditions") for condition in expand(one, shared)]
            studies[name] = Study(conditions, **values)
    return studies


STUDIES = read_studies(Path(__file__).with_name("studies.yaml"))


# --- training runs ---------------------------------------------------------------------------------------------------


class Training:
    """One condition with one seed."""

    def __init__(self, name: str, condition: Condition, seed: int, runs: Path, changes: Mapping[str, Any]) -> None:
        """`name` identifies the condition in file names."""
        self.condition, self.seed, self._runs = condition, seed, runs
        self._changes = {**condition.changes, **changes, "seed": seed, "expdir": str(runs)}
        self._run_num = f"{name}-seed{seed}"
        self.config = configs.load(common.YAML, condition.config, self._changes).for_world(condition.ranks)
        self.directory = run_directory(self.config, condition.config, self._run_num, condition.ranks)

    def command(self) -> list[str]:
        flags = [f"--config={self.condition.config}", f"--run_num={self._run_num}", "--resume=no"]
        flags += [f"--set={key}={json.dumps(value)}" for key, value in self._changes.items()]
        return [*launcher(self.condition.ranks), "train.py", *flags]

    def is_trained(self) -> bool:
        """True if the run is finished, with these settings and any commit."""
        try:
            config = configs.load(str(self.directory / "config.yaml"), self.condition.config)
            requested = with_file_values(self.config, get_loader(self.config.data_loader_config).reads)
        except (OSError, ValueError, UserError):
            return False
        steps = saved_steps(self.directory / FOLDER)
        return config.for_world(self.condition.ranks) == requested and requested.total_steps in steps

    def run(self, limit: float) -> None:
        """Trains; UserError with the reason if that fails."""
        self._runs.mkdir(parents=True, exist_ok=True)
        log = self._runs / f"{self._run_num}.log"
        reason = failure_of(self.command(), log, limit=limit)
        if reason:
            raise UserError(f"the run {self.condition.name}, seed {self.seed}, failed: {reason}; see {log}")

    def curve(self) -> list[dict[str, float]]:
        """The scalars of each validation: at the start and after each epoch.

        `seconds` is the time since the start of the logs, `training seconds` that of the epochs' steps alone.
        """
        points, trained = [], 0.0
        for record in read_records(self.directory / "metrics.jsonl"):
            if tags.ITERATIONS_PER_SECOND in record:
                trained += self.config.steps_per_epoch / record[tags.ITERATIONS_PER_SECOND]
            if "Loss/valid" in record:
                step = record["step"]
                samples = step * self.config.global_batch_size
                scalars = {name: value for name, value in record.items() if "/" in name}
                where = {"epoch": step / self.config.steps_per_epoch, "samples": samples, "step": step}
                points.append({**where, "seconds": record["seconds"], "training seconds": trained, **scalars})
        return points

    def result(self) -> dict[str, Any]:
        """The curve, the commit, and a classifier's accuracy on its training samples."""
        curve, made = self.curve(), read_provenance(self.directory / "provenance.json")
        found: dict[str, Any] = {"seed": self.seed, "curve": curve, "seconds": curve[-1]["seconds"]}
        found["commit"] = made.get("git_commit")
        if self.config.is_classification:
            found["training accuracy"] = training_accuracy(self.config, self.directory)
        return found


def training_accuracy(config: Config, directory: Path) -> float:
    """Accuracy of a run's last weights on all training samples."""
    network = build.network(config)
    folder = directory / FOLDER
    network.load_state_dict(read_weights(step_directory(folder, saved_steps(folder)[0]))["network"])
    network.eval()
    dataset, splits = open_splits(config)
    samples = len(splits["train"].labels)
    plan, world = ShufflePlan(samples, samples, split="valid"), World(Launch("single process"), torch.device("cpu"))
    loader = ClassificationLoader(splits["train"], plan, batch_size=500, scale=dataset.scale, world=world)
    with torch.no_grad():
        right = sum(float(accuracy(network(inputs), labels)) * len(labels) for inputs, labels in loader.epoch(0))
    return right / samples


def training_runs_of(name: str, seeds: int, runs: Path, changes: Mapping[str, Any]) -> list[Training]:
    """The runs of a study, seed by seed over all conditions, so that drift of the machine affects all conditions."""
    study, directory = STUDIES[name], runs.absolute()
    return [
        Training(f"{name}-{number}", condition, study.first_seed + seed, directory, changes)
        for seed in range(seeds)
        for number, condition in enumerate(study.conditions)
    ]


def run_missing(training_runs: Sequence[Training], limit: float, hours: float | None = None) -> None:
    """Trains what is not finished yet, and starts no run after `hours`; a UserError at the end if some failed.

    If nothing has succeeded yet, the first failure ends it.
    """
    started, missing = time.monotonic(), [training for training in training_runs if not training.is_trained()]
    kept, failures = len(training_runs) - len(missing), []
    if kept:
        sys.stderr.write(f"{kept} of {len(training_runs)} training runs are finished, regardless of their commit\n")
    for number, training in enumerate(missing):
        passed = time.monotonic() - started
        if hours is not None and passed > 3600 * hours:
            sys.stderr.write(f"{len(missing) - number} training runs are not started after {hours:g} hours\n")
            break
        left = passed / max(1, number) * (len(missing) - number)
        about = f", about {format_duration(left)} left" if number else ""
        sys.stderr.write(f"{number + 1}/{len(missing)}: {training.condition.name}, seed {training.seed}{about}\n")
        try:
            training.run(limit)
        except UserError as error:
            failures.append(error)
            if len(failures) > kept + number:
                raise
            sys.stderr.write(f"warning: {error}\n")
    if failures:
        raise UserError(f"{len(failures)} of {len(training_runs)} training runs failed; {failures[0]}")


# --- the report ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation over seeds, and the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "stdev": deviation, "n": len(values), "values": list(values)}


def summarize(study: Study, condition: Condition, config: Config, results: Sequence[Mapping[str, Any]]) -> Any:
    """One condition's final values, and mean and spread of its curve at each epoch."""
    curves = [result["curve"] for result in results]
    points = []
    for parts in zip(*curves, strict=True):
        values = spread([part[study.measure] for part in parts])
        seconds = statistics.fmean(part["seconds"] for part in parts)
        where = {key: parts[0][key] for key in ("epoch", "samples", "step")}
        points.append({**where, "seconds": seconds, "mean": values["mean"], "stdev": values["stdev"]})
    summary = {
        "name": condition.name,
        "config": condition.config,
        "changes": dict(condition.changes),
        "ranks": condition.ranks,
        "global batch": config.global_batch_size,
        "steps": config.total_steps,
        "epochs": config.num_epochs,
        "seconds": spread([result["seconds"] for result in results]),
        "seeds": [result["seed"] for result in results],
        "commits": [result["commit"] for result in results],
        **{key: spread([curve[-1][key] for curve in curves]) for key in (study.measure, "Loss/valid", "Loss/train")},
        "curve": points,
    }
    if "training accuracy" in results[0]:
        summary["training accuracy"] = spread([result["training accuracy"] for result in results])
    return summary


def reach(
    curve: Sequence[Mapping[str, float]], goal: float, rises: bool, interpolate: bool = False
) -> dict[str, float] | None:
    """The validation at which the mean first is as good as `goal`, or the point between two; None if it never is."""
    before: Mapping[str, float] | None = None
    for point in curve:
        if point["mean"] >= goal if rises else point["mean"] <= goal:
            reached = {key: point[key] for key in ("epoch", "samples", "step", "seconds")}
            if before is None or not interpolate:
                return reached
            share = (goal - before["mean"]) / (point["mean"] - before["mean"])
            return {key: before[key] + share * (value - before[key]) for key, value in reached.items()}
        before = point
    return None


def result_table(study: Study, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Final values of each condition, and where it is as good as the first one at its end."""
    labeled = "training accuracy" in summaries[0]
    goal, samples = summaries[0][study.measure]["mean"], summaries[0]["curve"][-1]["samples"]
    heads = ["condition", "batch", "epochs", "steps", study.label, *(["training accuracy"] if labeled else [])]
    heads += ["seconds", "as good as the first after", "of its samples"]
    rows = []
    for summary in summaries:
        cells = [summary["name"], summary["global batch"], summary["epochs"], summary["steps"]]
        for key in (study.measure, "training accuracy") if labeled else (study.measure,):
            factor, form, unit = (1, ".5f", "") if key.startswith("Loss/") else (100, ".1f", " %")
            cells.append(common.plus_minus(summary[key], form, factor) + unit)
        cells.append(f"{summary['seconds']['mean']:.0f}")
        reached = reach(summary["curve"], goal, study.rises, study.per_sample)
        if reached is None:
            cells += ["never", ""]
        else:
            share = f"{100 * reached['samples'] / samples:.0f} %"
            cells += [f"{reached['samples']:,.0f} samples, {reached['step']:,.0f} steps", share]
        rows.append(cells)
    return common.table(heads, rows)


def draw(study: Study, summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Curves with standard deviations; per sample: final values, and samples to the first condition's final value."""
    if not study.per_sample:
        named = {summary["name"]: summary["curve"] for summary in summaries}
        draw_curves(named, ("samples", "step", "seconds"), study.label, path, "linear" if study.rises else "log")
        return
    names, goal = [summary["name"] for summary in summaries], summaries[0][study.measure]["mean"]
    found = [(summary[study.measure]["mean"], summary[study.measure]["stdev"]) for summary in summaries]
    means = [mean for mean, _ in found]
    scale = "log" if max(means) > 10 * min(means) else "linear"  # training runs that diverged
    final = [{"median": mean, "min": mean - deviation, "max": mean + deviation} for mean, deviation in found]
    reached = [reach(summary["curve"], goal, study.rises, interpolate=True) for summary in summaries]
    samples = [dict.fromkeys(("median", "min", "max"), each["samples"] if each else 0) for each in reached]
    with common.plot(path, (13, 1.2 + 0.3 * len(names)), 2, sharey=True) as panels:
        common.bars(panels[0, 0], names, {"": final}, xlabel=f"final {study.label}", xscale=scale)
        label = "training samples to the first one's final value (0: never)"
        common.bars(panels[0, 1], names, {"": samples}, xlabel=label)


def draw_curves(
    named: Mapping[str, Sequence[Mapping[str, Any]]],
    axes: Sequence[str],
    label: str,
    path: Path,
    scale: str = "log",
    goal: float | None = None,
) -> None:
    """A curve per name, without its first point: the untrained network is the same in all conditions."""
    with common.plot(path, (1 + 4 * len(axes), 4.6), len(axes), sharey=True) as panels:
        for panel, key in zip(panels[0], axes, strict=True):
            for name, (_, *points) in named.items():
                places, means = [point[key] for point in points], [point["mean"] for point in points]
                panel.plot(places, means, "o-", markersize=3, label=name)
                low, high = ([each["mean"] + sign * each.get("stdev", 0) for each in points] for sign in (-1, 1))
                panel.fill_between(places, low, high, alpha=0.15, linewidth=0)
            if goal is not None:
                panel.axhline(goal, color="black", linestyle="--", linewidth=1, label="goal")
            panel.grid(alpha=0.3, which="both")
            panel.set(xlabel=key, yscale=scale)
            panel.locator_params(axis="x", nbins=5)
        panels[0, 0].set_ylabel(label)


def add_options(parser: common.Parser, runs: str) -> None:
    """Adds the options of commands that train."""
    directory = common.REPOSITORY / "runs" / runs
    parser.add_argument("--runs", type=Path, default=directory, help="directory of the training runs (%(default)s)")
    parser.add_argument("--limit", type=positive, default=3600, help="seconds per run (%(default)s)")
    parser.add_changes()


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=positive, default=5, help="training runs of each condition (%(default)s)")
    text = "start no run after this time, and report those that are finished"
    parser.add_argument("--hours", type=common.positive_float, help=text)
    add_options(parser, "convergence")
    options = parser.parse_args(argv)
    training_runs = training_runs_of(options.study, options.seeds, options.runs, read_changes(options.changes))
    failure: UserError | None = None
    try:
        run_missing(training_runs, options.limit, options.hours)
    except UserError as error:
        failure = error
    report(options, training_runs, failure)
    if failure is not None:
        raise failure


def report(options: argparse.Namespace, training_runs: Sequence[Training], failure: UserError | None) -> None:
    """Publishes the finished training runs; UserError if the first condition has none."""
    study, summaries, missing = STUDIES[options.study], [], []
    for condition in study.conditions:
        own = [training for training in training_runs if training.condition is condition]
        finished = [training for training in own if training.is_trained()]
        if len(finished) < len(own):
            missing.append(f"{condition.name} ({len(own) - len(finished)} of {len(own)})")
        if finished:
            results = [training.result() for training in finished]
            summaries.append(summarize(study, condition, own[0].config, results))
        elif condition is study.conditions[0]:
            raise failure or UserError(f"no training run of {condition.name} is finished; give more --hours")
    result = {"study": options.study, "settings": common.settings(options), "missing": missing, "conditions": summaries}
    seconds = [each for summary in summaries for each in summary["seconds"]["values"]]
    text = f"{result_table(study, summaries)}\n\n{len(seconds)} training runs, {sum(seconds) / 3600:.2f} hours in all."
    text += f" Missing: {'; '.join(missing)}." if missing else ""
    common.publish(
        f"convergence_{options.study}", result, options.output, text, lambda path: draw(study, summaries, path)
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
