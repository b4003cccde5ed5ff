"""Paints gas onto a whole N-body box with a trained network.

python predict.py --checkpoint runs/demo/2GPU/00 --input data/demo_val.h5 --output gas.h5
srun -n 8 python predict.py --checkpoint /logs/bs64_opt/8GPU/00 --input nbody.h5 --output hydro.h5

The same command goes on where an earlier one was interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from networks.norms import ghost_batch
from train import build_model
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data.files.hdf5 import Fields
from utils.data.files.writer import ResumableHDF5Writer, check_target
from utils.distributed import world as distributed
from utils.distributed.signals import StopSignals
from utils.distributed.world import World
from utils.errors import Stopped, UserError, one_line_errors, value_errors_for_users
from utils.inference.channels import Channel, target_channels
from utils.inference.sliding_window import Predict, SlidingWindowPredictor
from utils.inference.window_grid import WindowGrid, build_window_grid
from utils.profiling.memory import out_of_memory_for_users
from utils.progress import Progress, format_duration
from utils.runs import logger as logs
from utils.training.checkpoint import digest, read_weights, weights_file

PRECISIONS = ("float32", "tf32", "bfloat16")
INPUT, OUTPUT, PHYSICAL = "Nbody", "Hydro", "Hydro_physical"
BATCH_SIZES = {"cpu": 4, "cuda": 32}
PROBED_PLANES, LIKELY_VALUE = 8, 30.0  # channels are made so that they lie about between -1 and 1
# What a file may say of its box that holds for gas painted onto it, too.
OF_THE_BOX = ("grid", "box_size_mpc_h", "redshift", "seed", "cosmology")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A network as a training left it, in evaluation mode, with the config that made it."""

    network: nn.Module
    config: Config
    record: dict[str, Any]  # epoch, step and final_loss of the checkpoint


def load_trained(checkpoint: str, device: torch.device) -> Trained:
    """The network of a checkpoint: a weights.pt, its directory, or a run's (its best one); UserError if it is none."""
    content = read_weights(Path(checkpoint))
    if "config" not in content:
        raise UserError(f"{checkpoint} does not say of which network it is; give weights that train.py has written")
    config = configs.validate(content["config"], checkpoint)
    if config.is_classification:
        raise UserError(f"{checkpoint} is of a classifier ({config.network.name}); give one trained on volumes")
    # How a layer computes is of no account here, and neither is how large a rank's batch was.
    bare = {
        "fused_pointwise": False,
        "network": config.network.model_copy(update={"space_to_depth": []}),
        "accumulation_steps": 1,
        "local_batch_size": ghost_batch(config.network.norm) or 1,
    }
    with value_errors_for_users():
        network = build_model(config.model_copy(update=bare))
    try:
        network.load_state_dict(content["network"])
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[1:2]).strip() or str(error)
        raise UserError(f"{checkpoint} does not hold the network that its config names: {reason}") from None
    record = {str(key): content[key] for key in ("epoch", "step", "final_loss") if key in content}
    return Trained(network.to(device).eval(), config, record)


def agree_on_weights(checkpoint: str, world: World) -> Path:
    """The weights file itself, the same on all ranks: a training that is under way moves the link to its best one."""
    with world.raise_together():
        weights = weights_file(Path(checkpoint)).resolve()
    return world.gather_objects(weights)[0]


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """How a box is painted; the flags have these names."""

    tile: int | None = None
    step: int | None = None
    batch_size: int | None = None
    precision: str = "float32"
    device: str = "auto"
    not_periodic: bool = False


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """What the command line says; the flags have these names."""

    checkpoint: str
    input: str
    output: str
    physical: bool = False
    overwrite: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line and paints; bad input ends in one line and exit code 2, a stop signal in exit code 75."""
    with one_line_errors():
        options = parse(argv)
        with StopSignals() as signals, distributed.connect(options.device) as world:
            logs.configure_logging(world.is_root)
            with out_of_memory_for_users("lower --batch_size, or --tile"):
                paint(options, world, signals)


def paint(options: Options, world: World, signals: StopSignals) -> None:
    """Predicts the input's gas and writes it; every rank calls it."""
    with world.raise_together():
        check_target(Path(options.output), options.overwrite)
    weights = agree_on_weights(options.checkpoint, world)
    with world.raise_together():
        trained = load_trained(str(weights), world.device)
        config = trained.config
        nbody = Fields(options.input, INPUT, config.N_in_channels, config.transform)
        if Path(options.output).exists() and Path(options.output).samefile(options.input):
            raise UserError(f"output {options.output} is the input; give another --output")
        channels = target_channels(config.N_out_channels, config.transform)
        if options.physical:
            check_units(channels)
        painter = build_painter(trained, nbody, options, world)
        if world.is_root:
            warn_about_scale(nbody)
    with closing(nbody):
        record = logs.provenance(world)
        volume: ResumableHDF5Writer | None = None
        with world.raise_together():
            if world.is_root:
                volume = open_output(options, weights, trained, nbody, painter.tiling, channels, record)
        try:
            _write_slabs(options, painter, channels, volume, world, signals)
        except UserError:
            if volume is not None and nbody.unfit:  # it is to be mended, and will be another one
                volume.discard()
            raise
        except KeyboardInterrupt:
            log.info("Interrupted: the same command goes on with what has been painted")
            raise
        finally:
            if volume is not None:
                volume.close()


def warn_about_scale(nbody: Fields) -> None:
    """Says so where the first planes cannot be channels as a network is trained on, but physical values."""
    largest = float(np.abs(nbody.planes(0, min(PROBED_PLANES, nbody.shape[0]))).max())
    if largest > LIKELY_VALUE:
        log.warning(
            f"Values of {nbody.path} reach {largest:,.0f}, and those that networks are trained on about 1: make its "
            f"channels as the README's Data says. (What export.py writes takes physical values.)"
        )


def _write_slabs(
    options: Options,
    painter: SlidingWindowPredictor,
    channels: Sequence[Channel],
    volume: ResumableHDF5Writer | None,
    world: World,
    signals: StopSignals,
) -> None:
    """Paints what is missing; `volume` is rank 0's."""
    started, starts = time.monotonic(), painter.starts
    first = starts.index(world.gather_objects(volume.done if volume else 0)[0])
    if first:
        log.info("Going on after plane %d of %d", starts[first], starts[-1])
    if first < len(starts) - 1:
        todo, silent = painter.tiles(first), not world.is_root
        with Progress(f"painting {options.output}", todo, "tiles", silent=silent) as progress:
            for slab in painter.slabs(first, progress.advance):
                with world.raise_together():
                    if volume is not None:
                        volume.write(as_written(slab.predicted, channels, options.physical))
                received = [name for name in world.gather_objects(signals.received) if name is not None]
                done = starts[slab.number + 1]
                if received and done < starts[-1]:
                    log.info(
                        "Stopping after plane %d of %d: %s; the same command goes on", done, starts[-1], received[0]
                    )
                    raise Stopped
    with world.raise_together():
        if volume is not None:
            volume.finish()
    shape = " × ".join(map(str, painter.tiling.shape))
    took = format_duration(time.monotonic() - started)
    log.info(
        "wrote %s: %s cells, %d tiles of %d³, in %s",
        options.output,
        shape,
        painter.tiling.count,
        painter.tiling.x.tile,
        took,
    )


def as_written(predicted: torch.Tensor, channels: Sequence[Channel], physical: bool) -> dict[str, np.ndarray]:
    """A slab's datasets, on the host."""
    values = predicted.cpu().numpy()
    written = {OUTPUT: values}
    if physical:
        written[PHYSICAL] = np.stack(
            [channel.to_physical(part) for channel, part in zip(channels, values, strict=True)]
        )
    return written


def build_painter(trained: Trained, nbody: Fields, manner: InferenceOptions, world: World) -> SlidingWindowPredictor:
    """UserError where the tiles do not suit the network or the box."""
    config = trained.config
    tile, block = manner.tile or config.data_size, 2**config.scales
    if tile % block:
        raise UserError(f"--tile {tile} is not a multiple of {block}, by which the network divides the grid")
    tiling = build_window_grid(nbody.shape, tile, manner.step, periodic=not manner.not_periodic)
    batch_size = manner.batch_size or BATCH_SIZES[world.device.type]
    channels = (config.N_in_channels, config.N_out_channels)
    predict = build_predict(trained.network, manner.precision, world.device)
    return SlidingWindowPredictor(predict, nbody.planes, tiling, channels, batch_size, world)


def build_predict(network: nn.Module, precision: str, device: torch.device) -> Predict:
    """The network's forward pass alone, in that precision."""
    # A search for the fastest algorithm would have batches of other sizes computed otherwise.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"

    @torch.inference_mode()
    def predict(tiles: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            return network(tiles)

    return predict


def check_units(channels: Sequence[Channel]) -> None:
    """UserError where a channel's physical values are not known."""
    unknown = [channel.name for channel in channels if channel.unit is None]
    if unknown:
        raise UserError(
            f"--physical: the checkpoint's config does not say how {', '.join(unknown)} was made of physical values; "
            f"leave --physical out, or train with the transform's keys set"
        )


def open_output(
    options: Options,
    weights: Path,
    trained: Trained,
    nbody: Fields,
    tiling: WindowGrid,
    channels: Sequence[Channel],
    record: Mapping[str, Any],
) -> ResumableHDF5Writer:
    """The file to write, begun or taken up again, with all that says what is in it."""
    source = Path(options.input)
    status = source.stat()
    made_of = {
        "weights": digest(weights),
        "input": str(source.resolve()),
        "input's size and time": [status.st_size, status.st_mtime_ns],
        "tiles": [tiling.x.tile, *(axis.origins for axis in (tiling.x, tiling.y, tiling.z))],
        "precision": options.precision,
        "physical": options.physical,
    }
    how = {
        "made_by": "predict.py: a network's prediction",
        **{key: nbody.attributes[key] for key in nbody.attributes if key.startswith(OF_THE_BOX)},
        **{key: value for key, value in trained.config.transform.model_dump().items() if value is not None},
        "checkpoint": str(weights),
        "checkpoint_sha256": made_of["weights"],
        **{f"checkpoint_{key}": value for key, value in trained.record.items()},
        "config": configs.to_yaml(trained.config, "trained"),
        "input": made_of["input"],
        "tile": tiling.x.tile,
        "tile_origins": json.dumps([axis.origins for axis in (tiling.x, tiling.y, tiling.z)]),
        "periodic": not options.not_periodic,
        "precision": options.precision,
        "provenance": json.dumps(record),
    }
    shape = (len(channels), *tiling.shape)
    names = [channel.name for channel in channels]
    about = {
        "": how,
        OUTPUT: {"channels": names, "transform": [channel.formula() for channel in channels]},
        PHYSICAL: {"channels": names, "units": [channel.unit or "unknown" for channel in channels]},
    }
    datasets = dict.fromkeys([OUTPUT, PHYSICAL] if options.physical else [OUTPUT], shape)
    target = Path(options.output)
    volume = ResumableHDF5Writer(target, datasets, about, made_of, options.overwrite)
    if volume.changed:
        log.info("An unfinished %s was begun with other %s: starting over", target, ", ".join(volume.changed))
    return volume


# --- the command line ------------------------------------------------------------------------------------------------


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """The flags that say how to paint."""
    how = parser.add_argument_group("how the box is painted")
    how.add_argument(
        "--tile", type=cli.positive, help="cells a side of what the network is given at once (its data_size)"
    )
    how.add_argument("--step", type=cli.positive, help="cells from one tile to the next, at most (half a tile)")
    how.add_argument("--batch_size", type=cli.positive, help="tiles at once on each rank (4; on a GPU 32)")
    how.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="of the network's arithmetic (%(default)s)"
    )
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (%(default)s)")
    how.add_argument("--not_periodic", action="store_true", help="the box has faces: do not go on behind them")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Raises UserError for what it cannot read."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="a run's directory (its best one), a checkpoint's, or its weights.pt"
    )
    parser.add_argument("--input", required=True, help=f"HDF5 file with {INPUT} [C, X, Y, Z]")
    parser.add_argument("--output", required=True, help=f"HDF5 file to write, with {OUTPUT} [5, X, Y, Z]")
    parser.add_argument(
        "--physical", action="store_true", help=f"write {PHYSICAL}, too: units of the mean density, km/s, K"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    add_inference_options(parser)
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    distributed.run_script(main)
