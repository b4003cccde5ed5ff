"""The record in time to quality: seconds until a network is as good as one that the SC21 tutorial's program trains.

python -m benchmarks.record --peer DIR      all rows; DIR: a clone of the tutorial, whose program is row 0
python -m benchmarks.record                 the newest row again, for the goal that is stored in --output
python -m benchmarks.record --size full --peer DIR     on a GPU, at the tutorial's size

Rows after the first are the conditions of the study `record`, or `record_full`, in benchmarks/studies.yaml. They run in
turn, seed by seed, are kept in --runs, and are saved after each seed. A row counts until the first validation whose
loss is that of row 0 at its end, as a mean over the seeds. Seconds are those of steps with their data: start,
compilation and validations do not count.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import l1_loss

from benchmarks import common, peer
from benchmarks.common import over_seeds, plus_minus
from benchmarks.study import LOSS, STUDIES, Training, run_missing, training_runs_of
from utils.data.loaders import open_loaders, open_volumes
from utils.errors import UserError
from utils.files import read_json
from utils.steps import build

NAMES = {"small": "record", "full": "record_full"}  # studies
PEER = "the tutorial's program"


def train_peer(directory: Path, training: Training) -> dict[str, Any]:
    """Row 0 with one seed: its seconds, samples and final loss, with the sizes and volumes of a run of its recipe."""
    world, volumes = common.this_machine(), open_volumes(training.config)
    config, on_cpu, steps = volumes.config, world.device.type == "cpu", volumes.config.total_steps
    schedule = peer.load(directory, "utils/__init__.py", "lr_schedule").lr_schedule
    network = build.step(config, world, build.network_with_loss(config)).network  # with initial weights
    torch.manual_seed(training.seed)  # from which its loader draws
    step = peer.Step(directory, network, world.device, plain=on_cpu)
    with open_loaders(volumes, world) as loaders:
        # Without DALI, its loader would be much slower than a GPU.
        batches = peer.batches(directory, config) if on_cpu else common.endless(loaders.train)
        first = next(batches)
        step.warm_up(first)

        def train() -> None:
            for number, batch in enumerate(itertools.islice(itertools.chain([first], batches), steps), start=1):
                # As in one of its runs on one GPU, which does not scale the learning rate.
                schedule(step.optimizer, number, 1, 1, "none", config.lr_schedule.start_lr, steps)
                step(batch, step.optimizer.param_groups[0]["lr"])

        seconds = common.seconds_of(train, world.device)
        with torch.no_grad():
            losses = [float(l1_loss(step.network(batch.inputs), batch.targets)) for batch in loaders.valid.epoch(0)]
    return {"seconds": seconds, "samples": steps * (config.global_batch_size or 0), "loss": statistics.fmean(losses)}


def row_of(name: str, runs: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None, **facts: Any) -> Any:
    """A row of the page: mean and spread over seeds, and the p-value of being no faster than the row before."""
    row = {"name": name, **facts, "reached": sum(run["seconds"] < math.inf for run in runs), "seeds": len(runs)}
    if row["reached"] == len(runs):
        row |= {key: over_seeds([run[key] for run in runs]) for key in ("seconds", "samples", "loss")}
        if before is not None and "seconds" in before and len(runs) > 1:
            from scipy.stats import ttest_ind

            values = [row["seconds"]["values"], before["seconds"]["values"]]
            row["p"] = float(ttest_ind(*values, equal_var=False, alternative="less").pvalue)
    return row


def until(goal: float, result: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds, samples and loss of a run at its first validation that is as good as the goal."""
    never = {**result["curve"][-1], "seconds": math.inf, "samples": math.inf}
    point = next((point for point in result["curve"] if point[LOSS] <= goal), never)
    return {"seconds": point["seconds"], "samples": point["samples"], "loss": point[LOSS]}


def rows_of(peer_runs: Sequence[Mapping[str, Any]], training_runs: Sequence[Training], goal: float) -> Iterator[Any]:
    """Row 0, if it has run, and those of the finished runs, in the order of the study."""
    row = None
    if peer_runs:
        yield (row := row_of(PEER, peer_runs, None, commit=None))
    finished = [training for training in training_runs if training.is_trained()]
    for condition in dict.fromkeys(training.condition.name for training in finished):
        results = [training.result() for training in finished if training.condition.name == condition]
        yield (row := row_of(condition, [until(goal, result) for result in results], row, commit=results[-1]["commit"]))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["row", "recipe", "reach the goal", "samples", "seconds", "% of row 0", "p", "commit"]
    lines = []
    for number, row in enumerate(rows):
        seconds, p = row.get("seconds"), f"{row['p']:.1g}" if "p" in row else ""
        share = f"{100 * seconds['mean'] / rows[0]['seconds']['mean']:.1f}" if number and seconds else ""
        cells = [number, row["name"], f"{row['reached']} of {row['seeds']}", plus_minus(row.get("samples"), ",.0f")]
        lines.append([*cells, plus_minus(seconds, ".1f"), share, p, (row["commit"] or "")[:8]])
    return common.table(heads, lines, left=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, seeds=None, runs=common.RUNS)
    parser.add_argument("--peer", type=Path, help="a clone of the SC21 tutorial, to run all rows")
    parser.add_argument("--size", choices=NAMES, default="small", help="(%(default)s)")
    options = parser.parse_in_repository(argv)
    name, study = NAMES[options.size], STUDIES[NAMES[options.size]]
    seeds, stored = options.seeds or study.seeds, options.output / f"{name}.json"
    if options.peer is None and not stored.exists():
        raise UserError(f"{stored} has no goal yet: give --peer, a clone of the SC21 tutorial")
    directory = options.peer
    training_runs = training_runs_of(name, seeds, options.runs, {})
    peer_runs, goal = list[dict[str, Any]](), math.nan
    if directory is None:
        goal, newest = read_json(stored)["goal"], study.conditions[-1]
        label = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"  # no run of before counts
        runs = [training for training in training_runs if training.condition is newest]
        training_runs = [Training(label, newest, run.seed, options.runs, run.changes) for run in runs]
    options.peer = directory and "DIR"  # results name no directory of this machine
    for seed in range(seeds):
        if directory is not None:
            files = study.simulated(options.runs).training_keys(study.conditions[0].boxes)
            recipe = Training(f"{name}-0", study.conditions[0], seed, options.runs, files)
            with common.logged(f"{PEER}, seed {seed}"):
                peer_runs.append(train_peer(directory, recipe))
            goal = statistics.fmean(run["loss"] for run in peer_runs)
        run_missing([training for training in training_runs if training.seed == seed])
        rows = list(rows_of(peer_runs, training_runs, goal))
        save = common.publish if seed == seeds - 1 else common.save
        save(name if directory else f"{name}_again", options, {"goal": goal, "rows": rows}, markdown(rows))


if __name__ == "__main__":
    common.run(main)
