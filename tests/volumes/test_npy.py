"""The `.npy` files: equal to the HDF5 fields, written atomically, refused in one line if they do not match."""

import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from log_lines import refusal
from reference_samples import read_fields
from volume_files import SIMULATED, write_volume

from utils import config as configs
from utils.errors import UserError
from utils.volumes import hdf5
from utils.volumes.convert_to_npy import ENDINGS, convert, main, open_npy_volume
from utils.volumes.hdf5 import DATASETS, open_volume
from utils.volumes.opened import Volumes

KEYS = ("train_path_npy_data", "train_path_npy_label")
ZEROS = np.zeros((12, 12, 12, 4), np.float32)


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 5, 4, 7), "compression": "gzip"}])
def test_copies_hold_the_fields_with_channels_last(tmp_path: Path, storage: dict, monkeypatch: Any) -> None:
    """DALI and numpy's mapping expect float32 in C order, [L, L, L, C]."""
    source = write_volume(tmp_path / "train.h5", box=12, **storage)
    for slab_values in (1, 5 * 12 * 12, 10**6):
        monkeypatch.setattr(hdf5, "SLAB_VALUES", slab_values)
        copies = convert(source, overwrite=True)
        assert copies == [tmp_path / "train_data.npy", tmp_path / "train_label.npy"]
        for copy, field in zip(copies, read_fields(source), strict=True):
            values = np.load(copy, mmap_mode="r")
            assert (values.dtype, values.flags.c_contiguous) == (np.dtype("<f4"), True)
            np.testing.assert_array_equal(values, np.moveaxis(field, 0, -1))


def test_faults_end_in_one_line_and_leave_existing_files_alone(tmp_path: Path, capsys: Any) -> None:
    """The second dataset is damaged: the first file is complete by then, and must not appear without the other."""
    names = ("train.h5", "damaged.h5")
    source, damaged = (write_volume(tmp_path / name, chunks=(1, 8, 8, 8), compression="gzip") for name in names)
    with h5py.File(source, "r+") as file:
        file["small"] = np.zeros((5, 8, 8, 8), np.float32)
    with h5py.File(damaged) as file:
        place = file["Hydro"].id.get_chunk_info(7)
    with open(damaged, "r+b") as raw:
        raw.seek(place.byte_offset)
        raw.write(b"\xff" * place.size)
    (tmp_path / "train_data.npy").write_text("earlier")
    before = sorted(os.listdir(tmp_path))
    for flags, says in (
        (["-i", str(tmp_path / "none.h5")], "no such file"),
        (["-i", str(source), "-l", "small"], "grids must be equal"),
        (["-i", str(source)], "train_data.npy exists; give --overwrite"),
        (["-i", str(damaged)], f"cannot read {damaged}"),
    ):
        assert says in refusal(main, flags, capsys)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "train_data.npy").read_text() == "earlier"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot read"),
        (lambda path: np.save(path, ZEROS.astype(">f4")), r"is >f4 .*, expected float32 \(12, 12, 12, 4\) in C order"),
        (lambda path: np.save(path, np.asfortranarray(ZEROS)), "in Fortran order, expected .* in C order"),
        (lambda path: np.save(path, ZEROS), r"does not match .*bad\.h5: other values"),
        (None, r"train_path_npy_data is not set; "),
    ],
)
def test_a_bad_npy_file_is_one_line_that_names_it_and_how_to_create_it(tmp_path: Path, damage: Any, says: str) -> None:
    source = write_volume(tmp_path / "bad.h5", box=12)
    inputs, targets = convert(source)
    if damage:
        damage(inputs)
    paths = (str(inputs) if damage else None, str(targets))
    with pytest.raises(UserError, match=says) as caught:
        open_npy_volume(paths, KEYS, str(source), DATASETS, open_volume(source))
    assert "\n" not in str(caught.value)
    assert str(inputs) in str(caught.value)
    assert f"python -m utils.volumes.convert_to_npy -i {source}" in str(caught.value)


@pytest.mark.parametrize("data", [None, "/nowhere/a_data.npy"])
def test_without_copies_a_missing_source_is_named(data: str | None) -> None:
    """Fixed: the advice was to convert a file that does not exist."""
    config = configs.load("config/UNet.yaml", "test", {"train_path": "/nowhere/a.h5", "train_path_npy_data": data})
    with pytest.raises(UserError, match=r"no such file: /nowhere/a\.h5; simulate one"):
        Volumes.open(config, "npy").split("train", npy=True)


def test_copies_keep_the_channels_without_the_hdf5_file(tmp_path: Path) -> None:
    """Those of simulated volumes have other transforms than published data."""
    source = write_volume(tmp_path / "box.h5", box=12, **SIMULATED)
    expected = open_volume(source).channels
    written = convert(source)
    assert [path.name for path in written] == ["box_data.npy", "box_label.npy", "box_channels.json"]
    keys = dict.fromkeys(("train_path", "val_path"), str(source))
    for part, (name, path) in itertools.product(("train", "val"), zip(ENDINGS, written, strict=False)):
        keys[f"{part}_path_npy_{name}"] = str(path)
    source.unlink()
    config = Volumes.open(configs.validate({**keys, "data_loader_config": "dali-lowmem"}, "c"), "npy").config
    assert (config.channels.inputs, config.channels.targets) == expected
    assert config.channels.inputs[1].scale == SIMULATED["velocity_scale_km_s"]
