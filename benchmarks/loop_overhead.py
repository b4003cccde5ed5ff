"""Overhead of the training loop: its time per step against a bare forward, backward and update on the same batch.

python -m benchmarks.loop_overhead
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Generator

import torch
from torch import nn

from benchmarks.common import Parser, interleaved, save, seconds_of, settings, summary, this_machine
from networks import build_loss, build_network, initialise
from utils.cli import positive
from utils.config import CheckpointConfig, OptimizerConfig
from utils.data import Loaders
from utils.data.loaders.prefetcher import Batch
from utils.distributed.world import World
from utils.distributed.signals import NullSignals
from utils.errors import one_line_errors, value_errors_for_users
from utils.optim.optimizers import build_optimizer
from utils.optim.schedules import ConstantSchedule
from utils.steps.eager import EagerStep
from utils.training.callbacks import Callbacks
from utils.training.state import TrainState
from utils.training.trainer import Trainer, TrainerOptions

LEARNING_RATE = 1e-4


class OneBatch:
    """A loader that returns the same batch at no cost."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self._count):
            yield self._batch

    def close(self) -> None:
        pass


def random_batch(options: argparse.Namespace, device: torch.device) -> Batch:
    """A batch of random values on the device, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(options.batch, channels, *(options.crop,) * 3) for channels in (4, 5)]
    return Batch(*(torch.rand(shape, generator=generator).to(device) for shape in shapes))


def unet(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A U-Net of the options' size with its optimizer, the same at each call."""
    network = build_network("unet", options.crop, width=options.width, scales=options.scales)
    initialise(network, torch.Generator().manual_seed(0))
    network.to(device)
    return network, build_optimizer(OptimizerConfig(), network.named_parameters(), LEARNING_RATE)


def unet_step(options: argparse.Namespace, world: World) -> EagerStep:
    """A training step of `unet`."""
    network, optimizer = unet(options, world.device)
    return EagerStep(network, build_loss("l1"), optimizer, world)


def build_trainer(options: argparse.Namespace, world: World, batch: Batch) -> Trainer:
    """A trainer whose epoch is --steps steps on one batch, and which writes nothing."""
    return Trainer(
        step=unet_step(options, world),
        loaders=Loaders(OneBatch(batch, options.steps), OneBatch(batch, 1)),
        schedule=ConstantSchedule(LEARNING_RATE, warmup_steps=0),
        world=world,
        options=TrainerOptions(
            num_epochs=1,
            global_batch_size=options.batch,
            log_interval=50,
            checkpoint=CheckpointConfig(every_minutes=None),
        ),
        signals=NullSignals(),
        callbacks=Callbacks(),
        state=TrainState(),
    )


def measure(options: argparse.Namespace) -> None:
    """Measures pairs of the bare loop and the trainer's loop, and the overhead of each pair."""
    torch.set_num_threads(options.threads)
    world = this_machine()
    batch = random_batch(options, world.device)
    network, optimizer = unet(options, world.device)
    loss = build_loss("l1")

    def bare_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(network(batch.inputs), batch.targets).backward()
        optimizer.step()

    trainer = build_trainer(options, world, batch)

    def trainer_epoch() -> None:
        trainer.state = TrainState()
        trainer._train_epoch()

    loops = {
        "bare": lambda: seconds_of(bare_step, world.device, options.steps) / options.steps,
        "trainer": lambda: seconds_of(trainer_epoch, world.device) / options.steps,
    }
    values = interleaved(loops, options.trials)
    # Pairs of neighbouring trials: whatever slows the machine slows both.
    overheads = [own / plain - 1 for plain, own in zip(values["bare"], values["trainer"], strict=True)]
    first, _, third = statistics.quantiles(overheads, n=4)
    result = {
        "settings": settings(options),
        "seconds per step": {name: summary(trials) for name, trials in values.items()},
        "overhead": {**summary(overheads), "quartiles": [first, third]},
    }
    print(
        f"overhead of the loop: median {100 * statistics.median(overheads):.2f} % of n = {options.trials} pairs, "
        f"quartiles {100 * first:.2f} and {100 * third:.2f} %"
    )
    print(f"written: {save('loop_overhead', result, options.output)}")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_integers(width=16, scales=4, crop=32, batch=4, steps=20)
    parser.add_argument("--trials", type=positive, default=60, help="pairs; many short ones average out drift")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads; several also measure the scheduler")
    with one_line_errors(), value_errors_for_users():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
