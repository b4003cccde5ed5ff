"""Fields that the project does not know, from import to report, by commands and from Python; docs/data.md, Channels."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from sample_results import draw_nothing
from volume_files import smooth_field

import evaluate
import predict
import train
from analysis.inference import notebook
from utils.data import symmetry
from utils.volumes import import_volume

SIDE = 16
VECTOR = [f"B_{axis}" for axis in "xyz"]


def write_snapshot(folder: Path, seed: int) -> Path:
    """Raw NumPy fields: a density, a gas pressure that follows it, a vector, and a mass that may be zero."""
    folder.mkdir()
    smooth = smooth_field(1, SIDE, np.random.default_rng(seed))[0]
    density = np.exp(smooth / smooth.std())
    fields = {"dark_matter_density": density, "P": 1e-9 * density**1.7, "HI": np.maximum(smooth, 0)}
    fields |= {name: 1e-6 * np.gradient(density, axis=axis) for axis, name in enumerate(VECTOR)}
    for name, values in fields.items():
        np.save(folder / f"{name}.npy", values.astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run on volumes with a vector before other targets, of which no quantity is known."""
    folder = tmp_path_factory.mktemp("own")
    boxes = [write_snapshot(folder / name, seed) for seed, name in enumerate(("first", "second"))]
    flags = [f"--input={boxes[0]}", f"--validation={boxes[1]}", f"--output={folder / 'box.h5'}", "--for=cpu"]
    flags += [f"--field=B={','.join(VECTOR)}", "--field=pressure=P", "--field=HI mass=HI", "--unit=pressure=erg/cm3"]
    import_volume.main(flags)
    sizes = {"network.width": 4, "network.scales": 2, "data_size": 8, "Nsamples": 16, "Nsamples_val": 8}
    sizes |= {"num_epochs": 1, "device": "cpu", "report_pictures": "false", "optimizer.name": "adam", "expdir": folder}
    train.main([f"--yaml_config={folder / 'box.yaml'}", *(f"--set={key}={value}" for key, value in sizes.items())])
    return folder / "box" / "1ranks" / "00"


def test_a_run_on_own_fields_predicts_and_is_evaluated(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    box, output = run.parents[2] / "box_val.h5", tmp_path / "gas.h5"
    common = [f"--checkpoint={run}", f"--input={box}", "--device=cpu"]
    predict.main([*common, f"--output={output}", "--physical"])
    network = notebook.load(run, "cpu")
    names = [*(f"B {axis}" for axis in "xyz"), "pressure", "HI mass"]
    assert [channel.name for channel in network.channels[1]] == names
    assert [channel.name for channel in network.channels[0]] == ["dark-matter density"]
    assert [channel.is_log for channel in network.channels[1]] == [False, False, False, True, False]
    assert network.config.vectors == ([], [[0, 1, 2]])
    with h5py.File(output) as gas, h5py.File(box) as truth:
        units = ["unit of the file"] * 3 + ["erg/cm3", "unit of the file"]
        assert gas["Hydro_physical"].attrs["units"].tolist() == units
        assert gas["Hydro"].attrs["channels"].tolist() == names
        pressure = network.channels[1][3].to_physical(truth["Hydro"][3].astype(np.float64))
    np.testing.assert_allclose(pressure, np.load(run.parents[2] / "second/P.npy"), rtol=1e-5)
    draw_nothing(monkeypatch)
    evaluate.main([*common, f"--output={tmp_path / 'report'}", "--symmetries=8"])
    written = json.loads((tmp_path / "report/evaluation.json").read_text())
    assert [*written["spectra"]] == ["B", "pressure", "HI mass"]
    assert all(f"Evaluation L1/{name}" in written["scalars"] for name in names)


def test_a_network_of_unknown_vectors_is_equivariant_after_the_mean_over_symmetries(run: Path) -> None:
    """The vector is turned with the box, at whatever place it is."""
    network = notebook.load(run, "cpu")
    fields = notebook.fields(run.parents[2] / "box_val.h5", "Nbody", network.channels[0])
    turned = {name: np.ascontiguousarray(symmetry.move_axes(field, 29)) for name, field in fields.items()}
    options: dict[str, Any] = {"symmetries": 48, "window": 8, "overlap": 4}
    before, after = (notebook.predict(network, given, **options) for given in (fields, turned))
    stacked = torch.stack([torch.from_numpy(values) for values in before.values()])
    tables = [torch.from_numpy(table) for table in symmetry.channel_table(5, network.config.vectors[1], "full")]
    expected = symmetry.apply_on_device(stacked, 29, *tables)
    for found, wanted, channel in zip(after.values(), expected.numpy(), network.channels[1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-3 * np.abs(wanted).max(), err_msg=channel.name)
