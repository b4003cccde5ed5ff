"""docs/notebook.md: its code runs in another directory, and gives what the commands give."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from processes import TOP

import predict
from analysis.inference import notebook
from utils.errors import UserError
from utils.volumes.attributes import ARRAY, conditions_of


def test_the_page_runs_in_another_directory(trained_run: Path, tmp_path: Path) -> None:
    """With this checkout first on sys.path, in a process of its own."""
    pytest.importorskip("pandas")
    page = (TOP / "docs" / "notebook.md").read_text(encoding="utf-8")
    source = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    volume = trained_run.parents[2] / "val.h5"
    for old, new in {
        "/path/to/this/checkout": TOP,
        "runs/demo/2ranks/00": trained_run,
        "data/demo_val.h5": volume,
        "overlap=8": "overlap=2",
        "\narrays =": '\nraise SystemExit(f"{len(losses)} {corner.shape}")\narrays =',
    }.items():
        assert old in source
        source = source.replace(old, str(new))
    script = tmp_path / "page.py"
    script.write_text(source)
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    assert re.fullmatch(r"\d+ \(16, 16, 16\)", ran.stderr.splitlines()[-1]), ran.stderr


def test_predictions_from_files_and_arrays_equal_those_of_the_command(trained_run: Path, tmp_path: Path) -> None:
    volume, output = trained_run.parents[2] / "val.h5", tmp_path / "gas.h5"
    network, given = notebook.load(trained_run, "cpu"), ["--physical", "--device=cpu"]
    predict.main([f"--checkpoint={trained_run}", f"--input={volume}", f"--output={output}", *given])
    with h5py.File(output) as gas, h5py.File(volume) as box:
        expected, physical, inputs = gas["Hydro"][:], gas["Hydro_physical"][:], box["Nbody"][:]
        attributes = dict(box.attrs)
    predicted = notebook.predict(network, volume, physical=False)
    assert [*predicted] == [channel.name for channel in network.channels[1]]
    np.testing.assert_array_equal(np.stack([*predicted.values()]), expected)
    from_array = notebook.predict(network, inputs, attributes=attributes)
    np.testing.assert_array_equal(np.stack([*from_array.values()]), physical)
    named = notebook.fields(volume, "Nbody", network.channels[0])
    scaled = tmp_path / "scaled.h5"  # fixed: the network's transform gave other values
    with h5py.File(scaled, "w") as file:
        file["Nbody"] = inputs
        file.attrs["velocity_scale_km_s"] = 500.0
    velocity = notebook.fields(scaled, "Nbody", network.channels[0])["dark-matter velocity x"]
    np.testing.assert_allclose(velocity, 500 * inputs[1], rtol=1e-6)
    part = notebook.predict(network, named, (slice(4, 9), slice(None), slice(-3, None)))
    for found, whole in zip(part.values(), physical, strict=True):
        np.testing.assert_allclose(found, whole[4:9, :, -3:], rtol=1e-3, atol=1e-3)


def test_wrong_arrays_are_one_line(trained_run: Path) -> None:
    network, field = notebook.load(trained_run, "cpu"), np.ones((16, 16, 16))
    with pytest.raises(UserError, match="the arrays lack dark-matter velocity x, "):
        notebook.predict(network, {"dark-matter density": field})
    with pytest.raises(UserError, match=r"the array is \(16, 16, 16\), expected \(4, X, Y, Z\)"):
        notebook.predict(network, field)
    with pytest.raises(UserError, match="cells have a step"):  # fixed: values of no computation
        notebook.predict(network, np.ones((4, 16, 16, 16)), (slice(None, None, -1), slice(None), slice(None)))
    named = {channel.name: field for channel in network.channels[0]}
    with pytest.raises(UserError, match="the arrays have different shapes"):
        notebook.predict(network, named | {"dark-matter density": field[1:]})
    for key, value in (("periodic", "perhaps"), ("redshift", "three"), ("box_size_mpc_h", [5.0, 5.0, 6.0])):
        with pytest.raises(UserError, match=f"the array: .*({key}|not cubes)"):
            notebook.predict(network, named, attributes={key: value})
    conditioned = Mock(conditions=["redshift"])
    with pytest.raises(UserError, match=r"give attributes=\{'redshift': NUMBER\}"):
        conditions_of(conditioned, ARRAY, {})


def test_another_module_utils_is_named(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("")
    code = f"import utils, sys; sys.path.insert(0, {str(TOP)!r}); from analysis.inference import notebook"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert f"ImportError: another module utils ({tmp_path / 'utils.py'}) is imported; " in ran.stderr
