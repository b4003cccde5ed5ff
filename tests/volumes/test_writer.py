"""HDF5 files written block by block: the target is always complete, and interrupted processes can be resumed."""

import errno
import fcntl
import functools
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from utils.errors import UserError
from utils.volumes.writer import BlockWriter, ResumableHDF5File

SHAPES = {"one": (2, 10, 7, 5), "other": (1, 10, 7, 5), "group/scalar": (10, 7, 5)}
RNG = np.random.default_rng(0)
VALUES = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
# Blocks of rows, of planes (some with equal sides that are not those of the field), and of whole fields.
CUTS = {
    "rows": ((0, 4, 10), (0, 1, 7), (0, 2, 5)),
    "planes": ((0, 4, 5, 10), (0, 5, 7), (0, 5)),
    "one": ((0, 10), (0, 7), (0, 5)),
}
BLOCKS = {
    name: [tuple(slice(*pair) for pair in block) for block in itertools.product(*map(itertools.pairwise, cuts))]
    for name, cuts in CUTS.items()
}
ABOUT = {"": {"made_by": "a test", "tile": 8}, "group/scalar": {"units": "K"}, "universe": {"redshift": 3.0}}
IDENTITY = {"weights": "0123", "tiles": (8, (0, 4)), "physical": False}  # JSON returns tuples as lists


def begin(target: Path, overwrite: bool = False, blocks: str = "planes", **changed: Any) -> ResumableHDF5File:
    return ResumableHDF5File(target, SHAPES, ABOUT, IDENTITY | changed, BLOCKS[blocks], overwrite)


def write_blocks(target: Path, until: int = 100) -> int:
    """Writes missing blocks, the last ones first, until `until` are on disk; returns how many were there before."""
    with closing(BlockWriter(target, [*SHAPES])) as writer:
        missing = writer.missing
        done = len(writer.blocks) - len(missing)
        for number in missing[::-1][: max(0, until - done)]:
            x, y, z = writer.blocks[number]
            writer.write(number, (x, y, z), {name: field[..., x, y, z] for name, field in VALUES.items()})
        assert writer.missing == missing[: len(writer.blocks) - max(done, until)]
        return done


def write_part(target: Path, until: int, **options: Any) -> list[str]:
    """Resumes or starts, and stops after `until` blocks; returns the keys that have changed."""
    with closing(begin(target, **options)) as file:
        write_blocks(target, until)
        return file.changed


def write_all(target: Path, **options: Any) -> int:
    """Resumes or starts, and finishes; returns the number of blocks that were on disk before."""
    file = begin(target, **options)
    done = write_blocks(target)
    file.finish()
    check_complete(target)
    assert os.listdir(target.parent) == [target.name]
    return done


def check_complete(target: Path) -> None:
    with h5py.File(target) as file:
        assert list(file) == ["group", "one", "other", "universe"]
        for name, expected in VALUES.items():
            assert (file[name].chunks, file[name].dtype) == (None, np.dtype("<f4"))
            np.testing.assert_array_equal(file[name][...], expected)
        for name, attributes in ABOUT.items():
            assert dict(file[name or "/"].attrs) == attributes


@pytest.mark.parametrize("blocks", [*CUTS])
def test_other_byte_orders_types_and_strides_are_written_as_float32_by_short_writes(
    tmp_path: Path, monkeypatch: Any, blocks: str
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: write(descriptor, data[:7], place))
    monkeypatch.setitem(VALUES, "one", VALUES["one"].astype(">f8"))
    monkeypatch.setitem(VALUES, "other", np.asfortranarray(VALUES["other"]))
    assert write_all(tmp_path / "new" / "box.h5", blocks=blocks) == 0


def test_blocks_are_flushed_before_the_record_counts_them(tmp_path: Path, monkeypatch: Any) -> None:
    """If the machine crashes, data that were not flushed are lost."""
    counted, record = [], tmp_path / ".box.h5.blocks"
    with closing(begin(tmp_path / "box.h5")):
        monkeypatch.setattr(os, "fsync", lambda _: counted.append(sum(record.read_bytes())))
        write_blocks(tmp_path / "box.h5", until=2)
    assert counted == [0, 1], "at each flush of a block"


def states_of_the_disk(folder: Path, work: Callable[[], Any]) -> list[dict[str, bytes]]:
    """The files in the folder after each line that changes them, as a process killed at that line leaves them."""
    states: list[dict[str, bytes]] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if os.path.basename(frame.f_code.co_filename) != "writer.py":
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


@pytest.mark.parametrize("before", ["nothing", "a file of another identity"])
def test_killed_at_any_line_it_resumes_and_its_target_is_always_complete(tmp_path: Path, before: str) -> None:
    """An existing target stays until the new file is complete."""
    first, seen = tmp_path / "first", set()
    first.mkdir()
    (first / "box.h5").write_bytes(b"old")
    if before != "nothing":
        write_part(first / "box.h5", 4, removed_option=True, overwrite=True)
    for number, state in enumerate(states_of_the_disk(first, lambda: write_all(first / "box.h5", overwrite=True))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in state.items():
            (folder / name).write_bytes(content)
        if state["box.h5"] == b"old":
            seen.add(write_all(folder / "box.h5", overwrite=True))
        else:
            check_complete(folder / "box.h5")
            seen.add("finished")
    assert seen == {*range(len(BLOCKS["planes"]) + 1), "finished"}


def test_a_file_of_another_identity_or_with_damaged_parts_starts_from_scratch(tmp_path: Path) -> None:
    """The keys that have changed are listed."""
    target = tmp_path / "box.h5"
    write_part(target, 5, weights="other", physical=True)
    assert write_part(target, 4) == ["weights", "physical"]
    assert write_part(target, 5) == []
    assert write_all(target) == 5
    truncate = functools.partial(os.truncate, length=3)  # fixed: the record's missing blocks were zero
    for part, damage in itertools.product(("journal", "partial", "blocks"), (os.remove, truncate)):
        target.unlink()
        write_part(target, until=5)
        damage(tmp_path / f".box.h5.{part}")
        assert write_all(target) == 0


@pytest.mark.parametrize("journal", ["[]", "{}", "3", '{"identity": 1, "sizes": 2}', '{"version": 2', "\x80"])
def test_a_journal_of_another_form_is_one_warning(tmp_path: Path, journal: str, caplog: Any) -> None:
    """Once each later start ended with a traceback."""
    target = tmp_path / "box.h5"
    write_part(target, 5)
    (tmp_path / ".box.h5.journal").write_bytes(journal.encode("latin-1"))
    assert write_all(target) == 0
    assert caplog.messages == [f"Cannot read {tmp_path / '.box.h5.journal'}: starting box.h5 from scratch"]


def test_a_suspended_process_of_an_earlier_start_cannot_write_into_the_next_file(tmp_path: Path) -> None:
    """It wrote its blocks into the file of another network, and recorded them as done."""
    target = tmp_path / "box.h5"
    write_part(target, 1, weights="other")
    with closing(BlockWriter(target, [*SHAPES])) as suspended, closing(begin(target)):
        x, y, z = suspended.blocks[0]
        suspended.write(0, (x, y, z), {name: 0 * field[..., x, y, z] for name, field in VALUES.items()})
        assert write_blocks(target) == 0
    assert write_all(target) == len(BLOCKS["planes"])


class NfsClient:
    """The page cache of an NFS client, in place of `os` in writer.py: it sends whole pages if it has read them."""

    O_WRONLY, O_DSYNC, open = os.O_WRONLY, os.O_DSYNC, staticmethod(os.open)

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], bytearray] = {}
        self._unsent: list[tuple[int, int, bytes]] = []

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        flags, node, size = fcntl.fcntl(descriptor, fcntl.F_GETFL), os.fstat(descriptor).st_ino, 4096
        start = offset
        while start < offset + len(data):
            page, end = start // size, min((start // size + 1) * size, offset + len(data))
            part = bytes(data[start - offset : end - offset])
            if flags & os.O_ACCMODE == os.O_RDWR:
                stored = os.pread(descriptor, size, page * size).ljust(size, b"\0")
                cached = self._pages.setdefault((node, page), bytearray(stored))
                cached[start - page * size : end - page * size] = part
                start, part = page * size, bytes(cached)
            self._unsent.append((descriptor, start, part))
            start = end
        if flags & os.O_DSYNC:
            self.fsync(descriptor)
        return len(data)

    def fsync(self, descriptor: int) -> None:
        for number, start, part in self._unsent:
            if number == descriptor:
                os.pwrite(descriptor, part, start)
        self._unsent = [unsent for unsent in self._unsent if unsent[0] != descriptor]


def test_two_nodes_that_share_a_directory_by_nfs_write_the_file_of_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Each sent whole pages with old values of the other's cells, and overwrote the other's entries of the record."""
    target, blocks = tmp_path / "box.h5", BLOCKS["rows"]
    with closing(begin(target, blocks="rows")) as file:
        clients = [(NfsClient(), BlockWriter(target, [*SHAPES])) for _ in range(2)]
        for number, (x, y, z) in enumerate(blocks):
            client, writer = clients[number % 2]
            monkeypatch.setattr("utils.volumes.writer.os", client)
            writer.write(number, (x, y, z), {name: field[..., x, y, z] for name, field in VALUES.items()})
        monkeypatch.undo()
        for _, writer in clients:
            assert (writer.missing, writer.stops) == ([], False)
            writer.close()
        file.finish()
    check_complete(target)


def test_a_file_without_a_block_is_removed_but_not_that_of_a_later_process(tmp_path: Path) -> None:
    """A refused input left hidden files. After it has finished, a writer is closed once more."""
    target = tmp_path / "box.h5"
    begin(target).close()
    assert os.listdir(tmp_path) == []
    file = begin(target)
    write_blocks(target)
    file.finish()
    with closing(begin(target, overwrite=True)):
        file.close()
        write_blocks(target, until=1)
    assert len(os.listdir(tmp_path)) == 4, "the target, and the next process's files"


def test_a_second_writer_is_refused_and_a_target_that_appears_in_the_meantime_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "box.h5"
    file = begin(target)
    with pytest.raises(UserError, match=r"another process is writing box.h5; wait, or give another --output"):
        begin(target)
    write_blocks(target)
    target.write_text("another's")
    for refused in (file.finish, lambda: begin(target)):
        with pytest.raises(UserError, match="exists; give --overwrite"):
            refused()
        file.close()
    assert target.read_text() == "another's"
    assert write_all(target, overwrite=True) == 6


def test_a_full_disk_is_one_line_and_the_output_resumes_when_there_is_space(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "box.h5"
    write_part(target, until=4)
    with monkeypatch.context() as patch, closing(begin(target)):
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=rf"cannot write {target}: No space left on device; free some space"):
            write_blocks(target)
    assert not target.exists()
    assert write_all(target) == 4
