"""The command that judges a prediction: what it writes agrees with what is there, and bad input ends in one line."""

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
from utils.evaluation import results


@pytest.fixture(scope="module")
def run(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train.main(["--config=test", *data_flags, f"--set=expdir={folder}", "--num_epochs=1"])
    return folder / "test/1GPU/00"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, volume_file: Any) -> Path:
    return volume_file(tmp_path_factory.mktemp("box") / "box.h5", seed=7)


@pytest.fixture(scope="module")
def report(run: Path, box: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reports") / "evaluation"
    evaluate.main([f"--checkpoint={run}", f"--input={box}", f"--output={output}", "--device=cpu"])
    return output


def test_numbers_are_those_of_the_painted_file(run: Path, box: Path, report: Path, tmp_path: Path) -> None:
    """And the same whether the network paints or a file is read that it has painted."""
    gas = tmp_path / "gas.h5"
    predict.main([f"--checkpoint={run}", f"--input={box}", f"--output={gas}", "--device=cpu"])
    with h5py.File(gas) as painted, h5py.File(box) as true:
        by_hand = np.abs(painted["Hydro"][:] - true["Hydro"][:]).mean((1, 2, 3), dtype=np.float64)
    found = results.load(report / "evaluation.npz")
    np.testing.assert_allclose(found.l1, by_hand, rtol=1e-5)
    evaluate.main([f"--prediction={gas}", f"--input={box}", f"--output={tmp_path / 'again'}", "--device=cpu"])
    again = results.load(tmp_path / "again" / "evaluation.npz")
    assert again.scalars() == pytest.approx(found.scalars(), rel=1e-5)
    assert again.about["prediction"] == str(gas)


def test_the_report_is_whole(report: Path, run: Path) -> None:
    pictures = {f"{name}.png" for name in ("slices", "spectra", "distributions", "plane")}
    assert {path.name for path in report.iterdir()} == {"report.html", "evaluation.json", "evaluation.npz", *pictures}
    summary = json.loads((report / "evaluation.json").read_text())
    assert summary["scalars"] == pytest.approx(results.load(report / "evaluation.npz").scalars())
    assert summary["about"]["checkpoint"].startswith(str(run.resolve()))
    assert summary["provenance"]["git_commit"]
    found = results.load(report / "evaluation.npz").spectra
    assert summary["spectra"].keys() == found.keys()
    for name, spectrum in found.items():
        k, ratio, r = summary["spectra"][name].values()
        for told, measured in ((k, spectrum.k), (ratio, spectrum.ratio), (r, spectrum.correlation)):
            np.testing.assert_allclose(told, measured, rtol=1e-5)
    page = (report / "report.html").read_text()
    assert "not overlapping" in page
    assert "gas velocity x" in page


def test_other_tilings_are_held_against_the_first(report: Path) -> None:
    first, *others = json.loads((report / "evaluation.json").read_text())["tilings"]
    error = results.load(report / "evaluation.npz").l1.mean()
    assert (first["name"], first["difference"]) == ("as predicted", 0.0)
    assert first["error"] == pytest.approx(error, rel=1e-5)
    names = [each["name"] for each in others]
    assert names == ["moved by half a step", "tiles twice as large", "a quarter overlapping", "not overlapping"]
    assert all(0 < each["difference"] < 2 * error for each in others)


def test_a_moved_volume_is_rolled() -> None:
    whole = np.random.default_rng(0).random((2, 6, 5, 4))
    planes = evaluate.moved(lambda start, stop: whole[:, start:stop], 3, (6, 5, 4))
    rolled = np.roll(whole, (-3, -3, -3), axis=(1, 2, 3))
    for start, stop in ((0, 6), (1, 3), (2, 5), (4, 6)):
        np.testing.assert_array_equal(planes(start, stop), rolled[:, start:stop])


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that ends the command."""
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*arguments, "--device=cpu"])
    assert stop.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_told_in_one_line(
    run: Path, box: Path, report: Path, tmp_path: Path, volume_file: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    larger, new = volume_file(tmp_path / "larger.h5", box=20), f"--output={tmp_path / 'new'}"
    with h5py.File(tmp_path / "dark.h5", "w") as file, h5py.File(box) as source:
        source.copy("Nbody", file)
    with h5py.File(tmp_path / "nan.h5", "w") as file, h5py.File(box) as source:
        source.copy("Nbody", file)
        source.copy("Hydro", file)
        file["Hydro"][4, 1, 2, 3] = np.nan
    check, given = f"--checkpoint={run}", f"--input={box}"
    assert f"{report} exists; give --overwrite" in refused(capfd, check, given, f"--output={report}")
    assert "is a file; give the name of a directory" in refused(capfd, check, given, f"--output={box}")
    assert "has no dataset Hydro" in refused(capfd, check, f"--input={tmp_path / 'dark.h5'}", new)
    assert "(20, 20, 20) cells" in refused(capfd, check, given, f"--target={larger}", new)
    assert "Hydro[4, 1, 2, 3] is nan" in refused(capfd, check, f"--input={tmp_path / 'nan.h5'}", new)
    assert "one of the arguments --checkpoint --prediction" in refused(capfd, given, new)
    assert "not allowed with" in refused(capfd, check, "--prediction=x.h5", given, new)
    assert "no such file" in refused(capfd, f"--checkpoint={tmp_path / 'none'}", given, new)
    assert "x.h5; predict.py makes one" in refused(capfd, f"--prediction={tmp_path / 'x.h5'}", given, new)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_no_report_is_never_replaced(
    run: Path, box: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """--overwrite with the name of some other directory would remove all that is in it."""
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path}"]
    for flags in ([], ["--overwrite"]):
        assert "holds thesis.tex, which is of no report; give another" in refused(capfd, *command, *flags)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_directory_that_cannot_be_looked_into_is_one_line(
    run: Path, box: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", closed)
    line = refused(capfd, f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path}")
    assert f"cannot write {tmp_path}: Permission denied; give another --output" in line


def test_a_system_without_fallocate_evaluates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with open(tmp_path / "scratch", "w+b") as scratch:
        room = evaluate.room_for((2, 3, 4, 5), scratch)
        room[1, 2, 3, 4] = 7
        assert room.sum() == 7


def test_a_disk_without_room_is_told_before_the_work(
    run: Path, box: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(evaluate, "painted", lambda *_: pytest.fail("it has begun"))
    line = refused(capfd, f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path / 'new'}")
    assert "no room for the 0.0 GB of a prediction beside --output (No space left on device)" in line
    assert os.listdir(tmp_path) == []


def test_a_report_is_replaced_only_when_asked_to(
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
