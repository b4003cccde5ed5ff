"""Locked files: one process at a time writes to a run directory, or to the output of a prediction.

The lock is that of the file system (flock), which ends with the process. Where a file system has no locks, a warning
says so, and the user has to start one process at a time.
"""

import fcntl
import io
import logging
import os
import time
from pathlib import Path

from utils.errors import UserError, os_reason

POLL_SECONDS = 0.5
IN_USE = (BlockingIOError, PermissionError)  # the latter on SMB

log = logging.getLogger(__name__)


def open_locked(path: Path, fault: str, seconds: float = 0.0) -> io.FileIO:
    """Opens or creates a file that stays locked until it is closed or the process ends; it is not buffered.

    Raises UserError(fault) if another process holds the lock for `seconds`, and OSError if the file is a link, whose
    target is not ours to change.
    """
    deadline = time.monotonic() + seconds
    while True:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
        if _lock(file, path):
            return file
        file.close()
        if time.monotonic() >= deadline:
            raise UserError(fault)
        time.sleep(POLL_SECONDS)


def _lock(file: io.FileIO, path: Path) -> bool:
    """True if the lock was free, or if there are no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except IN_USE:
        return False
    except OSError as error:
        reason = f"The file system of {path} has no locks ({os_reason(error)})"
        log.warning("%s: make sure that no other process writes there at the same time", reason)
    return True


def was_renamed(file: io.FileIO, path: Path) -> bool:
    """True if the file that was opened as `path` has another name now; false if it was removed."""
    opened = os.fstat(file.fileno())
    return opened.st_nlink > 0 and not (path.exists() and os.path.samestat(opened, path.stat()))


def is_locked(path: Path) -> bool:
    """True if a process seems to hold the lock of `open_locked(path)`; changes nothing."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, IN_USE)
    return False
