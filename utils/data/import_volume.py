"""Imports a simulation's fields into a volume that train.py and predict.py read: HDF5 with `Nbody` and `Hydro`.

    python -m utils.data.import_volume --input snapshot.h5 --output train.h5                 Nyx's HDF5 ("nyx-lyaf")
    python -m utils.data.import_volume --input SDRBENCH-EXASKY-NYX-512x512x512 --output train.h5 \\
        --shape 512,512,512 --velocity_units cm/s                                     a directory of raw float32 fields
    python -m utils.data.import_volume --input CAMELS/3D_grids --output box7.h5 --index 7 --box_size 25
                                                                                     a directory of NumPy grids
    python -m utils.data.import_volume --input snapshot.h5 --output box.h5 --split 0.25   box_train.h5 and box_val.h5

The fields are dark_matter_density, baryon_density, velocity_x, velocity_y, velocity_z, temperature and, if known,
dark_matter_velocity_x, _y and _z. Missing fields have no channels; without baryon_density only `Nbody`
is written. Densities in other units than the mean are divided by the mean. Memory does not grow with the box.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from utils.cli import Parser, hdf5_output, positive
from utils.config import validate_section
from utils.config.sections import TransformConfig
from utils.data.channels import VELOCITY, input_channels, target_channels
from utils.data.files.attributes import CELL, FLOOR, UNIVERSE
from utils.data.files.blocks import catch_signals
from utils.data.files.field_converter import FieldChannel, Part, write_volume
from utils.data.files.hdf5 import DATASETS
from utils.data.files.nyx import open_nyx
from utils.data.files.snapshots import (
    DARK_MATTER_DENSITY,
    DARK_MATTER_VELOCITY,
    GAS_DENSITY,
    GAS_VELOCITY,
    TEMPERATURE,
    UNITS,
    GridField,
    Shape,
    Snapshot,
    open_npy,
    open_raw,
)
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.files import check_target, make_output_directory
from utils.provenance import provenance

GAP = 8  # cells between the parts of a split
STATED_TOLERANCE = 1e-4  # relative, between the file and the command line
LIMITS = {"hubble": (0.1, 2.0), CELL: (1e-5, 50.0)}  # values beyond them are in other units

Options = argparse.Namespace  # the command line; the attributes have the names of the flags

# --- what is imported ------------------------------------------------------------------------------------------------


def open_snapshot(options: Options) -> Snapshot:
    """The input's fields; raises UserError if the files contradict themselves, each other or the options."""
    path = Path(options.input)
    if not path.exists():
        raise UserError(f"no such file or directory: {path}; give another --input")
    layout = _detect(path) if options.format == "auto" else options.format
    if layout != "nyx" and not path.is_dir():
        raise UserError(f"{path} is not a directory of {layout} files; give the directory that holds them")
    for flag, suitable in (("index", "npy"), ("shape", "raw")):
        if layout != suitable and getattr(options, flag) is not None:
            raise UserError(f"--{flag} is for {suitable} files, not for {layout}; remove it")
    if layout == "nyx":
        return open_nyx(options.input)
    if layout == "npy":
        return open_npy(options.input, options.index)
    if options.shape is None:
        raise UserError("raw files do not state their shape; give --shape X,Y,Z")
    return open_raw(options.input, options.shape)


def _detect(path: Path) -> str:
    """The format of the input."""
    if not path.is_dir():
        return "nyx"
    layouts = [layout for layout, ending in (("raw", "f32"), ("npy", "npy")) if any(path.glob(f"*.{ending}"))]
    if len(layouts) != 1:
        contents = "both .f32 and .npy files" if layouts else "neither .f32 nor .npy files"
        raise UserError(f"{path} has {contents}; give another --input or --format")
    return layouts[0]


def plan_channels(snapshot: Snapshot, options: Options) -> dict[str, list[FieldChannel]]:
    """The channels of each dataset to write."""
    fields, transform = snapshot.fields, options.transform
    for vector in (DARK_MATTER_VELOCITY, GAS_VELOCITY):
        missing = [name for name in vector if name not in fields]
        if missing and len(missing) < len(vector):
            raise UserError(f"{snapshot.path} has no {missing[0]}; give all components of a velocity, or none")
    if DARK_MATTER_DENSITY not in fields:
        raise UserError(f"{snapshot.path} has no {DARK_MATTER_DENSITY}; it has {', '.join(fields) or 'no fields'}")
    gas = [name for name in (GAS_DENSITY, *GAS_VELOCITY, TEMPERATURE) if name in fields]
    if gas and gas[0] != GAS_DENSITY:
        raise UserError(f"{snapshot.path} has {gas[0]}, but no {GAS_DENSITY}; add it, or remove the other gas fields")
    dark = [name for name in (DARK_MATTER_DENSITY, *DARK_MATTER_VELOCITY) if name in fields]
    names = {DATASETS[0]: dark, DATASETS[1]: gas}
    channels = {
        DATASETS[0]: input_channels(len(dark), transform, vectors_of(len(dark))),
        DATASETS[1]: target_channels(len(gas), transform, vectors_of(len(gas))),
    }
    return {
        dataset: [
            FieldChannel(fields[name], channel, _factor(fields[name], options), options.density_units == "mean")
            for name, channel in zip(names[dataset], channels[dataset], strict=True)
        ]
        for dataset in DATASETS
        if names[dataset]
    }


def vectors_of(channels: int) -> list[list[int]]:
    """The config's vector_channels of a dataset, which has a velocity unless it has one or two channels."""
    return [list(triple) for triple in VELOCITY] if channels > 3 else []


def _factor(field: GridField, options: Options) -> float | None:
    """The factor from a field's unit to that of its channel, None for a density in another unit than the mean."""
    given = {"density": options.density_units, "velocity": options.velocity_units}.get(field.quantity)
    unit = given or field.unit or {"density": "other", "temperature": "K"}.get(field.quantity)
    if unit is None:
        raise UserError(f"{field.name} does not state its unit; give --velocity_units")
    unit = _spelled(unit)
    units_of_others = [known for quantity, units in UNITS.items() if quantity != field.quantity for known in units]
    if unit in UNITS[field.quantity]:
        return UNITS[field.quantity][unit]
    if field.quantity == "density" and unit not in units_of_others:
        return None
    remedy = "correct the attribute" if field.quantity == "temperature" else f"give --{field.quantity}_units"
    raise UserError(f"{field.name} is a {field.quantity} in {unit}; {remedy}")


def _spelled(unit: str) -> str:
    """The unit as in UNITS, if it is one of them in another spelling such as km s^-1, [cm/s] or Kelvin."""
    plain = re.sub(r"[\s*.]*s(\^|\*\*)?-1$", "/s", unit.strip("[]() ").lower())
    plain = {"kelvin": "k"}.get(plain, plain.replace(" ", ""))
    known = {name.lower(): name for units in UNITS.values() for name in units}
    return known.get(plain, unit)


def describe(snapshot: Snapshot, options: Options) -> tuple[float | None, dict[str, float]]:
    """Side of a cell in Mpc/h, and the attributes of redshift and cosmology, from the files and the options."""
    simulation, cell, side = dict(snapshot.simulation), snapshot.cell, max(snapshot.shape)
    for flag, (key, factor) in UNIVERSE.items():
        given = getattr(options, flag)
        if given is not None:
            _check_stated(snapshot.path, flag, simulation.get(key, factor * given) / factor, given)
            simulation[key] = factor * given
    if options.box_size is not None:
        _check_stated(snapshot.path, "box_size", options.box_size if cell is None else cell * side, options.box_size)
        cell = options.box_size / side
    values = {flag: simulation[key] / factor for flag, (key, factor) in UNIVERSE.items() if key in simulation}
    values |= {} if cell is None else {CELL: cell}
    for name, (low, high) in LIMITS.items():
        if name in values and not low <= values[name] <= high:
            raise UserError(f"{snapshot.path}: {name} is {values[name]:g}, expected {low:g} to {high:g}; correct it")
    return cell, simulation


def _check_stated(path: str, flag: str, stated: float, given: float) -> None:
    if not math.isclose(stated, given, rel_tol=STATED_TOLERANCE, abs_tol=STATED_TOLERANCE):
        raise UserError(f"{path} states {flag} {stated:.6g}, the command line {given:.6g}; remove --{flag}")


def plan_planes(shape: Shape, options: Options) -> dict[Path, range]:
    """The files to write; with --split two, with a gap between them also across the periodic boundary."""
    if options.split is None:
        return {options.output: range(shape[0])}
    valid = round(options.split * shape[0])
    train = shape[0] - valid - 2 * options.gap
    if min(train, valid) < 1:
        raise UserError(
            f"--split {options.split:g} --gap {options.gap} leaves {train} training and {valid} validation planes of "
            f"{shape[0]}; give others"
        )
    stem, suffix, start = options.output.stem, options.output.suffix, train + options.gap
    return {
        options.output.with_name(f"{stem}_train{suffix}"): range(train),
        options.output.with_name(f"{stem}_val{suffix}"): range(start, start + valid),
    }


# --- the command ----------------------------------------------------------------------------------------------------


def import_volume(options: Options) -> list[str]:
    """Writes the files; returns lines for the user. Raises UserError, and leaves nothing, for contradictory input."""
    snapshot = open_snapshot(options)
    datasets = plan_channels(snapshot, options)
    shape, (cell, simulation) = snapshot.shape, describe(snapshot, options)
    planes = plan_planes(shape, options)
    source = Path(options.input)
    inputs = [source, *(source.iterdir() if source.is_dir() else ())]
    for path in planes:
        if path.exists() and any(path.samefile(file) for file in inputs):
            raise UserError(f"output {path} is the input; give another --output")
        check_target(path, options.overwrite)
    attributes = {
        "made_by": "utils.data.import_volume",
        "input": str(Path(options.input).resolve()),
        "periodic": snapshot.periodic and options.split is None,
        **simulation,
        **options.transform.model_dump(),
        FLOOR: options.floor,
        "provenance": json.dumps(provenance(World(Launch("import_volume"), torch.device("cpu")))),
    }
    parts = []
    for path, part in planes.items():
        box = {} if cell is None else {"box_size_mpc_h": cell * max(len(part), *shape[1:])}
        place = {} if options.split is None else {"input_planes": [part.start, part.stop]}
        parts.append(Part(path, part, {**attributes, **box, **place}))
    cells = sum(len(part) for part in planes.values()) * shape[1] * shape[2]
    make_output_directory(options.output.parent, 4 * cells * sum(map(len, datasets.values())))
    write_volume(datasets, parts, shape, options.floor, f"importing {options.input}")
    unknown = [f"--{name}" for name, (key, _) in UNIVERSE.items() if key not in simulation]
    unknown += ["--box_size"] if cell is None else []
    lines = [f"note: the Lyman-alpha flux needs values that the input lacks: {', '.join(unknown)}"] if unknown else []
    return [*lines, *_summary(parts, datasets, shape)]


def _summary(parts: Sequence[Part], datasets: dict[str, list[FieldChannel]], shape: Shape) -> list[str]:
    """Lines about the files, and the config keys that fit them."""
    lines = [f"{name}: {', '.join(item.channel.name for item in channels)}" for name, channels in datasets.items()]
    for part in parts:
        sizes = [f"{name} {part.shape(len(channels), shape)}" for name, channels in datasets.items()]
        lines.append(f"wrote {part.path}: {', '.join(sizes)}")
    if len(datasets) < len(DATASETS):
        return [*lines, f"without {GAS_DENSITY} it is an input of predict.py only"]
    paths = [str(part.path) for part in parts]
    names = ("val_path",) if len(parts) == 1 and "val" in parts[0].path.stem else ("train_path", "val_path")
    keys: dict[str, Any] = dict(zip(names, paths, strict=False))
    if len(parts) == 1 and len(set(shape)) == 1:
        keys["box_size"] = [shape[0], shape[0]]
    for name, count, vectors in zip(datasets, ("N_in_channels", "N_out_channels"), ("inputs", "targets"), strict=True):
        keys[count] = len(datasets[name])
        keys[f"vector_channels.{vectors}"] = vectors_of(len(datasets[name]))
    flags = [flag for key, value in keys.items() for flag in ("--set", f"{key}={value}")]
    return [*lines, "config keys for train.py:", shlex.join(flags)]


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; raises UserError if it is wrong."""
    parser = Parser(__doc__)
    parser.prog = "python -m utils.data.import_volume"
    parser.add_argument("--input", required=True, help="HDF5 file of Nyx, or directory of raw or NumPy files")
    parser.add_argument("--output", required=True, type=hdf5_output, help="HDF5 file to write")
    parser.add_argument("--format", choices=("auto", "nyx", "raw", "npy"), default="auto", help="(by content)")
    parser.add_argument("--shape", type=_shape, metavar="X,Y,Z", help="cells of raw files")
    parser.add_argument("--index", type=int, help="box of .npy files with several, [N, X, Y, Z]; the first is 0")
    text = "other: divide by the mean; mean: leave as it is, which suits a part of a box (as the file states, or other)"
    parser.add_argument("--density_units", choices=("mean", "other"), help=text)
    parser.add_argument("--velocity_units", choices=UNITS["velocity"], help="(as the file states)")
    parser.add_argument("--box_size", type=_positive, help="longest side in comoving Mpc/h, unless the file states it")
    for name in UNIVERSE:
        kind = float if name == "redshift" else _positive
        parser.add_argument(f"--{name}", type=kind, help=f"{TEXTS.get(name, name)}, unless the file states it")
    text = "share of the planes along x for validation: writes OUTPUT_train.h5 and OUTPUT_val.h5"
    parser.add_argument("--split", type=_positive, metavar="FRACTION", help=text)
    parser.add_argument("--gap", type=positive, default=GAP, help="cells between these parts (%(default)s)")
    for name, info in TransformConfig.model_fields.items():
        text = "of the channels, see docs/data.md (%(default).6g)"
        parser.add_argument(f"--{name}", type=float, default=info.default, help=text)
    text = "densities below it, in units of the mean, are raised to it (exp(-density_log_scale), a channel of -1)"
    parser.add_argument("--density_floor", type=_positive, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    options = parser.parse_args(argv)
    transform = {name: getattr(options, name) for name in TransformConfig.model_fields}
    validate_section(TransformConfig, transform, "command line")
    options.transform, options.output = TransformConfig.model_validate(transform), Path(options.output)
    # The channel of the smallest density is -1, unless the command line has another floor.
    options.floor = options.density_floor or math.exp(-options.transform.density_log_scale)
    return options


TEXTS = {"hubble": "H0 / (100 km/s/Mpc)", "omega_l": "omega_lambda"}


def _positive(text: str) -> float:
    """A finite number above zero, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _shape(text: str) -> Shape:
    """Three counts, for argparse."""
    x, y, z = map(positive, text.split(","))
    return x, y, z


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Invalid input is reported in one line with exit code 2."""
    with one_line_errors():
        for line in import_volume(parse(argv)):
            print(line)


if __name__ == "__main__":
    catch_signals()
    main()
