"""Synthetic evaluations for the tests of the figures and the report."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from volume_files import smooth_field

from utils.config import Config
from utils.config.sections import TransformConfig
from utils.data.channels import input_channels, target_channels
from utils.data.files.hdf5 import Volume
from utils.data.slabs import SlabFields, Slabs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.evaluation.results import Results
from utils.evaluation.statistics import VolumeStatistics
from utils.lyman_alpha.forest import FluxStatistics
from utils.lyman_alpha.setup import FluxSetup

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
    return SlabFields(
        *(slabs.reader(lambda channels, planes, field=field: field[channels, planes]) for field in fields)
    )


def sample_results(
    box: int = 16,
    noise: float = 0.1,
    channels: tuple[int, int] = (4, 5),
    seed: int = 0,
    cell: float | None = None,
    flux: bool = False,
    **metadata: Any,
) -> Results:
    """Results for smooth random fields plus white noise: good on large scales, bad on small ones.

    Units are unknown unless the numbers of channels are (4, 5); `cell` is in Mpc/h.
    """
    rng = np.random.default_rng(seed)
    inputs, target = (0.4 * smooth_field(count, box, rng) for count in channels)
    predicted = target + noise * target.std() * rng.standard_normal(target.shape)
    transform, world = TransformConfig(), World(Launch("test"), torch.device("cpu"))
    targets, sources = target_channels(channels[1], transform), input_channels(channels[0], transform)
    slabs = Slabs((box, box, box), world)
    fields = slab_fields(slabs, *(field.astype(np.float32) for field in (inputs, predicted, target)))
    results = VolumeStatistics(targets, sources, cell, slabs).results(fields, metadata)
    if not flux:
        return results
    volume = Volume("box.h5", inputs, target, cell=cell, simulation=SIMULATION)
    setup = FluxSetup.of(volume, Config(N_in_channels=channels[0], N_out_channels=channels[1]))
    assert setup is not None
    return dataclasses.replace(results, flux=FluxStatistics(setup, slabs).results(fields))
