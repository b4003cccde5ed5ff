"""The calls of benchmarks/gpu.py: what they reach in time, what survives a failure, and what they need."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import common, gpu, gpu_calls, gpu_tests, ladder, loaders
from benchmarks.rungs import BEST, FURTHER, HISTORY, VARIANTS, Rung
from utils.profiling import timing

SMALL = ["--batch=2", "--crop=8", "--width=4", "--box=16", "--valid_box=16", "--seconds=0.02", "--warmup_steps=3"]
CALL_SECONDS = 480

Gpu = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gpu:
    """Runs benchmarks.gpu on the CPU with flags, and with short measurements; returns what it printed."""
    measure_peaks = gpu_calls.peaks.measure
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "matmul_size", lambda device: 64)
    monkeypatch.setattr(gpu_calls.peaks, "measure", lambda device, _: measure_peaks(device, 1e-3, copied_bytes=4096))
    monkeypatch.setattr(ladder, "gc", SimpleNamespace(collect=lambda: None))

    def call(*flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["gpu", *flags])
        monkeypatch.setattr(gpu, "STARTED", time.perf_counter())  # not when the tests were collected
        gpu.main()
        return capsys.readouterr().out

    return call


def timeline(text: str) -> dict[str, str]:
    """The end of each part of a dry run."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name: end for name, _, end in rows}


def test_call_1_reaches_all_its_parts_in_8_minutes(call: Gpu) -> None:
    """At the assumed costs, the most important first."""
    assert (gpu_calls.SEARCH, gpu_calls.COMPILATION, gpu_calls.TRIALS) == (30, 60, 10)
    assert (gpu_calls.PEAKS, gpu_calls.CONVOLUTIONS) == (5, 60)
    ends = timeline(call("--call=1", "--dry_run"))
    assert [name.split(":")[0] for name in ends] == [
        *("peaks", "convolutions", "volume", "A", "B", "C", "tail", "best", "D", "E", "F", "G")
    ]
    seconds = [float(end) for end in ends.values()]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= CALL_SECONDS


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_call_ends_in_time_and_lists_what_it_does_not_reach(call: Gpu, number: int) -> None:
    for minutes in (2, 8):
        ends = timeline(call(f"--call={number}", "--dry_run", f"--minutes={minutes}"))
        assert all(not end or float(end) <= 60 * minutes for end in ends.values())
    if number != 2:
        assert ends["peaks"]
    if number == 3:
        reached = {name.split(":")[0] for name, end in ends.items() if end}
        assert {rung.key for rung in (*VARIANTS, *HISTORY)} <= reached
        assert {"loaders", "eager step and CUDA graph, batch 16"} <= reached


def test_a_search_is_expected_only_for_new_convolutions(call: Gpu) -> None:
    ends = timeline(call("--dry_run", "--rungs", "A", "B", "F", "C"))
    starts = [float(end) for end in ends.values()]
    costs = [after - before for before, after in itertools.pairwise(starts)]
    assert costs[1:] == [40, 10, 40, 70]


def test_call_1_measures_on_a_cpu_and_survives_failures(
    call: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is written before the next one begins; the page is drawn again from the file."""
    monkeypatch.chdir(tmp_path)
    plain = (Rung("A: float32"), Rung("C: channels last", {"channels_last": True}), Rung("B: graph", graph=True))
    monkeypatch.setattr(gpu_calls, "BEST", plain)
    monkeypatch.setattr(gpu_calls, "FURTHER", ())
    path = tmp_path / "out/call1.json"

    def broken(*arguments: Any, **options: Any) -> None:
        assert json.loads(path.read_text())["peaks"]
        raise RuntimeError("cuDNN failed")

    monkeypatch.setattr(gpu_calls.convolutions, "measure", broken)
    page = call("--call=1", *SMALL, "--rehearse", "--minutes=1e4", f"--output={path.parent}")
    results = json.loads(path.read_text())
    assert set(results["skipped"]) == {"B: graph", "convolutions"}
    assert "only CUDA devices have graphs" in results["skipped"]["B: graph"]
    assert results["skipped"]["convolutions"] == "failed: cuDNN failed"
    for entry in results["rungs"][:2]:
        for name in ("SYNTHETIC", "FULL"):
            assert 0 < entry[name]["min"] <= entry[name]["median"] <= entry[name]["max"]
    # The same samples and weights: another memory format only changes the rounding.
    for name in ("loss", "gradient norm"):
        first, second = (entry[f"{name} of the warm-up steps"] for entry in results["rungs"][:2])
        assert second == pytest.approx(first, rel=1e-3)
    best = results["best"]
    assert best["name"] in ("A: float32", "C: channels last")
    ratios = [full / fixed for full, fixed in zip(best["FULL"]["trials"], best["SYNTHETIC"]["trials"], strict=True)]
    assert best["FULL / SYNTHETIC"]["trials"] == ratios
    assert best["ledger"]["categories"]["convolutions"]["ms"] > 0
    assert "## Rungs" in page
    path.with_suffix(".md").unlink()
    call(f"--draw={path}")
    assert path.with_suffix(".md").read_text() == page.split("written:")[0].rstrip("\n") + "\n"


def test_call_3_compares_with_the_fastest_of_call_1(call: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    throughput, spread = loaders.throughput, {"median": 3.0, "min": 2.0, "max": 4.0}
    state = {"changes": {"channels_last": True}, "graph": False}
    entry = {"name": "C: channels last", "SYNTHETIC": spread, "FULL": spread, "state": state}
    (tmp_path / "call1.json").write_text(json.dumps({"rungs": [entry]}))

    def without_pauses(options: Any, with_plain: bool) -> dict[str, Any]:
        options.settle = 0.0
        return throughput(options, with_plain)

    monkeypatch.setattr(loaders, "throughput", without_pauses)
    monkeypatch.setattr(gpu_calls, "GPU_RUNGS", {"G": Rung("G: float32")})
    monkeypatch.setattr(gpu_calls, "VARIANTS", ())
    monkeypatch.setattr(gpu_calls, "HISTORY", ())
    monkeypatch.setattr(gpu_calls, "OTHERS", ())
    monkeypatch.setattr(gpu_calls.Call, "convolutions", lambda *_: None)
    page = call("--call=3", *SMALL, "--rehearse", "--minutes=1e4", "--output=.", "--loader_batches=2")
    results = json.loads((tmp_path / "call3.json").read_text())
    pair = results["comparisons"]["the tutorial's best and ours"]
    ours, tutorial = pair["C: channels last"], pair["tutorial's best"]
    ratios = [one / other for one, other in zip(ours["trials"], tutorial["trials"], strict=True)]
    assert ours["ratio to the first"]["trials"] == ratios
    assert {"lowmem", "inmem", "memory copy (bound)"} <= set(results["loaders"])
    assert set(results["skipped"]) == {"eager step and CUDA graph, batch 16"}
    assert "## Comparisons in alternating trials" in page


def test_files_of_tests_run_in_processes_of_their_own(
    call: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = gpu_tests.test_files()
    assert {"test_gpu.py", "test_graph.py"} <= {path.name for path in files}
    assert "test_ladder.py" not in {path.name for path in files}

    def run_group(command: list[str], environment: Any, log: Any, limit: float, directory: Path) -> int | None:
        assert 0 < limit <= CALL_SECONDS
        assert command[1:6] == ["-m", "pytest", "-q", "-m", "gpu"]
        name = Path(command[-1]).name
        log.write(f"FAILED {name}::test_a\n1 failed in {name}\n".encode())
        return None if name == "test_gpu.py" else 1

    monkeypatch.setattr(gpu_tests, "run_group", run_group)
    page = call("--call=2", "--rehearse", f"--output={tmp_path}")
    results = json.loads((tmp_path / "call2.json").read_text())
    assert set(results["tests"]) == {path.name for path in files}
    assert results["tests"]["test_gpu.py"]["ended"] == "cut off: no time left"
    assert results["tests"]["test_graph.py"]["summary"] == "1 failed in test_graph.py"
    assert "- FAILED test_graph.py::test_a" in page
    assert "1 failed in test_graph.py" in (tmp_path / "tests.txt").read_text()


ALONE = {"name": "alone: text", "command": "train.py", "skipped": "seen"}


@pytest.mark.parametrize(
    "results",
    [{"rungs": [ALONE], "skipped": {}}, {"rungs": [], "skipped": {"alone: text": "seen"}}],
    ids=["ended", "crashed"],
)
def test_a_rung_alone_is_measured_in_another_process(
    call: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]
) -> None:
    """cuDNN keeps the algorithms that it has found for the rest of the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_calls.Call, "comparisons", lambda _: [])
    monkeypatch.setattr(gpu_calls, "HISTORY", ())
    monkeypatch.setattr(gpu_calls, "OTHERS", ())
    monkeypatch.setattr(gpu_calls, "VARIANTS", (Rung("alone: text", alone=True),))
    for name in ("loaders", "convolutions"):
        monkeypatch.setattr(gpu_calls.Call, name, lambda *_: None)
    commands = []

    def failure_of(command: list[str], log: Path, environment: Any = None, limit: float = 0) -> str:
        commands.append(command)
        log.write_text("")
        (tmp_path / "rungs.json").write_text(json.dumps(results))
        return ""

    monkeypatch.setattr(gpu_calls, "failure_of", failure_of)
    call("--call=3", *SMALL, "--rehearse", "--output=.")
    (command,) = commands
    assert command[:5] == [sys.executable, "-m", "benchmarks.gpu", "--rungs", "alone"]
    assert {f"--output={tmp_path}", f"--data={tmp_path / 'data/benchmark_16.h5'}", "--batch=2"} <= set(command)
    assert json.loads((tmp_path / "call3.json").read_text())["skipped"]["alone: text"] == "seen"


# Two rungs meet faults after which nothing works on the device until the process ends; another one is killed.
FAULTY = """
import os, signal, sys
from benchmarks import gpu, gpu_calls, ladder
from benchmarks.rungs import Rung

faults = []  # of this process

def checked(action):
    def call(*arguments, **options):
        if faults:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return action(*arguments, **options)
    return call

def measure(machine, changes, graph, original=ladder.measure):
    if "killed" in changes:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fault" in changes:
        faults.append(changes)
    return checked(original)(machine, changes, graph)

def no_profiler(*arguments, **options):
    raise RuntimeError("no profiler")

ladder.measure = measure
ladder.prepare, ladder.Machine.free = checked(ladder.prepare), checked(ladder.Machine.free)
gpu_calls.peaks.measure = lambda *_: {}
gpu_calls.convolutions.measure = checked(lambda *_, **__: {})
gpu_calls.ledger.measure = no_profiler
gpu_calls.BEST = Rung("A: float32"), Rung("B: fault", {"fault": 1}), Rung("C: killed", {"killed": True})
gpu_calls.FURTHER = Rung("D: fault", {"fault": 2}), Rung("G: last", {"channels_last": True})
gpu.supervise()
"""


def start(program: str, directory: Path, *flags: str) -> subprocess.Popen[str]:
    """Starts a program that imports this project, in another directory."""
    environment = {**os.environ, "PYTHONPATH": str(common.REPOSITORY)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, *flags], cwd=directory, env=environment, **pipes)


def completed(program: str, directory: Path, *flags: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program."""
    with start(program, directory, *flags) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_call_continues_after_faults_in_other_processes(tmp_path: Path) -> None:
    """One fault once ended the call, and the record of its rung was lost."""
    (tmp_path / "call1.json").write_text('{"started": 0, "seconds": {"peaks": 1}}')  # of another call
    flags = ["--call=1", *SMALL, "--rehearse", "--minutes=1e4", "--output=."]
    code, page, log = completed(FAULTY, tmp_path, *flags)
    assert code == 0, log
    results = json.loads((tmp_path / "call1.json").read_text())
    illegal = "CUDA error: an illegal memory access was encountered"
    assert results["skipped"] == {
        "B: fault": f"failed: {illegal}",
        "device after B: fault": f"failed: {illegal}",
        "C: killed": gpu_calls.ENDED,
        "best": "failed: no profiler",
        "D: fault": f"failed: {illegal}",
        "device after D: fault": f"failed: {illegal}",
    }
    outcomes = {entry["name"]: "SYNTHETIC" in entry for entry in results["rungs"]}
    assert outcomes == {"A: float32": True, "B: fault": False, "D: fault": False, "G: last": True}
    assert results["best"]["FULL / SYNTHETIC"]["n"] == 5
    # Each part is tried once, and all processes have the same time limit.
    parts = re.findall(r"^== (.*), (\d+) s left$", log, re.MULTILINE)
    names = ["peaks", "convolutions", "volume", "A: float32", "B: fault", "C: killed", "best", "D: fault", "G: last"]
    assert [name for name, _ in parts] == names
    left = [int(seconds) for _, seconds in parts]
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0]
    codes = re.findall("a fault has ended the process: exit code (.*)", log)
    assert codes == ["75", f"-{signal.SIGKILL:d}", "75"]
    assert f"- C: killed: {gpu_calls.ENDED}" in page
    assert "| G: last | " in page


def test_processes_that_crash_at_once_come_to_an_end(tmp_path: Path) -> None:
    """And the process that starts them does not use the device."""
    crash = "os.kill(os.getpid(), signal.SIGKILL)"
    program = f"""
import os, signal, sys
from benchmarks import gpu
gpu.PROCESSES, gpu.main = 3, lambda: {crash}
try:
    gpu.supervise()
finally:
    assert "torch" not in sys.modules
"""
    code, _, log = completed(program, tmp_path)
    assert log.splitlines() == ["a fault has ended the process: exit code -9"] * 3
    assert code == 256 - signal.SIGKILL


def test_a_signal_ends_both_processes(tmp_path: Path) -> None:
    program = """
import os, time
from benchmarks import gpu
gpu.main = lambda: (print(os.getpid(), flush=True), time.sleep(300))
gpu.supervise()
"""
    with start(program, tmp_path) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--call=2", "--rungs", "A"], "--rungs measures these rungs alone, without --call 2; remove one of the two"),
        (["--crop=7"], "--crop 7 is odd, and the network halves it; give an even number"),
        (
            [f"--output={__file__}/results"],
            f"cannot write to {__file__}/results: {__file__} is not a writable directory; choose another --output",
        ),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    call: Gpu, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    """In a dry run too."""
    with pytest.raises(SystemExit) as stop:
        call("--dry_run", *flags)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {says}\n"


def test_missing_packages_are_named_in_one_line(
    call: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured. `python -m benchmarks.gpu` once ended with a traceback."""
    for module in ("pydantic", "yaml"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stop:
        call("--call=1")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: missing packages: pyyaml, pydantic; install them with pip\n"


# Imports of some packages fail.
BLOCKED = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["gpu", "--dry_run"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.slow
def test_the_calls_need_the_required_packages_only(tmp_path: Path) -> None:
    optional = ("matplotlib", "jinja2", "rich", "scipy", "colossus", "sklearn", "nvidia", "wandb", "pytest", "xdist")
    code, page, log = completed(BLOCKED.format(absent=optional), tmp_path)
    assert (code, log) == (0, "")
    assert all(rung.name in page for rung in (*BEST, *FURTHER))
    code, _, log = completed(BLOCKED.format(absent=("h5py", "pydantic_core")), tmp_path)
    says = "error: missing packages: h5py, pydantic_core (for pydantic); install them with pip\n"
    assert (code, log) == (2, says)
