"""Conversion between channel values and physical values agrees with that of the published data."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.config.sections import TransformConfig
from utils.volumes.channels import VELOCITY, common_channels, input_channels, target_channels
from utils.volumes.hdf5 import open_volume
from utils.volumes.values import check_all

DEFAULT = TransformConfig()
DARK, GAS = input_channels(4, DEFAULT), target_channels(5, DEFAULT)
UNKNOWN = TransformConfig(density_log_scale=None, velocity_scale_km_s=None, temperature_log10_scale=None)


def test_the_defaults_are_the_transforms_of_the_published_data() -> None:
    """The formulas of public scripts for these files: rho = exp(14 x), v = 9e7 x cm/s, T = exp(8 (x + 1.5)) K."""
    x, cm_per_km = np.linspace(-1.2, 1.2, 25), 1e5
    physical = [np.exp(14 * x), *[9e7 * x / cm_per_km] * 3, np.exp(8 * (x + 1.5))]
    for channel, values in zip((*DARK, *GAS), (*physical[:4], *physical), strict=True):
        np.testing.assert_allclose(channel.to_physical(x), values, rtol=1e-13)
        np.testing.assert_allclose(channel.from_physical(values.copy()), x, rtol=1e-13, atol=1e-14)
    log10 = (np.log10(physical[4]) - DEFAULT.temperature_log10_center) / DEFAULT.temperature_log10_scale
    np.testing.assert_allclose(log10, x, rtol=1e-13, atol=1e-14)


def test_channels_without_a_known_transform_have_names_only() -> None:
    """Of other numbers, without the vectors of a velocity or with those of another one, or with scales None."""
    for channels in (input_channels(3, DEFAULT), input_channels(1, DEFAULT), target_channels(5, DEFAULT, [[2, 3, 4]])):
        assert [channel.name for channel in channels] == [f"channel {number}" for number in range(len(channels))]
    for channel in (*input_channels(3, DEFAULT), *input_channels(4, UNKNOWN), *target_channels(5, UNKNOWN)):
        assert (channel.unit, channel.formula()) == (None, "unknown")
    partly = target_channels(5, TransformConfig(density_log_scale=None))
    assert [channel.unit is None for channel in partly] == [True, False, False, False, False]


@pytest.mark.parametrize(("inputs", "targets", "common"), [(4, 5, 4), (1, 5, 1), (4, 2, 1), (3, 5, 3)])
def test_inputs_are_compared_with_the_targets_of_the_same_quantity(inputs: int, targets: int, common: int) -> None:
    """A fixed bug: the baseline that copies the inputs took a velocity for a temperature if targets had no velocity."""
    vectors = [VELOCITY if count >= 3 else () for count in (inputs, targets)]
    dark = input_channels(inputs, DEFAULT, vectors[0])
    assert common_channels(dark, target_channels(targets, DEFAULT, vectors[1])) == common


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
