"""The volumes of a config: opened and checked against it, and copied to `use_cache` if that is set."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.config import Config, validate_section
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB, atomic_write, copy_file
from utils.volumes.attributes import (
    Simulation,
    common_simulation,
    conditions_of,
    file_transform,
    plain_attributes,
    warn_of_untrained_conditions,
)
from utils.volumes.channels import vectors_of, volume_channels
from utils.volumes.hdf5 import Volume, cells_text, open_file, open_volume, reading
from utils.volumes.npy import open_npy_volume
from utils.volumes.values import check_all, check_distinct, check_samples

SPLITS = {"train": 0, "valid": 1}  # and the part of the random stream's key
VOLUME_FILES = ("hdf5", "npy")  # what loaders of volumes read, as `LoaderSpec.reads`

# Keys that are read from the files if the config does not name them, with values that accept every file.
UNNAMED: dict[str, Any] = {"N_in_channels": None, "N_out_channels": None, "box_size": [None, None]}

log = logging.getLogger(__name__)


def npy_keys(*keys: str) -> list[str]:
    """The keys of the `.npy` files of inputs and targets, by the keys of the HDF5 files."""
    return [name for key in keys for name in (f"{key}_npy_data", f"{key}_npy_label")]


class Split(NamedTuple):
    """The config's values for one split, and the key of its HDF5 files.

    `box` is its entry of box_size.
    """

    samples: int
    box: int | list[list[int]]
    key: str


def split_settings(config: Config, name: str) -> Split:
    """The values of split 'train' or 'valid'."""
    if name == "train":
        return Split(config.Nsamples, config.box_size[0], "train_path")
    return Split(config.Nsamples_val, config.box_size[1], "val_path")


def volume_names(config: Config, split: str) -> list[str]:
    """The names of a split's files without folder and ending; equal ones get their number in the list."""
    stems = [Path(path).stem for path in config.paths(split_settings(config, split).key)]
    return [stem if stems.count(stem) == 1 else f"{stem}[{number}]" for number, stem in enumerate(stems)]


def channel_counts(config: Config) -> tuple[int, int]:
    """Numbers of input and target channels."""
    return config.N_in_channels, config.N_out_channels


def of_both_splits(volumes: Mapping[str, Sequence[Volume]]) -> list[Volume]:
    """The volumes of training and validation in one list."""
    return [volume for split in volumes.values() for volume in split]


# --- values that the files state -------------------------------------------------------------------------------------


def with_file_values(config: Config, reads: str | None) -> Config:
    """The config with what its files state: transform, shapes of volumes that are not one cube, ranges of conditions.

    Keys of UNNAMED that it does not name are read from the files, too. `reads` is the kind of files that its loader
    reads. Raises UserError if the files contradict the config or each other. Files that cannot be read are left to a
    loader that needs them.
    """
    if reads not in VOLUME_FILES:
        if config.network.conditions:
            raise UserError(
                f"network.conditions: data_loader_config {config.data_loader_config} reads no volumes that state them; "
                f"remove network.conditions, or choose another loader"
            )
        return config
    unnamed = {key: value for key, value in UNNAMED.items() if key not in config.model_fields_set}
    config = config.model_copy(update={"transform": file_transform(config.transform, _attributes(config))})
    config = _with_channels(config, unnamed, reads)
    box_size = [_stated_box(config, unnamed, split, reads) for split in SPLITS]
    return _with_condition_ranges(config.model_copy(update={"box_size": box_size}))


def _with_channels(config: Config, unnamed: Mapping[str, Any], reads: str) -> Config:
    """The config with the unnamed numbers of channels, and the vectors among them, as in the first training file."""
    volumes = _volumes_of_any(config, {**unnamed, "box_size": UNNAMED["box_size"]}, "train", reads)
    if not volumes:
        return config
    found: dict[str, Any] = {}
    fields = (("N_in_channels", "inputs", volumes[0].inputs), ("N_out_channels", "targets", volumes[0].targets))
    vectors = config.vector_channels.model_dump()
    for key, name, field in fields:
        if key in unnamed:
            found[key] = int(field.shape[0])
            if "vector_channels" not in config.model_fields_set:
                vectors[name] = vectors_of(found[key])
    values = {**config.model_dump(), **found, "vector_channels": vectors}
    return validate_section(Config, values, f"with the channels of {volumes[0].path}") if found else config


def _stated_box(config: Config, unnamed: Mapping[str, Any], split: str, reads: str) -> int | list[list[int]]:
    """The entry of box_size for a split."""
    volumes = _volumes_of_any(config, {key: unnamed[key] for key in unnamed if key == "box_size"}, split, reads)
    return box_entry([volume.shape for volume in volumes]) if volumes else split_settings(config, split).box


def box_entry(shapes: Sequence[Sequence[int]]) -> int | list[list[int]]:
    """The entry of box_size for volumes: the cells per side of one cube, else a list of shapes."""
    return shapes[0][0] if len(shapes) == 1 and len(set(shapes[0])) == 1 else [list(shape) for shape in shapes]


def _volumes_of_any(config: Config, unnamed: Mapping[str, Any], split: str, reads: str) -> list[Volume]:
    """A split's volumes, which may have any values of the unnamed keys; empty if they cannot be opened."""
    with contextlib.suppress(UserError):  # a crop that does not fit is reported later, too
        return open_boxes(config.model_copy(update={**unnamed, "data_size": 1}), split, reads)
    return []


def training_simulation(config: Config, reads: str | None) -> Simulation:
    """Redshift, cosmology and size of a cell that all training files state, as far as they agree."""
    with contextlib.suppress(UserError):
        return common_simulation([volume.simulation for volume in open_boxes(config, "train", reads)])
    return {}


def _with_condition_ranges(config: Config) -> Config:
    """The config with the ranges of its conditions in the training volumes, unless it names them."""
    if not config.network.conditions:
        return config
    training, _ = (split_conditions(config, split) for split in SPLITS)  # all volumes must state them
    ranges = [[min(values), max(values)] for values in zip(*training, strict=True)]
    network = config.network.model_copy(update={"condition_ranges": config.network.condition_ranges or ranges})
    return config.model_copy(update={"network": network})


def split_conditions(config: Config, split: str) -> list[list[float]]:
    """The conditions of each volume of a split, from the HDF5 files, also for a loader that reads `.npy` files."""
    return [conditions_of(config.network, volume.path, volume.simulation) for volume in open_split(config, split)]


def _attributes(config: Config) -> dict[str, dict[str, Any]]:
    """The attributes of each HDF5 file that can be read, by its path; a loader that needs another one reports that."""
    attributes: dict[str, dict[str, Any]] = {}
    for path in [*config.paths("train_path"), *config.paths("val_path")]:
        with contextlib.suppress(UserError), reading(path), open_file(path) as file:
            attributes[path] = plain_attributes(file)
    return attributes


# --- open and check --------------------------------------------------------------------------------------------------


def open_split(config: Config, split: str) -> list[Volume]:
    """The HDF5 volumes of one split, checked against the config."""
    key = split_settings(config, split).key
    volumes = []
    for path in config.paths(key):
        if not os.path.exists(path):
            raise UserError(f"no such file: {path}; {_remedy(path)}, or set {key}")
        volumes.append(open_volume(path, channel_counts(config), config.dataset_names))
    _check_shapes(config, split, volumes)
    return volumes


def _remedy(path: str) -> str:
    """The way to get a missing HDF5 file."""
    if os.path.basename(path).startswith("demo_"):
        return "run make demo"
    if os.path.dirname(path) == "/data" and not os.path.exists("/data"):  # the default, on a machine without the data
        return "to try the program without /data, run make demo (later also --config=demo)"
    return f"simulate one with python -m simulation --output {path}"


def open_split_npy(config: Config, split: str) -> list[Volume]:
    """The `.npy` files of one split, checked against the config and, as far as they exist, against the HDF5 files."""
    keys = npy_keys(key := split_settings(config, split).key)
    sources, *paths = (config.paths(name) for name in (key, *keys))
    for name, files in zip(keys, paths, strict=True):
        if files and len(files) != len(sources):
            raise UserError(
                f"{name} and {key} list {len(files)} and {len(sources)} files; list the .npy file of each HDF5 file, "
                f"in the same order"
            )
    channels, names = channel_counts(config), config.dataset_names
    volumes = []
    for source, *pair in itertools.zip_longest(sources, *paths):
        volume = open_volume(source, channels, names) if os.path.exists(source) else None
        volumes.append(open_npy_volume((pair[0], pair[1]), keys, source, channels, volume, names))
    _check_shapes(config, split, volumes)
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
        return open_split_npy(config, split)
    return open_split(config, split)


def _check_shapes(config: Config, split: str, volumes: list[Volume]) -> None:
    """Raises UserError if a crop does not fit into a volume, or if the size of a single cube contradicts the config."""
    box, shape = split_settings(config, split).box, volumes[0].shape
    if len(volumes) == 1 and len(set(shape)) == 1 and isinstance(box, int) and shape[0] != box:
        sizes = [_stated_box(config, UNNAMED, name, "hdf5") for name in SPLITS]
        fault = f"the volume has {shape[0]} cells per side, but box_size is {box}"
        raise UserError(f"{volumes[0].path}: {fault}; set box_size to {sizes}")
    for volume in volumes:
        if min(volume.shape) < config.data_size:
            raise UserError(
                f"{volume.path}: the volume has {cells_text(volume.shape)} cells, so crops of data_size "
                f"{config.data_size} do not fit; lower data_size, or choose another file"
            )


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
            check_samples(of_both_splits(volumes), config.allow_physical_values)
            for line in check_distinct(volumes):
                log.warning(line)
            for volume in of_both_splits(volumes) if config.network.conditions else ():
                conditions = conditions_of(config.network, volume.path, volume.simulation)
                warn_of_untrained_conditions(config.network, volume.path, conditions)
            for name, (low, high) in zip(config.network.conditions, config.network.condition_ranges, strict=True):
                if low == high:
                    log.warning(f"network.conditions: {name} is {low:g} in all training volumes, so it has no effect")
            for volume in volumes["train"]:
                if set(volume.shape) == {config.data_size}:
                    log.warning(f"{volume.path}: data_size {config.data_size} leaves a single crop; lower data_size")


def check_all_values(config: Config, reads: str | None) -> None:
    """Reads all values of the volumes of both splits, and logs how they are stored.

    Raises UserError for non-finite values and for a dataset with the same value everywhere.
    """
    if reads not in VOLUME_FILES:
        return
    slow = "chunked or not float32, read by h5py: rewrite it contiguously for speed, or use inmem or resident"
    for split in SPLITS:
        for volume in open_boxes(config, split, reads):
            check_all(volume)
            access = "mapped" if volume.mapped else slow
            size = f"{cells_text(volume.shape)} cells, {volume.bytes / GIB:.2f} GiB"
            log.info("%s data: %s, %s, all finite, %s", split, volume.path, size, access)
    log.info("channels: %s", "; ".join(dict.fromkeys(channel.formula() for channel in volume_channels(config)[1])))


# --- stage -----------------------------------------------------------------------------------------------------------


def open_volumes(config: Config, world: World) -> dict[str, list[Volume]]:
    """The HDF5 volumes of both splits; their copies in `use_cache`, if that is set."""
    return _open_or_stage(config, world, open_split, [split_settings(config, split).key for split in SPLITS])


def open_npy_volumes(config: Config, world: World) -> dict[str, list[Volume]]:
    """The `.npy` files of both splits; their copies in `use_cache`, if that is set."""
    keys = npy_keys(*(split_settings(config, split).key for split in SPLITS))
    return _open_or_stage(config, world, open_split_npy, keys)


def _open_or_stage(
    config: Config, world: World, open_files: Callable[[Config, str], list[Volume]], keys: list[str]
) -> dict[str, list[Volume]]:
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


def stage(path: str, directory: str) -> str:
    """Copies `path` into a node-local `directory` unless an up-to-date copy exists; returns the copy's path.

    The copy is atomic.
    """
    source = Path(path)
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]  # distinguishes files of the same name
    target = Path(directory) / f"{source.stem}-{digest}{source.suffix}"
    with os_errors_for_users(f"cannot stage {path} in use_cache={directory}", "choose another use_cache"):
        original = source.stat()
        if target.exists():
            copy = target.stat()
            if (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns):
                return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write([target]) as (partial,):
            copy_file(source, partial, f"staging {source.name} in {directory}")
            os.utime(partial, ns=(original.st_atime_ns, original.st_mtime_ns))
    return str(target)
