"""A training run on two volumes that are not cubes, with evaluations of a third: its results, and how it resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import YAML, directory, last

import train
from utils.training import evaluations

BOXES = {"a": (16, 8, 12), "b": (8, 20, 9), "valid": (12, 8, 16)}


def test_a_training_on_two_volumes_resumes_with_moved_files_but_not_with_others(
    volume_file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, valid = (volume_file(tmp_path / f"{name}.h5", box, seed) for seed, (name, box) in enumerate(BOXES.items()))
    flags = [f"--set={key}=false" for key in ("report_pictures", "report_baselines")]
    flags += ["--set=loggers=[]", "--set=device=cpu", f"--set=expdir={tmp_path / 'runs'}"]

    def training(*volumes: Path, epochs: int = 2, evaluations: int = 0) -> None:
        data = [f"--set=train_path=[{','.join(map(str, volumes))}]", f"--set=val_path={valid}", "--resume"]
        length = [f"--num_epochs={epochs}", f"--set=evaluation.every_epochs={evaluations}"]
        train.main([f"--yaml_config={YAML}", "--config=test", *flags, *data, *length])

    training(a, b, epochs=1, evaluations=1)
    run = directory(tmp_path / "runs")
    shapes = {name: list(box) for name, box in BOXES.items()}
    assert last(run).weights["config"]["box_size"] == [[shapes["a"], shapes["b"]], [shapes["valid"]]]
    assert len(list((run / evaluations.FOLDER).iterdir())) == 1
    moved = [shutil.move(path, tmp_path / f"moved_{path.name}") for path in (a, b)]
    training(*moved)
    assert "differs from the data" not in (run / "out.log").read_text()
    assert last(run).state.epoch == 2
    capsys.readouterr()
    other = volume_file(tmp_path / "other.h5", (8, 20, 10))
    for volumes in (moved[::-1], moved[:1], [moved[0], other], [*moved, other]):
        with pytest.raises(SystemExit) as stop:
            training(*volumes, epochs=3)
        assert stop.value.code == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        assert f"was written by a run with box_size [[{shapes['a']}, {shapes['b']}], " in line
    assert last(run).state.epoch == 2
