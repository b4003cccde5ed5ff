"""Evaluation of a training run: of the whole validation volume after some epochs, and a report at the end."""

import functools
import logging
import time
from concurrent.futures import Future

from analysis.evaluation import report, tables
from analysis.evaluation.baselines import baseline_losses
from analysis.evaluation.volume import NOT_PERIODIC, evaluate_fields, read_cells
from analysis.inference.sliding_window import SlidingWindowPredictor, with_conditions
from analysis.inference.window_grid import build_window_grid
from analysis.lyman_alpha.forest import KnownFlux
from analysis.slabs import SlabFields, Slabs
from utils.config import Config
from utils.distributed.devices import out_of_memory_for_users
from utils.distributed.world import World
from utils.errors import UserError
from utils.run.open_run import Run
from utils.run.state import FitResult
from utils.steps.build import Parts
from utils.training.trainer import Evaluation
from utils.volumes.attributes import conditions_of
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import Volumes

log = logging.getLogger(__name__)

MEMORY_REMEDY = "use more ranks or fewer evaluation.sightlines, or resume without evaluation "
MEMORY_REMEDY += "(--set evaluation.every_epochs=0)"


class VolumeEvaluation(Evaluation):
    """Evaluates the validation volume every `evaluation.every_epochs` epochs and after the last; saves the results."""

    def __init__(self, config: Config, volume: Volume, parts: Parts, run: Run) -> None:
        assert config.local_batch_size is not None
        grid = build_window_grid(volume.shape, config.data_size, None, volume.periodic)
        channels = config.N_in_channels, config.N_out_channels
        read = functools.partial(read_cells, volume.path, volume.inputs, slice(None))
        conditions = conditions_of(config.network, volume.path, volume.simulation)
        predict = with_conditions(parts.step.predict, conditions, run.world.device)
        self._predictor = SlidingWindowPredictor(predict, read, grid, channels, config.local_batch_size, run.world)
        self._config, self._volume, self._run, self._world = config, volume, run, run.world
        self._known = KnownFlux()
        self.drawn: dict[str, Future[bytes]] = {}  # the pictures of the last evaluation, on rank 0
        self._metadata = {"input": volume.path, "input_use": "validation data of the run", "run": str(run.directory)}
        self._metadata["loss"] = config.loss
        if not volume.periodic:
            self._metadata["note"] = NOT_PERIODIC

    def after_epoch(self, epoch: int, step: int, is_last: bool) -> dict[str, float]:
        """Scalars of the evaluation after an epoch, none if it is not due; every rank calls it."""
        if epoch % self._config.evaluation.every_epochs and not is_last:
            return {}
        started = time.perf_counter()
        windows = self._predictor.grid.describe()
        log.info(f"  Evaluating the validation volume, {windows}")
        metadata = {**self._metadata, "epoch": epoch, "step": step, "windows": windows}
        with out_of_memory_for_users(MEMORY_REMEDY):
            slabs = Slabs(self._volume.shape, self._world)
            predicted = slabs.stored(self._predictor.predict_planes(slabs))
            reads = (functools.partial(read_cells, self._volume.path, field) for field in self._volume.fields)
            inputs, target = map(slabs.reader, reads)
            fields = SlabFields(inputs, predicted, target)
            evaluation = evaluate_fields(self._config, self._volume, fields, slabs, metadata, known=self._known)
        if self._world.is_root:
            self.drawn = report.save_and_draw(evaluation, self._run, step, self._config.report_pictures)
        log.info(f"  Evaluation of the validation volume: {time.perf_counter() - started:.3f} sec")
        for line in tables.lines(evaluation):
            log.info(f"  {line}")
        return evaluation.scalars()


def evaluation_volume(volumes: Volumes, world: World) -> Volume | None:
    """The first validation volume, None if none is evaluated; UserError, before a run begins, if it cannot be."""
    config = volumes.config
    if not config.evaluation.every_epochs:
        return None
    with world.raise_together():
        if not volumes.has_files:
            reason = f"data_loader_config {config.data_loader_config} reads no volumes to predict"
            raise UserError(f"evaluation.every_epochs: {reason}; set it to 0, or choose another loader")
        return volumes.split("valid")[0]


def report_on_run(
    config: Config, parts: Parts, run: Run, result: FitResult, evaluation: Evaluation
) -> tuple[dict[str, float], list[str]]:
    """Losses of the baselines on the validation data, and a line for each picture. Every rank calls it."""
    losses: dict[str, float] = {}
    if config.report_baselines:
        log.info("Computing the losses of the baselines")
        losses = baseline_losses(config, parts.loaders.valid, parts.step.loss, run.world)
    if not (config.report_pictures and run.world.is_root):
        return losses, []
    run.world.pulse.enter("pictures")
    log.info("Drawing pictures in %s", run.directory)
    drawn = evaluation.drawn if isinstance(evaluation, VolumeEvaluation) else {}
    return losses, [*report.draw_run(parts.step, parts.loaders.valid, config, run, result, drawn)]
