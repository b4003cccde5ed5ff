"""Overhead of the training loop: its time per step against a bare forward, backward and update on the same batch.

python -m benchmarks.loop_overhead

A trial is a pair of --steps steps each; many short ones average out drift. Several --threads would also measure the
scheduler.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.common import YAML, Parser, interleaved, publish, seconds_of, settings, summary, this_machine
from utils import config as configs
from utils.config import Config
from utils.data import get_loader
from utils.errors import one_line_errors, value_errors_for_users
from utils.optim.optimizers import build_optimizer
from utils.steps import build
from utils.training.callbacks import Callbacks
from utils.training.state import TrainState
from utils.training.trainer import Trainer

LEARNING_RATE = 1e-4


def unet_config(options: argparse.Namespace) -> Config:
    """A U-Net of the options' size, trained on one batch of random values, --steps steps per epoch."""
    keys = {
        "network.width": options.width,
        "network.scales": options.scales,
        "data_size": options.crop,
        "local_batch_size": options.batch,
        "Nsamples": options.steps * options.batch,
        "Nsamples_val": options.batch,
        "data_loader_config": "synthetic",
        "checkpoint.every_minutes": None,
    }
    return configs.load(YAML, "base", keys).for_world(1)


def measure(options: argparse.Namespace) -> None:
    """Measures pairs of the bare loop and the trainer's loop, and the overhead of each pair."""
    torch.set_num_threads(options.threads)
    world = this_machine()
    config = unet_config(options)
    loaders = get_loader("synthetic").build(config, world)
    batch = next(loaders.train.epoch(0))
    network, loss = build.network(config).to(world.device), build.loss(config)
    optimizer = build_optimizer(config.optimizer, network.named_parameters(), LEARNING_RATE)
    step = build.step(config, world, build.model(config))
    trainer = Trainer(config, step, loaders, world, TrainState(), Callbacks())

    def bare_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(network(batch.inputs), batch.targets).backward()
        optimizer.step()

    def trainer_epoch() -> None:
        trainer.state = TrainState()
        trainer._train_epoch()

    loops = {
        "bare": lambda: seconds_of(bare_step, world.device, options.steps) / options.steps,
        "trainer": lambda: seconds_of(trainer_epoch, world.device) / options.steps,
    }
    values = interleaved(loops, options.trials)
    # Pairs of neighboring trials: whatever slows the machine slows both.
    overheads = [own / plain - 1 for plain, own in zip(values["bare"], values["trainer"], strict=True)]
    first, _, third = statistics.quantiles(overheads, n=4)
    result = {
        "settings": settings(options),
        "seconds per step": {name: summary(trials) for name, trials in values.items()},
        "overhead": {**summary(overheads), "quartiles": [first, third]},
    }
    text = (
        f"Overhead of the loop: median {100 * statistics.median(overheads):.2f} % of n = {options.trials} pairs, "
        f"quartiles {100 * first:.2f} and {100 * third:.2f} %."
    )
    publish("loop_overhead", result, options.output, text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_integers(width=16, scales=4, crop=32, batch=4, steps=20, trials=60, threads=1)
    with one_line_errors(), value_errors_for_users():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
