"""Errors that are the user's to mend: one clear line, exit code 2."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

EXIT_USER_ERROR = 2
EXIT_AGAIN = 75  # BSD's EX_TEMPFAIL: the state is saved, and the same command goes on from there
EXIT_HANG = 76  # a rank made no progress
EXIT_INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
GRACE_SECONDS = 10.0


class UserError(ValueError):
    """Bad input; the message says what is wrong and what to do about it, in one line."""


class LocalError(UserError):
    """A UserError that the other ranks may not have met: whichever rank meets it prints it."""


class Stopped(Exception):
    """A signal asked the training to stop, all ranks have agreed, and what there is to save is saved."""


def launched_rank() -> int:
    """This process's rank as the launcher tells it, before any process group exists."""
    in_slurm_step = "SLURM_STEP_ID" in os.environ
    for name in ("RANK", "SLURM_PROCID") if in_slurm_step else ("RANK",):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a UserError into one line on stderr, from rank 0 for all, and exit code 2; Stopped into exit code 75.

    A UserError comes to every rank: each reads the same command line, and what depends on the machine is agreed upon
    before it is raised (`World.agreed`).
    """
    try:
        yield
    except UserError as error:
        if launched_rank() == 0 or isinstance(error, LocalError):
            line = " ".join(str(error).split())
            sys.stderr.write(f"error: {line}\n")
            sys.stderr.flush()
        else:
            # A launcher that sees one rank end stops the others: rank 0 must have had the time to print.
            time.sleep(GRACE_SECONDS)
        raise SystemExit(EXIT_USER_ERROR) from None
    except Stopped:
        raise SystemExit(EXIT_AGAIN) from None
    except KeyboardInterrupt:
        if launched_rank() == 0:
            sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def value_errors_for_users() -> Iterator[None]:
    """For parts that know no UserError (the networks): their ValueErrors are the user's to mend all the same."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
