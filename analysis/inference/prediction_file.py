"""The HDF5 file that predict.py writes, block by block; an interrupted prediction resumes in it."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.inference.layouts import Layout
from analysis.inference.sliding_window import SlidingWindowPredictor
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, differences
from analysis.inference.window_grid import Box, window_count
from utils.config import to_yaml
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import Stopped
from utils.files import sample_digest
from utils.progress import Progress, format_duration
from utils.run.checkpoint import file_digest
from utils.run.provenance import provenance
from utils.volumes.hdf5 import FieldReader
from utils.volumes.values import check_sample
from utils.volumes.writer import BlockWriter, ResumableHDF5File

CALIBRATION = "density_filter", "density_factor"  # keys of a record
# Attributes of the input that also hold for the predicted gas.
BOX_ATTRIBUTES = ("grid", "box_size_mpc_h", "redshift", "seed", "paired", "cosmology")

BLOCK_WINDOWS = 12  # per side of a block, by default: 13 % more windows, if they overlap by half
POLL_SECONDS = 0.5  # between looks at what other ranks have done

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PredictionOptions(InferenceOptions):
    """The command line of predict.py; the flags have the same names."""

    checkpoint: Sequence[str]
    input: str
    output: str
    format: str = "volume"
    physical: bool = False
    uncertainty: str | None = None  # the volume of the calibration; "": that of the training run's validation
    block: int | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class PredictionFile:
    """The output of a prediction and the inputs it is made from. Rank 0 creates it, every rank writes its blocks."""

    options: PredictionOptions
    source: FieldReader
    weights: Sequence[Path]
    networks: Sequence[TrainedNetwork]  # the prediction is their mean
    layout: Layout

    def write(self, predictor: SlidingWindowPredictor, world: World, signals: Signals) -> None:
        """Predicts and writes the blocks that the file lacks; raises Stopped after a signal. Every rank calls it."""
        started, record, target = time.monotonic(), provenance(world), Path(self.options.output)
        with ExitStack() as opened:
            file, per_node = None, 1 + max(world.gather_json(world.local_rank))
            with world.raise_together():
                if world.is_root:
                    source, physical = self.source, self.networks[0].config.allow_physical_values
                    check_sample(source.path, source.name, source.values, physical)
                    file = opened.enter_context(closing(self._open(predictor, record, per_node)))
            with world.raise_together():
                writer = opened.enter_context(closing(BlockWriter(target, [*self.layout.datasets])))
                writer.stops = False
                boxes, missing = writer.blocks, writer.missing
            world.barrier()  # no rank requests a stop before all have withdrawn the last one
            if len(missing) < len(boxes):
                log.info("Resuming: %d of %d blocks are predicted", len(boxes) - len(missing), len(boxes))
            try:
                with world.raise_together():
                    self._write_blocks(predictor, writer, {number: boxes[number] for number in missing}, signals)
            except KeyboardInterrupt:
                kept, smaller = len(boxes) - len(writer.missing), " (--block makes them smaller)"
                done = f"{kept} of {len(boxes)} blocks are kept in a hidden file{'' if kept else smaller}"
                raise KeyboardInterrupt(f"{done}; run the same command again to resume") from None
            left = len(writer.missing)  # before a rank finishes the file, and removes the record
            received = [name for name in world.gather_json(signals.received) if name is not None]
            if left:
                done = f"{len(boxes) - left} of {len(boxes)} blocks"
                log.info("Stopping after %s: %s; run the same command again to resume", done, received[0])
                raise Stopped
            with world.raise_together():
                if file is not None:
                    file.finish()
        cells, took = " × ".join(map(str, predictor.grid.shape)), format_duration(time.monotonic() - started)
        log.info("wrote %s: %s cells, %s, in %s", target, cells, predictor.grid.describe(), took)

    def _open(self, predictor: SlidingWindowPredictor, record: Mapping[str, Any], per_node: int) -> ResumableHDF5File:
        grid, options, layout = predictor.grid, self.options, self.layout
        origins = [axis.origins for axis in grid]
        box, source, values = self.source.attributes, Path(self.source.path).resolve(), Path(self.source.file).resolve()
        sha256, status = [*map(file_digest, self.weights)], values.stat()
        records = [network.record for network in self.networks]
        uses = filter(None, (network.use_of(self.source) for network in self.networks))
        stated = [key for key in records[0] if all(key in record for record in records)]
        attributes = {
            "made_by": "predict.py: a network's prediction",
            **{key: box[key] for key in box if key.startswith(BOX_ATTRIBUTES)},
            "checkpoint": _list_if_several([*map(str, self.weights)]),
            "checkpoint_sha256": _list_if_several(sha256),
            "input": str(source),
            "input_digest": sample_digest(values),
            "input_use": next(uses, ""),
            "input_differences": differences(self.networks, self.source),
            "window": grid.x.window,
            "window_origins": json.dumps(origins),
            "precision": options.precision,
            "symmetries": options.symmetries,
            "periodic": self.source.periodic,
            **{f"checkpoint_{key}": _list_if_several([record[key] for record in records]) for key in stated},
            "config": to_yaml(self.networks[0].config, "trained"),
            "provenance": json.dumps(record),
        }
        file_attributes = {**layout.attributes, "": {**attributes, **layout.attributes.get("", {})}}
        # An unfinished file with other values is not resumed.
        identity = {
            "weights": _list_if_several(sha256),
            "input": str(values),
            "input's size and time": [status.st_size, status.st_mtime_ns],
            "windows": [grid.x.window, *origins, self.source.periodic],
            "precision": options.precision,
            "symmetries": options.symmetries,
            "calibration": _list_if_several([[record.get(key) for key in CALIBRATION] for record in records]),
            **layout.identity,
        }
        path, side = Path(options.output), options.block or BLOCK_WINDOWS * grid.x.window
        blocks = grid.split_blocks(side, predictor.world.size, predictor.most_cells(per_node))
        file = ResumableHDF5File(path, layout.datasets, file_attributes, identity, blocks, options.overwrite)
        if file.changed:
            changed = ", ".join(file.changed)
            log.info("The unfinished %s was started with other %s: starting from scratch", path, changed)
        return file

    def _write_blocks(
        self, predictor: SlidingWindowPredictor, writer: BlockWriter, boxes: Mapping[int, Box], signals: Signals
    ) -> None:
        """Predicts this rank's share of the blocks, then waits for the other ranks; ends early after a signal."""
        counts = {number: window_count(predictor.grid.parts(box)) for number, box in boxes.items()}
        total, mine = sum(counts.values()), [*boxes][predictor.world.rank :: predictor.world.size]
        checked = time.monotonic()

        def show(windows: int, text: str) -> None:
            nonlocal checked
            progress.advance(windows, text)
            if signals.received is None and time.monotonic() < checked + POLL_SECONDS:
                return
            checked, left = time.monotonic(), {*writer.missing}
            progress.advance(sum(counts.pop(number) for number in [*counts] if number not in left | {*mine}))
            writer.stops = writer.stops or signals.received is not None
            if writer.stops:
                raise Stopped  # a rank has received a signal or failed

        pulse = predictor.world.pulse
        pulse.enter("prediction")
        with Progress(f"predicting {self.options.output}", total, "windows") as progress, pulse.using(show=show):
            try:
                for number in mine:
                    writer.write(number, boxes[number], self.layout.values(predictor.predict_box(boxes[number])))
                # Not in a collective, which has a time limit.
                while writer.missing and not writer.stops:
                    time.sleep(POLL_SECONDS / 10)
            except Stopped:
                return
            except BaseException:
                writer.stops = True
                raise


def _list_if_several(values: list[Any]) -> Any:
    several = json.dumps(values) if isinstance(values[0], list) else values  # lists may have different lengths
    return several if len(values) > 1 else values[0]
