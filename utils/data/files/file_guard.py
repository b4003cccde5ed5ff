"""Files that shrink while they are mapped into memory: one clear line instead of a death without a word.

Reading a mapped page that its file no longer has raises SIGBUS, in whatever thread reads it. `FileGuard.check` sees
most such files first. For those that shrink between the check and the reading, a signal handler writes the line.

A file that is unlinked, or replaced by another of its name (mv), does no harm: the mapping keeps the one it was made
of.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable

from utils.errors import EXIT_USER_ERROR, LocalError

REMEDY = "copy or make it again, then start again; to replace a file in use, write another one and mv it there"


class FileGuard:
    """Watches files while they are mapped; made when they are mapped, and closed after the last reading.

    It keeps each file open, so that it watches the file that is mapped, whatever its name leads to later.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._files: list[tuple[int, int, str]] = []  # descriptor, size at first, path
        self._closing = weakref.finalize(self, _close, self._files)
        self._closing.atexit = False  # threads may read to the very end
        for path in dict.fromkeys(os.fspath(path) for path in paths):
            try:
                descriptor = os.open(path, os.O_RDONLY)
                self._files.append((descriptor, os.fstat(descriptor).st_size, path))
            except OSError as error:
                self.close()
                raise LocalError(f"cannot read {path}: {error.strerror}") from None
        _guards.add(self)
        _handler.install()

    def check(self) -> None:
        """Raises LocalError where a file is shorter than it was, or out of reach; a few microseconds."""
        line = self.fault()
        if line is not None:
            raise LocalError(line)

    def fault(self) -> str | None:
        """What is wrong with a file, in one line; None where nothing is."""
        for descriptor, size, path in self._files:
            try:
                now = os.fstat(descriptor).st_size
            except OSError as error:
                return f"{path} can no longer be read: {error.strerror}; check its file system, then start again"
            if now < size:
                return f"{path} became shorter while it was being read (from {size} to {now} bytes); {REMEDY}"
        return None

    def close(self) -> None:
        self._closing()
        _guards.discard(self)


def _close(files: list[tuple[int, int, str]]) -> None:
    while files:
        os.close(files.pop()[0])


class _BusErrorHandler:
    """Ends the process with the line, and exit code 2, where a guarded file is at fault for a SIGBUS.

    It is installed through libc: a handler of Python's own (signal.signal) only sets a flag and returns to the reading
    that failed, which fails again, for ever. This one is called in the thread that was reading, which waits for the
    interpreter lock if it does not hold it; threads that Python does not know (DALI's) may do so, too.

    Were the lock held by a thread that waits, in C, for the one that was reading, neither would go on. numpy's copies
    and DALI's `outputs` release it first.
    """

    def __init__(self) -> None:
        self._called = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_bus_error)  # C keeps no reference to it
        self._before: ctypes.Array[ctypes.c_char] | None = None
        self._telling = threading.Lock()

    def install(self) -> None:
        """Once, however many guards there are; it stays until the process ends."""
        if self._before is not None:
            return
        self._libc = ctypes.CDLL(None)
        self._before = ctypes.create_string_buffer(1024)  # a struct sigaction, as it is: at most 152 bytes
        self._libc.sigaction(ctypes.c_int(signal.SIGBUS), None, self._before)
        self._libc.signal(ctypes.c_int(signal.SIGBUS), self._called)

    def _on_bus_error(self, _: int) -> None:
        try:
            if not self._telling.acquire(blocking=False):
                time.sleep(10)  # another thread is at it, and ends the process
            for guard in list(_guards):
                line = guard.fault()
                if line is not None:
                    os.write(2, f"error: {' '.join(line.split())}\n".encode(errors="backslashreplace"))
                    os._exit(EXIT_USER_ERROR)
        finally:
            # Not one of ours: what was there before has it, as soon as this handler is left.
            self._libc.sigaction(ctypes.c_int(signal.SIGBUS), self._before, None)
            signal.raise_signal(signal.SIGBUS)


_guards: weakref.WeakSet[FileGuard] = weakref.WeakSet()
_handler = _BusErrorHandler()
