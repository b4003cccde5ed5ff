"""Small volumes for the tests."""

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# What the training file of the fixture `trained_run` states.
SIMULATED = {"velocity_scale_km_s": 500.0, "redshift": 2.0, "cosmology": "planck18", "cosmology_H0": 67.66}


def smooth_field(channels: int, box: int | tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Random periodic waves a few cells long, in [-0.5, 0.5]: [channels, X, Y, Z]; `box` is its side or its shape."""
    shape = (box,) * 3 if isinstance(box, int) else box
    noise = np.fft.rfftn(rng.standard_normal((channels, *shape)), axes=(1, 2, 3))
    k = [np.fft.fftfreq(shape[0]), np.fft.fftfreq(shape[1]), np.fft.rfftfreq(shape[2])]
    square = k[0][:, None, None] ** 2 + k[1][None, :, None] ** 2 + k[2][None, None, :] ** 2
    field = np.fft.irfftn(noise * np.exp(-square / (2 * 0.15**2)), s=shape, axes=(1, 2, 3))
    return 0.5 * field / np.abs(field).max()


def write_volume(
    path: str | os.PathLike[str],
    box: int | tuple[int, int, int] = 16,
    seed: int = 0,
    chunks: tuple[int, ...] | bool | None = None,
    dtype: str = "f4",
    channels: tuple[int, int] = (4, 5),
    compression: str | None = None,
    **attributes: Any,
) -> Path:
    """Writes a small HDF5 volume with these attributes, contiguous unless chunks or a compression are given."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
        for name, count in zip(("Nbody", "Hydro"), channels, strict=True):
            data = smooth_field(count, box, rng).astype(dtype)
            file.create_dataset(name, data=data, chunks=chunks, compression=compression)
    return Path(path)


def contents(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}
