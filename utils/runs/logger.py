"""Log lines on stderr and in out.log, scalars in TensorBoard and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from utils import config as configs
from utils.config import Config
from utils.files import GIB, atomic_write, open_regular, parse_json, read_text
from utils.runs import tags

LARGEST, LARGEST_STEP = 1e300, 2**53  # in metrics.jsonl; other numbers cannot be drawn
LINE_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class Resumed(NamedTuple):
    """The point at which a training resumes."""

    step: int
    in_epoch: bool = False  # the validation at the end of this step's epoch has yet to come, or is repeated
    complete: bool = False  # no epoch is left to train


class Logger(Protocol):
    """Records a run; a context manager that closes the records. The methods do nothing unless they are overridden."""

    def info(self, text: str) -> None:
        """Logs one line."""
        return None

    def warning(self, text: str) -> None:
        """Logs one line as a warning."""
        return None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Records the finite values; JSON has no NaN and no infinity."""
        return None

    def figure(self, name: str, figure: Any, step: int) -> None:
        """Records a matplotlib figure."""
        return None

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        """Records config and final results.

        With `step` one after the last, a run that is resumed replaces them instead of adding to them.
        """
        return None

    def flush(self) -> None:
        """Ensures that a kill loses nothing recorded so far."""
        return None

    def close(self) -> None:
        """Closes all files."""
        return None

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NullLogger(Logger):
    """Records nothing: for ranks other than 0."""


class ConsoleLogger(Logger):
    """Logs lines and records nothing else: for a benchmark."""

    def info(self, text: str) -> None:
        logging.getLogger().info(text)

    def warning(self, text: str) -> None:
        logging.getLogger().warning(text)


class RunLogger(ConsoleLogger):
    """out.log, logs/ (TensorBoard) and metrics.jsonl in the run directory.

    TensorBoard and metrics.jsonl continue where the training resumes, and later points are dropped; None replaces those
    of an earlier training. They are opened with the first scalar, so that a run that fails before it trains does not
    touch those of an earlier training.
    """

    def __init__(self, directory: Path, resumed: Resumed | None = None) -> None:
        self._directory, self._resumed = directory, resumed or Resumed(-1)
        self._handler = _LogFile(directory / "out.log")
        self._handler.setFormatter(logging.Formatter(LINE_FORMAT))
        logging.getLogger().addHandler(self._handler)
        self._started = time.time()
        self._failed = False

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._directory / "logs"
        _wait_for_a_later_second(folder)
        step, in_epoch, _ = self._resumed
        # purge_step: points of an earlier process from there on are hidden.
        writer = SummaryWriter(str(folder), purge_step=step if in_epoch else step + 1)
        if in_epoch:
            for record in read_records(self._directory / "metrics.jsonl"):
                if record["step"] == step and self._is_kept(record):
                    for name in record.keys() - {"step", "seconds"}:
                        writer.add_scalar(name, record[name], step)
        return writer

    @cached_property
    def _metrics(self) -> IO[str]:
        path = self._directory / "metrics.jsonl"
        try:
            lines = read_text(path, GIB).splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        kept = [line for line in lines if line.endswith("\n") and self._is_kept(_record(line))]
        with atomic_write([path]) as (partial,):
            partial.write_text("".join(kept), encoding="utf-8")
        return open(path, "a", buffering=1, encoding="utf-8")

    def _is_kept(self, record: Mapping[str, float]) -> bool:
        """False for points after the resumption, and for those of the end of an epoch that ends again."""
        step, in_epoch, _ = self._resumed
        ends_epoch = tags.STEP_LEARNING_RATE not in record
        return record.get("step", math.inf) < step + (0 if in_epoch and ends_epoch else 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **finite}
        with self._ignoring_full_disks():
            self._metrics.write(json.dumps(record) + "\n")
        with self._ignoring_full_disks():  # separately: TensorBoard's writer fails for good after one error
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        with self._ignoring_full_disks():
            if "_writer" in vars(self):
                self._writer.flush()

    @contextlib.contextmanager
    def _ignoring_full_disks(self) -> Iterator[None]:
        """Warns once if points cannot be written; a training does not end because of its curves."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                self.warning(f"Cannot record scalars in {self._directory}: {reason}; training continues")
            self._failed = True

    def figure(self, name: str, figure: Any, step: int) -> None:
        with self._ignoring_full_disks():
            self._writer.add_figure(name, figure, step)

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in configs.flatten(config).items()
        }
        with self._ignoring_full_disks():
            # add_hparams would create a second run next to this one; the summaries belong to this one.
            file_writer = self._writer._get_file_writer()
            for summary in hparams(plain, dict(results)):
                file_writer.add_summary(summary)
            for name, value in results.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        for opened in ("_writer", "_metrics"):
            if opened in vars(self):  # a cached property that was never used has opened nothing
                with self._ignoring_full_disks():
                    getattr(self, opened).close()
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()


def configure_logging(rank: int) -> None:
    """Logs to stderr: everything on rank 0, warnings and errors on the other ranks."""
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, format=LINE_FORMAT, handlers=[_StderrHandler()], force=True)


class _StderrHandler(logging.StreamHandler):
    """Looks up sys.stderr for each line, so that a progress bar can redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _LogFile(logging.FileHandler):
    """A log file on a disk that may be full: a line that cannot be written is lost, without a traceback."""

    def _open(self) -> Any:
        if os.path.lexists(self.baseFilename):
            open_regular(self.baseFilename).close()  # a pipe without a reader would block
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def _wait_for_a_later_second(folder: Path) -> None:
    """TensorBoard reads a run's files in the order of the second in their names; the new file must come last."""
    seconds = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in folder.glob("events.*")]
    last = max((int(found[1]) for found in seconds if found), default=0)
    time.sleep(min(max(0.0, last + 1 - time.time()), 2.0))  # not for a clock far behind that of another node


def read_records(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a metrics.jsonl, each with a step and numbers; a full disk may have truncated some."""
    if not path.exists():
        return []
    return [record for line in read_text(path, GIB).splitlines() if (record := _record(line))]


def _record(line: str) -> dict[str, Any]:
    """The numbers in a line; empty if it is damaged, for example truncated by a kill."""
    try:
        values = parse_json(line)
    except ValueError:
        return {}
    step = values.get("step") if isinstance(values, dict) else None
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        return {}
    # The comparison excludes NaN and infinity, and integers that no float can represent.
    return {name: value for name, value in values.items() if type(value) in (int, float) and abs(value) < LARGEST}
