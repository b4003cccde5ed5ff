"""Inputs unlike those of the training are named, by channel, wherever a network meets them; others are not."""

import json
import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import messages
from trainings import TOP
from volume_files import SIMULATED, smooth_field, write_volume

import predict
import train
from utils.config import Config
from utils.data import symmetry
from utils.run.checkpoint import read_weights
from utils.volumes.hdf5 import open_volume
from utils.volumes.input_statistics import compare, crop_statistics, measure, training_statistics

VECTORS, CONFIG = [[1, 2, 3]], Config(data_size=8)


def flow(seed: int) -> np.ndarray:
    """A density and the velocity with minus its divergence, [4, 32, 32, 32]."""
    density = smooth_field(1, 32, np.random.default_rng(seed))[0]
    waves = np.stack(np.meshgrid(*3 * [2 * np.pi * np.fft.fftfreq(32)], indexing="ij"))
    square = (waves**2).sum(0) + (waves == 0).all(0)
    velocity = np.fft.ifftn(1j * waves * np.fft.fftn(density) / square, axes=(1, 2, 3)).real
    return np.stack([density, *velocity]).astype(np.float32)


def volume(path: Path, fields: np.ndarray) -> Any:
    write_volume(path, box=32)
    with h5py.File(path, "r+") as file:
        file["Nbody"][...] = fields
    return open_volume(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fields: fields, ""),
        (lambda fields: fields * [[[[1]]], [[[1]]], [[[2]]], [[[1]]]], "(dark-matter velocity y, "),
        (lambda fields: fields * [[[[0.5]]], [[[1]]], [[[1]]], [[[1]]]], "(dark-matter density, "),
        (lambda fields: fields * [[[[1]]], [[[-1]]], [[[-1]]], [[[-1]]]], ", slope on the density)"),
        (lambda fields: fields[[0, 3, 2, 1]], ", slope on the density)"),
        (lambda fields: fields[[0, 1, 3, 2]].transpose(0, 1, 3, 2), ""),  # a rotation and its vectors
    ],
)
def test_a_change_is_named_with_its_channel_and_another_volume_of_its_kind_is_not(
    tmp_path: Path, caplog: Any, change: Any, says: str
) -> None:
    caplog.set_level(logging.INFO)
    trained = training_statistics([volume(tmp_path / "train.h5", flow(1))], CONFIG)
    assert json.loads(json.dumps(trained)) == trained
    compare(trained, "other.h5", change(flow(2)), CONFIG)
    compare(None, "other.h5", None, CONFIG)  # a checkpoint of an earlier version
    (record,) = caplog.records
    assert (record.levelname, says in record.getMessage()) == ("WARNING" if says else "INFO", True)


def test_components_are_rotated_and_pooled() -> None:
    crop, rotated = flow(3)[:, :17, 8:25, 15:], 17  # of an odd side every second cell is the same from both ends
    sources, _ = symmetry.channel_table(4, VECTORS, "full")
    before, after = (
        crop_statistics(torch.from_numpy(fields.astype(np.float64)), VECTORS)
        for fields in (crop, symmetry.apply(crop, rotated, VECTORS))
    )
    assert set(sources[rotated]) == {0, 1, 2, 3} != {0}
    for name, values in before.items():
        torch.testing.assert_close(after[name], values[torch.from_numpy(sources[rotated])], msg=name)


def test_several_volumes_span_a_range_and_crops_that_are_not_finite_do_not_count(tmp_path: Path) -> None:
    fields = [flow(1), 2 * flow(2)]
    fields[0][0, 3, 4, 5] = np.nan
    files = [volume(tmp_path / f"{number}.h5", values) for number, values in enumerate(fields)]
    trained = training_statistics(files, CONFIG)["channels"]["dark-matter density"]["ln of the variance"]
    means = [float(measure("", values, 8, 32, CONFIG)["ln of the variance"][:, 0].mean()) for values in fields]
    assert trained[:2] == pytest.approx(means, rel=1e-4)
    assert means[0] < means[1]


def test_a_checkpoint_names_other_inputs_of_a_prediction(trained_run: Path, tmp_path: Path, capsys: Any) -> None:
    assert [*read_weights(trained_run)["input_statistics"]["channels"]] == [
        "dark-matter density",
        *(f"dark-matter velocity {axis}" for axis in "xyz"),
    ]
    for factor, level in ((1, "INFO"), (8, "WARNING")):
        box = write_volume(tmp_path / "box.h5", seed=3, **SIMULATED)
        with h5py.File(box, "r+") as file:
            file["Nbody"][1:] *= factor
        flags = [f"--checkpoint={trained_run}", f"--input={box}", f"--output={tmp_path / 'gas.h5'}", "--device=cpu"]
        predict.main([*flags, "--overwrite"])
        (line,) = (line for line in messages(capsys.readouterr().err, level) if "from those of the training" in line)
        assert line.startswith(f"{box}: the inputs are ")


def test_weights_of_other_data_and_volumes_that_state_other_simulations_are_named(
    trained_run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(TOP)
    stated = {"early": {"redshift": 3.0}, "late": {"redshift": 2.0}, "valid": {"redshift": 2.0, "cosmology_H0": 72.0}}
    early, late, valid = (
        write_volume(tmp_path / f"{name}.h5", seed=seed, **{"cosmology_H0": 67.0, **values})
        for seed, (name, values) in enumerate(stated.items())
    )
    flags = ["--config=test", "--set=device=cpu", f"--set=expdir={tmp_path}", f"--init_from={trained_run}"]
    train.main([*flags, f"--set=train_path=[{early},{late}]", f"--set=val_path={valid}", "--preflight"])
    output = capsys.readouterr().out
    for part in (
        *(
            f"{trained_run} was trained on other channels: this run has {kind} velocity x value / (900 km/s) instead"
            for kind in ("dark-matter", "gas")
        ),
        *(f"preflight: {path}: the inputs are " for path in (early, late, valid)),
        "of crops from those of the training (",  # of the validation data
        f"{valid} differs from the training data: cosmology_H0 72.0 instead of 67.0;",
        "differ in what the network does not see: redshift 2 to 3; set network.conditions=[redshift]\n",
    ):
        assert output.count(part) == 1, part
