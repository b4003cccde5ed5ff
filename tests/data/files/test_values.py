"""Checks of values: physical, constant and non-finite ones, from a sample and from the whole volume."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from reference_samples import VolumeFile

from utils.data.files.hdf5 import Volume, open_volume
from utils.data.files.values import check_all, check_distinct, check_samples
from utils.errors import UserError

CHANNELS = (4, 5)
BOX = 32


def volume(seed: int) -> Volume:
    rng = np.random.default_rng(seed)
    fields = (rng.standard_normal((channels, BOX, BOX, BOX), dtype=np.float32) for channels in CHANNELS)
    return Volume(f"{seed}.h5", *fields)


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 4, 4, 4)}])
@pytest.mark.parametrize(("value", "name", "place"), [(np.nan, "Nbody", (0, 0, 0, 0)), (np.inf, "Hydro", (4, 7, 2, 7))])
def test_the_first_non_finite_value_is_reported_with_its_place_and_without_a_warning(
    volume_file: VolumeFile, tmp_path: Path, name: str, place: tuple[int, ...], value: float, storage: dict
) -> None:
    path = volume_file(tmp_path / "a.h5", box=8, **storage)
    with h5py.File(path, "r+") as file:
        file[name][place] = value
        file["Hydro"][4, 7, 7, 7] = -np.inf  # infinities of both signs may be summed
        file["Nbody"][3] = np.finfo(np.float32).max  # large finite values pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as caught:
            check_all(open_volume(path, CHANNELS))
    assert str(caught.value).startswith(f"{path}: {name}[{', '.join(map(str, place))}] is {value}; ")


@pytest.mark.parametrize(("scale", "center"), [(300.0, 0.0), (1e7, 2e4)])
def test_physical_channels_are_refused_unless_they_are_allowed(scale: float, center: float) -> None:
    """Velocities in km/s around zero, temperatures in K."""
    fine, bad = volume(1), volume(2)
    bad.targets[3] = center + scale * bad.targets[3]
    with pytest.raises(UserError, match=r"^2\.h5: Hydro\[3\] holds physical values .*docs/data\.md.*: true$"):
        check_samples([fine, bad], allow_physical=False)
    check_samples([fine, bad], allow_physical=True)


def test_channels_that_networks_can_learn_are_not_refused() -> None:
    """Unscaled logarithms, and standardized densities whose rare peaks are a thousand standard deviations high."""
    train = volume(1)
    train.inputs[0] = -70 + train.inputs[0]  # ln of g/cm³
    train.targets[4] = 4 + train.targets[4]  # log10 of K
    peaks = train.targets[0].ravel()
    peaks[::20] = 1000
    check_samples([train, volume(2)], allow_physical=False)
    check_all(train)


@pytest.mark.parametrize("value", [0.0, -0.25])
def test_a_dataset_with_one_value_everywhere_is_refused(value: float) -> None:
    train = volume(1)
    train.targets[...] = value
    for check in (lambda: check_all(train), lambda: check_samples([train, volume(2)], True)):
        with pytest.raises(UserError, match=rf"^1\.h5: Hydro is {value:g} everywhere; write its values, or "):
            check()


def test_a_sample_with_a_non_finite_value_is_refused_before_a_training() -> None:
    """A training run on such a file once removed the earlier run, skipped ten updates and failed."""
    for value, channel in ((np.nan, slice(4, 5)), (-np.inf, slice(None))):
        bad = volume(2)
        bad.targets[channel, 5:] = value
        with pytest.raises(UserError) as caught:
            check_samples([volume(1), bad], True)
        found = re.fullmatch(r"2\.h5: Hydro\[(\d), (\d+), (\d+), (\d+)\] is (\S+); correct or .*", str(caught.value))
        assert found is not None
        assert bad.targets[tuple(map(int, found.groups()[:4]))] == pytest.approx(value, nan_ok=True)
        assert found[5] == str(value)


def test_a_volume_for_training_and_validation_gets_a_warning(volume_file: VolumeFile, tmp_path: Path) -> None:
    """A copy under another name, too; a volume that differs only in its last channel is another one."""
    train = open_volume(volume_file(tmp_path / "a.h5", seed=1), CHANNELS)
    copy = open_volume(volume_file(tmp_path / "b.h5", seed=1, chunks=(1, 8, 8, 8)), CHANNELS)
    with h5py.File(volume_file(tmp_path / "c.h5", seed=1), "r+") as file:
        file["Hydro"][4] *= 0.9
    changed = open_volume(tmp_path / "c.h5", CHANNELS)
    for volumes, names in (
        ({"train": [train], "valid": [train]}, train.path),
        ({"train": [changed, train], "valid": [copy]}, f"{train.path} and {copy.path}"),
    ):
        (line,) = check_distinct(volumes)
        assert line.startswith(f"{names}: training and validation use the same volume")
    assert check_distinct({"train": [train], "valid": [changed]}) == []
