"""Tests of utils.files, utils.errors and utils.progress: atomic writes, checks of outputs, errors, progress lines."""

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from utils import progress
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_directory, atomic_write, check_target, make_output_directory, recover, remove, to_json
from utils.progress import Progress


def test_json_has_null_for_numbers_that_are_not_finite() -> None:
    """Once, NaN stood in evaluation.json, which only Python reads."""
    values = {"a": math.nan, "b": [0.1, (-math.inf, 2)], "c": {"d": None, "NaN": "NaN"}}
    expected = {"a": None, "b": [0.1, [None, 2]], "c": {"d": None, "NaN": "NaN"}}
    assert json.loads(to_json(values), parse_constant=pytest.fail) == expected


def write(kind: str, path: Path, text: str, error: BaseException | None = None) -> None:
    with atomic_write([path]) if kind == "file" else atomic_directory(path) as partial:
        for file in partial if isinstance(partial, list) else [partial / "one", partial / "two"]:
            file.write_text(text)
            if error is not None:
                raise error


def test_a_file_that_cannot_be_removed_is_named_with_its_path(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As a checkpoint on NFS that another program reads: "weights.pt: Device or resource busy"."""
    busy = tmp_path / "checkpoints" / "step_00000008" / "weights.pt"
    busy.parent.mkdir(parents=True)
    busy.touch()

    def unlink(name: str, **_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        remove(tmp_path / "checkpoints")
    assert capsys.readouterr().err == f"error: {busy}: Device or resource busy; end the program that uses it\n"


def test_the_file_of_a_writer_that_was_killed_is_removed_by_a_later_one(tmp_path: Path) -> None:
    target, abandoned, recent = tmp_path / "box[1].h5", ".box[1].h5.0.partial", ".box[1].h5.1.partial"
    for name in (abandoned, recent):
        (tmp_path / name).touch()
    os.utime(tmp_path / abandoned, (0, 0))
    write("file", target, "text")
    assert {*os.listdir(tmp_path)} == {target.name, recent}


def read(path: Path) -> set[str]:
    files = [path / "one", path / "two"] if path.is_dir() else [path]
    return {file.read_text() for file in files}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_the_earlier_content_stays_until_the_new_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A write that fails anywhere leaves nothing else. A file system that cannot flush a directory is no error."""
    target, contents, fsync = tmp_path / "target", [], os.fsync
    write(kind, target, "first")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        for function in ("fsync", "replace" if kind == "file" else "rename", "getpid"):  # the last one is not called
            with monkeypatch.context() as patch:
                patch.setattr(os, function, fail)
                with pytest.raises(type(error)):
                    write(kind, target, "second", error if function == "getpid" else None)
            assert (read(target), os.listdir(tmp_path)) == ({"first"}, ["target"]), function

    def observed_fsync(descriptor: int) -> None:
        contents.append(read(target))
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            # Fixed: if the disk failed then, a run said that its summary was missing, which was complete.
            raise OSError(errno.EIO if kind == "file" else errno.EINVAL, "")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", observed_fsync)
    write(kind, target, "second")
    # The last flush is that of the parent directory, which makes the new name durable.
    assert contents == [{"first"}] * (1 if kind == "file" else 3) + [{"second"}]
    assert (read(target), os.listdir(tmp_path)) == ({"second"}, ["target"])


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


def test_an_output_that_exists_does_not_fit_or_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    for check, arguments, says in (
        (check_target, (tmp_path / "file", False), "file exists; give --overwrite to replace it, or another --output"),
        (check_target, (tmp_path, True), r"is a directory; give another --output$"),
        (make_output_directory, (tmp_path / "file", 0), r"(File exists|Not a directory); give another --output$"),
        (make_output_directory, (tmp_path / "new", 10**18, "move"), r"MB free and the output needs .*, or move$"),
        (make_output_directory, (tmp_path, 0), r"is not writable; give another --output$"),
    ):
        with pytest.raises(UserError, match=says):
            check(*arguments)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "as the library says"), "free some space and run the command again"),
        # The error of a read names no file, and was a traceback.
        (OSError(errno.ESTALE, ""), "the file system has failed; run the command again when it works"),
        (OSError(errno.ENOENT, "", "file"), ""),
        # Fixed: "Read-only file system; the file system is read-only; choose another directory, or choose another …"
        (OSError(errno.EROFS, "", "file"), "choose another directory"),
    ],
)
def test_an_os_error_is_one_line_with_its_file_or_action_and_remedy(error: OSError, remedy: str, capsys: Any) -> None:
    reason = os.strerror(error.errno)
    with pytest.raises(UserError) as caught, os_errors_for_users("cannot write a", "move"):
        raise error
    general = remedy + ", or " if remedy and error.errno != errno.EROFS else ""
    assert str(caught.value) == f"cannot write a: {reason}; {general}move"
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise error
    parts = filter(None, (f"file: {reason}" if error.filename else reason, remedy))
    assert capsys.readouterr().err == f"error: {'; '.join(parts)}\n"
    with pytest.raises(ConnectionResetError), one_line_errors():  # of no file: the traceback is needed
        raise ConnectionResetError


def test_progress_is_printed_by_rank_0_in_lines_at_limited_intervals(monkeypatch: Any, capsys: Any) -> None:
    """Where stderr is not a terminal; with live_only, no lines are printed there."""
    clock = iter(range(0, 1_000_000, 4000))  # each call returns 4000 seconds more
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 10_000.0)
    for rank, live_only, lines in (("0", False, 4), ("0", True, 0), ("1", False, 0)):
        monkeypatch.setenv("RANK", rank)
        with Progress("reading", total=10, unit="slabs", live_only=live_only) as shown:
            for _ in range(10):
                shown.advance(note="x")
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == lines
        assert "".join(printed[:1]) == ("reading: 3/10 slabs, 7:46:40 left x" if lines else "")
        assert "".join(printed[-1:]).startswith("reading: 10 slabs in " if lines else "")
