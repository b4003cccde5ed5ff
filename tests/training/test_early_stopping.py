"""A training that stopped early is finished: its summary says why, and nothing resumes it unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainings import YAML, NoWaiting, directory

import train
from utils.evaluation import figures
from utils.evaluation.results import FOLDER


def test_a_run_that_stopped_early_is_finished(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two epochs is the last one, and evaluated as such."""
    NoWaiting().install(monkeypatch.setattr)
    monkeypatch.setattr(figures, "PICTURES", {})
    run, flags = (
        directory(tmp_path),
        [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={tmp_path}"],
    )
    flags += ["--set=early_stopping.min_delta=9", "--set=evaluation.every_epochs=5", "--set=report_baselines=false"]

    def start(*more: str) -> str:
        train.main([*flags, *more])
        return capsys.readouterr().err

    reason = "the validation loss has not improved by more than 9 for 1 epoch; the best was "
    assert f"Early stopping after epoch 1: {reason}" in start("--set=early_stopping.patience=1")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["early_stop"].startswith(reason)
    assert [path.name for path in (run / FOLDER).iterdir()] == ["step_00000008.npz"]
    nothing = "is the end of epoch 1, and early_stopping ended it; raise early_stopping.patience to extend"
    assert nothing in start("--set=early_stopping.patience=1", "--resume")
    (run / "summary.json").unlink()
    assert "The summary of this training is missing" in start("--set=early_stopping.patience=1")
    assert json.loads((run / "summary.json").read_text())["early_stop"] == summary["early_stop"]
    assert "Early stopping after epoch" not in start("--set=early_stopping.patience=2", "--resume")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["early_stop"]) == (16, None)
