"""Volumes that grow: whole under their name or not there, and gone on with wherever a process before was ended."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import numpy as np
import pytest
from disks import fill, small_disk

from utils.data import growing
from utils.data.growing import GrowingVolume
from utils.errors import UserError

SHAPES = {"one": (2, 10, 3, 5), "other": (1, 10, 3, 5)}
STARTS = (0, 4, 5, 10)  # of the slabs that are written
ABOUT = {"": {"made_by": "a test", "tile": 8}, "one": {"channels": ["a", "b"]}, "other": {}}
MADE_OF = {"weights": "0123", "tiles": [8, [0, 4]], "physical": False}
KILLED = -signal.SIGKILL


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def begin(target: Path, made_of: dict[str, Any] = MADE_OF, overwrite: bool = False) -> GrowingVolume:
    return GrowingVolume(target, SHAPES, ABOUT, made_of, overwrite)


def write_slabs(volume: GrowingVolume, until: int = 10) -> None:
    """What is missing, up to plane `until`."""
    for start, end in itertools.pairwise(STARTS):
        if volume.done <= start and end <= until:
            volume.write({name: field[:, start:end] for name, field in values().items()})


def write_all(target: Path, **options: Any) -> int:
    """Goes on or begins, and finishes; returns how many planes were there."""
    volume = begin(target, **options)
    done = volume.done
    write_slabs(volume)
    volume.finish()
    return done


def check_whole(target: Path, alone: bool = True) -> None:
    """h5py reads what was written, which lies in one piece; and nothing else is beside it."""
    with h5py.File(target) as file:
        assert list(file) == list(SHAPES)
        for name, expected in values().items():
            assert file[name].chunks is None
            assert file[name].id.get_offset() is not None
            assert file[name].dtype == np.dtype("<f4")
            np.testing.assert_array_equal(file[name][...], expected)
        assert dict(file.attrs) == ABOUT[""]
        assert list(file["one"].attrs["channels"]) == ABOUT["one"]["channels"]
    if alone:
        assert os.listdir(target.parent) == [target.name]


def in_child(function: Callable[[], None]) -> int:
    """Exit code of a process of its own, which a signal may end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- what is written -------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "box.h5"
    assert write_all(target) == 0
    check_whole(target)


def test_other_byte_orders_and_types_and_strided_planes_are_written_as_float32(tmp_path: Path) -> None:
    target, fields = tmp_path / "box.h5", values()
    volume = begin(target)
    volume.write({"one": fields["one"].astype(">f8")[:, :4], "other": np.asfortranarray(fields["other"])[:, :4]})
    volume.write({name: np.ascontiguousarray(field[..., ::-1])[:, 4:, :, ::-1] for name, field in fields.items()})
    volume.finish()
    check_whole(target)


def test_nothing_has_the_name_before_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    volume = begin(target)
    write_slabs(volume)
    volume.close()
    assert not target.exists()
    assert all(name.startswith(".box.h5.") for name in os.listdir(tmp_path))
    volume = begin(target)
    assert volume.done == 10
    volume.finish()
    check_whole(target)


def test_planes_are_on_the_disk_when_the_journal_tells_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes down forgets what was not flushed: the data come first, then the journal."""
    told: list[str] = []
    flush, note = os.fsync, GrowingVolume._note

    def recorded_flush(descriptor: int) -> None:
        told.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def recorded_note(self: GrowingVolume, planes: int) -> None:
        told.append(f"journal {planes}")
        note(self, planes)

    volume = begin(tmp_path / "box.h5")
    monkeypatch.setattr(os, "fsync", recorded_flush)
    monkeypatch.setattr(GrowingVolume, "_note", recorded_note)
    write_slabs(volume, until=4)
    volume.close()
    assert told[:2] == [".box.h5.partial", "journal 4"]
    assert any(".journal." in name for name in told[2:])


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", [0, 4, 5, 10])
def test_a_later_process_goes_on_where_one_stopped(tmp_path: Path, until: int) -> None:
    volume = begin(tmp_path / "box.h5")
    write_slabs(volume, until)
    volume.close()
    volume.close()
    assert write_all(tmp_path / "box.h5") == until
    check_whole(tmp_path / "box.h5")


def states_of_the_disk(folder: Path, work: Callable[[], None]) -> list[dict[str, bytes]]:
    """All that lies in the folder, after each line that changes it: what a process that is killed there leaves."""
    states: list[dict[str, bytes]] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if os.path.basename(frame.f_code.co_filename) not in ("growing.py", "files.py"):
            return None
        state = {path.name: path.read_bytes() for path in folder.iterdir()}
        if event == "line" and state not in states[-1:]:
            states.append(state)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return states


@pytest.mark.parametrize("before", ["nothing", "a journal alone", "another's"])
def test_killed_at_any_line_it_goes_on_and_what_is_there_is_never_half_written(tmp_path: Path, before: str) -> None:
    """What takes the name of the file that is replaced is whole."""
    first = tmp_path / "first"
    first.mkdir()
    (first / "box.h5").write_bytes(b"old")
    if before != "nothing":
        volume = begin(first / "box.h5", MADE_OF | {"of": before} if before == "another's" else MADE_OF, True)
        write_slabs(volume, until=4)
        volume.close()
    if before == "a journal alone":
        (first / ".box.h5.partial").unlink()
    states = states_of_the_disk(first, lambda: write_all(first / "box.h5", overwrite=True))
    assert len(states) > 20
    seen = set()
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in state.items():
            (folder / name).write_bytes(content)
        if state["box.h5"] == b"old":
            seen.add(write_all(folder / "box.h5", overwrite=True))
            check_whole(folder / "box.h5")
        else:
            check_whole(folder / "box.h5", alone=False)
            seen.add("finished")
    assert seen == {*STARTS, "finished"}


def test_planes_half_written_when_it_was_killed_are_written_again(tmp_path: Path) -> None:
    target, write = tmp_path / "box.h5", os.pwrite
    writes = 0

    def torn(descriptor: int, data: memoryview, place: int) -> int:
        nonlocal writes
        writes += 1
        if writes == 5:  # of three channels a slab: in the second
            write(descriptor, data[: len(data) // 2], place)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, bytes(255 - byte for byte in data) if writes == 4 else data, place)

    def write_torn() -> None:
        os.pwrite = torn
        write_all(target)

    assert in_child(write_torn) == KILLED
    assert write_all(target) == 4
    check_whole(target)


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: write(descriptor, data[:7], place))
    write_all(tmp_path / "box.h5")
    check_whole(tmp_path / "box.h5")


def test_one_made_of_other_things_is_begun_anew_and_says_what_changed(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    volume = begin(target, MADE_OF | {"weights": "other", "physical": True})
    write_slabs(volume, until=5)
    volume.close()
    volume = begin(target)
    assert (volume.done, volume.changed) == (0, ["weights", "physical"])
    volume.close()
    volume = begin(target)
    assert (volume.done, volume.changed) == (0, [])
    write_slabs(volume)
    volume.finish()
    check_whole(target)


def test_what_it_is_made_of_is_compared_as_the_journal_keeps_it(tmp_path: Path) -> None:
    """A tuple comes back as a list."""
    made_of = {"tiles": (8, (0, 4)), 1: "number"}
    volume = begin(tmp_path / "box.h5", made_of)
    write_slabs(volume, until=5)
    volume.close()
    assert write_all(tmp_path / "box.h5", made_of=made_of) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"planes": 4}', '{"planes": null, "bytes": 1, "made_of": {}}'])
def test_a_damaged_journal_begins_anew(tmp_path: Path, text: str) -> None:
    volume = begin(tmp_path / "box.h5")
    write_slabs(volume, until=5)
    volume.close()
    (tmp_path / ".box.h5.journal").write_text(text)
    assert write_all(tmp_path / "box.h5") == 0
    check_whole(tmp_path / "box.h5")


@pytest.mark.parametrize("change", ["shorter", "gone"])
def test_an_unfinished_file_that_is_not_what_the_journal_says_is_begun_anew(tmp_path: Path, change: str) -> None:
    volume = begin(tmp_path / "box.h5")
    write_slabs(volume, until=5)
    volume.close()
    partial = tmp_path / ".box.h5.partial"
    if change == "gone":
        partial.unlink()
    else:
        os.truncate(partial, partial.stat().st_size - 1)
    assert write_all(tmp_path / "box.h5") == 0
    check_whole(tmp_path / "box.h5")


def test_names_with_brackets_leave_nothing_behind_either(tmp_path: Path) -> None:
    target = tmp_path / "box[0-9]*.h5"
    (tmp_path / ".box5.h5.journal").write_text("another's")

    def killed_in_the_journal() -> None:
        growing.appearing_whole = lambda targets: os.kill(os.getpid(), signal.SIGKILL)
        begin(target)

    assert in_child(killed_in_the_journal) == KILLED
    (tmp_path / f"..{target.name}.journal.0123.partial").write_text("{")
    (tmp_path / "..box5.h5.journal.0123.partial").write_text("another's")
    write_all(target)
    names = ["..box5.h5.journal.0123.partial", ".box5.h5.journal", target.name]
    assert sorted(os.listdir(tmp_path)) == names


# --- what stands in the way ------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_while_the_first_is_at_it(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    volume = begin(target)

    def begin_too() -> None:
        with pytest.raises(
            UserError, match=r"another process is writing box.h5; wait for it, or give another --output"
        ):
            begin(target)

    write_slabs(volume, until=5)
    assert in_child(begin_too) == 0
    write_slabs(volume)
    volume.finish()
    check_whole(target)


def test_a_lock_that_its_owner_has_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process opens the lock file, and another finishes and removes it before the first locks it."""
    target, lock = tmp_path / "box.h5", growing.fcntl.flock
    other = begin(target)

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(growing.fcntl, "flock", lock)
        write_slabs(other)
        other.finish()
        lock(*arguments)

    monkeypatch.setattr(growing.fcntl, "flock", late)
    found = growing._locked(tmp_path / ".box.h5.lock")
    with pytest.raises(UserError, match="another process"):
        growing._locked(tmp_path / ".box.h5.lock")
    found.close()


def test_closing_twice_takes_no_lock_from_a_later_one(tmp_path: Path) -> None:
    first = begin(tmp_path / "box.h5")
    write_slabs(first)
    first.finish()
    with growing._locked(tmp_path / ".box.h5.lock"):
        first.close()
        with pytest.raises(UserError, match="another process"):
            begin(tmp_path / "box.h5", overwrite=True)


def test_closing_twice_closes_no_file_of_anothers(tmp_path: Path) -> None:
    """The number of a closed file is given to the next one that is opened."""
    volume = begin(tmp_path / "box.h5")
    write_slabs(volume)
    volume.finish()
    others = [open(tmp_path / f"other {number}", "w") for number in range(4)]  # noqa: SIM115
    volume.close()
    for other in others:
        os.fstat(other.fileno())
        other.close()


def test_an_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    target.write_text("precious")
    with pytest.raises(UserError, match=r"box.h5 exists; give --overwrite to replace it, or another --output"):
        begin(target)
    assert (os.listdir(tmp_path), target.read_text()) == (["box.h5"], "precious")
    (tmp_path / "link.h5").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"link.h5 exists"):
        begin(tmp_path / "link.h5")
    with pytest.raises(UserError, match="is a directory; give the name of a file"):
        begin(tmp_path)


def test_an_existing_target_is_replaced_in_the_end_alone(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    target.write_text("old")
    volume = begin(target, overwrite=True)
    for until in (5, 10):
        write_slabs(volume, until)
        assert target.read_text() == "old"
    volume.finish()
    check_whole(target)


def test_a_target_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    volume = begin(target)
    write_slabs(volume)
    target.write_text("another's")
    with pytest.raises(UserError, match="exists; give --overwrite"):
        volume.finish()
    volume.close()
    assert target.read_text() == "another's"
    assert write_all(target, overwrite=True) == 10
    check_whole(target)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """Permissions would not stop root; a file in its place stops everyone."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=r"cannot write .*box.h5: (Not a directory|File exists); give another --output"):
        begin(tmp_path / "file" / "box.h5")
    assert (tmp_path / "file").read_text() == "precious"


# --- full disks ------------------------------------------------------------------------------------------------------


LARGE = {"one": (1, 64, 32, 32)}  # 256 KiB


def begin_large(target: Path) -> GrowingVolume:
    return GrowingVolume(target, LARGE, {}, MADE_OF)


def large_planes(start: int, count: int) -> dict[str, np.ndarray]:
    return {"one": np.arange(start, start + count, dtype="f4").reshape(1, -1, 1, 1) * np.ones((1, count, 32, 32), "f4")}


def test_a_disk_too_small_is_refused_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as disk:
        with pytest.raises(
            UserError, match=r"disk has [0-9.]+ MB free and the output takes [0-9.]+ MB; free some space, or"
        ):
            begin_large(disk / "box.h5")
        assert os.listdir(disk) == []


def test_a_disk_that_fills_is_one_line_and_it_goes_on_when_there_is_space(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        target = disk / "box.h5"
        volume = begin_large(target)
        volume.write(large_planes(0, 16))
        filler = fill(disk)
        with pytest.raises(UserError) as full:
            volume.write(large_planes(16, 48))
        volume.close()
        says = f"cannot write {target}: No space left on device; free some space, and the same command goes on"
        assert str(full.value) == says
        assert not target.exists()
        filler.unlink()
        volume = begin_large(target)
        assert volume.done == 16
        volume.write(large_planes(16, 48))
        volume.finish()
        with h5py.File(target) as file:
            np.testing.assert_array_equal(file["one"][...], large_planes(0, 64)["one"])
        assert os.listdir(disk) == ["box.h5"]


def test_a_disk_too_full_for_the_journal_keeps_the_earlier_one(tmp_path: Path) -> None:
    """The planes find room, the journal does not: they are written again."""
    with small_disk(tmp_path / "disk", "512k") as disk:
        volume = begin_large(disk / "box.h5")
        volume.write(large_planes(0, 16))
        with open(volume._partial, "r+b") as file:  # as if all its blocks had been there before
            size = volume._partial.stat().st_size
            os.posix_fallocate(file.fileno(), 0, size)
        filler = fill(disk)
        with pytest.raises(UserError, match="No space left on device; free some space"):
            volume.write(large_planes(16, 16))
        assert volume.done == json.loads((disk / ".box.h5.journal").read_text())["planes"] == 16
        filler.unlink()
        volume.write(large_planes(16, 48))
        volume.finish()
        with h5py.File(disk / "box.h5") as found:
            np.testing.assert_array_equal(found["one"][...], large_planes(0, 64)["one"])


def test_a_disk_too_full_to_begin_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a quota leaves less than the disk has: HDF5's own part of the file finds no room."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        filler = fill(disk)
        monkeypatch.setattr(growing, "free_bytes", lambda _: 2**40)
        with pytest.raises(UserError, match=r"cannot write .*No space left on device; free some space"):
            begin_large(disk / "box.h5")
        assert not (disk / "box.h5").exists()
        filler.unlink()


def test_what_is_discarded_leaves_nothing_and_can_be_begun_anew(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    volume = begin(target)
    write_slabs(volume)
    volume.discard()
    assert os.listdir(tmp_path) == []
    assert write_all(target) == 0
    check_whole(target)
