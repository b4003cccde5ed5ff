"""The volumes of a config: each file is opened once, checked against it, and copied to `use_cache` if that is set."""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.config import Config, validate_section
from utils.config.channels import DARK_MATTER, GAS
from utils.config.schema import CHANNELS_KEYS
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB, atomic_write, copy_file, remove_abandoned, sample_digest
from utils.log import warn_once
from utils.volumes import attributes
from utils.volumes.convert_to_npy import open_npy_volume
from utils.volumes.cross_check import START_BYTES, cross_check
from utils.volumes.hdf5 import Volume, cells_text, open_volume
from utils.volumes.input_statistics import compare, training_statistics
from utils.volumes.values import check_all, check_distinct, check_samples, warn_of_units

SPLITS = {"train": 0, "valid": 1}  # the index in box_size, and the part of the random stream's key
PATH_KEYS = {"train": "train_path", "valid": "val_path"}  # of the HDF5 files
SAMPLES_KEYS = {"train": "Nsamples", "valid": "Nsamples_val"}
PUBLISHED = {"train": "downsamp_2048crop_train", "val": "downsamp_1024crop_valid"}  # names of the published data set
OTHER_NAMES = PUBLISHED | {published: name for name, published in PUBLISHED.items()}

log = logging.getLogger(__name__)


def npy_keys(*keys: str) -> list[str]:
    """The keys of the `.npy` files of inputs and targets, by the keys of the HDF5 files."""
    return [name for key in keys for name in (f"{key}_npy_data", f"{key}_npy_label")]


def volume_names(config: Config, split: str) -> list[str]:
    """The names of a split's files without folder and ending; equal ones, or all, get their number in the list."""
    stems = [Path(path).stem for path in config.paths(PATH_KEYS[split])]
    numbered = [f"{stem}[{number}]" for number, stem in enumerate(stems)]
    names = [stem if stems.count(stem) == 1 else name for stem, name in zip(stems, numbered, strict=True)]
    return names if len({*names}) == len(names) else numbered


def all_volumes(splits: Mapping[str, Sequence[Volume]]) -> list[Volume]:
    return [volume for split in SPLITS for volume in splits[split]]


def box_entry(shapes: Sequence[Sequence[int]]) -> int | list[list[int]]:
    """The entry of box_size for volumes: the cells per side of one cube, else a list of shapes."""
    return shapes[0][0] if len(shapes) == 1 and len(set(shapes[0])) == 1 else [list(shape) for shape in shapes]


def largest_crop(side: int) -> tuple[int, int]:
    """The largest data_size that fits a side, a power of two, and the scales that leave a bottleneck of two cells."""
    crop = 1 << side.bit_length() - 1
    return crop, max(1, crop.bit_length() - 2)


@dataclass(frozen=True)
class Volumes:
    """The volumes of a config, which a process opens once. A file is opened when it is first requested.

    config: its keys, with the values that the files state.
    reads: the kind of files that its loader reads, as `LoaderSpec.reads`; a loader of other data needs no volumes.
    simulation: redshift, cosmology and size of a cell that all training files state, as far as they agree.
    complete: the cross-check reads all values, also of large volumes.
    """

    config: Config
    reads: str | None
    simulation: attributes.Simulation = field(default_factory=dict)
    complete: bool = False
    _opened: dict[tuple[str | None, ...], Volume] = field(default_factory=dict, repr=False)
    _measured: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, config: Config, reads: str | None) -> "Volumes":
        """Completes the config: channels, shapes of volumes that are not one cube, ranges, loss_options.simulation.

        Numbers of channels and box_size are read from the files, too, unless it names them. Raises UserError if the
        files contradict the config or each other. Files that cannot be opened are left to a loader that needs them.
        """
        volumes = cls(config, reads)
        if not volumes.has_files:
            if config.network.conditions:
                fault = f"data_loader_config {config.data_loader_config} reads no volumes that state them"
                remedy = "remove network.conditions, or choose another loader"
                raise UserError(f"network.conditions: {fault}; {remedy}")
            return volumes
        volumes = volumes.changed(**_in_data_dir(config))
        volumes = dataclasses.replace(volumes, config=volumes._with_channels())
        box_size = [volumes._box(split, "box_size" in config.model_fields_set) for split in SPLITS]
        volumes = volumes.changed(box_size=box_size)
        if config.network.conditions:
            training, _ = (volumes.conditions(split) for split in SPLITS)  # all volumes must state them
            ranges = [[min(values), max(values)] for values in zip(*training, strict=True)]
            ranges = config.network.condition_ranges or ranges
            volumes = volumes.changed(network=config.network.model_copy(update={"condition_ranges": ranges}))
        simulation = attributes.common_simulation([volume.simulation for volume in volumes._available("train")])
        if "simulation" in config.loss_options:
            volumes = volumes.changed(loss_options={**config.loss_options, "simulation": simulation})
        return dataclasses.replace(volumes, simulation=simulation)

    @property
    def has_files(self) -> bool:
        return self.reads in ("hdf5", "npy")

    def changed(self, **keys: Any) -> "Volumes":
        """The volumes for a config with other values of these keys; files that are open stay open."""
        return dataclasses.replace(self, config=self.config.model_copy(update=keys))

    def release(self) -> None:
        """Closes the files of volumes that nobody else has; they are opened again if they are requested again."""
        self._opened.clear()

    def files(self) -> Iterator[tuple[str, Path]]:
        """The config's key, with the number in a list, and the path of each file that the loader may read."""
        npy = self.reads == "npy" or self.config.data_loader_config == "auto"
        for source in PATH_KEYS.values() if self.has_files else ():
            for key in [source, *npy_keys(source)] if npy else [source]:
                paths = self.config.paths(key)
                for number, path in enumerate(paths):
                    name = key if len(paths) == 1 else f"{key}[{number}]"
                    yield name, Path(path)
                    with contextlib.suppress(UserError):
                        files = self._open(path, key).files if key == source else ()
                        sources = [file for file in files if file != path]
                        yield from ((f"{name}: source {place}", Path(file)) for place, file in enumerate(sources))

    def splits(self, npy: bool | None = None) -> dict[str, list[Volume]]:
        return {split: self.split(split, npy) for split in SPLITS}

    def split(self, split: str, npy: bool | None = None) -> list[Volume]:
        """One split's volumes; UserError for contradictions. `npy` None: the `.npy` files if HDF5 files are missing."""
        volumes = self._open_split(split, npy)
        box, shape, crop = self.config.box_size[SPLITS[split]], volumes[0].shape, self.config.data_size
        for volume in volumes:
            for name, values, key in zip(volume.names, volume.fields, CHANNELS_KEYS.values(), strict=True):
                if values.shape[0] != (count := getattr(self.config, key)):
                    remedy = f"give files with the same channels for training and validation, or set {key}"
                    raise UserError(f"{volume.path}: {name} is {values.shape}, expected ({count}, X, Y, Z); {remedy}")
        if len(volumes) == 1 and len(set(shape)) == 1 and isinstance(box, int) and shape[0] != box:
            sizes = [self._box(name, named=False) for name in SPLITS]
            fault = f"the volume has {shape[0]} cells per side, but box_size is {box}"
            raise UserError(f"{volumes[0].path}: {fault}; set box_size to {sizes}")
        for volume in volumes:
            if min(volume.shape) < crop:
                shapes = [volume.shape for name in SPLITS for volume in self._available(name)]
                fitting, scales = largest_crop(min(map(min, shapes)))
                fault = f"the volume has {cells_text(volume.shape)} cells, so crops of data_size {crop} do not fit"
                too_deep = f" and network.scales={scales}" * (fitting % self.config.window_multiple > 0)
                raise UserError(f"{volume.path}: {fault}; set data_size={fitting}{too_deep}, or choose another file")
        return volumes

    def for_loader(self, world: World, npy: bool = False) -> dict[str, list[Volume]]:
        """The volumes of both splits; with `use_cache` copies, made once per node. Every rank calls it."""
        directory = self.config.use_cache
        with world.raise_together():
            splits = self.splits(npy)
        if directory is None:
            return splits
        # Of a file that refers to other files, a copy would not find them.
        alone = [volume for volume in all_volumes(splits) if npy or volume.files == (volume.path,)]
        copied = [path for volume in alone for path in volume.files]
        for path in copied:
            with world.raise_together():
                if world.is_node_leader:
                    stage(path, directory)
        keys = npy_keys(*PATH_KEYS.values()) if npy else [*PATH_KEYS.values()]
        with world.raise_together():
            copies = {
                key: [str(staged_path(path, directory)) if path in copied else path for path in self.config.paths(key)]
                for key in keys
            }
            return self.changed(**copies).splits(npy)

    def _open(self, path: str, key: str) -> Volume:
        """The volume of an HDF5 file that this key of the config names."""
        if (path,) not in self._opened:
            if not os.path.exists(path):
                raise UserError(f"no such file: {path}; {_remedy(path)}, or set {key}")
            self._opened[path,] = open_volume(path, self.config.dataset_names)
        return self._opened[path,]

    def _open_split(self, split: str, npy: bool | None = None) -> list[Volume]:
        """The volumes of `split` with any numbers of channels and any sizes."""
        keys = npy_keys(key := PATH_KEYS[split])
        sources, *paths = (self.config.paths(name) for name in (key, *keys))
        if npy is None:
            npy = self.reads == "npy" and not all(map(os.path.exists, sources))
        if not npy:
            return [self._open(path, key) for path in sources]
        for name, listed in zip(keys, paths, strict=True):
            if listed and len(listed) != len(sources):
                fault = f"{name} and {key} list {len(listed)} and {len(sources)} files"
                raise UserError(f"{fault}; list the .npy file of each HDF5 file, in the same order")
        volumes = []
        for source, *pair in itertools.zip_longest(sources, *paths):
            # Without copies it must be there to be converted.
            needed = os.path.exists(source) or not all(path and os.path.exists(path) for path in pair)
            volume, files = self._open(source, key) if needed else None, (source, pair[0], pair[1])
            if files not in self._opened:
                self._opened[files] = open_npy_volume(files[1:], keys, source, self.config.dataset_names, volume)
            volumes.append(self._opened[files])
        return volumes

    def conditions(self, split: str) -> list[list[float]]:
        """The conditions of each volume of a split, from the HDF5 files, also for a loader of `.npy` files."""
        volumes = self.split(split, npy=False)
        return [attributes.conditions_of(self.config.network, volume.path, volume.simulation) for volume in volumes]

    def _available(self, split: str) -> list[Volume]:
        """A split's volumes with any numbers of channels and any sizes; empty if they cannot be opened."""
        with contextlib.suppress(UserError):
            return self._open_split(split)
        return []

    def _with_channels(self) -> Config:
        """The config with the channels that the files state; if they do not, with those that it, or the data, has."""
        volumes, config, channels = [*self._available("train"), *self._available("valid")], self.config, {}
        if not volumes:
            return config
        for number, (side, key) in enumerate(CHANNELS_KEYS.items()):
            count = getattr(config, key) if key in config.model_fields_set else volumes[0].fields[number].shape[0]
            files = {volume.path: volume.channels[number] for volume in volumes}
            found = attributes.resolve_channels(side, count, getattr(config.channels, side), files)
            channels[side] = [dataclasses.asdict(channel) for channel in found]
        keys = {**config.model_dump(), "channels": channels}
        return validate_section(Config, keys, f"with the channels of {volumes[0].path}")

    def _box(self, split: str, named: bool) -> int | list[list[int]]:
        """The entry of box_size for a split, as its files state it; a cube's side is the config's if that is named."""
        volumes, box = self._available(split), self.config.box_size[SPLITS[split]]
        stated = box_entry([volume.shape for volume in volumes]) if volumes else box
        return box if named and isinstance(box, int) and isinstance(stated, int) else stated

    def check(self, world: World) -> None:
        """Checks samples on rank 0, and cross-checks on all ranks, which call it; UserError if a run cannot succeed."""
        splits: dict[str, list[Volume]] = {}
        if self.has_files and not self.config.enable_benchy:
            with contextlib.suppress(UserError):  # the loader reports a file that it needs
                splits = self.splits()
        with world.raise_together():
            if world.is_root and splits:
                check_samples(all_volumes(splits), self.config.allow_physical_values)
                self._warn(splits)
        if all(world.gather_json(bool(splits))) and not self.config.allow_physical_values:
            volumes = {volume.path: volume for volume in all_volumes(splits)}
            limit = math.inf if self.complete else START_BYTES / len(volumes)
            for volume in volumes.values():
                cross_check(volume, volume.fields, self.config.volume_channels, world, limit).log()

    def input_statistics(self) -> dict[str, Any] | None:
        """`training_statistics` of the files, measured once per process; None if they cannot be opened."""
        if not self._measured and (volumes := self.has_files and self._available("train")):
            self._measured.update(training_statistics(volumes, self.config))
        return self._measured or None

    def _warn(self, splits: Mapping[str, Sequence[Volume]]) -> None:
        config, network = self.config, self.config.network
        for line in check_distinct(splits):
            log.warning(line)
        (source, *_), (target, *_) = config.volume_channels
        if source.name.startswith(GAS) and target.name.startswith(DARK_MATTER):
            log.warning("the network learns dark matter from gas; otherwise, exchange the two dataset_names")
        for volume in all_volumes(splits):
            for fault in attributes.implausible(volume.simulation):
                warn_once(f"{volume.path}: {fault}; correct its attributes")
            if not config.allow_physical_values:
                warn_of_units(volume, config.volume_channels)
            conditions = attributes.conditions_of(network, volume.path, volume.simulation)
            attributes.warn_of_untrained_conditions(network, volume.path, conditions)
        for name, (low, high) in zip(network.conditions, network.condition_ranges, strict=True):
            if low == high:
                log.warning(f"network.conditions: {name} is {low:g} in all training volumes, so it has no effect")
        for volume in splits["train"]:
            if set(volume.shape) == {config.data_size}:
                log.warning(f"{volume.path}: data_size {config.data_size} leaves a single crop; lower data_size")
        self._warn_of_simulations(splits)
        for volume in splits["valid"]:
            compare(self.input_statistics(), volume.path, volume.inputs, config)

    def _warn_of_simulations(self, splits: Mapping[str, Sequence[Volume]]) -> None:
        """Warns of values that volumes state, that differ, and that are no conditions of the network."""
        conditions, differing = [attributes.CONDITIONS[name] for name in self.config.network.conditions], {}
        for volume in splits["valid"]:
            stated = {key: value for key, value in volume.simulation.items() if key not in conditions}
            attributes.warn_of_other_simulation(volume.path, stated, self.simulation)
        for name, key in attributes.CONDITIONS.items():
            values = {volume.simulation[key] for volume in splits["train"] if key in volume.simulation}
            if len(values) > 1 and key not in (*self.simulation, *conditions):
                differing[name] = f"{key} {min(values):.4g} to {max(values):.4g}"
        if differing:
            text = "the training volumes differ in what the network does not see"
            names = ",".join([*self.config.network.conditions, *differing])
            log.warning(f"{text}: {', '.join(differing.values())}; set network.conditions=[{names}]")

    def check_all(self) -> None:
        """Checks all values of the volumes of both splits, and logs how they are stored."""
        if not self.has_files:
            return
        slow = "chunked or not float32, read by h5py: rewrite it contiguously for speed, or use inmem or resident"
        for split in SPLITS:
            for volume in self.split(split):
                check_all(volume, self.config.allow_physical_values)
                access = "mapped" if volume.mapped else slow
                size = f"{cells_text(volume.shape)} cells, {volume.bytes / GIB:.2f} GiB"
                log.info("%s data: %s, %s, all finite, %s", split, volume.path, size, access)
        channels = self.config.volume_channels[1]
        log.info("channels: %s", "; ".join(dict.fromkeys(channel.formula() for channel in channels)))


def _in_data_dir(config: Config) -> dict[str, Any]:
    """The keys with files below /data, and their paths in DATA_DIR, or by their other names; logs both."""
    folder, changes = os.environ.get("DATA_DIR") or "/data", dict[str, Any]()
    for key in [*PATH_KEYS.values(), *npy_keys(*PATH_KEYS.values())]:
        paths = config.paths(key)
        moved = [_find(f"{folder}/{path[6:]}") if path.startswith("/data/") else path for path in paths]
        if moved != paths:
            changes[key] = moved if isinstance(getattr(config, key), list) else moved[0]
    if changes:
        moves = "; ".join(f"{key} {getattr(config, key)} -> {changes[key]}" for key in changes)
        log.info("the data are in %s: %s", folder, moves)
    return changes


def _find(path: str) -> str:
    """The path of a file that may have the name of the published data set in place of the configs', or the reverse."""
    other = re.sub(rf"(?<=/)({'|'.join(OTHER_NAMES)})(?=[._][^/]*$)", lambda match: OTHER_NAMES[match[0]], path)
    return other if os.path.exists(other) and not os.path.exists(path) else path


def _remedy(path: str) -> str:
    if os.path.basename(path).startswith("demo_"):
        return "run make demo"
    if path.startswith("/data/") and not os.path.exists("/data"):  # the default, on a machine without the data
        return "set DATA_DIR to the directory of the data, or try the program with make demo and --config=demo"
    return f"simulate one with python -m simulation --output {path}"


def staged_path(path: str, directory: str) -> Path:
    """The place of the copy of a file in a node-local directory."""
    source = Path(path)
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]  # distinguishes files of the same name
    return Path(directory) / f"{source.stem}-{digest}{source.suffix}"


def stage(path: str, directory: str) -> None:
    """Copies a file to its `staged_path`, atomically, unless a copy exists that is as old and has equal samples."""
    target = staged_path(path, directory)
    with os_errors_for_users(f"cannot stage {path} in use_cache={directory}", "choose another use_cache"):
        remove_abandoned(target)
        modified = os.stat(path).st_mtime_ns  # a cell that is corrected in place is hardly in the samples
        if not target.exists() or target.stat().st_mtime_ns != modified or sample_digest(target) != sample_digest(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write([target]) as (partial,):
                copy_file(path, partial, f"staging {os.path.basename(path)} in {directory}")
                os.utime(partial, ns=(modified, modified))
