"""Log lines on stderr and in out.log, scalars in metrics.jsonl; further loggers are in utils/training/loggers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from utils.config import Config
from utils.files import atomic_write
from utils.training import tags

METRICS = "metrics.jsonl"
LARGEST, LARGEST_STEP = 1e300, 2**53  # in metrics.jsonl; other numbers cannot be drawn

log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """The point at which a training run resumes."""

    step: int
    in_epoch: bool = False  # the validation at the end of this step's epoch has yet to come, or is repeated
    complete: bool = False  # no epoch is left to train


FROM_SCRATCH = Resumed(-1)


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger records, its config and provenance, and where it resumes."""

    directory: Path
    resumed: Resumed = FROM_SCRATCH
    config: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, record: Mapping[str, float]) -> bool:
        """False for records after the resumption, and for those of the end of an epoch that ends again."""
        step, in_epoch, _ = self.resumed
        return record.get("step", math.inf) < step + (0 if in_epoch and tags.ends_epoch(record) else 1)

    def kept_records(self) -> list[dict[str, Any]]:
        """The records of earlier processes up to the resumption; the caller may already have written later ones."""
        return [record for record in read_records(self.directory / METRICS) if self.keeps(record)]


class Logger:
    """Records a run's scalars, figures and results. The methods do nothing unless a subclass overrides them.

    A fault is raised as an OSError with a one-line reason.
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Records finite values."""

    def figure(self, name: str, figure: Any, step: int) -> None:
        """Records a matplotlib figure."""

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        """Records config and final results.

        With `step` one after the last, a run that is resumed replaces them instead of adding to them.
        """

    def flush(self) -> None:
        """Ensures that a kill loses nothing recorded so far."""

    def close(self, error: BaseException | None = None) -> None:
        """Closes all files; `error` is the exception that ends the run."""


class RunLogger(Logger):
    """metrics.jsonl in the run directory, and the loggers of the config; a fault of one of them is a warning.

    metrics.jsonl continues where the run resumes, and later records are dropped; a run from scratch replaces the file.
    It is opened with the first scalars, so that a run that fails before it trains does not touch it.
    """

    def __init__(self, run: LoggedRun, loggers: Sequence[Logger] = ()) -> None:
        self._run, self._loggers = run, loggers
        self._started = time.time()
        self._warned: set[str] = set()

    @cached_property
    def _metrics(self) -> IO[str]:
        path = self._run.directory / METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        kept = [line for line in lines if line.endswith("\n") and self._run.keeps(_record(line))]
        with atomic_write([path]) as (partial,):
            partial.write_text("".join(kept), encoding="utf-8")
        return open(path, "a", buffering=1, encoding="utf-8")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **finite}
        with self._warning_of_faults():
            self._metrics.write(json.dumps(record) + "\n")
        self._all(lambda logger: logger.scalars(finite, step))

    def figure(self, name: str, figure: Any, step: int) -> None:
        self._all(lambda logger: logger.figure(name, figure, step))

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        self._all(lambda logger: logger.hparams(config, results, step))

    def flush(self) -> None:
        self._all(lambda logger: logger.flush())

    def close(self, error: BaseException | None = None) -> None:
        self._all(lambda logger: logger.close(error))
        if "_metrics" in vars(self):  # a cached property that was never used has opened nothing
            with self._warning_of_faults():
                self._metrics.close()

    def _all(self, call: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            with self._warning_of_faults():
                call(logger)

    @contextlib.contextmanager
    def _warning_of_faults(self) -> Iterator[None]:
        """Warns once if records cannot be written; a run does not end because of its curves."""
        try:
            yield
        except OSError as error:
            line = f"Cannot record scalars in {self._run.directory}: {error.strerror or error}; the run continues"
            if line not in self._warned:
                log.warning(line)
            self._warned.add(line)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a metrics.jsonl, each with a step and numbers; a full disk may have truncated some."""
    if not path.exists():
        return []
    return [
        record for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if (record := _record(line))
    ]


def _record(line: str) -> dict[str, Any]:
    """The numbers in a line; empty if it is damaged, for example truncated by a kill."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    step = values.get("step") if isinstance(values, dict) else None
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        return {}
    # The comparison excludes NaN and infinity, and integers that no float can represent.
    return {name: value for name, value in values.items() if type(value) in (int, float) and abs(value) < LARGEST}
