"""Attributes of an HDF5 file, all optional: the transforms of its channels, and the simulation of its fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
from pydantic import TypeAdapter

from utils.config import validate_section
from utils.config.channels import DARK_MATTER, GAS, TRANSFORM, UNKNOWN, Channel, Channels, Side, known_channels
from utils.config.sections import ChannelsConfig, NetworkConfig, PositiveFloat
from utils.errors import UserError
from utils.log import warn_once

TRANSFORM_TOLERANCE = 1e-5  # relative: an attribute or a key may be rounded to six digits
SIMULATION_TOLERANCE = 1e-3  # relative: a snapshot is seldom at exactly the redshift that was asked for
CELL = "cell size (Mpc/h)"
SMALLEST_BOX, LARGEST_BOX = 1e-6, 1e6  # Mpc/h
# Plausible values; others are in other units.
LIMITS = {"cosmology_H0": (10.0, 200.0), "redshift": (0.0, 1e4), CELL: (1e-5, 50.0)}
LIMITS |= {"cosmology_Om0": (0.0, 2.0), "cosmology_Ode0": (-2.0, 2.0), "cosmology_Ob0": (0.0, 1.0)}
LIKELY = LIMITS | {CELL: (1e-5, 4.0)}  # Mpc/h; larger numbers are more often in kpc/h
CELL_TOLERANCE = 1e-4  # relative difference of the sides of a cell
FLOOR = "density_floor_of_mean"  # smaller densities were raised to it: the logarithm of an empty cell is infinite
SAME_CHANNELS = "give files with the same, for example imported with the same --velocity_scale_km_s"  # a remedy
DENSITY_FLOOR = 1e-3  # in units of the mean; of the simulation, and of files that do not state it
# Attributes of the group `universe` of Nyx's files: the attribute of this project's files, and its factor.
UNIVERSE = {
    "hubble": ("cosmology_H0", 100.0),
    "omega_m": ("cosmology_Om0", 1.0),
    "omega_l": ("cosmology_Ode0", 1.0),
    "omega_b": ("cosmology_Ob0", 1.0),
    "redshift": ("redshift", 1.0),
}

Attributes = Mapping[str, Any]
Simulation = dict[str, float | str]  # redshift, cosmology, density floor and size of a cell

# Keys of a Simulation by the name of the condition.
CONDITIONS = {name: key for name, (key, _) in UNIVERSE.items()}
CONDITIONS |= {"cell": CELL, "sigma8": "cosmology_sigma8", "n_s": "cosmology_ns"}
TYPES: dict[str, Any] = {"periodic": bool, FLOOR: float, "temperature_log10_center": float}  # of attributes of a file
TYPES |= dict.fromkeys(("box_size_mpc_h", *CONDITIONS.values()), float)
TYPES |= dict.fromkeys((key for key in TRANSFORM if key.endswith(("_scale", "_km_s"))), PositiveFloat)
ARRAY = "the array"  # the path of a volume in memory
OPTIONAL = "unit", "component"  # attributes of a channel that are empty texts if it has none
CONDITION_UNITS: dict[str, str] = {"cell": "comoving Mpc/h", "hubble": "km/s/Mpc"}  # the others have none


def plain_attributes(owner: h5py.HLObject, types: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The attributes as Python values, an array as a list; UserError if one of `types` has no value of its type."""
    attributes = {name: _plain(value) for name, value in owner.attrs.items()}
    for name in filter(attributes.__contains__, types):
        place = f"{owner.file.filename}: attribute {owner.name[1:]} {name}"
        attributes[name] = _typed(types[name], attributes[name], " ".join(place.split()))
    return attributes


def _plain(value: Any) -> Any:
    """A number, a text or a list of them; some programs write arrays of one element, and texts as bytes."""
    values = _listed(value)
    return values[0] if len(values) == 1 else values


def _listed(value: Any) -> list[Any]:
    values = [] if isinstance(value, h5py.Empty) else np.ravel(value).tolist()
    return [item.decode(errors="replace") if isinstance(item, bytes) else item for item in values]


def _typed(kind: Any, value: Any, name: str) -> Any:
    """The number or truth value of an attribute, also from a text or from equal values, such as those of three axes."""
    try:
        (single,) = {*value} if isinstance(value, list) else {value}
        return TypeAdapter(kind).validate_python(single)
    except (TypeError, ValueError):
        expected = {bool: "true or false", float: "a number"}.get(kind, "a number above 0")
        raise UserError(f"{name} is {value!r}, expected {expected}; correct or remove it") from None


def write_attributes(file: h5py.File, attributes: Mapping[str, Attributes]) -> None:
    """Writes the attributes of datasets and groups by name, and of the file under "". Missing groups are created."""
    for name, values in attributes.items():
        place = name or "/"
        owner = file[place] if place in file else file.create_group(place)
        for key, value in values.items():
            # The bytes of a path may be no UTF-8, which HDF5 requires.
            owner.attrs[key] = value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def attributes_of(file: h5py.File, cells: Sequence[int]) -> dict[str, Any]:
    """The attributes of a volume's file. Nyx's groups `universe` and `domain`, see snapshots.py, stand in for them."""
    attributes: dict[str, Any] = {**universe_of(file), **plain_attributes(file)}
    lengths = domain_of(file)
    if lengths and tuple(np.ravel(file["domain"].attrs.get("shape", cells))) == tuple(cells):
        attributes.setdefault("box_size_mpc_h", lengths)
    return checked_attributes(attributes, cells, file.filename)


def checked_attributes(attributes: Mapping[str, Any], cells: Sequence[int], path: str) -> dict[str, Any]:
    """The attributes of a volume as plain values, those of TYPES of their type; box_size_mpc_h of the longest side."""
    checked = {name: _plain(value) for name, value in attributes.items()}
    if isinstance(length := checked.get("box_size_mpc_h"), list) and length:
        checked["box_size_mpc_h"] = max(cells) * cubic_cell(path, length, cells)
    for name in filter(checked.__contains__, TYPES):
        checked[name] = _typed(TYPES[name], checked[name], f"{path}: attribute {name}")
    return checked


def universe_of(file: h5py.File) -> dict[str, float]:
    """This project's attributes for those of the group `universe` of a file."""
    universe = plain_attributes(file["universe"], dict.fromkeys(UNIVERSE, float)) if "universe" in file else {}
    return {key: factor * universe[name] for name, (key, factor) in UNIVERSE.items() if name in universe}


def domain_of(file: h5py.File) -> list[float]:
    """The lengths of the group `domain` in comoving Mpc/h, three or that of a cube; empty if the file states none."""
    size: Any = np.ravel(file["domain"].attrs.get("size", [])) if "domain" in file else []
    return [_typed(float, _plain(length), f"{file.filename}: attribute domain size") for length in size]


def cubic_cell(path: str, lengths: Sequence[Any], shape: Sequence[int]) -> float:
    """Side of the cells of a box with these lengths along its axes; raises UserError if they are not cubes."""
    cells = np.array([_typed(float, length, f"{path}: attribute box_size_mpc_h") for length in lengths]) / shape
    if max(cells) > min(cells) * (1 + CELL_TOLERANCE):
        sides = " × ".join(f"{cell:.6g}" for cell in cells)
        raise UserError(f"{path}: cells of {sides} Mpc/h (lengths over cells of the axes) are not cubes; resample them")
    return float(cells[0])


def channel_attributes(channels: Channels) -> dict[str, list[Any]]:
    """The attributes of a dataset that state its channels, one value per channel; the formulas are for readers."""
    values = {field.name: [getattr(channel, field.name) for channel in channels] for field in fields(Channel)}
    texts = {name: ["" if text is None else text for text in values.pop(name)] for name in OPTIONAL}
    return {"channels": values.pop("name"), **texts, **values, "transform": [part.formula() for part in channels]}


def stated_channels(dataset: h5py.Dataset) -> list[Channel] | None:
    """The channels of a dataset with `channel_attributes`; None if it has none. UserError if they make no sense."""
    if "scale" not in dataset.attrs or "channels" not in dataset.attrs:
        return None
    stated = {name: dataset.attrs.get(name) for name in ("channels", *(field.name for field in fields(Channel)))}
    columns = {name: _listed(values) for name, values in stated.items() if values is not None}
    place, count = f"{dataset.file.filename}: {dataset.name[1:]}", dataset.shape[0]
    for name, values in columns.items():
        if len(values) != count:
            raise UserError(f"{place} has {count} channels, but {len(values)} values in attribute {name}; correct it")
    columns["name"] = columns.pop("channels")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    named = [{key: value for key, value in row.items() if key not in OPTIONAL or value} for row in rows]
    return validate_section(ChannelsConfig, {"inputs": named}, f"attributes of {place}").inputs


def file_channels(side: Side, count: int, attributes: Attributes, stated: Channels | None) -> Channels | None:
    """The channels that a file states: of its dataset, or, without names, the transforms in the file's attributes."""
    given = {key: attributes[key] for key in TRANSFORM if key in attributes}
    return known_channels(side, count, {**TRANSFORM, **given}) if given and stated is None else stated


def resolve_channels(side: Side, count: int, given: Channels, files: Mapping[str, Channels | None]) -> Channels:
    """The channels of files, by path: those that they state, else `given` by the config, else published ones.

    UserError if two files contradict each other; a file that contradicts the config is a warning.
    """
    stated = {path: channels for path, channels in files.items() if channels}
    source, known = next(iter(stated.items()), ("", given or known_channels(side, count)))
    for path, channels in stated.items():
        if difference := channel_difference(channels, known):
            raise UserError(f"{path} and {source} have different channels: {difference}; {SAME_CHANNELS}")
    if stated and given and (difference := channel_difference(known, given)):
        warn_once(f"{source} has other channels than the config, and overrides it: {difference}")
    warn_of_assumed(side, files, known)
    return known


def warn_of_assumed(side: Side, files: Mapping[str, Channels | None], known: Channels) -> None:
    """A warning for each file that does not state its channels, if `known` are not the published ones."""
    published = known_channels(side, len(known))
    changed = [part for part, usual in zip(known, published, strict=True) if part != usual and part.unit]
    formulas = "; ".join(dict.fromkeys(f"{part.name} {part.formula()}" for part in changed))
    for path in (path for path, channels in files.items() if formulas and not channels):
        warn_once(f"{path} does not state its channels; those of config, checkpoint or other files hold: {formulas}")


def channel_difference(found: Channels, expected: Channels) -> str:
    """How names, order or transforms differ; empty if they do not. Unknown ones contradict nothing."""
    names, wanted = ([channel.name for channel in channels] for channels in (found, expected))
    if len(names) == len(wanted) and any(name.startswith(UNKNOWN) for name in (*names, *wanted)):
        return ""
    if names != wanted:
        missing = ", ".join(name for name in wanted if name not in names)
        kinds = {name.partition(" ")[0] + " " for name in (*names[:1], *wanted[:1])}
        swapped = " (swapped datasets?)" if kinds == {DARK_MATTER, GAS} else ""
        return f"{', '.join(names)} {f'without {missing}' if missing else 'instead of ' + ', '.join(wanted)}{swapped}"
    for one, other in zip(found, expected, strict=True):
        pairs = (one.scale, other.scale), (one.center, other.center)
        close = all(math.isclose(*pair, rel_tol=TRANSFORM_TOLERANCE, abs_tol=TRANSFORM_TOLERANCE) for pair in pairs)
        same = (one.unit, one.is_log, one.component) == (other.unit, other.is_log, other.component)
        if one.unit and other.unit and not (close and same):
            return f"{one.name} {one.formula()} instead of {other.formula()}"
    return ""


def simulation_of(attributes: Attributes, side: int, path: str) -> tuple[float | None, Simulation]:
    """Size of a cell (comoving Mpc/h) and the Simulation, if they are stated; the longest side has `side` cells."""
    length = attributes.get("box_size_mpc_h")
    if length is not None and not SMALLEST_BOX <= length <= LARGEST_BOX:  # spectra and flux would not be finite
        limits = f"from {SMALLEST_BOX:g} to {LARGEST_BOX:g}"
        raise UserError(f"{path}: its attribute box_size_mpc_h is {length:g}; make it a length {limits}, or remove it")
    cell = None if length is None else length / side
    names = ("redshift", FLOOR, *sorted(name for name in attributes if name.startswith("cosmology")))
    stated = {name: attributes[name] for name in names if name in attributes} | {CELL: cell}
    known = {name: value for name, value in stated.items() if isinstance(value, str | Real)}
    return cell, {name: value if isinstance(value, str) else float(value) for name, value in known.items()}


def implausible(simulation: Mapping[str, Any], limits: Mapping[str, tuple[float, float]] = LIKELY) -> list[str]:
    """The values beyond the limits, as in "redshift is -0.5, expected 0 to 10000"."""
    return [
        f"{key} is {simulation[key]:g}, expected {low:g} to {high:g}"
        for key, (low, high) in limits.items()
        if not low <= simulation.get(key, low) <= high
    ]


def common_simulation(simulations: Sequence[Simulation]) -> Simulation:
    """The values that all simulations state and agree on."""
    first, *others = simulations or [{}]
    shared = [name for name in first if all(name in other and _is_close(other[name], first[name]) for other in others)]
    return {name: first[name] for name in shared}


def warn_of_other_simulation(path: str, simulation: Simulation, trained: Simulation) -> None:
    for fault in implausible(simulation):
        warn_once(f"{path}: {fault}; correct its attributes")
    if differences := differences_of(simulation, trained):
        warn_once(f"{path} differs from the training data: {differences}; see docs/generalization.md")


def differences_of(simulation: Simulation, expected: Simulation) -> str:
    """The values that both state and that differ, as in "redshift 2.0 instead of 3.0"; empty if there are none."""
    return ", ".join(
        f"{name} {value} instead of {expected[name]}"
        for name, value in simulation.items()
        if name in expected and name != FLOOR and not _is_close(value, expected[name])  # it matters to empty cells only
    )


def conditions_of(network: NetworkConfig, path: str, simulation: Simulation) -> list[float]:
    """The network's conditions of a volume; UserError if its file does not state one as a finite number."""
    values = []
    for name in network.conditions:
        value = simulation.get(CONDITIONS[name])
        if not isinstance(value, float) or not math.isfinite(value):
            attribute = "box_size_mpc_h" if name == "cell" else CONDITIONS[name]
            fault = "is not stated as a number" if value is None else f"is {value!r}"
            given = f"give attributes={{'{attribute}': NUMBER}}" if path == ARRAY else ""
            remedy = given or f"set it, in Python: h5py.File('{path}', 'a').attrs['{attribute}'] = NUMBER"
            raise UserError(f"{path}: {attribute}, which network.conditions {name} needs, {fault}; {remedy}")
        values.append(value)
    return values


def warn_of_untrained_conditions(network: NetworkConfig, path: str, conditions: Sequence[float]) -> None:
    """Logs a warning for each condition of a volume outside the range of the training volumes."""
    for name, value, (low, high) in zip(network.conditions, conditions, network.condition_ranges, strict=True):
        if not _is_close(value, min(max(value, low), high)):
            trained = f"the trained range {low:.6g} to {high:.6g}"
            warn_once(f"{path}: {name} {value:.6g} is outside {trained}; check the prediction")


def _is_close(first: float | str, second: float | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return math.isclose(first, second, rel_tol=SIMULATION_TOLERANCE, abs_tol=SIMULATION_TOLERANCE / 10)
