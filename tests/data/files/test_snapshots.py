"""Blocks in which the importer reads fields, and inputs that it once misread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from nyx_files import DARK_MATTER, GAS, physical_fields, write_nyx

from utils.config.sections import TransformConfig
from utils.data.files import snapshots
from utils.data.files.hdf5 import FieldReader
from utils.data.files.snapshots import GridField
from utils.data.import_volume import main

SHAPE = (12, 6, 8)
FIELDS = physical_fields(SHAPE)


def imported(source: Path, *flags: str) -> dict[str, np.ndarray]:
    """The datasets of the file that the importer writes, or of both in one dict with --split."""
    output = source.parent / "out" / "box.h5"
    main([f"--input={source}", f"--output={output}", "--overwrite", *flags])
    found = {}
    for path in output.parent.iterdir():
        with h5py.File(path) as file:
            found |= {f"{path.name}/{name}": file[name][...] for name in file}
    return found


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refuse(input, *flags, says=…): one line and exit code 2."""

    def go(source: Path, *flags: str, says: str) -> None:
        with pytest.raises(SystemExit) as stop:
            imported(source, *flags)
        err = capsys.readouterr().err
        assert (stop.value.code, err.count("\n")) == (2, 1), err
        assert says in err

    return go


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, (2, 3), (64, 4), (64, 5)])
def test_blocks_hold_whole_chunks_and_few_values(monkeypatch: pytest.MonkeyPatch, chunk: Any) -> None:
    """Also if chunks are as deep as the box. Fixed: a block then was the whole box."""
    shape = (64, 32, 16)
    monkeypatch.setattr(snapshots, "BLOCK_VALUES", 64 * 8 * 16)
    field, read = GridField("f", "density", shape, lambda block: np.ones(shape)[block], chunk=chunk), np.zeros(shape)
    for block in field.blocks(range(5, 60)):
        assert field.values(block).size <= snapshots.BLOCK_VALUES
        read[block] += 1
        for part, cells in zip(block, chunk or (1, 32), strict=True):
            assert part.start % cells == 0 or part.start == 5
            assert part.stop % cells == 0 or part.stop in (60, 32)
    assert (read[5:60] == 1).all()
    assert read.sum() == read[5:60].size


def test_blocks_that_divide_planes_give_the_same_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    source, flags = write_nyx(tmp_path / "snapshot.h5", FIELDS, chunks=(12, 2, 8)), ("--split=0.3", "--gap=1")
    expected = imported(source, *flags)
    monkeypatch.setattr(snapshots, "BLOCK_VALUES", 1)
    found = imported(source, *flags)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    with h5py.File(source, "r+") as file:
        file["native_fields/temperature"][3, 5, 7] = -1
    refuse(source, says="native_fields/temperature[3, 5, 7] is -1, not above zero")


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_density_that_float32_cannot_scale_is_refused(tmp_path: Path, refuse: Any) -> None:
    """Fixed: its channels were infinite."""
    source = write_nyx(tmp_path / "snapshot.h5", {DARK_MATTER: 1e-40 * FIELDS[DARK_MATTER].astype("f8")}, dtype="f8")
    refuse(source, "--density_units=other", says="[0, 0, 0] is inf, not finite, as a channel; write it in other units")


def test_attributes_may_be_arrays_of_one_element(tmp_path: Path) -> None:
    """Fixed: such a velocity was refused, and such a density was divided by its mean."""
    source = write_nyx(tmp_path / "snapshot.h5", {**FIELDS, DARK_MATTER: 1.2 * FIELDS[DARK_MATTER]})
    expected = imported(source)
    with h5py.File(source, "r+") as file:
        for dataset in file["native_fields"].values():
            dataset.attrs["units"] = np.array([dataset.attrs["units"]])
    for name, values in imported(source).items():
        np.testing.assert_array_equal(values, expected[name])


def test_a_part_of_a_box_stays_one(tmp_path: Path) -> None:
    """predict.py --format nyx states it. Fixed: the importer wrote that the file is periodic."""
    for written, expected in ((False, False), (True, True), (np.array([0]), False)):
        source = write_nyx(tmp_path / "snapshot.h5", FIELDS)
        with h5py.File(source, "r+") as file:
            file.attrs["periodic"] = written
        imported(source)
        with h5py.File(tmp_path / "out" / "box.h5") as file:
            assert bool(file.attrs["periodic"]) == expected


def test_flags_of_another_format_are_refused(tmp_path: Path, refuse: Any) -> None:
    source = write_nyx(tmp_path / "snapshot.h5", FIELDS)
    for flag, says in (("--index=1", "--index is for npy"), ("--shape=12,6,8", "--shape is for raw")):
        refuse(source, flag, says=f"{says} files, not for nyx; remove it")


def test_a_device_in_place_of_a_file_is_refused(tmp_path: Path, refuse: Any) -> None:
    for name in (DARK_MATTER, *GAS):
        os.symlink("/dev/zero", tmp_path / f"{name}.npy")
    refuse(tmp_path, "--velocity_units=km/s", says="it is not a regular file; replace it with a file")


# --- files of other programs -----------------------------------------------------------------------------------------


def test_groups_of_nyx_stand_in_for_attributes_of_a_volume(tmp_path: Path) -> None:
    """Other programs write channels next to the groups `domain` and `universe`."""
    path = write_nyx(tmp_path / "normalized.h5", {DARK_MATTER: FIELDS[DARK_MATTER]})
    with h5py.File(path, "r+") as file:
        file["Nbody"] = np.zeros((4, *SHAPE), np.float32)
        file.attrs["redshift"] = 2.0
    reader = FieldReader(str(path), "Nbody", 4, TransformConfig())
    assert reader.cell == 0.5
    assert (reader.simulation["cosmology_H0"], reader.simulation["redshift"]) == (67.5, 2.0)
    with h5py.File(path, "r+") as file:
        file["domain"].attrs["shape"] = [24, 6, 8]
    assert FieldReader(str(path), "Nbody", 4, TransformConfig()).cell is None, "of another grid"
