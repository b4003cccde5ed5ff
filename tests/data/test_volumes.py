"""Volumes on disk: what is mapped, what is refused and how, NaNs found, files staged whole."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from utils.data.volumes import first_nonfinite, open_volume, stage
from utils.errors import UserError

VolumeFile = Callable[..., Path]
CHANNELS = (4, 5)


def contents(path: Path) -> list[np.ndarray]:
    with h5py.File(path) as file:
        return [file["Nbody"][...], file["Hydro"][...]]


def random_fields(box: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random((channels, box, box, box), dtype=np.float32) for channels in CHANNELS]


# --- opening -------------------------------------------------------------------------------------------------------


def test_contiguous_datasets_are_mapped_and_hold_the_files_values(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5")
    volume = open_volume(path, CHANNELS, 16)
    assert volume.mapped
    assert volume.box == 16
    assert volume.bytes == 4 * 9 * 16**3
    for field, expected in zip((volume.inputs, volume.targets), contents(path), strict=True):
        assert type(field) is np.ndarray
        np.testing.assert_array_equal(field, expected)


@pytest.mark.parametrize("how", [{"chunks": (1, 8, 8, 8)}, {"chunks": True, "compression": "gzip"}])
def test_chunked_and_compressed_datasets_are_not_mapped(volume_file: VolumeFile, tmp_path: Path, how: dict) -> None:
    path = volume_file(tmp_path / "a.h5", **how)
    volume = open_volume(path, CHANNELS)
    assert not volume.mapped
    for field, expected in zip((volume.inputs, volume.targets), contents(path), strict=True):
        np.testing.assert_array_equal(field[:, 3:9, 0:4, 12:16], expected[:, 3:9, 0:4, 12:16])


def test_a_mapped_volume_cannot_be_written_to(volume_file: VolumeFile, tmp_path: Path) -> None:
    volume = open_volume(volume_file(tmp_path / "a.h5"), CHANNELS)
    with pytest.raises(ValueError, match="read-only"):
        volume.inputs[0, 0, 0, 0] = 1


def test_data_at_odd_places_in_the_file_are_found(tmp_path: Path) -> None:
    """Behind a user block, and behind other datasets so that floats lie at addresses no multiple of 4."""
    fields = random_fields()
    with h5py.File(tmp_path / "a.h5", "w", libver="latest", userblock_size=512) as file:
        file["odd"] = np.zeros(3, np.int8)
        file["Nbody"] = fields[0]
        file["odder"] = np.zeros(5, np.int8)
        file["Hydro"] = fields[1]
    volume = open_volume(tmp_path / "a.h5", CHANNELS)
    assert volume.mapped
    np.testing.assert_array_equal(volume.inputs, fields[0])
    np.testing.assert_array_equal(volume.targets, fields[1])


def test_an_external_link_is_read_from_the_file_it_leads_to(tmp_path: Path) -> None:
    """It was mapped from the linking file once: other bytes, silently."""
    fields = random_fields()
    with h5py.File(tmp_path / "nbody.h5", "w") as file:
        file["Nbody"] = fields[0]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Nbody"] = h5py.ExternalLink("nbody.h5", "Nbody")
        file["Hydro"] = fields[1]
        file["more"] = np.zeros(10000)
    volume = open_volume(tmp_path / "a.h5", CHANNELS)
    np.testing.assert_array_equal(volume.inputs, fields[0])
    np.testing.assert_array_equal(volume.targets, fields[1])


def test_a_dataset_that_was_never_written_reads_as_its_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            file.create_dataset(name, (channels, 6, 6, 6), "f4", fillvalue=2)
    volume = open_volume(tmp_path / "a.h5", CHANNELS)
    assert not volume.mapped
    assert (volume.inputs[:, 1:3, 0:2, 0:2] == 2).all()


def test_slabs_cover_the_volume_once(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5", box=12)
    volume = open_volume(path, CHANNELS)
    for name, expected in zip(("Nbody", "Hydro"), contents(path), strict=True):
        seen = np.full_like(expected, np.nan)
        for _, channel, x, values in (slab for slab in volume.slabs() if slab[0] == name):
            assert np.isnan(seen[channel, x : x + len(values)]).all()
            seen[channel, x : x + len(values)] = values
        np.testing.assert_array_equal(seen, expected)
    assert volume.slab_count() == len(list(volume.slabs()))


# --- refusing ------------------------------------------------------------------------------------------------------


def refused(path: Path, match: str, channels: tuple[int, int] = CHANNELS, box: int | None = None) -> None:
    with pytest.raises(UserError, match=match) as caught:
        open_volume(path, channels, box)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    refused(tmp_path / "none.h5", "no such file: .*simulate")


def test_what_is_no_hdf5_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("not HDF5")
    refused(tmp_path / "a.h5", "not an HDF5 file")
    (tmp_path / "empty.h5").touch()
    refused(tmp_path / "empty.h5", "not an HDF5 file")
    refused(tmp_path, "Is a directory$")


@pytest.mark.parametrize("rest", [0.5, 0.95])
def test_a_truncated_file_is_refused(volume_file: VolumeFile, tmp_path: Path, rest: float) -> None:
    path = volume_file(tmp_path / "a.h5")
    os.truncate(path, int(path.stat().st_size * rest))
    refused(path, "truncated.*copy or make it again")


def test_a_missing_dataset_is_named_with_those_there_are(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Nbody"], file["gas"] = random_fields()
    refused(tmp_path / "a.h5", "no dataset Hydro; it holds Nbody, gas")


def test_a_group_in_a_datasets_place_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("Nbody")
    refused(tmp_path / "a.h5", "no dataset Nbody")


@pytest.mark.parametrize("channels", [(3, 5), (4, 6)])
def test_another_number_of_channels_is_refused(
    volume_file: VolumeFile, tmp_path: Path, channels: tuple[int, int]
) -> None:
    refused(volume_file(tmp_path / "a.h5"), r"expected \((3|6), L, L, L\)", channels)


def test_another_box_is_refused_with_the_key_to_set(volume_file: VolumeFile, tmp_path: Path) -> None:
    refused(volume_file(tmp_path / "a.h5"), "16 cells a side, but box_size says 32; set box_size", box=32)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    for number, shape in enumerate([(4, 6, 6, 7), (4, 6, 6), (4, 0, 0, 0), ()]):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file["Nbody"] = np.zeros(shape, np.float32)
        refused(path, r"Nbody is \(.*\), expected \(4, L, L, L\)")


def test_a_null_dataset_is_refused(tmp_path: Path) -> None:
    """It has no shape at all, and ended in a traceback once."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Nbody"] = h5py.Empty("f4")
    refused(tmp_path / "a.h5", r"expected \(4, L, L, L\)")


@pytest.mark.parametrize("dtype", ["f8", ">f4", "i4", "f2"])
def test_another_type_is_refused(volume_file: VolumeFile, tmp_path: Path, dtype: str) -> None:
    refused(volume_file(tmp_path / "a.h5", dtype=dtype), "expected little-endian float32")


def test_grids_that_differ_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Nbody"], file["Hydro"] = random_fields(6)[0], random_fields(8)[1]
    refused(tmp_path / "a.h5", "their grids must be equal")


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"chunks": (1, 4, 4, 4)}])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "place"), [("Nbody", (0, 0, 0, 0)), ("Nbody", (2, 5, 3, 7)), ("Hydro", (4, 7, 7, 7))])
def test_a_value_that_is_no_number_is_found_at_its_place(
    volume_file: VolumeFile, tmp_path: Path, name: str, place: tuple[int, ...], value: float, how: dict
) -> None:
    path = volume_file(tmp_path / "a.h5", box=8, **how)
    with h5py.File(path, "r+") as file:
        file[name][place] = value
    words = first_nonfinite(open_volume(path, CHANNELS))
    assert words == f"{path}: {name}[{', '.join(map(str, place))}] is {value}"


def test_infinities_of_both_signs_are_found_without_a_warning(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5", box=8)
    with h5py.File(path, "r+") as file:
        file["Nbody"][1, 2, 3, 4], file["Nbody"][1, 2, 5, 4] = np.inf, -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Nbody[1, 2, 3, 4] is inf" in (first_nonfinite(open_volume(path, CHANNELS)) or "")


def test_finite_volumes_pass_even_with_the_largest_values(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5", box=8)
    with h5py.File(path, "r+") as file:
        file["Nbody"][0] = np.finfo(np.float32).max
    volume, slabs = open_volume(path, CHANNELS), []
    assert first_nonfinite(volume, lambda: slabs.append(1)) is None
    assert len(slabs) == volume.slab_count()


# --- staging -------------------------------------------------------------------------------------------------------


def test_staging_copies_the_file_and_names_the_copy(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5")
    copy = Path(stage(str(path), str(tmp_path / "node" / "cache")))
    assert copy.parent == tmp_path / "node" / "cache"
    assert copy.suffix == ".h5"
    assert copy.read_bytes() == path.read_bytes()
    assert os.listdir(copy.parent) == [copy.name]
    assert open_volume(copy, CHANNELS).mapped


def test_a_staged_file_is_not_copied_again(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5")
    copy = Path(stage(str(path), str(tmp_path / "cache")))
    number = copy.stat().st_ino  # a new copy would be another file under the same name
    held = open(copy, "rb")  # noqa: SIM115 — keeps the number from being given to another file
    assert stage(str(path), str(tmp_path / "cache")) == str(copy)
    assert copy.stat().st_ino == number
    held.close()


@pytest.mark.parametrize("change", ["content", "size"])
def test_a_changed_file_is_copied_anew(volume_file: VolumeFile, tmp_path: Path, change: str) -> None:
    path = volume_file(tmp_path / "a.h5", seed=1)
    copy = Path(stage(str(path), str(tmp_path / "cache")))
    before = path.stat()
    volume_file(path, seed=2, box=16 if change == "content" else 8)
    if change == "content":
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stage(str(path), str(tmp_path / "cache")) == str(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert len(os.listdir(tmp_path / "cache")) == 1


def test_a_failed_copy_leaves_nothing_and_says_why(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume_file(tmp_path / "a.h5")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("utime", "replace"):  # both come after the bytes were written
        monkeypatch.setattr(f"utils.data.volumes.os.{call}", full)
        with pytest.raises(UserError, match=r"cannot stage .*use_cache=.*No space left") as caught:
            stage(str(path), str(tmp_path / "cache"))
        assert "\n" not in str(caught.value)
        assert os.listdir(tmp_path / "cache") == []
        monkeypatch.undo()
    assert open_volume(stage(str(path), str(tmp_path / "cache")), CHANNELS).mapped


def test_a_failed_copy_leaves_the_earlier_one(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume_file(tmp_path / "a.h5", seed=1)
    copy = Path(stage(str(path), str(tmp_path / "cache")))
    earlier = copy.read_bytes()
    volume_file(path, seed=2, box=8)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("utils.data.volumes.os.replace", full)
    with pytest.raises(UserError):
        stage(str(path), str(tmp_path / "cache"))
    assert copy.read_bytes() == earlier
    assert os.listdir(tmp_path / "cache") == [copy.name]


def test_files_of_one_name_from_two_directories_do_not_collide(volume_file: VolumeFile, tmp_path: Path) -> None:
    sources = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        sources.append(volume_file(tmp_path / str(number) / "train.h5", seed=number))
    copies = [stage(str(source), str(tmp_path / "cache")) for source in sources]
    assert copies[0] != copies[1]
    for source, copy in zip(sources, copies, strict=True):
        assert Path(copy).read_bytes() == source.read_bytes()


def test_staging_what_is_missing_or_to_where_nothing_can_be_made_is_refused(
    volume_file: VolumeFile, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"cannot stage .*No such file"):
        stage(str(tmp_path / "none.h5"), str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot stage .*use_cache="):
        stage(str(volume_file(tmp_path / "a.h5")), str(tmp_path / "file"))
