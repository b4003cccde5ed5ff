"""Conversion between channel values and physical values agrees with that of the published data."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.config.channels import TRANSFORM, Channel, copied_channels, known_channels
from utils.volumes.hdf5 import open_volume
from utils.volumes.values import check_all

DARK, GAS = known_channels("inputs", 4), known_channels("targets", 5)
UNKNOWN = {**TRANSFORM, "density_log_scale": None, "velocity_scale_km_s": None, "temperature_log10_scale": None}


def test_the_defaults_are_the_transforms_of_the_published_data() -> None:
    """The formulas of public scripts for these files: rho = exp(14 x), v = 9e7 x cm/s, T = exp(8 (x + 1.5)) K."""
    x, cm_per_km = np.linspace(-1.2, 1.2, 25), 1e5
    physical = [np.exp(14 * x), *[9e7 * x / cm_per_km] * 3, np.exp(8 * (x + 1.5))]
    for channel, values in zip((*DARK, *GAS), (*physical[:4], *physical), strict=True):
        np.testing.assert_allclose(channel.to_physical(x), values, rtol=1e-13)
        np.testing.assert_allclose(channel.from_physical(values.copy()), x, rtol=1e-13, atol=1e-14)
    log10 = (np.log10(physical[4]) - TRANSFORM["temperature_log10_center"]) / TRANSFORM["temperature_log10_scale"]
    np.testing.assert_allclose(log10, x, rtol=1e-13, atol=1e-14)


def test_the_formula_is_that_of_from_physical() -> None:
    """It is what readers of a file see, in the notation of numpy but for ln."""
    values = np.array([3.0, 40.0, 5e3])
    names = {"log10": np.log10, "ln": np.log, "value": values, "K": 1}
    for transform in ({"scale": 7.0}, {"scale": 250.0, "center": 1e3}):
        for is_log in (False, True):
            channel = Channel("a", "K", is_log=is_log, **transform)
            formula = re.sub(r"(\d) K", r"\1", channel.formula())
            np.testing.assert_allclose(eval(formula, names), channel.from_physical(values.copy()), rtol=1e-8)


def test_channels_without_a_known_transform_have_names_only() -> None:
    """Of other numbers, with the vectors of another dataset or without those of a velocity, or with scales None."""
    unknown = [known_channels("inputs", 3), known_channels("targets", 6), known_channels("inputs", 4, vectors=[])]
    unknown.append(known_channels("targets", 5, vectors=[[2, 3, 4]]))
    for channels in unknown:
        assert [channel.name for channel in channels] == [f"channel {number}" for number in range(len(channels))]
    assert [channel.component for channel in unknown[-1]] == [None, None, *(f"vector 0 {axis}" for axis in "xyz")]
    named = *known_channels("inputs", 4, UNKNOWN), *known_channels("targets", 5, UNKNOWN)
    assert [channel.name for channel in named] == [channel.name for channel in (*DARK, *GAS)]
    for channel in (*itertools.chain(*unknown), *named):
        assert (channel.unit, channel.formula()) == (None, "unknown")
    partly = known_channels("targets", 5, {**TRANSFORM, "density_log_scale": None})
    assert [channel.unit is None for channel in partly] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("inputs", "targets", "copied"),
    [
        (DARK, GAS, {0: 0, 1: 1, 2: 2, 3: 3}),
        (DARK[:1], GAS, {0: 0}),
        (DARK, [GAS[0], GAS[4]], {0: 0}),
        (known_channels("inputs", 3), GAS, {0: 0, 1: 1, 2: 2}),
        (DARK[::-1], GAS, {0: 3, 1: 2, 2: 1, 3: 0}),
        (DARK, [GAS[4], GAS[0], Channel("metallicity")], {1: 0}),
    ],
    ids=str,
)
def test_inputs_are_compared_with_the_targets_of_the_same_quantity(inputs: Any, targets: Any, copied: Any) -> None:
    """Fixed: the baseline that copies the inputs took a velocity for a temperature if targets had no velocity."""
    assert copied_channels(inputs, targets) == copied


def test_the_documentation_writes_files_whose_channels_are_those_of_the_defaults(tmp_path: Path) -> None:
    """docs/data.md, Your own files."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    _, source = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {}
    exec(compile(source, "docs/data.md", "exec", dont_inherit=True), namespace)
    rng, shape = np.random.default_rng(1), (16, 16, 16)
    dark_rho, gas_rho, temperature = (np.exp(rng.normal(size=shape) + mean) for mean in (0, 3, 10))
    dark_velocity, gas_velocity = 300 * rng.normal(size=(2, 3, *shape))
    namespace["write"](tmp_path / "my.h5", dark_rho, list(dark_velocity), gas_rho, list(gas_velocity), temperature)
    volume = open_volume(tmp_path / "my.h5")
    assert volume.mapped
    expected = [dark_rho / dark_rho.mean(), *dark_velocity, gas_rho / gas_rho.mean(), *gas_velocity, temperature]
    for channel, stored, values in zip((*DARK, *GAS), (*volume.inputs, *volume.targets), expected, strict=True):
        np.testing.assert_allclose(channel.to_physical(stored.astype("f8")), values, rtol=1e-5)
    check_all(volume)
    assert np.isfinite(namespace["density"](np.eye(3))).all()
