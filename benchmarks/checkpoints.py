"""Cost of a checkpoint during training: the pause for the copy, and the slowdown while it is written.

python -m benchmarks.checkpoints

A trial is a pair of stretches of --steps steps, without and with a save at the start, to the directory for temporary
files (TMPDIR): set it to the file system of the runs.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from utils import config as configs
from utils.data.loaders import get_loader, open_volumes
from utils.run.state import TrainState
from utils.run.writer import BackgroundWriter
from utils.steps import build


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, width=64, scales=6, crop=64, batch=1, steps=12, trials=5).parse_args(argv)
    keys = {"network.width": options.width, "network.scales": options.scales, "data_size": options.crop}
    keys |= {"local_batch_size": options.batch, "Nsamples_val": options.batch, "data_loader_config": "synthetic"}
    config, world, state = configs.load(common.YAML, "base", keys).for_world(1), common.this_machine(), TrainState()
    batch = next(get_loader("synthetic").build(open_volumes(config), world).train.epoch(0))
    step = build.step(config, world, build.network_with_loss(config))
    pauses: list[float] = []

    def stretch(saves: bool) -> float:
        started = time.perf_counter()
        if saves:
            state.step += 1
            writer.save(step.state(), state, wait=False)
            pauses.append(time.perf_counter() - started)
        common.seconds_of(lambda: step(batch, 1e-4), world.device, options.steps)
        seconds = time.perf_counter() - started
        writer.close()
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(Path(folder), config, {})
        kinds = {"without": functools.partial(stretch, False), "with": functools.partial(stretch, True)}
        seconds = common.interleaved(kinds, options.trials)  # the first save allocates the memory for its copy
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.pt")) / len([*Path(folder).rglob("SHA*")])
    seconds["pause"] = pauses[1:]
    extra = [saving - plain for plain, saving in zip(seconds["without"], seconds["with"], strict=True)]
    cost, interval = statistics.median(extra), 60 * (config.checkpoint.every_minutes or 0)
    result = {
        "bytes": size,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "extra seconds per save": common.summary(extra),
        "fraction of the default interval": cost / interval,
    }
    text = f"A checkpoint of {size / 1e9:.2f} GB costs {cost:.2f} s of training (n = {len(extra)}, {min(extra):.2f} to "
    text += f"{max(extra):.2f}), of which {statistics.median(pauses[1:]):.2f} s are a pause: "
    text += f"{100 * cost / interval:.2f} % with one every {interval / 60:.0f} minutes."
    common.publish("checkpoints", options, result, text)


if __name__ == "__main__":
    common.run(main)
