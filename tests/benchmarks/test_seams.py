"""benchmarks/seams.py: errors near window faces, and predictions of shifted and other grids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import train
from benchmarks import seams
from utils.inference.sliding_window import Slab
from utils.inference.window_grid import build_window_grid


@pytest.fixture(scope="module")
def run(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train.main(
        ["--config=test", *data_flags, f"--set=expdir={folder}", "--num_epochs=1", "--set=report_pictures=false"]
    )
    return folder / "test/1ranks/00"


def test_the_result_compares_five_grids_with_the_first(run: Path, tmp_path: Path, volume_file: Any) -> None:
    box = volume_file(tmp_path / "box.h5", seed=7)
    seams.main([f"--checkpoint={run}", f"--input={box}", f"--output={tmp_path}", "--device=cpu", "--window=8"])
    result = json.loads((tmp_path / "seams.json").read_text())
    assert result["provenance"]["git_commit"]
    first, *others = result["grids"]
    assert first["name"] == "as predicted"
    assert first["difference_to_first"] == 0
    assert 0 < first["l1"] < 1
    assert len({each["windows"] for each in result["grids"]}) == 4, "the shifted grid is the first one"
    assert len(others) == 4
    assert all(0 < each["difference_to_first"] < 2 * first["l1"] for each in others)


def test_a_missing_checkpoint_is_one_line(tmp_path: Path, volume_file: Any, capfd: Any) -> None:
    box = volume_file(tmp_path / "box.h5")
    with pytest.raises(SystemExit) as stop:
        seams.main([f"--checkpoint={tmp_path / 'none'}", f"--input={box}", f"--output={tmp_path}", "--device=cpu"])
    assert stop.value.code == 2
    assert "no such file" in capfd.readouterr().err
    assert not (tmp_path / "seams.json").exists()


def test_seam_error_separates_cells_near_faces_from_the_others() -> None:
    grid = build_window_grid((16, 16, 16), 8, 0)
    near = seams.near_faces(grid)
    predicted = torch.from_numpy(np.where(near, 3.0, 1.0)).expand(2, 16, 16, 16)
    target, errors = torch.zeros(2, 16, 16, 16), seams.SeamError(grid)
    for start in (0, 8):
        planes = slice(start, start + 8)
        slab = Slab(0, start, target[:, planes], predicted[:, planes])
        errors.add(slab, target[:, planes], target[:, planes].numpy())
    found = errors.results()
    assert found["l1_near_faces_over_elsewhere"] == pytest.approx(3)
    assert found["l1"] == found["difference_to_first"] == pytest.approx(predicted.mean().item())
    everywhere = seams.SeamError(build_window_grid((4, 4, 4), 2, 0))
    everywhere.add(Slab(0, 0, target[:, :4, :4, :4], predicted[:, :4, :4, :4]), target[:, :4, :4, :4])
    assert everywhere.results()["l1_near_faces_over_elsewhere"] is None, "no cell is elsewhere"


def test_shifted_planes_are_those_of_a_rolled_volume(tmp_path: Path, volume_file: Any) -> None:
    with h5py.File(volume_file(tmp_path / "box.h5")) as file:
        volume = file["Nbody"][:]
    read = seams.shifted(lambda start, stop: volume[:, start:stop], 5, volume.shape[1:])
    rolled = np.roll(volume, (-5, -5, -5), axis=(1, 2, 3))
    for start, stop in ((0, 4), (9, 14), (12, 16)):
        np.testing.assert_array_equal(read(start, stop), rolled[:, start:stop])
