"""evaluate.py from outside: its report agrees with the predicted file, and bad input ends in one line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import evaluate
import predict
import train
from utils.evaluation import figures, results


@pytest.fixture(scope="module")
def run(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train.main(
        ["--config=test", *data_flags, f"--set=expdir={folder}", "--num_epochs=1", "--set=report_pictures=false"]
    )
    return folder / "test/1GPU/00"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, volume_file: Any) -> Path:
    return volume_file(tmp_path_factory.mktemp("box") / "box.h5", seed=7)


@pytest.fixture(scope="module")
def report(run: Path, box: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose figures are made and not drawn; tests/evaluation/test_figures.py draws them."""
    output = tmp_path_factory.mktemp("reports") / "evaluation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "encoded", lambda figure: b"PNG" if figure.axes else b"")
        evaluate.main([f"--checkpoint={run}", f"--input={box}", f"--output={output}", "--device=cpu"])
    return output


def test_the_numbers_are_those_of_the_predicted_file(
    run: Path, box: Path, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same whether the network predicts or a file with its prediction is read."""
    monkeypatch.setattr(evaluate, "draw", lambda folder, *_: (folder / "report.html").write_text("drawn"))
    gas = tmp_path / "gas.h5"
    predict.main([f"--checkpoint={run}", f"--input={box}", f"--output={gas}", "--device=cpu"])
    with h5py.File(gas) as predicted, h5py.File(box) as true:
        by_hand = np.abs(predicted["Hydro"][:] - true["Hydro"][:]).mean((1, 2, 3), dtype=np.float64)
    found = results.load(report / "evaluation.npz")
    np.testing.assert_allclose(found.l1, by_hand, rtol=1e-5)
    evaluate.main([f"--prediction={gas}", f"--input={box}", f"--output={tmp_path / 'again'}", "--device=cpu"])
    again = results.load(tmp_path / "again" / "evaluation.npz")
    assert again.scalars() == pytest.approx(found.scalars(), rel=1e-5)
    assert again.about["prediction"] == str(gas)


def test_the_report_is_complete(report: Path, run: Path) -> None:
    pictures = {f"{name}.png" for name in ("slices", "spectra", "distributions", "plane")}
    assert {path.name for path in report.iterdir()} == {"report.html", "evaluation.json", "evaluation.npz", *pictures}
    assert {(report / name).read_bytes() for name in pictures} == {b"PNG"}
    summary = json.loads((report / "evaluation.json").read_text())
    found = results.load(report / "evaluation.npz")
    assert summary["scalars"] == pytest.approx(found.scalars())
    assert summary["about"]["checkpoint"].startswith(str(run.resolve()))
    assert summary["provenance"]["git_commit"]
    assert summary["spectra"].keys() == found.spectra.keys()
    written, spectrum = summary["spectra"]["velocity"].values(), found.spectra["velocity"]
    for values, measured in zip(written, (spectrum.k, spectrum.ratio, spectrum.correlation), strict=True):
        np.testing.assert_allclose(values, measured, rtol=1e-5)
    assert "gas velocity x" in (report / "report.html").read_text()


def test_other_tilings_are_compared_with_the_first(report: Path) -> None:
    first, *others = json.loads((report / "evaluation.json").read_text())["tilings"]
    error = results.load(report / "evaluation.npz").l1.mean()
    assert first["error"] == pytest.approx(error, rel=1e-5)
    assert len(others) == 4
    assert all(0 < each["difference"] < 2 * error for each in others)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*arguments, "--device=cpu"])
    assert stop.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_one_line_and_nothing_is_written(
    run: Path, box: Path, report: Path, tmp_path: Path, volume_file: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    larger, new = volume_file(tmp_path / "larger.h5", box=20), f"--output={tmp_path / 'new'}"
    for name in ("dark.h5", "nan.h5"):
        with h5py.File(tmp_path / name, "w") as file, h5py.File(box) as source:
            source.copy("Nbody", file)
            if name == "nan.h5":
                source.copy("Hydro", file)
                file["Hydro"][4, 1, 2, 3] = np.nan
    check, given = f"--checkpoint={run}", f"--input={box}"
    for says, arguments in (
        (f"{report} exists; give --overwrite", (check, given, f"--output={report}")),
        ("is a file; give the name of a directory", (check, given, f"--output={box}")),
        ("has no dataset Hydro", (check, f"--input={tmp_path / 'dark.h5'}", new)),
        ("(20, 20, 20) cells", (check, given, f"--target={larger}", new)),
        ("Hydro[4, 1, 2, 3] is nan", (check, f"--input={tmp_path / 'nan.h5'}", new)),
        ("one of the arguments --checkpoint --prediction", (given, new)),
        ("not allowed with", (check, "--prediction=x.h5", given, new)),
        ("no such file", (f"--checkpoint={tmp_path / 'none'}", given, new)),
        ("x.h5; predict.py makes one", (f"--prediction={tmp_path / 'x.h5'}", given, new)),
    ):
        assert says in refused(capfd, *arguments)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_that_is_not_a_report_is_never_replaced(
    run: Path, box: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite with the wrong directory would remove everything in it."""
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path}"]
    for flags in ([], ["--overwrite"]):
        assert "holds thesis.tex, which is of no report; give another" in refused(capfd, *command, *flags)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"

    def closed(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", closed)
    assert f"cannot write {tmp_path}: Permission denied; give another --output" in refused(capfd, *command)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system has no posix_fallocate")
def test_a_disk_without_room_is_reported_before_any_prediction(
    run: Path, box: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(evaluate, "painted", lambda *_: pytest.fail("the prediction has begun"))
    line = refused(capfd, f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path / 'new'}")
    assert "no room for the 0.0 GB of a prediction beside --output (No space left on device)" in line
    assert os.listdir(tmp_path) == []


def test_overwrite_replaces_a_report_and_one_tiling_makes_no_comparison(
    run: Path, box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "draw", lambda folder, *_: (folder / "report.html").write_text("drawn"))
    output = tmp_path / "evaluation"
    output.mkdir()
    (output / "plane.png").write_text("of an older report")
    command = [f"--checkpoint={run}", f"--input={box}", f"--output={output}", "--one_tiling", "--device=cpu"]
    evaluate.main([*command, "--overwrite"])
    assert {path.name for path in output.iterdir()} == {"report.html", "evaluation.json", "evaluation.npz"}
    assert len(json.loads((output / "evaluation.json").read_text())["tilings"]) == 1
