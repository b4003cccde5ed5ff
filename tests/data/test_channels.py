"""Conversion between channel values and physical values agrees with the simulation that makes the data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.config.sections import TransformConfig
from utils.data.channels import VELOCITY, Channel, common_channels, input_channels, target_channels
from utils.data.files.attributes import file_transform
from utils.data.files.hdf5 import open_volume
from utils.data.files.values import check_all
from utils.simulation import channels as simulated

KNOWN = target_channels(5, TransformConfig())
SIMULATED = target_channels(5, file_transform(TransformConfig(), {"simulated": simulated.attributes()}))
UNKNOWN = TransformConfig(density_log_scale=None, velocity_scale_km_s=None, temperature_log10_scale=None)


def test_the_defaults_are_the_transforms_of_the_published_data() -> None:
    """The formulas of public scripts for these files: rho = exp(14 x), v = 9e7 x cm/s, T = exp(8 (x + 1.5)) K."""
    x, cm_per_km, keys = np.linspace(-1.2, 1.2, 25), 1e5, TransformConfig()
    density, velocity, kelvin = np.exp(14 * x), 9e7 * x, np.exp(8 * (x + 1.5))
    for channel, expected in zip(KNOWN, (density, *[velocity / cm_per_km] * 3, kelvin), strict=True):
        np.testing.assert_allclose(channel.to_physical(x), expected, rtol=1e-13)
    for back in (
        np.log(density) / keys.density_log_scale,
        velocity / cm_per_km / keys.velocity_scale_km_s,
        (np.log10(kelvin) - keys.temperature_log10_center) / keys.temperature_log10_scale,
    ):
        np.testing.assert_allclose(back, x, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("number", "values"), [(0, [1e-3, 1.0, 1e5]), (1, [-800.0, 0.0, 1234.5]), (4, [1e2, 3.3e7])])
def test_channels_are_those_of_the_simulation(number: int, values: list[float]) -> None:
    physical, channel = np.array(values, np.float32), SIMULATED[number]
    fields = np.ones((5, len(values)), np.float32)
    fields[number] = physical
    stored = simulated.to_channels(fields)[number]
    np.testing.assert_allclose(channel.to_physical(stored), physical, rtol=1e-5)


def test_names_units_and_formulas() -> None:
    names = ["gas density", "gas velocity x", "gas velocity y", "gas velocity z", "temperature"]
    assert [channel.name for channel in KNOWN] == names
    assert [channel.unit for channel in KNOWN] == ["mean density", "km/s", "km/s", "km/s", "K"]
    formulas = ["ln(value / mean density) / 14", "value / (1000 km/s)", "(log10(value / K) - 5) / 2.5"]
    assert [SIMULATED[number].formula() for number in (0, 1, 4)] == formulas
    assert KNOWN[4].formula() == "(log10(value / K) - 5.211533783) / 3.474355855"
    dark = input_channels(4, TransformConfig())
    assert [channel.name for channel in dark] == [f"dark-matter {name.removeprefix('gas ')}" for name in names[:4]]
    assert [channel.to_physical(1.0) for channel in dark] == [channel.to_physical(1.0) for channel in KNOWN[:4]]
    other = TransformConfig(density_log_scale=2.0, temperature_log10_center=4.0, temperature_log10_scale=1.0)
    assert target_channels(5, other)[0].to_physical(np.float64(0.5)) == pytest.approx(np.e)
    assert target_channels(5, other)[4].to_physical(np.float64(2)) == pytest.approx(1e6)


def test_channels_without_a_known_transform_have_names_only() -> None:
    for found in (
        input_channels(3, TransformConfig()),
        input_channels(1, TransformConfig()),  # with the vectors of a velocity
        input_channels(4, TransformConfig(), []),
        target_channels(3, TransformConfig()),
        target_channels(5, TransformConfig(), [[2, 3, 4]]),
    ):
        assert [channel.name for channel in found] == [f"channel {number}" for number in range(len(found))]
    for found in (input_channels(3, TransformConfig()), input_channels(4, UNKNOWN), target_channels(5, UNKNOWN)):
        assert {(channel.unit, channel.formula()) for channel in found} == {(None, "unknown")}
    assert target_channels(5, UNKNOWN)[4].name == "temperature"
    partly = target_channels(5, TransformConfig(density_log_scale=None))
    assert [channel.unit is None for channel in partly] == [True, False, False, False, False]


def test_files_without_velocities_or_temperature_have_the_other_channels() -> None:
    """The importer writes such files; the config states their number of channels and their vectors."""
    transform = TransformConfig()
    assert input_channels(1, transform, []) == input_channels(4, transform)[:1]
    assert target_channels(4, transform) == KNOWN[:4]
    assert target_channels(2, transform, []) == (KNOWN[0], KNOWN[4])
    assert target_channels(1, transform, []) == KNOWN[:1]


@pytest.mark.parametrize(("inputs", "targets", "common"), [(4, 5, 4), (1, 5, 1), (4, 2, 1), (1, 1, 1), (3, 5, 3)])
def test_inputs_are_compared_with_the_targets_of_the_same_quantity(inputs: int, targets: int, common: int) -> None:
    """A fixed bug: the baseline that copies the inputs took a velocity for a temperature if targets had no velocity."""
    vectors = [VELOCITY if count >= 3 else () for count in (inputs, targets)]
    dark = input_channels(inputs, TransformConfig(), vectors[0])
    assert common_channels(dark, target_channels(targets, TransformConfig(), vectors[1])) == common


@pytest.mark.parametrize("channel", [*SIMULATED, *input_channels(4, TransformConfig()), *KNOWN])
def test_channels_of_physical_values_are_the_inverse(channel: Channel) -> None:
    x = np.linspace(-1, 1.2, 23, dtype="f4")
    np.testing.assert_allclose(channel.from_physical(channel.to_physical(x)), x, atol=3e-7)


def test_the_documentation_writes_files_whose_channels_are_those_of_the_defaults(tmp_path: Path) -> None:
    """docs/data.md, Your own files."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {}
    exec(compile(source, "docs/data.md", "exec", dont_inherit=True), namespace)
    rng, shape = np.random.default_rng(1), (16, 16, 16)
    dark_rho, gas_rho, temperature = (np.exp(rng.normal(size=shape) + mean) for mean in (0, 3, 10))
    dark_velocity, gas_velocity = 300 * rng.normal(size=(2, 3, *shape))
    namespace["write"](tmp_path / "my.h5", dark_rho, list(dark_velocity), gas_rho, list(gas_velocity), temperature)
    volume = open_volume(tmp_path / "my.h5", (4, 5))
    assert volume.mapped
    dark, gas_fields = [dark_rho / dark_rho.mean(), *dark_velocity], [gas_rho / gas_rho.mean(), *gas_velocity]
    expected = [*dark, *gas_fields, temperature]
    channels = [*input_channels(4, TransformConfig()), *KNOWN]
    for channel, stored, values in zip(channels, [*volume.inputs, *volume.targets], expected, strict=True):
        np.testing.assert_allclose(channel.to_physical(stored.astype("f8")), values, rtol=1e-5)
    check_all(volume)
    assert np.isfinite(namespace["density"](np.eye(3))).all()
