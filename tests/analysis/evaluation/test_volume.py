"""Files of a volume and of a prediction: their channels are compared by name, wherever they are."""

from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reference_samples import ALONE
from volume_files import write_volume

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
    """The channels of the evaluation of a predicted file."""
    with closing(VolumeFields(box, prediction, config_of_files(box, prediction))) as fields:
        return fields.config.volume_channels


def test_a_predicted_file_has_the_channels_that_it_or_the_box_states(tmp_path: Path) -> None:
    for number, (box, prediction, expected) in enumerate(
        ((UNSTATED, UNSTATED, GAS), (UNSTATED, PRESSURE, PRESSURE), (SWAPPED, UNSTATED, SWAPPED), (GAS, GAS, GAS))
    ):
        paths = file_of(tmp_path / f"box{number}.h5", box), file_of(tmp_path / f"gas{number}.h5", prediction, expected)
        assert channels_of(*paths) == (tuple(DARK), tuple(expected))
    old = file_of(tmp_path / "old.h5", UNSTATED, velocity_scale_km_s=500.0)
    inputs, targets = channels_of(file_of(tmp_path / "box.h5", UNSTATED), old)
    assert [channel.scale for channel in (*inputs[1:], *targets[1:4])] == [500.0] * 6, "as earlier versions wrote it"


@pytest.mark.parametrize(
    ("prediction", "deviation", "message"),
    [
        (PRESSURE, None, r"box.h5 and .*gas.h5 have different channels: .* without pressure; give"),
        (SWAPPED, None, r"box.h5 and .*gas.h5 have different channels: .* instead of gas density, gas velocity y, "),
        (GAS, SWAPPED, rf"gas.h5: {DEVIATION} has other channels than .*: gas density, gas velocity y, .* instead of "),
    ],
)
def test_files_with_other_channels_are_refused(
    prediction: Channels, deviation: Channels | None, message: str, tmp_path: Path
) -> None:
    box, gas = file_of(tmp_path / "box.h5", GAS), file_of(tmp_path / "gas.h5", prediction, deviation)
    with pytest.raises(UserError, match=message):
        channels_of(box, gas)
    if deviation is None:
        with pytest.raises(UserError, match=r"gas.h5: Hydro has other channels than the network: "):
            VolumeFields(gas, None, config_of_files(box, box))


def test_a_fit_finds_the_densities_at_any_place_and_in_any_transform(tmp_path: Path) -> None:
    usual = write_volume(tmp_path / "usual.h5", 12, box_size_mpc_h=6.0)
    config, order = config_of_files(str(usual), str(usual)), ([2, 0, 3, 1], [4, 1, 0, 3, 2])
    expected = fit_gas(str(usual), config, ALONE)
    places = dict(zip(("Nbody", "Hydro"), zip((DARK, GAS), order, strict=True), strict=True))
    with h5py.File(usual) as source, h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs.update(source.attrs)
        for name, (channels, order_of) in places.items():
            file[name] = source[name][...][order_of]
            file[name].attrs.update(channel_attributes([channels[place] for place in order_of]))
    other = str(tmp_path / "other.h5")
    np.testing.assert_equal(fit_gas(other, config_of_files(other, other), ALONE)._asdict(), expected._asdict())
    with h5py.File(other, "r+") as file:
        file["Nbody"][1] *= 0.5
        file["Nbody"].attrs["scale"] = [2 * DARK[0].scale if place == 0 else 900.0 for place in order[0]]
    rescaled = fit_gas(other, config_of_files(other, other), ALONE)
    np.testing.assert_allclose(rescaled.transfer, expected.transfer, rtol=1e-4, atol=1e-5)
    channels = {"inputs": [{"name": "dark-matter density"}, *({"name": f"{axis}"} for axis in "xyz")]}
    with pytest.raises(UserError, match=r"^fitted_on: the inputs lack dark-matter density in physical units"):
        open_fitted(str(usual), Config(channels=channels))
