"""The evaluation of the validation volume during training, with the flux."""

from __future__ import annotations

import logging

from utils.config import Config
from utils.data.files.hdf5 import Volume
from utils.evaluation.callback import VolumeEvaluation
from utils.lyman_alpha.forest import flux_of_volume
from utils.steps.eager import EagerStep
from utils.training.callbacks import Evaluation
from utils.training.run import Run

log = logging.getLogger(__name__)


def build_evaluation(config: Config, volume: Volume | None, step: EagerStep, run: Run) -> Evaluation:
    """The evaluation after each epoch; `volume` None: none."""
    if volume is None:
        return Evaluation()
    flux = flux_of_volume(volume, config, run.world, log.info)
    return VolumeEvaluation(config, volume, step.predict, run.world, run.directory, run.records, flux)
