"""The contract of all loaders in LOADERS: equal bits for the same plan on any number of ranks. The choice of `auto`."""

import functools
import itertools
import os
import shutil
from collections import Counter, namedtuple
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE, digest, rank_batches, read_fields, reference, write_signed_zeros
from volume_files import write_volume

import train
from utils.config import Config, load, validate
from utils.data import symmetry
from utils.data.loaders import LOADERS, DataSplits, LoaderSpec, build_auto, dali, get_loader, open_volumes, threaded
from utils.data.loaders.base import memory_format, sample_plan
from utils.data.loaders.synthetic import SyntheticLoader
from utils.distributed.launch import Launch
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes.convert_to_npy import convert
from utils.volumes.opened import Volumes

TOP = Path(__file__).parents[2]
GLOBAL_BATCH, TRAIN_SAMPLES, VALID_SAMPLES = 8, 347, 11  # 43 training steps and an incomplete one
# Two volumes to train on and one for validation, none of them a cube, by the config's key and the file's name.
BOXES = {("train", "train"): (16, 9, 20), ("train", "more"): (8, 24, 12), ("val", "valid"): (18, 16, 8)}
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

# One pass over an epoch, from batch `first` on, which ends after `taken` batches.
Reading = namedtuple("Reading", "split epoch first taken", defaults=(0, None))
WHOLE = [Reading("train", 0), Reading("train", 1), Reading("valid", 0), Reading("valid", 1)]
ENDED_EARLY = [reading for taken in (1, 2, 3, 4, 5) for reading in (Reading("train", 2, 0, taken), Reading("valid", 2))]
RESUMED = [Reading("train", 3, 1), Reading("train", 3, 42), Reading("train", 3, 43), Reading("valid", 1, 1)]
FEW = [Reading("valid", 0), Reading("valid", 1)]  # of an epoch with fewer samples than a batch
READINGS = [*WHOLE, *ENDED_EARLY, Reading("train", 2, 30), *RESUMED]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> Paths:
    folder = tmp_path_factory.mktemp("loaders")
    written: Paths = {}
    for seed, ((key, name), box) in enumerate(BOXES.items()):
        storage: Any = {"chunks": (1, 5, 4, 7), "compression": "gzip"} if name == "more" else {}
        stated = {"redshift": REDSHIFTS[name], "box_size_mpc_h": LENGTHS[name]}
        path = write_volume(folder / f"{name}.h5", box, seed, **storage, **stated)
        write_signed_zeros(path)
        for kind, file in zip(("", "_npy_data", "_npy_label"), (path, *convert(path)), strict=True):
            written.setdefault(f"{key}_path{kind}", []).append(str(file))
    return written | {key: path for key, (path, *_) in written.items() if key.startswith("val")}


def same_volume(path: Path) -> Paths:
    """A config's keys for the same volume in training and validation."""
    kinds = zip(("", "_npy_data", "_npy_label"), (path, *convert(path)), strict=True)
    return {f"{split}_path{kind}": str(file) for kind, file in kinds for split in ("train", "val")}


def config_for(paths: Paths, name: str, **changed: Any) -> Config:
    samples = {"Nsamples": TRAIN_SAMPLES, "Nsamples_val": VALID_SAMPLES, "global_batch_size": GLOBAL_BATCH}
    return load(str(TOP / "config" / "UNet.yaml"), "test", {**paths, **samples, "data_loader_config": name, **changed})


def build_loaders(config: Config, world: World = ALONE) -> DataSplits:
    return get_loader(config.data_loader_config).build(open_volumes(config.for_world(world.size)), world)


def read(loaders: DataSplits, readings: list[Reading], channels_last: bool = False) -> list[list[list[str]]]:
    """The digests of each reading's batches; closes the loaders."""
    digests, form = [], memory_format(channels_last)
    with loaders:
        for split, epoch, first, taken in readings:
            loader = loaders.train if split == "train" else loaders.valid
            digests.append([])
            with closing(loader.epoch(epoch, first)) as batches:
                for batch in itertools.islice(batches, taken):
                    assert all(part.is_contiguous(memory_format=form) for part in (batch.inputs, batch.targets))
                    digests[-1].append(digest(batch))
                    assert digest(batch) == digests[-1][-1], "a batch changes before the next one is asked for"
            if first == 0 and taken is None:
                assert len(loader) == len(digests[-1])
    return digests


def expected(config: Config, readings: list[Reading], rank: int = 0, size: int = 1, mode: str = "full") -> list[Any]:
    """The digests of each reading's batches by definition, with the conditions of the config."""
    digests = []
    for split, epoch, first, taken in readings:
        paths = config.paths("train_path" if split == "train" else "val_path")
        volumes, stated = [read_fields(path) for path in paths], None
        if config.network.conditions:
            stated = np.array([[REDSHIFTS[Path(path).stem], CELLS[Path(path).stem]] for path in paths], np.float32)
        plan = sample_plan(config, split, [inputs.shape[1:] for inputs, _ in volumes])
        samples = reference(volumes, plan, epoch, mode, stated)
        batches = rank_batches(samples, GLOBAL_BATCH, rank, size, split == "train", plan.parts)
        digests.append(batches[first:][:taken])
    return digests


@EVERY_LOADER
def test_one_rank_gets_the_samples_of_the_plan(paths: Paths, name: str) -> None:
    """All 48 symmetries; complete epochs, ones that end early or resume in the middle; with conditions."""
    config = config_for(paths, name, **CONDITIONS)
    drawn = sample_plan(config, "train", [box for (key, _), box in BOXES.items() if key == "train"]).epoch(0)
    assert (set(drawn.volumes), set(drawn.symmetries)) == ({0, 1}, set(range(48)))
    assert read(build_loaders(config), READINGS) == expected(config, READINGS)
    few = config_for(paths, name, Nsamples_val=3)
    assert read(build_loaders(few), FEW) == expected(few, FEW)
    ranges = open_volumes(config).config.network.condition_ranges
    assert ranges == [[2.5, 3.25], [CELLS["more"], CELLS["train"]]], "those of the training volumes"


@EVERY_LOADER
def test_a_batch_of_several_validation_volumes_is_of_one_of_them(paths: Paths, name: str) -> None:
    """Of 23 samples each of the two volumes has 11."""
    keys = {key.replace("train", "val"): value for key, value in paths.items() if key.startswith("train")}
    config, readings = config_for(paths, name, **keys, Nsamples_val=23), [Reading("valid", 0), Reading("valid", 1, 3)]
    with build_loaders(config) as loaders:
        assert loaders.valid.volumes == ["train", "more"]
        assert [loaders.valid.volume_of(batch) for batch in range(len(loaders.valid))] == [0, 0, 1, 1]
        assert (loaders.train.volumes, loaders.train.volume_of(42)) == (["train"], 0)
    assert read(build_loaders(config), readings) == expected(config, readings)


@EVERY_LOADER
@pytest.mark.parametrize(
    ("symmetries", "channels_last"), [("full", True), ("grid", False), ("tutorial", False), ("none", True)]
)
def test_modes_and_layouts(paths: Paths, name: str, symmetries: str, channels_last: bool) -> None:
    config = config_for(paths, name, symmetries=symmetries, channels_last=channels_last)
    readings = [Reading("train", 0), Reading("valid", 0)]
    assert read(build_loaders(config), readings, channels_last) == expected(config, readings, mode=symmetries)


def test_dali_augments_without_the_operations_of_torch(paths: Paths, monkeypatch: Any) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    for owner, name in ((symmetry, "apply_on_device"), (torch.Tensor, "flip"), (torch.Tensor, "index_select")):
        monkeypatch.setattr(owner, name, None)
    config = config_for(paths, "dali-lowmem")
    assert read(build_loaders(config), WHOLE) == expected(config, WHOLE)


@pytest.mark.parametrize("name", [*NAMES, "synthetic"])
def test_channels_last_strides_hold_for_a_single_channel_too(tmp_path: Path, name: str) -> None:
    """A single channel has both formats in memory; PyTorch then chooses its kernels by the strides."""
    keys = same_volume(write_volume(tmp_path / "box.h5", box=8, channels=(1, 2)))
    config = config_for(keys, name, box_size=[8, 8], channels_last=True, N_in_channels=1, N_out_channels=2)
    with build_loaders(config) as loaders:
        for part, count in zip(next(loaders.valid.epoch(0)), (1, 2), strict=True):
            assert part.stride() == (count * 8**3, 1, count * 8**2, count * 8, count)


def read_on_ranks(world: World, paths: Paths, names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The loaders' batches on this rank; what `auto` has built if the first rank has no room in memory."""
    digests, built = {}, []
    for name in names:
        config, few = config_for(paths, name, **CONDITIONS), config_for(paths, name, Nsamples_val=3)
        digests[name] = read(build_loaders(config, world), READINGS) + read(build_loaders(few, world), FEW)
    threaded.free_shared_memory = lambda _: 0 if world.is_root else 2**40
    LOADERS["lowmem"] = LoaderSpec(lambda *_: built.append("lowmem"))  # type: ignore[arg-type,return-value,func-returns-value]
    chunked = str(Path(paths["val_path"]).with_name("chunked.h5"))
    build_auto(open_volumes(config_for(paths, "auto", train_path=chunked)), world)
    return digests, built


@pytest.mark.parametrize(
    ("size", "names"), [(2, NAMES), (4, ["lowmem"]), pytest.param(4, NAMES, marks=pytest.mark.slow)], ids=str
)
def test_ranks_together_get_the_samples_of_the_plan(paths: Paths, size: int, names: list[str]) -> None:
    """Each step has the global batch of one rank; with three validation samples, one of four ranks gets none."""
    write_volume(Path(paths["val_path"]).with_name("chunked.h5"), chunks=(1, 8, 8, 8))
    for rank, (digests, built) in enumerate(run_ranks(read_on_ranks, size, paths, names)):
        for name, batches in digests.items():
            config, few = config_for(paths, name, **CONDITIONS), config_for(paths, name, Nsamples_val=3)
            wanted = expected(config, READINGS, rank, size) + expected(few, FEW, rank, size)
            assert batches == wanted, f"{name} on rank {rank} of {size}"
        assert built == ["lowmem"], "all ranks must choose the same loader"


@EVERY_LOADER
def test_use_cache_reads_the_copies_of_the_node(paths: Paths, tmp_path: Path, name: str) -> None:
    """The originals may be overwritten once the loaders are built."""
    (tmp_path / "cache").mkdir()
    shutil.copytree(Path(paths["val_path"]).parent, tmp_path / "data")
    moved = config_for(paths, name, use_cache=str(tmp_path / "cache"))
    keys = {key: [str(tmp_path / "data" / Path(path).name) for path in moved.paths(key)] for key in paths}
    loaders = build_loaders(moved.model_copy(update=keys))
    for path in itertools.chain(*keys.values()):
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            file.write(bytes(size))
    assert read(loaders, WHOLE) == expected(config_for(paths, name), WHOLE)


def openings(world: World, config: Config) -> Counter[str]:
    """The numbers of times that this rank, a process, has opened each file when its first step begins."""
    counts: Counter[str] = Counter()

    def counted(function: Any) -> Any:
        return lambda path, *rest, **options: counts.update([os.fsdecode(path)]) or function(path, *rest, **options)

    def first_step(*_: Any) -> None:
        raise UserError("the first step")

    h5py.h5f.open, np.lib.format.open_memmap = counted(h5py.h5f.open), counted(np.lib.format.open_memmap)
    step_class = type("FirstStep", (train.EagerStep,), {"__call__": first_step})
    with pytest.raises(UserError, match="the first step"):
        train.run(train.cli.parse([]), train.open_volumes(config.for_world(world.size)), world, step_class, Signals())
    return counts


@pytest.mark.parametrize(
    ("ranks", "name", "copied"), [(4, "auto", 0), (1, "auto", 0), (1, "lowmem", 3), (1, "dali-lowmem", 0)]
)
def test_each_rank_opens_each_file_once_before_its_first_step(
    paths: Paths, tmp_path: Path, ranks: int, name: str, copied: int
) -> None:
    """Also one that training and validation share, with conditions, evaluations of a whole volume, and copies."""
    both = {key: [paths[key], paths[key.replace("val", "train")][1]] for key in paths if key.startswith("val")}
    changes = {**CONDITIONS, "evaluation.every_epochs": 1, "Nsamples_val": 16, "expdir": str(tmp_path)}
    config = config_for(paths | both, name, **changes, use_cache=str(tmp_path / "cache") if copied else None)
    files = 3 + copied + (6 if name == "dali-lowmem" else 0)
    for counts in run_ranks(openings, ranks, config):
        assert (set(counts.values()), len(counts)) == ({1}, files), counts


@pytest.mark.parametrize("reads", ["hdf5", "npy"])
def test_box_size_and_channels_that_a_config_does_not_name_are_those_of_its_files(tmp_path: Path, reads: str) -> None:
    """A named value that is wrong is refused; vectors that a file cannot have are not assumed."""
    file = write_volume(tmp_path / "volume.h5", 16, channels=(2, 7))
    keys = same_volume(file)
    if reads == "npy":
        file.rename(tmp_path / "gone.h5")
    volumes = Volumes.open(validate(keys, "mine"), reads)
    completed = volumes.config
    assert (completed.N_in_channels, completed.N_out_channels, completed.box_size) == (2, 7, [16, 16])
    assert completed.vectors == ([], [[1, 2, 3]])
    volumes.changed(data_size=8).split("train")
    for key, value in {"N_in_channels": 4, "N_out_channels": 5, "box_size": [32, 32]}.items():
        named = Volumes.open(validate({**keys, key: value}, "mine"), reads)
        assert key != "box_size" or named.config.box_size == value
        with pytest.raises(UserError, match="box_size is 32" if key == "box_size" else rf"expected .*, or set {key}$"):
            named.split("train")


@pytest.mark.parametrize("key", ["train_path", "train_path_npy_data", "train_path_npy_label"])
def test_there_must_be_as_many_npy_files_as_hdf5_files(paths: Paths, key: str) -> None:
    fewer = config_for({**paths, key: paths[key][:1]}, "dali-lowmem")
    with pytest.raises(UserError, match=r"train_path list (2 and 1|1 and 2) files"):
        open_volumes(fewer).split("train", npy=True)


def test_the_synthetic_loader_repeats_one_batch_per_seed_and_rank(paths: Paths) -> None:
    """Values in [-1, 1), as many batches as the plan has; training drops an incomplete one."""
    config = config_for(paths, "synthetic", Nsamples=10, Nsamples_val=10, global_batch_size=3)
    loaders, second = build_loaders(config), World(Launch("test", 1, 1, 2), torch.device("cpu"))
    batches = list(loaders.train.epoch(0))
    assert [len(batch.inputs) for batch in batches] == [3, 3, 3]
    assert [len(batch.inputs) for batch in loaders.valid.epoch(0, first_batch=2)] == [3, 1]
    assert len({batch.inputs.data_ptr() for batch in batches}) == 1
    for part, again in zip(batches[0], next(build_loaders(config).train.epoch(5)), strict=True):
        assert -1 <= part.min() < -0.9 < 0.9 < part.max() < 1
        assert torch.equal(part, again)
    plan, resolved = sample_plan(config, "train", [(8, 8, 8)]), config.for_world(1)
    for loader in (SyntheticLoader(plan, resolved, second), SyntheticLoader(replace(plan, seed=7), resolved, ALONE)):
        assert not torch.equal(batches[0].inputs, next(loader.epoch(0)).inputs)


AMP = {"enable_amp": True}


@pytest.mark.parametrize(
    ("device", "changes", "fails", "wanted"),
    [
        ("cuda", AMP, [], "resident float32"),
        ("cuda", {}, ["resident float32"], "dali-lowmem float32"),
        ("cuda", AMP, ["resident float32"], "resident float16"),
        ("cuda", AMP | {"deterministic": True}, ["resident float32"], "dali-lowmem float32"),
        ("cuda", {}, ["resident float32", "dali-lowmem float32"], "lowmem float32"),
        ("cpu", {}, [], "lowmem float32"),
        ("cpu", {"chunks": (1, 8, 8, 8)}, [], "inmem float32"),
        ("cpu", {"chunks": (1, 8, 8, 8)}, ["inmem float32"], "lowmem float32"),
    ],
)
def test_auto_builds_the_fastest_loader_that_fits(
    paths: Paths, tmp_path: Path, monkeypatch: Any, device: str, changes: Any, fails: list[str], wanted: str
) -> None:
    """Device memory, with mixed precision as float16 unless deterministic; on a CPU chunked files are unpacked."""
    file = write_volume(tmp_path / "first.h5", BOXES["train", "train"], chunks=changes.get("chunks"))
    config = config_for(paths, "auto", train_path=str(file)).model_copy(update=changes)
    built = []

    def build(name: str, volumes: Volumes, *_: Any) -> None:
        loader = f"{name} {volumes.config.resident_dtype}"
        if loader in fails:
            raise UserError(f"{loader} fails")
        built.append(loader)

    for name in ("resident", "dali-lowmem", "inmem", "lowmem"):
        monkeypatch.setitem(LOADERS, name, LoaderSpec(functools.partial(build, name)))
    build_auto(open_volumes(config), World(Launch("test"), torch.device(device)))
    assert built == [wanted]
