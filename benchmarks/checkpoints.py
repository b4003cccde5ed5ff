"""Cost of a checkpoint during training: the pause for the copy, and the slowdown while it is written.

python -m benchmarks.checkpoints

A trial is a pair of stretches of --steps steps, one of them with a save at its start.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import Parser, publish, settings, summary, synchronize, this_machine
from benchmarks.loop_overhead import LEARNING_RATE, unet_config
from utils.config import Config
from utils.data import get_loader
from utils.errors import one_line_errors, value_errors_for_users
from utils.steps import build
from utils.training.checkpoint_writer import BackgroundWriter
from utils.training.state import TrainState


def measure(options: argparse.Namespace, directory: Path) -> tuple[dict[str, list[float]], float]:
    """Seconds of training stretches by kind, in pairs with and without a save; and a checkpoint's size in bytes."""
    world = this_machine()
    config = unet_config(options)
    with get_loader("synthetic").build(config, world) as loaders:
        batch = next(loaders.train.epoch(0))
    step = build.step(config, world, build.model(config))
    step(*batch, LEARNING_RATE)
    writer = BackgroundWriter(directory, config, {})
    state = TrainState()
    seconds: dict[str, list[float]] = {"without": [], "with": [], "pause": [], "until written": []}
    for trial in range(options.trials + 1):
        for kind in ("without", "with") if trial % 2 else ("with", "without"):
            synchronize(world.device)
            started, pause = time.perf_counter(), 0.0
            if kind == "with":
                state.step += 1
                writer.save(step.state(), state, wait=False)
                pause = time.perf_counter() - started
            for _ in range(options.steps):
                step(*batch, LEARNING_RATE)
            synchronize(world.device)
            stretch = time.perf_counter() - started
            writer.close()
            if trial == 0:
                continue  # the first save allocates the memory for its copy
            seconds[kind].append(stretch)
            if kind == "with":
                seconds["pause"].append(pause)
                seconds["until written"].append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in directory.rglob("*.pt")) / len(list(directory.rglob("SHA*")))
    return seconds, size


def report(options: argparse.Namespace, seconds: dict[str, list[float]], size: float) -> None:
    extra = [saving - plain for plain, saving in zip(seconds["without"], seconds["with"], strict=True)]
    cost, interval = statistics.median(extra), 60 * (Config().checkpoint.every_minutes or 0)
    result = {
        "settings": settings(options),
        "bytes": size,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "extra seconds per save": summary(extra),
        "fraction of the default interval": cost / interval,
    }
    text = (
        f"A checkpoint of {size / 1e9:.2f} GB costs {cost:.2f} s of training (median of {len(extra)}, {min(extra):.2f} "
        f"to {max(extra):.2f}), of which {statistics.median(seconds['pause']):.2f} s are a pause: "
        f"{100 * cost / interval:.2f} % with one every {interval / 60:.0f} minutes."
    )
    publish("checkpoints", result, options.output, text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_integers(width=64, scales=6, crop=64, batch=1, steps=4, trials=5)
    parser.add_argument("--folder", help="directory for the checkpoints, on the runs' file system (a temporary one)")
    with one_line_errors(), value_errors_for_users():
        options = parser.parse_args()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds, size = measure(options, Path(folder) / "checkpoints")
        report(options, seconds, size)


if __name__ == "__main__":
    main()
