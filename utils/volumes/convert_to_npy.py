"""Converts an HDF5 volume to two `.npy` files with the axes [X, Y, Z, C], float32 in C order.

    python -m utils.volumes.convert_to_npy -i train.h5 -d Nbody -l Hydro

writes train_data.npy and train_label.npy next to train.h5. Set train_path_npy_data and train_path_npy_label to them.
What train.h5 states about its channels is in train_channels.json.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from utils.cli import Parser
from utils.config import validate_section
from utils.config.channels import SIDES
from utils.config.sections import ChannelsConfig
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory, read_json, to_json
from utils.progress import Progress
from utils.volumes.hdf5 import DATASETS, FieldReader, Volume, stored_slabs
from utils.volumes.values import sample

ENDINGS = ("data", "label")  # file names end in _data.npy and _label.npy


def channels_file(data: str) -> Path:
    """The file with the channels of a volume, next to the `.npy` file of its inputs."""
    return Path(f"{data.removesuffix(f'_{ENDINGS[0]}.npy')}_channels.json")


def convert(
    source: str | Path, names: Sequence[str] = DATASETS, output_dir: str | None = None, overwrite: bool = False
) -> list[Path]:
    """Writes both `.npy` files and returns their paths; the files appear under their names once both are complete."""
    source, remedy = Path(source), "give another --output_dir"
    readers = [FieldReader(str(source), name, remedy="choose datasets with -d and -l") for name in names]
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
            channels, *grid = reader.values.shape
            header = {"descr": "<f4", "fortran_order": False, "shape": (*grid, channels)}
            with partial.open("wb") as file:  # not mapped: a full disk would end the process without a message
                np.lib.format.write_array_header_1_0(file, header)
                for _, slab in stored_slabs(reader.values, reader.path):
                    file.write(np.ascontiguousarray(np.moveaxis(slab, 0, -1)).data)
                    progress.advance(slab.shape[1])
        if all(known):
            values = {side: [*map(asdict, part or ())] for side, part in zip(SIDES, known, strict=True)}
            partials[-1].write_text(to_json(values), encoding="utf-8")
    return targets


def open_npy_volume(
    paths: Sequence[str | None], keys: Sequence[str], source: str, names: Sequence[str], volume: Volume | None
) -> Volume:
    """Opens files, by `keys` of the config, made from `names` of `source`; UserError if they do not match `volume`."""
    command = f"python -m utils.volumes.convert_to_npy -i {source} --overwrite"
    if tuple(names) != DATASETS:
        command += f" -d {names[0]} -l {names[1]}"
    files: list[str] = []
    fields: list[np.ndarray] = []  # [C, X, Y, Z]
    grid = volume.shape if volume else None  # that of the inputs is also expected for the targets
    for number, (path, key, field) in enumerate(zip(paths, keys, ENDINGS, strict=True)):
        remedy = f"create {Path(source).with_name(f'{Path(source).stem}_{field}.npy')} with {command}, and set {key}"
        if path is None:
            raise UserError(f"{key} is not set; {remedy}, or use --data_loader_config=lowmem")
        array = _open(path, grid, volume.fields[number].shape[0] if volume else None, remedy)
        grid = grid or array.shape[:-1]
        files.append(path)
        fields.append(np.moveaxis(array, -1, 0))
        if volume is not None:
            samples = sample(path, fields[number]), sample(volume.path, volume.fields[number])
            if not np.array_equal(*samples, equal_nan=True):
                raise UserError(f"{path} does not match {volume.path}: other values; {remedy}")
    opened = Volume(" and ".join(files), fields[0], fields[1], tuple(files))
    if volume is not None:
        return replace(opened, attributes=volume.attributes, channels=volume.channels)
    described = channels_file(files[0])
    values = read_json(described) if described.exists() else {}
    channels = validate_section(ChannelsConfig, values, str(described))
    return replace(opened, channels=(channels.inputs or None, channels.targets or None))


def _open(path: str, grid: tuple[int, ...] | None, channels: int | None, remedy: str) -> np.ndarray:
    """Maps a file with this grid, or with any."""
    if not os.path.isfile(path):
        raise UserError(f"no such file: {path}; {remedy}")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        reason = "it holds Python objects" if "Python objects" in str(error) else " ".join(str(error).split())
        raise UserError(f"cannot read {path}: {reason}; {remedy}") from None
    fits = array.ndim == 4 and array.shape == (*(grid or array.shape[:-1]), channels or array.shape[-1])
    if array.dtype != np.dtype("<f4") or not fits or not array.flags.c_contiguous:
        order = "C" if array.flags.c_contiguous else "Fortran"
        shape = ", ".join(map(str, (*(grid or "XYZ"), channels or "C")))
        found = f"{array.dtype} {array.shape} in {order} order"
        raise UserError(f"{path} is {found}, expected float32 ({shape}) in C order; {remedy}")
    return np.asarray(array)


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors():
        parser = Parser(__doc__)
        parser.prog = "python -m utils.volumes.convert_to_npy"
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
