"""The record: row 0 by a stand-in for the tutorial's program, rows by this one, and the newest row again."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.study import LOSS, STUDIES, Condition, Study
from utils.errors import UserError


def test_rows_count_until_the_goal_and_the_newest_runs_again(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_forked: Any, data_flags: list[str], capsys: Any
) -> None:
    files = dict(flag.removeprefix("--set=").split("=") for flag in data_flags)
    changes = {**files, "network.scales": 3, "Nsamples": 16, "Nsamples_val": 8, "num_epochs": 3}
    changes |= {"symmetries": "tutorial", "lr_schedule.shape": "constant"}
    changes |= {"report_baselines": False, "report_pictures": False, "log_noise_scale": False}
    # Row 0 diverges to values of -1 and 1, so that the others reach its loss at once.
    rates = {"same recipe": 10.0, "other": 1e-3}
    conditions = [Condition(name, "test", changes={**changes, "lr_schedule.start_lr": r}) for name, r in rates.items()]
    monkeypatch.setitem(STUDIES, "record", Study(conditions, seeds=2))
    options = [f"--output={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}"]
    with pytest.raises(UserError, match="has no goal yet: give --peer"):
        record.main(options)
    monkeypatch.setattr(sys, "argv", ["record.py", f"--peer={clone}", "--runs", str(clone)])
    record.main([*options, f"--peer={clone}"])
    written = json.loads((tmp_path / "out/record.json").read_text())
    zero, _, other = written["rows"]
    assert written["goal"] == zero["loss"]["mean"] == pytest.approx(sum(zero["loss"]["values"]) / 2)
    assert (zero["name"], zero["samples"]["values"], zero["reached"]) == (record.PEER, [48, 48], 2)
    assert other["samples"]["values"] == [0, 0]
    assert all(loss <= written["goal"] for loss in other["loss"]["values"])
    assert str(tmp_path) not in (tmp_path / "out/record.json").read_text().replace(files["train_path"], "")
    assert written["provenance"]["command"] == ["record.py", "--peer=DIR", "--runs", "DIR"]
    record.main([*options, "--seeds=1"])
    (again,) = json.loads((tmp_path / "out/record_again.json").read_text())["rows"]
    assert again["samples"]["values"] == other["samples"]["values"][:1]
    assert len(list((tmp_path / "runs").glob("test/1ranks/*"))) == 5
    assert "| 0 | other | 1 of 1 |" in capsys.readouterr().out


def test_a_row_is_compared_with_the_row_before_by_welchs_test() -> None:
    """t = -4.700 with 6.98 degrees of freedom. A row that does not reach the goal in all runs has no time."""
    runs = [[{"seconds": s, "samples": 1, "loss": 0.1} for s in seconds] for seconds in ([1, 2, 3, 4], [6, 8, 7, 9, 5])]
    before = record.row_of("b", runs[1], None)
    row = record.row_of("a", runs[0], before)
    assert row["p"] == pytest.approx(0.00111, rel=0.01)
    late, good = {LOSS: 0.6, "seconds": 1}, {LOSS: 0.5, "seconds": 2, "samples": 3}
    assert "seconds" not in record.row_of("c", [*runs[0], record.until(0.5, {"curve": [late]})], before)
    assert record.until(0.5, {"curve": [late, good]}) == {"seconds": 2, "samples": 3, "loss": 0.5}
