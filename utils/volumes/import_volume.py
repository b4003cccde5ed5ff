"""Imports a simulation's fields into a volume that train.py and predict.py read: HDF5 with `Nbody` and `Hydro`.

    python -m utils.volumes.import_volume --input snapshot_1.h5 --validation snapshot_2.h5 --output box.h5
    python train.py --yaml_config box.yaml

The first command writes box_train.h5, box_val.h5 and box.yaml, a config that trains on them. The input is an HDF5 file
in Nyx's layout, or a directory of raw or NumPy files. docs/data.md, "Your own files", has formats, units and examples.
"""

import argparse
import itertools
import logging
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from utils.cli import Parser, hdf5_output, positive
from utils.config import load
from utils.config.channels import TRANSFORM
from utils.config.yaml_files import EXTENDS, SHIPPED, dump
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory
from utils.log import configure_logging
from utils.progress import Progress
from utils.volumes.attributes import CELL, FLOOR, LIMITS, UNIVERSE, channel_attributes, implausible, write_attributes
from utils.volumes.cross_check import check_file
from utils.volumes.hdf5 import DATASETS, cells_text, open_volume, stored_slabs
from utils.volumes.import_channels import Datasets, FieldChannel, Options, check_units, check_values, plan_channels
from utils.volumes.opened import PATH_KEYS, SPLITS, box_entry, largest_crop, npy_keys
from utils.volumes.snapshots import GAS_DENSITY, UNITS, Shape, Snapshot, open_snapshot
from utils.volumes.values import check_distinct

SMALLEST_CROP = 2
GAP = 8  # planes between the parts of a split, which belong to neither
STATED_TOLERANCE = 1e-4  # relative, between the file and the command line
FAST, SMALL = "bs64_fast", "demo"  # the configs to extend, for a GPU and for a CPU: 117 and 1.6 million parameters
CROPS = {FAST: 64, SMALL: 32}  # their data_size
HEADER = """\
# Trains on imported volumes: {command}
# The config begins with all keys of `{parent}`; to begin with those of another config, change the line `extends` in it.
# {parent} has {recipe}, which belong together.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """An input, with the channels, attributes and files to write for it."""

    shape: Shape
    datasets: Datasets
    parts: Mapping[Path, range]  # the files to write, and their planes of the box along x
    attributes: Mapping[str, Any]
    cell: float | None  # side of a cell in comoving Mpc/h
    is_part: bool  # the input is not periodic

    @property
    def channel_names(self) -> dict[str, list[str]]:
        return {name: [channel.name for _, channel, _ in channels] for name, channels in self.datasets.items()}

    def with_channels(self, datasets: Datasets) -> "Source":
        """The source with the channels, and so the transforms, of another one."""
        changed = {}
        for name, rows in self.datasets.items():
            pairs = zip(rows, datasets[name], strict=True)
            changed[name] = [(field, channel, factor) for (field, _, factor), (_, channel, _) in pairs]
        return replace(self, datasets=changed)


def import_volume(options: Options) -> list[str]:
    """Writes the files; returns lines for the user. Raises UserError, and leaves nothing, for contradictory input."""
    inputs = list_inputs(options)
    for path in itertools.chain(*(source.outputs for source in inputs)):
        check_target(path, options.overwrite)
        for source in inputs:
            if path.exists() and path.samefile(source.input):
                raise UserError(f"output {path} is the input; give another --output")
    sources = [plan_source(source) for source in inputs]
    first, last = sources[0].channel_names, sources[-1].channel_names
    if first != last:
        fields = " and ".join(", ".join(itertools.chain(*names.values())) for names in (first, last))
        raise UserError(f"training and validation need the same fields, but have {fields}; give others")
    sources = [source.with_channels(sources[0].datasets) for source in sources]
    volumes = {path: (len(part), *source.shape[1:]) for source in sources for path, part in source.parts.items()}
    cells = sum(map(math.prod, volumes.values()))
    counts = [len(channels) for channels in sources[0].datasets.values()]
    make_output_directory(options.output.parent, 4 * sum(counts) * cells)
    write_volumes(sources)
    lines = [f"wrote {path}: {cells_text(shape)} cells" for path, shape in volumes.items()]
    lines += [f"channels of {name}: {', '.join(named)}" for name, named in sources[0].channel_names.items()]
    channels = [[channel for _, channel, _ in part] for part in sources[0].datasets.values()]
    for path in volumes:
        check_file(str(path), channels)
    if len(counts) < len(DATASETS):
        return [*lines, f"without {GAS_DENSITY} it is an input of predict.py only"]
    if len(inputs) > 1:
        for line in check_distinct({key: [open_volume(path)] for key, path in zip(SPLITS, volumes, strict=True)}):
            log.warning(line)
    elif options.split is None:
        lines.append("warning: validation uses the training volume; import another one with --validation, or a --split")
    return [*lines, *write_config(options.output.with_suffix(".yaml"), volumes, options.machine)]


def list_inputs(options: Options) -> list[Options]:
    """The options of each input, one or two boxes, with its `outputs`: the files to write."""
    given, output = vars(options), options.output
    both = [output.with_name(f"{output.stem}_{part}{output.suffix}") for part in ("train", "val")]
    if options.validation is None and options.validation_index is None:
        return [Options(**given, outputs=[output] if options.split is None else both)]
    second = {**given, "input": options.validation or options.input, "index": options.validation_index}
    return [Options(**given, outputs=both[:1]), Options(**second, outputs=both[1:])]


def plan_source(options: Options) -> Source:
    path = Path(options.input)
    others = [name for _, named in (*options.input_field, *options.field) for name in named.split(",")]
    snapshot = open_snapshot(path, options.shape, options.index, others)
    is_part = options.not_periodic or not snapshot.periodic
    parts, simulation = plan_parts(snapshot.shape[0], options), describe(snapshot, options)
    datasets, cell = plan_channels(snapshot, options, is_part), simulation.pop(CELL, None)
    attributes = {
        "made_by": "utils.volumes.import_volume",
        "input": str(path.resolve()),
        "periodic": options.split is None and not is_part,
        **simulation,
        # Smaller densities are raised to this one, whose channel is -1.
        FLOOR: math.exp(-options.transform["density_log_scale"]),
    }
    return Source(snapshot.shape, datasets, parts, attributes, cell, is_part)


def describe(snapshot: Snapshot, options: Options) -> dict[str, float]:
    """Attributes of redshift and cosmology, and the size of a cell, from the files and the options."""
    stated = dict(snapshot.simulation)
    flags = {key: (name, factor) for name, (key, factor) in UNIVERSE.items()}
    flags[CELL] = ("box_size_mpc_h", 1 / max(snapshot.shape))
    for key, (flag, factor) in flags.items():
        value = getattr(options, flag)
        if value is None:
            continue
        known = stated.setdefault(key, factor * value) / factor
        if not math.isclose(known, value, rel_tol=STATED_TOLERANCE, abs_tol=STATED_TOLERANCE):
            raise UserError(f"{snapshot.path} states {flag} {known:.6g}, not {value:.6g}; remove --{flag}")
    for fault in implausible(stated, LIMITS):
        units = {"cell": ": lengths are in comoving Mpc/h, not in kpc/h", "cosm": ": --hubble is H0 / (100 km/s/Mpc)"}
        raise UserError(f"{snapshot.path}: {fault}; correct it{units.get(fault[:4], '')}")
    for fault in implausible(stated):
        log.warning(f"{snapshot.path}: {fault}: lengths are in comoving Mpc/h; are these in kpc/h?")
    return stated


def plan_parts(planes: int, options: Options) -> dict[Path, range]:
    """The files to write; with --split two, with a gap between them also across the periodic boundary."""
    if options.split is None:
        return {options.outputs[0]: range(planes)}
    valid = round(options.split * planes)
    train = planes - valid - 2 * GAP
    if min(train, valid) < SMALLEST_CROP:
        least, most = SMALLEST_CROP / planes, 1 - (SMALLEST_CROP + 2 * GAP) / planes
        limits = f"--split {least:.3g} to {most:.3g}" if least <= most else "a box with more planes"
        left = f"{train} training and {valid} validation planes of {planes}, with two gaps of {GAP}"
        raise UserError(f"--split {options.split:g} leaves {left}; give {limits}")
    start = train + GAP
    return dict(zip(options.outputs, (range(train), range(start, start + valid)), strict=True))


def write_volumes(sources: Sequence[Source]) -> None:
    """Writes the files; raises UserError, and leaves nothing, for implausible values."""
    targets = [path for source in sources for path in source.parts]
    with (
        os_errors_for_users(f"cannot write {targets[0]}", "give another --output"),
        atomic_write(targets) as partials,
        ExitStack() as opened,
    ):
        files = iter([opened.enter_context(h5py.File(partial, "w")) for partial in partials])
        for source in sources:
            _write_source(source, [(next(files), planes) for planes in source.parts.values()])


def _write_source(source: Source, parts: Sequence[tuple[h5py.File, range]]) -> None:
    for file, planes in parts:
        write_attributes(file, {"": source.attributes})
        if source.cell is not None:
            file.attrs["box_size_mpc_h"] = source.cell * max(len(planes), *source.shape[1:])
        if len(parts) > 1:
            file.attrs["input_planes"] = [planes.start, planes.stop]
        for name, channels in source.datasets.items():
            dataset = file.create_dataset(name, (len(channels), len(planes), *source.shape[1:]), "<f4")
            dataset.attrs.update(channel_attributes([channel for _, channel, _ in channels]))
    total = sum(map(len, source.datasets.values())) * source.shape[0]
    with Progress(f"importing {source.attributes['input']}", total, "planes") as progress:
        for name, channels in source.datasets.items():
            datasets = [(file[name], planes) for file, planes in parts]
            for number, channel in enumerate(channels):
                means = _write_channel(channel, number, datasets, source.attributes[FLOOR], progress)
                check_units(channel, means, source.is_part)


def _write_channel(
    source: FieldChannel, number: int, parts: Sequence[tuple[h5py.Dataset, range]], floor: float, progress: Progress
) -> np.ndarray:
    """Converts a field to channel `number` of the dataset of each part; returns the means that `check_units` takes."""
    (field, channel, factor), sums, low, high = source, np.zeros(3), math.inf, -math.inf
    for slab, read in stored_slabs(field.stored, field.name):
        values = np.array(read)  # changed below
        check_values(field, slab, values)
        low, high = min(low, values.min()), max(high, values.max())
        sums[:2] += values.sum(dtype=np.float64), np.dot(values.reshape(-1), values.reshape(-1))
        values *= np.float32(factor)
        if field.quantity == "density":
            np.maximum(values, floor, out=values)
        if channel.is_log and not values.min() > 0:
            raise UserError(f"{field.name} has values of 0 or less, which have no logarithm; raise them in the file")
        values = channel.from_physical(values)
        sums[2] += values.sum(dtype=np.float64)
        for dataset, planes in parts:
            first, end = max(slab.start, planes.start), min(slab.stop, planes.stop)
            if first < end:
                part = values[first - slab.start : end - slab.start]
                dataset[number, first - planes.start : end - planes.start] = part
        progress.advance(len(values))
    if low == high:
        raise UserError(f"{field.name} is {low:g} everywhere; give another file, or one without this field")
    return sums / math.prod(field.stored.shape)


def write_config(path: Path, volumes: Mapping[Path, Sequence[int]], machine: str | None = None) -> list[str]:
    """Writes a config for volumes of these shapes, training first, unless one exists; returns lines for the user."""
    command = f"python train.py --yaml_config {shlex.quote(str(path))}"
    if path.exists():
        names_them = all(f"/{file.name}".encode() in path.read_bytes() for file in volumes)  # in its directory
        line = f"kept {path}, which exists; to have it written for these volumes, remove it and import again"
        return [line, command] if names_them else [line]
    smallest = min(map(min, volumes.values()))
    parent, reason = _parent(smallest, machine)
    crop, first, last = min(CROPS[parent], largest_crop(smallest)[0]), next(iter(volumes)), list(volumes)[-1]
    paths = {key: str(file.resolve()).replace("$", "$$") for key, file in (("train_path", first), ("val_path", last))}
    keys: dict[str, Any] = {EXTENDS: parent, **paths, **dict.fromkeys(npy_keys(*PATH_KEYS.values()))}
    keys |= {"box_size": [box_entry([volumes[file]]) for file in (first, last)], "dataset_names": list(DATASETS)}
    keys |= {"symmetries": "full", "expdir": "./runs"}
    if crop < CROPS[parent]:
        keys |= {"data_size": crop, "network": {"scales": largest_crop(smallest)[1]}}
    config = load(str(SHIPPED / "UNet.yaml"), parent)
    recipe = f"global batch {config.global_batch_size}, learning rate {config.lr_schedule.start_lr:g}"
    text = HEADER.format(command=command, parent=parent, recipe=recipe) + dump({EXTENDS: "UNet.yaml", path.stem: keys})
    with os_errors_for_users(f"cannot write {path}"), atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")
    lines = [f"wrote {path}, a config that extends {parent} ({recipe}), because {reason}"]
    if crop < CROPS[parent]:
        lines.append(f"warning: crops have {crop} cells per side, because a side has {smallest}; import larger parts")
    return [*lines, "to train:", command]


def _parent(smallest: int, machine: str | None) -> tuple[str, str]:
    """The config to extend for volumes with a smallest side of `smallest` cells, and the reason."""
    # A login node may have no GPU.
    found = "a GPU" if torch.cuda.is_available() else next(filter(shutil.which, ("sbatch", "qsub")), None)
    if machine == "cpu":
        return SMALL, "of --for cpu"
    if not (machine or found):
        return SMALL, "neither a GPU nor sbatch or qsub was found; --for gpu writes one for a GPU"
    if smallest < CROPS[FAST]:
        return SMALL, f"crops of {FAST} have {CROPS[FAST]} cells per side, and a side has {smallest}"
    return FAST, "of --for gpu" if machine else f"{found} was found"


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = Parser(__doc__)
    parser.prog = "python -m utils.volumes.import_volume"
    parser.add_argument("--input", required=True, help="HDF5 file of Nyx, or directory of raw or NumPy files")
    parser.add_argument("--output", required=True, type=hdf5_output, help="HDF5 file to write")
    parser.add_argument("--shape", type=_shape, metavar="X,Y,Z", help="cells of raw files")
    parser.add_argument("--index", type=int, help="box of .npy files with several, [N, X, Y, Z]; the first is 0")
    parser.add_argument("--velocity_units", choices=UNITS["velocity"], help="(as the file states)")
    text = "mean density of the whole box in the unit of each field, dark matter first (the mean of the input)"
    parser.add_argument("--mean_density", type=float, nargs="+", metavar="MEAN", help=text)
    parser.add_argument("--not_periodic", action="store_true", help="the input is a part that was cut out of a box")
    text = "longest side in comoving Mpc/h, unless the file states it"
    parser.add_argument("--box_size_mpc_h", type=float, help=text)
    for name in UNIVERSE:
        text = {"hubble": "H0 / (100 km/s/Mpc)", "omega_l": "omega_lambda"}.get(name, name)
        parser.add_argument(f"--{name}", type=float, help=f"{text}, unless the file states it")
    both = "writes OUTPUT_train.h5 and OUTPUT_val.h5"
    parser.add_argument("--validation", metavar="INPUT", help=f"validation box in the same format as --input; {both}")
    text = f"box of .npy files for validation, as --index; {both}"
    parser.add_argument("--validation_index", type=int, metavar="INDEX", help=text)
    text = f"share of the planes along x for validation; {both}"
    parser.add_argument("--split", type=float, metavar="FRACTION", help=text)
    for name, default in TRANSFORM.items():
        text = "of the channels, see docs/data.md (%(default).6g)"
        parser.add_argument(f"--{name}", type=float, default=default, help=text)
    for side, text in (("field", "target"), ("input_field", "input")):
        text = f"another {text}: the name of its channel and of its field in --input; X,Y,Z for a vector's components"
        parser.add_argument(f"--{side}", type=_pair, action="append", default=[], metavar="NAME=FIELD", help=text)
    text = "unit of the channel of another field (as the file states)"
    parser.add_argument("--unit", type=_pair, action="append", default=[], metavar="NAME=UNIT", help=text)
    text = "machine of the config (gpu if this one has a GPU, sbatch or qsub)"
    parser.add_argument("--for", dest="machine", choices=("gpu", "cpu"), help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    options = parser.parse_args(argv)
    if options.split is not None and (options.validation or options.validation_index is not None):
        raise UserError("--split takes the validation box from --input; remove it or --validation")
    options.transform = {name: getattr(options, name) for name in TRANSFORM}
    if wrong := [name for name, value in options.transform.items() if value <= 0 and not name.endswith("center")]:
        raise UserError(f"--{wrong[0]} is {options.transform[wrong[0]]:g}; give a number above 0")
    options.output = Path(options.output)
    return options


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def _shape(text: str) -> Shape:
    sides = text.split(",")
    if len(sides) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not X,Y,Z, the cells along each axis")
    return positive(sides[0]), positive(sides[1]), positive(sides[2])


def main(argv: Sequence[str] | None = None) -> None:
    configure_logging(0)
    with one_line_errors():
        for line in import_volume(parse(argv)):
            print(line)


if __name__ == "__main__":
    main()
