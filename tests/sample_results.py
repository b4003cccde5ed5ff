"""Synthetic evaluations for the tests of the figures and the report."""

import dataclasses
from typing import Any

import numpy as np
from reference_samples import ALONE
from volume_files import smooth_field

from analysis.evaluation.results import Results
from analysis.evaluation.statistics import volume_statistics
from analysis.lyman_alpha.forest import FluxStatistics
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup
from analysis.slabs import SlabFields, Slabs
from utils.config import Config
from utils.config.sections import TransformConfig
from utils.volumes.channels import input_channels, target_channels
from utils.volumes.hdf5 import Volume

# What a file states of its simulation.
SIMULATION: dict[str, float | str] = {
    "redshift": 2.4,
    "cosmology_H0": 67.7,
    "cosmology_Om0": 0.31,
    "cosmology_Ode0": 0.69,
    "cosmology_Ob0": 0.049,
}


def slab_fields(slabs: Slabs, *fields: np.ndarray) -> SlabFields:
    """This rank's planes of inputs, prediction and target, which are known as a whole."""
    readers = (slabs.reader(lambda channels, planes, field=field: field[channels, planes]) for field in fields)
    return SlabFields(*readers)


def sample_results(
    box: int = 16, noise: float = 0.1, channels: Any = (4, 5), cell: Any = None, flux: bool = False, **metadata: Any
) -> Results:
    """Results for smooth random fields plus white noise: good on large scales, bad on small ones.

    Units are unknown unless the numbers of channels are (4, 5); `cell` is in Mpc/h.
    """
    rng, slabs = np.random.default_rng(0), Slabs((box, box, box), ALONE)
    inputs, target = (0.4 * smooth_field(count, box, rng) for count in channels)
    predicted = target + noise * target.std() * rng.standard_normal(target.shape)
    sources, targets = input_channels(channels[0], TransformConfig()), target_channels(channels[1], TransformConfig())
    fields = slab_fields(slabs, *(field.astype(np.float32) for field in (inputs, predicted, target)))
    results = volume_statistics(sources, targets, cell, fields, slabs, metadata)
    if not flux:
        return results
    volume = Volume("box.h5", inputs, target, cell=cell, simulation=SIMULATION)
    setup = FluxSetup.of(volume, Config(), FluxOptions())
    return dataclasses.replace(results, flux=FluxStatistics(setup, slabs).results(fields))
