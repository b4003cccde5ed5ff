"""evaluate.py: its report agrees with the predicted file, and bad input ends with one line."""

import errno
import html
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from log_lines import refusal
from sample_results import PNG, draw_nothing
from volume_files import write_volume

import evaluate
import predict
from analysis.evaluation import report, results
from analysis.evaluation.volume import VolumeFields
from analysis.inference.trained_network import TrainedNetwork
from simulation.simulate import main as simulate
from utils.run.checkpoint import Weights, read_weights
from utils.run.checkpoint import write as write_checkpoint
from utils.volumes.hdf5 import FieldReader


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volume(tmp_path_factory.mktemp("box") / "box.h5", seed=7)


@pytest.fixture(scope="module")
def written(trained_run: Path, box: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose figures are not rendered; tests/analysis/evaluation/test_report.py renders them."""
    output = tmp_path_factory.mktemp("reports") / "evaluation"
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        evaluate.main([f"--checkpoint={trained_run}", f"--input={box}", f"--output={output}", "--device=cpu"])
    return output


def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    monkeypatch.setattr(report, "page", lambda *_: "a page")


def test_results_agree_with_the_predicted_file(trained_run, box, written: Path, tmp_path: Path, monkeypatch) -> None:
    """Also results that are computed from the file, which states its channels."""
    without_page(monkeypatch)
    gas = tmp_path / "gas.h5"
    predict.main([f"--checkpoint={trained_run}", f"--input={box}", f"--output={gas}", "--device=cpu"])
    with h5py.File(gas) as predicted, h5py.File(box) as true:
        expected = np.abs(predicted["Hydro"][:] - true["Hydro"][:]).mean((1, 2, 3), dtype=np.float64)
    result = results.load(written / "evaluation.npz")
    np.testing.assert_allclose(result.l1, expected, rtol=1e-5)
    evaluate.main([f"--prediction={gas}", f"--input={box}", f"--output={tmp_path / 'again'}", "--device=cpu"])
    again = results.load(tmp_path / "again" / "evaluation.npz")
    assert again.scalars() == pytest.approx(result.scalars(), rel=1e-5, abs=1e-6)
    assert again.metadata["prediction"] == str(gas)
    assert again.channels == result.channels
    assert result.channels[1].scale == 500.0


def test_the_report_is_complete(written: Path, trained_run: Path) -> None:
    pictures = {f"{name}.png" for name in ("slices", "spectra", "distributions", "phase_diagram", "bispectrum")}
    assert {path.name for path in written.iterdir()} == {"report.html", "evaluation.json", "evaluation.npz", *pictures}
    assert {(written / name).read_bytes() for name in pictures} == {PNG}
    summary = json.loads((written / "evaluation.json").read_text())
    result = results.load(written / "evaluation.npz")
    assert summary["scalars"] == pytest.approx(result.scalars())
    assert summary["metadata"]["checkpoint"].startswith(str(trained_run.resolve()))
    assert summary["provenance"]["git_commit"]
    assert summary["spectra"].keys() == result.spectra.keys()
    stored, spectrum = summary["spectra"]["velocity"], result.spectra["velocity"]
    for values, measured in zip(stored.values(), (spectrum.k, spectrum.ratio, spectrum.correlation), strict=False):
        np.testing.assert_allclose(values, measured, rtol=1e-5)
    assert {f"k at {level}": k for level, k in spectrum.resolutions.items()}.items() <= stored.items()
    np.testing.assert_allclose(summary["bispectrum"]["predicted"], result.statistics["bispectrum"].predicted, rtol=1e-5)
    page = (written / "report.html").read_text()
    assert "gas velocity x" in page
    assert page.count("data:image/png;base64,") == 1 + len(pictures), "also the losses of the checkpoint's run"


def test_flux_of_a_simulated_box(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """From the simulation through predicted files to the report, without a network."""
    draw_nothing(monkeypatch)
    box, gas, output = (tmp_path / name for name in ("box.h5", "gas.h5", "report"))
    assert simulate([f"--output={box}", "--grid=12", "--box_size=2.4", "--n_steps=1", "--redshift=2"]) == 0
    with h5py.File(box) as true, h5py.File(gas, "w") as predicted:
        predicted.attrs.update(true.attrs)
        predicted["Hydro"] = true["Hydro"][:]
    command = [f"--prediction={gas}", f"--input={box}", "--device=cpu"]
    evaluate.main([*command, f"--output={output}", "--mean_flux=0.8", "--sightlines=64", "--pressure_smoothing=0.2"])
    flux = results.load(output / "evaluation.npz").flux
    assert (flux.redshift, flux.mean_flux, flux.smoothing, flux.sightlines) == (2.0, 0.8, 0.2, [64] * 3)
    assert flux.power_error("prediction") == 0 < flux.power_error("FGPA")
    assert flux.velocity[1] == pytest.approx(0.2 * 301.6 / 3, rel=1e-3)  # H(z = 2) is 301.6 km/s per Mpc/h
    assert (flux.p3d_k.size, flux.fields["prediction"].correlation) == (0, pytest.approx(1)), "64 of 144 sight-lines"
    assert (output / "flux.png").exists()
    summary = json.loads((output / "evaluation.json").read_text())["flux"]
    np.testing.assert_allclose(summary["fields"]["FGPA"]["power"], flux.fields["FGPA"].power, rtol=1e-5)
    without_page(monkeypatch)
    for source in (box, "/moved/box.h5", "/data/other.h5"):
        capsys.readouterr()
        with h5py.File(gas, "r+") as predicted:
            predicted.attrs["input"] = str(source)
        evaluate.main([*command, f"--output={tmp_path / 'none'}", "--no_flux", "--overwrite"])
        warns = f"gas.h5 was predicted from {source}, not from {box}" in capsys.readouterr().err
        assert warns == (source == "/data/other.h5"), "fixed: errors of a network on other gas were reported"
    with h5py.File(gas, "r+") as predicted:
        predicted.attrs.update({"input": str(box), "input_digest": "that of an earlier file"})
    evaluate.main([*command, f"--output={tmp_path / 'none'}", "--no_flux", "--overwrite", f"--fitted_on={box}"])
    lines = capsys.readouterr().err
    assert f"{box} has changed since {gas} was predicted from it" in lines, "fixed: silent"
    assert f"fitted_on: {box} is the evaluated volume" in lines
    assert results.load(tmp_path / "none" / "evaluation.npz").flux is None
    capsys.readouterr()
    command += [f"--output={tmp_path / 'new'}"]
    assert "mean_flux must be less than 1" in refusal(evaluate.main, [*command, "--mean_flux=1.5"], capsys)
    with h5py.File(gas, "r+") as predicted:
        predicted.attrs["seed"] = 99
    line = refusal(evaluate.main, command, capsys)
    assert f"gas.h5 is a prediction of another box than {box}: seed 99 instead of 0; give the files of one box" in line


@pytest.fixture(scope="module")
def seen(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    config, folder = read_weights(trained_run)["config"], tmp_path_factory.mktemp("seen")
    return [Path(shutil.copy(config[f"{name}_path"], folder / f"{name}.h5")) for name in ("train", "val")]


OTHER_REDSHIFT = "the box differs from the training data: redshift 4.0 instead of 2.0; see docs/generalization.md"


def other_redshift(box: Path, folder: Path) -> Path:
    with h5py.File(shutil.copy(box, folder / "redshift.h5"), "a") as file:
        file.attrs["redshift"] = 4.0
        return Path(file.filename)


def test_several_networks_and_boxes(trained_run: Path, box, seen, tmp_path: Path, capsys: Any, monkeypatch) -> None:
    """Means and deviations are those of the single reports. Notes name boxes seen in training and other redshifts."""
    without_page(monkeypatch)
    networks, boxes = sorted((trained_run / "checkpoints").glob("step_*")), [other_redshift(box, tmp_path), *seen]
    output = tmp_path / "all"
    evaluate.main(["--checkpoint", *map(str, networks), "--input", *map(str, boxes), f"--output={output}"])
    lines, summary = capsys.readouterr().err, json.loads((output / "summary.json").read_text())
    parts = summary["evaluations"]
    pairs = [(part["checkpoint"], part["input"]) for part in parts]
    assert pairs == [(str(network), str(path)) for network in networks for path in boxes]
    reports = [results.load((output / part["report"]).with_name("evaluation.npz")) for part in parts]
    l1 = np.array([report.l1.mean() for report in reports]).reshape(2, 3)
    assert len({*l1.flat}) == 6
    measured = summary["measures"]["Evaluation L1/all channels"]
    assert measured.pop("values") == l1.tolist()
    deviations = {f"stdev over {name}": l1.mean(axis).std(ddof=1) for axis, name in enumerate(("boxes", "networks"))}
    assert measured == pytest.approx({"mean": l1.mean(), **deviations})
    page = (output / "report.html").read_text()
    for place, part in enumerate(parts):
        notes = " ".join(part["notes"])
        assert ("is training data" in notes, "validation data" in notes) == (place % 3 == 1, place % 3 == 2)
        assert ("the calibration was fitted to its gas density" in notes) == (place % 3 == 2)
        assert "(same content)" in notes or place % 3 == 0
        assert (OTHER_REDSHIFT in notes) == (place % 3 == 0)
        assert html.escape(notes) in page
        assert notes in lines
        assert f'<a href="{part["report"]}">' in page
    assert f"<td>{measured['mean']:.4g}</td><td>{measured['stdev over boxes']:.4g}</td>" in page


def test_files_of_old_checkpoints_are_recognized_by_their_path(trained_run: Path, seen: list[Path]) -> None:
    trained = TrainedNetwork.load(trained_run, torch.device("cpu"))
    old = replace(trained, known=Weights({}, {}))
    for name, copy in zip(("training", "validation"), seen, strict=True):
        path = trained.config.paths({"training": "train_path", "validation": "val_path"}[name])[0]
        link = Path(f"{copy}_link.h5")
        with h5py.File(link, "w") as file:  # fixed: it was unknown
            file["Nbody"] = h5py.ExternalLink(copy, "Nbody")
        for same in (copy, path, link):
            assert trained.use_of(FieldReader(str(same), "Nbody")) == f"{name} data of the network (same content)"
        assert old.use_of(FieldReader(os.path.relpath(path), "Nbody")) == f"{name} data of the network (same path)"
        assert old.use_of(FieldReader(str(copy), "Nbody")) == ""
    volume = Mock(simulation={"redshift": 4.0, "density_floor_of_mean": 0.01})
    known = Weights({}, {}, simulation={"redshift": 2.0, "density_floor_of_mean": 0.001})
    assert replace(trained, known=known).differences(volume) == "redshift 4.0 instead of 2.0"


def test_a_predicted_file_states_calibration_and_use(trained_run, box, seen, tmp_path, capsys, monkeypatch) -> None:
    draw_nothing(monkeypatch)
    factor, output = read_weights(trained_run)["density_factor"], tmp_path / "report"
    other = other_redshift(box, tmp_path), "not calibrated", "", "--no_calibration"
    for path, state, use, *flags in ((seen[1], f"calibrated by {factor:.4f}", "validation data"), other):
        given = [f"--input={path}", "--overwrite"]
        predict.main([f"--checkpoint={trained_run}", *given, f"--output={tmp_path / 'gas.h5'}", *flags])
        capsys.readouterr()
        evaluate.main([f"--prediction={tmp_path / 'gas.h5'}", *given, f"--output={output}"])
        page, lines = html.unescape((output / "report.html").read_text()), capsys.readouterr().err
        metadata = json.loads((output / "evaluation.json").read_text())["metadata"]
        assert metadata["density_factor"] == (None if flags else factor)
        for text in (page, lines):
            assert f"mean gas density / target's, {state}" in text
            assert f"the box is {use}" in text if use else "the box is" not in text
            assert (OTHER_REDSHIFT in text) == (not use)


def test_bad_input_is_one_line_and_nothing_is_written(trained_run, box, written, tmp_path, capsys, monkeypatch) -> None:
    larger, new = write_volume(tmp_path / "larger.h5", box=20), f"--output={tmp_path / 'new'}"
    with h5py.File(box) as source:
        nbody, hydro = source["Nbody"][:], source["Hydro"][:]
    spoilt = hydro.copy()
    spoilt[4, 1, 2, 3] = np.nan
    for name, values in (("nan", spoilt), ("zero", 0 * hydro), ("physical", 1000 * hydro)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["Nbody"], file["Hydro"] = nbody, values
    checkpoint, given = f"--checkpoint={trained_run}", f"--input={box}"
    zero, physical, every = tmp_path / "zero.h5", tmp_path / "physical.h5", written.parent / "all"
    (every / "zero").mkdir(parents=True)
    (every / "zero" / "report.html").touch()
    content = read_weights(trained_run)
    content["config"]["channels"]["targets"][4]["center"] = 9.0
    write_checkpoint(every / "other", content, {})
    other = "--checkpoint", str(trained_run), str(every / "other")
    for message, *arguments in (
        (f"{written} has a report; give --overwrite", checkpoint, given, f"--output={written}"),
        ("is a file; give the name of a directory", checkpoint, given, f"--output={box}"),
        ("(20, 20, 20) cells", f"--prediction={larger}", given, new),
        ("two of the paths give a directory of the same name", checkpoint, "--input", "n/b-c.h5", "n/b/c.h5", new),
        ("Hydro[4, 1, 2, 3] is nan", checkpoint, f"--input={tmp_path / 'nan.h5'}", new),
        (f"{box} is given twice; give each path once", checkpoint, "--input", str(box), os.path.relpath(box), new),
        (f"{trained_run} is given twice; give", "--checkpoint", str(trained_run), str(trained_run), given, new),
        (f"{box} is given twice; give each path once", f"--prediction={box}", given, new),
        ("--symmetries has no effect on a", f"--prediction={larger}", given, new, "--symmetries=8"),
        # Once these ended with "R² nan" and exit code 0. Training refuses them as well.
        ("zero.h5: Hydro is 0 everywhere; write", checkpoint, f"--input={zero}", new),
        ("zero.h5: Hydro is 0 everywhere; write", checkpoint, "--input", str(box), str(zero), new),
        ("channels or transforms of ", *other, given, new),
        ("all/zero has a report; give --overwrite", checkpoint, "--input", str(zero), str(larger), f"--output={every}"),
        ("--prediction is that of one box; give one", f"--prediction={larger}", "--input", str(box), str(zero), new),
        ("zero.h5: Hydro is 0 everywhere; write", f"--prediction={zero}", given, new),
        ("physical.h5: Hydro[0] holds physical values", checkpoint, f"--input={physical}", new),
    ):
        assert message in refusal(evaluate.main, [*arguments, "--device=cpu"], capsys)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["larger", "nan", "physical", "zero"]
    without_page(monkeypatch)
    evaluate.main([f"--prediction={physical}", given, new, "--device=cpu"])
    assert (tmp_path / "new").exists(), "a stored prediction may hold physical values"


def test_a_report_replaces_another_unless_the_disk_is_full(trained_run, box, tmp_path, capsys, monkeypatch) -> None:
    """Other files stay. A prediction may take hours, so the space is checked before. The box is not periodic."""
    without_page(monkeypatch)
    output = tmp_path / "evaluation"
    output.mkdir()
    for name in ("report.html", "thesis.tex"):
        (output / name).write_text("earlier")
    command = [f"--checkpoint={trained_run}", f"--input={box}", f"--output={output}", "--device=cpu", "--overwrite"]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        patched.setattr(VolumeFields, "evaluate", None)
        assert "free and the output needs 1.0 MB; free some space" in refusal(evaluate.main, command, capsys)
    with monkeypatch.context() as patched:
        patched.setattr(results, "save", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert "No space left on device; free some space" in refusal(evaluate.main, command, capsys)
    assert (output / "report.html").read_text() == "earlier"
    with monkeypatch.context() as patched:
        patched.setattr(report.drawing, "draw", Mock(side_effect=ValueError("killed")))
        with pytest.raises(ValueError, match="killed"):  # fixed: it stayed with other results
            evaluate.main(command)
    assert not (output / "report.html").exists()
    evaluate.main([*command, "--not_periodic", "--window=8", "--overlap=0"])
    files = {"evaluation.json", "evaluation.npz", "report.html", "thesis.tex"}
    assert {name for name in os.listdir(output) if not name.endswith(".png")} == files
    assert (output / "report.html").read_text() == "a page"
    assert "the volume is not periodic" in capsys.readouterr().err
    metadata = results.load(output / "evaluation.npz").metadata
    assert "the volume is not periodic" in metadata["note"]
    assert metadata["windows"].startswith("8 windows of 8³ cells")
