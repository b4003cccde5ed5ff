"""Trains with random configs, stopped by random signals, and compares the bits with uninterrupted runs.

python tests/soak_random.py 20              20 training runs; make soak RUNS=20 includes them
python tests/soak_random.py 1 --seed 7      repeats the run whose line begins with "seed 7"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from soak import CODES, PlannedStop, Stop, StopTest
from trainings import YAML

from utils import config as configs
from utils.errors import UserError
from utils.optim.optimizers import OPTIMIZERS

# Each run draws one value of each key; a value that stands there twice is twice as likely.
KEYS: dict[str, list[Any]] = {
    "optimizer.name": list(OPTIMIZERS),
    "loss": ["l1", "mse", "huber"],
    "network.norm": ["none", "batch", "group", "ghost(1)"],
    "accumulation_steps": [1, 1, 2, 4],
    "ddp": ["torch", "torch", "manual"],
    "gradient_compression": ["none", "bfloat16"],
    "static_graph": [False, True],
    "disable_broadcast_buffers": [False, True],
    "bucket_cap_mb": [25.0, 0.001],
    "ema_decay": [None, 0.5, 0.9],
    "clip_grad_norm": [None, 0.01],
    "log_noise_scale": [False, True],
    "enable_amp": [False, True],
    "precision": ["bfloat16", "float16"],
    "lr_schedule.shape": ["cosine", "constant"],
    "lr_schedule.start_lr": [0.0002, 0.01],
    "early_stopping.patience": [None, 1],
    "early_stopping.min_delta": [0.0, 0.001],
    "checkpoint.every_steps": [None, 1, 3, 5],
    "checkpoint.keep_last": [1, 2],
    "evaluation.every_epochs": [0, 0, 1],
    "data_loader_config": ["lowmem", "inmem", "resident"],
    "channels_last": [False, True],
    "log_interval": [1, 3, 4],
    "num_epochs": [1, 2, 3],
}
FIXED = ["--config=test", "--set=report_baselines=false", "--set=timeouts.rendezvous=30"]
FIXED += ["--set=optimizer.momentum=0.9", "--set=optimizer.precondition_frequency=3"]


def draw_config(draw: random.Random, ranks: int) -> dict[str, Any]:
    """The values of one valid config that are not the defaults of `test`."""
    default = configs.flatten(configs.load(YAML, "test"))
    while True:
        drawn = {key: draw.choice(values) for key, values in KEYS.items()}
        with contextlib.suppress(UserError):
            configs.load(YAML, "test", drawn).for_world(ranks)
            return {key: value for key, value in drawn.items() if default[key] != value}


def draw_plan(draw: random.Random, ranks: int, lines: int) -> list[PlannedStop]:
    """Stops for the first starts of a run; an uninterrupted start logs that many lines."""
    plan = []
    for _ in range(draw.randint(1, 4)):
        victims = list(range(ranks)) if draw.random() < 0.5 else [draw.randrange(ranks)]
        signals = [(draw.choice(list(CODES)), draw.uniform(0.0, 0.1)) for _ in range(draw.choice([1, 1, 1, 2]))]
        plan.append(PlannedStop(victims, lines=draw.randint(1, lines), signals=signals))
    return plan


def random_run(seed: int, folder: Path) -> list[Stop]:
    """Trains with a random config, with and without stops; returns the stops. AssertionError unless both are equal."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2])
    drawn = [f"--set={key}={json.dumps(value)}" for key, value in draw_config(draw, ranks).items()]
    print(f"seed {seed}: {ranks} ranks", *drawn, flush=True)
    test = StopTest(folder, [*FIXED, *drawn], ranks)
    plan = draw_plan(draw, ranks, test.lines)
    stops = test.run("stopped", plan)
    for planned, stop in zip(plan, stops, strict=False):
        print(f"  {planned.lines} lines, {planned.signals} to {planned.victims}: exit codes {stop.codes}", flush=True)
    return stops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the first run")
    options = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about each restart
    stops = 0
    for seed in range(options.seed, options.seed + options.runs):
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
        stops += len(random_run(seed, folder))
        shutil.rmtree(folder)  # kept after an error
    print(f"{options.runs} random runs, {stops} stops: each ended with the bits of an uninterrupted run")


if __name__ == "__main__":
    main()
