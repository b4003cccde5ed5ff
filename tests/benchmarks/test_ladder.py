"""The ladder keeps what is faster, survives failures, ends in time, and its commands are the trainings it measured."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import convolutions, gpu, ladder, loaders
from benchmarks.common import this_machine
from benchmarks.ladder import CPU_RUNGS, GPU_RUNGS, Rung, best_of, climb, command, markdown
from benchmarks.loaders import make_file
from utils import cli
from utils import config as configs

SMALL = ["--batch=2", "--crop=8", "--width=4", "--box=16", "--valid_box=16", "--seconds=0.02", "--warmup_steps=3"]


def rates(synthetic: float, full: float) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "min": 0.9 * value, "max": 1.1 * value}

    return {
        "SYNTHETIC": spread(synthetic),
        "FULL": spread(full),
        "FULL / SYNTHETIC": full / synthetic,
        "TFLOP/s": synthetic / 100,
        "loss of the warm-up steps": [0.5, 0.4, 0.3],
        "gradient norm of the warm-up steps": [3.0, 2.0, 1.0],
    }


class FakeMachine:
    options = argparse.Namespace(batch=64)

    def close(self) -> None:
        pass

    free = close


Climb = tuple[list[dict[str, Any]], list[tuple[dict[str, Any], bool]]]


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Climb]:
    """`climbed((rung, (SYNTHETIC, FULL) or an error), …)`: the results, and the settings that were measured."""

    def build(*rungs: tuple[Rung, Any], deadline: float = math.inf) -> Climb:
        answers, seen = iter(answer for _, answer in rungs), []

        def measure(machine: FakeMachine, changes: dict[str, Any], graph: bool) -> dict[str, Any]:
            seen.append((dict(changes), graph))
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return rates(*answer)

        monkeypatch.setattr(ladder, "measure", measure)
        return climb(FakeMachine(), [rung for rung, _ in rungs], deadline, lambda _: None), seen

    return build


def test_a_faster_step_is_kept_and_the_next_starts_from_it(climbed: Callable[..., Climb]) -> None:
    results, seen = climbed(
        (Rung("base", {"tf32": False}), (100, 50)),
        (Rung("input", {"num_data_workers": 8}), (100, 90)),
        (Rung("slower", {"channels_last": True}), (80, 80)),
        (Rung("noise", {"enable_jit": True}), (100.1, 90)),
        (Rung("graph", graph=True), (150, 140)),
        (Rung("measured against", {"enable_amp": True}, always=True), (120, 120)),
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
    best = best_of(results)
    assert best is not None
    assert best["rung"] == "measured against"


def test_steps_that_fail_or_are_not_installed_are_listed(climbed: Callable[..., Climb]) -> None:
    results, _ = climbed(
        (Rung("base"), (100, 50)),
        (Rung("too large", {"local_batch_size": 256}), torch.OutOfMemoryError("CUDA out of memory.\nmore")),
        (Rung("good", {"channels_last": True}, predicted=150), (200, 190)),
    )
    missing, _ = climbed((Rung("odd", needs="no_such.package"), None))
    assert best_of(missing) is None
    table = markdown([*results, *missing], {"float32": 2.0, "tf32": 4.0})
    assert "| too large | failed: CUDA out of memory. |  |" in table
    assert "| odd | no_such.package is not installed |" in table
    assert "| good | 200 (180 – 220) | 190 (171 – 209) | 0.950 | 2 | 50.0 | yes | 0.3000, 1.0000 | 150 |" in table
    late, seen = climbed(*[(Rung(str(number)), (100, 100)) for number in range(3)], deadline=-math.inf)
    assert seen == []
    assert {entry["skipped"] for entry in late} == {"no time left"}


@pytest.mark.parametrize("rungs", [GPU_RUNGS, CPU_RUNGS])
def test_a_printed_command_is_the_training_that_was_measured(rungs: tuple[Rung, ...]) -> None:
    """Its command line leads to the same config as the step's changes, and every key exists."""
    changes: dict[str, Any] = {}
    for rung in rungs:
        changes |= rung.changes
        words = command(FakeMachine(), changes, bool(rung.graph)).split()
        assert words[:3] == ["python", "train_graph.py" if rung.graph else "train.py", "--config=base"]
        typed = cli.parse([f"--yaml_config={ladder.YAML}", *words[2:]])
        ours = configs.load(ladder.YAML, "base", changes)
        assert configs.load(typed.yaml_config, typed.config, typed.overrides) == ours, rung.name


# --- the commands ----------------------------------------------------------------------------------------------------


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
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ladder", f"--output={tmp_path / 'out'}", "--box=128", *flags])
    with pytest.raises(SystemExit) as stop:
        ladder.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {says}\n"
    assert list(tmp_path.iterdir()) == []


def test_earlier_results_are_replaced_only_by_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "ladder.json").write_text("earlier")
    monkeypatch.setattr(ladder.peaks, "measure", lambda _: {"matmul_tflops": {"float32": {"median": 2.0}}})
    monkeypatch.setattr("sys.argv", ["ladder", "--box=16", "--valid_box=16", "--crop=8", "--output=."])
    entries = [{"rung": "a", "failed": "no memory"}]
    monkeypatch.setattr(ladder, "climb", lambda *_: entries)
    with pytest.raises(SystemExit):
        ladder.main()
    assert capsys.readouterr().err == "error: no rung could be measured: no memory\n"
    assert (tmp_path / "ladder.json").read_text() == "earlier"
    entries += [{"rung": "b", "kept": True, "state": {"changes": {}}, **rates(100, 90)}]
    ladder.main()
    assert [entry["rung"] for entry in json.loads((tmp_path / "ladder.json").read_text())["rungs"]] == ["a", "b"]
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "| b | 100 (90 – 110) |" in capsys.readouterr().out


def test_all_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The whole report from real measurements, drawn again from its file; a step that fails does not end it."""
    steps = (
        Rung("float32", always=True),
        Rung("channels last", {"channels_last": True}, always=True),
        Rung("graph", graph=True),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ladder, "CPU_RUNGS", steps)
    monkeypatch.setattr(convolutions, "ROW_SECONDS", 1e-4)
    monkeypatch.setattr(convolutions, "PEAK_SECONDS", 1e-3)
    monkeypatch.setattr(gpu.peaks, "matmul_size", lambda device: 64)
    monkeypatch.setattr(ladder, "gc", SimpleNamespace(collect=lambda: None))
    measure_peaks, throughput = gpu.peaks.measure, loaders.throughput
    monkeypatch.setattr(gpu.peaks, "measure", lambda device, seconds: measure_peaks(device, 1e-3, copied_bytes=4096))

    def without_pauses(options: argparse.Namespace) -> dict[str, Any]:
        options.settle = 0.0
        return throughput(options)

    monkeypatch.setattr(loaders, "throughput", without_pauses)
    flags = [*SMALL, "--rehearse", "--minutes=1e4", f"--output={tmp_path / 'out'}", "--loader_batches=2"]
    monkeypatch.setattr("sys.argv", ["gpu", *flags, "--tests=--version"])
    gpu.main()
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert list(results["skipped"]) == ["rung graph"]
    assert "only CUDA has them" in results["skipped"]["rung graph"]
    for entry in results["ladder"][:2]:
        for name in ("SYNTHETIC", "FULL"):
            assert entry[name]["n"] == ladder.TRIALS
            assert 0 < entry[name]["min"] <= entry[name]["median"] <= entry[name]["max"]
        assert len(entry["loss of the warm-up steps"]) == 3
    # The same samples and weights: another memory format only changes the rounding.
    for name in ("loss", "gradient norm"):
        first, second = (entry[f"{name} of the warm-up steps"] for entry in results["ladder"][:2])
        assert second == pytest.approx(first, rel=1e-3)
    duel = results["duels"]["best against an earlier rung"]
    ratios = [best / first for first, best in zip(duel["float32"]["trials"], duel["best"]["trials"], strict=True)]
    assert duel["best"]["ratio to the first"]["trials"] == ratios
    assert {"lowmem", "inmem", "resident", "memory copy (bound)"} <= set(results["loaders"])
    assert results["tests"]["ended"] == "exit code 0"
    page = capsys.readouterr().out
    for title in ("Ceilings", "Ladder", "Side by side", "Where the best", "Convolutions", "Loaders", "Tests"):
        assert f"## {title}" in page
    (tmp_path / "out/README.md").unlink()
    monkeypatch.setattr("sys.argv", ["gpu", f"--draw={tmp_path / 'out'}"])
    gpu.main()
    assert (tmp_path / "out/README.md").read_text() == page.split("written:")[0].rstrip("\n") + "\n"


def rehearsal(folder: Path, minutes: float) -> gpu.Run:
    parser = argparse.ArgumentParser()
    ladder.add_options(parser)
    make_file(folder / "benchmark_16.h5", 16)
    parsed = vars(parser.parse_args([*SMALL, f"--data={folder / 'benchmark_16.h5'}"]))
    parts = {"minutes": minutes, "loader_batches": 2, "tests": None, "rehearse": True}
    return gpu.Run(argparse.Namespace(**parsed, **parts), this_machine(), folder / "results")


def test_a_part_that_fails_leaves_the_others_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = rehearsal(tmp_path, minutes=1e4)
    monkeypatch.setattr(gpu.peaks, "measure", lambda *_: {"matmul_tflops": {"float32": {"median": 1.0}}})
    monkeypatch.setattr(gpu.peaks, "markdown", lambda _: "peaks\n")
    monkeypatch.setattr(gpu.ladder, "climb", lambda *_: [{"rung": "a", "command": "c", "skipped": "no time left"}])

    def broken(*arguments: Any) -> None:
        raise RuntimeError("cuDNN is not well")

    for part in ("convolutions", "loaders", "tests"):
        monkeypatch.setattr(gpu.Run, part, broken)
    run.everything()
    skipped = json.loads((tmp_path / "results/results.json").read_text())["skipped"]
    assert skipped["convolutions"] == skipped["tests"] == "failed: cuDNN is not well"
    assert skipped["ledger"] == "failed: no rung of the ladder was measured"
    assert run.best_rung() is None, "skipped and failed steps do not count"
    page = (tmp_path / "results/README.md").read_text()
    assert "## Ceilings" in page
    assert "## Not measured" in page
    assert "- rung a: no time left" in page
    late = rehearsal(tmp_path, minutes=0.0)
    late.everything()
    parts = ["peaks", "ladder", "duels", "ledger", "convolutions", "loaders", "tests"]
    assert late.results["skipped"] == dict.fromkeys(parts, "no time left")


def test_without_a_gpu_one_line_says_what_to_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: torch sees no CUDA device; on a CPU run make bench-cpu\n"
