"""The contract of all loaders in LOADERS: equal bits for the same plan on any number of ranks. The choice of `auto`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE, VolumeFile, digest, rank_batches, read_fields, reference, write_signed_zeros

from utils.config import Config, load, result_changes, to_yaml, validate
from utils.data import LOADERS, DataSplits, Loader, get_loader
from utils.data.convert_to_npy import convert
from utils.data.files import shared_memory
from utils.data.loaders import auto, dali, gpu_resident, threaded
from utils.data.loaders.base import build_splits, memory_format, sample_plan
from utils.data.volumes import open_split, open_split_npy, with_file_values
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

TOP = Path(__file__).parents[2]
GLOBAL_BATCH, TRAIN_SAMPLES, VALID_SAMPLES = 8, 347, 11  # 43 training steps and an incomplete one
# Two volumes to train on and one for validation, none of them a cube, by the config's key and the file's name.
BOXES = {("train", "train"): (16, 9, 20), ("train", "more"): (8, 24, 12), ("val", "valid"): (18, 16, 8)}
SIZE = sum(9 * math.prod(box) * 4 for box in BOXES.values())  # bytes of all volumes
# What each volume states; its side is that of its longest axis.
REDSHIFTS, LENGTHS = {"train": 2.5, "more": 3.25, "valid": 3.0}, {"train": 10.0, "more": 6.0, "valid": 9.0}
CONDITIONS = {"network.conditions": ["redshift", "cell"]}
CELLS = {name: LENGTHS[name] / max(box) for (_, name), box in BOXES.items()}
Paths = dict[str, Any]  # keys of the config; those of the training data have lists


def has_dali() -> bool:
    try:
        dali.import_dali()
    except UserError:
        return False
    return True


NAMES = [name for name, spec in LOADERS.items() if spec.reads == "hdf5" or (spec.reads == "npy" and has_dali())]
EVERY_LOADER = pytest.mark.parametrize("name", NAMES)


class Reading(NamedTuple):
    """One pass over an epoch, from batch `first` on, which ends after `taken` batches."""

    split: str
    epoch: int
    first: int = 0
    taken: int | None = None


WHOLE = [Reading("train", 0), Reading("train", 1), Reading("valid", 0), Reading("valid", 1)]
ENDED_EARLY = [reading for taken in (1, 2, 3, 4, 5) for reading in (Reading("train", 2, 0, taken), Reading("valid", 2))]
RESUMED = [Reading("train", 3, 1), Reading("train", 3, 42), Reading("train", 3, 43), Reading("valid", 1, 1)]
# For an epoch with fewer samples than a batch.
FEW = [Reading("valid", 0), Reading("valid", 1)]
READINGS = [*WHOLE, *ENDED_EARLY, Reading("train", 2, 30), *RESUMED]


@pytest.fixture(scope="module")
def paths(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("loaders")
    found: Paths = {}
    for seed, ((key, name), box) in enumerate(BOXES.items()):
        path = volume_file(folder / f"{name}.h5", box, seed)
        write_signed_zeros(path)
        with h5py.File(path, "r+") as file:
            file.attrs.update({"redshift": REDSHIFTS[name], "box_size_mpc_h": LENGTHS[name]})
        for kind, file in zip(("", "_npy_data", "_npy_label"), (path, *convert(path)), strict=True):
            found.setdefault(f"{key}_path{kind}", []).append(str(file))
    return found | {key: path for key, (path, *_) in found.items() if key.startswith("val")}


def config_for(paths: Paths, name: str, **changed: Any) -> Config:
    samples = {"Nsamples": TRAIN_SAMPLES, "Nsamples_val": VALID_SAMPLES, "global_batch_size": GLOBAL_BATCH}
    return load(str(TOP / "config" / "UNet.yaml"), "test", {**paths, **samples, "data_loader_config": name, **changed})


def build_loaders(config: Config, world: World = ALONE) -> DataSplits:
    return get_loader(config.data_loader_config).build(config.for_world(world.size), world)


def read(loaders: DataSplits, readings: list[Reading], channels_last: bool = False) -> list[list[list[str]]]:
    """The digests of each reading's batches; closes the loaders."""
    found = []
    with loaders:
        for split, epoch, first, taken in readings:
            loader = loaders.train if split == "train" else loaders.valid
            found.append([])
            with closing(loader.epoch(epoch, first)) as batches:
                for batch in itertools.islice(batches, taken):
                    assert all(part.is_contiguous(memory_format=memory_format(channels_last)) for part in batch)
                    found[-1].append(digest(batch))
                    assert digest(batch) == found[-1][-1], "a batch changes before the next one is asked for"
            if first == 0 and taken is None:
                assert len(loader) == len(found[-1])
    return found


def expected(
    config: Config, readings: list[Reading], rank: int = 0, size: int = 1, mode: str = "full"
) -> list[list[list[str]]]:
    """The digests of each reading's batches by definition."""
    found = []
    for split, epoch, first, taken in readings:
        volumes = [read_fields(path) for path in config.paths("train_path" if split == "train" else "val_path")]
        plan = sample_plan(config, split, [each[0].shape[1:] for each in volumes])
        samples = reference(volumes, plan, epoch, mode)
        batches = rank_batches(samples, GLOBAL_BATCH, rank, size, split == "train", plan.parts)
        found.append(batches[first:][:taken])
    return found


# --- equal bits ----------------------------------------------------------------------------------------------------


@EVERY_LOADER
def test_one_rank_gets_the_samples_of_the_plan(paths: Paths, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All 48 symmetries; complete epochs, ones that end early or resume in the middle; the log names the files."""
    caplog.set_level(logging.INFO)
    config = config_for(paths, name)
    drawn = sample_plan(config, "train", [box for (key, _), box in BOXES.items() if key == "train"]).epoch(0)
    assert (set(drawn.volumes), set(drawn.symmetries)) == ({0, 1}, set(range(48)))
    loaders, log = build_loaders(config), "\n".join(caplog.messages)
    ending = "_data.npy" if name == "dali-lowmem" else ".h5"
    assert all(f"{file}{ending}" in log for file in ("train", "more", "valid"))
    assert (name == "auto") == ("data_loader_config auto: lowmem" in log)
    assert (name == "resident") == ("data_loader_config resident: without a GPU it is inmem" in log)
    assert read(loaders, READINGS) == expected(config, READINGS)
    few = config_for(paths, name, Nsamples_val=3)
    assert read(build_loaders(few), FEW) == expected(few, FEW)


@EVERY_LOADER
def test_a_batch_of_several_validation_volumes_is_of_one_of_them(paths: Paths, name: str) -> None:
    """Of 23 samples each of the two volumes has 11, which are those that it has alone."""
    keys = {key.replace("train", "val"): value for key, value in paths.items() if key.startswith("train")}
    config, readings = config_for(paths, name, **keys, Nsamples_val=23), [Reading("valid", 0), Reading("valid", 1, 3)]
    with build_loaders(config) as loaders:
        assert loaders.valid.volumes == ["train", "more"]
        assert [loaders.valid.volume_of(batch) for batch in range(len(loaders.valid))] == [0, 0, 1, 1]
        assert (loaders.train.volumes, loaders.train.volume_of(42)) == (["train"], 0)
    found = read(build_loaders(config), readings)
    assert found == expected(config, readings)
    alone = [
        config_for(paths, name, **{key: files[number] for key, files in keys.items()}, Nsamples_val=11)
        for number in range(2)
    ]
    assert found[0] == [batch for one in alone for batch in read(build_loaders(one), readings[:1])[0]]


@EVERY_LOADER
@pytest.mark.parametrize(("symmetries", "channels_last"), [("full", True), ("grid", False), ("none", True)])
def test_modes_and_layouts(paths: Paths, name: str, symmetries: str, channels_last: bool) -> None:
    """Each mode of the symmetries and each memory format gives the plan's samples, also in shorter last batches."""
    config = config_for(paths, name, symmetries=symmetries, channels_last=channels_last)
    readings = [Reading("train", 0), Reading("valid", 0)]
    found = read(build_loaders(config), readings, channels_last)
    assert found == expected(config, readings, mode=symmetries)


@pytest.mark.parametrize("name", [*NAMES, "synthetic"])
def test_channels_last_strides_hold_for_a_single_channel_too(
    volume_file: VolumeFile, tmp_path: Path, name: str
) -> None:
    """A single channel has both formats in memory; PyTorch then chooses its kernels by the strides."""
    path = volume_file(tmp_path / "box.h5", box=8, channels=(1, 2))
    kinds = zip(("", "_npy_data", "_npy_label"), (path, *convert(path)), strict=True)
    keys = {f"{split}_path{kind}": str(file) for kind, file in kinds for split in ("train", "val")}
    channels = {"N_in_channels": 1, "N_out_channels": 2, "vector_channels.inputs": [], "vector_channels.targets": []}
    config = config_for(keys, name, box_size=[8, 8], channels_last=True, **channels)
    with build_loaders(config) as loaders:
        for part, count in zip(next(loaders.valid.epoch(0)), (1, 2), strict=True):
            assert part.stride() == (count * 8**3, 1, count * 8**2, count * 8, count)


def read_conditions(loaders: DataSplits, readings: list[Reading]) -> list[list[list[list[float]]]]:
    """The conditions of each reading's batches, whose other parts are compared as digests; closes the loaders."""
    found = []
    with loaders:
        for split, epoch, first, taken in readings:
            loader = loaders.train if split == "train" else loaders.valid
            with closing(loader.epoch(epoch, first)) as batches:
                found.append([batch.conditions.tolist() for batch in itertools.islice(batches, taken)])
    return found


def expected_conditions(
    config: Config, readings: list[Reading], rank: int = 0, size: int = 1
) -> list[list[list[list[float]]]]:
    """The conditions by definition, rounded to float32."""
    found = []
    for split, epoch, first, taken in readings:
        names = [name for key, name in BOXES if key == split.removesuffix("id")]
        plan = sample_plan(config, split, [box for (_, name), box in BOXES.items() if name in names]).epoch(epoch)
        table = torch.tensor([[REDSHIFTS[name], CELLS[name]] for name in names]).tolist()
        samples = [table[volume] for volume in plan.volumes]
        batches = rank_batches(samples, GLOBAL_BATCH, rank, size, drop_last=split == "train")
        found.append(batches[first:][:taken])
    return found


@EVERY_LOADER
def test_every_loader_delivers_the_conditions_of_the_plans_volumes(paths: Paths, name: str) -> None:
    """With unchanged inputs and targets; the ranges are those of the training volumes."""
    config = with_file_values(config_for(paths, name, **CONDITIONS), get_loader(name).reads)
    assert config.network.condition_ranges == [[2.5, 3.25], [CELLS["more"], CELLS["train"]]]
    readings = [*WHOLE, *ENDED_EARLY[:2], *RESUMED]
    assert read_conditions(build_loaders(config), readings) == expected_conditions(config, readings)
    with build_loaders(config) as loaders, build_loaders(config_for(paths, name)) as plain:
        for batch, other in zip(loaders.train.epoch(1, 30), plain.train.epoch(1, 30), strict=True):
            assert digest(batch[:2]) == digest(other)


def read_on_ranks(world: World, paths: Paths, names: list[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The loaders' batches on this rank; conditions; what `auto` has built if the first rank has no room in memory."""
    found, conditions, built = {}, {}, []
    for name in names:
        config, few = config_for(paths, name), config_for(paths, name, Nsamples_val=3)
        found[name] = read(build_loaders(config, world), READINGS)
        found[name] += read(build_loaders(few, world), FEW)
        conditions[name] = read_conditions(build_loaders(config_for(paths, name, **CONDITIONS), world), WHOLE)
    shared_memory.free_shared_memory = lambda _: 0 if world.is_root else SIZE
    threaded.build_lowmem = lambda *_: built.append("lowmem")  # type: ignore[assignment,func-returns-value]
    auto.build(config_for(paths, "auto", train_path=str(Path(paths["train_path"][0]).with_name("chunked.h5"))), world)
    return found, conditions, built


@pytest.mark.parametrize(
    ("size", "names"), [(2, NAMES), (4, ["lowmem"]), pytest.param(4, NAMES, marks=pytest.mark.slow)], ids=str
)
def test_ranks_together_get_the_samples_of_the_plan(
    paths: Paths, volume_file: VolumeFile, size: int, names: list[str]
) -> None:
    """Each step has the global batch of one rank; with three validation samples, one of four ranks gets none."""
    volume_file(paths["train_path"][0].replace("train.h5", "chunked.h5"), chunks=(1, 8, 8, 8))
    for rank, (found, conditions, built) in enumerate(run_ranks(read_on_ranks, size, paths, names)):
        for name, batches in found.items():
            config, few = config_for(paths, name), config_for(paths, name, Nsamples_val=3)
            wanted = expected(config, READINGS, rank, size) + expected(few, FEW, rank, size)
            assert batches == wanted, f"{name} on rank {rank} of {size}"
            assert conditions[name] == expected_conditions(config, WHOLE, rank, size)
        assert built == ["lowmem"], "all ranks must choose the same loader"


@EVERY_LOADER
def test_use_cache_reads_the_copies_of_the_node(paths: Paths, tmp_path: Path, name: str) -> None:
    """The originals may be overwritten once the loaders are built."""
    (tmp_path / "cache").mkdir()
    shutil.copytree(Path(paths["val_path"]).parent, tmp_path / "data")
    moved = config_for(paths, name, use_cache=str(tmp_path / "cache"))
    keys = {key: [str(tmp_path / "data" / Path(path).name) for path in moved.paths(key)] for key in paths}
    loaders = build_loaders(moved.model_copy(update=keys))
    for path in [path for moved_paths in keys.values() for path in moved_paths]:
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            file.write(bytes(size))
    assert read(loaders, WHOLE) == expected(config_for(paths, name), WHOLE)


@pytest.mark.parametrize("reads", ["hdf5", "npy"])
def test_a_run_records_the_shapes_of_volumes_that_are_not_one_cube(paths: Paths, tmp_path: Path, reads: str) -> None:
    """In its box_size, which config.yaml keeps and which decides whether a training run can resume."""
    config = config_for(paths, "lowmem", box_size=[1024, 512])
    if reads == "npy":  # without the HDF5 files, but with their names
        gone = {"train_path": ["gone.h5", "gone, too.h5"], "val_path": "gone.h5"}
        config = config.model_copy(update=gone)
    found = with_file_values(config, reads)
    shapes = {key: [list(box) for (each, _), box in BOXES.items() if each == key] for key in ("train", "val")}
    assert found.box_size == [shapes["train"], shapes["val"]]
    (tmp_path / "config.yaml").write_text(to_yaml(found, "test"))
    again = load(str(tmp_path / "config.yaml"), "test")
    assert with_file_values(again, reads) == again == found
    swapped = found.model_copy(update={key: config.paths(key)[::-1] for key in paths if key.startswith("train")})
    assert result_changes(found, with_file_values(swapped, reads)) == ["box_size"]


@pytest.mark.parametrize("reads", ["hdf5", "npy"])
def test_box_size_and_channels_that_a_config_does_not_name_are_those_of_its_files(
    volume_file: VolumeFile, tmp_path: Path, reads: str
) -> None:
    """A named value that is wrong is refused; vectors that a file cannot have are no longer the default."""
    file = volume_file(tmp_path / "volume.h5", 16, channels=(2, 7))
    copies = dict(zip(("data", "label"), map(str, convert(file)), strict=True))
    keys = {f"{key}_path": str(file) for key in ("train", "val")}
    keys |= {f"{key}_path_npy_{kind}": copy for key in ("train", "val") for kind, copy in copies.items()}
    if reads == "npy":
        file.rename(tmp_path / "gone.h5")
    found = with_file_values(validate(keys, "mine"), reads)
    assert (found.N_in_channels, found.N_out_channels, found.box_size) == (2, 7, [16, 16])
    assert (found.vector_channels.inputs, found.vector_channels.targets) == ([], [[1, 2, 3]])
    open_files = open_split if reads == "hdf5" else open_split_npy
    open_files(found.model_copy(update={"data_size": 8}), "train")
    for key, value in {"N_in_channels": 4, "N_out_channels": 5, "box_size": [32, 32]}.items():
        named = with_file_values(validate({**keys, key: value}, "mine"), reads)
        assert key != "box_size" or named.box_size == value
        with pytest.raises(UserError, match="box_size is 32" if key == "box_size" else "expected"):
            open_files(named, "train")
    with pytest.raises(UserError, match="there is no channel 3, since N_in_channels is 2"):
        with_file_values(validate({**keys, "vector_channels": {"inputs": [[1, 2, 3]]}}, "mine"), reads)


def test_volumes_that_do_not_fit_the_config_are_refused_by_name(paths: Paths) -> None:
    """Crops must fit into each volume; there must be as many .npy files as HDF5 files."""
    for crop, name, cells in ((9, "more.h5", "8 × 24 × 12"), (12, "train.h5", "16 × 9 × 20")):
        with pytest.raises(UserError, match=rf"{name}: .* {cells} cells, .* data_size {crop} do not fit"):
            open_split(config_for(paths, "lowmem", data_size=crop), "train")
    for key in ("train_path", "train_path_npy_data", "train_path_npy_label"):
        fewer = config_for({**paths, key: paths[key][:1]}, "dali-lowmem")
        with pytest.raises(UserError, match=r"train_path list (2 and 1|1 and 2) files"):
            open_split_npy(fewer, "train")


def test_inmem_needs_memory_for_all_volumes_before_it_reads_the_first(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "free_shared_memory", lambda _: SIZE - 1)
    monkeypatch.setattr(shared_memory, "_fill", lambda *_: pytest.fail("a volume was read"))
    with pytest.raises(UserError, match=r"train\.h5, .*more\.h5, .*valid\.h5 need 0\.00 GiB of memory"):
        build_loaders(config_for(paths, "inmem"))


class CountingLoader(Loader):
    closed = 0

    def __len__(self) -> int:
        return 0

    def close(self) -> None:
        type(self).closed += 1


def test_if_the_second_loader_fails_the_first_is_closed() -> None:
    def build(split: str) -> Loader:
        if split == "valid":
            raise UserError("no memory")
        return CountingLoader()

    with pytest.raises(UserError, match="no memory"):
        build_splits(build, ALONE)
    assert CountingLoader.closed == 1


# --- auto ----------------------------------------------------------------------------------------------------------


def chosen(config: Config, world: World, monkeypatch: pytest.MonkeyPatch, *fails: str) -> str:
    """The loader that `auto` builds, and the type in which it would store values; `fails` cannot be built."""
    built: list[str] = []

    def build(name: str, config: Config) -> None:
        loader = f"{name} {config.resident_dtype}"
        if loader in fails:
            raise UserError(f"{loader} fails")
        built.append(loader)

    for module, function, name in (
        (gpu_resident, "build", "resident"),
        (dali, "build", "dali-lowmem"),
        (threaded, "build_inmem", "inmem"),
        (threaded, "build_lowmem", "lowmem"),
    ):
        monkeypatch.setattr(module, function, lambda config, *_, name=name: build(name, config))
    auto.build(config, world)
    return built[0]


@pytest.mark.parametrize(
    ("changes", "fails", "wanted"),
    [
        ({}, [], "resident float32"),
        ({"enable_amp": True}, [], "resident float32"),
        ({}, ["resident float32"], "dali-lowmem float32"),
        ({"enable_amp": True}, ["resident float32"], "resident float16"),
        ({"enable_amp": True, "deterministic": True}, ["resident float32"], "dali-lowmem float32"),
        ({"enable_amp": True}, ["resident float32", "resident float16"], "dali-lowmem float32"),
        ({}, ["resident float32", "dali-lowmem float32"], "lowmem float32"),
    ],
)
def test_auto_on_a_gpu(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: Any, changes: Any, fails: list[str], wanted: str
) -> None:
    """Device memory if the volumes fit, with mixed precision as float16; a deterministic run does not round.

    The log has the reasons against the others.
    """
    caplog.set_level(logging.INFO)
    config = config_for(paths, "auto").model_copy(update=changes)
    assert chosen(config, World(Launch("test"), torch.device("cuda", 0)), monkeypatch, *fails) == wanted
    (line,) = caplog.messages
    assert line.count("; not ") == len(fails)
    assert all(f"not {loader.split()[0]}: {loader} fails" in line for loader in fails)


def test_auto_on_a_cpu(paths: Paths, volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous files are mapped; chunked ones are unpacked if memory has room for both volumes."""
    assert chosen(config_for(paths, "auto"), ALONE, monkeypatch).startswith("lowmem")
    file = volume_file(tmp_path / "chunked.h5", BOXES["train", "train"], chunks=(1, 8, 8, 8))
    chunked = config_for(paths, "auto", train_path=[str(file), paths["train_path"][1]])
    assert chosen(chunked, ALONE, monkeypatch).startswith("inmem")
    assert chosen(chunked, ALONE, monkeypatch, "inmem float32").startswith("lowmem")
