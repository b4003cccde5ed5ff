"""Example runs: real trainings, whose logs are kept in example_logs, and what each took to the first one's loss.

python -m benchmarks.example_runs demo    the demo, what pays, and larger batches, on boxes that make demo simulates
python -m benchmarks.example_runs gpu     base, short_opt and bs64_opt on simulated boxes of 512³ and 256³ cells

The first run of a set is its baseline, the original's recipe. Trainings are kept in --runs, so that a set that was
interrupted goes on with those that lack; what is fit for others to see of them goes to --logs.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Parser, save, settings
from benchmarks.convergence import Condition, Training
from utils.cli import positive, read_changes
from utils.errors import UserError, one_line_errors
from utils.files import atomic_directory, atomic_write
from utils.progress import format_duration
from utils.runs.logger import read_records

TOP = Path(__file__).parent.parent
KEPT = ("config.yaml", "provenance.json", "metrics.jsonl", "out.log", "loss_curves.png", "slices.png", "report.html")


@dataclass(frozen=True)
class Box:
    """A simulated volume that runs need: where, and `utils.simulation.simulate`'s options."""

    path: str
    grid: int
    seed: int


@dataclass(frozen=True)
class Set:
    """Runs that are held against the first one, and the boxes they read."""

    runs: Sequence[Condition]
    boxes: Sequence[Box]
    goal: str  # what the first one's final validation loss is called


def _demo() -> Set:
    # Twice as many epochs of a quarter as many samples: more points on the curves, and half the time.
    finer = {"Nsamples": 400, "num_epochs": 8, "evaluation.every_epochs": 8}
    base = {**finer, "report_baselines": True}

    def larger(factor: int) -> dict[str, Any]:
        """As the original's large batches: half as many steps as the first one's, the rate by the root."""
        epochs = 8 * factor // 2
        return {
            **base,
            "global_batch_size": 8 * factor,
            "num_epochs": epochs,
            "evaluation.every_epochs": epochs,
            "lr_schedule.scaling": "sqrt",
            "lr_schedule.warmup_steps": 20,
        }

    return Set(
        (
            Condition("demo_base", "demo", 2, {**base, **ORIGINAL_RECIPE}),
            Condition("demo_symmetries", "demo", 2, base),
            Condition("demo_opt", "demo_opt", 2, base),
            Condition("demo_bs16", "demo", 2, larger(2)),
            Condition("demo_bs32", "demo", 2, larger(4)),
        ),
        (Box("data/demo_train.h5", 128, 1), Box("data/demo_val.h5", 128, 2)),
        "the original's recipe",
    )


def _gpu() -> Set:
    ranks = max(1, torch.cuda.device_count())
    files = {"train_path": "data/example_train.h5", "val_path": "data/example_val.h5", "box_size": [512, 256]}
    common = {**files, "data_loader_config": "auto", "num_data_workers": 8, "evaluation.every_epochs": 2}
    return Set(
        (
            Condition("base", "base", ranks, common),
            Condition("short_opt", "short_opt", ranks, common),
            Condition("bs64_opt", "bs64_opt", ranks, common),
        ),
        (Box("data/example_train.h5", 512, 1), Box("data/example_val.h5", 256, 2)),
        "base",
    )


# What the original tutorial does where a config of this project does otherwise.
ORIGINAL_RECIPE: dict[str, Any] = {"symmetries": "grid"}
SETS = {"demo": _demo, "gpu": _gpu}


def simulate(box: Box) -> None:
    """Makes the box where it is not there; UserError where that fails."""
    if (TOP / box.path).exists():
        return
    sys.stderr.write(f"simulating {box.path}, {box.grid}³ cells\n")
    options = ["--output", box.path, "--grid", str(box.grid), "--seed", str(box.seed)]
    code = subprocess.run([sys.executable, "-m", "utils.simulation", *options], cwd=TOP).returncode
    if code != 0:
        raise UserError(f"simulating {box.path} failed with exit code {code}")


def summarise(training: Training, goal: float) -> dict[str, Any]:
    """One run: its end, and where it first was as good as `goal`, with that moment's samples and seconds."""
    curve, config = training.curve(), training.config
    began = curve[0]["seconds"]
    there = next((point for point in curve[1:] if point["Loss/valid"] <= goal), None)
    reached = None
    if there is not None:
        reached = {"samples": there["samples"], "step": there["step"], "seconds": there["seconds"] - began}
    speeds = sorted(point["Avg iters per sec"] for point in iterations(training))
    return {
        "name": training.condition.name,
        "config": training.condition.config,
        "changes": dict(training.condition.changes),
        "ranks": training.condition.ranks,
        "batch": config.global_batch_size,
        "epochs": config.num_epochs,
        "steps": config.total_steps,
        "samples": config.total_steps * config.global_batch_size,
        "seconds": curve[-1]["seconds"] - began,
        "samples per second": speeds[len(speeds) // 2] * config.global_batch_size if speeds else math.nan,
        "initial loss": curve[0]["Loss/valid"],
        "final loss": curve[-1]["Loss/valid"],
        "to the goal": reached,
        "command": ["python", *training.command()[1:]],
        "curve": [
            {"samples": point["samples"], "seconds": point["seconds"] - began, "loss": point["Loss/valid"]}
            for point in curve
        ],
    }


def iterations(training: Training) -> list[Mapping[str, float]]:
    """The records of each epoch's speed."""
    return [record for record in read_records(training.directory / "metrics.jsonl") if "Avg iters per sec" in record]


def table(runs: Sequence[Mapping[str, Any]], goal: str) -> list[str]:
    """As Markdown."""
    heads = ("run", "batch", "epochs", "steps", "samples/s", "validation loss", f"as good as {goal}: samples", "time")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for run in runs:
        there = run["to the goal"]
        reached = ["never", ""] if there is None else [f"{there['samples']:,.0f}", format_duration(there["seconds"])]
        cells = [run["name"], run["batch"], run["epochs"], run["steps"], f"{run['samples per second']:.1f}"]
        cells.append(f"{run['final loss']:.6f}")
        lines.append(f"| {' | '.join(map(str, [*cells, *reached]))} |")
    return lines


def draw(runs: Sequence[Mapping[str, Any]], goal: float, path: Path) -> None:
    """Validation loss over samples and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(panels, ("samples", "seconds"), ("training samples", "seconds"), strict=True):
        for run in runs:
            points = run["curve"][1:]
            axes.plot([p[key] for p in points], [p["loss"] for p in points], "o-", markersize=3, label=run["name"])
        axes.axhline(goal, color="0.5", linewidth=1, linestyle=":")
        axes.set(xlabel=label, yscale="log")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("validation loss (mean absolute error)")
    panels[0].legend()
    with atomic_write([path]) as (partial,):
        figure.savefig(partial, dpi=120, format="png")


def keep(training: Training, logs: Path) -> None:
    """Copies what is fit to be shown of a run, without its checkpoints."""
    with atomic_directory(logs / training.condition.name) as partial:
        for name in KEPT:
            if (training.directory / name).exists():
                shutil.copy(training.directory / name, partial / name)
    shutil.copytree(training.directory / "logs", logs / training.condition.name / "logs")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--runs", type=Path, default=TOP / "runs" / "examples", help="where they go (%(default)s)")
    parser.add_argument("--logs", type=Path, default=TOP / "example_logs", help="what is kept (%(default)s)")
    parser.add_argument("--limit", type=positive, default=3600, help="seconds for one of them (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="a key of all; may be repeated"
    )
    options = parser.parse_args(argv)
    options.logs, options.output, options.runs = (
        path.absolute() for path in (options.logs, options.output, options.runs)
    )
    chosen, changes = SETS[options.set](), read_changes(options.changes)
    # What runs keep of themselves should name no place of this machine.
    os.chdir(TOP)
    runs_directory = Path(os.path.relpath(options.runs, TOP))
    trainings = [Training(condition.name, condition, 0, runs_directory, changes) for condition in chosen.runs]
    for box in chosen.boxes:
        simulate(box)
    for number, training in enumerate(trainings, start=1):
        if not training.complete():
            sys.stderr.write(f"{number}/{len(trainings)}: {training.condition.name}\n")
            training.run(options.limit)
    goal = trainings[0].curve()[-1]["Loss/valid"]
    runs = [summarise(training, goal) for training in trainings]
    lines = table(runs, chosen.goal)
    result = {"set": options.set, "settings": settings(options), "goal": goal, "runs": runs}
    path = save(f"example_runs_{options.set}", result, options.output)
    with atomic_write([path.with_suffix(".md")]) as (partial,):
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(runs, goal, path.with_suffix(".png"))
    for training in trainings:
        keep(training, options.logs)
    sys.stdout.write("\n".join([*lines, f"results: {path}, .md and .png beside it; logs: {options.logs}"]) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
