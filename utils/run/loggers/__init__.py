"""Loggers by name: where a run records its scalars, figures and results in addition to out.log and metrics.jsonl.

To add one, write a subclass of Logger in a module of its own and add a line to LOGGERS.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from utils.distributed.world import World
from utils.lookup import lookup
from utils.run.loggers.base import LoggedRun, Logger
from utils.run.loggers.tensorboard import TensorBoardLogger
from utils.run.loggers.wandb import WandbLogger, check_wandb


class LoggerSpec(NamedTuple):
    """An entry of LOGGERS.

    build: builds the logger of rank 0; files and connections are opened when something is recorded.
    requires: raises UserError with a remedy if a package or setting that the logger needs is missing.
    """

    build: Callable[[LoggedRun], Logger]
    requires: Callable[[], object] | None = None


LOGGERS = {
    "tensorboard": LoggerSpec(TensorBoardLogger),
    "wandb": LoggerSpec(WandbLogger, requires=check_wandb),
}


def check_loggers(names: Sequence[str], world: World) -> None:
    """Raises UserError if a logger is unknown or cannot be used. Every rank calls it; rank 0 checks."""
    with world.raise_together():
        for name in names if world.is_root else ():
            requires = lookup(LOGGERS, "loggers", name).requires
            if requires is not None:
                requires()


def build_loggers(names: Sequence[str], run: LoggedRun) -> list[Logger]:
    """The loggers of a run, each once."""
    return [LOGGERS[name].build(run) for name in dict.fromkeys(names)]
