"""The HDF5 file that predict.py writes, slab by slab; an interrupted prediction resumes in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.data.files.hdf5 import FieldReader
from utils.data.files.values import check_sample
from utils.data.files.writer import ResumableHDF5Writer
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import Stopped
from utils.inference.layouts import Layout
from utils.inference.sliding_window import SlidingWindowPredictor, predicted_slabs
from utils.inference.trained_network import InferenceOptions, TrainedNetwork
from utils.progress import format_duration
from utils.training.checkpoint import digest
from utils.training.provenance import provenance

# Attributes of the input that also hold for the predicted gas.
BOX_ATTRIBUTES = ("grid", "box_size_mpc_h", "redshift", "seed", "cosmology")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PredictionOptions(InferenceOptions):
    """The command line of predict.py; the flags have the same names."""

    checkpoint: str
    input: str
    output: str
    format: str = "volume"
    physical: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class PredictionFile:
    """The output of a prediction and the inputs it is made from. Rank 0 writes; every rank calls `write`."""

    options: PredictionOptions
    source: FieldReader
    weights: Path
    trained: TrainedNetwork
    layout: Layout

    def write(self, predictor: SlidingWindowPredictor, world: World, signals: Signals) -> None:
        """Predicts and writes the planes that the file lacks; raises Stopped after a signal."""
        writer: ResumableHDF5Writer | None = None
        record = provenance(world)
        try:
            with world.raise_together():
                if world.is_root:
                    source, physical = self.source, self.trained.config.allow_physical_values
                    check_sample(source.path, source.name, source.values, physical)
                    writer = self._open(predictor, record)
            self._write_slabs(predictor, writer, world, signals)
        finally:
            if writer is not None:
                writer.close()

    def _open(self, predictor: SlidingWindowPredictor, record: Mapping[str, Any]) -> ResumableHDF5Writer:
        grid, options, layout = predictor.grid, self.options, self.layout
        origins = [axis.origins for axis in (grid.x, grid.y, grid.z)]
        box, source = self.source.attributes, Path(self.source.path).resolve()
        sha256, status = digest(self.weights), source.stat()
        attributes = {
            "made_by": "predict.py: a network's prediction",
            **{key: box[key] for key in box if key.startswith(BOX_ATTRIBUTES)},
            "checkpoint": str(self.weights),
            "checkpoint_sha256": sha256,
            "input": str(source),
            "window": grid.x.window,
            "window_origins": json.dumps(origins),
            "precision": options.precision,
            "periodic": self.source.periodic and not options.not_periodic,
            **self.trained.attributes(),
            "provenance": json.dumps(record),
        }
        file_attributes = {**layout.attributes, "": {**attributes, **layout.attributes.get("", {})}}
        # An unfinished file with other values is not resumed.
        identity = {
            "weights": sha256,
            "input": str(source),
            "input's size and time": [status.st_size, status.st_mtime_ns],
            "windows": [grid.x.window, *origins],
            "precision": options.precision,
            **layout.identity,
        }
        path = Path(options.output)
        writer = ResumableHDF5Writer(path, layout.datasets, file_attributes, identity, options.overwrite)
        if writer.changed:
            changed = ", ".join(writer.changed)
            log.info("The unfinished %s was started with other %s: starting from scratch", path, changed)
        return writer

    def _write_slabs(
        self, predictor: SlidingWindowPredictor, writer: ResumableHDF5Writer | None, world: World, signals: Signals
    ) -> None:
        started, starts = time.monotonic(), predictor.starts
        first = starts.index(world.gather_json(writer.done if writer else 0)[0])
        if first:
            log.info("Resuming after plane %d of %d", starts[first], starts[-1])
        if first < len(starts) - 1:
            for slab in predicted_slabs(predictor, f"predicting {self.options.output}", first):
                with world.raise_together():
                    if writer is not None:
                        writer.write(self.layout.values(slab))
                _stop_if_signaled(starts[slab.number + 1], starts[-1], world, signals)
        with world.raise_together():
            if writer is not None:
                writer.finish()
        grid, took = predictor.grid, format_duration(time.monotonic() - started)
        cells, path = " × ".join(map(str, grid.shape)), self.options.output
        log.info("wrote %s: %s cells, %d windows of %d³, in %s", path, cells, grid.count, grid.x.window, took)


def _stop_if_signaled(done: int, total: int, world: World, signals: Signals) -> None:
    received = [name for name in world.gather_json(signals.received) if name is not None]
    if received and done < total:
        log.info("Stopping after plane %d of %d: %s; run the same command again to resume", done, total, received[0])
        raise Stopped
