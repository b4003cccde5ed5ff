"""Errors that the user can fix, reported in one line with exit code 2; the other exit codes."""

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from utils.launchers import launched_rank

EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75  # BSD's EX_TEMPFAIL: a checkpoint is saved, and the same command resumes from it
EXIT_HANG = 76  # a rank hangs or is gone
EXIT_CORRUPTION = 77  # a rank has other weights than the others, or computes other numbers
EXIT_INTERRUPTED = 130  # the exit code that shells report after Ctrl-C
GRACE_SECONDS = 10.0
# Errors that only files have; the error of a read or a write names no file.
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and run the command again"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the file system has failed; run the command again when it works"),
    errno.EBUSY: "end the program that uses it",
    errno.EROFS: "choose another directory",
    errno.EACCES: "change its permissions",
    errno.EFBIG: "choose a file system, or a limit (ulimit -f), that allows files of this size",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n), or use fewer files"),
}


def record_exit_code(code: int) -> None:
    """Records the exit code of the first rank that fails for submit_pm.sh, because srun reports the highest code."""
    path = os.environ.get("TRAIN_EXIT_FILE")
    if code and path:
        with contextlib.suppress(OSError):
            os.symlink(str(code), path)  # is created with its target, and only once


class UserError(ValueError):
    """Invalid input. The message says in one line what is wrong and how to fix it."""

    exit_code = EXIT_USER_ERROR


class LocalError(UserError):
    """A UserError that may occur on some ranks only; each rank that raises it prints it."""


class CorruptionError(UserError):
    """The numbers of some ranks are wrong: their memory or device is faulty."""

    exit_code = EXIT_CORRUPTION

    def __init__(self, message: str, checked: int | None = None) -> None:
        """Checkpoints after the step `checked` may be wrong; None: none of them."""
        super().__init__(message)
        self.checked = checked


class Stopped(Exception):
    """A signal requested a stop, all ranks have agreed to it, and the state is saved."""


class _Shown:
    """A standard stream whose terminal or reader may go away: text that cannot be shown is lost, and work continues."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Sends the stream, with what is in its buffer, to no place; otherwise the interpreter's exit would fail."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """The one translation of expected errors, at the top of each program, and of its output.

    A UserError becomes one line on stderr and its exit code, and so does, with code 2, an OSError of a file; Stopped
    becomes exit code 75. All ranks raise the same UserError, because they read the same command line and exchange
    errors of the machine (`World.raise_together`): only rank 0 prints it. Each prints its own LocalError and OSError.
    """
    with contextlib.ExitStack() as streams:
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            shown = _Shown(stream)
            streams.enter_context(redirect(shown))
            streams.callback(shown.flush)
        try:
            yield
        except (UserError, OSError) as error:
            expected = as_local_error(error)
            if not isinstance(expected, UserError):  # a fault of the program or the network; the traceback says where
                raise
            if launched_rank() == 0 or isinstance(expected, LocalError):
                sys.stderr.write(f"error: {' '.join(str(expected).split())}\n")
                sys.stderr.flush()
            else:
                # A launcher stops all ranks when the first one exits: give rank 0 the time to print.
                time.sleep(GRACE_SECONDS)
            raise SystemExit(expected.exit_code) from None
        except Stopped:
            raise SystemExit(EXIT_RESUMABLE) from None
        except KeyboardInterrupt as interrupt:
            if launched_rank() == 0:
                sys.stderr.write("; ".join(["interrupted", *map(str, interrupt.args)]) + "\n")
            raise SystemExit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def value_errors_for_users(
    line: Callable[[Exception], str] = str, kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Converts errors of code that does not know UserError, such as networks and h5py, to UserErrors with this line."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except kinds as error:
        raise UserError(line(error)) from None


def as_local_error(error: BaseException) -> BaseException:
    """A LocalError in place of an OSError that names a file or that only files have; any other error unchanged."""
    if not isinstance(error, OSError) or not (error.filename or error.errno in REMEDIES):
        return error
    reason = ": ".join([*([str(error.filename)] if error.filename else []), os_reason(error)])
    return LocalError("; ".join([reason, *os_remedy(error)]))


def os_reason(error: OSError) -> str:
    """The reason of an OSError in one line; HDF5's own text is a paragraph."""
    return os.strerror(error.errno) if error.errno else " ".join(str(error).split()) or type(error).__name__


def os_remedy(error: BaseException) -> list[str]:
    """The remedy that follows from the number of an OSError, or from HDF5's text; empty for others."""
    if "unable to lock file" in str(error):
        return ["end the program that writes it, or set HDF5_USE_FILE_LOCKING=FALSE if the file system has no locks"]
    return [REMEDIES[error.errno]] if isinstance(error, OSError) and error.errno in REMEDIES else []


@contextlib.contextmanager
def os_errors_for_users(action: str, remedy: str = "", error_type: type[UserError] = UserError) -> Iterator[None]:
    """Turns an OSError into a UserError in one line: `action` ("cannot read x.h5"), the reason, and the remedy."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError):  # h5py raises others for what HDF5 meets while it closes a file
            number = re.search(r"errno = (\d+)", str(error))
            if number is None:
                raise
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        if not remedy or error.errno != errno.EROFS:  # of which the given remedy says more
            remedy = ", or ".join([*os_remedy(error), *([remedy] if remedy else [])])
        raise error_type("; ".join(filter(None, (f"{action}: {os_reason(error)}", remedy)))) from error
