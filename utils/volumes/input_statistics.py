"""Statistics of a training run's inputs, from some crops, and the distance of another volume's inputs from them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool3d

from utils.config import Config
from utils.volumes.hdf5 import Volume, reading

CROPS, LEAST_CROPS, LARGEST_CROP = 64, 8, 32  # of all training volumes, of each of them, and cells of a crop's side
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
STEPS = [1.2207440846057596**-axis for axis in (1, 2, 3)]  # the golden ratio's sequence in 3D (Roberts 2018)
TINY = 1e-12  # of constant channels
OTHER_UNITS = 1000.0  # such inputs hold physical values; the worst mistake with transformed ones had a distance of 75
LIMIT, LEAST_VOLUME = 1.5, 27  # crops; no volume of the training's kind was as far: benchmarks/input_statistics.py

log = logging.getLogger(__name__)


def crop_statistics(crop: Tensor, vectors: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Statistics [C] of the channels of a crop [C, n, n, n].

    Those of a vector's component are of its inflow, minus the derivative along its axis: bulk flows differ from box to
    box, and the cube's symmetries leave inflows unchanged. Slopes are on the first channel that is no component. Powers
    are those of the octaves of a Laplacian pyramid (Burt & Adelson 1983), since a crop is not periodic.
    """
    cells, components, fields = (1, 2, 3), [number for vector in vectors for number in vector], crop.clone()
    for vector in vectors:
        for axis, number in enumerate(vector):
            fields[number] = -torch.gradient(crop[number], dim=axis)[0]
    mean, quantiles = fields.mean(cells), fields.flatten(1).quantile(torch.tensor(QUANTILES, dtype=crop.dtype), 1)
    rest = fields - mean[:, None, None, None]
    scalar, variance = rest[min({*range(len(crop))} - {*components}, default=0)], rest.square().mean(cells) + TINY
    found = {"mean": mean, "ln of the variance": variance.log(), "skewness": rest.pow(3).mean(cells) / variance**1.5}
    found["slope on the density"] = (rest * scalar).mean(cells) / (scalar.square().mean() + TINY)
    found |= {f"{share:.0%} quantile": value for share, value in zip(QUANTILES, quantiles, strict=True)}
    octave, before = 2, torch.zeros(0)
    while rest.shape[-1] > 3:
        smooth = avg_pool3d(avg_pool3d(rest, 2, 1), 2, 1)  # (1, 2, 1) / 4 along each axis
        power = ((rest[:, 1:-1, 1:-1, 1:-1] - smooth).square().mean(cells) + TINY).log()
        found[f"ln of the power at {octave} cells"] = power
        if octave > 2:
            found[f"ln of the ratio of powers at {octave // 2} and {octave} cells"] = before - power
        rest, octave, before = smooth[:, ::2, ::2, ::2], 2 * octave, power
    return found


def measure(path: str, field: Any, side: int, count: int, config: Config) -> dict[str, np.ndarray]:
    """Statistics [N, C] of `count` crops, spread evenly over a field [C, X, Y, Z]; empty if none is finite."""
    found = []
    for number in range(count):
        pairs = zip(STEPS, field.shape[1:], strict=True)
        places = [int((number * step + 0.5) % 1 * (length - side + 1)) for step, length in pairs]
        with reading(path):
            cells = (slice(None), *(slice(place, place + side) for place in places))
            crop = np.array(field[cells], np.float64)
        if np.isfinite(crop).all():  # others are reported where they are used
            found.append(crop_statistics(torch.from_numpy(crop), config.vectors[0]))
    return {name: torch.stack([crop[name] for crop in found]).numpy() for name in (found[0] if found else ())}


def training_statistics(volumes: Sequence[Volume], config: Config) -> dict[str, Any]:
    """The entry of a checkpoint, as JSON values: the side of the crops in cells, and the statistics of `channels`.

    By channel and name: lowest and highest mean of a volume, and the standard deviation over the crops of a volume. The
    components of a vector share theirs, because the cube's symmetries exchange them.
    """
    side = max(2, min(config.data_size, LARGEST_CROP, *(min(volume.shape) // 4 for volume in volumes)))
    count, vectors = max(LEAST_CROPS, CROPS // len(volumes)), config.vectors[0]
    samples = [found for volume in volumes if (found := measure(volume.path, volume.inputs, side, count, config))]
    names = [channel.name for channel in config.volume_channels[0]]
    channels: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for number, channel in enumerate(names):
        pooled = next((vector for vector in vectors if number in vector), [number])
        for name in samples[0] if samples else ():
            values = [found[name][:, pooled] for found in samples]
            means, scatter = [part.mean() for part in values], np.sqrt(np.mean([part.var() for part in values]))
            channels[channel][name] = [float(f"{value:.6g}") for value in (min(means), max(means), scatter)]
    return {"crop": side, "channels": channels}


def distance(trained: Mapping[str, Any], path: str, field: Any, config: Config) -> tuple[float, str, bool]:
    """The largest distance of the mean of a field's crops from those of the training, its place, and if it is too far.

    In units of the standard deviation over the training's crops; the place is the name of a channel and a statistic.
    LIMIT is doubled for a field of few crops, whose mean is uncertain. `trained` is the entry of a checkpoint.
    """
    found, distances = measure(path, field, min(trained["crop"], *field.shape[1:]), CROPS, config), [(0.0, "nothing")]
    for number, channel in enumerate(config.volume_channels[0]):
        for name, (low, high, scatter) in trained["channels"].get(channel.name, {}).items():
            mean = float(found[name][:, number].mean()) if name in found else low
            unit = max(scatter, 1e-3 * max(abs(low), abs(high)), TINY)  # crops of a smooth channel hardly scatter
            distances.append((max(low - mean, mean - high, 0.0) / unit, f"{channel.name}, {name}"))
    is_small = np.prod(field.shape[1:]) < LEAST_VOLUME * trained["crop"] ** 3
    return *max(distances), max(distances)[0] > LIMIT * (1 + is_small)


def compare(
    trained: Mapping[str, Any] | None, path: str, field: Any, config: Config, whose: str = "the training"
) -> float:
    """Logs and returns the `distance` of a volume's inputs [C, X, Y, Z], a warning beyond `limit`; 0 if not trained."""
    largest = 0.0
    if trained:
        largest, place, is_far = distance(trained, path, field, config)
        line = f"{path}: the inputs are {largest:.2g} standard deviations of crops from those of {whose} ({place})"
        remedy = "; check units, order of axes, redshift and cells (docs/generalization.md)"
        log.log(*(logging.WARNING, line + remedy) if is_far else (logging.INFO, line))
    return largest
