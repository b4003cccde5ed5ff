"""Imports a simulation's fields into a volume that train.py and predict.py read: HDF5 with `Nbody` and `Hydro`.

    python -m utils.volumes.import_volume --input snapshot_1.h5 --validation snapshot_2.h5 --output box.h5
    python train.py --yaml_config box.yaml

The first command writes box_train.h5, box_val.h5 and box.yaml, a config that trains on them. The input is an HDF5 file
in Nyx's layout, or a directory of raw or NumPy files. docs/data.md, "Your own files", has formats, units and examples.
"""

import argparse
import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from utils.cli import Parser, hdf5_output, positive
from utils.config import validate_section
from utils.config.sections import TransformConfig
from utils.config.yaml_files import EXTENDS, dump
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write, check_target, make_output_directory
from utils.progress import Progress
from utils.volumes.attributes import CELL, FLOOR, UNIVERSE, implausible
from utils.volumes.channels import INPUTS, PLAUSIBLE, TARGETS, Channel, input_channels, target_channels, vectors_of
from utils.volumes.cross_check import check_file
from utils.volumes.hdf5 import DATASETS, cells_text, stored_slabs
from utils.volumes.opened import PATH_KEYS, box_entry, largest_crop, npy_keys
from utils.volumes.snapshots import DARK_MATTER_DENSITY, GAS_DENSITY, UNITS, GridField, Shape, Snapshot, open_snapshot

SMALLEST_CROP = 2
GAP = 8  # planes between the parts of a split, which belong to neither
STATED_TOLERANCE = 1e-4  # relative, between the file and the command line
REMEDIES = {  # for values that do not fit the unit
    "density": "correct its attribute units",
    "velocity": "correct its attribute units or, without one, give another --velocity_units",
    "temperature": "write temperatures in K, no logarithms",
}
CROPS = {"base": 64, "demo": 32}  # data_size of the configs to extend
HEADER = """\
# Trains on imported volumes: {command}
# The config begins with all keys of `{parent}`; to begin with those of another config, change the line `extends` in it.
"""

Options = argparse.Namespace  # the command line; the attributes have the names of the flags


# A field, the channel computed from it, and the factor from the field's unit to the channel's.
FieldChannel = tuple[GridField, Channel, float]
Datasets = Mapping[str, Sequence[FieldChannel]]


@dataclass(frozen=True)
class Source:
    """An input, with the channels, attributes and files to write for it."""

    shape: Shape
    datasets: Datasets
    parts: Mapping[Path, range]  # the files to write, and their planes of the box along x
    attributes: Mapping[str, Any]
    cell: float | None  # side of a cell in comoving Mpc/h

    @property
    def channel_names(self) -> dict[str, list[str]]:
        """The names of the channels of each dataset."""
        return {name: [channel.name for _, channel, _ in channels] for name, channels in self.datasets.items()}


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
    volumes = {path: (len(part), *source.shape[1:]) for source in sources for path, part in source.parts.items()}
    cells = sum(map(math.prod, volumes.values()))
    counts = [len(channels) for channels in sources[0].datasets.values()]
    make_output_directory(options.output.parent, 4 * sum(counts) * cells)
    write_volumes(sources)
    lines = [f"wrote {path}: {cells_text(shape)} cells" for path, shape in volumes.items()]
    lines += [f"channels of {name}: {', '.join(named)}" for name, named in sources[0].channel_names.items()]
    lines += itertools.chain(*(check_file(str(path), options.transform) for path in volumes))
    if len(counts) < len(DATASETS):
        return [*lines, f"without {GAS_DENSITY} it is an input of predict.py only"]
    if options.split is None and len({(Path(source.input).resolve(), source.index) for source in inputs}) == 1:
        lines.append("warning: validation uses the training volume; import another one with --validation, or a --split")
    return [*lines, *write_config(options.output.with_suffix(".yaml"), volumes, counts)]


def list_inputs(options: Options) -> list[Options]:
    """The options of each input, one or two boxes, with its `outputs`: the files to write."""
    given, output = vars(options), options.output
    both = [output.with_name(f"{output.stem}_{part}{output.suffix}") for part in ("train", "val")]
    if options.validation is None and options.validation_index is None:
        return [Options(**given, outputs=[output] if options.split is None else both)]
    second = {**given, "input": options.validation or options.input, "index": options.validation_index}
    return [Options(**given, outputs=both[:1]), Options(**second, outputs=both[1:])]


def plan_source(options: Options) -> Source:
    """The channels, attributes and files to write for one input."""
    path = Path(options.input)
    snapshot = open_snapshot(path, options.shape, options.index)
    parts, simulation = plan_parts(snapshot.shape[0], options), describe(snapshot, options)
    datasets, cell = plan_channels(snapshot, options), simulation.pop(CELL, None)
    attributes = {
        "made_by": "utils.volumes.import_volume",
        "input": str(path.resolve()),
        "periodic": snapshot.periodic and options.split is None,
        **simulation,
        **options.transform.model_dump(),
        # Smaller densities are raised to this one, whose channel is -1.
        FLOOR: math.exp(-options.transform.density_log_scale),
    }
    return Source(snapshot.shape, datasets, parts, attributes, cell)


def plan_channels(snapshot: Snapshot, options: Options) -> Datasets:
    dark = tuple(name for name in snapshot.fields if name.startswith("dark_matter"))
    gas = tuple(name for name in snapshot.fields if name not in dark)
    quantities = [tuple(dict.fromkeys(snapshot.fields[name].quantity for name in names)) for names in (dark, gas)]
    if quantities != [INPUTS.get(len(dark)), TARGETS.get(len(gas), ())]:
        raise UserError(
            f"{snapshot.path} has the fields {', '.join(snapshot.fields)}; give {DARK_MATTER_DENSITY}, with gas also "
            f"{GAS_DENSITY}, and all components of a velocity or none"
        )
    datasets = {}
    for dataset, names, channels in zip(DATASETS, (dark, gas), (input_channels, target_channels), strict=True):
        known = channels(len(names), options.transform, vectors_of(len(names)))
        fields = [snapshot.fields[name] for name in names]
        datasets[dataset] = [
            (field, channel, _factor(field, options)) for field, channel in zip(fields, known, strict=True)
        ]
    return {dataset: channels for dataset, channels in datasets.items() if channels}


def _factor(field: GridField, options: Options) -> float:
    """The factor from a field's unit to that of its channel: one over the mean for densities in unknown units."""
    units, unit, remedy = UNITS[field.quantity], field.unit, "write temperatures in K"
    if field.quantity == "density" and unit != "mean":
        return 1 / _mean(field)
    if field.quantity == "temperature":
        unit = unit or "K"
    if field.quantity == "velocity":
        unit, remedy = options.velocity_units or unit, f"give --velocity_units ({', '.join(units)})"
        if field.is_stated and field.unit in units and field.unit != unit:
            raise UserError(f"{field.name} states {field.unit}, not {unit}; correct it, or remove --velocity_units")
    if unit not in units:
        raise UserError(f"{field.name} is in {unit or 'an unknown unit'}; {remedy}")
    return units[unit]


def _mean(field: GridField) -> float:
    total = 0.0
    with Progress(f"mean of {field.name}", field.stored.shape[0], "planes") as progress:
        for _, values in stored_slabs(field.stored, field.name):
            total += float(values.sum(dtype=np.float64))
            progress.advance(len(values))
    if not total:
        raise UserError(f"{field.name} is 0 everywhere; give another file")
    return total / math.prod(field.stored.shape)


def describe(snapshot: Snapshot, options: Options) -> dict[str, float]:
    """Attributes of redshift and cosmology, and the size of a cell, from the files and the options."""
    stated = dict(snapshot.simulation)
    flags = {key: (name, factor) for name, (key, factor) in UNIVERSE.items()}
    flags[CELL] = ("box_size", 1 / max(snapshot.shape))
    for key, (flag, factor) in flags.items():
        value = getattr(options, flag)
        if value is None:
            continue
        known = stated.setdefault(key, factor * value) / factor
        if not math.isclose(known, value, rel_tol=STATED_TOLERANCE, abs_tol=STATED_TOLERANCE):
            raise UserError(f"{snapshot.path} states {flag} {known:.6g}, not {value:.6g}; remove --{flag}")
    for fault in implausible(stated):
        raise UserError(
            f"{snapshot.path}: {fault}; correct it: lengths are in comoving Mpc/h, that is h times those in Mpc, and "
            f"--hubble is h = H0 / (100 km/s/Mpc)"
        )
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
        raise UserError(
            f"--split {options.split:g} leaves {train} training and {valid} validation planes of {planes}, with two "
            f"gaps of {GAP}; give {limits}"
        )
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
        file.attrs.update(source.attributes)
        if source.cell is not None:
            file.attrs["box_size_mpc_h"] = source.cell * max(len(planes), *source.shape[1:])
        if len(parts) > 1:
            file.attrs["input_planes"] = [planes.start, planes.stop]
        for name, channels in source.datasets.items():
            dataset = file.create_dataset(name, (len(channels), len(planes), *source.shape[1:]), "<f4")
            dataset.attrs["channels"] = source.channel_names[name]
            dataset.attrs["transform"] = [channel.formula() for _, channel, _ in channels]
    total = sum(map(len, source.datasets.values())) * source.shape[0]
    with Progress(f"importing {source.attributes['input']}", total, "planes") as progress:
        for name, channels in source.datasets.items():
            datasets = [(file[name], planes) for file, planes in parts]
            for number, channel in enumerate(channels):
                _write_channel(channel, number, datasets, source.attributes[FLOOR], progress)


def _write_channel(
    source: FieldChannel, number: int, parts: Sequence[tuple[h5py.Dataset, range]], floor: float, progress: Progress
) -> None:
    """Converts a field to channel `number` of the dataset of each part."""
    (field, channel, factor), total, squares, low, high = source, 0.0, 0.0, math.inf, -math.inf
    for slab, read in stored_slabs(field.stored, field.name):
        values = np.array(read)  # changed below
        _check_values(field, slab, values)
        low, high = min(low, values.min()), max(high, values.max())
        total += float(values.sum(dtype=np.float64))
        squares += float(np.dot(values.reshape(-1), values.reshape(-1)))
        values *= np.float32(factor)
        if field.quantity == "density":
            np.maximum(values, floor, out=values)
        values = channel.from_physical(values)
        for dataset, planes in parts:
            first, end = max(slab.start, planes.start), min(slab.stop, planes.stop)
            if first < end:
                part = values[first - slab.start : end - slab.start]
                dataset[number, first - planes.start : end - planes.start] = part
        progress.advance(len(values))
    if low == high:
        raise UserError(f"{field.name} is {low:g} everywhere; give another file, or one without this field")
    cells = math.prod(field.stored.shape)
    _check_units(source, total / cells, math.sqrt(squares / cells))


def _check_values(field: GridField, slab: slice, values: np.ndarray) -> None:
    """Raises UserError, with the place, for values that the quantity cannot have."""
    possible = {"density": values >= 0, "velocity": True, "temperature": values > 0}[field.quantity]
    wrong = np.argwhere(~(np.isfinite(values) & possible))
    if len(wrong):
        x, y, z = wrong[0].tolist()
        value = f"{field.name}[{slab.start + x}, {y}, {z}] is {values[x, y, z]:g}"
        raise UserError(f"{value}, which is impossible for a {field.quantity}; correct the file")


def _check_units(source: FieldChannel, mean: float, root_mean_square: float) -> None:
    """Raises UserError if the field's mean, of a velocity its root mean square, does not fit its unit."""
    field, channel, factor = source
    name, value = ("root mean square", root_mean_square) if field.quantity == "velocity" else ("mean", mean)
    unit = str(channel.unit)
    typical, (low, high) = factor * value, PLAUSIBLE[unit]
    if not low <= typical <= high:
        remedy = REMEDIES[field.quantity]
        raise UserError(f"{field.name}: a {name} of {typical:.3g} {unit} is implausible; {remedy}")


def write_config(path: Path, volumes: Mapping[Path, Sequence[int]], counts: Sequence[int]) -> list[str]:
    """Writes a config for volumes of these shapes, training first, unless the file exists; returns lines for the user.

    `counts` are the numbers of input and target channels. A file that exists may have been edited, and is kept.
    """
    first, last = next(iter(volumes)), list(volumes)[-1]
    command = f"python train.py --yaml_config {shlex.quote(str(path))}"
    if path.exists():
        return [f"kept {path}, which exists; to have it written for these volumes, remove it and import again", command]
    smallest = min(map(min, volumes.values()))
    parent = "base" if smallest >= CROPS["base"] and torch.cuda.is_available() else "demo"  # base has 117 M parameters
    largest, scales = largest_crop(smallest)
    crop = min(CROPS[parent], largest)
    inputs, targets = counts
    keys: dict[str, Any] = {
        EXTENDS: parent,
        **{key: str(file.resolve()).replace("$", "$$") for key, file in (("train_path", first), ("val_path", last))},
        **dict.fromkeys(npy_keys(*PATH_KEYS.values())),
        "box_size": [box_entry([volumes[file]]) for file in (first, last)],
        "N_in_channels": inputs,
        "N_out_channels": targets,
        "vector_channels": {"inputs": vectors_of(inputs), "targets": vectors_of(targets)},
        "dataset_names": list(DATASETS),
        "symmetries": "full",
        "expdir": "./runs",
    }
    if crop < CROPS[parent]:
        keys |= {"data_size": crop, "network": {"scales": scales}}
    text = HEADER.format(command=command, parent=parent) + dump({EXTENDS: "UNet.yaml", path.stem: keys})
    with os_errors_for_users(f"cannot write {path}"), atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")
    lines = [f"wrote {path}, a config that extends {parent}"]
    if parent == "demo" and smallest >= CROPS["base"]:
        lines.append("demo has a small network, as there is no GPU; with one, let the config extend base")
    if crop < CROPS[parent]:
        lines.append(f"warning: crops have {crop} cells per side, because a side has {smallest}; import larger parts")
    return [*lines, "to train:", command]


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = Parser(__doc__)
    parser.prog = "python -m utils.volumes.import_volume"
    parser.add_argument("--input", required=True, help="HDF5 file of Nyx, or directory of raw or NumPy files")
    parser.add_argument("--output", required=True, type=hdf5_output, help="HDF5 file to write")
    parser.add_argument("--shape", type=_shape, metavar="X,Y,Z", help="cells of raw files")
    parser.add_argument("--index", type=int, help="box of .npy files with several, [N, X, Y, Z]; the first is 0")
    parser.add_argument("--velocity_units", choices=UNITS["velocity"], help="(as the file states)")
    parser.add_argument("--box_size", type=float, help="longest side in comoving Mpc/h, unless the file states it")
    for name in UNIVERSE:
        text = {"hubble": "H0 / (100 km/s/Mpc)", "omega_l": "omega_lambda"}.get(name, name)
        parser.add_argument(f"--{name}", type=float, help=f"{text}, unless the file states it")
    both = "writes OUTPUT_train.h5 and OUTPUT_val.h5"
    parser.add_argument("--validation", metavar="INPUT", help=f"validation box in the same format as --input; {both}")
    text = f"box of .npy files for validation, as --index; {both}"
    parser.add_argument("--validation_index", type=int, metavar="INDEX", help=text)
    text = f"share of the planes along x for validation; {both}"
    parser.add_argument("--split", type=float, metavar="FRACTION", help=text)
    for name, info in TransformConfig.model_fields.items():
        text = "of the channels, see docs/data.md (%(default).6g)"
        parser.add_argument(f"--{name}", type=float, default=info.default, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    options = parser.parse_args(argv)
    if options.split is not None and (options.validation or options.validation_index is not None):
        raise UserError("--split takes the validation box from --input; remove it or --validation")
    transform = {name: getattr(options, name) for name in TransformConfig.model_fields}
    options.transform = validate_section(TransformConfig, transform, "command line")
    options.output = Path(options.output)
    return options


def _shape(text: str) -> Shape:
    x, y, z = map(positive, text.split(","))
    return x, y, z


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors():
        for line in import_volume(parse(argv)):
            print(line)


if __name__ == "__main__":
    main()
