"""Converts an HDF5 volume to two `.npy` files with the axes [X, Y, Z, C], float32 in C order.

    python -m utils.volumes.convert_to_npy -i train.h5 -d Nbody -l Hydro

writes train_data.npy and train_label.npy next to train.h5. Set train_path_npy_data and train_path_npy_label to them.
What train.h5 states about its channels is in train_channels.json.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from utils.cli import Parser
from utils.config.channels import SIDES
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory, to_json
from utils.progress import Progress
from utils.volumes.hdf5 import DATASETS, FieldReader, stored_slabs
from utils.volumes.npy import ENDINGS, channels_file


def convert(
    source: str | os.PathLike[str],
    names: Sequence[str] = DATASETS,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes both `.npy` files and returns their paths; the files appear under their names once both are complete."""
    source, remedy = Path(source), "give another --output_dir"
    readers = [FieldReader(str(source), name, None, "choose datasets with -d and -l") for name in names]
    shapes = [reader.values.shape for reader in readers]
    if shapes[0][1:] != shapes[1][1:]:
        raise UserError(f"{source}: {names[0]} is {shapes[0]}, {names[1]} {shapes[1]}; their grids must be equal")
    directory = source.parent if output_dir is None else Path(output_dir)
    targets = [directory / f"{source.stem}_{field}.npy" for field in ENDINGS]
    known = [reader.channels(side) for reader, side in zip(readers, SIDES, strict=True)]
    targets += [channels_file(str(targets[0]))] if all(known) else []
    for target in targets:
        check_target(target, overwrite, "--output_dir")
    make_output_directory(directory, 4 * sum(map(math.prod, shapes)), remedy)
    with (
        Progress(f"converting {source.name}", sum(shape[1] for shape in shapes), "planes") as progress,
        os_errors_for_users(f"cannot write to {directory}", remedy),
        atomic_write(targets) as partials,
    ):
        for reader, partial in zip(readers, partials, strict=False):
            _write_npy(reader, partial, progress)
        if all(known):
            values = {side: [*map(asdict, part or ())] for side, part in zip(SIDES, known, strict=True)}
            partials[-1].write_text(to_json(values), encoding="utf-8")
    return targets


def _write_npy(reader: FieldReader, path: Path, progress: Progress) -> None:
    channels, *grid = reader.values.shape
    with path.open("wb") as file:  # not mapped: a full disk would end the process without a message
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (*grid, channels)})
        for _, values in stored_slabs(reader.values, reader.path):
            file.write(np.ascontiguousarray(np.moveaxis(values, 0, -1)).data)
            progress.advance(values.shape[1])


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("-i", "--input", "--input_file", required=True, metavar="FILE", help="HDF5 file")
        data, label = (f"dataset of the {values} (%(default)s)" for values in ("inputs", "targets"))
        parser.add_argument("-d", "--data", "--data_field", default=DATASETS[0], help=data)
        parser.add_argument("-l", "--label", "--label_field", default=DATASETS[1], help=label)
        parser.add_argument("-o", "--output_dir", metavar="DIR", help="directory for the .npy files (that of FILE)")
        parser.add_argument("--overwrite", action="store_true", help="replace existing .npy files")
        options = parser.parse_args(argv)
        for path in convert(options.input, (options.data, options.label), options.output_dir, options.overwrite):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
