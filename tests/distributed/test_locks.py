"""Locked files, on file systems with and without locks."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import GENEROUS, context

from utils.distributed import locks
from utils.distributed.locks import Claim, open_locked
from utils.errors import UserError


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_is_unchanged(tmp_path: Path) -> None:
    """A fixed bug: the target was opened, and truncated."""
    (tmp_path / "target").write_text("precious")
    for target in ("target", "nowhere"):
        (tmp_path / ".lock").symlink_to(target)
        with pytest.raises(UserError, match=r"\.lock is a symbolic link and cannot be a lock file; remove it$"):
            open_locked(tmp_path / ".lock", "locked")
        (tmp_path / ".lock").unlink()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that replaces the lock of `<tmp_path>/.lock` on a file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "TOUCH_SECONDS", 0.02)
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(locks, "STALE_SECONDS", GENEROUS)
    monkeypatch.setattr(os, "_exit", lambda _: None)  # otherwise an owner that loses its file would end the tests
    return tmp_path / ".lock.owner"


def test_without_locks_a_live_owner_excludes_others(
    tmp_path: Path, owner: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fixed bug: two runs in one directory both succeeded, and each removed the other's unfinished locks."""
    with open_locked(tmp_path / ".lock", "locked"):
        says = f"The file system of {tmp_path / '.lock'} has no locks (No locks available): using the file .lock.owner "
        assert [record.getMessage() for record in caplog.records] == [f"{says}instead"]
        for _ in range(2):
            with pytest.raises(UserError, match=r"^locked$"):
                open_locked(tmp_path / ".lock", "locked")
        assert locks.is_locked(tmp_path / ".lock")
    assert os.listdir(tmp_path) == [".lock"]
    assert not locks.is_locked(tmp_path / ".lock")
    open_locked(tmp_path / ".lock", "locked").close()


def test_without_locks_the_file_of_a_dead_owner_is_taken_over(
    tmp_path: Path, owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another process has died while it took it over."""
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    owner.write_text("dead")
    with open_locked(tmp_path / ".lock", "locked"):
        assert owner.read_text() != "dead"
    owner.write_text("dead")
    owner.with_name(".lock.owner.next").write_text("dead, too")
    with open_locked(tmp_path / ".lock", "locked"):
        assert owner.read_text() not in ("dead", "dead, too")
    assert os.listdir(tmp_path) == [".lock"]


def test_a_process_with_locks_respects_the_live_owner_of_one_without(tmp_path: Path, owner: Path) -> None:
    """Nodes may mount the same file system with and without locks. A file that a dead owner left is removed."""
    with open_locked(tmp_path / ".lock", "locked"), pytest.MonkeyPatch.context() as other:
        other.setattr(locks.fcntl, "flock", lambda *_: None)
        with pytest.raises(UserError, match=r"^locked$"):
            open_locked(tmp_path / ".lock", "locked")
        owner.write_text(json.dumps(["", locks._process_namespace(), 2**22 + 1, "", ""]))
        assert not locks.is_locked(tmp_path / ".lock")
        with open_locked(tmp_path / ".lock", "locked"):
            assert locks.is_locked(tmp_path / ".lock")
        assert os.listdir(tmp_path) == [".lock"]


def hold_until_killed(owner: Path) -> None:
    assert Claim(owner).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_locks_the_file_of_a_process_that_was_killed_on_this_machine_is_taken_over_at_once(
    tmp_path: Path, owner: Path
) -> None:
    """Here a file counts as stale after GENEROUS seconds only."""
    process = context().Process(target=hold_until_killed, args=(owner,))
    process.start()
    process.join(GENEROUS)
    left = json.loads(owner.read_text())
    started = time.monotonic()
    with open_locked(tmp_path / ".lock", "locked"):
        assert json.loads(owner.read_text())[2] == os.getpid()
        assert left[2] == process.pid
        ours = json.loads(owner.read_text())
    owner.write_text(json.dumps([*ours[:3], "the start of an earlier process with the same number", ""]))
    open_locked(tmp_path / ".lock", "locked").close()
    assert time.monotonic() - started < GENEROUS
    for alive in (ours, [*left[:1], "another machine", *left[2:]]):
        assert not locks._is_dead(json.dumps(alive).encode())


def test_without_locks_only_one_process_takes_over(
    tmp_path: Path, owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the owner dead; the second one is slower."""
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    owner.write_text("dead")
    first, second, create = Claim(owner), Claim(owner), Claim._create
    taken = []

    def create_late(claim: Claim, path: Path) -> bool:
        if claim is second and path != owner and not taken:
            taken.append(first.acquire())
        return create(claim, path)

    monkeypatch.setattr(Claim, "_create", create_late)
    assert not second.acquire()
    assert taken == [True]
    assert os.listdir(tmp_path) == [".lock.owner"]
    first.release()
    assert os.listdir(tmp_path) == []


def test_without_locks_a_suspended_owner_ends_when_it_finds_another_one(
    tmp_path: Path, owner: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def end(code: int) -> None:
        assert code == 1
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with open_locked(tmp_path / ".lock", "locked"):
        owner.write_text("another process")
        assert ended.wait(GENEROUS)
    assert capfd.readouterr().err.startswith(f"error: another process took {owner} over while this one was suspended")
    assert owner.read_text() == "another process"
