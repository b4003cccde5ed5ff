"""Locked files: one process at a time writes to a run directory, or to the output of a prediction.

The lock is that of the file system (flock), which ends with the process. Where a file system has no locks, a warning
says so, and the user has to start one process at a time.
"""

from __future__ import annotations

import contextlib
import errno
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


class LockedFile(io.FileIO):
    """A file that this process may hold the lock of until it is closed; reads and writes are not buffered."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; raises UserError if it is a link, whose target is not ours to lock or change."""
        self._path = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise UserError(f"{path} is a symbolic link and cannot be a lock file; remove it") from None
            raise
        super().__init__(descriptor, "r+b")

    def lock(self) -> bool:
        """True if the lock was free, or if there are no locks."""
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except IN_USE:
            return False
        except OSError as error:
            reason = f"The file system of {self._path} has no locks ({os_reason(error)})"
            log.warning("%s: make sure that no other process writes there at the same time", reason)
        return True

    def is_current(self) -> bool:
        """False if its previous owner removed the file before this process acquired the lock."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fileno()), os.stat(self._path))
        return False


def open_locked(path: Path, fault: str, seconds: float = 0.0) -> LockedFile:
    """Opens or creates a file that stays locked until it is closed or the process ends.

    Raises UserError(fault) if another process holds the lock for `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        file = LockedFile(path)
        if not file.lock():
            file.close()
            if time.monotonic() >= deadline:
                raise UserError(fault)
            time.sleep(POLL_SECONDS)
        elif file.is_current():
            return file
        else:
            file.close()


def is_locked(path: Path) -> bool:
    """True if a process seems to hold the lock of `open_locked(path)`; changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, IN_USE)
    finally:
        os.close(descriptor)
    return False
