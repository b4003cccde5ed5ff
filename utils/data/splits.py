"""Shared by the loaders' build functions: opens the files of both splits, stages them and builds a loader per split."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from utils.config import Config
from utils.data.datasets import get_dataset
from utils.data.files.attributes import (
    Simulation,
    cell_size,
    file_transform,
    simulation_of,
    warnings_of_unstated,
)
from utils.data.files.hdf5 import Volume, open_file, open_volume, reading, stage
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.files.values import check_samples
from utils.data.loader import Loader, Loaders
from utils.data.loaders.crops import CropOptions
from utils.data.plan import SPLITS, SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB

Files = TypeVar("Files", Volume, NpyVolume)


class Split(NamedTuple):
    """The config's values for one split, and the key of its HDF5 file."""

    samples: int
    box: int
    key: str

    @property
    def npy_keys(self) -> tuple[str, str]:
        """The keys of the `.npy` files of inputs and targets."""
        return f"{self.key}_npy_data", f"{self.key}_npy_label"


def split_settings(config: Config, name: str) -> Split:
    """The values of split 'train' or 'valid'."""
    if name == "train":
        return Split(config.Nsamples, config.box_size[0], "train_path")
    return Split(config.Nsamples_val, config.box_size[1], "val_path")


def channel_counts(config: Config) -> tuple[int, int]:
    """Numbers of input and target channels."""
    return config.N_in_channels, config.N_out_channels


def dataset_names(config: Config) -> tuple[str, str]:
    """Names of the datasets of inputs and targets."""
    return config.dataset_names[0], config.dataset_names[1]


def meta_batch(config: Config, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets with the shapes and types of a batch of `samples`, on torch's meta device."""
    if config.dataset.name is not None:
        dataset = get_dataset(config.dataset.name)
        dtype = torch.float32 if dataset.vocabulary is None else torch.int64
        inputs = torch.empty((samples, *dataset.shape), dtype=dtype, device="meta")
        return inputs, torch.empty(samples, dtype=torch.int64, device="meta")
    shapes = [(samples, channels, *(config.data_size,) * 3) for channels in channel_counts(config)]
    return torch.empty(shapes[0], device="meta"), torch.empty(shapes[1], device="meta")


# --- plans and options ---------------------------------------------------------------------------------------------


def sample_plan(config: Config, split: str) -> SamplePlan:
    """The plan of one split, 'train' or 'valid'."""
    samples, box, _ = split_settings(config, split)
    return SamplePlan(
        samples=samples,
        box=box,
        crop=config.data_size,
        seed=config.seed,
        split=split,
        augment=config.symmetries != "none",
    )


def crop_options(config: Config, world: World, split: str) -> CropOptions:
    """The options of this rank's crop loader for one split."""
    assert config.local_batch_size is not None
    return CropOptions(
        plan=sample_plan(config, split),
        batch_size=config.local_batch_size,
        rank=world.rank,
        world_size=world.size,
        threads=config.num_data_workers,
        device=world.device,
        vectors=(config.vector_channels.inputs, config.vector_channels.targets),
        symmetry_mode=config.symmetries,
        channels_last=config.channels_last,
    )


def build_splits(build: Callable[[str], Loader], world: World, *notes: str) -> Loaders:
    """Builds the loaders of both splits. If one fails on any rank, all ranks fail and close what they have built."""
    with contextlib.ExitStack() as built:
        with world.raise_together():
            loaders = []
            for split in SPLITS:
                loaders.append(build(split))
                built.callback(loaders[-1].close)
        built.pop_all()
    return Loaders(loaders[0], loaders[1], tuple(note for note in notes if note))


# --- files ---------------------------------------------------------------------------------------------------------


def with_file_transform(config: Config) -> Config:
    """The config with the transform of its HDF5 files; UserError if they contradict it or each other."""
    files = dict(_attributes(config, split) for split in SPLITS)
    return config.model_copy(update={"transform": file_transform(config.transform, files)})


def training_simulation(config: Config) -> Simulation:
    """Redshift, cosmology and size of a cell of the training file, as far as it states them."""
    path, attributes = _attributes(config, "train")
    return simulation_of(attributes, cell_size(attributes, config.box_size[0], path))


def _attributes(config: Config, split: str) -> tuple[str, dict[str, Any]]:
    """Path and attributes of a split's HDF5 file; none if it cannot be read: a loader that needs it reports that."""
    path = getattr(config, split_settings(config, split).key)
    if not config.is_classification:
        with contextlib.suppress(UserError), reading(path), open_file(path) as file:
            return path, dict(file.attrs)
    return path, {}


def open_split(config: Config, split: str) -> Volume:
    """The HDF5 volume of one split, checked against the config."""
    values, names = split_settings(config, split), dataset_names(config)
    path, channels = getattr(config, values.key), channel_counts(config)
    boxes = ["{}" if name == split else str(size) for name, size in zip(SPLITS, config.box_size, strict=True)]
    remedy = f"set box_size to [{', '.join(boxes)}] (training, validation)"
    return open_volume(path, channels, values.box, config.transform, values.key, names, remedy)


def open_split_npy(config: Config, split: str) -> NpyVolume:
    """The `.npy` files of one split, checked against the config and, if it exists, against the HDF5 file."""
    values = split_settings(config, split)
    source, keys = getattr(config, values.key), values.npy_keys
    volume = open_split(config, split) if os.path.exists(source) else None
    paths = (getattr(config, keys[0]), getattr(config, keys[1]))
    return open_npy_volume(paths, keys, source, channel_counts(config), values.box, volume, dataset_names(config))


def open_box(config: Config, split: str, reads: str | None) -> Volume:
    """One split's volume, to be read as a whole, from the HDF5 file or, for a loader of `.npy` files, from those.

    Raises UserError if the config's loader, which reads files of kind `reads`, reads no volumes.
    """
    if reads not in ("hdf5", "npy"):
        raise UserError(
            f"evaluation.every_epochs: data_loader_config {config.data_loader_config} reads no volumes to predict; "
            f"set it to 0, or choose another loader"
        )
    if reads == "npy" and not os.path.exists(getattr(config, split_settings(config, split).key)):
        return open_split_npy(config, split).volume()
    return open_split(config, split)


def open_volumes(config: Config, world: World) -> dict[str, Volume]:
    """The HDF5 volumes of both splits; their copies in `use_cache`, if that is set."""
    return _open_or_stage(config, world, open_split, [split_settings(config, split).key for split in SPLITS])


def open_npy_volumes(config: Config, world: World) -> dict[str, NpyVolume]:
    """The `.npy` files of both splits; their copies in `use_cache`, if that is set."""
    keys = [key for split in SPLITS for key in split_settings(config, split).npy_keys]
    return _open_or_stage(config, world, open_split_npy, keys)


def _open_or_stage(
    config: Config, world: World, open_files: Callable[[Config, str], Files], keys: list[str]
) -> dict[str, Files]:
    """Opens both splits; if `use_cache` is set, copies the files that the keys name, once per node, and opens those."""
    with world.raise_together():
        opened = {split: open_files(config, split) for split in SPLITS}
    if config.use_cache is None:
        return opened
    for key in keys:
        with world.raise_together():
            if world.is_node_leader:
                stage(getattr(config, key), config.use_cache)
    with world.raise_together():
        copies = {key: stage(getattr(config, key), config.use_cache) for key in keys}  # finds the leader's copies
        staged = config.model_copy(update=copies)
        return {split: open_files(staged, split) for split in SPLITS}


class DataCheck(NamedTuple):
    """Lines for the log about the volumes."""

    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def check_data(config: Config, reads: str | None, world: World) -> DataCheck:
    """Checks a sample of both volumes; UserError for values with which a training cannot succeed.

    Rank 0 reads, every rank calls it. A file that cannot be opened is left to the loader, and a benchmark may use any.
    """
    found = DataCheck()
    with world.raise_together():
        if world.is_root and reads in ("hdf5", "npy") and not config.enable_benchy:
            volumes = {}
            with contextlib.suppress(UserError):
                volumes = {split: open_box(config, split, reads) for split in SPLITS}
            if volumes:
                together, channels = check_samples(volumes, config.allow_physical_values)
                unstated = warnings_of_unstated(dict(_attributes(config, split) for split in SPLITS))
                lines = conversions(volumes) if reads == "hdf5" else ()
                found = DataCheck(lines, [*unstated, *together, *channels])
    return DataCheck(*world.gather_json(found)[0])


def conversions(volumes: Mapping[str, Volume]) -> list[str]:
    """Lines for the log about volumes that are converted."""
    cost = "each time values are read; the loaders inmem and resident do so only once"
    return [f"{volume.path}: {volume.conversion} {cost}" for volume in volumes.values() if volume.conversion]


def load_volumes(
    volumes: dict[str, Volume], load: Callable[[Volume], Volume], place: str
) -> tuple[dict[str, Volume], str]:
    """The volumes as `load` returns them, and a note for the log on size and speed."""
    loaded, notes = {}, []
    for split, volume in volumes.items():
        started = time.perf_counter()
        loaded[split] = load(volume)
        seconds = time.perf_counter() - started
        name, size = os.path.basename(volume.path), volume.bytes
        speed = f"{size / 1e9 / seconds:.1f} GB/s"
        notes.append(f"{name}: {size / GIB:.2f} GiB read into {place} in {seconds:.2f} s ({speed})")
    return loaded, "; ".join(notes)
