"""HDF5 datasets written plane by plane; if the process is killed, the same command resumes.

An unfinished file has a hidden name next to its target. HDF5 creates the file and closes it first, so that a killed
process or a full disk cannot damage it; planes are then written straight to the offsets of the data. A journal next to
it holds what the file is made from, and the number of planes that are on disk.
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

        `attributes` are those of each dataset and group by its name, and of the file under "". Groups that only they
        name are created. Raises UserError if the target exists and `overwrite` is false, if another process writes it,
        or if it does not fit on the disk.
        """
        self._target, self._overwrite = target, overwrite
        self._partial = target.with_name(f".{target.name}.partial")
        self._journal_path = target.with_name(f".{target.name}.journal")
        self._os_errors = partial(os_errors_for_users, f"cannot write {target}", "give another --output")
        check_target(target, overwrite)
        size = 0 if self._partial.exists() else sum(4 * int(np.prod(shape)) for shape in datasets.values())
        make_output_directory(target.parent, size)
        busy = f"another process is writing {target.name}; wait, or give another --output"
        with self._os_errors(), ExitStack() as opened:
            self._journal = opened.enter_context(open_locked(self._journal_path, busy))
            self._identity = json.loads(json.dumps(identity))  # as the journal returns it
            self.done, self.changed = self._read_journal()
            if self.done == 0:
                self._create(datasets, attributes)
            with h5py.File(self._partial, "r") as file:
                self._places = {name: (file[name].id.get_offset(), file[name].shape[-3]) for name in datasets}
            self._file = opened.enter_context(self._partial.open("r+b", buffering=0))
            self._opened = opened.pop_all()

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Writes the next planes of all datasets, [C, n, Y, Z] or [n, Y, Z]; they are on disk when it returns."""
        count = next(iter(values.values())).shape[-3]
        with self._os_errors():
            for name, planes in values.items():
                offset, length = self._places[name]
                for channel, part in enumerate(planes.reshape(-1, *planes.shape[-3:])):
                    data = np.ascontiguousarray(part, dtype="<f4")
                    _write_at(self._file, offset + (channel * length + self.done) * data[0].nbytes, data.data.cast("B"))
            os.fsync(self._file.fileno())
            self.done += count
            self._write_journal()

    def finish(self) -> None:
        """Renames the complete file to the target."""
        check_target(self._target, self._overwrite)  # another process may have created it
        with self._os_errors():
            os.replace(self._partial, self._target)
            self._journal_path.unlink()
        self.close()

    def close(self) -> None:
        """Closes the file, which a later process can resume."""
        self._opened.close()

    def _read_journal(self) -> tuple[int, list[str]]:
        """Planes that an earlier process wrote, and the keys of `identity` that have changed since."""
        try:
            record = json.loads(self._journal.read())
        except ValueError:  # empty, because it is new
            return 0, []
        earlier = record["identity"]
        changed = [key for key in {**earlier, **self._identity} if earlier.get(key) != self._identity.get(key)]
        return 0 if changed or not self._partial.exists() else record["done"], changed

    def _write_journal(self) -> None:
        record = json.dumps({"identity": self._identity, "done": self.done})
        # Never shorter than before: `done` only grows, and JSON ignores spaces at the end.
        size = os.fstat(self._journal.fileno()).st_size
        _write_at(self._journal, 0, memoryview(record.ljust(size).encode()))
        os.fsync(self._journal.fileno())

    def _create(self, datasets: Mapping[str, tuple[int, ...]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
        self._journal.truncate(0)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(self._partial, "w") as file:
            for name, shape in datasets.items():
                file.create_dataset(name, shape, "<f4", dcpl=layout)
            for name, values in attributes.items():
                place = name or "/"
                (file[place] if place in file else file.create_group(place)).attrs.update(values)
        self._write_journal()


def _write_at(file: IO[bytes], offset: int, data: memoryview) -> None:
    """Writes all data at an offset; the system writes at most 2 GiB at once."""
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written
