"""Detects files that become shorter while they are mapped or read.

Reading a mapped page that its file no longer has kills the process with SIGBUS. A check of the sizes before the reads
turns nearly all such crashes into one line; if a file shrinks in between, `faulthandler` prints a traceback.

A file may be unlinked, or replaced by another one under its name (mv): the mapping keeps the old file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import IO

from utils.errors import LocalError, os_errors_for_users

REMEDY = "copy or recreate it, then start again; to replace a file in use, write a new one and mv it into place"


class SizeCheck:
    """Compares the sizes of files with those at construction.

    It keeps the files open: the files that are mapped are checked, whatever their names refer to later.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._files: list[tuple[IO[bytes], int]] = []  # with the size at construction
        with contextlib.ExitStack() as opened:
            for path in paths:
                with os_errors_for_users(f"cannot read {path}", error_type=LocalError):
                    file = opened.enter_context(open(path, "rb", buffering=0))
                    self._files.append((file, os.fstat(file.fileno()).st_size))
            self._opened = opened.pop_all()

    def check(self) -> None:
        """Raises LocalError if a file is shorter than at construction or unreachable; takes a few microseconds."""
        for file, size in self._files:
            remedy = "check its file system, then start again"
            with os_errors_for_users(f"{file.name} can no longer be read", remedy, LocalError):
                now = os.fstat(file.fileno()).st_size
            if now < size:
                raise LocalError(
                    f"{file.name} became shorter while it was being read (from {size} to {now} bytes); {REMEDY}"
                )

    def close(self) -> None:
        """Closes the files; later checks pass."""
        self._files.clear()
        self._opened.close()
