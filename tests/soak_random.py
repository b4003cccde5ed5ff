"""Trains with random configs, stopped by random signals, and compares the bits with uninterrupted runs.

python tests/soak_random.py 20              20 training runs; make soak RUNS=20 includes them
python tests/soak_random.py 1 --seed 7      repeats the run whose line begins with "seed 7"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from soak import TOP, Run, assert_same_run, check_end, train_with_stops, write_data
from soak_launchers import Plain

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
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL, signal.SIGINT]
# Of a start: done, failed because of a peer, bad input, stopped, a peer is gone, Ctrl-C, killed.
EXIT_CODES = {0, 1, 2, 75, 76, 130, -signal.SIGINT, -signal.SIGKILL}


class PlannedStop(NamedTuple):
    """Signals to one rank or to all, once a start has logged that many lines."""

    victims: list[int]
    lines: int
    signals: list[tuple[signal.Signals, float]]  # and the seconds before each


def draw_config(draw: random.Random, ranks: int) -> dict[str, Any]:
    """The values of one valid config that are not the defaults of `test`."""
    yaml = str(TOP / "config" / "UNet.yaml")
    default = configs.flatten(configs.load(yaml, "test"))
    while True:
        drawn = {key: draw.choice(values) for key, values in KEYS.items()}
        with contextlib.suppress(UserError):
            configs.load(yaml, "test", drawn).for_world(ranks)
            return {key: value for key, value in drawn.items() if default[key] != value}


def draw_plan(draw: random.Random, ranks: int, lines: int) -> list[PlannedStop]:
    """Stops for the first starts of a run; an uninterrupted start logs that many lines."""
    plan = []
    for _ in range(draw.randint(1, 4)):
        victims = list(range(ranks)) if draw.random() < 0.5 else [draw.randrange(ranks)]
        signals = [(draw.choice(SIGNALS), draw.uniform(0.0, 0.1)) for _ in range(draw.choice([1, 1, 1, 2]))]
        plan.append(PlannedStop(victims, draw.randint(1, lines), signals))
    return plan


def start_and_stop(run: Run, planned: PlannedStop) -> str | None:
    """Starts the run and stops it; describes how it ended, None if it had ended before."""
    launcher = run.launcher
    launcher.start({})
    while launcher.text().count("\n") < planned.lines and not launcher.has_ended():
        time.sleep(0.002)
    for number, seconds in planned.signals:
        time.sleep(seconds)
        running = launcher.running()
        for rank in set(planned.victims) & set(running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[rank], number)
    saved = run.saved()
    codes = launcher.wait()
    ended = {-signal.SIGTERM, -signal.SIGUSR1} if run.has_summary() else set()  # a run that is done catches no signals
    assert set(codes) <= EXIT_CODES | ended, f"exit codes {codes} after {planned}"
    check_end(run, planned, codes, saved)
    names = ", ".join(f"{number.name} {seconds:.2f} s later" for number, seconds in planned.signals)
    return f"{planned.lines} lines, {names} to {planned.victims}: exit codes {codes}" if any(codes) else None


def random_run(seed: int, folder: Path) -> list[str]:
    """Trains with a random config, with and without stops; returns the stops. AssertionError unless both are equal."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2])
    drawn = [f"--set={key}={json.dumps(value)}" for key, value in draw_config(draw, ranks).items()]
    print(f"seed {seed}: {ranks} ranks", *drawn, flush=True)
    flags = [*FIXED, *write_data(folder), *drawn]
    runs = []
    for name in ("whole", "parts"):
        launcher = Plain([*flags, f"--set=expdir={folder / name}"], folder / f"{name}.log", ranks)
        runs.append(Run(folder / name / "test" / f"{ranks}ranks" / "00", launcher, 0))
    whole, parts = runs
    train_with_stops(whole, [], start_and_stop)
    plan = draw_plan(draw, ranks, whole.launcher.text().count("\n"))
    stops = train_with_stops(parts, plan, start_and_stop)
    print(*(f"  {stop}" for stop in stops), sep="\n", flush=True)
    assert_same_run(whole.directory, parts.directory, max(whole.saved()))
    return stops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; drawn if absent")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about each restart
    stops = 0
    for seed in range(first, first + options.runs):
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
        stops += len(random_run(seed, folder))
        shutil.rmtree(folder)  # kept after an error
    print(f"{options.runs} random runs, {stops} stops: each ended with the bits of an uninterrupted run")


if __name__ == "__main__":
    main()
