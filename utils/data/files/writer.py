"""An HDF5 volume written plane by plane, which a later process can go on with, and which is whole or not there.

Until it is whole it lies beside its place under a hidden name. HDF5's own part of the file is written and closed first,
since a process that is killed would leave an open HDF5 file in disorder; the planes then go straight to where the file
says the data lie. A journal beside it tells how many are there, and what of.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from utils.errors import UserError
from utils.files import atomic_write


class ResumableHDF5Writer:
    """Datasets [C, X, Y, Z], float32, of one file; planes along x come in their order."""

    def __init__(
        self,
        target: Path,
        datasets: Mapping[str, tuple[int, int, int, int]],
        attributes: Mapping[str, Mapping[str, Any]],
        made_of: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        """Takes up a file that was begun with the same `made_of` (plain values), or begins it anew.

        `attributes` are of each dataset by its name, those of the file under "". UserError where the target exists and
        is not to be replaced, where another process is at it, or where there is no room for all of it.
        """
        self._target = target
        self._partial = target.with_name(f".{target.name}.partial")
        self._journal = target.with_name(f".{target.name}.journal")
        self._made_of = json.loads(json.dumps(made_of))  # as it is read back
        self._overwrite = overwrite
        self._file: IO[bytes] | None = None
        check_target(target, overwrite)
        with self._one_line():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(target.with_name(f".{target.name}.lock"))
            try:
                self._take_up_or_begin(datasets, attributes)
            except BaseException:
                self.close()
                raise

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """The next planes of all datasets, [C, n, Y, Z] each; they are on the disk when it returns."""
        assert self._file is not None
        count, descriptor = 0, self._file.fileno()
        with self._one_line():
            for name, planes in values.items():
                offset, shape = self._places[name]
                count = planes.shape[1]
                plane_bytes = 4 * shape[2] * shape[3]
                for channel, part in enumerate(planes):
                    data = memoryview(np.ascontiguousarray(part, dtype="<f4").tobytes())
                    place = offset + (channel * shape[1] + self.done) * plane_bytes
                    while data:
                        written = os.pwrite(descriptor, data, place)
                        data, place = data[written:], place + written
            os.fsync(descriptor)
            self._note(self.done + count)
        self.done += count

    def finish(self) -> None:
        """Gives the file its name."""
        check_target(self._target, self._overwrite)  # it may have come meanwhile
        with self._one_line():
            os.replace(self._partial, self._target)
            self._journal.unlink(missing_ok=True)
        self.close()

    def discard(self) -> None:
        """Removes it: what it was made of is not fit to go on with."""
        self._partial.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leaves it to a later process."""
        if self._lock.closed:
            return
        if self._file is not None:
            self._file.close()
        if not self._partial.exists():
            with contextlib.suppress(OSError):
                os.unlink(self._lock.name)  # before it is released: afterwards it may be another's
        self._lock.close()

    def _take_up_or_begin(
        self, datasets: Mapping[str, tuple[int, int, int, int]], attributes: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for stale in self._target.parent.glob(f".{glob.escape(self._journal.name)}.*.partial"):
            stale.unlink()  # of a process that was killed while it wrote the journal
        self.done = self._find()  # planes that are there
        self.changed = self._what_changed() if self.done == 0 else []
        if self.done == 0:
            self._begin(datasets, attributes)
        self._places = self._offsets(datasets)
        self._file = open(self._partial, "r+b", buffering=0)  # noqa: SIM115
        if self.done == 0:
            self._note(0)

    def _find(self) -> int:
        """Planes of a file that was begun, of the same things; 0 where there is none."""
        try:
            journal = json.loads(self._journal.read_text(encoding="utf-8"))
            usable = journal["made_of"] == self._made_of and self._partial.stat().st_size == journal["bytes"]
            return int(journal["planes"]) if usable else 0
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0

    def _what_changed(self) -> list[str]:
        """Of what an unfinished file was made of, for the log."""
        try:
            before = json.loads(self._journal.read_text(encoding="utf-8"))["made_of"]
            return [key for key, value in self._made_of.items() if before.get(key) != value]
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return []

    def _begin(
        self, datasets: Mapping[str, tuple[int, int, int, int]], attributes: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._journal.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)
        size, free = sum(4 * int(np.prod(shape)) for shape in datasets.values()), free_bytes(self._target.parent)
        if free < size:
            raise UserError(
                f"{self._target.parent} has {free / 1e6:,.1f} MB free and the output takes {size / 1e6:,.1f} MB; "
                f"free some space, or give another --output"
            )
        in_place = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        in_place.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        in_place.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(self._partial, "w") as file:
            for name, shape in datasets.items():
                space = h5py.h5s.create_simple(shape)
                h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, in_place)
                file[name].attrs.update(attributes.get(name, {}))
            file.attrs.update(attributes.get("", {}))

    def _offsets(self, datasets: Mapping[str, tuple[int, int, int, int]]) -> dict[str, tuple[int, tuple[int, ...]]]:
        with h5py.File(self._partial, "r") as file:
            places = {name: (file[name].id.get_offset(), file[name].shape) for name in datasets}
        assert all(offset is not None for offset, _ in places.values())
        return places

    def _note(self, planes: int) -> None:
        record = {"planes": planes, "bytes": self._partial.stat().st_size, "made_of": self._made_of}
        with atomic_write([self._journal]) as (partial,):
            partial.write_text(json.dumps(record), encoding="utf-8")

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # HDF5's own text is a paragraph
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space, and the same command goes on" if full else "give another --output"
            raise UserError(f"cannot write {self._target}: {reason}; {remedy}") from error


def free_bytes(directory: Path) -> int:
    """What the disk has left there; a quota may leave less."""
    return shutil.disk_usage(directory).free


def check_target(target: Path, overwrite: bool) -> None:
    """UserError where the target may not be written; writes nothing itself."""
    if target.is_dir():
        raise UserError(f"output {target} is a directory; give the name of a file")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"output {target} exists; give --overwrite to replace it, or another --output")


def _locked(path: Path) -> IO[str]:
    """Keeps a second process from the same output, for as long as the returned file is open."""
    while True:
        file = open(path, "w")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"another process is writing {path.name[1:-5]}; wait for it, or give another --output"
            ) from None
        except OSError:
            return file  # some parallel file systems have no locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # the process that had it has just removed it
