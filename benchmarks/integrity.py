"""Cost of an integrity check during training, in steps: digests and replays (utils/training/integrity.py).

torchrun --standalone --nproc-per-node=2 -m benchmarks.integrity
"""

import functools
import statistics
from collections.abc import Sequence

from benchmarks import common
from utils import config as configs
from utils.config.sections import IntegrityConfig
from utils.data.loaders import get_loader, open_volumes
from utils.distributed.world import connect
from utils.run.state import TrainState
from utils.steps import build
from utils.training.integrity import Integrity


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, width=64, scales=6, crop=64, batch=1, steps=3, trials=5).parse_args(argv)
    keys = {"network.width": options.width, "network.scales": options.scales, "data_size": options.crop}
    keys |= {"local_batch_size": options.batch, "Nsamples_val": options.batch, "data_loader_config": "synthetic"}
    config = configs.load(common.YAML, "base", keys)
    with connect(config.device, nccl=True) as world:
        config, state = config.for_world(world.size), TrainState()
        config = config.model_copy(update={"integrity": IntegrityConfig(every=1)})
        batch = next(get_loader("synthetic").build(open_volumes(config), world).train.epoch(0))
        step = build.step(config, world, build.network_with_loss(config))
        step.warm_up(batch)
        integrity = Integrity(config, step, world)
        integrity.prepare(batch)

        def check() -> None:
            integrity.after_step(batch, 1)
            integrity.compare(state)

        one_step = functools.partial(step, batch, 1e-4)
        measures = {
            "step": lambda: common.seconds_of(one_step, world.device, options.steps) / options.steps,
            "check": lambda: common.seconds_of(check, world.device),
        }
        seconds = common.interleaved(measures, options.trials)
        if not world.is_root:
            return
    steps = [check / step for step, check in zip(seconds["step"], seconds["check"], strict=True)]
    result = {
        "ranks": world.size,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "steps per check": common.summary(steps),
    }
    share, spread = statistics.median(steps) / 2000, f"n = {len(steps)}, {min(steps):.2f} to {max(steps):.2f}"
    text = f"On {world.size} ranks a check takes {statistics.median(steps):.2f} steps ({spread}): "
    text += f"{100 * share:.2f} % of the time with one every 2,000 steps."
    common.publish("integrity", options, result, text)


if __name__ == "__main__":
    common.run(main)
