"""The volumes of a config: opened and checked against it, and copied to `use_cache` if that is set."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from utils.config import Config
from utils.data.channels import volume_channels
from utils.data.files.attributes import Simulation, common_simulation, file_transform, files_without_transform
from utils.data.files.hdf5 import Volume, cells_text, open_file, open_volume, reading, stage
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.files.values import check_all, check_distinct, check_samples
from utils.data.plan import SPLITS, Box
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB
from utils.progress import Progress

VOLUME_FILES = ("hdf5", "npy")  # what loaders of volumes read, as `LoaderSpec.reads`
CONVERSION_COST = "each time values are read; the loaders inmem and resident do so only once"
Files = TypeVar("Files", Volume, NpyVolume)

log = logging.getLogger(__name__)


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


def of_both_splits(volumes: Mapping[str, Sequence[Files]]) -> list[Files]:
    """The volumes of training and validation in one list."""
    return [volume for split in volumes.values() for volume in split]


# --- values that the files state -------------------------------------------------------------------------------------


def with_file_values(config: Config, reads: str | None) -> Config:
    """The config with what its files state: the transform, and the shapes of volumes that are not one cube.

    `reads` is the kind of files that its loader reads. Raises UserError if the files contradict the config or each
    other. Files that cannot be read are left to a loader that needs them.
    """
    if reads not in VOLUME_FILES:
        return config
    config = config.model_copy(update={"transform": file_transform(config.transform, _attributes(config))})
    box_size = [_stated_box(config, split, reads) for split in SPLITS]
    return config.model_copy(update={"box_size": box_size})


def _stated_box(config: Config, split: str, reads: str) -> int | list[list[int]]:
    """The entry of box_size for a split: the cells per side of one cube, else a list of shapes."""
    try:
        shapes = [volume.shape for volume in open_boxes(config, split, reads)]
    except UserError:
        return split_settings(config, split).box
    return shapes[0][0] if len(shapes) == 1 and _is_cube(shapes[0]) else [list(shape) for shape in shapes]


def training_simulation(config: Config, reads: str | None) -> Simulation:
    """Redshift, cosmology and size of a cell that all training files state, as far as they agree."""
    with contextlib.suppress(UserError):
        return common_simulation([volume.simulation for volume in open_boxes(config, "train", reads)])
    return {}


def _attributes(config: Config) -> dict[str, dict[str, Any]]:
    """The attributes of each HDF5 file by its path; none if it cannot be read: a loader that needs it reports that."""
    attributes: dict[str, dict[str, Any]] = {}
    for path in [*config.paths("train_path"), *config.paths("val_path")]:
        attributes[path] = {}
        with contextlib.suppress(UserError), reading(path), open_file(path) as file:
            attributes[path] = dict(file.attrs)
    return attributes


# --- open and check --------------------------------------------------------------------------------------------------


def open_split(config: Config, split: str) -> list[Volume]:
    """The HDF5 volumes of one split, checked against the config."""
    names, key = (config.dataset_names[0], config.dataset_names[1]), split_settings(config, split).key
    volumes = []
    for path in config.paths(key):
        remedy = f"set {key}, or simulate one with python -m utils.simulation --output {path}"
        if os.path.basename(path).startswith("demo_"):
            remedy = f"run make demo, which simulates it, or set {key}"
        volumes.append(open_volume(path, channel_counts(config), config.transform, names, remedy))
    return _checked(config, split, volumes)


def open_split_npy(config: Config, split: str) -> list[NpyVolume]:
    """The `.npy` files of one split, checked against the config and, as far as they exist, against the HDF5 files."""
    keys = split_settings(config, split).npy_keys
    sources, *paths = (config.paths(key) for key in (split_settings(config, split).key, *keys))
    for key, files in zip(keys, paths, strict=True):
        if files and len(files) != len(sources):
            raise UserError(
                f"{key} and {split_settings(config, split).key} list {len(files)} and {len(sources)} files; list the "
                f".npy file of each HDF5 file, in the same order"
            )
    channels, names = channel_counts(config), (config.dataset_names[0], config.dataset_names[1])
    volumes = []
    for source, *pair in itertools.zip_longest(sources, *paths):
        volume = open_volume(source, channels, config.transform, names) if os.path.exists(source) else None
        volumes.append(open_npy_volume((pair[0], pair[1]), keys, source, channels, volume, names))
    _checked(config, split, [npy.volume() for npy in volumes])
    return volumes


def open_boxes(config: Config, split: str, reads: str | None) -> list[Volume]:
    """One split's volumes, to be read as a whole, from the HDF5 files or, for a loader of `.npy` files, from those.

    Raises UserError if the config's loader, which reads files of kind `reads`, reads no volumes.
    """
    if reads not in VOLUME_FILES:
        raise UserError(
            f"evaluation.every_epochs: data_loader_config {config.data_loader_config} reads no volumes to predict; "
            f"set it to 0, or choose another loader"
        )
    if reads == "npy" and not all(map(os.path.exists, config.paths(split_settings(config, split).key))):
        return [volume.volume() for volume in open_split_npy(config, split)]
    return open_split(config, split)


def _checked(config: Config, split: str, volumes: list[Volume]) -> list[Volume]:
    """The volumes; UserError if a crop does not fit into one, or if the config contradicts their sizes or names."""
    values, shape = split_settings(config, split), volumes[0].shape
    for key in (values.key, *values.npy_keys):
        paths: dict[str, str] = {}
        for path in config.paths(key):
            same = paths.setdefault(os.path.realpath(path), path)
            if same != path:  # it would be drawn twice as often
                raise UserError(f"{key} lists {same} and {path}, which are the same file; remove one")
    if len(volumes) == 1 and _is_cube(shape) and isinstance(values.box, int) and shape[0] != values.box:
        place = list(SPLITS).index(split)
        raise UserError(
            f"{volumes[0].path}: the volume has {shape[0]} cells per side, but box_size is {values.box}; set "
            f"box_size[{place}] to {shape[0]}"
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


def check_data(config: Config, reads: str | None, world: World) -> None:
    """Checks a sample of both volumes and logs what is unlikely; UserError if a run cannot succeed with the values.

    Rank 0 reads, every rank calls it. A file that cannot be opened is left to the loader, and a benchmark may use any.
    """
    with world.raise_together():
        if world.is_root and reads in VOLUME_FILES and not config.enable_benchy:
            try:
                volumes = {split: open_boxes(config, split, reads) for split in SPLITS}
            except UserError:
                return
            warnings = check_samples(of_both_splits(volumes), config.allow_physical_values)
            if reads == "hdf5":
                for line in conversions(of_both_splits(volumes)):
                    log.info(line)
            for line in [*files_without_transform(_attributes(config)), *check_distinct(volumes), *warnings]:
                log.warning(line)


def check_all_values(config: Config, reads: str | None) -> None:
    """Reads all values of the volumes of both splits; logs how they are stored and what is unlikely.

    Raises UserError for non-finite values and for a dataset with the same value everywhere.
    """
    if reads not in VOLUME_FILES:
        return
    for split in SPLITS:
        for volume in open_boxes(config, split, reads):
            with Progress(f"checking all values of {volume.path}", len(volume.slab_locations()), "slabs") as progress:
                warnings = check_all(volume, progress.advance)
            access = (
                "mapped" if volume.mapped else "chunked or compressed, read by h5py: rewrite it contiguously for speed"
            )
            if volume.conversion:
                access = "converted or reordered as it is read"
            size = f"{cells_text(volume.shape)} cells, {volume.bytes / GIB:.2f} GiB"
            log.info("%s data: %s, %s, all finite, %s", split, volume.path, size, access)
            for line in warnings:
                log.warning(line)
    log.info("channels: %s", "; ".join(dict.fromkeys(channel.formula() for channel in volume_channels(config)[1])))


def conversions(volumes: Iterable[Volume]) -> list[str]:
    """Lines for the log about volumes that are converted."""
    return [f"{volume.path}: {volume.conversion} {CONVERSION_COST}" for volume in volumes if volume.conversion]


# --- stage -----------------------------------------------------------------------------------------------------------


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
