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
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from utils.cli import Parser, hdf5_output, positive
from utils.config import validate_section
from utils.config.sections import TransformConfig
from utils.data.channels import VELOCITY, Channel, input_channels, target_channels
from utils.data.files.attributes import CELL, FLOOR, UNIVERSE
from utils.data.files.field_converter import Conversion, FieldChannel, Part
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
from utils.distributed.threads import usable_cpus
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.files import check_target, make_output_directory
from utils.provenance import provenance

GAP = 8  # cells between the parts of a split
STATED_TOLERANCE = 1e-4  # relative, between the file and the command line
# Values beyond these limits are slips: those of the options of UNIVERSE, and a cell in other units.
LIMITS = {
    "hubble": (0.1, 2.0),
    "omega_m": (1e-3, 2.0),
    "omega_l": (0.0, 2.0),
    "omega_b": (1e-4, 1.0),
    "redshift": (0.0, 1e3),
    CELL: (1e-5, 50.0),
}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The command line; the flags have the same names."""

    input: str
    output: Path
    format: str = "auto"
    shape: Shape | None = None
    index: int | None = None
    density_units: str | None = None
    velocity_units: str | None = None
    box_size: float | None = None
    hubble: float | None = None
    omega_m: float | None = None
    omega_l: float | None = None
    omega_b: float | None = None
    redshift: float | None = None
    split: float | None = None
    gap: int = GAP
    transform: TransformConfig = field(default_factory=TransformConfig)
    density_floor: float | None = None
    threads: int = field(default_factory=lambda: len(usable_cpus()))
    overwrite: bool = False

    @property
    def floor(self) -> float:
        """The smallest density, in units of the mean: its channel is -1, unless the command line has another one."""
        assert self.transform.density_log_scale is not None
        return self.density_floor or math.exp(-self.transform.density_log_scale)


# --- what is imported ------------------------------------------------------------------------------------------------


def open_snapshot(options: ImportOptions) -> Snapshot:
    """The input's fields; raises UserError if the files contradict themselves, each other or the options."""
    path = Path(options.input)
    if not path.exists():
        raise UserError(f"no such file or directory: {path}; give another --input")
    layout = _detect(path) if options.format == "auto" else options.format
    if layout != "nyx" and not path.is_dir():
        raise UserError(f"{path} is not a directory of {layout} files; give the directory that holds them")
    for flag, known in (("index", "npy"), ("shape", "raw")):
        if layout != known and getattr(options, flag) is not None:
            raise UserError(f"--{flag} is for {known} files, not for {layout}; remove it")
    if layout == "raw":
        if options.shape is None:
            raise UserError("raw files do not state their shape; give --shape X,Y,Z")
        return open_raw(options.input, options.shape)
    return open_npy(options.input, options.index) if layout == "npy" else open_nyx(options.input)


def _detect(path: Path) -> str:
    if not path.is_dir():
        return "nyx"
    found = [layout for layout, ending in (("raw", "f32"), ("npy", "npy")) if any(path.glob(f"*.{ending}"))]
    if len(found) != 1:
        both = "both .f32 and .npy files" if found else "neither .f32 nor .npy files"
        raise UserError(f"{path} has {both}; give another --input or --format")
    return found[0]


def plan_channels(snapshot: Snapshot, options: ImportOptions) -> dict[str, list[FieldChannel]]:
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
    channels: list[tuple[str, Sequence[str], Callable[..., tuple[Channel, ...]]]]
    channels = [(DATASETS[0], dark, input_channels), (DATASETS[1], gas, target_channels)]
    return {
        dataset: [
            FieldChannel(fields[name], channel, _factor(fields[name], options), options.density_units == "mean")
            for name, channel in zip(names, find(len(names), transform, vectors_of(len(names))), strict=True)
        ]
        for dataset, names, find in channels
        if names
    }


def vectors_of(channels: int) -> list[list[int]]:
    """The config's vector_channels of a dataset, which has a velocity unless it has one or two channels."""
    return [list(triple) for triple in VELOCITY] if channels > 3 else []


def _factor(field: GridField, options: ImportOptions) -> float | None:
    """The factor from a field's unit to that of its channel, None for a density in another unit than the mean."""
    given = {"density": options.density_units, "velocity": options.velocity_units}.get(field.quantity)
    unit = given or field.unit or {"density": "other", "temperature": "K"}.get(field.quantity)
    if unit is None:
        raise UserError(f"{field.name} does not state its unit; give --velocity_units")
    unit = _spelled(unit)
    others = [known for quantity, units in UNITS.items() if quantity != field.quantity for known in units]
    if unit in UNITS[field.quantity]:
        return UNITS[field.quantity][unit]
    if field.quantity == "density" and unit not in others:
        return None
    remedy = "correct the attribute" if field.quantity == "temperature" else f"give --{field.quantity}_units"
    raise UserError(f"{field.name} is a {field.quantity} in {unit}; {remedy}")


def _spelled(unit: str) -> str:
    """The unit as in UNITS, if it is one of them in another spelling such as km s^-1, [cm/s] or Kelvin."""
    plain = re.sub(r"[\s*.]*s(\^|\*\*)?-1$", "/s", unit.strip("[]() ").lower())
    plain = {"kelvin": "k"}.get(plain, plain.replace(" ", ""))
    known = {name.lower(): name for units in UNITS.values() for name in units}
    return known.get(plain, unit)


def describe(snapshot: Snapshot, options: ImportOptions) -> tuple[float | None, dict[str, float]]:
    """Side of a cell in Mpc/h, and the attributes of redshift and cosmology, from the files and the options."""
    about, cell = dict(snapshot.about), snapshot.cell
    for flag, (key, factor) in UNIVERSE.items():
        given = getattr(options, flag)
        if given is not None:
            _check_stated(snapshot.path, flag, about.get(key, factor * given) / factor, given)
            about[key] = factor * given
    if options.box_size is not None:
        stated = options.box_size if cell is None else cell * max(snapshot.shape)
        _check_stated(snapshot.path, "box_size", stated, options.box_size)
        cell = options.box_size / max(snapshot.shape)
    found = {flag: about[key] / factor for flag, (key, factor) in UNIVERSE.items() if key in about}
    found |= {} if cell is None else {CELL: cell}
    for name, value in found.items():
        low, high = LIMITS[name]
        high = min(high, found.get("omega_m", high)) if name == "omega_b" else high
        if not low <= value <= high:
            raise UserError(f"{snapshot.path}: {name} is {value:g}, expected {low:g} to {high:g}; correct it")
    return cell, about


def _check_stated(path: str, flag: str, stated: float, given: float) -> None:
    if not math.isclose(stated, given, rel_tol=STATED_TOLERANCE, abs_tol=STATED_TOLERANCE):
        raise UserError(f"{path} states {flag} {stated:.6g}, the command line {given:.6g}; remove --{flag}")


def plan_parts(shape: Shape, options: ImportOptions) -> list[Part]:
    """The files to write; with --split two, with a gap between them also across the periodic boundary."""
    if options.split is None:
        return [Part(options.output, range(shape[0]))]
    valid = round(options.split * shape[0])
    train = shape[0] - valid - 2 * options.gap
    if min(train, valid) < 1:
        raise UserError(
            f"--split {options.split:g} --gap {options.gap} leaves {train} training and {valid} validation planes of "
            f"{shape[0]}; give others"
        )
    paths = [
        options.output.with_name(f"{options.output.stem}_{name}{options.output.suffix}") for name in ("train", "val")
    ]
    start = train + options.gap
    return [Part(paths[0], range(train)), Part(paths[1], range(start, start + valid))]


# --- the command ----------------------------------------------------------------------------------------------------


def import_volume(options: ImportOptions) -> list[str]:
    """Writes the files; returns lines for the user. Raises UserError, and leaves nothing, for contradictory input."""
    snapshot = open_snapshot(options)
    datasets = plan_channels(snapshot, options)
    shape, (cell, about) = snapshot.shape, describe(snapshot, options)
    parts = plan_parts(shape, options)
    source = Path(options.input)
    inputs = [source, *(source.iterdir() if source.is_dir() else ())]
    for part in parts:
        if part.path.exists() and any(part.path.samefile(each) for each in inputs if each.exists()):
            raise UserError(f"output {part.path} is the input; give another --output")
        check_target(part.path, options.overwrite)
    attributes = {
        "made_by": "utils.data.import_volume",
        "input": str(Path(options.input).resolve()),
        "periodic": snapshot.periodic and options.split is None,
        **about,
        **options.transform.model_dump(),
        FLOOR: options.floor,
        "provenance": json.dumps(provenance(World(Launch("import_volume"), torch.device("cpu")))),
    }
    about_parts = []
    for part in parts:
        box = {} if cell is None else {"box_size_mpc_h": cell * max(len(part.planes), *shape[1:])}
        planes = {} if options.split is None else {"input_planes": [part.planes.start, part.planes.stop]}
        about_parts.append({**attributes, **box, **planes})
    conversion = Conversion(datasets, parts, shape, options.floor, options.threads)
    make_output_directory(parts[0].path.parent, conversion.bytes)
    conversion.write(about_parts, f"importing {options.input}")
    unknown = [f"--{name}" for name, (key, _) in UNIVERSE.items() if key not in about]
    unknown += ["--box_size"] if cell is None else []
    notes = [f"note: the Lyman-alpha flux needs values that the input lacks: {', '.join(unknown)}"] if unknown else []
    return [*notes, *_summary(parts, datasets, shape)]


def _summary(parts: Sequence[Part], datasets: dict[str, list[FieldChannel]], shape: Shape) -> list[str]:
    """Lines about the files, and the config keys that fit them."""
    lines = [f"{name}: {', '.join(each.channel.name for each in channels)}" for name, channels in datasets.items()]
    for part in parts:
        sizes = [f"{name} {(len(each), len(part.planes), *shape[1:])}" for name, each in datasets.items()]
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


def parse(argv: Sequence[str] | None = None) -> ImportOptions:
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
    parser.add_argument("--threads", type=positive, default=len(usable_cpus()), help="(%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    given = vars(parser.parse_args(argv))
    transform = {name: given.pop(name) for name in TransformConfig.model_fields}
    validate_section(TransformConfig, transform, "command line")
    return ImportOptions(
        **{**given, "output": Path(given["output"])}, transform=TransformConfig.model_validate(transform)
    )


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
    """Runs the command; bad input ends with one line and exit code 2."""
    with one_line_errors():
        for line in import_volume(parse(argv)):
            print(line)


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))  # removes the unfinished files
    main()
