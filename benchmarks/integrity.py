"""Integrity checks (utils/training/integrity.py): their cost in steps, and the faults of an exchange that they detect.

torchrun --standalone --nproc-per-node=2 -m benchmarks.integrity
"""

from collections.abc import Sequence

import torch

from benchmarks import common
from utils import config as configs
from utils.data.loaders import get_loader, open_volumes
from utils.distributed.world import World, connect
from utils.run.state import TrainState
from utils.steps import build
from utils.training.integrity import FACTOR, Integrity, differences, measure


def exchanges(world: World, count: int, size: int = 0, bit: int = 33) -> torch.Tensor:
    """Differences of exchanges of random gradients, with a flipped bit of a mean value, or if it is 32 a stale line."""
    sums = torch.zeros(count, 4, dtype=torch.float64)
    for number, row in enumerate(sums):
        torch.manual_seed(number + number % 2 * world.rank * 10**9)  # every other gradient is equal on all ranks
        gradient = 0.1 * torch.randn(2, size or 1 + number % 300)
        mean, old = world.sum(gradient * (1 / world.size))
        measure(row[:2], mean, gradient[0])
        mean[: 16 * (bit == 32)] = old[: 16 * (bit == 32)]
        mean.view(torch.int32)[0] ^= torch.tensor(1 << bit).int()
        measure(row[2:], mean, mean)
    return differences(world.gather(sums)).amax(0)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, width=64, scales=6, crop=64, batch=1, steps=3, trials=5, flips=20).parse_args(argv)
    keys = {"network.width": options.width, "network.scales": options.scales, "data_size": options.crop}
    keys |= {"local_batch_size": options.batch, "Nsamples_val": options.batch, "data_loader_config": "synthetic"}
    config = configs.load(common.YAML, "base", {**keys, "integrity.every": 1, "timeouts.hang": 0})
    with connect(config.device, config.timeouts, nccl=True) as world:
        config, state = config.for_world(world.size), TrainState()
        batch = next(get_loader("synthetic").build(open_volumes(config), world).train.epoch(0))
        step = build.step(config, world, build.network_with_loss(config))
        step.warm_up(batch)
        integrity = Integrity(config, step, world)
        integrity.prepare(batch)

        def check() -> None:
            integrity.before_step(1)
            step(batch, 1e-4)
            integrity.after_step(batch, 1)
            integrity.compare(state)

        measures = {
            "step": lambda: common.seconds_of(lambda: step(batch, 1e-4), world.device, options.steps) / options.steps,
            "step and check": lambda: common.seconds_of(check, world.device),
        }
        seconds = common.interleaved(measures, options.trials)
        largest = float(exchanges(world, 5000 * options.flips).max())
        n, sizes = options.flips, (1000, 30_000, 300_000)
        found = [[size, *(int((exchanges(world, n, size, bit) > FACTOR).sum()) for bit in range(33))] for size in sizes]
    steps = common.summary([check / step - 1 for step, check in zip(*seconds.values(), strict=True)])
    result = {
        "ranks": world.size,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "steps per check": steps,
        "largest difference": largest,
        "values, detected flips of bits 0 to 31 and stale lines": found,
    }
    text = f"{world.size} ranks: a check takes {common.ranged(steps)} steps. Correct exchanges differ by {largest:.2f} "
    text += f"at most (limit {FACTOR:g}). Of {n} faults are detected, by the number of values and the flipped bit:\n\n"
    text += common.table(["values", *range(32), "stale line"], found)
    if world.is_root:
        common.publish("integrity", options, result, text)


if __name__ == "__main__":
    common.run(main)
