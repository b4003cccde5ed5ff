"""Converts an HDF5 volume to two `.npy` files with the axes [X, Y, Z, C], float32 in C order.

    python -m utils.convert_to_npy -i train.h5 -d Nbody -l Hydro

writes train_data.npy and train_label.npy next to train.h5. Set train_path_npy_data and train_path_npy_label to them.
The datasets may be [C, X, Y, Z] or [X, Y, Z, C], of any type of number. The memory needed does not depend on the size
of the volume: two buffers of 128 MiB, one chunk that HDF5 unpacks, and the values as stored if they are not float32.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if not __package__:  # run as a file: Python searches that file's directory for modules, not its parent
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from utils.cli import Parser
from utils.data.files.fields import Remedies, StoredField, checked_field
from utils.data.files.hdf5 import DATASETS, open_file
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress

BUFFER_BYTES = 2**27  # of each buffer: the values as read, and with the channels last
SUFFIXES = ("data", "label")
REMEDY = "give another --output_dir"


def convert(
    source: str | os.PathLike[str],
    names: Sequence[str] = DATASETS,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    signals: Sequence[int] = (),
) -> list[Path]:
    """Writes both `.npy` files and returns their paths; the files appear under their names once both are complete.

    Ends with SystemExit, and leaves no file, as soon as `signals` contains the number of a signal.
    """
    source = Path(source)
    with open_file(str(source)) as file:
        remedies = Remedies("choose them with -d and -l")
        fields = [checked_field(file, str(source), name, remedies=remedies) for name in names]
        shapes = [field.shape for field in fields]
        if shapes[0][1:] != shapes[1][1:]:
            raise UserError(
                f"{source}: {names[0]} is {shapes[0]}, {names[1]} is {shapes[1]}; their grids must be equal"
            )
        directory = source.parent if output_dir is None else Path(output_dir)
        targets = [directory / f"{source.stem}_{suffix}.npy" for suffix in SUFFIXES]
        for target in targets:
            check_target(target, overwrite, "--output_dir")
        make_output_directory(directory, 4 * sum(math.prod(shape) for shape in shapes), REMEDY)
        total = sum(shape[1] * shape[2] for shape in shapes)
        with (
            Progress(f"converting {source.name}", total, "rows") as progress,
            os_errors_for_users(f"cannot write to {directory}", REMEDY),
            atomic_write(targets) as partials,
        ):
            for field, partial in zip(fields, partials, strict=True):
                _write_npy(field, partial, progress, signals)
    return targets


def _write_npy(field: StoredField, path: Path, progress: Progress, signals: Sequence[int]) -> None:
    channels, *grid = field.shape
    size_x, size_y = _tile_shape(field)
    with open(path, "xb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (*grid, channels)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for x, y in itertools.product(range(0, grid[0], size_x), range(0, grid[1], size_y)):
            with os_errors_for_users(f"cannot read {field.name} of {field.path}", "copy or recreate the file"):
                values = field[:, x : x + size_x, y : y + size_y]
            for plane, rows in enumerate(np.moveaxis(values, 0, -1), x):
                file.seek(start + 4 * channels * grid[2] * (plane * grid[1] + y))
                file.write(np.ascontiguousarray(rows).data)
                progress.advance(len(rows))
            del values, rows  # before the next tile is read
            if signals:
                raise SystemExit(128 + signals[0])  # the exit code that shells report


def _tile_shape(field: StoredField) -> tuple[int, int]:
    """Cells along x and y to read at once, with all channels and z.

    Whole chunks, if they fit in the buffer: a chunk that is read in two parts is unpacked twice.
    """
    channels, side_x, side_y, side_z = field.shape
    chunk_x, chunk_y = field.chunks[1:3] if field.chunks is not None else (1, 1)
    rows = max(1, BUFFER_BYTES // (4 * channels * side_z))
    size_x = min(chunk_x, side_x, rows)
    size_y = _multiple(rows // size_x, chunk_y)
    if size_y < side_y:
        return size_x, size_y
    return min(_multiple(rows // side_y, chunk_x), side_x), side_y


def _multiple(number: int, unit: int) -> int:
    """The largest multiple of `unit` up to `number`, or `number` if it is smaller than `unit`."""
    return number // unit * unit or number


def main(argv: Sequence[str] | None = None, signals: Sequence[int] = ()) -> None:
    """Runs the command; bad input ends with one line and exit code 2."""
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("-i", "--input", required=True, metavar="FILE", help="HDF5 file")
        parser.add_argument("-d", "--data", default=DATASETS[0], help="dataset of the inputs (%(default)s)")
        parser.add_argument("-l", "--label", default=DATASETS[1], help="dataset of the targets (%(default)s)")
        parser.add_argument("-o", "--output_dir", metavar="DIR", help="directory for the .npy files (that of FILE)")
        parser.add_argument("--overwrite", action="store_true", help="replace existing .npy files")
        options = parser.parse_args(argv)
        names = (options.data, options.label)
        for path in convert(options.input, names, options.output_dir, options.overwrite, signals):
            print(f"wrote {path}: {np.load(path, mmap_mode='r').shape}")


if __name__ == "__main__":
    # The handlers do not raise: an exception in a callback, which h5py runs at the end of each read, would be lost.
    received: list[int] = []
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, _: received.append(number))
    main(signals=received)
