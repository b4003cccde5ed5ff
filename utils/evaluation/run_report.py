"""The end of a training run: losses of baselines, pictures of its losses and of one crop, report of its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from utils.config import Config
from utils.data import Loader
from utils.distributed.world import World
from utils.evaluation.baselines import baseline_losses
from utils.runs.logger import Logger
from utils.steps import Step


class RunReport(NamedTuple):
    """What the result table of a run shows in addition to its result."""

    losses: dict[str, float]  # of predictors that learn nothing, by name
    lines: list[str]  # the files that were written


def report_on_run(
    config: Config, step: Step, loader: Loader, directory: Path, logger: Logger, world: World, steps: int
) -> RunReport:
    """Measures the baselines on `loader`, the validation's, and draws the pictures. Every rank calls it.

    `steps` is the number of steps that the run has made.
    """
    losses = baseline_losses(config, loader, step.loss, world) if config.report_baselines else {}
    lines = _draw(config, step, loader, directory, logger, steps) if config.report_pictures and world.is_root else []
    return RunReport(losses, lines)


def _draw(config: Config, step: Step, loader: Loader, directory: Path, logger: Logger, steps: int) -> list[str]:
    """Draws the pictures and the report; an error is logged as a warning, because the training is complete."""
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
        logger.warning(f"Cannot draw pictures in {directory}: {reason}")
    return lines
