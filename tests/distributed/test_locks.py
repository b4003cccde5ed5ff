"""Locked files, on file systems with and without locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from utils.distributed import locks
from utils.distributed.locks import is_locked, open_locked
from utils.errors import UserError


def test_a_lock_excludes_others_until_it_is_closed(tmp_path: Path) -> None:
    """flock treats a second open file of one process like that of another process."""
    path = tmp_path / ".lock"
    with open_locked(path, "locked"):
        assert is_locked(path)
        with pytest.raises(UserError, match=r"^in use$"):
            open_locked(path, "in use")
    assert not is_locked(path)
    open_locked(path, "in use").close()


def test_without_locks_a_warning_asks_for_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with open_locked(tmp_path / ".lock", "locked"):
        assert not is_locked(tmp_path / ".lock")
    (line,) = caplog.messages
    assert f"The file system of {tmp_path / '.lock'} has no locks (No locks available): " in line
