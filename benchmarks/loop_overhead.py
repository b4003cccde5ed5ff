"""What the training loop costs beside a bare forward, backward and update on the same batch.

python -m benchmarks.loop_overhead
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator

import torch

from benchmarks.common import Parser, interleaved, save, settings, summary, this_machine
from networks import build_loss, build_network, initialise
from utils.cli import positive
from utils.config import OptimizerConfig
from utils.data import Loaders
from utils.data.loaders.prefetcher import Batch
from utils.errors import one_line_errors, value_errors_for_users
from utils.optim.optimizers import build_optimizer
from utils.optim.schedules import ConstantSchedule
from utils.profiling.profiler import NullProfiler
from utils.runs.logger import NullLogger
from utils.steps.eager import EagerStep
from utils.training.checkpoint import NullCheckpointer, TrainState
from utils.training.trainer import Trainer

RATE = 1e-4


class OneBatch:
    """A loader that costs nothing."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self._count):
            yield self._batch

    def close(self) -> None:
        pass


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--width", type=positive, default=16)
    parser.add_argument("--scales", type=positive, default=4)
    parser.add_argument("--crop", type=positive, default=32)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--trials", type=positive, default=60, help="pairs; many short ones outlast a restless machine")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads; several measure the scheduler, too")
    with one_line_errors(), value_errors_for_users():
        measure(parser.parse_args())


def measure(options: argparse.Namespace) -> None:
    """Pairs of the bare loop and the trainer's, and what lies between them."""
    torch.set_num_threads(options.threads)
    world = this_machine()
    shape = (options.batch, 4, *(options.crop,) * 3)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(shape, generator=generator).to(world.device)
    targets = torch.rand((options.batch, 5, *shape[2:]), generator=generator).to(world.device)

    def network() -> torch.nn.Module:
        built = build_network("unet", options.crop, width=options.width, scales=options.scales)
        initialise(built, torch.Generator().manual_seed(0))
        return built.to(world.device)

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    bare = network()
    bare_optimizer = build_optimizer(OptimizerConfig(), bare.named_parameters(), RATE)
    loss = build_loss("l1")

    def bare_loop() -> float:
        wait()
        started = time.perf_counter()
        for _ in range(options.steps):
            bare_optimizer.zero_grad(set_to_none=True)
            loss(bare(inputs), targets).backward()
            bare_optimizer.step()
        wait()
        return (time.perf_counter() - started) / options.steps

    trained = network()
    step = EagerStep(
        trained, build_loss("l1"), build_optimizer(OptimizerConfig(), trained.named_parameters(), RATE), world
    )
    batch = Batch(inputs, targets)
    trainer = Trainer(
        step=step,
        loaders=Loaders(OneBatch(batch, options.steps), OneBatch(batch, 1)),
        schedule=ConstantSchedule(RATE, warmup_steps=0),
        world=world,
        logs=NullLogger(),
        saving=NullCheckpointer(),
        profiler=NullProfiler(),
        num_epochs=1,
        global_batch_size=options.batch,
        log_interval=50,
    )

    def trainer_loop() -> float:
        trainer.at = TrainState()
        wait()
        started = time.perf_counter()
        trainer._train_epoch()
        wait()
        return (time.perf_counter() - started) / options.steps

    values = interleaved({"bare": bare_loop, "trainer": trainer_loop}, options.trials)
    # Pairs of neighbouring trials: what slows the machine slows both.
    overheads = [own / plain - 1 for plain, own in zip(values["bare"], values["trainer"], strict=True)]
    halves = statistics.quantiles(overheads, n=4)
    result = {
        "settings": settings(options),
        "seconds a step": {name: summary(trials) for name, trials in values.items()},
        "overhead": {**summary(overheads), "quartiles": [halves[0], halves[2]]},
    }
    print(
        f"overhead of the loop: median {100 * statistics.median(overheads):.2f} % of n = {options.trials} pairs, "
        f"quartiles {100 * halves[0]:.2f} and {100 * halves[2]:.2f} %"
    )
    print(f"written: {save('loop_overhead', result, options.output)}")


if __name__ == "__main__":
    main()
