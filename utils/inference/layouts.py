"""Layouts of the file that predict.py writes: this project's volumes, and Nyx's snapshots (see data/files/nyx.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.data.channels import Channel, check_physical_units
from utils.data.files import nyx
from utils.data.files.attributes import UNIVERSE
from utils.data.files.hdf5 import DATASETS, FieldReader
from utils.data.files.snapshots import DARK_MATTER_DENSITY, GAS_DENSITY, GAS_VELOCITY, TEMPERATURE, Shape
from utils.errors import UserError
from utils.inference.sliding_window import Slab

INPUT, OUTPUT, PHYSICAL = *DATASETS, "Hydro_physical"
FORMATS = ("volume", "nyx")
# Names of the channels of a gas, and of their fields in Nyx's layout.
NYX_FIELDS = {
    "gas density": GAS_DENSITY,
    **{f"gas velocity {name[-1]}": name for name in GAS_VELOCITY},
    "temperature": TEMPERATURE,
}


@dataclass(frozen=True)
class VolumeLayout:
    """The layout of the training data: `Hydro`, and physical values next to it if `physical`."""

    channels: Sequence[Channel]
    physical: bool

    @property
    def identity(self) -> dict[str, Any]:
        """Options of the layout, as JSON values; an unfinished file with other ones is not resumed."""
        return {"physical": self.physical}

    def datasets(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Shape of each dataset for a box of `shape` cells."""
        return dict.fromkeys([OUTPUT, PHYSICAL] if self.physical else [OUTPUT], (len(self.channels), *shape))

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Attributes of each dataset and group by its name, and of the file under ""."""
        names = [channel.name for channel in self.channels]
        attributes = {OUTPUT: {"channels": names, "transform": [channel.formula() for channel in self.channels]}}
        if self.physical:
            attributes[PHYSICAL] = {"channels": names, "units": [str(channel.unit) for channel in self.channels]}
        return attributes

    def values(self, slab: Slab) -> dict[str, np.ndarray]:
        """The slab's planes of each dataset, on the host."""
        predicted = slab.predicted.cpu().numpy()
        if not self.physical:
            return {OUTPUT: predicted}
        parts = [channel.to_physical(part) for channel, part in zip(self.channels, predicted, strict=True)]
        return {OUTPUT: predicted, PHYSICAL: np.stack(parts)}


@dataclass(frozen=True)
class NyxLayout:
    """The layout of Nyx's snapshots: predicted gas and the dark-matter density of the input, in physical units."""

    dark_matter: Channel
    gas: Sequence[Channel]
    shape: Shape
    cell: float
    simulation: Mapping[str, Any]  # attributes of the input

    @property
    def identity(self) -> dict[str, Any]:
        return {"format": "nyx"}

    @property
    def names(self) -> list[str]:
        """The fields, in the order of the channels."""
        return [DARK_MATTER_DENSITY, *(NYX_FIELDS[channel.name] for channel in self.gas)]

    def datasets(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        return {f"{nyx.NATIVE}/{name}": shape for name in self.names}

    def attributes(self) -> dict[str, dict[str, Any]]:
        return nyx.layout_attributes(self.names, self.shape, self.cell, self.simulation)

    def values(self, slab: Slab) -> dict[str, np.ndarray]:
        channels = (slab.inputs[0].cpu().numpy(), *slab.predicted.cpu().numpy())
        fields = zip(self.names, (self.dark_matter, *self.gas), channels, strict=True)
        return {
            f"{nyx.NATIVE}/{name}": nyx.from_physical(name, channel.to_physical(values))
            for name, channel, values in fields
        }


Layout = VolumeLayout | NyxLayout  # both have the same members


def choose_layout(
    name: str, physical: bool, channels: tuple[Sequence[Channel], Sequence[Channel]], source: FieldReader
) -> Layout:
    """The layout of a name of FORMATS; raises UserError if the checkpoint or the input lacks what it needs."""
    (dark_matter, *_), gas = channels
    if name == "volume":
        if physical:
            check_physical_units(gas, "do not give --physical, or train with the transform's keys set")
        return VolumeLayout(gas, physical)
    if physical:
        raise UserError("--format nyx holds physical values only; remove --physical")
    check_physical_units((dark_matter, *gas), "do not give --format nyx, or train with the transform's keys set")
    missing = [key for key, _ in UNIVERSE.values() if key not in source.simulation]
    if source.cell is None:
        missing.insert(0, "box_size_mpc_h")
    if source.cell is None or missing:
        attributes = f"attribute{'s' if missing[1:] else ''} {', '.join(missing)}"
        raise UserError(
            f"{source.path} lacks the {attributes}, which --format nyx needs; set each, in Python: "
            f"h5py.File('{source.path}', 'a').attrs['{missing[0]}'] = NUMBER"
        )
    return NyxLayout(dark_matter, gas, source.shape, source.cell, source.simulation)
