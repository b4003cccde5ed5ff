"""Shared by the loaders' build functions: opens the files of both splits, stages them and builds a loader per split."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from utils.config import Config
from utils.data.datasets import get_dataset
from utils.data.files.attributes import Simulation, common_simulation, file_transform, warnings_of_unstated
from utils.data.files.fields import checked_field
from utils.data.files.hdf5 import Volume, cells_text, open_file, open_volume, reading, stage
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.files.values import check_samples
from utils.data.loader import Loader, Loaders
from utils.data.loaders.crops import CropOptions
from utils.data.plan import SPLITS, Box, SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB

Files = TypeVar("Files", Volume, NpyVolume)


class Split(NamedTuple):
    """The config's values for one split, and the key of its HDF5 files.

    `box` is its entry of box_size.
    """

    samples: int
    box: int | list[list[int]]
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


def sample_plan(config: Config, split: str, boxes: Iterable[Box]) -> SamplePlan:
    """The plan of one split, 'train' or 'valid', for volumes of these shapes."""
    return SamplePlan(
        samples=split_settings(config, split).samples,
        boxes=tuple(boxes),
        crop=config.data_size,
        seed=config.seed,
        split=split,
        augment=config.symmetries != "none",
    )


def crop_options(config: Config, world: World, split: str, boxes: Iterable[Box]) -> CropOptions:
    """The options of this rank's crop loader for one split with volumes of these shapes."""
    assert config.local_batch_size is not None
    return CropOptions(
        plan=sample_plan(config, split, boxes),
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


def build_crop_loaders(
    config: Config,
    world: World,
    volumes: Mapping[str, Sequence[Files]],
    loader: Callable[[Sequence[Files], CropOptions], Loader],
    *notes: str,
) -> Loaders:
    """Builds a loader for the volumes of each split, see `build_splits`."""

    def build(split: str) -> Loader:
        boxes = [volume.shape for volume in volumes[split]]
        return loader(volumes[split], crop_options(config, world, split, boxes))

    return build_splits(build, world, *notes)


# --- files ---------------------------------------------------------------------------------------------------------


def with_file_values(config: Config, reads: str | None) -> Config:
    """The config with what its files state: the transform, and the shapes of volumes that are not one cube.

    `reads` is the kind of files that its loader reads. Raises UserError if the files contradict the config or each
    other. Files that cannot be read are left to a loader that needs them.
    """
    config = config.model_copy(update={"transform": file_transform(config.transform, _attributes(config))})
    box_size = [_stated_box(config, split, reads) for split in SPLITS]
    return config.model_copy(update={"box_size": box_size})


def _stated_box(config: Config, split: str, reads: str | None) -> int | list[list[int]]:
    """The entry of box_size for a split: the cells per side of one cube, else a list of shapes."""
    if reads in ("hdf5", "npy"):
        with contextlib.suppress(UserError):
            shapes = [volume.shape for volume in open_boxes(config, split, reads)]
            is_cube = len(shapes) == 1 and _is_cube(shapes[0])
            return shapes[0][0] if is_cube else [list(shape) for shape in shapes]
    return split_settings(config, split).box


def training_simulation(config: Config) -> Simulation:
    """Redshift, cosmology and size of a cell that all training files state, as far as they agree."""
    if not config.is_classification:
        with contextlib.suppress(UserError):
            return common_simulation([volume.simulation for volume in open_split(config, "train")])
    return {}


def _attributes(config: Config) -> dict[str, dict[str, Any]]:
    """The attributes of each HDF5 file by its path; none if it cannot be read: a loader that needs it reports that."""
    found: dict[str, dict[str, Any]] = {}
    for path in () if config.is_classification else [*config.paths("train_path"), *config.paths("val_path")]:
        found[path] = {}
        with contextlib.suppress(UserError), reading(path), open_file(path) as file:
            found[path] = dict(file.attrs)
    return found


def open_split(config: Config, split: str) -> list[Volume]:
    """The HDF5 volumes of one split, checked against the config."""
    expected = channel_counts(config), config.transform, dataset_names(config)
    values = split_settings(config, split)
    other = f"set {values.key} to an HDF5 file"
    with _comparing_channels(config):
        volumes = [
            open_volume(path, *expected, _remedy_for_missing(config, values, path), other)
            for path in config.paths(values.key)
        ]
    return _checked(config, split, volumes)


def _remedy_for_missing(config: Config, split: Split, path: str) -> str:
    """The remedy for an HDF5 file of a split that does not exist."""
    name, paths = os.path.basename(path), config.paths(split.key)
    if "," in path:
        several = f"list several files in brackets, as in --set 'train_path=[{','.join(paths)}]'"
        return several if split.key == "train_path" else f"set {split.key} to one file"
    if name.startswith("demo_"):
        return f"run make demo, which simulates it, or set {split.key}"
    if len(paths) > 1:
        return f"correct its path in {split.key}, or remove it from the list"
    seed = 2 if "val" in name else 1  # different volumes for training and validation
    size = f"--grid {split.box if isinstance(split.box, int) else 128} --seed {seed}"
    return f"simulate one with python -m utils.simulation --output {path} {size}, or set {split.key}"


@contextlib.contextmanager
def _comparing_channels(config: Config) -> Iterator[None]:
    """Replaces an error for one of the files, whose remedy may not fit the others, if their channels differ."""
    try:
        yield
    except UserError:
        for name in dataset_names(config):
            found = _files_by_channels(config, name)
            if len(found) > 1:
                counts = ", ".join(f"{count} in {path}" for count, path in found.items())
                raise UserError(f"{name} has different numbers of channels: {counts}; use files that agree") from None
        raise


def _files_by_channels(config: Config, name: str) -> dict[int, str]:
    """One file for each number of channels that a dataset has."""
    found: dict[int, str] = {}
    for path in [*config.paths("train_path"), *config.paths("val_path")]:
        with contextlib.suppress(UserError), reading(path), open_file(path) as file:
            found.setdefault(checked_field(file, path, name).shape[0], path)
    return found


def open_split_npy(config: Config, split: str) -> list[NpyVolume]:
    """The `.npy` files of one split, checked against the config and, as far as they exist, against the HDF5 files."""
    keys = split_settings(config, split).npy_keys
    sources, *paths = (config.paths(key) for key in (split_settings(config, split).key, *keys))
    for key, found in zip(keys, paths, strict=True):
        if found and len(found) != len(sources):
            raise UserError(
                f"{key} and {keys[0].removesuffix('_npy_data')} list {len(found)} and {len(sources)} files; list the "
                f".npy file of each HDF5 file, in the same order"
            )
    channels, names, volumes = channel_counts(config), dataset_names(config), []
    with _comparing_channels(config):
        for source, *pair in itertools.zip_longest(sources, *paths):
            volume = open_volume(source, channels, config.transform, names) if os.path.exists(source) else None
            volumes.append(open_npy_volume((pair[0], pair[1]), keys, source, channels, volume, names))
    _checked(config, split, [each.volume() for each in volumes])
    return volumes


def _refuse_duplicates(config: Config, keys: Sequence[str]) -> None:
    """Raises UserError if two paths of a key lead to one file, whose volume would be drawn twice as often."""
    for key in keys:
        found: dict[str, str] = {}
        for path in config.paths(key):
            other = found.setdefault(os.path.realpath(path), path)
            if other != path:
                raise UserError(f"{key} lists {other} and {path}, which are the same file; remove one")


def _checked(config: Config, split: str, volumes: list[Volume]) -> list[Volume]:
    """The volumes; UserError if a crop does not fit into one, or for one cube of another side than box_size states.

    Also if the config names one of their files twice.
    """
    values = split_settings(config, split)
    _refuse_duplicates(config, (values.key, *values.npy_keys))
    side, shape = values.box, volumes[0].shape
    if len(volumes) == 1 and _is_cube(shape) and isinstance(side, int) and shape[0] != side:
        unchecked = config.model_copy(update={"box_size": [[], []]})
        found = [shape[0] if name == split else _stated_box(unchecked, name, "hdf5") for name in SPLITS]
        sides = [new if isinstance(new, int) else old for new, old in zip(found, config.box_size, strict=True)]
        raise UserError(
            f"{volumes[0].path}: the volume has {shape[0]} cells per side, but box_size is {side}; set box_size to "
            f"{sides} (training, validation)"
        )
    for volume in volumes:
        if min(volume.shape) < config.data_size:
            raise UserError(
                f"{volume.path}: the volume has {cells_text(volume.shape)} cells, so crops of data_size "
                f"{config.data_size} do not fit; lower data_size, or choose another file"
            )
    return volumes


def _is_cube(shape: Box) -> bool:
    return len(set(shape)) == 1


def open_boxes(config: Config, split: str, reads: str | None) -> list[Volume]:
    """One split's volumes, to be read as a whole, from the HDF5 files or, for a loader of `.npy` files, from those.

    Raises UserError if the config's loader, which reads files of kind `reads`, reads no volumes.
    """
    if reads not in ("hdf5", "npy"):
        raise UserError(
            f"evaluation.every_epochs: data_loader_config {config.data_loader_config} reads no volumes to predict; "
            f"set it to 0, or choose another loader"
        )
    if reads == "npy" and not all(map(os.path.exists, config.paths(split_settings(config, split).key))):
        return [volume.volume() for volume in open_split_npy(config, split)]
    return open_split(config, split)


def of_both_splits(volumes: Mapping[str, Sequence[Files]]) -> list[Files]:
    """The volumes of training and validation in one list."""
    return [volume for each in volumes.values() for volume in each]


def open_volumes(config: Config, world: World) -> dict[str, list[Volume]]:
    """The HDF5 volumes of both splits; their copies in `use_cache`, if that is set."""
    return _open_or_stage(config, world, open_split, [split_settings(config, split).key for split in SPLITS])


def open_npy_volumes(config: Config, world: World) -> dict[str, list[NpyVolume]]:
    """The `.npy` files of both splits; their copies in `use_cache`, if that is set."""
    keys = [key for split in SPLITS for key in split_settings(config, split).npy_keys]
    return _open_or_stage(config, world, open_split_npy, keys)


def _open_or_stage(
    config: Config, world: World, open_files: Callable[[Config, str], list[Files]], keys: list[str]
) -> dict[str, list[Files]]:
    """Opens both splits; if `use_cache` is set, copies the files that the keys name, once per node, and opens those."""
    with world.raise_together():
        opened = {split: open_files(config, split) for split in SPLITS}
    if config.use_cache is None:
        return opened
    for path in [path for key in keys for path in config.paths(key)]:
        with world.raise_together():
            if world.is_node_leader:
                stage(path, config.use_cache)
    with world.raise_together():
        # Finds the leader's copies.
        copies = {key: [stage(path, config.use_cache) for path in config.paths(key)] for key in keys}
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
                volumes = {split: open_boxes(config, split, reads) for split in SPLITS}
            if volumes:
                together, channels = check_samples(volumes, config.allow_physical_values)
                unstated = warnings_of_unstated(_attributes(config))
                lines = conversions(of_both_splits(volumes)) if reads == "hdf5" else ()
                found = DataCheck(lines, [*unstated, *together, *channels])
    return DataCheck(*world.gather_json(found)[0])


def conversions(volumes: Iterable[Volume]) -> list[str]:
    """Lines for the log about volumes that are converted."""
    cost = "each time values are read; the loaders inmem and resident do so only once"
    return [f"{volume.path}: {volume.conversion} {cost}" for volume in volumes if volume.conversion]


def load_volumes(
    volumes: Mapping[str, list[Volume]], load: Callable[[list[Volume]], list[Volume]], place: str
) -> tuple[dict[str, list[Volume]], str]:
    """The volumes of each split as `load` returns them, and a note for the log on size and speed."""
    loaded, notes = {}, []
    for split, each in volumes.items():
        started = time.perf_counter()
        loaded[split] = load(each)
        seconds = time.perf_counter() - started
        name = ", ".join(os.path.basename(volume.path) for volume in each)
        size = sum(volume.bytes for volume in each)
        speed = f"{size / 1e9 / seconds:.1f} GB/s"
        notes.append(f"{name}: {size / GIB:.2f} GiB read into {place} in {seconds:.2f} s ({speed})")
    return loaded, "; ".join(notes)
