"""Tests of utils.files and of the errors of files. Atomic writes appear under their names only once complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_directory, atomic_write, check_target, make_output_directory, recover


def write(path: Path, text: str) -> None:
    with atomic_write([path]) as (partial,):
        partial.write_text(text)


def write_directory(path: Path, text: str) -> None:
    with atomic_directory(path) as partial:
        (partial / "one").write_text(text)
        (partial / "two").write_text(text)


WRITERS = {"file": write, "directory": write_directory}
ERRORS = [OSError(28, "No space left on device"), KeyboardInterrupt()]


def read(path: Path) -> str:
    if path.is_dir():
        one, two = ((path / name).read_text() for name in ("one", "two"))
        assert one == two
        return one
    return path.read_text()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_write_that_fails_anywhere_leaves_the_earlier_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException
) -> None:
    target = tmp_path / "target"
    WRITERS[kind](target, "first")

    def fail(*_: object) -> None:
        raise error

    def fail_half_way() -> None:
        with atomic_write([target]) if kind == "file" else atomic_directory(target) as partial:
            (partial[0] if isinstance(partial, list) else partial / "one").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail_half_way()
    assert (read(target), os.listdir(tmp_path)) == ("first", ["target"])
    for function in ("fsync", "replace" if kind == "file" else "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(type(error)):
                WRITERS[kind](target, "second")
        assert (read(target), os.listdir(tmp_path)) == ("first", ["target"]), function


@pytest.mark.parametrize("kind", WRITERS)
def test_the_earlier_content_stays_until_the_new_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file system that cannot flush a directory is no error."""
    target, seen, fsync = tmp_path / "target", [], os.fsync
    WRITERS[kind](target, "first")

    def observed_fsync(descriptor: int) -> None:
        seen.append(read(target))
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", observed_fsync)
    WRITERS[kind](target, "second")
    # The last flush is that of the parent directory, which makes the new name durable.
    assert seen == ["first"] * (1 if kind == "file" else 3) + ["second"]
    assert (read(target), os.listdir(tmp_path)) == ("second", ["target"])


def test_recovery_removes_partial_files_and_restores_what_was_moved_away(tmp_path: Path) -> None:
    for name in ("step_1", ".step_2.abc.partial", ".step_3.replaced", ".step_1.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    (tmp_path / ".metrics.jsonl.abc.partial").write_text("")
    (tmp_path / ".best.abc.partial").symlink_to("step_1")
    (tmp_path / "notes.partial").write_text("a file of the user")
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["notes.partial", "step_1", "step_3"]
    assert (tmp_path / "step_1" / "content").read_text() == "step_1", "the target of a symbolic link stays"
    assert (tmp_path / "step_3" / "content").read_text() == ".step_3.replaced"
    recover(tmp_path / "nowhere")


def test_an_output_that_exists_does_not_fit_or_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "output"
    check_target(target, overwrite=False)
    make_output_directory(target.parent, size=1)
    target.touch()
    with pytest.raises(UserError, match="output exists; give --overwrite to replace it, or another --out"):
        check_target(target, overwrite=False, option="--out")
    check_target(target, overwrite=True)
    with pytest.raises(UserError, match=r"new is a directory; give another --output$"):
        check_target(target.parent, overwrite=True)
    with pytest.raises(UserError, match=r"(File exists|Not a directory); give another --output$"):
        make_output_directory(target, size=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    make_output_directory(tmp_path, size=10**6)
    with pytest.raises(UserError, match=r"has 1\.0 MB free and the output needs 1\.1 MB; free some space, or move$"):
        make_output_directory(tmp_path, size=1_100_000, remedy="move")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"is not writable; give another --output$"):
        make_output_directory(tmp_path, size=0)


def test_an_os_error_is_reported_with_its_file_or_action_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught, os_errors_for_users("cannot write a", "move"):
        raise OSError(28, "No space left on device")
    assert re.match("cannot write a: No space left on device; free some space .*, or move$", str(caught.value))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop, one_line_errors():
        (tmp_path / "none").read_text()
    assert (stop.value.code, capsys.readouterr().err) == (2, f"error: {tmp_path}/none: No such file or directory\n")
    with pytest.raises(ConnectionResetError), one_line_errors():  # of no file: the traceback is needed
        raise ConnectionResetError
    for number, remedy in ((errno.EACCES, "change its permissions"), (errno.EROFS, "choose another directory")):
        with (
            pytest.raises(UserError, match=rf"^cannot write a: .*{remedy}, or move$"),
            os_errors_for_users("cannot write a", "move"),
        ):
            raise OSError(number, "as the library says")


@pytest.mark.parametrize(("number", "says"), [(errno.EIO, "Input/output error"), (errno.ESTALE, "Stale file handle")])
def test_a_file_system_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, says: str
) -> None:
    """Path.is_dir names the file; an error of a read names none, and was a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "", str(tmp_path))

    def read() -> None:
        raise OSError(number, "")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fail)
        for action, name in ((tmp_path.is_dir, f"{tmp_path}: "), (read, "")):
            with pytest.raises(SystemExit) as stop, one_line_errors():
                action()
            expected = f"error: {name}{says}; the file system has failed; run the command again when it works\n"
            assert (stop.value.code, capsys.readouterr().err) == (2, expected)
