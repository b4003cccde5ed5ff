"""Convergence: conditions × ranks × seeds, each a training of its own; mean and spread over seeds.

python -m benchmarks.convergence digits      the steps from a naive large batch to LAMB, 8 ranks, on 1,797 digits
python -m benchmarks.convergence digits --ranks 2 4 8
python -m benchmarks.convergence cifar10     the same on CIFAR-10, whose files must lie in data/cifar10
python -m benchmarks.convergence unet        the U-Net at the demo's scale: 8 times the batch, ways to scale the rate
python -m benchmarks.convergence quality     the same U-Net on one rank: what learns more from a sample
python -m benchmarks.convergence layers      and what norms and first weights do for it

Trainings are kept in --runs, so that a study that was interrupted goes on with those that lack. A table, a picture and
all curves go to --output. Spreads are standard deviations between seeds; each seed has weights and an order of samples
of its own.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import train
from benchmarks.common import Parser, save, settings, this_machine
from benchmarks.processes import launcher, run_group, why_it_failed
from networks.metrics import accuracy
from utils import config as configs
from utils.cli import positive, read_changes
from utils.config import Config
from utils.data import open_labelled
from utils.data.loaders.classification import ClassificationLoader
from utils.data.plan import ShufflePlan
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.progress import format_duration
from utils.runs.logger import provenance, read_records
from utils.training.checkpoint import FOLDER, place, read_weights, saved_steps

TOP = Path(__file__).parent.parent
YAML = str(TOP / "config" / "UNet.yaml")


@dataclass(frozen=True)
class Condition:
    """A way to train; `changes` are keys of the config."""

    name: str
    config: str
    ranks: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Conditions that are held against the first one; `measure` is the scalar that decides."""

    conditions: Sequence[Condition]
    measure: str
    label: str
    rises: bool  # more is better
    per_sample: bool = False  # told by the samples that reach the first one's end, read off between validations


def _large_batches(data: str) -> Study:
    return Study(
        (
            Condition("1 rank", f"{data}_naive", 1),
            Condition("8 ranks, naive", f"{data}_naive", 8),
            Condition("+ batch norm of each rank", f"{data}_bn", 8),
            Condition("+ rate × 8", f"{data}_scaled", 8),
            Condition("+ warm-up", f"{data}_warmup", 8),
            Condition("+ LAMB", f"{data}_lamb", 8),
        ),
        "Accuracy/valid",
        "validation accuracy",
        rises=True,
    )


def _unet() -> Study:
    """The original's bs64, bs512_test and bs512_opt, an eighth as large; warm-up is a tenth of the large batch's steps,
    as there.
    """
    small = {"network.width": 8, "Nsamples": 800, "report_baselines": False, "report_pictures": False}
    large = {**small, "global_batch_size": 64}

    def scaled(rule: str) -> dict[str, Any]:
        return {**large, "lr_schedule.scaling": rule, "lr_schedule.warmup_steps": 5}

    return Study(
        (
            Condition("batch 8", "demo", 2, small),
            Condition("batch 64, same rate", "demo", 2, large),
            Condition("batch 64, rate × √8", "demo", 2, scaled("sqrt")),
            Condition("batch 64, rate × 8", "demo", 2, scaled("linear")),
            Condition("batch 64, rate × √8, 4 × the epochs", "demo", 2, {**scaled("sqrt"), "num_epochs": 16}),
        ),
        "Loss/valid",
        "validation loss (mean absolute error)",
        rises=False,
    )


def _quality() -> Study:
    """The original's recipe at the demo's scale, and what may learn more from each sample: one change at a time.

    A mean's decay of 0.98 is never reached in these 400 steps; see utils/optim/ema.py. Tried with one seed and not
    included, since they were no better than what they changed: half the rate; 8 times the rate, against 4 times; a warm-up of 20
    steps. The study `layers` has first weights and norms.
    """
    small = {"network.width": 8, "Nsamples": 400, "num_epochs": 8, "report_baselines": False, "report_pictures": False}
    none, full = ({**small, "symmetries": name} for name in ("none", "full"))
    twice, four = ({"lr_schedule.start_lr": rate} for rate in (4e-3, 8e-3))
    constant, mean = {"lr_schedule.shape": "constant"}, {"ema_decay": 0.98}
    default = {"weight_init.conv_init": "default"}
    weighted = {"channel_weights": [1.0, 1.0, 1.0, 1.0, 3.0]}

    return Study(
        (
            Condition("as the original", "demo", 1, {**small, "symmetries": "grid"}),
            Condition("no symmetries", "demo", 1, none),
            Condition("48 symmetries", "demo", 1, full),
            Condition("48 symmetries, temperature × 3 in the loss", "demo", 1, {**full, **weighted}),
            Condition("48 symmetries, torch's weights", "demo", 1, {**full, **default}),
            Condition("48 symmetries, constant rate", "demo", 1, {**full, **constant}),
            Condition("48 symmetries, constant rate, mean of weights", "demo", 1, {**full, **constant, **mean}),
            Condition("48 symmetries, rate × 2", "demo", 1, {**full, **twice}),
            Condition("48 symmetries, rate × 4", "demo", 1, {**full, **four}),
            Condition("no symmetries, rate × 4", "demo", 1, {**none, **four}),
            Condition("48 symmetries, rate × 4, half the epochs", "demo", 1, {**full, **four, "num_epochs": 4}),
            Condition(
                "48 symmetries, constant rate × 4, mean of weights", "demo", 1, {**full, **four, **constant, **mean}
            ),
        ),
        "Loss/valid",
        "validation loss (mean absolute error)",
        rises=False,
        per_sample=True,
    )


def _layers() -> Study:
    """Norms, first weights, and a mean of weights under the cosine, each against the same network without it."""
    small = {"network.width": 8, "Nsamples": 400, "num_epochs": 8, "report_baselines": False, "report_pictures": False}
    changes: dict[str, dict[str, Any]] = {
        "48 symmetries": {},
        "group norm": {"network.norm": "group"},
        "batch norm": {"network.norm": "batch"},
        "Glorot's weights": {"weight_init.conv_init": "glorot"},
        "mean of weights under the cosine": {"ema_decay": 0.98},
    }
    return Study(
        tuple(Condition(name, "demo", 1, {**small, **change}) for name, change in changes.items()),
        "Loss/valid",
        "validation loss (mean absolute error)",
        rises=False,
        per_sample=True,
    )


def with_ranks(study: Study, ranks: Sequence[int]) -> Study:
    """The study's conditions of several ranks, on each of these numbers of them instead."""
    conditions: list[Condition] = []
    for condition in study.conditions:
        if condition.ranks == 1:
            conditions.append(condition)
            continue
        for number in ranks:
            name = condition.name.replace(f"{condition.ranks} ranks", "").strip(", ")
            conditions.append(replace(condition, name=f"{number} ranks, {name}", ranks=number))
    return replace(study, conditions=tuple(conditions))


STUDIES: dict[str, Study] = {
    "digits": _large_batches("digits"),
    "cifar10": _large_batches("cifar10"),
    "unet": _unet(),
    "quality": _quality(),
    "layers": _layers(),
}


# --- trainings -------------------------------------------------------------------------------------------------------


class Training:
    """One condition with one seed."""

    def __init__(self, name: str, condition: Condition, seed: int, runs: Path, changes: Mapping[str, Any]) -> None:
        """`name` tells the condition from others in file names."""
        self.condition, self.seed, self._runs = condition, seed, runs
        self._changes = {**condition.changes, **changes, "seed": seed, "expdir": str(runs)}
        self._run_num = f"{name}-seed{seed}"
        self.directory = runs / condition.config / f"{condition.ranks}GPU" / self._run_num
        self.config = configs.load(YAML, condition.config, self._changes).for_world(condition.ranks)

    def command(self) -> list[str]:
        flags = [f"--config={self.condition.config}", f"--run_num={self._run_num}", "--resume=no"]
        flags += [f"--set={key}={json.dumps(value)}" for key, value in self._changes.items()]
        return [*launcher(self.condition.ranks), "train.py", *flags]

    def complete(self) -> bool:
        """Whether it is there, of this commit and these settings."""
        try:
            made = json.loads((self.directory / "provenance.json").read_text(encoding="utf-8"))
            same = configs.load(str(self.directory / "config.yaml"), self.condition.config).for_world(
                self.condition.ranks
            )
        except (OSError, ValueError, UserError):
            return False
        here = provenance(this_machine())["git_commit"]
        steps = saved_steps(self.directory / FOLDER)
        return made.get("git_commit") == here and same == self.config and self.config.total_steps in steps

    def run(self, limit: float) -> None:
        """Trains; UserError with the reason where that fails."""
        threads = max(1, (os.cpu_count() or 1) // self.condition.ranks)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self._runs.mkdir(parents=True, exist_ok=True)
        log = self._runs / f"{self._run_num}.log"
        with open(log, "wb") as file:
            code = run_group(self.command(), environment, file, limit, TOP)
        if code != 0:
            why = why_it_failed(code, log.read_text(errors="replace"), limit)
            raise UserError(f"the training {self.condition.name}, seed {self.seed}, failed: {why}; see {log}")

    def curve(self) -> list[dict[str, float]]:
        """What was measured at the start and after each epoch."""
        batch, points = self.config.global_batch_size, []
        for record in read_records(self.directory / "metrics.jsonl"):
            if "Loss/valid" in record:
                step = record["step"]
                scalars = {name: value for name, value in record.items() if "/" in name}
                place = {"epoch": step / self.config.steps_per_epoch, "samples": step * batch, "step": step}
                points.append({**place, "seconds": record["seconds"], **scalars})
        return points

    def result(self) -> dict[str, Any]:
        """The curve, and what the trained network does with the samples it was trained on."""
        curve = self.curve()
        found: dict[str, Any] = {"seed": self.seed, "curve": curve, "seconds": curve[-1]["seconds"]}
        if self.config.dataset.name is not None:
            found["training accuracy"] = training_accuracy(self.config, self.directory)
        return found


def training_accuracy(config: Config, directory: Path) -> float:
    """Of a run's last weights on all training samples."""
    network = train.build_model(config)
    folder = directory / FOLDER
    network.load_state_dict(read_weights(place(folder, saved_steps(folder)[0]))["network"])
    network.eval()
    dataset, splits = open_labelled(config)
    samples = len(splits["train"].labels)
    loader = ClassificationLoader(
        splits["train"], ShufflePlan(samples, samples, split="valid"), batch_size=500, scale=dataset.scale
    )
    with torch.no_grad():
        right = sum(float(accuracy(network(inputs), labels)) * len(labels) for inputs, labels in loader.epoch(0))
    return right / samples


# --- what comes of them ----------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation between seeds, and the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "stdev": deviation, "n": len(values), "values": list(values)}


def summarise(study: Study, condition: Condition, config: Config, results: Sequence[Mapping[str, Any]]) -> Any:
    """Of one condition: the end, and the curve's mean and spread at each epoch."""
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
        study.measure: spread([curve[-1][study.measure] for curve in curves]),
        "Loss/valid": spread([curve[-1]["Loss/valid"] for curve in curves]),
        "Loss/train": spread([curve[-1]["Loss/train"] for curve in curves]),
        "curve": points,
    }
    if "training accuracy" in results[0]:
        summary["training accuracy"] = spread([result["training accuracy"] for result in results])
    return summary


def reach(summary: Mapping[str, Any], goal: float, rises: bool, between: bool = False) -> dict[str, float] | None:
    """Where the mean curve first is as good as `goal`; None if it never is.

    That is at a validation, or, with `between`, on the straight line to it from the one before.
    """
    before: Mapping[str, float] | None = None
    for point in summary["curve"]:
        if point["mean"] >= goal if rises else point["mean"] <= goal:
            here = {key: point[key] for key in ("epoch", "samples", "step", "seconds")}
            if before is None or not between:
                return here
            share = (goal - before["mean"]) / (point["mean"] - before["mean"])
            return {key: before[key] + share * (value - before[key]) for key, value in here.items()}
        before = point
    return None


def table(study: Study, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """As Markdown."""
    labelled = "training accuracy" in summaries[0]
    digits = 1 if labelled else 5
    goal = summaries[0][study.measure]["mean"]
    heads = ["condition", "batch", "epochs", "steps"]
    heads += ["validation accuracy", "training accuracy"] if labelled else ["validation loss"]
    heads += ["seconds", "as good as the first after"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for summary in summaries:
        cells = [summary["name"], summary["global batch"], summary["epochs"], summary["steps"]]
        for key in (study.measure, "training accuracy") if labelled else (study.measure,):
            values = summary[key]
            factor, sign = (100, " %") if labelled else (1, "")
            cells.append(f"{factor * values['mean']:.{digits}f} ± {factor * values['stdev']:.{digits}f}{sign}")
        cells.append(f"{summary['seconds']['mean']:.0f}")
        there = reach(summary, goal, study.rises)
        cells.append("never" if there is None else f"{there['samples']:,.0f} samples, {there['step']:,.0f} steps")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def samples_table(study: Study, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """As Markdown: how each ends, and after how many samples it is as good as the first one in the end."""
    first, *_ = summaries
    goal, all_samples = first[study.measure]["mean"], first["curve"][-1]["samples"]
    heads = ["condition", "samples", "validation loss", "of the first's", "as good as the first after", "that is"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for summary in summaries:
        values, samples = summary[study.measure], summary["curve"][-1]["samples"]
        ends = f"{values['mean']:.5f} ± {values['stdev']:.5f}"
        cells = [summary["name"], f"{samples:,}", ends, f"{values['mean'] / goal:.2f}"]
        there = reach(summary, goal, study.rises, between=True)
        if there is None:
            cells += ["never", ""]
        else:
            cells += [f"{there['samples']:,.0f} samples", f"{100 * there['samples'] / all_samples:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw_samples(study: Study, summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The end's mean ± standard deviation, and the samples to the first one's end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    goal = summaries[0][study.measure]["mean"]
    rows = range(len(summaries))
    colours = ["C7" if row == 0 else "C0" for row in rows]
    height = 1.2 + 0.3 * len(summaries)
    figure, (ends, samples) = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    for row, (summary, colour) in enumerate(zip(summaries, colours, strict=True)):
        values = summary[study.measure]
        ends.errorbar(values["mean"], row, xerr=values["stdev"], color=colour, marker="o", capsize=3)
        there = reach(summary, goal, study.rises, between=True)
        if there is None:
            samples.annotate("never", (0, row), (4, 0), textcoords="offset points", va="center")
            continue
        samples.barh(row, there["samples"], height=0.6, color=colour)
        samples.annotate(
            f"{there['samples']:,.0f}", (there["samples"], row), (4, 0), textcoords="offset points", va="center"
        )
    ends.axvline(goal, color="C7", linestyle="--", linewidth=1)
    ends.set(xlabel=f"final {study.label}", yticks=list(rows), yticklabels=[one["name"] for one in summaries])
    ends.invert_yaxis()
    samples.set(xlabel="training samples to the first one's final loss")
    samples.set_xlim(0, 1.2 * samples.dataLim.x1)  # room for the numbers
    for axes in (ends, samples):
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    with atomic_write([path]) as (partial,):
        figure.savefig(partial, dpi=120, format="png")
    plt.close(figure)


def draw(study: Study, summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean ± standard deviation after each epoch, over samples, steps and seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, grid = plt.subplots(1, 3, figsize=(13, 4.6), sharey=True, layout="constrained")
    for axes, (key, label) in zip(
        grid, (("samples", "training samples"), ("step", "steps"), ("seconds", "seconds")), strict=True
    ):
        for number, summary in enumerate(summaries):
            points = summary["curve"][1:]  # the untrained network is the same for all
            places, means, spreads = ([point[name] for point in points] for name in (key, "mean", "stdev"))
            colour = f"C{number}"
            axes.plot(places, means, color=colour, marker="o", markersize=3, label=summary["name"])
            low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel=label, xscale="log" if key == "step" else "linear")
        if not study.rises:
            axes.set_yscale("log")
        if key == "step":
            axes.xaxis.set_minor_formatter(NullFormatter())  # its labels would lie over each other
        else:
            axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3, which="both")
    grid[0].set_ylabel(study.label)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    with atomic_write([path]) as (partial,):
        figure.savefig(partial, dpi=120, format="png")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--ranks", type=positive, nargs="+", help="of conditions with several ranks (the study's own)")
    parser.add_argument("--seeds", type=positive, default=5, help="trainings of each condition (%(default)s)")
    parser.add_argument("--runs", type=Path, default=TOP / "runs" / "convergence", help="where they go (%(default)s)")
    parser.add_argument("--limit", type=positive, default=3600, help="seconds for one of them (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of all configs; may be repeated"
    )
    options = parser.parse_args(argv)
    changes = read_changes(options.set)
    study = STUDIES[options.study]
    if options.ranks is not None:
        study = with_ranks(study, options.ranks)
    trainings = [
        Training(f"{options.study}-{number}", condition, seed, options.runs.absolute(), changes)
        for seed in range(options.seeds)
        for number, condition in enumerate(study.conditions)
    ]
    started, lacking = time.monotonic(), [training for training in trainings if not training.complete()]
    for number, training in enumerate(lacking):
        rest = (time.monotonic() - started) / max(1, number) * (len(lacking) - number)
        about = f", about {format_duration(rest)} left" if number else ""
        sys.stderr.write(f"{number + 1}/{len(lacking)}: {training.condition.name}, seed {training.seed}{about}\n")
        training.run(options.limit)
    summaries = []
    for condition in study.conditions:
        own = [training for training in trainings if training.condition is condition]
        summaries.append(summarise(study, condition, own[0].config, [training.result() for training in own]))
    lines = (samples_table if study.per_sample else table)(study, summaries)
    result = {"study": options.study, "settings": settings(options), "conditions": summaries}
    path = save(f"convergence_{options.study}", result, options.output)
    with atomic_write([path.with_suffix(".md")]) as (partial,):
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (draw_samples if study.per_sample else draw)(study, summaries, path.with_suffix(".png"))
    sys.stdout.write("\n".join([*lines, f"results: {path}, .md and .png beside it"]) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
