"""The `.npy` files of a volume, [X, Y, Z, C] float32 in C order, from which the loader `dali-lowmem` reads crops."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.config import validate_section
from utils.config.sections import ChannelsConfig
from utils.errors import UserError
from utils.files import read_json
from utils.volumes.hdf5 import DATASETS, Volume
from utils.volumes.values import sample

ENDINGS = ("data", "label")  # file names end in _data.npy and _label.npy, as convert_to_npy.py writes them


def channels_file(data: str) -> Path:
    """The file with the channels of a volume, next to the `.npy` file of its inputs."""
    return Path(f"{data.removesuffix(f'_{ENDINGS[0]}.npy')}_channels.json")


def open_npy_volume(
    paths: tuple[str | None, str | None],
    keys: Sequence[str],
    source: str,
    volume: Volume | None = None,
    names: Sequence[str] = DATASETS,
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
    name, described = " and ".join(files), channels_file(files[0])
    if volume is None:
        values = read_json(described) if described.exists() else {}
        channels = validate_section(ChannelsConfig, values, str(described))
        pair = channels.inputs or None, channels.targets or None
        return Volume(name, fields[0], fields[1], tuple(files), channels=pair)
    return Volume(name, fields[0], fields[1], tuple(files), attributes=volume.attributes, channels=volume.channels)


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
