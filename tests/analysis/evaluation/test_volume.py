"""Files of a volume and of a prediction: their channels are compared by name, wherever they are."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reference_samples import ALONE
from volume_files import smooth_field, write_volume

from analysis.evaluation.volume import VolumeFields, config_of_files, fit_gas, open_fitted
from analysis.inference.layouts import DEVIATION
from utils.config import Config
from utils.config.channels import Channel, Channels, known_channels
from utils.errors import UserError
from utils.volumes.attributes import channel_attributes

DARK, GAS = known_channels("inputs", 4), known_channels("targets", 5)
PRESSURE = [*GAS[:4], Channel("pressure", "Pa", 3.0, 1.0, True)]
SWAPPED = [GAS[0], GAS[2], GAS[1], *GAS[3:]]
UNSTATED: list[Channel] = []


def file_of(path: Path, targets: Channels, deviation: Channels | None = None, **attributes: Any) -> str:
    """A volume that states the channels of its targets, and those of standard deviations."""
    write_volume(path, 8, **attributes)
    with h5py.File(path, "r+") as file:
        if targets:
            file["Hydro"].attrs.update(channel_attributes(targets))
        if deviation is not None:
            file[DEVIATION] = 0.1 + np.abs(file["Hydro"])
            file[DEVIATION].attrs.update(channel_attributes(deviation))
    return str(path)


def channels_of(box: str, prediction: str) -> tuple[Channels, Channels]:
    with closing(VolumeFields(box, prediction, config_of_files(box, prediction))) as fields:
        return fields.config.volume_channels


def test_a_predicted_file_has_the_channels_that_it_or_the_box_states(tmp_path: Path) -> None:
    stated = (UNSTATED, UNSTATED, GAS), (UNSTATED, PRESSURE, PRESSURE), (SWAPPED, UNSTATED, SWAPPED), (GAS, GAS, GAS)
    for number, (box, prediction, expected) in enumerate(stated):
        paths = file_of(tmp_path / f"box{number}.h5", box), file_of(tmp_path / f"gas{number}.h5", prediction, expected)
        assert channels_of(*paths) == (tuple(DARK), tuple(expected))
    old = file_of(tmp_path / "old.h5", UNSTATED, velocity_scale_km_s=500.0)
    inputs, targets = channels_of(file_of(tmp_path / "box.h5", UNSTATED), old)
    assert [channel.scale for channel in (*inputs[1:], *targets[1:4])] == [500.0] * 6, "as earlier versions wrote it"


@pytest.mark.parametrize(
    ("prediction", "deviation", "message"),
    [
        (SWAPPED, None, r"box.h5 and .*gas.h5 have different channels: .* instead of gas density, gas velocity y, "),
        (GAS, SWAPPED, rf"gas.h5: {DEVIATION} has other channels than .*: gas density, gas velocity y, .* instead of "),
    ],
)
def test_files_with_other_channels_are_refused(prediction, deviation, message: str, tmp_path: Path) -> None:
    box, gas = file_of(tmp_path / "box.h5", GAS), file_of(tmp_path / "gas.h5", prediction, deviation)
    with pytest.raises(UserError, match=message):
        channels_of(box, gas)
    if deviation is None:
        with pytest.raises(UserError, match=r"gas.h5: Hydro has other channels than the network: "):
            VolumeFields(gas, None, config_of_files(box, box))


def test_a_fit_finds_the_relations_of_gas_at_any_place_and_in_any_transform(tmp_path: Path) -> None:
    """Gas whose log density is 0.8 times that of dark matter, on a power law of the temperature."""
    dark = 0.05 * smooth_field(4, 16, np.random.default_rng(0))
    dark[0] -= dark[0].mean()
    logarithm = 0.8 * 14 * dark[0]
    gas = np.stack([logarithm / 14, *dark[1:], (np.log(9000.0) + 0.45 * logarithm) / 8 - 1.5])
    path = str(tmp_path / "box.h5")
    volumes = {"Nbody": (DARK, dark, [2, 0, 3, 1]), "Hydro": (GAS, gas, [4, 2, 0, 3, 1])}
    for scale in (1, 2):
        with h5py.File(path, "w") as file:
            file.attrs["box_size_mpc_h"] = 8.0
            for name, (channels, values, order) in volumes.items():
                stated = [replace(channels[place], scale=scale * channels[place].scale) for place in order]
                file[name] = (values[order] / scale).astype(np.float32)
                file[name].attrs.update(channel_attributes(stated))
        fit = fit_gas(path, config_of_files(path, path), ALONE)
        assert (fit.kelvin, fit.gamma) == (pytest.approx(9000, rel=0.02), pytest.approx(1.45, abs=0.01))
        np.testing.assert_allclose(fit.transfer, 0.8, rtol=1e-4)
    for attributes, message in (({}, "does not state box_size"), ({"box_size_mpc_h": 8.0}, "the inputs lack dark")):
        usual = str(write_volume(tmp_path / "box.h5", 8, **attributes))
        channels = {"inputs": [{"name": "dark-matter density"}, *({"name": f"{axis}"} for axis in "xyz")]}
        with pytest.raises(UserError, match=rf"^fitted_on: .*{message}"):
            open_fitted(usual, Config(channels=channels))
