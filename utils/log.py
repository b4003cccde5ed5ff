"""Log lines: on stderr, and in the log file of a run with all lines that came before it was open."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from utils.errors import Stopped, UserError

FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
ON_TERMINAL = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
EARLY_LINES = 10_000


class _StderrHandler(logging.Handler):
    """Looks up sys.stderr for each line, so that a progress bar can redirect it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (ON_TERMINAL if sys.stderr.isatty() else self).format(record)
            sys.stderr.write(f"{line}\n")  # at once: an interrupt, or another rank's line, may come between two parts
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _LogFile(logging.FileHandler):
    """A log file on a disk that may be full: a line that cannot be written is lost, without a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _OncePerJob(logging.Filter):
    """Passes the lines of rank 0, and the errors of all ranks."""

    is_root = True

    def filter(self, record: logging.LogRecord) -> bool:
        return self.is_root or record.levelno >= logging.ERROR


_once = _OncePerJob()


def once_per_job(name: str) -> logging.Logger:
    """The logger of a module whose lines are equal on all ranks: rank 0 alone logs them, but for errors."""
    log = logging.getLogger(name)
    log.addFilter(_once)
    return log


@functools.cache
def warn_once(line: str) -> None:
    """Logs a warning on rank 0 unless this process has logged it before."""
    once_per_job(__name__).warning(line)


def configure_logging(rank: int) -> None:
    """Logs to stderr: everything on rank 0, the warnings and errors of this rank on the other ranks."""
    handlers: list[logging.Handler] = [_StderrHandler()]
    if rank == 0:
        handlers.append(MemoryHandler(EARLY_LINES, flushLevel=logging.CRITICAL + 1, flushOnClose=False))
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, format=FORMAT, handlers=handlers, force=True)
    _once.is_root = rank == 0


def _one_line(error: BaseException) -> str:
    return ("" if isinstance(error, UserError) else f"{type(error).__name__}: ") + " ".join(str(error).split())


@contextlib.contextmanager
def errors_as_warnings(action: str) -> Iterator[None]:
    """Context in which an error is a warning: a run does not end because of pictures, profiles and records."""
    try:
        yield
    except Exception as error:
        logging.getLogger(__name__).warning("%s: %s", action, getattr(error, "strerror", None) or _one_line(error))


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Context in which lines are also appended to a file, after the lines since `configure_logging`."""
    root, file = logging.getLogger(), _LogFile(path)
    file.setFormatter(logging.Formatter(FORMAT))
    for early in [handler for handler in root.handlers if isinstance(handler, MemoryHandler)]:
        early.setTarget(file)
        early.flush()
        root.removeHandler(early)
    root.addHandler(file)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # the terminal gets the line from the entry script
        if not isinstance(error, Stopped):
            file.handle(logging.LogRecord(root.name, logging.ERROR, "", 0, _one_line(error), None, None))
        raise
    finally:
        root.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()
