"""Converts an HDF5 volume to two `.npy` files: [C, L, L, L] becomes [L, L, L, C], float32 in C order.

    python -m utils.convert_to_npy -i train.h5 -d Nbody -l Hydro

writes train_data.npy and train_label.npy next to train.h5. Set train_path_npy_data and train_path_npy_label to them.
The buffers are 256 MiB for a volume of any size; HDF5 needs memory for one unpacked chunk in addition.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import h5py
import numpy as np

if not __package__:  # run as a file: Python searches that file's directory for modules, not its parent
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from utils.data.files.hdf5 import DATASETS, checked_dataset, open_file
from utils.errors import UserError, one_line_errors, os_errors_for_users, os_reason
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress

BUFFER_BYTES = 2**27  # of each of two buffers: the values as read, and with the channels last
SUFFIXES = ("data", "label")
REMEDY = "give another --output_dir"


def convert(
    source: str | os.PathLike[str],
    names: tuple[str, str] = DATASETS,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
    check: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Writes both `.npy` files and returns their paths; the files appear under their names once both are complete.

    `check` is called after each tile; an exception from it ends the conversion, and no file is left.
    """
    source = Path(source)
    with open_file(str(source)) as file:
        datasets = [checked_dataset(file, str(source), name) for name in names]
        shapes = [dataset.shape for dataset in datasets]
        if shapes[0][1:] != shapes[1][1:]:
            raise UserError(
                f"{source}: {names[0]} is {shapes[0]}, {names[1]} is {shapes[1]}; their grids must be equal"
            )
        directory = source.parent if output_dir is None else Path(output_dir)
        targets = [directory / f"{source.stem}_{suffix}.npy" for suffix in SUFFIXES]
        for target in targets:
            check_target(target, overwrite, "--output_dir")
        make_output_directory(directory, sum(dataset.nbytes for dataset in datasets), REMEDY)
        tiles = [tile_shape(dataset.shape, dataset.chunks, buffer_bytes) for dataset in datasets]
        total = sum(len(_tiles(dataset.shape[1], *tile)) for dataset, tile in zip(datasets, tiles, strict=True))
        with (
            Progress(f"converting {source.name}", total, "slabs") as progress,
            os_errors_for_users(f"cannot write to {directory}", REMEDY),
            atomic_write(targets) as partials,
        ):
            for dataset, tile, partial in zip(datasets, tiles, partials, strict=True):
                for _ in _write_npy(dataset, tile, partial):
                    progress.advance()
                    check()
                check()  # a signal may have arrived during the last write
    return targets


def tile_shape(shape: Sequence[int], chunks: Sequence[int] | None, buffer_bytes: int) -> tuple[int, int]:
    """Numbers of x and y to read at once, over all channels and z, that fit in the buffer.

    They are multiples of the chunk size if possible, because a chunk that is read in two parts is unpacked twice.
    """
    channels, box = shape[0], shape[1]
    chunk_x, chunk_y = chunks[1:3] if chunks is not None else (1, 1)
    rows = max(1, buffer_bytes // (4 * channels * box))
    x = min(chunk_x, box, rows)
    y = _whole_multiple(rows // x, chunk_y)
    if y < box:
        return x, y
    return min(_whole_multiple(rows // box, chunk_x), box), box


def _whole_multiple(number: int, unit: int) -> int:
    """The largest multiple of `unit` up to `number`, or `number` if that is smaller than `unit`."""
    return number // unit * unit or number


def _tiles(box: int, step_x: int, step_y: int) -> list[tuple[int, int]]:
    return [(x, y) for x in range(0, box, step_x) for y in range(0, box, step_y)]


def _write_npy(dataset: h5py.Dataset, tile: tuple[int, int], path: Path) -> Iterator[None]:
    """Writes one `.npy` file; yields after each tile."""
    channels, box = dataset.shape[:2]
    row = 4 * channels * box  # bytes of one x and y, with all z and channels
    read, transposed = (np.empty(tile[0] * tile[1] * row // 4, dtype="<f4") for _ in range(2))
    with open(path, "xb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (box, box, box, channels)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for x, y in _tiles(box, *tile):
            size_x, size_y = min(tile[0], box - x), min(tile[1], box - y)
            count = channels * size_x * size_y * box
            planes = transposed[:count].reshape(size_x, size_y, box, channels)
            block = read[:count].reshape(channels, size_x, size_y, box)
            _read(dataset, (slice(None), slice(x, x + size_x), slice(y, y + size_y)), block)
            np.copyto(planes, np.moveaxis(block, 0, -1))
            for plane in range(size_x):
                _write_at(file, start + ((x + plane) * box + y) * row, planes[plane])
            yield


def _read(dataset: h5py.Dataset, selection: tuple[slice, ...], out: np.ndarray) -> None:
    try:
        dataset.read_direct(out, selection)
    except OSError as error:
        raise UserError(
            f"cannot read {dataset.name} of {dataset.file.filename}: {os_reason(error)}; copy or recreate the file"
        ) from error


def _write_at(file: BinaryIO, offset: int, values: np.ndarray) -> None:
    file.seek(offset)
    file.write(values.data)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m utils.convert_to_npy --help")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m utils.convert_to_npy",
        description="Converts an HDF5 volume to .npy files [L, L, L, C]: STEM_data.npy and STEM_label.npy.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="HDF5 file")
    parser.add_argument("-d", "--data", default=DATASETS[0], help="dataset of the inputs (%(default)s)")
    parser.add_argument("-l", "--label", default=DATASETS[1], help="dataset of the targets (%(default)s)")
    parser.add_argument("-o", "--output_dir", metavar="DIR", help="directory for the .npy files (that of FILE)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing .npy files")
    return parser.parse_args(argv)


class Cancellation:
    """Makes SIGTERM and Ctrl-C end the block with SystemExit, so that temporary files are removed.

    The exception of a signal is lost if it is raised in a callback, which h5py runs at the end of each read. So the
    signal is stored, and `check` raises again.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._received = 0

    def __enter__(self) -> Cancellation:
        self._handlers = [signal.signal(number, self._receive) for number in self.SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self.SIGNALS, self._handlers, strict=True):
            signal.signal(number, handler)

    def check(self) -> None:
        if self._received:
            raise SystemExit(128 + self._received)  # the exit code that shells report

    def _receive(self, number: int, frame: object) -> None:
        self._received = number
        self.check()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; bad input ends with one line and exit code 2."""
    with one_line_errors(), Cancellation() as cancellation:
        options = parse(argv)
        names = (options.data, options.label)
        for path in convert(options.input, names, options.output_dir, options.overwrite, check=cancellation.check):
            print(f"wrote {path}: {np.load(path, mmap_mode='r').shape}")


if __name__ == "__main__":
    main()
