"""Layouts of the file that predict.py writes: this project's volumes, and Nyx's snapshots (volumes/snapshots.py)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from analysis.inference.sliding_window import Block
from utils.config.channels import DARK_MATTER, Channels, check_physical_units, density_place
from utils.errors import UserError
from utils.volumes import snapshots
from utils.volumes.attributes import UNIVERSE, channel_attributes
from utils.volumes.hdf5 import DATASETS, NATIVE, FieldReader
from utils.volumes.snapshots import DARK_MATTER_DENSITY, GAS_DENSITY, GAS_VELOCITY, TEMPERATURE

INPUT, OUTPUT, PHYSICAL = *DATASETS, "Hydro_physical"
DEVIATION, PHYSICAL_DEVIATION = f"{OUTPUT}_std", f"{PHYSICAL}_std"
# Names of the channels of a gas, and of their fields in Nyx's layout.
NYX_FIELDS = {"gas density": GAS_DENSITY, "temperature": TEMPERATURE}
NYX_FIELDS |= {f"gas velocity {name[-1]}": name for name in GAS_VELOCITY}


class Layout(NamedTuple):
    identity: dict[str, Any]  # options as JSON values; an unfinished file with other ones is not resumed
    datasets: Mapping[str, tuple[int, ...]]  # shapes by name
    attributes: dict[str, dict[str, Any]]  # of datasets and groups by name, and of the file under ""
    values: Callable[[Block], dict[str, np.ndarray]]  # a block's cells of each dataset, on the host


def volume_layout(channels: Channels, shape: tuple[int, int, int], physical: bool) -> Layout:
    """The layout of the training data: `Hydro`, and physical values next to it if `physical`."""
    names = [channel.name for channel in channels]
    attributes: dict[str, dict[str, Any]] = {OUTPUT: channel_attributes(channels)}
    if physical:
        attributes[PHYSICAL] = {"channels": names, "units": [str(channel.unit) for channel in channels]}

    def values(block: Block) -> dict[str, np.ndarray]:
        predicted = block.predicted.cpu().numpy()
        if not physical:
            return {OUTPUT: predicted}
        parts = [channel.to_physical(part) for channel, part in zip(channels, predicted, strict=True)]
        return {OUTPUT: predicted, PHYSICAL: np.stack(parts)}

    return Layout({"physical": physical}, dict.fromkeys(attributes, (len(channels), *shape)), attributes, values)


def with_deviations(layout: Layout, channels: Channels, calibration: Mapping[str, Any]) -> Layout:
    """The layout of a volume with standard deviations, for blocks that hold means and then variances."""
    by_channel = calibration["factors"], calibration["floors"], [channel.scale for channel in channels]
    factors, floors, scales = (np.reshape(values, (-1, 1, 1, 1)).astype(np.float32) for values in by_channel)
    attributes = {DEVIATION: {**layout.attributes[OUTPUT], **calibration}}
    if PHYSICAL in layout.datasets:  # of a logarithm, the relative one as far as it is small
        units = ["ln of the value" if channel.is_log else str(channel.unit) for channel in channels]
        attributes[PHYSICAL_DEVIATION] = {**layout.attributes[PHYSICAL], "units": units}
    datasets = {**layout.datasets, **dict.fromkeys(attributes, layout.datasets[OUTPUT])}

    def values(block: Block) -> dict[str, np.ndarray]:
        means, variances = block.predicted.chunk(2)
        deviations = np.sqrt(factors * variances.cpu().numpy() + floors)
        written = {name: scale * deviations for name, scale in zip(attributes, (np.float32(1), scales), strict=False)}
        return layout.values(block._replace(predicted=means)) | written

    identity = {**layout.identity, "uncertainty": dict(calibration)}
    return Layout(identity, datasets, {**layout.attributes, **attributes}, values)


def nyx_layout(inputs: Channels, gas: Channels, source: FieldReader) -> Layout:
    """The layout of Nyx's snapshots: predicted gas and the dark-matter density of the input, in physical units."""
    missing = [key for key, _ in UNIVERSE.values() if key not in source.simulation]
    if source.cell is None or missing:
        missing += ["box_size_mpc_h"] if source.cell is None else []
        remedy = f"set each, in Python: h5py.File('{source.path}', 'a').attrs['{missing[0]}'] = NUMBER"
        raise UserError(f"{source.path} does not state {', '.join(missing)}, which --format nyx needs; {remedy}")
    if (dark_matter := density_place(inputs, DARK_MATTER)) is None:
        raise UserError(f"--format nyx needs {DARK_MATTER}density among the inputs, in units of the mean")
    named = {NYX_FIELDS.get(channel.name, channel.name.replace(" ", "_")): channel for channel in gas}
    names = [DARK_MATTER_DENSITY, *named]

    def values(block: Block) -> dict[str, np.ndarray]:
        fields = (block.inputs[dark_matter].cpu().numpy(), *block.predicted.cpu().numpy())
        channels = zip(names, (inputs[dark_matter], *gas), fields, strict=True)
        return snapshots.nyx_datasets({name: channel.to_physical(field) for name, channel, field in channels})

    datasets = {f"{NATIVE}/{name}": source.shape for name in names}
    attributes = snapshots.nyx_attributes(names, source.shape, source.cell, source.simulation)
    for name in named.keys() - NYX_FIELDS.values():
        attributes[f"{NATIVE}/{name}"] = {"units": np.bytes_(str(named[name].unit))}
    return Layout({"format": "nyx"}, datasets, attributes, values)


def choose_layout(name: str, physical: bool, channels: tuple[Channels, Channels], source: FieldReader) -> Layout:
    """The layout of a name of FORMATS; raises UserError if the checkpoint or the input lacks what it needs."""
    inputs, gas = channels
    if name == "nyx" and physical:
        raise UserError("--format nyx holds physical values only; remove --physical")
    if name == "nyx" or physical:
        flag = "--physical" if physical else "--format nyx"
        check_physical_units(gas, f"do not give {flag}, or state the channels of the training files")
    return nyx_layout(inputs, gas, source) if name == "nyx" else volume_layout(gas, source.shape, physical)
