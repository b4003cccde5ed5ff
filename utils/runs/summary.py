"""The end of a run: result table, hyperparameters, pictures and summary.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from pathlib import Path

from utils.config import Config
from utils.data.channels import common_channels, volume_channels
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.evaluation import baselines, results
from utils.files import atomic_write, read_json, recover
from utils.progress import format_duration
from utils.runs.removal import is_incomplete, remove_run
from utils.training import tags
from utils.training.checkpoint import FOLDER, NO_BEST, repair_best, step_directory
from utils.training.checkpointer import prune
from utils.training.resume import Start
from utils.training.trainer import REMEDY, FitResult, Trainer

SUMMARY = "summary.json"


def is_finished(directory: Path, step: int, world: World) -> bool:
    """True if the training that ended after `step` has written its summary. Rank 0 looks; every rank calls it."""
    return bool(world.gather_json(world.is_root and finished_steps(directory) == step)[0])


def finished_steps(directory: Path) -> int | None:
    """The number of steps of the finished run in a directory; None if it is not finished."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        steps = read_json(directory / SUMMARY)["steps"]
        return steps if isinstance(steps, int) else None
    return None


def has_nothing_to_do(directory: Path, start: Start, world: World) -> bool:
    """True if there is nothing to train, and no summary to write either. Every rank calls it."""
    if start.resumed is None or not start.is_complete:
        return False
    return not start.may_lack_summary or is_finished(directory, start.resumed.step, world)


def log_nothing_to_do(directory: str, start: Start, world: World) -> None:
    """Logs why the command ends, to the terminal alone."""
    if world.is_root:
        log = logging.getLogger()
        if not start.is_elsewhere:  # otherwise the directory is new, and is removed again
            log.info("Run directory: %s", directory)
        log.warning(start.nothing_to_train)
        log.info("DONE ---- rank %d", world.rank)


def begin_run(directory: Path, resume: str | None, start: Start, world: World) -> list[str]:
    """Removes what the training replaces; returns log lines about its start. Every rank calls it, after all checks.

    Replaced are the summary, later evaluations and, with --resume=no, all that an earlier run has written. This comes
    before the records of the new process: a launcher that restarts it in between must not find those of the new with
    the old checkpoints.
    """
    removed = []
    with world.raise_together():
        if world.is_root:
            if start.resumed is None and (resume == "no" or is_incomplete(directory)):
                removed = remove_run(directory)
            with _prepare(directory):
                recover(directory)
                results.remove_after(directory / results.FOLDER, -1 if start.resumed is None else start.resumed.step)
                (directory / SUMMARY).unlink(missing_ok=True)
    missing = ["The summary of this training is missing: writing it now, without training"]
    return [*removed, *start.describe(), *(missing if start.is_complete else [])]


def check_checkpoints(directory: Path, start: Start, world: World, keep_last: int) -> None:
    """Corrects what a kill during a save has left. Every rank calls it, once the log is open."""
    with world.raise_together():
        if world.is_root:
            last_step = 0 if start.resumed is None else start.resumed.step
            with _prepare(directory):
                repair_best(directory / FOLDER, last_step, start.best_step)
                if start.is_complete:  # no save follows
                    prune(directory / FOLDER, keep_last, last_step, start.best_step)


def _prepare(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Converts OSErrors to UserErrors."""
    return os_errors_for_users(f"cannot prepare the run directory {directory}", "remove what should not be there")


def finish_run(trainer: Trainer, result: FitResult, config: Config, directory: Path, start: Start) -> None:
    """Records the result of a training. Every rank calls it. Raises UserError if no update was made.

    summary.json is written last: a run that is started again without it does all of this again.
    """
    if result.skipped_updates == result.steps > 0:
        raise UserError(f"training failed: all {result.steps} updates were skipped, nothing was learned; {REMEDY}")
    logger, world = trainer.logger, trainer.world
    final = {"final loss": result.final_loss, "best loss": result.best_loss, **result.metrics}
    logger.hparams(config, {tags.hparam(name): value for name, value in final.items()}, result.steps + 1)
    losses = {start.initial_network: result.initial_loss}
    if config.report_baselines:
        valid = trainer.loaders.valid
        if config.is_classification:
            losses |= baselines.class_frequency_loss(valid, world)
        else:
            copied = common_channels(*volume_channels(config))
            losses |= baselines.volume_losses(valid, trainer.step.loss, world, copied)
    with world.raise_together():
        if world.is_root:
            pictures = _draw(trainer, result, config, directory) if config.report_pictures else []
            logger.info("\n  ".join(["Result:", *result_table(result, losses, directory), *pictures]))
            trainer.checkpointer.check()
            logger.flush()
            write_summary(directory, result)
    if trainer.state.best_step == 0:
        last = step_directory(directory / FOLDER, result.steps)
        logger.warning(f"This run has no best checkpoint: {NO_BEST}; --checkpoint {last} uses the last one")
    if start.is_complete:
        logger.warning(start.nothing_to_train)


def write_summary(directory: Path, result: FitResult) -> None:
    """Writes summary.json, the last file of a run; raises UserError if that fails."""
    with (
        os_errors_for_users(f"cannot write {directory / SUMMARY}", "the network is saved; the same command writes it"),
        atomic_write([directory / SUMMARY]) as (partial,),
    ):
        partial.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n", encoding="utf-8")


def result_table(result: FitResult, losses: dict[str, float], directory: Path) -> list[str]:
    """The table that ends the log; `losses` are those to compare with, by name."""
    lines = ["validation loss (lower is better)", f"  {'trained network':<30}{result.final_loss:>10.6f}"]
    for name, loss in losses.items():
        ratio = loss / result.final_loss if result.final_loss else math.inf
        lines.append(f"  {name:<30}{loss:>10.6f} {ratio:>9.2f} times the trained network's")
    lines += [f"{f'validation {name}'.replace('_', ' '):<32}{value:>10.4f}" for name, value in result.metrics.items()]
    lines.append(f"{'throughput, last epoch':<32}{result.samples_per_second:>10.1f}   samples/s")
    lines.append(f"{'training and validation':<32}{format_duration(result.seconds):>10}   {result.steps} steps")
    if result.skipped_updates:
        lines.append(f"{'skipped updates':<32}{result.skipped_updates:>10}   see the warnings above")
    if result.noise_scale is not None:
        lines.append(result.noise_scale)
    lines.append(f"run directory  {directory}")
    return lines


def _draw(trainer: Trainer, result: FitResult, config: Config, directory: Path) -> list[str]:
    """Draws the pictures and the report; returns lines for the result table. An error is logged as a warning."""
    logger = trainer.logger
    pictures: list[Path] = []
    reports: list[Path] = []
    try:
        from utils.evaluation import report, training_figures  # matplotlib takes time to import

        pictures.append(training_figures.write_loss_curves(directory, config.loss))
        if not config.is_classification:
            loader, steps = trainer.loaders.valid, result.steps
            pictures.append(training_figures.write_slices(trainer.step, loader, config, directory, logger, steps))
        reports = report.write_run_report(directory)
    except Exception as error:  # the training itself is complete
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.warning(f"Cannot draw pictures in {directory}: {reason}")
    return [*(f"picture: {path}" for path in pictures), *(f"report: {path}" for path in reports)]
