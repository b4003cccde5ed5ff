"""Locked files, on file systems with and without locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from processes import GENEROUS, context

from utils.distributed import locks
from utils.distributed.locks import is_locked, open_locked
from utils.errors import UserError


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_is_unchanged(tmp_path: Path) -> None:
    """A fixed bug: the target was opened, and truncated."""
    (tmp_path / "target").write_text("precious")
    for target in ("target", "nowhere"):
        (tmp_path / ".lock").symlink_to(target)
        with pytest.raises(OSError, match="symbolic link"):
            open_locked(tmp_path / ".lock", "locked")
        (tmp_path / ".lock").unlink()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def try_to_lock(path: Path) -> None:
    try:
        open_locked(path, "locked").close()
    except UserError:
        os._exit(2)


def test_a_lock_excludes_other_processes_until_it_is_closed(tmp_path: Path) -> None:
    path, codes = tmp_path / ".lock", []
    for hold in (True, False):
        lock = open_locked(path, "locked")
        if not hold:
            lock.close()
        assert is_locked(path) == hold
        process = context().Process(target=try_to_lock, args=(path,))
        process.start()
        process.join(GENEROUS)
        codes.append(process.exitcode)
        lock.close()
    assert codes == [2, 0]


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
