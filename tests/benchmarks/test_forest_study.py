"""The study of the Lyman-alpha forest: all of its parts at a tiny size, with interruptions between and within them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.evaluation import results
from benchmarks import common, forest
from benchmarks.study import STUDIES, Condition, Study
from utils.errors import UserError

SEEDS = {"train": [1], "valid": [2], "held_out": [11, 12]}
SIMULATION: dict[str, Any] = {part: {"grid": 16, "seeds": seeds} for part, seeds in SEEDS.items()}
SIMULATION |= {"redshift": 3.0, "cosmology": "planck18", "cell": 0.3125}
CHANGES = {"device": "cpu", "report_baselines": False, "report_pictures": False, "log_noise_scale": False}


class Interruption(BaseException):
    """Stands in for a signal."""


def test_an_interrupted_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, run_or_draw: Any
) -> None:
    """Each box is simulated once, a run resumes from its checkpoint, and each network is evaluated once on each box."""
    conditions = [
        Condition(name, "test", seeds=1, changes=CHANGES, boxes=[volume])
        for name, volume in (("near", "z = 3"), ("far", "z = 4"))
    ]
    volumes: dict[str, Any] = {"z = 3": {}, "z = 4": {"redshift": 4.0, "held_out": {"grid": 16, "seeds": [11]}}}
    monkeypatch.setitem(STUDIES, "forest", Study(conditions, seeds=1, simulation=SIMULATION, evaluate=volumes))
    started: list[str] = []
    evaluated: list[str] = []
    save = results.save

    def failure_of(command: Sequence[str], log: Path, **options: Any) -> str:
        started.append(next(word for word in command if word.startswith(("--output=", "--resume="))))
        reason: str = run_or_draw(command, log, **options)
        if log.name == "forest-0-seed0.log" and started[-1] == "--resume=no":
            (directory,) = tmp_path.glob("runs/test/*/forest-0-seed0")
            shutil.rmtree(directory / "checkpoints/step_00000016")
            (directory / "summary.json").unlink()
            raise Interruption
        return reason

    def save_or_stop(result: results.Results, path: Path) -> None:
        evaluated.append(f"{path.parent.name} {path.stem}")
        if len(evaluated) == 2:
            raise Interruption
        save(result, path)

    truth = {"cell (Mpc/h)": 0.3125, "measures": {"PDF distance": {"mean": 0.07, "n": 1}}, "P1D ratio": [1.0] * 8}
    (tmp_path / "convergence.json").write_text(json.dumps({"settings": {"redshift": 3.0}, "results": [truth]}))
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "failure_of", failure_of)
    monkeypatch.setattr(results, "save", save_or_stop)
    monkeypatch.setattr(forest, "LENGTHS", (0.2,))
    monkeypatch.setattr(forest, "relation", lambda *_: (1e4, 1.5))  # so little training may predict hot gas alone
    arguments = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path}"]
    with pytest.raises(Interruption):
        forest.main(arguments)
    assert len(started) == 8, "seven boxes and a run"
    with pytest.raises(Interruption):
        forest.main(arguments)
    assert [word.partition("=")[2].rpartition("/")[2] for word in started[8:]] == ["forest-0-seed0", "no"]
    written = json.loads((tmp_path / "forest.json").read_text())
    assert [run["condition"] for run in written["training"]] == ["near", "far"]
    assert [point["step"] for point in written["training"][0]["curve"]] == [0, 8, 16]
    (block,) = written["volumes"].values()
    assert block["measures"]["PDF distance, FGPA"]["n"] == 1
    forest.main(arguments)
    assert len(started) == 10
    assert sorted(set(evaluated)) == sorted([*evaluated[:2], evaluated[3]])
    assert len(evaluated) == 4
    text = (tmp_path / "forest.md").read_text()
    assert text in capsys.readouterr().out
    assert "z = 3: n = 2 pairs" in text
    rows = [line for line in text.splitlines() if line.startswith("| PDF distance")]
    assert [line.endswith("| 7.00 |") for line in rows] == [True, False, False]
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_method_of_a_row_is_bold() -> None:
    """It has the smallest error, or the ratio closest to 1; the truth's own error does not count."""
    values = {"P1D error, low": (0.02, 0.01, 0.03, 0.04), f"mean flux{forest.RATIO}": (0.95, 1.2, 0.9, 1.04)}
    measures = {
        f"{label}, {name}": {"mean": mean, "n": 1}
        for label, means in values.items()
        for name, mean in zip(forest.METHODS, means, strict=True)
    }
    measures[f"mean gas density{forest.RATIO}"] = {"mean": 0.96, "n": 1}
    truth = {"P1D error, low": {"mean": 0.001, "n": 1}}
    rows = forest.by_method({"measures": measures, forest.TRUTH: truth})
    assert forest.block_table(rows).splitlines()[2:] == [
        "| P1D error, low | 2.00 | **1.00** | 3.00 | 4.00 | 0.10 |",
        f"| mean flux{forest.RATIO} | 95.00 | 120.00 | 90.00 | **104.00** |  |",
        f"| mean gas density{forest.RATIO} | 96.00 |  |  |  |  |",
    ]
    assert forest.gains(rows["P1D error, low"]) == ["0.50", "0.50"]


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="torch sees no GPU, which --size full needs"):
        forest.main(["--size=full", f"--runs={tmp_path}"])
