"""P(k, mu) agrees with closed forms, for sight-lines along each axis, and with an independent library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_samples import ALONE

from utils.data.modes import bin_edges
from utils.data.slabs import Slabs
from utils.lyman_alpha.power import RATIO, AnisotropicPower

SIDE, CELL = 24, 0.4
FUNDAMENTAL = 2 * math.pi / (SIDE * CELL)
VOLUME = (SIDE * CELL) ** 3


def measured(fields: list[np.ndarray]) -> tuple[AnisotropicPower, np.ndarray]:
    """P(k, mu) of fields with sight-lines along x, y and z."""
    power = AnisotropicPower(Slabs(fields[0].shape, ALONE), CELL)
    sums = [power.sums(torch.tensor(field, dtype=torch.float32), axis) for axis, field in enumerate(fields)]
    return power, power.power(torch.stack(sums).sum(0))


def wavenumbers(axis: int) -> tuple[np.ndarray, np.ndarray]:
    """k in fundamentals and |mu| of all modes."""
    waves = np.stack(np.meshgrid(*[np.fft.fftfreq(SIDE) * SIDE] * 3, indexing="ij"))
    k = np.sqrt((waves**2).sum(0))
    return k, np.abs(waves[axis]) / np.maximum(k, 1e-9)


def test_a_field_with_the_power_of_redshift_space_has_it_in_every_bin() -> None:
    """P(k, mu) = (1 + beta mu²)² k**-1.5 (Kaiser 1987): all modes have this power, with random phases."""
    fields, model, modes = [], np.zeros((2, 4, 20)), np.zeros((4, 20))
    edges = bin_edges(SIDE // 2, RATIO)
    for axis in range(3):
        k, mu = wavenumbers(axis)
        true = (1 + 0.8 * mu**2) ** 2 * np.maximum(k, 0.5) ** -1.5
        noise = np.fft.fftn(np.random.default_rng(axis).standard_normal([SIDE] * 3))
        fields.append(np.fft.ifftn(noise / np.abs(noise) * np.sqrt(true / VOLUME)).real * SIDE**3)
        used = (k > 0.5) & (k < edges[-1])
        place = np.minimum(4 * mu[used], 3).astype(int), np.digitize(k[used], edges) - 1
        for row, values in zip((*model, modes), (true, k, np.ones_like(k)), strict=True):
            np.add.at(row, place, values[used])
    found, power = measured(fields)
    some = slice(len(edges) - 1)
    np.testing.assert_array_equal(found.modes, modes[:, some])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(power, (model[0] / modes)[:, some], rtol=1e-5)
        np.testing.assert_allclose(found.k, (model[1] / modes)[:, some] * FUNDAMENTAL, rtol=1e-9)
    assert np.isnan(power[1:3, 0]).tolist() == [True, False], "the longest waves have mu = 0, 1/√2 or 1"


@pytest.mark.filterwarnings("ignore:One or more radial bins")
@pytest.mark.parametrize("axis", range(3))
def test_power_agrees_with_powerbox(axis: int) -> None:
    tools = pytest.importorskip("powerbox.tools")
    field = np.random.default_rng(0).standard_normal([SIDE] * 3)
    slabs = Slabs(field.shape, ALONE)
    power = AnisotropicPower(slabs, CELL)
    sums = power.sums(torch.tensor(field, dtype=torch.float32), axis).numpy()
    edges, (k, mu) = np.array(bin_edges(SIDE // 2, RATIO)), wavenumbers(axis)
    for number in range(4):
        inside = (np.minimum(4 * mu, 3).astype(int) == number).astype(float)
        modes = np.histogram(k, edges, weights=inside)[0]
        theirs = tools.get_power(
            field, SIDE * CELL, bins=edges * FUNDAMENTAL, k_weights=np.fft.fftshift(inside), dimensionless=False
        )
        expected = theirs.power if hasattr(theirs, "power") else theirs[0]  # before powerbox 1.0
        filled = modes > 0
        np.testing.assert_allclose(sums[number][filled] / modes[filled] * VOLUME, expected[filled], rtol=1e-5)
