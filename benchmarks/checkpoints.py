"""What a checkpoint costs the training: the pause for the copy, and what the write behind it slows down.

python -m benchmarks.checkpoints
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import Parser, save, settings, summary, this_machine
from networks import build_loss, build_network, initialise
from utils.cli import positive
from utils.config import Config, OptimizerConfig
from utils.errors import one_line_errors, value_errors_for_users
from utils.optim.optimizers import build_optimizer
from utils.steps.eager import EagerStep
from utils.training.checkpoint import Checkpointer, TrainState

RATE = 1e-4


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--scales", type=positive, default=6)
    parser.add_argument("--crop", type=positive, default=64)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=4, help="a stretch, with a save at its start or without")
    parser.add_argument("--trials", type=positive, default=5, help="pairs of stretches")
    parser.add_argument("--folder", help="where to write; a directory on the file system of the runs (a temporary one)")
    with one_line_errors(), value_errors_for_users():
        measure(parser.parse_args())


def measure(options: argparse.Namespace) -> None:
    """Pairs of stretches of training, and by how much the one with a save is longer."""
    world = this_machine()
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, 4, *(options.crop,) * 3)
    inputs = torch.rand(shape, generator=generator).to(world.device)
    targets = torch.rand((options.batch, 5, *shape[2:]), generator=generator).to(world.device)
    network = build_network("unet", options.crop, width=options.width, scales=options.scales)
    initialise(network, torch.Generator().manual_seed(0))
    network.to(world.device)
    step = EagerStep(
        network, build_loss("l1"), build_optimizer(OptimizerConfig(), network.named_parameters(), RATE), world
    )
    step(inputs, targets, RATE)

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saving = Checkpointer(Path(folder) / "checkpoints", Config().model_dump(), keep_last=2)
        at = TrainState()
        seconds: dict[str, list[float]] = {"without": [], "with": [], "pause": [], "written after": []}
        for trial in range(options.trials + 1):
            for kind in ("without", "with") if trial % 2 else ("with", "without"):
                wait()
                started = time.perf_counter()
                if kind == "with":
                    at.step += 1
                    saving.save(step.state(), at, is_best=False, last_chance=False)
                    paused = time.perf_counter() - started
                for _ in range(options.steps):
                    step(inputs, targets, RATE)
                wait()
                stretch = time.perf_counter() - started
                saving.close()
                if trial == 0:
                    continue  # the first save finds memory for its copy
                seconds[kind].append(stretch)
                if kind == "with":
                    seconds["pause"].append(paused)
                    seconds["written after"].append(time.perf_counter() - started)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.pt")) / len(list(Path(folder).rglob("SHA*")))
    extra = [own - plain for plain, own in zip(seconds["without"], seconds["with"], strict=True)]
    interval = 60 * (Config().checkpoint.every_minutes or 0)
    result = {
        "settings": settings(options),
        "bytes": size,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "extra seconds a save": summary(extra),
        "part of the default interval": statistics.median(extra) / interval,
    }
    print(
        f"a checkpoint of {size / 1e9:.2f} GB: {statistics.median(extra):.2f} s of training (median of {len(extra)}, "
        f"{min(extra):.2f} to {max(extra):.2f}), {statistics.median(seconds['pause']):.2f} s of them a pause; "
        f"{100 * statistics.median(extra) / interval:.2f} % at one every {interval / 60:.0f} minutes"
    )
    print(f"written: {save('checkpoints', result, options.output)}")


if __name__ == "__main__":
    main()
