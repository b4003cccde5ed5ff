"""Layouts of the file that predict.py writes: this project's volumes, and Nyx's snapshots (volumes/snapshots.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from analysis.inference.sliding_window import Block
from analysis.inference.uncertainty import Calibration
from utils.errors import UserError
from utils.volumes import snapshots
from utils.volumes.attributes import UNIVERSE
from utils.volumes.channels import Channel, check_physical_units
from utils.volumes.hdf5 import DATASETS, NATIVE, FieldReader
from utils.volumes.snapshots import DARK_MATTER_DENSITY, GAS_DENSITY, GAS_VELOCITY, TEMPERATURE

INPUT, OUTPUT, PHYSICAL = *DATASETS, "Hydro_physical"
DEVIATION, PHYSICAL_DEVIATION = f"{OUTPUT}_std", f"{PHYSICAL}_std"
# Names of the channels of a gas, and of their fields in Nyx's layout.
NYX_FIELDS = {
    "gas density": GAS_DENSITY,
    **{f"gas velocity {name[-1]}": name for name in GAS_VELOCITY},
    "temperature": TEMPERATURE,
}


class Layout(NamedTuple):
    """Contents of a file."""

    identity: dict[str, Any]  # options as JSON values; an unfinished file with other ones is not resumed
    datasets: Mapping[str, tuple[int, ...]]  # shapes by name
    attributes: dict[str, dict[str, Any]]  # of datasets and groups by name, and of the file under ""
    values: Callable[[Block], dict[str, np.ndarray]]  # a block's cells of each dataset, on the host


def volume_layout(
    channels: Sequence[Channel], shape: tuple[int, int, int], physical: bool, calibration: Calibration | None = None
) -> Layout:
    """The layout of the training data: `Hydro`, and physical values next to it if `physical`.

    With a calibration, also the standard deviations, for which blocks hold means and then variances.
    """
    names = [channel.name for channel in channels]
    attributes = {OUTPUT: {"channels": names, "transform": [channel.formula() for channel in channels]}}
    if physical:
        attributes[PHYSICAL] = {"channels": names, "units": [str(channel.unit) for channel in channels]}
    if calibration:
        attributes[DEVIATION] = {"channels": names, **asdict(calibration)}
    if calibration and physical:
        units = ["ln of the value" if channel.is_log else str(channel.unit) for channel in channels]
        attributes[PHYSICAL_DEVIATION] = {"channels": names, "units": units}

    def values(block: Block) -> dict[str, np.ndarray]:
        predicted, variances = np.split(block.predicted.cpu().numpy(), [len(channels)])
        written = {OUTPUT: predicted}
        if physical:
            parts = [channel.to_physical(part) for channel, part in zip(channels, predicted, strict=True)]
            written[PHYSICAL] = np.stack(parts)
        if calibration:
            written[DEVIATION] = calibration.deviations(variances)
            scales = np.array([channel.scale for channel in channels], np.float32).reshape(-1, 1, 1, 1)
            written |= {PHYSICAL_DEVIATION: scales * written[DEVIATION]} if physical else {}
        return written

    identity = {"physical": physical, "uncertainty": asdict(calibration) if calibration else None}
    return Layout(identity, dict.fromkeys(attributes, (len(channels), *shape)), attributes, values)


def nyx_layout(dark_matter: Channel, gas: Sequence[Channel], source: FieldReader) -> Layout:
    """The layout of Nyx's snapshots: predicted gas and the dark-matter density of the input, in physical units."""
    missing = [key for key, _ in UNIVERSE.values() if key not in source.simulation]
    if source.cell is None or missing:
        missing += ["box_size_mpc_h"] if source.cell is None else []
        raise UserError(
            f"{source.path} does not state {', '.join(missing)}, which --format nyx needs; set each, in Python: "
            f"h5py.File('{source.path}', 'a').attrs['{missing[0]}'] = NUMBER"
        )
    names = [DARK_MATTER_DENSITY, *(NYX_FIELDS[channel.name] for channel in gas)]

    def values(block: Block) -> dict[str, np.ndarray]:
        fields = (block.inputs[0].cpu().numpy(), *block.predicted.cpu().numpy())
        channels = zip(names, (dark_matter, *gas), fields, strict=True)
        return snapshots.nyx_datasets({name: channel.to_physical(field) for name, channel, field in channels})

    datasets = {f"{NATIVE}/{name}": source.shape for name in names}
    attributes = snapshots.nyx_attributes(names, source.shape, source.cell, source.simulation)
    return Layout({"format": "nyx"}, datasets, attributes, values)


def choose_layout(
    name: str,
    physical: bool,
    channels: tuple[Sequence[Channel], Sequence[Channel]],
    source: FieldReader,
    calibration: Calibration | None = None,
) -> Layout:
    """The layout of a name of FORMATS; raises UserError if the checkpoint or the input lacks what it needs."""
    (dark_matter, *_), gas = channels
    if name == "volume":
        if physical:
            check_physical_units(gas, "do not give --physical, or train with the transform's keys set")
        return volume_layout(gas, source.shape, physical, calibration)
    if physical:
        raise UserError("--format nyx holds physical values only; remove --physical")
    check_physical_units((dark_matter, *gas), "do not give --format nyx, or train with the transform's keys set")
    return nyx_layout(dark_matter, gas, source)
