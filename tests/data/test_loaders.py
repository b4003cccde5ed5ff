"""What holds for every loader: the same bits for the same plan, on any number of ranks; and which one `auto` takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from processes import run_ranks

from utils import data
from utils.config import Config, load
from utils.convert_to_npy import convert
from utils.data import LOADERS, build_loaders, choose, open_split, sample_plan, symmetry
from utils.data.dali import check_installed
from utils.data.plan import batch_rows
from utils.distributed import Launch, World
from utils.errors import UserError

VolumeFile = Callable[..., Path]

TOP = Path(__file__).parents[2]
ALONE = World(Launch("test"), torch.device("cpu"))
VECTORS = ([(1, 2, 3)], [(1, 2, 3)])
GLOBAL_BATCH, TRAIN_SAMPLES = 8, 283  # 35 steps and a rest
READING = [name for name, kind in LOADERS.items() if kind.reads in ("hdf5", "npy")]


def unavailable(name: str) -> str | None:
    if LOADERS[name].reads == "npy":
        try:
            check_installed()
        except UserError as error:
            return str(error)
    return None


NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name)), reason=unavailable(name) or ""))
    for name in READING
]


@pytest.fixture(scope="module")
def paths(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("loaders")
    found = {}
    for key, split, seed in (("train", "train", 1), ("val", "valid", 2)):
        path = volume_file(folder / f"{split}.h5", seed=seed)
        data_twin, label_twin = convert(path)
        found |= {f"{key}_path": str(path)}
        found |= {f"{key}_path_npy_data": str(data_twin), f"{key}_path_npy_label": str(label_twin)}
    return found


def config_for(paths: dict[str, str], name: str, **changed: Any) -> Config:
    own = {"data_loader_config": name, "Nsamples": TRAIN_SAMPLES, "Nsamples_val": 11, "global_batch_size": GLOBAL_BATCH}
    return load(str(TOP / "config" / "UNet.yaml"), "test", {**paths, **own, **changed})


def digests(batches: Any) -> list[list[str]]:
    """Batch by batch, one for the bytes of each sample's inputs and targets."""
    return [
        [
            hashlib.sha256(b"".join(part[slot].contiguous().numpy().tobytes() for part in batch)).hexdigest()
            for slot in range(len(batch.inputs))
        ]
        for batch in batches
    ]


def plain(config: Config, split: str, epoch: int) -> list[str]:
    """By definition, the digests of an epoch's samples in the plan's order."""
    with h5py.File(config.train_path if split == "train" else config.val_path) as file:
        fields = file["Nbody"][...], file["Hydro"][...]
    drawn = sample_plan(config, split).epoch(epoch)
    found = []
    for origin, index in zip(drawn.origins, drawn.symmetries, strict=True):
        x, y, z = (slice(start, start + config.data_size) for start in origin)
        turned = (
            symmetry.apply(field[:, x, y, z], int(index), vectors)
            for field, vectors in zip(fields, VECTORS, strict=True)
        )
        found.append(hashlib.sha256(b"".join(part.tobytes() for part in turned)).hexdigest())
    return found


# Training: an epoch and the next, one left after two batches, one from its fourth batch on. Validation: twice.
def walk(config: Config, world: World) -> dict[str, list[list[str]]]:
    loaders = build_loaders(config.for_world(world.size), world)
    train, valid = loaders.train, loaders.valid
    found = {f"train {epoch}": digests(train.epoch(epoch)) for epoch in (0, 1)}
    left = train.epoch(2)
    for _ in range(2):
        next(left)
    left.close()
    found["train 3 from 4"] = digests(train.epoch(3, first_batch=4))
    found |= {f"valid {epoch}": digests(valid.epoch(epoch)) for epoch in (0, 1)}
    assert (len(train), len(valid)) == (len(found["train 0"]), len(found["valid 0"]))
    train.close()
    valid.close()
    return found


def expected(config: Config, rank: int, size: int) -> dict[str, list[list[str]]]:
    batch = GLOBAL_BATCH // size

    def part(split: str, epoch: int) -> list[list[str]]:
        samples = plain(config, split, epoch)
        rows = batch_rows(len(samples), batch, rank, size, drop_last=split == "train")
        return [samples[selection] for selection in rows]

    return {
        "train 0": part("train", 0),
        "train 1": part("train", 1),
        "train 3 from 4": part("train", 3)[4:],
        "valid 0": part("valid", 0),
        "valid 1": part("valid", 1),
    }


def walk_all(world: World, names: list[str], paths: dict[str, str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: walk(config_for(paths, name), world) for name in names}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, paths: dict[str, str]) -> list[dict[str, Any]]:
    return run_ranks(walk_all, request.param, [name for name in READING if not unavailable(name)], paths)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_gets_the_plan_bit_for_bit(paths: dict[str, str], name: str) -> None:
    config = config_for(paths, name)
    plan = sample_plan(config, "train")
    assert {int(index) for epoch in (0, 1) for index in plan.epoch(epoch).symmetries} == set(range(48))
    assert walk(config, ALONE) == expected(config, 0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_get_the_plan_bit_for_bit(ranks: list[dict[str, Any]], paths: dict[str, str], name: str) -> None:
    for rank, found in enumerate(ranks):
        assert found[name] == expected(config_for(paths, name), rank, len(ranks))


@pytest.mark.parametrize("name", NAMES)
def test_no_two_ranks_get_the_same_crop(ranks: list[dict[str, Any]], name: str) -> None:
    crops = [crop for found in ranks for batch in found[name]["train 0"] for crop in batch]
    assert len(set(crops)) == len(crops) == TRAIN_SAMPLES // GLOBAL_BATCH * GLOBAL_BATCH


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_of_fewer_samples_than_a_batch(paths: dict[str, str], name: str) -> None:
    config = config_for(paths, name, Nsamples_val=3)
    loaders = build_loaders(config.for_world(1), ALONE)
    assert digests(loaders.valid.epoch(0)) == digests(loaders.valid.epoch(1)) == [plain(config, "valid", 0)]
    loaders.train.close()
    loaders.valid.close()


@pytest.mark.parametrize("name", [*NAMES, "synthetic"])
def test_channels_last_changes_the_order_in_memory_and_no_value(paths: dict[str, str], name: str) -> None:
    batches = {}
    for channels_last in (False, True):
        loaders = build_loaders(config_for(paths, name, channels_last=channels_last).for_world(1), ALONE)
        found = [next(loaders.train.epoch(0)), list(loaders.valid.epoch(0))[-1]]
        memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
        for batch in found:
            assert all(part.is_contiguous(memory_format=memory_format) for part in batch)
        batches[channels_last] = digests(found)
        loaders.train.close()
        loaders.valid.close()
    assert batches[False] == batches[True]


@pytest.mark.parametrize("name", NAMES)
def test_what_starting_took_is_told(paths: dict[str, str], name: str) -> None:
    loaders = build_loaders(config_for(paths, name).for_world(1), ALONE)
    where = "the page cache" if name in ("lowmem", "dali-lowmem", "auto") else "memory"
    files = ("train_data.npy", "valid_label.npy") if name == "dali-lowmem" else ("train.h5", "valid.h5")
    assert all(file in loaders.notes[-1] for file in files)
    assert where in loaders.notes[-1]
    loaders.train.close()
    loaders.valid.close()


def test_minutes_of_reading_are_told_in_plain_digits(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They once read 1.3e+02 s."""
    clock = iter([0.0, 132.4])
    monkeypatch.setattr(data.time, "perf_counter", lambda: next(clock))
    volume = open_split(config_for(paths, "inmem"), "train")
    _, told = data._loaded({"train": volume}, lambda volume: volume, "memory")
    assert told == "train.h5: 0.00 GiB read into memory in 132.40 s (0.0 GB/s)"


# --- auto ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> World:
    """A rank on a device with 1 MiB free, which is asked for that and nothing else."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**20, 2**20))
    return World(Launch("test"), torch.device("cuda", 0))


SIZE = 2 * 9 * 16**3 * 4  # bytes of both volumes


def test_auto_keeps_the_volume_on_a_device_that_has_room_for_it(paths: dict[str, str], cuda: World) -> None:
    name, reason = choose(config_for(paths, "auto"), cuda, lambda: 2**20 - 3 * SIZE)
    assert name == "resident"
    assert "fit" in reason


def test_auto_takes_dali_where_the_device_is_too_small(
    paths: dict[str, str], cuda: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.dali, "check_installed", lambda: None)
    name, reason = choose(config_for(paths, "auto"), cuda, lambda: 2**20)
    assert name == "dali-lowmem"
    assert "GiB" in reason


@pytest.mark.parametrize("missing", ["DALI", "twins"])
def test_auto_takes_the_mapped_file_where_dali_or_its_twins_are_missing(
    paths: dict[str, str], cuda: World, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def check() -> None:
        if missing == "DALI":
            raise UserError("NVIDIA DALI is not installed")

    monkeypatch.setattr(data.dali, "check_installed", check)
    changed = {"val_path_npy_label": None} if missing == "twins" else {}
    name, reason = choose(config_for(paths, "auto", **changed), cuda, lambda: 2**20)
    assert name == "lowmem"
    assert ("NVIDIA DALI is not installed" if missing == "DALI" else "val_path_npy_label is not set") in reason
    assert "mapped" in reason


def test_auto_on_a_cpu_maps_files_in_one_piece(paths: dict[str, str]) -> None:
    assert choose(config_for(paths, "auto"), ALONE, lambda: 0)[0] == "lowmem"


@pytest.mark.parametrize(("free", "wanted"), [(SIZE, "inmem"), (SIZE - 1, "lowmem")])
def test_auto_unpacks_chunked_files_where_memory_holds_them(
    paths: dict[str, str],
    volume_file: VolumeFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    wanted: str,
) -> None:
    chunked = str(volume_file(tmp_path / "chunked.h5", chunks=(1, 8, 8, 8)))
    monkeypatch.setattr(data, "room_for_copies", lambda _: free)
    name, reason = choose(config_for(paths, "auto", train_path=chunked), ALONE, lambda: 0)
    assert name == wanted
    assert "chunked" in reason


def test_auto_tells_what_it_took_and_why(paths: dict[str, str]) -> None:
    loaders = build_loaders(config_for(paths, "auto").for_world(1), ALONE)
    assert loaders.notes[0].startswith("data_loader_config auto: lowmem, ")
    loaders.train.close()
    loaders.valid.close()


def choose_on_two_ranks(world: World, paths: dict[str, str]) -> str:
    """The second rank's shared memory is too small."""
    data.room_for_copies = lambda _: SIZE if world.is_root else 0  # type: ignore[assignment]
    return choose(config_for(paths, "auto"), world, lambda: 0)[0]


def test_auto_chooses_the_same_on_every_rank(paths: dict[str, str], volume_file: VolumeFile, tmp_path: Path) -> None:
    chunked = str(volume_file(tmp_path / "chunked.h5", chunks=(1, 8, 8, 8)))
    assert run_ranks(choose_on_two_ranks, 2, {**paths, "train_path": chunked}) == ["lowmem", "lowmem"]
