"""HDF5 datasets written plane by plane; if the process is killed, the same command resumes.

An unfinished file has a hidden name next to its target. HDF5 creates the file and closes it first, so that a killed
process cannot damage it; planes are then written straight to the offsets of the data. The first line of a journal holds
what the file is made from, each later line the number of planes on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from utils.distributed.locks import open_locked
from utils.errors import os_errors_for_users
from utils.files import check_target, make_output_directory


class ResumableHDF5Writer:
    """Writes float32 datasets [C, X, Y, Z] or [X, Y, Z] of one file; planes along x are written in order.

    `done` is the number of planes on disk. `changed` lists the keys of `identity` for which an unfinished file is
    replaced.
    """

    def __init__(
        self,
        target: Path,
        datasets: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, Mapping[str, Any]],
        identity: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        """Resumes an unfinished file with the same `identity` (JSON values), or starts a new one.

        `attributes` are those of `create_contiguous`. Raises UserError if the target exists and `overwrite` is false,
        if another process writes it, or if it does not fit on the disk.
        """
        self._target, self._datasets, self._overwrite = target, datasets, overwrite
        self._partial = target.with_name(f".{target.name}.partial")
        self._journal_path = target.with_name(f".{target.name}.journal")
        self._identity = json.loads(json.dumps(identity))  # as the journal returns it
        self._os_errors = partial(os_errors_for_users, f"cannot write {target}", "give another --output")
        check_target(target, overwrite)
        make_output_directory(target.parent, size=0)
        busy = f"another process is writing {target.name}; wait, or give another --output"
        with self._os_errors():
            self._files = ExitStack()
            self._journal = self._files.enter_context(open_locked(self._journal_path, busy))
            self.done, self.changed = self._read_journal()
            try:
                if self.done == 0:
                    self._create(attributes)
                with h5py.File(self._partial, "r") as file:
                    self._offsets = {name: file[name].id.get_offset() for name in datasets}
                self._file = self._files.enter_context(self._partial.open("r+b", buffering=0))
            except BaseException:
                self.close() if self.done else self.discard()
                raise

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Writes the next planes of all datasets, [C, n, Y, Z] or [n, Y, Z]; they are on disk when it returns."""
        count = next(iter(values.values())).shape[-3]
        with self._os_errors():
            for name, planes in values.items():
                channels = planes.reshape(-1, *planes.shape[-3:])
                for channel, part in enumerate(np.ascontiguousarray(channels, dtype="<f4")):
                    plane = channel * self._datasets[name][-3] + self.done
                    write_at(self._file, self._offsets[name] + plane * part[0].nbytes, memoryview(part).cast("B"))
            os.fsync(self._file.fileno())
            self._append_to_journal(str(self.done + count))
        self.done += count

    def finish(self) -> None:
        """Renames the complete file to the target."""
        check_target(self._target, self._overwrite)  # another process may have created it
        with self._os_errors():
            os.replace(self._partial, self._target)
            self._journal_path.unlink(missing_ok=True)
        self.close()

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._partial.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Closes the file, which a later process can resume."""
        self._files.close()

    def _read_journal(self) -> tuple[int, list[str]]:
        """Planes that an earlier process wrote, and the keys of `identity` that have changed since."""
        try:
            content = self._journal.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._journal.truncate(len(complete))  # a full disk may have left half a line
            header, *counts = complete.splitlines()
            record = json.loads(header)
            earlier, size = record["identity"], self._partial.stat().st_size
            changed = [key for key in {**earlier, **self._identity} if earlier.get(key) != self._identity.get(key)]
            return int(counts[-1]) if counts and not changed and size == record["bytes"] else 0, changed
        except (FileNotFoundError, ValueError):
            return 0, []

    def _create(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        self._journal.truncate(0)
        self._partial.unlink(missing_ok=True)
        make_output_directory(self._target.parent, sum(4 * int(np.prod(shape)) for shape in self._datasets.values()))
        create_contiguous(self._partial, self._datasets, attributes)
        self._append_to_journal(json.dumps({"identity": self._identity, "bytes": self._partial.stat().st_size}))

    def _append_to_journal(self, line: str) -> None:
        size = os.fstat(self._journal.fileno()).st_size
        write_at(self._journal, size, memoryview(f"{line}\n".encode()))
        os.fsync(self._journal.fileno())


def create_contiguous(
    path: Path, datasets: Mapping[str, tuple[int, ...]], attributes: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Creates an HDF5 file of float32 datasets, allocated but not written; returns the offset of each one's data.

    `attributes` are those of each dataset and group by its name, and of the file under "". Groups that only they name
    are created.
    """
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    with h5py.File(path, "w") as file:
        for name, shape in datasets.items():
            h5py.h5d.create(
                file.id, name.encode(), h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(shape), layout, lcpl=link
            )
        for name, values in attributes.items():
            place = name or "/"
            (file[place] if place in file else file.create_group(place)).attrs.update(values)
        return {name: file[name].id.get_offset() for name in datasets}


def write_at(file: IO[bytes], offset: int, data: memoryview) -> None:
    """Writes all of `data` at an offset, without moving the position of the file."""
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written
