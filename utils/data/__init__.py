"""Loaders: each carries out the same sample plan. A new one is a module here and a line in LOADERS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from utils.config import Config
from utils.data.datasets import Dataset, Labelled, find_dataset, open_dataset
from utils.data.files.hdf5 import Volume, open_volume, stage
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.files.page_cache import map_cached_pages, warm_page_cache
from utils.data.files.shared_memory import room_for_copies, share_volume
from utils.data.loaders import dali
from utils.data.loaders.classification import ClassificationLoader
from utils.data.loaders.dali import DaliLoader
from utils.data.loaders.gpu_resident import GpuResidentLoader, check_fits, load_resident
from utils.data.loaders.prefetcher import Batch
from utils.data.loaders.synthetic import SyntheticLoader
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan, ShufflePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.pending_work import PendingWork
from utils.profiling.memory import GIB

SPLITS = ("train", "valid")

# Called only where the answer matters: PyTorch takes seconds to find out.
Bytes = Callable[[], int]


class Loader(Protocol):
    """This rank's batches; a batch is valid until the next one is asked for."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Loaders:
    """The loaders of both splits; a context manager that closes them.

    `notes` say what starting them did and why, for the log.
    """

    train: Loader
    valid: Loader
    notes: tuple[str, ...] = ()

    def __enter__(self) -> Loaders:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.train.close()
        finally:
            self.valid.close()


def build_loaders(config: Config, world: World, training_bytes: Bytes = lambda: 0) -> Loaders:
    """The config's loaders for this rank; every rank calls it, and fails with the others.

    `config` has its batch sizes resolved for the world (`Config.for_world`); `training_bytes` tells what the training
    itself will take on the device: a loader that keeps the volume there leaves that much.
    """
    return get_loader(config.data_loader_config).build(config, world, training_bytes)


def attach_pending_work(loader: Loader, beside: PendingWork | None) -> None:
    """Has a loader whose batches kernels alone make offer there what makes the next one; None: it does so itself."""
    if isinstance(loader, GpuResidentLoader):
        loader.attach(beside)


class LoaderSpec(NamedTuple):
    """How loaders of one name are built, and which files they read: 'hdf5', 'npy', 'classification' or none."""

    build: Callable[[Config, World, Bytes], Loaders]
    reads: str | None = "hdf5"


def get_loader(name: str) -> LoaderSpec:
    """The loader `name`; UserError where there is no such."""
    if name not in LOADERS:
        known = ", ".join(LOADERS)
        raise UserError(f"unknown data_loader_config {name}; known: {known}; choose one with --data_loader_config")
    return LOADERS[name]


def sample_plan(config: Config, split: str) -> SamplePlan:
    """The plan of one split, 'train' or 'valid'."""
    train = split == "train"
    return SamplePlan(
        samples=config.Nsamples if train else config.Nsamples_val,
        box=config.box_size[0 if train else 1],
        crop=config.data_size,
        seed=config.seed,
        split=split,
        augment=config.symmetries != "none",
    )


def open_split(config: Config, split: str) -> Volume:
    """The volume of one split, checked against the config."""
    train = split == "train"
    path, box = config.train_path if train else config.val_path, config.box_size[not train]
    return open_volume(path, _channels(config), box, config.transform)


def open_box(config: Config, split: str) -> Volume:
    """One split's volume from whichever of its files are there, to be read as a whole."""
    reads = get_loader(config.data_loader_config).reads
    if reads not in ("hdf5", "npy"):
        raise UserError(
            f"evaluation.every_epochs: data_loader_config {config.data_loader_config} reads no volumes to paint; "
            f"set it to 0, or choose another loader"
        )
    source = config.train_path if split == "train" else config.val_path
    twins_alone = reads == "npy" and not os.path.exists(source)
    return open_split_npy(config, split).volume() if twins_alone else open_split(config, split)


def open_split_npy(config: Config, split: str) -> NpyVolume:
    """The `.npy` twins of one split, checked against the config and, where it is there, the HDF5 file."""
    prefix = "train" if split == "train" else "val"
    keys = (f"{prefix}_path_npy_data", f"{prefix}_path_npy_label")
    paths = (getattr(config, keys[0]), getattr(config, keys[1]))
    source = getattr(config, f"{prefix}_path")
    volume = open_split(config, split) if os.path.exists(source) else None
    return open_npy_volume(
        paths, keys, source, _channels(config), config.box_size[0 if split == "train" else 1], volume
    )


def batch_like(config: Config, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a batch as loaders make it, on torch's meta device: shapes and types without numbers."""
    if config.dataset.name is not None:
        dataset = find_dataset(config.dataset.name)
        kind = torch.float32 if dataset.vocabulary is None else torch.int64
        inputs = torch.empty((samples, *dataset.shape), dtype=kind, device="meta")
        return inputs, torch.empty(samples, dtype=torch.int64, device="meta")
    inputs, targets = (
        torch.empty((samples, channels, *(config.data_size,) * 3), device="meta") for channels in _channels(config)
    )
    return inputs, targets


def _channels(config: Config) -> tuple[int, int]:
    return config.N_in_channels, config.N_out_channels


# --- the loaders ---------------------------------------------------------------------------------------------------


def _lowmem(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """Crops from the file, mapped where it can be."""
    volumes = _volumes(config, world)
    note = warm_page_cache([path for volume in volumes.values() for path in volume.files], world)
    for volume in volumes.values():
        if volume.mapped:
            map_cached_pages(volume.files, (volume.inputs, volume.targets))
    return _native(volumes, config, world, note)


def _inmem(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """Crops from one copy in the node's memory."""
    volumes, note = _loaded(_volumes(config, world), lambda volume: share_volume(volume, world), "memory")
    return _native(volumes, config, world, note)


def _native(volumes: dict[str, Volume], config: Config, world: World, note: str) -> Loaders:
    return _both(lambda split: ThreadedCropLoader(volumes[split], **_common(config, world, split)), world, note)


def _dali_lowmem(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """Crops of `.npy` twins, turned on the device by NVIDIA DALI."""
    with world.raise_together():
        dali.check_installed()
        twins = {split: open_split_npy(config, split) for split in SPLITS}
    if config.use_cache is not None:
        twins = {split: _staged_npy(twins[split], config, world, split) for split in SPLITS}
    note = warm_page_cache([path for each in twins.values() for path in each.paths], world)
    for each in twins.values():
        map_cached_pages(each.paths, each.arrays)
    return _both(lambda split: DaliLoader(twins[split], **_common(config, world, split)), world, note)


def _resident(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """Crops from the device's own memory; without CUDA from one copy in the node's."""
    volumes = _volumes(config, world)
    if world.device.type == "cuda":
        with world.raise_together():
            _check_resident(config, world, volumes, training_bytes)
    dtype = getattr(torch, config.resident_dtype)
    place = "memory" if world.device.type == "cpu" else f"the memory of {world.device}, as {config.resident_dtype}"
    loaded, note = _loaded(volumes, lambda volume: load_resident(volume, world, dtype), place)
    return _both(lambda split: GpuResidentLoader(loaded[split], **_common(config, world, split)), world, note)


def _loaded(volumes: dict[str, Volume], load: Callable[[Volume], Volume], place: str) -> tuple[dict[str, Volume], str]:
    """The volumes as `load` returns them, and what that took in words for the log."""
    loaded, told = {}, []
    for split, volume in volumes.items():
        started = time.perf_counter()
        loaded[split] = load(volume)
        seconds = time.perf_counter() - started
        name, size = os.path.basename(volume.path), volume.bytes
        speed = f"{size / 1e9 / seconds:.1f} GB/s"
        told.append(f"{name}: {size / GIB:.2f} GiB read into {place} in {seconds:.2f} s ({speed})")
    return loaded, "; ".join(told)


def _check_resident(config: Config, world: World, volumes: dict[str, Volume], training_bytes: Bytes) -> None:
    free, _ = torch.cuda.mem_get_info(world.device)
    dtype = getattr(torch, config.resident_dtype)
    check_fits([volume.bytes for volume in volumes.values()], dtype, free, training_bytes())


def _synthetic(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    assert config.local_batch_size is not None
    batch_size = config.local_batch_size
    return _both(
        lambda split: SyntheticLoader(
            samples=config.Nsamples if split == "train" else config.Nsamples_val,
            crop=config.data_size,
            channels=_channels(config),
            batch_size=batch_size,
            drop_last=split == "train",
            rank=world.rank,
            world_size=world.size,
            seed=config.seed,
            device=world.device,
            channels_last=config.channels_last,
        ),
        world,
    )


def _classification(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """Labelled samples from the device's own memory."""
    assert config.local_batch_size is not None
    batch_size = config.local_batch_size
    with world.raise_together():
        dataset, splits = open_labelled(config)
        plans = {split: shuffle_plan(config, split, len(data.labels)) for split, data in splits.items()}
    return _both(
        lambda split: ClassificationLoader(
            splits[split],
            plans[split],
            batch_size=batch_size,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
            scale=dataset.scale,
        ),
        world,
        f"{config.dataset.name}: {', '.join(f'{len(data.labels)} {split}' for split, data in splits.items())} samples",
    )


def open_labelled(config: Config) -> tuple[Dataset, dict[str, Labelled]]:
    """The config's data set, and its splits."""
    name, directory = config.dataset.name, config.dataset.directory
    assert name is not None
    return find_dataset(name), open_dataset(name, directory, config.dataset.verify)


def shuffle_plan(config: Config, split: str, available: int) -> ShufflePlan:
    """The order of one split's samples, of which there are so many; UserError where the config asks for more."""
    key = "Nsamples" if split == "train" else "Nsamples_val"
    samples = getattr(config, key)
    if samples > available:
        raise UserError(f"{key} {samples} is more than the {available} {split} samples of {config.dataset.name}")
    return ShufflePlan(samples, available, config.seed, split)


def _auto(config: Config, world: World, training_bytes: Bytes) -> Loaders:
    """The fastest of the others that fits; they all give the same batches."""
    name, reason = choose(config, world, training_bytes)
    loaders = get_loader(name).build(config, world, training_bytes)
    return replace(loaders, notes=(f"data_loader_config auto: {name}, {reason}", *loaders.notes))


def choose(config: Config, world: World, training_bytes: Bytes) -> tuple[str, str]:
    """The loader that `auto` stands for, and why; the same on every rank.

    On a GPU nothing is faster than the device's own memory; where that is too small, DALI leaves the turning to the
    GPU and reads longer rows. On the CPU cores that turn crops are the limit: there mapped files and memory are equally
    fast (benchmarks/results/loaders.json), and only a chunked file must be unpacked first.
    """
    with world.raise_together():
        volumes = {split: open_split(config, split) for split in SPLITS}
    why = []
    if world.device.type == "cuda":
        fault = _fault(world, lambda: _check_resident(config, world, volumes, training_bytes))
        if fault is None:
            return "resident", "the volumes fit into device memory beside the training"
        why.append(fault)
        fault = _fault(world, lambda: _check_dali(config))
        if fault is None:
            return "dali-lowmem", "; ".join([*why, "NVIDIA DALI and the .npy twins are there"])
        why.append(fault)
    if all(volume.mapped for volume in volumes.values()):
        return "lowmem", "; ".join([*why, "the files lie in one piece and are mapped"])
    size = sum(volume.bytes for volume in volumes.values())
    free = min(world.gather_objects(room_for_copies(world)))
    sizes = f"the files are chunked; unpacked they are {size / GIB:.2f} GiB, memory has room for {free / GIB:.2f} GiB"
    return ("inmem" if size <= free else "lowmem"), "; ".join([*why, sizes])


def _check_dali(config: Config) -> None:
    dali.check_installed()
    for split in SPLITS:
        open_split_npy(config, split)


def _fault(world: World, check: Callable[[], None]) -> str | None:
    """What `check` finds wrong on the first rank where it does; None on all ranks if it is right on all."""
    try:
        check()
        fault = None
    except UserError as error:
        fault = str(error)
    return next((fault for fault in world.gather_objects(fault) if fault is not None), None)


LOADERS = {
    "lowmem": LoaderSpec(_lowmem),
    "inmem": LoaderSpec(_inmem),
    "dali-lowmem": LoaderSpec(_dali_lowmem, reads="npy"),
    "resident": LoaderSpec(_resident),
    "synthetic": LoaderSpec(_synthetic, reads=None),
    "classification": LoaderSpec(_classification, reads="classification"),
    "auto": LoaderSpec(_auto),
}


# --- what they have in common --------------------------------------------------------------------------------------


def _both(build: Callable[[str], Loader], world: World, *notes: str) -> Loaders:
    """The loaders of both splits; what fails on one rank (memory, threads) fails on all."""
    with world.raise_together():
        return Loaders(build("train"), build("valid"), tuple(note for note in notes if note))


def _common(config: Config, world: World, split: str) -> dict[str, Any]:
    assert config.local_batch_size is not None
    return {
        "plan": sample_plan(config, split),
        "batch_size": config.local_batch_size,
        "rank": world.rank,
        "world_size": world.size,
        "threads": config.num_data_workers,
        "device": world.device,
        "vectors": (config.vector_channels.inputs, config.vector_channels.targets),
        "symmetry_mode": config.symmetries,
        "channels_last": config.channels_last,
    }


def _volumes(config: Config, world: World) -> dict[str, Volume]:
    """Both splits' volumes, staged where the config says so."""
    with world.raise_together():
        volumes = {split: open_split(config, split) for split in SPLITS}
    if config.use_cache is None:
        return volumes
    copies = {split: _staged(volume.path, config.use_cache, world) for split, volume in volumes.items()}
    with world.raise_together():
        return {split: open_volume(copies[split], _channels(config), volume.box) for split, volume in volumes.items()}


def _staged_npy(twins: NpyVolume, config: Config, world: World, split: str) -> NpyVolume:
    assert config.use_cache is not None
    data, label = (_staged(path, config.use_cache, world) for path in twins.paths)
    prefix = "train" if split == "train" else "val"
    staged = config.model_copy(update={f"{prefix}_path_npy_data": data, f"{prefix}_path_npy_label": label})
    with world.raise_together():
        return open_split_npy(staged, split)


def _staged(path: str, directory: str, world: World) -> str:
    """The path of the node's copy."""
    with world.raise_together():
        if world.is_node_leader:
            stage(path, directory, silent=not world.is_root)
    with world.raise_together():
        # The leader has staged it: this finds the copy, and copies nothing.
        return stage(path, directory)
