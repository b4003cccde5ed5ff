"""Loggers of scalars, pictures and results, by name. A new one is a subclass of Logger and a line in LOGGERS."""

from collections.abc import Sequence
from typing import Any

from utils.distributed.world import World
from utils.lookup import lookup
from utils.run.loggers.base import LoggedRun, Logger
from utils.run.loggers.tensorboard import TensorBoardLogger
from utils.run.loggers.wandb import WandbLogger

# Subclasses of Logger, whose constructor gets the LoggedRun.
LOGGERS: dict[str, Any] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def check_loggers(names: Sequence[str], world: World) -> None:
    """Raises UserError if a logger is unknown or cannot be used. Every rank calls it; rank 0 checks."""
    with world.raise_together():
        for name in names if world.is_root else ():
            lookup(LOGGERS, "loggers", name).check()


def build_loggers(names: Sequence[str], run: LoggedRun) -> list[Logger]:
    """The loggers of a run, each once, on rank 0."""
    return [LOGGERS[name](run) for name in dict.fromkeys(names)]
