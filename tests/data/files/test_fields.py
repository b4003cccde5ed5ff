"""Datasets of other types, orders of axes and names: every reader gets the same float32 values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from volume_files import write_volume

from utils.config import Config, load
from utils.config.sections import TransformConfig
from utils.data import get_loader
from utils.data.convert_to_npy import convert
from utils.data.files.fields import as_float32, checked_field
from utils.data.files.hdf5 import FieldReader, open_volume
from utils.data.volumes import conversions, open_split
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

TOP = Path(__file__).parents[3]
ALONE = World(Launch("test"), torch.device("cpu"))
NAMES = ("fields/dark", "gas")


def store(path: Path, source: Path, dtype: str, channels_last: bool, **storage: Any) -> Path:
    """Writes the fields of `source` as `dtype`; integers get its values in hundredths."""
    with h5py.File(source) as old, h5py.File(path, "w") as new:
        for name, field in zip(NAMES, (old["Nbody"][:], old["Hydro"][:]), strict=True):
            values = (100 * field if np.dtype(dtype).kind in "iu" else field).astype(dtype)
            if channels_last:
                values = np.moveaxis(values, 0, -1)
            new.create_dataset(name, data=values, **storage)
    return path


def expected(path: Path, channels_last: bool) -> list[np.ndarray]:
    with h5py.File(path) as file:
        fields = [file[name][:].astype("f4") for name in NAMES]
    return [np.moveaxis(field, -1, 0) if channels_last else field for field in fields]


def batches(config: Config) -> list[torch.Tensor]:
    loaders = get_loader(config.data_loader_config).build(config.for_world(1), ALONE)
    with loaders:
        found: list[torch.Tensor] = []
        for loader in (loaders.train, loaders.valid):
            with closing(loader.epoch(0)) as epoch:
                found += [part.clone() for batch in itertools.islice(epoch, 2) for part in batch]
        return found


def config_for(train: Path, loader: str, **changed: Any) -> Config:
    paths = {key: str(train) for key in ("train_path", "val_path")}
    for key in paths:
        paths = paths | {
            f"{key}_npy_{kind}": str(train.with_name(f"{train.stem}_{kind}.npy")) for kind in ("data", "label")
        }
    return load(str(TOP / "config" / "UNet.yaml"), "test", {**paths, "data_loader_config": loader, **changed})


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        ("<f8", {}),
        (">f8", {}),
        ("<f2", {}),
        (">f4", {}),
        ("<f4", {}),
        ("<i2", {}),
        ("u1", {}),
        ("<f8", {"chunks": True}),
    ],
)
def test_all_loaders_and_readers_get_the_same_values_of_any_stored_type_and_order(
    tmp_path: Path, dtype: str, storage: dict[str, Any], channels_last: bool
) -> None:
    """They are those of the same volume as float32 with the channels first; unsigned numbers are negated as floats."""
    stored = store(tmp_path / "stored.h5", write_volume(tmp_path / "box.h5"), dtype, channels_last, **storage)
    fields = expected(stored, channels_last)
    plain = tmp_path / "plain.h5"
    with h5py.File(plain, "w") as file:
        for name, field in zip(("Nbody", "Hydro"), fields, strict=True):
            file[name] = field
    wanted = batches(config_for(plain, "lowmem"))
    assert any(bool((part < 0).any()) for part in wanted)
    names = list(NAMES)
    convert(stored, NAMES)
    convert(plain)
    for kind in ("data", "label"):
        assert (tmp_path / f"stored_{kind}.npy").read_bytes() == (tmp_path / f"plain_{kind}.npy").read_bytes()
    for loader in ("lowmem", "inmem", "auto"):
        found = batches(config_for(stored, loader, dataset_names=names))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), loader
    with closing(FieldReader(str(stored), NAMES[0], 4, TransformConfig())) as reader:
        np.testing.assert_array_equal(reader.planes(3, 7), fields[0][:, 3:7])
        assert (reader.conversion == "") == (dtype == "<f4" and not channels_last)
    (volume,) = open_split(config_for(stored, "lowmem", dataset_names=names), "train")
    assert bool(volume.conversion) == bool(reader.conversion)
    for number, channel, start, values in volume.slabs():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, fields[number][channel, start : start + len(values)])


def test_the_log_names_what_is_converted(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", write_volume(tmp_path / "box.h5"), ">f8", True)
    (line,) = conversions([open_volume(path, (4, 5), names=NAMES)])
    assert line.startswith(f"{path}: fields/dark is big-endian float64 with the channels last and gas is big-endian ")
    assert ": converted each time" in line


@pytest.mark.parametrize(
    ("shape", "channels", "stated"),
    [
        ((8, 6, 6, 6), None, (8, 6, 6, 6)),  # a cube
        ((4, 6, 8, 5), 4, (4, 6, 8, 5)),
        ((4, 6, 8, 5), 5, (5, 4, 6, 8)),
        ((4, 6, 8, 4), 4, (4, 6, 8, 4)),  # both fit
        ((4, 6, 8, 5), None, (4, 6, 8, 5)),  # the shorter axis
        ((7, 6, 8, 5), None, (5, 7, 6, 8)),
    ],
)
def test_the_order_of_axes_follows_from_the_shape(
    tmp_path: Path, shape: tuple[int, ...], channels: int | None, stated: tuple[int, ...]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.zeros(shape, np.float32)
        assert checked_field(file, "a.h5", "a", channels).shape == stated


def test_types_of_hdf5_that_numpy_lacks_are_converted_by_hdf5(tmp_path: Path) -> None:
    """A mapping would read the bits of a 24-bit integer, whose sign is not in the last of 32, as another number."""
    values = np.arange(-500, 500).reshape(4, 250, 1, 1)
    kind = h5py.h5t.NATIVE_INT32.copy()
    kind.set_precision(24)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = h5py.h5d.create(file.id, b"a", kind, h5py.h5s.create_simple(values.shape))
        h5py.Dataset(dataset)[...] = values
    with h5py.File(tmp_path / "a.h5") as file:
        field = checked_field(file, "a.h5", "a", 4).mapped()
        np.testing.assert_array_equal(field[:, :, :, :], values.astype("f4"))


def test_values_beyond_float32_become_infinite_without_a_warning() -> None:
    np.testing.assert_array_equal(as_float32(np.array([1e300, -1e300, 0.5])), np.array([np.inf, -np.inf, 0.5], "f4"))


def test_datasets_that_are_no_numbers_or_were_never_written_are_refused(
    tmp_path: Path, volume_file: Callable[..., Path]
) -> None:
    path = volume_file(tmp_path / "a.h5")
    for change, match in (
        ({"dtype": "c8"}, "Hydro is of type complex64, expected real numbers; write it as float32$"),
        ({"dtype": "S4"}, "expected real numbers"),
        ({"dtype": "f4"}, "Hydro was created but never written; write its values$"),
        ({"dtype": "f4", "chunks": (1, 8, 8, 8)}, "never written"),
        ({"dtype": "f4", "fillvalue": -1.0}, "never written"),
    ):
        with h5py.File(path, "r+") as file:
            del file["Hydro"]
            file.create_dataset("Hydro", (5, 16, 16, 16), **change)
        with pytest.raises(UserError, match=match):
            open_volume(path, (4, 5))
