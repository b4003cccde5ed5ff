"""Snapshots in Nyx's HDF5 layout, of simulated or random fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

DARK_MATTER, GAS = "dark_matter_density", ("baryon_density", "velocity_x", "velocity_y", "velocity_z", "temperature")
UNIVERSE = {"hubble": 0.675, "omega_b": 0.0487, "omega_l": 0.69, "omega_m": 0.31, "redshift": 3.0}
CM_PER_KM = 1e5


def physical_fields(shape: tuple[int, int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random fields in units of the mean, km/s and K, by Nyx's names."""
    rng = np.random.default_rng(seed)
    densities = np.exp(rng.normal(size=(2, *shape)))
    densities /= densities.mean(axis=(1, 2, 3), keepdims=True)
    fields = dict(zip(("velocity_x", "velocity_y", "velocity_z"), 200 * rng.normal(size=(3, *shape)), strict=True))
    fields |= {DARK_MATTER: densities[0], "baryon_density": densities[1]}
    fields["temperature"] = 1e4 * np.exp(rng.normal(size=shape))
    return {name: values.astype("f4") for name, values in fields.items()}


def write_nyx(
    path: Path,
    fields: Mapping[str, np.ndarray],
    cell: float = 0.5,
    universe: Mapping[str, float] = UNIVERSE,
    dtype: str = "<f4",
    **storage: Any,
) -> Path:
    """Writes fields in units of the mean, km/s and K as Nyx's converter does; `cell` is in comoving Mpc/h."""
    with h5py.File(path, "w") as file:
        file.attrs["format"] = np.bytes_("nyx-lyaf")
        shape = next(iter(fields.values())).shape
        file.create_group("domain").attrs.update(size=cell * np.array(shape), shape=np.array(shape, np.int32))
        file.create_group("universe").attrs.update(universe)
        file.create_group("derived_fields")
        for name, values in fields.items():
            unit = "(mean)" if "density" in name else "K" if name == "temperature" else "cm/s"
            stored = values * CM_PER_KM if unit == "cm/s" else values
            dataset = file.create_dataset(f"native_fields/{name}", data=stored.astype(dtype), **storage)
            dataset.attrs["units"] = np.bytes_(unit)
    return path
