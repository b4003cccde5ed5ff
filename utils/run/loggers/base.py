"""The methods of a logger, and the records of a run: metrics.jsonl and the loggers of its config."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

from utils.config import Config
from utils.errors import os_reason
from utils.files import atomic_write
from utils.log import warn_once
from utils.run import tags
from utils.run.directory import RunDirectory


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger records, its config and provenance, and where it resumes."""

    directory: RunDirectory
    resumed: int = -1  # the step after which it resumes; -1: it starts from scratch
    in_epoch: bool = False  # the validation at the end of that step's epoch has yet to come, or is repeated
    config: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def kept_records(self) -> list[dict[str, Any]]:
        """The records of earlier processes up to the resumption, without those of an epoch's end that comes again."""
        records = [record for record in self.directory.read_metrics() if record["step"] <= self.resumed]
        return [x for x in records if x["step"] < self.resumed or not (self.in_epoch and tags.ends_epoch(x))]


class Logger:
    """Records a run's scalars, pictures and results. The methods do nothing unless a subclass overrides them.

    Files and connections are opened when something is recorded. After its first exception a logger is not used again.
    """

    @staticmethod
    def check() -> None:
        """Raises UserError with a remedy if a package or setting that the logger needs is missing."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Records finite values."""

    def picture(self, name: str, png: bytes, step: int) -> None:
        """Records a picture; `png` is the content of a PNG file."""

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        """Records config and results; with `step` one after the last, a resumed run replaces them."""

    def flush(self) -> None:
        """Ensures that a kill loses nothing recorded so far."""

    def close(self, error: BaseException | None = None) -> None:
        """Closes all files; `error` is the exception that ends the run."""


class RunRecords(Logger):
    """metrics.jsonl in the run directory, and the loggers of the config; a fault of one of them is a warning.

    metrics.jsonl continues where the run resumes, and later records are dropped; a run from scratch replaces the file.
    It is opened with the first scalars, so that a run that fails before it trains does not touch it.
    """

    def __init__(self, run: LoggedRun, loggers: Sequence[Logger], clock: Callable[[], float]) -> None:
        """`clock`: the seconds of all processes of the run."""
        self._run, self._loggers, self._clock = run, list(loggers), clock

    @cached_property
    def _metrics(self) -> IO[str]:
        path = self._run.directory.metrics
        kept = "".join(json.dumps(record) + "\n" for record in self._run.kept_records())
        with atomic_write([path]) as (partial,):
            partial.write_text(kept, encoding="utf-8")
        return open(path, "a", buffering=1, encoding="utf-8")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        record = {"step": step, "seconds": round(self._clock(), 3), **finite}
        try:
            self._metrics.write(json.dumps(record) + "\n")
        except OSError as error:  # the next line is tried again
            self._warn(error)
        self._all(lambda logger: logger.scalars(finite, step))

    def picture(self, name: str, png: bytes, step: int) -> None:
        self._all(lambda logger: logger.picture(name, png, step))

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        self._all(lambda logger: logger.hparams(config, results, step))

    def flush(self) -> None:
        self._all(lambda logger: logger.flush())

    def close(self, error: BaseException | None = None) -> None:
        self._all(lambda logger: logger.close(error))
        if "_metrics" in vars(self):  # a cached property that was never used has opened nothing
            with contextlib.suppress(OSError):
                self._metrics.close()

    def _all(self, call: Callable[[Logger], None]) -> None:
        """Calls each logger; drops one that fails, since a run does not end because of its curves."""
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:
                self._loggers.remove(logger)
                self._warn(error)
                with contextlib.suppress(Exception):
                    logger.close(error)

    def _warn(self, error: Exception) -> None:
        reason = os_reason(error) if isinstance(error, OSError) else " ".join(str(error).split()) or repr(error)
        warn_once(f"Cannot record scalars in {self._run.directory}: {reason}; the run continues")
