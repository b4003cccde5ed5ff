"""Converts an HDF5 volume to two `.npy` files with the axes [X, Y, Z, C], float32 in C order.

    python -m utils.data.convert_to_npy -i train.h5 -d Nbody -l Hydro

writes train_data.npy and train_label.npy next to train.h5. Set train_path_npy_data and train_path_npy_label to them.
The datasets may be [C, X, Y, Z] or [X, Y, Z, C], of any type of number. The memory needed does not depend on the size
of the volume: two buffers of 128 MiB, one chunk that HDF5 unpacks, and the values as stored if they are not float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.cli import Parser
from utils.data.files.blocks import blocks, catch_signals
from utils.data.files.fields import StoredField, checked_field
from utils.data.files.hdf5 import DATASETS, open_file
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress

BUFFER_BYTES = 2**27  # of each buffer: the values as read, and with the channels last
SUFFIXES = ("data", "label")


def convert(
    source: str | os.PathLike[str],
    names: Sequence[str] = DATASETS,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes both `.npy` files and returns their paths; the files appear under their names once both are complete."""
    source, remedy = Path(source), "give another --output_dir"
    with open_file(str(source)) as file:
        fields = [checked_field(file, str(source), name, remedy="choose datasets with -d and -l") for name in names]
        shapes = [field.shape for field in fields]
        if shapes[0][1:] != shapes[1][1:]:
            raise UserError(
                f"{source}: {names[0]} is {shapes[0]}, {names[1]} is {shapes[1]}; their grids must be equal"
            )
        directory = source.parent if output_dir is None else Path(output_dir)
        targets = [directory / f"{source.stem}_{suffix}.npy" for suffix in SUFFIXES]
        for target in targets:
            check_target(target, overwrite, "--output_dir")
        make_output_directory(directory, 4 * sum(math.prod(shape) for shape in shapes), remedy)
        with (
            Progress(f"converting {source.name}", sum(shape[1] * shape[2] for shape in shapes), "rows") as progress,
            os_errors_for_users(f"cannot write to {directory}", remedy),
            atomic_write(targets) as partials,
        ):
            for field, partial in zip(fields, partials, strict=True):
                _write_npy(field, partial, progress)
    return targets


def _write_npy(field: StoredField, path: Path, progress: Progress) -> None:
    channels, *grid = field.shape
    chunk = None if field.chunks is None else field.chunks[1:3]
    with open(path, "xb") as file:  # not mapped: a full disk would end the process without a message
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (*grid, channels)})
        start = file.tell()
        for x, y in blocks(range(grid[0]), grid[1], channels * grid[2], chunk, BUFFER_BYTES // 4):
            with os_errors_for_users(f"cannot read {field.name} of {field.path}", "copy or recreate the file"):
                values = field[:, x, y]
            for plane, rows in enumerate(np.moveaxis(values, 0, -1), x.start):
                file.seek(start + 4 * channels * grid[2] * (plane * grid[1] + y.start))
                file.write(np.ascontiguousarray(rows).data)
                progress.advance(len(rows))
            del values, rows  # before the next block is read


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Invalid input is reported in one line with exit code 2."""
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("-i", "--input", required=True, metavar="FILE", help="HDF5 file")
        parser.add_argument("-d", "--data", default=DATASETS[0], help="dataset of the inputs (%(default)s)")
        parser.add_argument("-l", "--label", default=DATASETS[1], help="dataset of the targets (%(default)s)")
        parser.add_argument("-o", "--output_dir", metavar="DIR", help="directory for the .npy files (that of FILE)")
        parser.add_argument("--overwrite", action="store_true", help="replace existing .npy files")
        options = parser.parse_args(argv)
        names = (options.data, options.label)
        for path in convert(options.input, names, options.output_dir, options.overwrite):
            print(f"wrote {path}: {np.load(path, mmap_mode='r').shape}")


if __name__ == "__main__":
    catch_signals()
    main()
