"""Locked files: one process at a time writes to a run directory, or to the output of a prediction.

The lock is that of the file system (flock), which ends with the process. Some network file systems have none: only
there, a second file shows that the owner is alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from utils.errors import UserError, os_reason, record_exit_code

TOUCH_SECONDS, STALE_SECONDS = 5.0, 60.0  # between two signs of life; without one until an owner counts as dead
POLL_SECONDS = 0.5

log = logging.getLogger(__name__)


class LockedFile(io.FileIO):
    """A file that this process may hold the lock of until it is closed; reads and writes are not buffered."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; raises UserError if it is a link, whose target is not ours to lock or change."""
        self._path, self._claim = path, Claim(path.with_name(f"{path.name}.owner"))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise UserError(f"{path} is a symbolic link and cannot be a lock file; remove it") from None
            raise
        super().__init__(descriptor, "r+b")

    def lock(self) -> bool:
        """True if the lock was free."""
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the latter on SMB
            return False
        except OSError as error:
            log.warning(
                "The file system of %s has no locks (%s): using the file %s instead",
                self._path,
                os_reason(error),
                self._claim.path.name,
            )
            return self._claim.acquire()
        # A process whose node has no locks may own the directory all the same.
        return not self._claim.path.exists() or self._claim.acquire()

    def is_current(self) -> bool:
        """False if its last owner has removed it before the lock was taken."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fileno()), os.stat(self._path))
        return False

    def close(self) -> None:
        self._claim.release()
        super().close()


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
    owner = _state(path.with_name(f"{path.name}.owner"))
    if owner is not None and not _is_dead(owner[1]):
        return True  # possibly that of a process that was killed on another machine
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError | PermissionError)
    finally:
        os.close(descriptor)
    return False


class Claim:
    """A lock for file systems without locks: a file that its owner creates exclusively and touches every few seconds.

    A process that finds the file takes it over at once if the owner was on this machine and is dead, or else if the
    file does not change for STALE_SECONDS. It compares no clocks, which machines that share a directory do not share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        place = [socket.gethostname(), _process_namespace(), os.getpid(), _started(os.getpid()), uuid.uuid4().hex]
        self._token = json.dumps(place).encode()
        self._released: threading.Event | None = None  # None: not acquired

    def acquire(self) -> bool:
        """Creates the file or takes it over; False if its owner is alive."""
        if not self._create(self.path):
            return False
        self._released = threading.Event()
        threading.Thread(target=self._touch, args=(self._released,), name="lock owner", daemon=True).start()
        return True

    def release(self) -> None:
        if self._released is not None:
            self._released.set()
            if self._owner() == self._token:
                self.path.unlink(missing_ok=True)
            self._released = None

    def _create(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return self._take_over(path)
        try:
            with open(descriptor, "wb") as file:
                file.write(self._token)
        except OSError:  # a full disk
            path.unlink()
            raise
        return True

    def _take_over(self, path: Path) -> bool:
        """Replaces an abandoned file. Only the owner of the file <path>.next may, so that just one process does."""
        found, successor = _state(path), path.with_name(f"{path.name}.next")
        if found is None:
            return self._create(path)
        if not _is_dead(found[1]):
            log.warning("Waiting for up to %.0f s to see whether the owner of %s is alive", STALE_SECONDS, path)
            for _ in range(round(STALE_SECONDS / POLL_SECONDS)):  # a count: time passes while a process is suspended
                time.sleep(POLL_SECONDS)
                if _state(path) != found:
                    return False
        if not self._create(successor):
            return False
        if _state(path) != found:
            successor.unlink()
            return False
        os.replace(successor, path)
        return True

    def _owner(self) -> bytes | None:
        state = _state(self.path)
        return None if state is None else state[1]

    def _touch(self, released: threading.Event) -> None:
        while not released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):  # such as that of a directory that was removed
                if self._owner() not in (self._token, None) and not released.is_set():
                    line = f"error: another process took {self.path} over while this one was suspended; it ends here\n"
                    os.write(2, line.encode())
                    record_exit_code(1)
                    os._exit(1)
                os.utime(self.path)


def _is_dead(token: bytes) -> bool:
    """True if the owner ran on this machine, where its process id means the same process, and has ended."""
    try:
        _, namespace, process, started, _ = json.loads(token)
        if not namespace or namespace != _process_namespace():
            return False
        os.kill(process, 0)  # sends nothing
        return _started(process) != started  # the number may belong to a later process
    except ProcessLookupError:
        return True
    except (ValueError, TypeError, OverflowError, PermissionError):
        return False


def _process_namespace() -> str:
    """The start of this machine and the namespace of its process ids, which each container may have; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(process: int) -> str:
    """The start of a process in clock ticks since boot; "" if there is no such process."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # field 22 of proc(5)


def _state(path: Path) -> tuple[int, bytes] | None:
    """Time of the last change and content; None if there is no such file.

    It opens the file, since NFS may answer a mere `stat` from its cache.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
