"""Example runs: real training runs whose logs are kept in example_logs, and the samples and time of each to the first
one's final loss.

python -m benchmarks.example_runs demo    the demo with other recipes and batch sizes, on the boxes of `make demo`
python -m benchmarks.example_runs gpu     base, short_opt and bs64_opt on simulated boxes of 512³ and 256³ cells

benchmarks/example_runs.yaml defines the sets. Runs are kept in --runs: an interrupted set resumes with the missing
ones. Their logs, without checkpoints, are copied to --logs.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import REPOSITORY, Parser, publish, settings, table
from benchmarks.convergence import Condition, Training, add_options, draw_curves, reach, run_missing
from utils.cli import read_changes
from utils.errors import UserError, one_line_errors
from utils.files import atomic_directory
from utils.progress import format_duration
from utils.training.loggers.base import read_records

KEPT = ("config.yaml", "provenance.json", "metrics.jsonl", "out.log", "loss_curves.png", "slices.png", "report.html")
SETS = yaml.safe_load(Path(__file__).with_name("example_runs.yaml").read_text(encoding="utf-8"))


def conditions(chosen: Mapping[str, Any]) -> list[Condition]:
    """The runs of a set."""
    ranks = chosen["ranks"] or max(1, torch.cuda.device_count())
    return [
        Condition(run["name"], run["config"], ranks, {**chosen["changes"], **run.get("changes", {})})
        for run in chosen["runs"]
    ]


def simulate(path: str, grid: int, seed: int) -> None:
    """Creates the box if it is missing; UserError if that fails."""
    if (REPOSITORY / path).exists():
        return
    sys.stderr.write(f"simulating {path}, {grid}³ cells\n")
    command = [sys.executable, "-m", "utils.simulation", "--output", path, "--grid", str(grid), "--seed", str(seed)]
    code = subprocess.run(command, cwd=REPOSITORY).returncode
    if code != 0:
        raise UserError(f"simulating {path} failed with exit code {code}")


def summarize(training: Training, goal: float) -> dict[str, Any]:
    """One run: its final loss, and the samples and seconds at the first validation as good as `goal`."""
    curve, config = training.curve(), training.config
    started = curve[0]["seconds"]
    points = [{**point, "seconds": point["seconds"] - started, "mean": point["Loss/valid"]} for point in curve]
    records = read_records(training.directory / "metrics.jsonl")
    speeds = [record["Avg iters per sec"] for record in records if "Avg iters per sec" in record]
    return {
        "name": training.condition.name,
        "config": training.condition.config,
        "changes": dict(training.condition.changes),
        "ranks": training.condition.ranks,
        "batch": config.global_batch_size,
        "epochs": config.num_epochs,
        "steps": config.total_steps,
        "samples": config.total_steps * config.global_batch_size,
        "seconds": points[-1]["seconds"],
        "samples per second": statistics.median_high(speeds) * config.global_batch_size if speeds else math.nan,
        "initial loss": points[0]["mean"],
        "final loss": points[-1]["mean"],
        "to the goal": reach(points[1:], goal, rises=False),
        "command": ["python", *training.command()[1:]],
        "curve": [{key: point[key] for key in ("samples", "seconds", "mean")} for point in points],
    }


def result_table(runs: Sequence[Mapping[str, Any]], goal: str) -> str:
    """A row per run."""
    rows = []
    for run in runs:
        reached = run["to the goal"]
        cells = [run["name"], run["batch"], run["epochs"], run["steps"], f"{run['samples per second']:.1f}"]
        cells.append(f"{run['final loss']:.6f}")
        cells += [f"{reached['samples']:,.0f}", format_duration(reached["seconds"])] if reached else ["never", ""]
        rows.append(cells)
    heads = ("run", "batch", "epochs", "steps", "samples/s", "validation loss", f"as good as {goal}: samples", "time")
    return table(heads, rows)


def keep(training: Training, logs: Path) -> None:
    """Copies a run's logs, without its checkpoints."""
    with atomic_directory(logs / training.condition.name) as partial:
        for name in KEPT:
            if (training.directory / name).exists():
                shutil.copy(training.directory / name, partial / name)
    shutil.copytree(training.directory / "logs", logs / training.condition.name / "logs")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("set", choices=SETS)
    add_options(parser, "examples")
    logs = REPOSITORY / "example_logs"
    parser.add_argument("--logs", type=Path, default=logs, help="directory for the logs (%(default)s)")
    options = parser.parse_args(argv)
    for name in ("logs", "output", "runs"):
        setattr(options, name, getattr(options, name).absolute())
    chosen, changes = SETS[options.set], read_changes(options.changes)
    # Relative paths: the logs should not contain directories of this machine.
    os.chdir(REPOSITORY)
    directory = Path(os.path.relpath(options.runs, REPOSITORY))
    training_runs = [Training(condition.name, condition, 0, directory, changes) for condition in conditions(chosen)]
    for box in chosen["boxes"]:
        simulate(**box)
    run_missing(training_runs, options.limit)
    goal = training_runs[0].curve()[-1]["Loss/valid"]
    results = [summarize(training, goal) for training in training_runs]
    result = {"set": options.set, "settings": settings(options), "goal": goal, "runs": results}
    for training in training_runs:
        keep(training, options.logs)
    named, text = {run["name"]: run["curve"] for run in results}, result_table(results, chosen["goal"])
    publish(
        f"example_runs_{options.set}",
        result,
        options.output,
        text,
        lambda path: draw_curves(named, ("samples", "seconds"), "validation loss (mean absolute error)", path),
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
