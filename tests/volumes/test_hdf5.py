"""HDF5 volumes: mapping, conversion, staging, checks of values and of where they are stored, errors in one line."""

import fcntl
import logging
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reference_samples import ALONE, read_fields
from volume_files import write_volume

from utils import config as configs
from utils.config.channels import known_channels
from utils.data.loaders import get_loader, open_volumes
from utils.errors import UserError
from utils.log import warn_once
from utils.run.provenance import data_changes, data_record
from utils.volumes import hdf5
from utils.volumes.convert_to_npy import convert
from utils.volumes.hdf5 import Volume, as_float32, open_volume
from utils.volumes.opened import stage, staged_path
from utils.volumes.values import check_all, check_distinct, check_samples

CHANNELS = (4, 5)
FIELDS = [np.random.default_rng(0).random((channels, 6, 6, 6), dtype=np.float32) for channels in CHANNELS]
STORAGES: list[Any] = [{}, {"chunks": (1, 8, 8, 8), "compression": "gzip"}]
STORAGES += [{"dtype": dtype} for dtype in (">f8", "<f2", ">f4", "<i2")]


@pytest.mark.parametrize("storage", STORAGES)
def test_contiguous_datasets_are_mapped_read_only_and_others_converted(
    tmp_path: Path, storage: dict, monkeypatch: Any, caplog: Any
) -> None:
    """Large chunks are a warning, once: one of 2 GB was read for a minute without a word. Overflow gives none."""
    monkeypatch.setattr(hdf5, "LARGE_CHUNK", 2000)
    path = write_volume(tmp_path / "a.h5", **storage)
    for _ in range(2):
        volume = open_volume(path)
    assert (volume.mapped, volume.shape, volume.bytes) == (not storage, (16, 16, 16), 4 * 9 * 16**3)
    assert len(caplog.messages) == (2 if "chunks" in storage else 0), "one line for each dataset"
    for field, expected in zip((volume.inputs, volume.targets), read_fields(path), strict=True):
        crop = field[:, 3:9, 0:4, 12:16]
        np.testing.assert_array_equal(crop, expected[:, 3:9, 0:4, 12:16].astype("f4"))
        assert crop.dtype == np.float32
        if volume.mapped:
            assert type(field) is np.ndarray
            assert not field.flags.writeable
    np.testing.assert_array_equal(as_float32(np.array([1e300, -1e300, 0.5])), [np.inf, -np.inf, 0.5])


def test_unaligned_data_behind_a_user_block_and_behind_an_external_link_are_mapped(tmp_path: Path) -> None:
    """At addresses that are no multiples of 4. Fixed: a linked dataset was mapped from the linking file."""
    for name, dataset, values in (("hydro.h5", "Hydro", FIELDS[1]), ("a.h5", "Nbody", FIELDS[0])):
        with h5py.File(tmp_path / name, "w", libver="latest", userblock_size=512) as file:
            file["odd"] = np.zeros(3, np.int8)
            file[dataset] = values
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["gas/all"] = h5py.ExternalLink("hydro.h5", "Hydro")
        file["more"] = np.zeros(10000)
    volume = open_volume(tmp_path / "a.h5", ("Nbody", "gas/all"))
    assert volume.mapped
    np.testing.assert_array_equal(volume.inputs, FIELDS[0])
    np.testing.assert_array_equal(volume.targets, FIELDS[1])


@pytest.mark.parametrize(
    ("datasets", "says"),
    [
        (FIELDS[:1], r"no dataset Hydro; it contains Nbody; .*only predict\.py needs no Hydro"),
        ([h5py.Empty("f4")], r"expected \(channels, X, Y, Z\)"),  # has no shape; a fixed bug: this was a traceback
        ([FIELDS[0][0]], r"Nbody is \(6, 6, 6\), expected \(channels, X, Y, Z\)"),
        ([FIELDS[0], FIELDS[1][:, 1:]], r"Hydro \(5, 6, 6\); make them equal"),
        (0.95, "the file is truncated; copy or recreate it$"),
        (0, "not an HDF5 file"),
        (None, "no such file: .*; give another path$"),
    ],
)
def test_what_is_no_volume_of_these_channels_is_refused_in_one_line(tmp_path: Path, datasets: Any, says: str) -> None:
    path = tmp_path / "a.h5"
    if datasets is not None:
        with h5py.File(path, "w") as file:
            file.update(dict(zip(("Nbody", "Hydro"), datasets if isinstance(datasets, list) else FIELDS, strict=False)))
        if not isinstance(datasets, list):
            os.truncate(path, int(path.stat().st_size * datasets))
    with pytest.raises(UserError, match=says) as caught:
        open_volume(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_staging_copies_a_file_once_and_again_if_its_content_changes(tmp_path: Path, monkeypatch: Any) -> None:
    """Fixed: a file with the size and the time of the copy was taken for equal, then one with equal samples."""
    path, cache = write_volume(tmp_path / "a.h5", seed=1), tmp_path / "node" / "cache"
    stage(str(path), str(cache))
    copy = staged_path(str(path), str(cache))
    assert (copy.parent, copy.suffix, copy.read_bytes()) == (cache, ".h5", path.read_bytes())
    with open(copy, "rb") as held:  # keeps its inode number in use
        stage(str(path), str(cache))
        assert os.path.samestat(os.fstat(held.fileno()), copy.stat()), "it was copied again"
    before = path.stat()
    write_volume(path, seed=2)  # the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    stage(str(path), str(cache))
    assert copy.read_bytes() == path.read_bytes()
    # A cell that was corrected in place is not in the samples, but the file is newer.
    with monkeypatch.context() as patch:
        patch.setattr("utils.volumes.opened.sample_digest", lambda _: "the same")
        write_volume(path, seed=4)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        stage(str(path), str(cache))
    assert copy.read_bytes() == path.read_bytes()
    (tmp_path / "other").mkdir()
    namesake = write_volume(tmp_path / "other" / "a.h5", seed=3)
    stage(str(namesake), str(cache))
    assert staged_path(str(namesake), str(cache)).read_bytes() == namesake.read_bytes() != copy.read_bytes()
    with pytest.raises(UserError, match=r"cannot stage .*use_cache=.*; choose another use_cache"):
        stage(str(path), str(copy))


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
            check_all(open_volume(path))
    assert str(caught.value).startswith(f"{path}: {name}[{', '.join(map(str, place))}] is {value}; ")
    bad = volume(2)
    bad.targets[4, 5:] = -np.inf  # a training on such a file once removed the earlier run, and failed
    with pytest.raises(UserError, match=r"^2\.h5: Hydro\[4, \d+, \d+, \d+\] is -inf; correct or "):
        check_samples([volume(1), bad], True)


def test_constant_channels_and_physical_ones_that_are_not_allowed_are_refused() -> None:
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
    fine.targets[...] = -0.25
    for check in (lambda: check_all(fine), lambda: check_samples([fine, volume(2)], True)):
        with pytest.raises(UserError, match=r"^1\.h5: Hydro is -0\.25 everywhere; write its values, or "):
            check()


def test_a_volume_for_training_and_validation_gets_a_warning(tmp_path: Path) -> None:
    """A copy under another name, too. Fixed: not a volume with other gas, or a snapshot of one run at other times."""
    train = open_volume(write_volume(tmp_path / "a.h5", seed=1))
    copy = open_volume(write_volume(tmp_path / "b.h5", seed=1, chunks=(1, 8, 8, 8)))
    with h5py.File(write_volume(tmp_path / "c.h5", seed=1), "r+") as file:
        file["Hydro"][4] *= 0.9
    changed = open_volume(tmp_path / "c.h5")
    lines = check_distinct({"train": [changed, train], "valid": [copy]})
    assert lines[0].startswith(f"{changed.path} and {copy.path}: training and validation have the same structures, ")
    assert lines[1].startswith(f"{train.path} and {copy.path}: training and validation use the same volume")
    for inputs, count in ((0.8 * train.inputs + 0.03, 1), (-train.inputs, 0)):  # later; the other member of a pair
        other = Volume("other.h5", inputs, copy.targets[...])
        assert len(check_distinct({"train": [train], "valid": [other]})) == count
    other = open_volume(write_volume(tmp_path / "d.h5", seed=2))
    assert check_distinct({"train": [train], "valid": [other]}) == []


def test_the_preflight_and_the_start_of_a_run_name_a_constant_channel_among_others(caplog: Any) -> None:
    """Fixed: only a dataset that is constant as a whole was noticed."""
    constant = Volume("a.h5", *(values.copy() for values in FIELDS))
    constant.targets[3] = 0.25
    for check in (lambda: check_all(constant), lambda: check_samples([constant], False)):
        warn_once.cache_clear()
        check()
    line = "a.h5: Hydro[3] is 0.25 everywhere; write its values, or choose another file or dataset"
    assert [record.getMessage() for record in caplog.records] == [line] * 2


def test_the_preflight_names_a_channel_with_cells_of_no_value_and_one_of_their_places(caplog: Any) -> None:
    """Fixed: -9999 in fewer cells than a tenth passed all checks, and the network ended worse than untrained."""
    gaps, line = volume(3), "3.h5: Hydro[2] has values from -9999 to "
    gaps.targets[2, 31, 5:7, 9] = -9999
    check_all(gaps, allow_physical=True)
    check_samples([gaps], False)
    assert caplog.messages == []
    check_all(gaps)
    (message,) = caplog.messages
    assert message.startswith(line)
    assert "the farthest at [31, 5, 9]; networks learn channels of about 1: correct" in message


def test_files_with_few_cells_get_the_remedy_that_fits_all_of_them(tmp_path: Path) -> None:
    """Fixed: "lower data_size" led from one error to the next."""
    path = write_volume(tmp_path / "a.h5", 20)
    config = configs.load("config/UNet.yaml", "base", {"train_path": str(path), "box_size": [20, 20]})
    with pytest.raises(UserError, match=r"20³ cells, .* set data_size=16 and network\.scales=3, or"):
        open_volumes(config).split("train")
    smaller = config.model_copy(update={"val_path": str(write_volume(tmp_path / "b.h5", 12))})
    with pytest.raises(UserError, match=r"20³ cells, .* set data_size=8 and network\.scales=2, or"):
        open_volumes(smaller).split("train")  # fixed: 16, which did not fit the other volume
    with pytest.raises(UserError, match="set data_size=8, or"):  # fixed: changed scales that fit
        open_volumes(smaller.model_copy(update={"network": type(config.network)(scales=2)})).split("train")


def test_values_that_cannot_be_are_a_warning_that_names_them(tmp_path: Path, caplog: Any) -> None:
    """Fixed: only the importer noticed cells of 1250 Mpc/h, and channels in other units."""
    stated = {"box_size_mpc_h": 20000.0, "redshift": -1.0, "temperature_log10_center": 12.0}
    path = write_volume(tmp_path / "a.h5", velocity_scale_km_s=1e6, **stated)
    with h5py.File(path, "r+") as file:
        for name in ("Nbody", "Hydro"):
            file[name][0] += 1.0  # a density relative to its mean in place of its logarithm
    keys = {"train_path": str(path), "val_path": str(path)}
    open_volumes(configs.load("config/UNet.yaml", "test", keys)).check(ALONE)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    _, redshift, cell, *channels = [record.getMessage().removeprefix(f"{path}: ") for record in warnings]
    assert redshift == "redshift is -1, expected 0 to 10000; correct its attributes"
    assert cell == "cell size (Mpc/h) is 1250, expected 1e-05 to 4; correct its attributes"
    assert [line[:8] for line in channels] == [f"Nbody[{n}]" for n in range(4)] + [f"Hydro[{n}]" for n in range(5)]
    assert re.search(r"temperature, would be [\d.]+e\+1[12] K in half of the cells; correct", channels[-1])


def test_a_run_from_gas_to_dark_matter_is_a_warning(tmp_path: Path, caplog: Any) -> None:
    """Fixed: a run on files with exchanged datasets, whose channels they name, started without a word."""
    path = write_volume(tmp_path / "a.h5", channels=(5, 4))
    sides = {"inputs": known_channels("targets", 5), "targets": known_channels("inputs", 4)}
    named = {side: [asdict(channel) for channel in channels] for side, channels in sides.items()}
    keys = {"train_path": str(path), "val_path": str(path), "channels": named}
    open_volumes(configs.load("config/UNet.yaml", "test", keys)).check(ALONE)
    assert "the network learns dark matter from gas; otherwise, exchange the two dataset_names" in caplog.messages


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
