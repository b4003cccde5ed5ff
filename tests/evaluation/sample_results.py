"""Synthetic evaluations for the tests of the figures and the page."""

from __future__ import annotations

from typing import Any

import numpy as np
from volume_files import smooth_field

from utils.channels import Channel, input_channels, target_channels
from utils.config import Transform
from utils.evaluation.results import Distribution, Plane, Results, Spectrum


def sample_results(
    box: int = 16, noise: float = 0.1, channels: tuple[int, int] = (4, 5), seed: int = 0, **about: Any
) -> Results:
    """Smooth random fields, predicted with white noise: right on large scales, wrong on small ones.

    For other numbers of channels than (4, 5) units are unknown.
    """
    rng = np.random.default_rng(seed)
    inputs, target = (0.4 * smooth_field(count, box, rng) for count in channels)
    predicted = target + noise * target.std() * rng.standard_normal(target.shape)
    return results_of(inputs, target, predicted, **about)


def results_of(inputs: np.ndarray, target: np.ndarray, predicted: np.ndarray, **about: Any) -> Results:
    """An evaluation in plain numpy; volumes are [C, box, box, box], `about` may hold the size of a `cell` in Mpc/h."""
    channels, box = target_channels(len(target), Transform()), target.shape[1]
    given = input_channels(len(inputs), Transform())
    cell = about.get("cell")
    difference = predicted - target
    axes = (1, 2, 3)
    spread = ((target - target.mean(axes, keepdims=True)) ** 2).sum(axes)
    fields = [_fields(volume, channels) for volume in (predicted, target)]
    spectra = {name: _spectrum(fields[0][name], fields[1][name], cell or 1.0) for name in fields[1]}
    distributions = {
        channel.name: _distribution(channel, predicted[number], target[number])
        for number, channel in enumerate(channels)
    }
    known = channels[0].unit is not None
    if known:
        values = [field["divergence"][0] for field in fields]
        edges = np.linspace(values[1].min(), values[1].max(), 33)
        distributions["velocity divergence"] = Distribution(
            edges, _counts(values[0], edges), _counts(values[1], edges), "km/s per cell", False
        )
    middle = box // 2
    return Results(
        channels=channels,
        input_channels=given,
        cells=box,
        l1=np.abs(difference).mean(axes),
        r2=1 - (difference**2).sum(axes) / spread,
        spectra=spectra,
        length_unit="cells" if cell is None else "Mpc/h",
        distributions=distributions,
        plane=_plane(channels, predicted, target) if known else None,
        divergence_r2=0.5 if known else float("nan"),
        slices={"input": inputs[:, middle], "target": target[:, middle], "predicted": predicted[:, middle]},
        about=about,
    )


def _fields(volume: np.ndarray, channels: tuple[Channel, ...]) -> dict[str, list[np.ndarray]]:
    if channels[0].unit is None:
        return {channel.name: [values] for channel, values in zip(channels, volume, strict=True)}
    velocity = [channel.to_physical(values) for channel, values in zip(channels[1:4], volume[1:4], strict=True)]
    slopes = [np.roll(part, -1, axis) - np.roll(part, 1, axis) for axis, part in enumerate(velocity)]
    return {
        "density": [channels[0].to_physical(volume[0])],
        "log density": [volume[0]],
        "velocity": velocity,
        "divergence": [sum(slopes) / 2],
        "log temperature": [volume[4]],
    }


def _spectrum(predicted: list[np.ndarray], target: list[np.ndarray], cell: float) -> Spectrum:
    """Shells one fundamental wide, from the fundamental to Nyquist."""
    box = len(target[0])
    side = np.fft.fftfreq(box, 1 / box)
    radius = np.sqrt(sum(part**2 for part in np.meshgrid(side, side, side, indexing="ij")))
    shell = np.rint(radius).astype(int).ravel()
    weight = cell**3 / box**3
    transforms = [[np.fft.fftn(part).ravel() for part in field] for field in (predicted, target)]

    def summed(one: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
        power = sum((a * b.conj()).real for a, b in zip(one, other, strict=True))
        return np.bincount(shell, power)[1 : box // 2 + 1] * weight

    modes = np.bincount(shell)[1 : box // 2 + 1]
    k = np.bincount(shell, radius.ravel())[1 : box // 2 + 1] / modes * 2 * np.pi / (box * cell)
    first, second = transforms
    powers = [summed(*pair) / modes for pair in ((first, first), (second, second), (first, second))]
    return Spectrum(k, modes, *powers)


def _counts(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]


def _shown(channel: Channel, values: np.ndarray) -> np.ndarray:
    physical = channel.to_physical(values)
    return np.log10(physical) if channel.is_log else physical


def _distribution(channel: Channel, predicted: np.ndarray, target: np.ndarray) -> Distribution:
    predicted, target = _shown(channel, predicted), _shown(channel, target)
    low, high = target.min(), target.max()
    edges = np.linspace(low - 0.1 * (high - low), high + 0.1 * (high - low), 41)
    return Distribution(edges, _counts(predicted, edges), _counts(target, edges), channel.unit, channel.is_log)


def _plane(channels: tuple[Channel, ...], predicted: np.ndarray, target: np.ndarray) -> Plane:
    edges = np.linspace(-2.5, 3, 56), np.linspace(2.5, 7.5, 51)
    counts = [
        np.histogram2d(_shown(channels[0], volume[0]).ravel(), _shown(channels[4], volume[4]).ravel(), edges)[0]
        for volume in (predicted, target)
    ]
    return Plane(*edges, *counts)
