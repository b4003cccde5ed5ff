"""Synthetic evaluations for the tests of figures and report, and pictures of one pixel instead of drawn ones."""

import base64
import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from reference_samples import ALONE
from volume_files import smooth_field

from analysis.evaluation import drawing
from analysis.evaluation.base import Compared
from analysis.evaluation.comparison import volume_statistics
from analysis.evaluation.results import Results
from analysis.lyman_alpha.forest import FluxStatistics
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup
from analysis.slabs import SlabFields, Slabs
from utils.config import Config
from utils.config.channels import SIDES, Channel, known_channels
from utils.volumes.hdf5 import Volume

PNG = base64.b64decode(
    b"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
# What a file states of its simulation.
SIMULATION: dict[str, float | str] = {"redshift": 2.4, "cosmology_H0": 67.7, "cosmology_Om0": 0.31}
SIMULATION |= {"cosmology_Ode0": 0.69, "cosmology_Ob0": 0.049}


def slab_fields(slabs: Slabs, *fields: np.ndarray) -> SlabFields:
    """This rank's planes of inputs, prediction and target, which are known as a whole."""
    readers = (slabs.reader(lambda channels, planes, field=field: field[channels, planes]) for field in fields)
    return SlabFields(*readers)


def sample_results(
    box: int = 16, noise: float = 0.1, channels: Any = (4, 5), cell: Any = None, flux: bool = False, **metadata: Any
) -> Results:
    """Results for smooth random fields plus white noise: good on large scales, bad on small ones.

    `channels` are those of inputs and targets, or their numbers; units are unknown unless they are (4, 5). `cell` is
    in Mpc/h.
    """
    if isinstance(channels[0], int):
        known = channels == (4, 5)
        channels = [
            known_channels(side, count) if known else [Channel(f"channel {place}") for place in range(count)]
            for side, count in zip(SIDES, channels, strict=True)
        ]
    sources, targets = channels
    rng, slabs = np.random.default_rng(0), Slabs((box, box, box), ALONE)
    inputs, target = (0.4 * smooth_field(len(names), box, rng) for names in channels)
    predicted = target + noise * target.std() * rng.standard_normal(target.shape)
    fields = slab_fields(slabs, *(field.astype(np.float32) for field in (inputs, predicted, target)))
    results = volume_statistics(Compared(sources, targets, cell, fields, slabs), metadata)
    if not flux:
        return results
    volume = Volume("box.h5", inputs, target, cell=cell, simulation=SIMULATION)
    setup = FluxSetup.of(volume, Config(), FluxOptions())
    return dataclasses.replace(results, flux=FluxStatistics(setup, slabs).results(fields))


def agree(result: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Counts and texts exactly; other numbers within a tolerance relative to the largest value."""
    assert type(result) is type(expected)
    if dataclasses.is_dataclass(result):
        result, expected = vars(result), vars(expected)
    if isinstance(result, dict):
        assert list(result) == list(expected)
        for name, value in result.items():
            agree(value, expected[name], 0 if name in ("distributions", "phase_diagram", "slices") else tolerance)
    elif isinstance(result, float | np.ndarray):
        largest = np.nanmax(np.abs(expected), initial=0.0)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * largest)
    else:
        assert result == expected


def empty_picture(function: Any, *_: object) -> Future[bytes]:
    assert function is drawing.picture, function
    future: Future[bytes] = Future()
    future.set_result(PNG)
    return future


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drawing, "submit", empty_picture)
