"""The study of the Lyman-alpha forest: all of its parts at a tiny size, with interruptions between and within them."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from analysis.evaluation import results
from analysis.evaluation.tables import spread
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
    volumes["again"] = {"like": "z = 3", "held_out": {"grid": 16, "seeds": [12]}}  # no new box, and no new evaluation
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
    assert np.shape(block["measures"]["PDF distance, FGPA"]["values"]) == (1, 1)
    forest.main(arguments)
    assert len(started) == 12, "a box and its prediction, to measure their seconds"
    assert json.loads((tmp_path / "forest.json").read_text())["seconds of a box"].keys() == {"simulation", "prediction"}
    assert sorted(set(evaluated)) == sorted([*evaluated[:2], evaluated[3]])
    assert len(evaluated) == 4
    text = (tmp_path / "forest.md").read_text()
    assert text in capsys.readouterr().out
    assert "z = 3: n = 2 pairs" in text
    rows = [line for line in text.splitlines() if line.startswith("| PDF distance")]
    assert ["| 7.00 |" in line for line in rows] == [True, False, True, False], "at z = 3 only; the last row has ratios"
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")


def rows(**measures: Any) -> Any:
    """Rows by method, of values [networks, boxes] of the prediction, and [1, boxes] of all baselines."""
    methods = dict(zip(forest.METHODS, [measures["values"][0], *[measures["values"][1]] * 3], strict=True))
    spreads = {f"{measures['label']}, {name}": spread(np.ravel(part), 2) for name, part in methods.items()}
    return forest.by_method({"measures": spreads, forest.TRUTH: {measures["label"]: {"mean": 0.001, "n": 1}}})


def test_the_best_method_is_bold_and_deviations_over_boxes_and_networks_are_separate() -> None:
    """A baseline counts once per box; the truth's own error is no method."""
    found = rows(label="P1D error, low", values=[[[0.01, 0.03], [0.05, 0.07]], [[0.01, 0.03]]])
    boxes, networks = (f"{100 * math.sqrt(2) * half:.2f}" for half in (0.01, 0.02))
    cells = f"4.00 ± {boxes} ± {networks}", f"**2.00 ± {boxes}**", *[f"2.00 ± {boxes}"] * 2, "0.10", "even"
    assert forest.block_table(found).splitlines()[2:] == [f"| P1D error, low | {' | '.join(cells)} |"]
    assert forest.gains(found["P1D error, low"]) == ["0.50", "0.50"]


@pytest.mark.parametrize(
    ("label", "baseline", "expected"),
    [
        ("PDF distance", [0.25, 0.35], "won"),
        ("PDF distance", [0.02, 0.12], "lost"),
        ("PDF distance", [0.12, 0.26], "even"),
        ("PDF distance", [0.17, 0.37], "ahead"),
        (f"mean flux{forest.RATIO}", [0.5, 1.5], "lost"),
        (f"mean flux{forest.RATIO}", [-0.2, -0.1], "won"),
    ],
)
def test_a_row_is_lost_beyond_two_standard_errors(label: str, baseline: list[float], expected: str) -> None:
    """Networks and boxes pair by pair: errors of 0.2 and 0.3, or ratios that are 0.8 and 0.7 away from 1."""
    values = rows(label=label, values=[[[0.2, 0.3], [0.22, 0.28]], [baseline]])
    assert forest.outcome(values[label], label) == expected


def test_errors_of_power_are_counted_in_those_of_a_survey() -> None:
    """With twice the target's power everywhere, Δχ² is the sum of (target's power / error)² over DESI's bins."""
    bins = [(k, error) for z, k, error in forest.DESI if z == 3 and 0.003 <= k <= 0.04]
    k = np.geomspace(0.003, 0.08, 50)
    power = 3 / k**0.5
    fields = {name: SimpleNamespace(power=factor * power) for name, factor in ((forest.TARGET, 1), ("twice", 2))}
    flux: Any = SimpleNamespace(redshift=3.0, k=k, fields=fields, ratios={"twice": np.full(50, 2.0)})
    expected = sum((3 / place**0.5 / error) ** 2 for place, error in bins)
    assert forest.chi_squared(flux, "twice") == {forest.CHI_SQUARED: pytest.approx(expected)}
    flux.redshift = 4.0
    assert forest.chi_squared(flux, "twice") == {}


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="torch sees no GPU, which --size full needs"):
        forest.main(["--size=full", f"--runs={tmp_path}"])
