"""HDF5 datasets written block by block by several processes; if one is killed, the same command resumes.

An unfinished file has a hidden name next to its target. HDF5 creates the file and closes it first, so that a killed
process or a full disk cannot damage it; blocks are then written straight to the offsets of the data. Next to it, a
journal holds what the file is made from, and a record one byte per block, which is 1 once the block is on disk.

Several nodes may write through NFS, whose clients send whole pages of memory if they have read them, and so overwrite
what others have written nearby. Therefore nobody reads the data, which begin on a page of their own; descriptors that
write cannot read; and those of the record send each byte at once (O_DSYNC).
"""

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from utils.errors import os_errors_for_users
from utils.files import check_target, make_output_directory, open_locked, read_json
from utils.volumes.attributes import Attributes, write_attributes

log = logging.getLogger(__name__)

PAGE = 2**16  # bytes; no page of memory is larger
PLACES = "places"  # in the journal: offset and cells of each dataset

Blocks = Sequence[tuple[slice, slice, slice]]  # cells along x, y and z; together all cells, each once
Shapes = Mapping[str, tuple[int, ...]]  # of datasets, by name


def _paths(target: Path) -> list[Path]:
    """The unfinished file, its journal and the record of its blocks."""
    return [target.with_name(f".{target.name}.{kind}") for kind in ("partial", "journal", "blocks")]


class ResumableHDF5File:
    """An unfinished file of float32 datasets [C, X, Y, Z] or [X, Y, Z]; `changed`: what differs from an earlier one."""

    def __init__(
        self,
        target: Path,
        datasets: Shapes,
        attributes: Mapping[str, Attributes],
        identity: Mapping[str, Any],
        blocks: Blocks,
        overwrite: bool = False,
    ) -> None:
        """Resumes a file of this `identity` (JSON) or starts one; UserError if it exists, is busy or does not fit."""
        self._target, self._overwrite = target, overwrite
        self._partial, self._journal_path, self._record = _paths(target)
        self._os_errors = partial(os_errors_for_users, f"cannot write {target}", "give another --output")
        check_target(target, overwrite)
        size = 0 if self._partial.exists() else sum(4 * int(np.prod(shape)) for shape in datasets.values())
        make_output_directory(target.parent, size)
        busy = f"another process is writing {target.name}; wait, or give another --output"
        with self._os_errors(), ExitStack() as opened:
            self._journal = opened.enter_context(open_locked(self._journal_path, busy))
            identity = json.loads(json.dumps(identity))  # as the journal returns it
            resumes, self.changed = self._read_journal(identity)
            if not resumes:
                places = [[[cells.start, cells.stop] for cells in block] for block in blocks]
                self._create(datasets, attributes, {"identity": identity, "blocks": places})
            self._opened = opened.pop_all()

    def finish(self) -> None:
        check_target(self._target, self._overwrite)  # another process may have created it
        with self._os_errors():
            os.replace(self._partial, self._target)
        with suppress(OSError):  # the target is complete
            self._record.unlink()
            self._journal_path.unlink()
        self.close()

    def close(self) -> None:
        """Closes the file, which a later process can resume; without a block it is removed."""
        with suppress(OSError):
            # Once the journal is closed, or removed, another process may have begun a file of the same names.
            is_own = not self._journal.closed and os.path.samestat(
                os.fstat(self._journal.fileno()), self._journal_path.stat()
            )
            if is_own and not any(self._record.read_bytes()[1:]):
                for path in (self._partial, self._record, self._journal_path):
                    path.unlink()
        self._opened.close()

    def _read_journal(self, identity: Mapping[str, Any]) -> tuple[bool, list[str]]:
        """True for a file that can be resumed, and the keys of `identity` that have changed."""
        text = self._journal.read()
        if not text:  # it is new, or its writer was killed before it could be resumed
            return False, []
        try:
            journal = json.loads(text)
            earlier, sizes, _ = dict(journal["identity"]), journal["sizes"], journal[PLACES]
        except (ValueError, TypeError, KeyError):  # of another version, or of another program
            log.warning("Cannot read %s: starting %s from scratch", self._journal_path, self._target.name)
            return False, []
        changed = [key for key in {**earlier, **identity} if earlier.get(key) != identity.get(key)]
        return not changed and sizes == self._sizes(), changed

    def _sizes(self) -> list[int]:
        """Bytes of the unfinished file and of the record, as far as they exist: blocks do not change them."""
        return [path.stat().st_size for path in (self._partial, self._record) if path.exists()]

    def _create(self, datasets: Shapes, attributes: Mapping[str, Attributes], journal: Mapping[str, Any]) -> None:
        self._journal.truncate(0)
        for path in (self._partial, self._record):  # a suspended process may write to the files of an earlier start
            path.unlink(missing_ok=True)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(self._partial, "w", alignment_threshold=PAGE, alignment_interval=PAGE) as file:
            stored = {name: file.create_dataset(name, shape, "<f4", dcpl=layout) for name, shape in datasets.items()}
            places = {name: [dataset.id.get_offset(), dataset.shape[-3:]] for name, dataset in stored.items()}
            write_attributes(file, attributes)
        with self._record.open("wb") as record:
            record.write(bytes(1 + len(journal["blocks"])))
            os.fsync(record.fileno())
        text = json.dumps({**journal, PLACES: places, "sizes": self._sizes()})
        _write_at(self._journal, 0, memoryview(text.encode()))
        os.fsync(self._journal.fileno())


class BlockWriter:
    """Writes the blocks of an unfinished file at their offsets; several processes write at the same time."""

    def __init__(self, target: Path, names: Sequence[str]) -> None:
        """Opens the file that a ResumableHDF5File has created with datasets of these names."""
        self._os_errors = partial(os_errors_for_users, f"cannot write {target}", "give another --output")
        path, journal, self._record_path = _paths(target)
        with self._os_errors(), ExitStack() as opened:
            stated = read_json(journal)
            self._places = {name: stated[PLACES][name] for name in names}
            self.blocks: Blocks = [(slice(*x), slice(*y), slice(*z)) for x, y, z in stated["blocks"]]
            self._file, self._record = (
                opened.enter_context(open(os.open(name, os.O_WRONLY | flag), "wb", buffering=0))
                for name, flag in ((path, 0), (self._record_path, os.O_DSYNC))
            )
            self._opened = opened.pop_all()

    def _recorded(self) -> bytes:
        """The record as it is on the disk: an NFS client looks for other nodes' changes when a file is opened."""
        with self._os_errors():
            return self._record_path.read_bytes()

    @property
    def missing(self) -> list[int]:
        """The numbers of the blocks that are not on disk."""
        return [number for number, is_done in enumerate(self._recorded()[1:]) if not is_done]

    @property
    def stops(self) -> bool:
        """True if a process has requested that all of them stop."""
        return self._recorded()[0] == 1

    @stops.setter
    def stops(self, value: bool) -> None:
        with self._os_errors():
            _write_at(self._record, 0, memoryview(bytes([value])))

    def write(self, number: int, box: tuple[slice, slice, slice], values: Mapping[str, np.ndarray]) -> None:
        """Writes a block of all datasets, [C, x, y, z] or [x, y, z]; it is on disk when this returns."""
        with self._os_errors():
            for name, cells in values.items():
                offset, shape = self._places[name]
                for channel, part in enumerate(cells.reshape(-1, *cells.shape[-3:])):
                    self._write_part(offset + 4 * channel * int(np.prod(shape)), shape, box, part)
            os.fsync(self._file.fileno())
            _write_at(self._record, 1 + number, memoryview(b"\1"))

    def _write_part(self, offset: int, shape: Sequence[int], box: Sequence[slice], part: np.ndarray) -> None:
        """Writes one field of a block, [x, y, z], in pieces that are contiguous in the file."""
        data = np.ascontiguousarray(part, dtype="<f4")
        axes = 2  # of the field's axes, those along which there are several pieces
        while axes and data.shape[axes] == shape[axes]:
            axes -= 1
        pitch = [shape[1] * shape[2], shape[2], 1]  # cells of the file
        first = sum(axis.start * cells for axis, cells in zip(box, pitch, strict=True))
        for place in itertools.product(*map(range, data.shape[:axes])):
            cell = first + sum(number * cells for number, cells in zip(place, pitch, strict=False))
            _write_at(self._file, offset + 4 * cell, data[place].data.cast("B"))

    def close(self) -> None:
        self._opened.close()


def _write_at(file: IO[bytes], offset: int, data: memoryview) -> None:
    """Writes all data at an offset; the system writes at most 2 GiB at once."""
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written
