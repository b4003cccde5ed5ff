"""Evaluation during training: predicts and evaluates the whole validation volume after some epochs, on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from utils.config import Config
from utils.data.channels import volume_channels
from utils.data.files.hdf5 import Volume, reading
from utils.distributed.world import World
from utils.errors import UserError
from utils.evaluation import results
from utils.evaluation.options import FluxOptions
from utils.evaluation.results import Flux, Results
from utils.evaluation.statistics import VolumeStatistics
from utils.evaluation.volume import NOT_PERIODIC, evaluate_slabs
from utils.inference.sliding_window import Predict, ReadPlanes, SlidingWindowPredictor
from utils.inference.window_grid import WindowGrid, build_window_grid
from utils.lyman_alpha.forest import FluxStatistics
from utils.lyman_alpha.setup import FluxSetup
from utils.profiling.memory import out_of_memory_for_users
from utils.training import tags
from utils.training.callbacks import Evaluation
from utils.training.loggers.base import Logger

log = logging.getLogger(__name__)

MEMORY_REMEDY = (
    "use more ranks, fewer evaluation.sightlines or a smaller evaluation.window, or resume without evaluation "
    "(--set evaluation.every_epochs=0)"
)


class VolumeEvaluation(Evaluation):
    """Evaluates the validation volume every `every_epochs` epochs and after the last; saves the results in `folder`."""

    def __init__(
        self,
        predictor: SlidingWindowPredictor,
        target: ReadPlanes,
        new_statistics: Callable[[], VolumeStatistics],
        flux: FluxSetup | None,
        *,
        every_epochs: int,
        folder: Path,
        logger: Logger,
        metadata: dict[str, Any],
    ) -> None:
        """`target(start, stop)` returns planes [C, stop - start, Y, Z] of the true fields; `flux` None: no flux."""
        self._predictor, self._target, self._new_statistics, self._flux = predictor, target, new_statistics, flux
        self._known: Flux | None = None  # of the last evaluation
        self._every_epochs = every_epochs
        self._folder, self._logger, self._metadata = folder, logger, metadata

    def after_epoch(
        self, epoch: int, step: int, is_last: bool, stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        """Scalars of the evaluation after an epoch, none if it is not due; every rank calls it."""
        if epoch % self._every_epochs and not is_last:
            return {}
        started = time.perf_counter()
        predictor, statistics = self._predictor, self._new_statistics()
        metadata = {**self._metadata, "epoch": epoch, "step": step, "windows": predictor.grid.describe()}
        with out_of_memory_for_users(MEMORY_REMEDY):
            flux = FluxStatistics(self._flux, predictor.world, self._known) if self._flux else None
            found = evaluate_slabs(
                predictor.slabs(), self._target, statistics, metadata, predictor.world, stop_if_requested, flux
            )
        self._known = found.flux
        if predictor.world.is_root:
            from utils.evaluation import figures  # matplotlib takes time to import

            self._save(found, step)
            for name, figure in figures.draw_all(found).items():
                self._logger.figure(tags.evaluation(name), figure, step)
        seconds = time.perf_counter() - started
        log.info(f"  Evaluation of the validation volume, {predictor.grid.count} windows: {seconds:.3f} sec")
        for line in found.lines():
            log.info(f"  {line}")
        return found.scalars()

    def _save(self, found: Results, step: int) -> None:
        """Saves the results; a full disk does not stop the training."""
        try:
            results.save(found, results.path_of_step(self._folder, step))
        except OSError as error:
            log.warning(f"Cannot save the evaluation in {self._folder}: {error.strerror or error}")


def evaluation_grid(config: Config, volume: Volume) -> WindowGrid:
    """The windows of an evaluation; UserError if they do not suit the volume."""
    options = config.evaluation
    try:
        window = options.window or config.data_size
        return build_window_grid(volume.shape, window, options.overlap, periodic=volume.periodic)
    except UserError as error:
        raise UserError(f"evaluation.window, evaluation.overlap: {error}") from None


def build_evaluation(
    config: Config, volume: Volume, predict: Predict, world: World, directory: Path, logger: Logger
) -> VolumeEvaluation:
    """Predictions of the whole validation volume, and their statistics."""
    assert config.local_batch_size is not None
    grid = evaluation_grid(config, volume)
    inputs, targets = volume_channels(config)
    # No more cells at once than in training.
    batch_size = max(1, config.local_batch_size * config.data_size**3 // grid.x.window**3)
    read, target = _plane_readers(volume)
    vectors = config.vector_channels
    options = FluxOptions(**{field.name: getattr(config.evaluation, field.name) for field in fields(FluxOptions)})
    flux = FluxSetup.of(volume, (inputs, targets), (vectors.inputs, vectors.targets), options, log.info)
    return VolumeEvaluation(
        SlidingWindowPredictor(predict, read, grid, (len(inputs), len(targets)), batch_size, world),
        target,
        lambda: VolumeStatistics(targets, inputs, grid.shape, volume.cell, world, vectors.targets),
        flux,
        every_epochs=config.evaluation.every_epochs,
        folder=directory / results.FOLDER,
        logger=logger,
        metadata={"input": volume.path, "run": str(directory)} | ({} if volume.periodic else {"note": NOT_PERIODIC}),
    )


def _plane_readers(volume: Volume) -> tuple[ReadPlanes, ReadPlanes]:
    """Readers of planes along x of a volume's inputs and targets."""

    def reader(field: Any) -> ReadPlanes:
        def planes(start: int, stop: int) -> np.ndarray:
            with reading(volume.path):
                return np.asarray(field[:, start:stop])

        return planes

    return reader(volume.inputs), reader(volume.targets)
