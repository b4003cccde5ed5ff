"""The table that compares runs: what differs, what came out, and one line for directories that it cannot compare."""

import csv
import json
import re
from pathlib import Path
from typing import Any

from log_lines import refusal
from trainings import TOP

from utils.config import Config, to_yaml
from utils.run import compare

DEMO = TOP / "example_logs" / "demo"


def make_run(run: Path, summary: Any = None, **values: Any) -> Path:
    """A run of two epochs of 10 steps. The last records, of another form as after an edit by hand, were a traceback."""
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(Config(**values), "small"))
    records: list[dict[str, float]] = [
        {"step": 0, "seconds": 1.0, "Loss/valid": 0.5},
        {"step": 10, "seconds": 30.0, "Loss/valid": 0.25},
        {"step": 10, "seconds": 30.5, "Avg iters per sec": 2.0},
        {"step": 15, "seconds": 34.0, "Step/loss": 0.1},
        {"step": 20, "seconds": 40.0, "Loss/valid": 0.375},
    ]
    edited = '{"step": 30, "seconds": 50.0, "Loss/valid": "x"}\n{"step": 30, "seconds": "x"}\n[]\n{"step": 2'
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + edited)
    (run / "provenance.json").write_text(json.dumps({"git_commit": "0123456789abcdef-dirty", "world_size": 4}))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def compared(capsys: Any, *runs: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The cells of each column by its first one, and the lines after the table."""
    compare.main([str(run) for run in runs])
    lines = capsys.readouterr().out.splitlines()
    cells = [re.split(" {2,}", line) for line in lines[: len(runs) + 1]]
    return {name: values for name, *values in zip(*cells, strict=True)}, lines[len(runs) + 1 :]


def test_keys_that_differ_come_before_the_results(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    first = make_run(tmp_path / "first", {"steps": 20}, seed=1, local_batch_size=3)
    second = make_run(tmp_path / "second", [], seed=2, channel_weights=[1.0, 2.0, 1.0, 1.0, 1.0])
    cells, (equal,) = compared(capsys, first, second)
    assert list(cells) == ["run", "final loss", "best loss", "seed", "channel_weights", "state"]
    assert cells["seed"] == ["1", "2"]
    assert cells["channel_weights"] == ["null", "[1.0, 2.0, 1.0, 1.0, 1.0]"]
    assert cells["state"] == ["finished", "no summary"]
    assert [cells[key] for key in ("final loss", "best loss")] == [["0.375000"] * 2, ["0.250000"] * 2]
    results = "steps 20, best step 10, samples/s 128.0, time 0:40, ranks 4, device -, torch -"
    assert equal == f"equal: {results}, commit 0123456789ab-dirty"
    assert compared(capsys, DEMO, second)[0]["final loss"] == ["0.004134", "0.375000"]


def test_a_line_of_the_table_is_no_wider_than_the_terminal(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Fixed: it had a column for each run, which four runs already filled."""
    runs = [make_run(tmp_path / str(n), seed=n, channel_weights=[1.0 + n] * 5, ema_decay=0.5) for n in range(9)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    cells, (equal, omitted) = compared(capsys, *(Path(run.name) for run in runs))
    assert list(cells) == ["run", "final loss", "best loss", "seed"]
    assert cells["run"] == cells["seed"] == [*map(str, range(9))]
    assert "best step 10, " in equal
    assert omitted == "not shown: channel_weights; --csv has all columns"


def test_losses_of_other_validation_data_get_a_warning(tmp_path: Path, capsys: Any) -> None:
    runs = [str(make_run(tmp_path / str(n), val_path=f"{n % 2}.h5", seed=n)) for n in range(3)]
    compare.main(runs[:2])
    assert "these losses cannot be compared, because of different val_path" in capsys.readouterr().err
    compare.main(runs[::2])
    assert capsys.readouterr().err == ""
    compare.main([str(make_run(tmp_path / f"own{n}", loss="my.Loss", loss_options={"factor": n})) for n in range(2)])
    assert "because of different loss_options" in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    line = refusal(compare.main, [str(DEMO), str(tmp_path)], capsys)
    assert f"{tmp_path} is not a run's directory and has none in it" in line


def test_the_runs_below_a_directory_are_sorted_by_final_or_best_loss(tmp_path: Path, capsys: Any) -> None:
    """Also as CSV. Folders of a run and other config.yaml are no runs. Fixed: a run without records was a traceback."""
    (tmp_path / "runs").mkdir()
    losses = {"a": [0.5, 0.2, 0.4], "b": [0.5, 0.35], "c": [], "d": [0.1, 0.3]}
    for name, values in losses.items():
        run = make_run(tmp_path / "runs" / name, seed=ord(name))
        records = [json.dumps({"step": step, "seconds": 1.0, "Loss/valid": loss}) for step, loss in enumerate(values)]
        (run / "metrics.jsonl").write_text("\n".join(records))
    make_run(tmp_path / "runs" / "a" / "wandb")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "config.yaml").write_text("no run")

    def order(*flags: str) -> list[str]:
        compare.main([str(tmp_path / "runs" / "b"), str(tmp_path / "runs"), "--csv", *flags])
        return [Path(row["run"]).name for row in csv.DictReader(capsys.readouterr().out.splitlines())]

    assert order() == ["d", "b", "a", "c"]
    assert order("-", "--sort=best") == ["d", "a", "b", "c"]
    assert order("-", "--sort=none") == ["b", "a", "c", "d"]
    file = tmp_path / "runs.csv"
    compare.main([str(tmp_path / "runs"), "--csv", str(file)])
    assert capsys.readouterr().out == ""
    first, *_, last = csv.DictReader(file.read_text().splitlines())
    assert (first["seed"], first["final validation loss"], first["best step"]) == ("100", "0.3", "0")
    assert (last["seed"], last["final validation loss"], last["ranks"]) == ("99", "", "4")
