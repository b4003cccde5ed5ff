"""Files that become shorter while they are read are reported in one line."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from utils.data.files import size_check
from utils.data.files.size_check import SizeCheck
from utils.errors import LocalError

SIZE = 2**24


def descriptors(path: Path) -> int:
    """The number of open descriptors of this file; a garbage collection may close others at any time."""
    wanted, count = os.stat(path), 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            count += os.path.samestat(os.fstat(int(name)), wanted)
    return count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train.h5"
    path.write_bytes(b"\1" * SIZE)
    return path


def test_a_shorter_file_is_reported_with_both_sizes_and_a_remedy(path: Path, tmp_path: Path) -> None:
    """The file is found although it was renamed; after `close` nothing is open, and checks pass."""
    (tmp_path / "valid.h5").touch()
    sizes = SizeCheck([tmp_path / "valid.h5", path])
    sizes.check()
    path.rename(tmp_path / "old.h5")
    assert descriptors(tmp_path / "old.h5") == 1
    path.write_bytes(b"\1" * SIZE)
    sizes.check()
    os.truncate(tmp_path / "old.h5", SIZE - 1)
    with pytest.raises(LocalError) as caught:
        sizes.check()
    sizes_in_bytes = f"(from {SIZE} to {SIZE - 1} bytes)"
    assert str(caught.value) == f"{path} became shorter while it was being read {sizes_in_bytes}; {size_check.REMEDY}"
    sizes.close()
    sizes.close()
    sizes.check()
    assert descriptors(tmp_path / "old.h5") == 0


def test_a_file_that_is_written_to_grown_replaced_or_unlinked_passes(path: Path, tmp_path: Path) -> None:
    """A mapping refers to the file that was opened, whatever its name refers to later."""
    sizes = SizeCheck([path])
    with open(path, "r+b") as file:
        file.write(b"\2")
        file.truncate(SIZE + 1)
    sizes.check()
    os.chmod(path, 0)
    sizes.check()
    (tmp_path / "new").write_bytes(b"short")
    os.replace(tmp_path / "new", path)
    sizes.check()
    path.unlink()
    sizes.check()
    sizes.close()


def test_unreachable_and_missing_files_are_reported(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalError, match=r"^cannot read .+none\.h5: No such file or directory$"):
        SizeCheck([path, tmp_path / "none.h5"])
    assert descriptors(path) == 0
    sizes = SizeCheck([path])

    def stale(_: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fstat", stale)
    with pytest.raises(LocalError, match=r"can no longer be read: Stale file handle; check its file system"):
        sizes.check()
    monkeypatch.undo()
    sizes.close()
