"""The transform of a run is that of its files, unless the config sets it; files that contradict it are refused."""

import math
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from nyx_files import DARK_MATTER, physical_fields, write_nyx
from trainings import YAML
from volume_files import write_volume

from simulation import channels as simulated
from utils import config as configs
from utils.config.sections import TransformConfig
from utils.errors import UserError
from utils.log import warn_once
from utils.steps import build
from utils.volumes.attributes import common_simulation, file_transform
from utils.volumes.hdf5 import FieldReader
from utils.volumes.opened import Volumes

DEFAULT = TransformConfig()
OTHER = {"velocity_scale_km_s": 500.0, "temperature_log10_center": 4.0}
SIMULATED = simulated.ATTRIBUTES


def from_files(*files: dict[str, Any], **keys: float | None) -> TransformConfig:
    config = TransformConfig.model_validate(keys)
    return file_transform(config, {f"{name}.h5": attributes for name, attributes in zip("ab", files, strict=False)})


def test_attributes_win_over_the_defaults_and_must_agree_with_the_keys_that_the_config_sets() -> None:
    """Even with one that is set to its default. None, for unknown channels, agrees with every file."""
    assert from_files(SIMULATED, SIMULATED).model_dump() == {name: SIMULATED[name] for name in DEFAULT.model_dump()}
    assert from_files(OTHER).model_dump() == {**DEFAULT.model_dump(), **OTHER}, "each key on its own"
    assert from_files(OTHER, {"redshift": 2.0}) == from_files({}, OTHER) == from_files(OTHER)
    assert from_files() == from_files({"redshift": 2.0}) == DEFAULT
    assert from_files({}, density_log_scale=10.0) == TransformConfig(density_log_scale=10.0)
    rounded = {**OTHER, "velocity_scale_km_s": 500.0001}
    assert from_files(OTHER, velocity_scale_km_s=500.0001) == TransformConfig(**rounded)
    unknown = from_files(OTHER, velocity_scale_km_s=None)
    assert (unknown.velocity_scale_km_s, unknown.temperature_log10_center) == (None, 4.0)


@pytest.mark.parametrize(
    ("files", "keys", "says"),
    [
        ([OTHER], {"velocity_scale_km_s": 900.0}, r"a\.h5 .* velocity_scale_km_s 500, the config has 900; "),
        ([OTHER, SIMULATED], {}, r"b\.h5 were computed with velocity_scale_km_s 1000, those of a\.h5 with 500; "),
        ([{"velocity_scale_km_s": "fast"}], {}, r"attributes of a\.h5: velocity_scale_km_s .*fast"),
    ],
)
def test_files_that_contradict_the_config_or_each_other_are_refused(files: Any, keys: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_files(*files, **keys)


def test_a_training_on_several_simulations_has_what_they_share() -> None:
    first = {"redshift": 2.0, "cosmology": "planck18", "cosmology_H0": 67.7, "cell size (Mpc/h)": 0.1}
    second = {"redshift": 3.0, "cosmology": "planck18", "cosmology_H0": 67.70001}
    assert common_simulation([first, second]) == {"cosmology": "planck18", "cosmology_H0": 67.7}


def test_a_file_whose_transform_is_assumed_is_a_warning_that_names_both_values(caplog: Any) -> None:
    """Fixed: a checkpoint of other transforms predicted such a file silently."""
    for files, keys, path in (([{}], OTHER, "a.h5"), ([OTHER, {}], {}, "b.h5")):
        caplog.clear()
        warn_once.cache_clear()
        from_files(*files, **keys)
        (warning,) = (record.getMessage() for record in caplog.records)
        assert warning.startswith(f"{path} does not state its transforms")
        assert "velocity_scale_km_s 500 (published data: 900), temperature_log10_center 4 (" in warning
    caplog.clear()
    from_files({}, OTHER | DEFAULT.model_dump())
    from_files({}, density_log_scale=None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("periodic", "False", False),
        ("periodic", np.bytes_("no"), False),
        ("periodic", "0", False),
        ("periodic", [True, True, True], True),
        ("periodic", [True, True, False], "expected true or false"),
        ("periodic", h5py.Empty("b"), "expected true or false"),
        ("box_size_mpc_h", [20.0, 20.0, 20.0], 20.0),
        ("box_size_mpc_h", "20", 20.0),
        ("box_size_mpc_h", "20 Mpc/h", "expected a number"),
        ("box_size_mpc_h", "nan", "make it a length"),
        ("box_size_mpc_h", 0.0, "make it a length"),
        ("box_size_mpc_h", np.inf, "make it a length"),
        ("redshift", [np.bytes_("3"), np.bytes_("2")], r"\['3', '2'\], expected a number"),
        ("redshift", np.bytes_("3.0"), 3.0),
        ("redshift", [], "expected a number"),
        ("cosmology_H0", "67.7", 67.7),
        ("density_log_scale", [14.0, 14.0], 14.0),
        ("density_log_scale", h5py.Empty("f8"), "expected a number"),
    ],
)
def test_attributes_of_other_types_are_read_or_refused(tmp_path: Path, name: str, value: Any, expected: Any) -> None:
    """Fixed: periodic "False" wrapped predictions around a cut box; vectors and texts gave tracebacks."""
    path = write_volume(tmp_path / "a.h5", **{name: value})
    if isinstance(expected, str):
        with pytest.raises(UserError, match=rf"a\.h5: .*{name} is .*{expected}") as caught:
            FieldReader(str(path), "Nbody", 4)
        assert not re.search(r"array\(|np\.|b'|dtype", str(caught.value)), "fixed: Python's notation"
        return
    reader = FieldReader(str(path), "Nbody", 4)
    assert reader.attributes[name] == expected
    assert type(reader.attributes[name]) is type(expected)
    assert reader.periodic is (expected if name == "periodic" else True)


@pytest.mark.parametrize(("place", "name"), [("/", "box_size_mpc_h"), ("domain", "size")])
def test_lengths_of_sides_are_compared_with_the_cells_along_each_axis(tmp_path: Path, place: str, name: str) -> None:
    """Fixed: the longest of the group domain counted for all axes; unequal ones of the attribute were "no number"."""
    for lengths in ([4.0, 8.0, 2.0], [8.0, 8.0, 8.0]):
        with h5py.File(write_volume(tmp_path / "a.h5", (8, 16, 4)), "r+") as file:
            file.require_group(place).attrs[name] = lengths
        if lengths[0] == 4.0:
            assert FieldReader(str(tmp_path / "a.h5"), "Nbody", 4).cell == 0.5
    with pytest.raises(UserError, match=r"a\.h5: cells of 1 × 0\.5 × 2 Mpc/h .* are not cubes; resample"):
        FieldReader(str(tmp_path / "a.h5"), "Nbody", 4)


def test_the_density_term_of_the_loss_has_the_density_log_scale_of_the_files(tmp_path: Path) -> None:
    """Fixed: it had 14, that of the published data set."""
    path = str(write_volume(tmp_path / "a.h5", density_log_scale=10.0))
    config = configs.load(YAML, "test", {"train_path": path, "val_path": path, "lambda_rho": 0.5})
    fields = torch.full((1, 5, 2, 2, 2), 0.1)
    loss = build.loss(Volumes.open(config, "hdf5").config)(fields, 0 * fields)
    assert float(loss) == pytest.approx(0.1 + 0.5 * math.expm1(1.0))


def test_a_training_has_the_transform_of_its_files(tmp_path: Path) -> None:
    """It can be repeated from its own config.yaml, which sets all keys, and continued by the same command."""
    files = {key: str(write_volume(tmp_path / f"{key}.h5", **OTHER)) for key in ("train_path", "val_path")}
    config = configs.load(YAML, "test", files)
    transformed = Volumes.open(config, "hdf5").config
    assert transformed == config.model_copy(update={"transform": TransformConfig(**OTHER)})
    (tmp_path / "config.yaml").write_text(configs.to_yaml(transformed, "test"))
    repeated = configs.load(str(tmp_path / "config.yaml"), "test")
    assert configs.run_changes(Volumes.open(repeated, "hdf5").config, transformed) == []
    elsewhere = configs.load(YAML, "test", {"train_path": "/nowhere.h5", "val_path": "/nowhere.h5"})
    assert Volumes.open(elsewhere, "hdf5").config == elsewhere, "a loader of .npy files needs no HDF5 files"


def test_groups_of_nyx_stand_in_for_attributes_of_a_volume(tmp_path: Path) -> None:
    """Other programs write channels next to these groups, attributes as arrays of one element, and texts as bytes."""
    shape = (12, 6, 8)
    path = write_nyx(tmp_path / "normalized.h5", {DARK_MATTER: physical_fields(shape)[DARK_MATTER]})
    with h5py.File(path, "r+") as file:
        file["Nbody"] = np.zeros((4, *shape), np.float32)
        file.attrs["redshift"] = np.array([2.0], np.float32)
        file.attrs["cosmology"] = np.bytes_("planck18")
    reader = FieldReader(str(path), "Nbody", 4)
    stated = [reader.simulation[name] for name in ("cosmology_H0", "redshift", "cosmology")]
    assert (reader.cell, stated) == (0.5, [67.5, 2.0, "planck18"])
