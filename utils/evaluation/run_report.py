"""The end of a training run: losses of baselines, pictures of its losses and of one crop, report of its evaluations."""

from __future__ import annotations

import logging
from pathlib import Path

from utils.config import Config
from utils.data import Loader
from utils.evaluation.baselines import baseline_losses
from utils.steps.eager import EagerStep
from utils.training.loggers.base import Logger
from utils.training.run import Run, RunReport

log = logging.getLogger(__name__)


def report_on_run(config: Config, step: EagerStep, loader: Loader, run: Run, steps: int) -> RunReport:
    """Measures the baselines on the validation `loader`, and draws the pictures. Every rank calls it.

    `steps` is the number of steps that the run has made.
    """
    losses = baseline_losses(config, loader, step.loss, run.world) if config.report_baselines else {}
    draws = config.report_pictures and run.world.is_root
    return RunReport(losses, _draw(config, step, loader, run.directory, run.records, steps) if draws else [])


def _draw(config: Config, step: EagerStep, loader: Loader, directory: Path, logger: Logger, steps: int) -> list[str]:
    """Draws the pictures and the report; an error is logged as a warning, because the run is complete."""
    lines: list[str] = []
    try:
        from utils.evaluation import report, training_figures  # matplotlib takes time to import

        lines.append(f"picture: {training_figures.write_loss_curves(directory, config.loss)}")
        if not config.is_classification:
            path = training_figures.write_slices(step, loader, config, directory, logger, steps)
            lines.append(f"picture: {path}")
        lines += [f"report: {path}" for path in report.write_run_report(directory)]
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        log.warning("Cannot draw pictures in %s: %s", directory, reason)
    return lines
