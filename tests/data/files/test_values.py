"""Checks of values: physical, constant and non-finite ones, from a sample and from the whole volume."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from volume_files import write_volume

from utils.data.files.hdf5 import Volume, open_volume
from utils.data.files.values import check_all, check_distinct, check_samples
from utils.errors import UserError

CHANNELS = (4, 5)


def volume(seed: int) -> Volume:
    rng = np.random.default_rng(seed)
    return Volume(f"{seed}.h5", *(rng.standard_normal((channels, 32, 32, 32), "f4") for channels in CHANNELS))


@pytest.mark.parametrize(
    ("storage", "name", "place", "value"),
    [({}, "Nbody", (0, 0, 0, 0), np.nan), ({"chunks": (1, 4, 4, 4)}, "Hydro", (4, 7, 2, 7), np.inf)],
)
def test_the_first_non_finite_value_is_reported_with_its_place_and_without_a_warning(
    tmp_path: Path, storage: dict, name: str, place: tuple[int, ...], value: float
) -> None:
    path = write_volume(tmp_path / "a.h5", box=8, **storage)
    with h5py.File(path, "r+") as file:
        file[name][place] = value
        file["Hydro"][4, 7, 7, 7] = -np.inf  # infinities of both signs may be summed
        file["Nbody"][3] = np.finfo(np.float32).max  # large finite values pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as caught:
            check_all(open_volume(path, CHANNELS))
    assert str(caught.value).startswith(f"{path}: {name}[{', '.join(map(str, place))}] is {value}; ")


def test_physical_channels_are_refused_unless_they_are_allowed() -> None:
    """Velocities in km/s around zero, temperatures in K; unscaled logarithms and rare high peaks are no such values."""
    for scale, center in ((300.0, 0.0), (1e7, 2e4)):
        fine, bad = volume(1), volume(2)
        bad.targets[3] = center + scale * bad.targets[3]
        with pytest.raises(UserError, match=r"^2\.h5: Hydro\[3\] holds physical values .*docs/data\.md.*: true$"):
            check_samples([fine, bad], allow_physical=False)
        check_samples([fine, bad], allow_physical=True)
    fine.inputs[0] = -70 + fine.inputs[0]  # ln of g/cm³
    fine.targets[4] = 4 + fine.targets[4]  # log10 of K
    fine.targets[0].reshape(-1)[::20] = 1000
    check_samples([fine, volume(2)], allow_physical=False)
    check_all(fine)


def test_a_dataset_with_one_value_everywhere_is_refused() -> None:
    train = volume(1)
    train.targets[...] = -0.25
    for check in (lambda: check_all(train), lambda: check_samples([train, volume(2)], True)):
        with pytest.raises(UserError, match=r"^1\.h5: Hydro is -0\.25 everywhere; write its values, or "):
            check()


def test_a_sample_with_a_non_finite_value_is_refused_before_a_training() -> None:
    """A training run on such a file once removed the earlier run, skipped ten updates and failed."""
    bad = volume(2)
    bad.targets[4, 5:] = -np.inf
    with pytest.raises(UserError) as caught:
        check_samples([volume(1), bad], True)
    found = re.fullmatch(r"2\.h5: Hydro\[(\d), (\d+), (\d+), (\d+)\] is -inf; correct or .*", str(caught.value))
    assert found is not None
    assert bad.targets[tuple(map(int, found.groups()))] == -np.inf


def test_a_volume_for_training_and_validation_gets_a_warning(tmp_path: Path) -> None:
    """A copy under another name, too; a volume that differs only in its last channel is another one."""
    train = open_volume(write_volume(tmp_path / "a.h5", seed=1), CHANNELS)
    copy = open_volume(write_volume(tmp_path / "b.h5", seed=1, chunks=(1, 8, 8, 8)), CHANNELS)
    with h5py.File(write_volume(tmp_path / "c.h5", seed=1), "r+") as file:
        file["Hydro"][4] *= 0.9
    changed = open_volume(tmp_path / "c.h5", CHANNELS)
    (line,) = check_distinct({"train": [changed, train], "valid": [copy]})
    assert line.startswith(f"{train.path} and {copy.path}: training and validation use the same volume")
    assert check_distinct({"train": [train], "valid": [changed]}) == []
