"""The end of a run: losses of simple predictors to compare with, pictures and report."""

from __future__ import annotations

import logging
from pathlib import Path

from utils.config import Config
from utils.data import Loaders
from utils.data.channels import common_channels, volume_channels
from utils.evaluation import baselines
from utils.steps.eager import EagerStep
from utils.training.run import Run
from utils.training.state import FitResult

log = logging.getLogger(__name__)


def compare_and_draw(
    config: Config, step: EagerStep, loaders: Loaders, run: Run, result: FitResult
) -> tuple[dict[str, float], list[str]]:
    """The losses of the baselines by name, and a line for each picture and report; every rank calls it."""
    losses: dict[str, float] = {}
    if config.report_baselines and config.is_classification:
        losses = baselines.class_frequency_loss(loaders.valid, run.world)
    elif config.report_baselines:
        copied = common_channels(*volume_channels(config))
        losses = baselines.volume_losses(loaders.valid, step.loss, run.world, copied)
    pictures: list[str] = []
    with run.world.raise_together():
        if run.world.is_root and config.report_pictures:
            pictures = _draw(config, step, loaders, run, result)
    return losses, pictures


def _draw(config: Config, step: EagerStep, loaders: Loaders, run: Run, result: FitResult) -> list[str]:
    """Draws the pictures and the report. An error is logged as a warning: the training itself is complete."""
    directory, pictures, reports = run.directory, list[Path](), list[Path]()
    try:
        from utils.evaluation import report, training_figures  # matplotlib takes time to import

        pictures.append(training_figures.write_loss_curves(directory, config.loss))
        if not config.is_classification:
            figure = training_figures.write_slices(step, loaders.valid, config, directory, run.logger, result.steps)
            pictures.append(figure)
        reports = report.write_run_report(directory)
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        log.warning("Cannot draw pictures in %s: %s", directory, reason)
    return [*(f"picture: {path}" for path in pictures), *(f"report: {path}" for path in reports)]
