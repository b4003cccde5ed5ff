"""Where HDF5 stores values: chunks and linked files; values in other places, or that nobody wrote, are refused."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reference_samples import ALONE
from volume_files import write_volume

from utils import config as configs
from utils.data.loaders import get_loader, open_volumes
from utils.errors import UserError
from utils.run.provenance import data_changes, data_record
from utils.volumes.convert_to_npy import convert
from utils.volumes.hdf5 import open_volume

SHAPES = {"Nbody": (4, 16, 16, 16), "Hydro": (5, 16, 16, 16)}


def missing_file_of_a_link(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["Nbody"] = h5py.ExternalLink("source.h5", "/dm")


def virtual_dataset(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        for name, shape in SHAPES.items():
            layout = h5py.VirtualLayout(shape, "f4")
            layout[:] = h5py.VirtualSource("missing.h5", name, shape)
            file.create_virtual_dataset(name, layout, fillvalue=0)


def external_storage(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, shape in SHAPES.items():
            file.create_dataset(name, shape, "f4", external=[(f"{name}.raw", 0, 4 * int(np.prod(shape)))])


def partly_written(path: Path, chunks: Any, planes: int) -> None:
    with h5py.File(path, "w") as file:
        for name, shape in SHAPES.items():
            file.create_dataset(name, shape, "f4", chunks=chunks)[:, :planes] = 0.5


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (missing_file_of_a_link, r"volume\.h5: Nbody is a link to /dm in source\.h5, which is missing; restore it"),
        (virtual_dataset, r"volume\.h5: Nbody refers to values in other files; copy them"),
        (external_storage, r"volume\.h5: Nbody refers to values in other files; copy them"),
        (lambda path: partly_written(path, (1, 4, 16, 16), 8), r"Nbody: 50\.000% of its values were never written"),
        (lambda path: partly_written(path, None, 0), r"Nbody: 100\.000% of its values were never written"),
    ],
)
def test_values_that_nobody_wrote_are_refused(tmp_path: Path, write: Callable[[Path], None], says: str) -> None:
    """Fixed: HDF5 reads them as zeros, and runs and predictions on them ended without a word."""
    write(path := tmp_path / "volume.h5")
    for read in (open_volume, convert):
        with pytest.raises(UserError, match=says):
            read(path)


def test_a_linked_volume_is_not_staged_and_its_sources_are_recorded(tmp_path: Path) -> None:
    """Fixed: the copy had no sources next to it; other sources were not noticed."""
    path = tmp_path / "volume.h5"
    write_volume(tmp_path / "source.h5", seed=1)
    with h5py.File(path, "w") as file:
        for name in SHAPES:
            file[name] = h5py.ExternalLink("source.h5", name)
    keys = {"train_path": str(path), "val_path": str(write_volume(tmp_path / "val.h5"))}
    config = configs.load("config/UNet.yaml", "test", keys | {"use_cache": str(tmp_path / "cache")})
    volumes = open_volumes(config.for_world(1))
    record = data_record(volumes, ALONE)
    assert record.keys() == {"train_path", "train_path: source 0", "val_path"}
    with get_loader("lowmem").build(volumes, ALONE) as loaders:
        assert next(loaders.train.epoch(0)).targets.std() > 0
    assert [file.name.split("-")[0] for file in (tmp_path / "cache").iterdir()] == ["val"]
    os.replace(write_volume(tmp_path / "new.h5", seed=2), tmp_path / "source.h5")
    (change,) = data_changes(record, data_record(open_volumes(config), ALONE))
    assert "source.h5 differs" in change


def test_a_missing_filter_is_named_with_its_plugin(tmp_path: Path) -> None:
    """Fixed: "can't open directory /usr/local/lib/plugin; copy or recreate it"."""
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk(SHAPES["Nbody"])
        layout.set_filter(32099, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple(SHAPES["Nbody"])
        h5py.h5d.create(file.id, b"Nbody", h5py.h5t.IEEE_F32LE, space, layout).write_direct_chunk((0,) * 4, b"x" * 99)
    with pytest.raises(UserError, match=r"Nbody needs the HDF5 filter number 32099; .*hdf5plugin"):
        open_volume(path)


def test_a_locked_file_names_the_lock(tmp_path: Path) -> None:
    """Fixed: "Resource temporarily unavailable; copy or recreate it"."""
    path = write_volume(tmp_path / "a.h5")
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"the program that writes it.*HDF5_USE_FILE_LOCKING=FALSE"):
            open_volume(path)
