"""HDF5 volumes: mapping, conversion, errors in one line, and staging."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reference_samples import VolumeFile, read_fields

from utils.data.files import hdf5
from utils.data.files.hdf5 import as_float32, open_volume
from utils.data.volumes import stage
from utils.errors import UserError

CHANNELS = (4, 5)


def random_fields(box: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random((channels, box, box, box), dtype=np.float32) for channels in CHANNELS]


# --- opening -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 8, 8, 8), "compression": "gzip"}])
def test_contiguous_datasets_are_mapped_read_only_and_others_read(
    volume_file: VolumeFile, tmp_path: Path, storage: dict[str, Any]
) -> None:
    path = volume_file(tmp_path / "a.h5", **storage)
    volume = open_volume(path, CHANNELS)
    assert (volume.mapped, volume.shape, volume.bytes) == (not storage, (16, 16, 16), 4 * 9 * 16**3)
    for field, expected in zip((volume.inputs, volume.targets), read_fields(path), strict=True):
        np.testing.assert_array_equal(field[:, 3:9, 0:4, 12:16], expected[:, 3:9, 0:4, 12:16])
        if volume.mapped:
            assert type(field) is np.ndarray
            assert not field.flags.writeable


def test_unaligned_data_behind_a_user_block_and_behind_an_external_link_are_mapped(tmp_path: Path) -> None:
    """The floats have addresses that are not multiples of 4.

    A fixed bug: a linked dataset was mapped from the linking file, which silently gave wrong bytes.
    """
    fields = random_fields()
    with h5py.File(tmp_path / "hydro.h5", "w", libver="latest", userblock_size=512) as file:
        file["odd"] = np.zeros(3, np.int8)
        file["Hydro"] = fields[1]
    with h5py.File(tmp_path / "a.h5", "w", libver="latest", userblock_size=512) as file:
        file["odd"] = np.zeros(3, np.int8)
        file["Nbody"] = fields[0]
        file["Hydro"] = h5py.ExternalLink("hydro.h5", "Hydro")
        file["more"] = np.zeros(10000)
    volume = open_volume(tmp_path / "a.h5", CHANNELS)
    assert volume.mapped
    np.testing.assert_array_equal(volume.inputs, fields[0])
    np.testing.assert_array_equal(volume.targets, fields[1])


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f2", ">f4", "<i2", "u1"])
def test_other_types_of_numbers_are_converted(tmp_path: Path, dtype: str) -> None:
    """Values beyond float32 become infinite without a warning."""
    fields = [(100 * field).astype(dtype) for field in random_fields()]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dark"], file["gas/all"] = fields
    volume = open_volume(tmp_path / "a.h5", CHANNELS, ("dark", "gas/all"))
    assert not volume.mapped
    for number, channel, start, values in volume.slabs():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, fields[number][channel, start : start + len(values)].astype("f4"))
    np.testing.assert_array_equal(as_float32(np.array([1e300, -1e300, 0.5])), np.array([np.inf, -np.inf, 0.5], "f4"))


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(path: Path, match: str, channels: tuple[int, int] = CHANNELS) -> None:
    with pytest.raises(UserError, match=match) as caught:
        open_volume(path, channels)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_missing_truncated_not_hdf5_or_of_other_channels_are_refused(
    volume_file: VolumeFile, tmp_path: Path
) -> None:
    refused(tmp_path / "none.h5", "no such file: .*; give another path$")
    (tmp_path / "a.h5").write_text("not HDF5")
    refused(tmp_path / "a.h5", "not an HDF5 file")
    refused(tmp_path, "it is not a regular file; give another path$")
    path = volume_file(tmp_path / "b.h5")
    refused(path, r"expected \(3, X, Y, Z\); .* set N_in_channels$", (3, 5))
    refused(path, r"expected \(6, X, Y, Z\); .* set N_out_channels$", (4, 6))
    for part in (0.5, 0.95):
        path = volume_file(tmp_path / f"{part}.h5")
        os.truncate(path, int(path.stat().st_size * part))
        refused(path, "the file is truncated; copy or recreate it$")


def test_a_file_without_permission_to_read_is_not_to_be_recreated(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the line advised to copy or recreate the file. Root, who may run the tests, can read every file."""

    path = volume_file(tmp_path / "x.h5")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "unable to open file")

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(UserError, match=r"x\.h5: Permission denied; change its permissions$"):
        open_volume(path, CHANNELS)


def test_large_chunks_are_logged_once(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compressed chunk of 2 GB was read for a minute without a word."""
    caplog.set_level("INFO")
    path = volume_file(tmp_path / "x.h5", chunks=(1, 8, 8, 8))
    open_volume(path, CHANNELS)
    assert caplog.messages == []
    monkeypatch.setattr(hdf5, "LARGE_CHUNK", 2000)
    for _ in range(2):
        open_volume(path, CHANNELS)
    assert [line.split(" has ")[0] for line in caplog.messages] == [f"{path}: Nbody", f"{path}: Hydro"]


@pytest.mark.parametrize(
    ("datasets", "match"),
    [
        ({"Nbody": random_fields()[0], "gas": random_fields()[1]}, "no dataset Hydro; it contains Nbody, gas"),
        ({"Nbody": h5py.Empty("f4")}, r"expected \(4, X, Y, Z\)"),  # has no shape; a fixed bug: this was a traceback
        ({"Nbody": np.zeros((4, 6, 6), "f4")}, r"Nbody is \(4, 6, 6\), expected \(4, X, Y, Z\)"),
        ({"Nbody": random_fields(6)[0], "Hydro": random_fields(8)[1]}, r"Hydro \(8, 8, 8\); make them equal"),
    ],
)
def test_other_datasets_and_shapes_are_refused(tmp_path: Path, datasets: dict[str, Any], match: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, data in datasets.items():
            file[name] = data
    refused(tmp_path / "a.h5", match)


# --- staging -------------------------------------------------------------------------------------------------------


def test_staging_copies_each_file_once(volume_file: VolumeFile, tmp_path: Path) -> None:
    path, cache = volume_file(tmp_path / "a.h5", seed=1), tmp_path / "node" / "cache"
    copy = Path(stage(str(path), str(cache)))
    assert (copy.parent, copy.suffix) == (cache, ".h5")
    assert copy.read_bytes() == path.read_bytes()
    with open(copy, "rb") as held:  # keeps its inode number in use
        assert stage(str(path), str(cache)) == str(copy)
        assert os.path.samestat(os.fstat(held.fileno()), copy.stat()), "it was copied again"
    (tmp_path / "other").mkdir()
    namesake = volume_file(tmp_path / "other" / "a.h5", seed=2)
    assert Path(stage(str(namesake), str(cache))).read_bytes() == namesake.read_bytes() != copy.read_bytes()


def test_a_file_of_other_content_and_the_same_size_is_copied_again(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5", seed=1)
    copy = Path(stage(str(path), str(tmp_path / "cache")))
    before = path.stat()
    volume_file(path, seed=2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert stage(str(path), str(tmp_path / "cache")) == str(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert os.listdir(tmp_path / "cache") == [copy.name]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot stage .*use_cache=.*; choose another use_cache"):
        stage(str(path), str(tmp_path / "file"))
