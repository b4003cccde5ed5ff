"""The ladder keeps what pays, survives what fails, ends in time, and its commands are the trainings it measured."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, ladder
from benchmarks.common import this_machine
from benchmarks.ladder import CPU_RUNGS, GPU_RUNGS, Machine, Rung, best_of, climb, command, duel, markdown
from benchmarks.loaders import make_file
from utils import cli
from utils import config as configs

PEAK = {"float32": 2.0, "tf32": 4.0, "bfloat16": 8.0, "float16": 8.0}


def options(folder: Path, **changes) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ladder.add_options(parser)
    small = ["--batch=2", "--crop=8", "--width=4", "--box=16", "--valid_box=16", "--seconds=0.02", "--warmup_steps=3"]
    make_file(folder / "benchmark_16.h5", 16)
    parsed = parser.parse_args([*small, f"--data={folder / 'benchmark_16.h5'}"])
    return argparse.Namespace(**{**vars(parsed), **changes})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = options(tmp_path)
    ladder.settle(settings)
    with closing(Machine(settings, this_machine())) as built:
        yield built


def rates(synthetic: float, full: float) -> dict:
    def told(value: float) -> dict:
        return {"median": value, "min": 0.9 * value, "max": 1.1 * value}

    return {
        "SYNTHETIC": told(synthetic),
        "FULL": told(full),
        "FULL / SYNTHETIC": full / synthetic,
        "TFLOP/s": synthetic / 100,
        "loss of the warm-up steps": [0.5, 0.4, 0.3],
        "gradient norm of the warm-up steps": [3.0, 2.0, 1.0],
    }


def climbed(monkeypatch, rungs: list[tuple[Rung, object]], seconds: float = 60) -> tuple[list[dict], list[tuple]]:
    """Results and what was measured, with measurements that are given."""
    answers, seen = iter(answer for _, answer in rungs), []

    def measure(machine, changes, graph):
        seen.append((dict(changes), graph))
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return rates(*answer)

    monkeypatch.setattr(ladder, "measure", measure)
    results = climb(FakeMachine(), [rung for rung, _ in rungs], time.perf_counter() + seconds, lambda _: None)
    return results, seen


class FakeMachine:
    options = argparse.Namespace(batch=64)

    def close(self) -> None:
        pass

    free = close


def test_a_rung_is_kept_where_it_is_faster_and_the_next_starts_from_there(monkeypatch) -> None:
    results, seen = climbed(
        monkeypatch,
        [
            (Rung("base", {"tf32": False}), (100, 50)),
            (Rung("input", {"num_data_workers": 8}), (100, 90)),
            (Rung("slower", {"channels_last": True}), (80, 80)),
            (Rung("noise", {"enable_jit": True}), (100.1, 90)),
            (Rung("graph", graph=True), (150, 140)),
            (Rung("measured against", {"enable_amp": True}, always=True), (120, 120)),
        ],
    )
    assert [entry["kept"] for entry in results] == [True, True, False, False, True, True]
    base, workers = {"tf32": False}, {"tf32": False, "num_data_workers": 8}
    assert seen == [
        (base, False),
        (workers, False),
        ({**workers, "channels_last": True}, False),
        ({**workers, "enable_jit": True}, False),
        (workers, True),
        ({**workers, "enable_amp": True}, True),
    ]
    assert best_of(results)["rung"] == "measured against"


def test_what_fails_or_is_not_installed_is_told_and_the_others_go_on(monkeypatch) -> None:
    results, _ = climbed(
        monkeypatch,
        [
            (Rung("base"), (100, 50)),
            (Rung("too large", {"local_batch_size": 256}), torch.OutOfMemoryError("CUDA out of memory.\nmore")),
            (Rung("good", {"channels_last": True}, predicted=150), (200, 190)),
        ],
    )
    assert results[1]["failed"] == "CUDA out of memory."
    assert best_of(results)["rung"] == "good"
    missing = climb(FakeMachine(), [Rung("odd", needs="no_such.package")], time.perf_counter() + 9, lambda _: None)
    assert missing[0]["skipped"] == "no_such.package is not installed"
    assert best_of(missing) is None
    table = markdown([*results, *missing], PEAK)
    assert "| too large | failed: CUDA out of memory. |  |" in table
    assert "| odd | no_such.package is not installed |" in table
    assert "| good | 200 (180 – 220) | 190 (171 – 209) | 0.950 | 2 | 50.0 | yes | 0.3000, 1.0000 | 150 |" in table


def test_no_rung_starts_that_would_end_too_late(monkeypatch) -> None:
    results, seen = climbed(monkeypatch, [(Rung(str(number)), (100, 100)) for number in range(3)], seconds=-1)
    assert seen == []
    assert {entry["skipped"] for entry in results} == {"no time left"}


@pytest.mark.parametrize("rungs", [GPU_RUNGS, CPU_RUNGS])
def test_a_rungs_command_is_the_training_that_was_measured(rungs) -> None:
    """The command line leads to the same config as the rung's changes; every key exists."""
    changes: dict = {}
    for rung in rungs:
        changes |= rung.changes
        words = command(FakeMachine(), changes, bool(rung.graph)).split()
        assert words[:3] == ["python", "train_graph.py" if rung.graph else "train.py", "--config=base"]
        typed = cli.parse([f"--yaml_config={ladder.YAML}", *words[2:]])
        ours = configs.load(ladder.YAML, "base", changes)
        assert configs.load(typed.yaml_config, typed.config, typed.overrides) == ours


def test_rungs_are_measured(machine) -> None:
    kept: list[int] = []
    rungs = (Rung("float32", always=True), Rung("channels last", {"channels_last": True}), Rung("graph", graph=True))
    results = climb(machine, rungs, time.perf_counter() + 120, lambda so_far: kept.append(len(so_far)))
    assert kept == [1, 2]
    assert "only CUDA has them" in results[2]["failed"]
    for entry in results[:2]:
        for name in ("SYNTHETIC", "FULL"):
            assert entry[name]["n"] == ladder.TRIALS
            assert 0 < entry[name]["min"] <= entry[name]["median"] <= entry[name]["max"]
        assert len(entry["loss of the warm-up steps"]) == 3
    # Same samples, same weights: another memory format changes the rounding alone.
    for name in ("loss", "gradient norm"):
        first, second = (entry[f"{name} of the warm-up steps"] for entry in results[:2])
        assert second == pytest.approx(first, rel=1e-3)
    json.dumps(results)


def test_a_duel_tells_ratios_of_neighbouring_trials(machine) -> None:
    pair = {"one": ({}, False), "other": ({"channels_last": True}, False)}
    result = duel(machine, pair, trials=3)
    assert "ratio to the first" not in result["one"]
    ratios = [b / a for a, b in zip(result["one"]["trials"], result["other"]["trials"], strict=True)]
    assert result["other"]["ratio to the first"]["trials"] == ratios


def test_the_plot_is_drawn(tmp_path) -> None:
    entries = [{"rung": name, "kept": name == "a", **rates(100, 90)} for name in ("a", "b")]
    ladder.draw([*entries, {"rung": "c", "skipped": "no time left"}], "a title", tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 5000


# --- all parts together --------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_what_to_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu.sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: torch sees no CUDA device; on a CPU run make bench-cpu\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch=0"], "argument --batch: '0' is no whole number above zero; see --help"),
        (["--seconds=nan"], "argument --seconds: 'nan' is no number above zero; see --help"),
        (["--crop=17"], "a U-Net needs at least one scale, not 0"),
        (["--crop=256"], "crops of 256 cells do not fit into boxes of 128 and 128"),
        (["--data=none.h5"], "no such file: none.h5; leave --data out, and one is made"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, flags, says) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder.sys, "argv", ["ladder", f"--output={tmp_path / 'out'}", "--box=128", *flags])
    with pytest.raises(SystemExit) as stop:
        ladder.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {says}\n"
    assert list(tmp_path.iterdir()) == []


def test_where_no_rung_can_be_measured_earlier_results_stay(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ladder.json").write_text("earlier")
    monkeypatch.setattr(ladder.peaks, "measure", lambda _: {"matmul_tflops": {}})
    monkeypatch.setattr(ladder, "climb", lambda *_: [{"rung": "a", "failed": "no memory"}])
    monkeypatch.setattr(ladder.sys, "argv", ["ladder", "--box=16", "--valid_box=16", "--crop=8", "--output=."])
    with pytest.raises(SystemExit):
        ladder.main()
    assert capsys.readouterr().err == "error: no rung could be measured: no memory\n"
    assert (tmp_path / "ladder.json").read_text() == "earlier"


def rehearsal(folder: Path, **changes) -> gpu.Run:
    parts = {"minutes": 2.0, "loader_batches": 2, "tests": ["--version"], "rehearse": True, **changes}
    settings = options(folder, **parts)
    return gpu.Run(settings, this_machine(), folder / "results")


def test_a_part_that_fails_leaves_the_others_and_the_page(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = rehearsal(tmp_path)
    monkeypatch.setattr(gpu.peaks, "measure", lambda *_: {"matmul_tflops": {"float32": {"median": 1.0}}})
    monkeypatch.setattr(gpu.peaks, "markdown", lambda _: "peaks\n")
    monkeypatch.setattr(gpu.ladder, "climb", lambda *_: [{"rung": "a", "command": "c", "skipped": "no time left"}])

    def broken(*arguments, **named):
        raise RuntimeError("cuDNN is not well")

    for part in ("convolutions", "loaders"):
        monkeypatch.setattr(gpu.Run, part, broken)
    run.everything()
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["skipped"]["convolutions"] == "failed: cuDNN is not well"
    assert results["skipped"]["ledger"] == "failed: no rung of the ladder was measured"
    assert results["tests"]["ended"] == "exit code 0"
    assert run.best_rung() is None, "of what was skipped or failed"
    page = (tmp_path / "results/README.md").read_text()
    assert "## Not measured" in page
    assert "- rung a: no time left" in page
    assert "## Tests" in page


def test_when_time_is_up_the_rest_is_named(tmp_path, monkeypatch) -> None:
    run = rehearsal(tmp_path, minutes=0.0)
    run.everything()
    assert set(run.results["skipped"]) == {
        "peaks", "ladder", "duels", "ledger", "convolutions", "loaders", "tests",
    }  # fmt: skip


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "CPU_RUNGS", CPU_RUNGS[:3])
    flags = ["--rehearse", "--minutes=2", f"--output={tmp_path / 'out'}"]
    flags += ["--batch=2", "--crop=8", "--width=4", "--box=16", "--valid_box=16", "--seconds=0.02", "--warmup_steps=2"]
    monkeypatch.setattr(gpu.sys, "argv", ["gpu", *flags, "--loader_batches=2", "--tests=--version"])
    gpu.main()
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["skipped"] == {}
    for part in ("peaks", "ladder", "ledger", "convolutions", "loaders", "tests"):
        assert part in results
    kept = [entry["rung"] for entry in results["ladder"] if entry["kept"]]
    assert ("duels" in results) is (len(kept) > 1), "the best rung beside the first, unless that is the best"
    page = capsys.readouterr().out
    for title in ("Ceilings", "Ladder", "Where the best rung's step", "Convolutions", "Loaders", "Tests"):
        assert f"## {title}" in page
    (tmp_path / "out/README.md").unlink()
    monkeypatch.setattr(gpu.sys, "argv", ["gpu", f"--draw={tmp_path / 'out'}"])
    gpu.main()
    assert (tmp_path / "out/README.md").read_text() == page.split("written:")[0].rstrip("\n") + "\n"
