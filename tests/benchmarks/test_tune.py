"""The search for the fastest setting: what it keeps, what it refuses, and what it writes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import train
from benchmarks import tune
from benchmarks.tune import KEPT, Budget, Found, Processes, Result, Setting, Space, search
from utils.config import load, validate
from utils.errors import UserError

TOP = Path(__file__).resolve().parents[2]

# --- the search ------------------------------------------------------------------------------------------------------


class Machine:
    """Gives each setting the samples/s from a table; only its trials move its clock."""

    def __init__(self, rates: Mapping[str, Any], seconds: float = 10.0) -> None:
        """`rates` by the letters of the changes, '' for the start: a rate, trials, an error, or a list, one per run."""
        self.rates, self.seconds, self.now = rates, seconds, 0.0
        self.runs: list[str] = []
        self.limits: list[float] = []

    def measure(self, setting: Setting, limit: float) -> Result:
        name = "".join(sorted(setting.changes))
        rate = self.rates[name]
        if isinstance(rate, list):
            rate = rate[min(self.runs.count(name), len(rate) - 1)]
        self.runs.append(name)
        self.limits.append(limit)
        self.now += limit if rate == "hangs" else self.seconds
        if rate == "hangs":
            return Result(limit, fault=f"stopped: not done after {limit:.0f} s")
        if isinstance(rate, str):
            return Result(self.seconds, fault=rate)
        trials = rate if isinstance(rate, tuple) else (rate,) * 5
        return Result(self.seconds, {"IO": trials, "SYNTHETIC": trials, "FULL": trials})

    def search(self, letters: str, seconds: float = 1000.0) -> Found:
        """Searches with one part per letter, which tries to switch it on."""
        parts = {letter: lambda setting, letter=letter: [setting.change({letter: True})] for letter in letters}
        return search(parts, self.measure, Budget(seconds, lambda: self.now))


def test_each_part_starts_from_the_fastest_setting_so_far() -> None:
    machine = Machine({"": 100.0, "a": "no device memory left", "b": 120.0, "bc": 150.0, "bcd": 140.0})
    found = machine.search("abcd")
    assert machine.runs == ["", "a", "b", "bc", "bcd", "", "bc", "", "bc"], "in the end, start and best alternate"
    assert [trial.verdict for trial in found.trials[1:5]] == ["no device memory left", KEPT, KEPT, "slower"]
    assert (found.best.setting.changes, found.gain, len(found.pairs)) == ({"b": True, "c": True}, 1.5, 2)
    assert found.untried == []


@pytest.mark.parametrize(
    ("start", "candidate", "gain", "says"),
    [
        (100.0, (90.0, 99.0, 99.0, 200.0, 300.0), 1.0, "nothing that was tried is faster than demo by more than noise"),
        (100.0, (99.0, 101.5, 101.5, 101.5, 103.0), 1.0, "nothing that was tried is faster"),  # not every trial is
        ([50.0, 100.0], [200.0, 110.0], 1.1, "tuned is 1.10 times demo: FULL 100.0 (100.0 to 100.0) -> 110.0"),
        ([80.0, 100.0], [90.0, 95.0], 1.0, "in the comparison nothing was faster than demo"),
        (100.0, [130.0, 101.0, 100.5], 1.0075, "(2 runs of each, in turn, 10 trials each"),
        (100.0, [130.0, 101.0, 99.5], 1.0, "in the comparison nothing was faster"),
        (100.0, [130.0, 130.0, "broken"], 1.0, "in the comparison nothing was faster"),
        ([100.0, "broken", 104.0], [130.0, 120.0, 130.0], 1.25, "(1 run of each, in turn"),
        ("no DALI", 100.0, None, "demo does not run here (no DALI); tuned does: FULL 100.0 samples/s"),
    ],
)
def test_the_reported_gain_is_that_of_the_final_comparison(start: Any, candidate: Any, gain: Any, says: str) -> None:
    """A candidate that was lucky in the search, or fails when it runs again, is dropped."""
    found = Machine({"": start, "a": candidate}).search("a")
    assert found.gain == pytest.approx(gain)
    assert (found.best is found.start) == (gain == 1.0)
    assert says in tune.conclusion(found, "demo", "tuned")


def test_a_config_that_cannot_run_ends_with_its_reason() -> None:
    machine = Machine({"": "no such file", "a": "no such file", "ab": 1.0})
    with pytest.raises(UserError, match="does not run here: no such file"):
        machine.search("ab")
    assert machine.runs == ["", "a"], "the other parts would fail with the same error"
    with pytest.raises(UserError, match="no time to measure the config"):
        Machine({"": "hangs", "a": "hangs"}).search("a", 10)


@pytest.mark.parametrize("seconds", [5, 10, 25, 45, 55, 75, 200])
@pytest.mark.parametrize("second", [120.0, 90.0, "hangs", "broken"])
def test_the_search_ends_within_its_budget(seconds: float, second: Any) -> None:
    """Time for the comparison is reserved, and one trial that hangs leaves time for the others."""
    machine = Machine({"": 100.0, "a": second, "b": 130.0, "ab": 140.0})
    found = machine.search("ab", seconds)
    assert machine.now <= max(seconds, 10)
    assert len(found.untried) + sum(trial.part in "ab" for trial in found.trials) == 2
    assert found.gain is not None
    assert found.gain >= 1
    assert found.pairs or found.best is found.start
    if seconds == 200:
        assert machine.limits[1] == 50, "a quarter of all"
        assert found.best.setting.changes.keys() >= {"b"}


# --- a trial ---------------------------------------------------------------------------------------------------------


class Launched:
    """Stands in for `run_group`: records what would be started, and writes what --enable_benchy would."""

    def __init__(self, rates: Callable[[list[str]], float] = lambda command: 100.0, output: str = "") -> None:
        self.rates, self.output = rates, output
        self.commands: list[list[str]] = []
        self.settings: list[Any] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Any, limit: float) -> int | None:
        self.commands.append(list(command))
        self.settings.append(yaml.safe_load(Path(environment["BENCHY_CONFIG_FILE"]).read_text()))
        log.write(self.output.encode())
        rate = self.rates(list(command))
        if rate == 0:
            return 2
        rates = {name: {"trials": [rate] * given["trials"]} for name, given in self.settings[-1].items()}
        made = {"hostnames": ["node"], "device": "a device", "cpu_count": 2, "date": "today", "git_commit": "abc"}
        text = json.dumps({**rates, "provenance": {**made, "versions": {"torch": "2.13"}, "command": ["train.py"]}})
        Path(environment["BENCHY_OUTPUT"]).write_text(text)
        return 0


def test_a_trial_is_the_users_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials share the time that there is, and one that falls back from the compiler has failed."""
    warning = "torch.compile failed, going on without it: no C++ compiler"
    launched = Launched(output=f"root - WARNING - {warning}\n")
    monkeypatch.setattr(tune, "run_group", launched)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: 0.0))
    space, budget = Space(validate({"global_batch_size": 8}, "test").for_world(2), 2), Budget(100, lambda: 0.0)
    measure = Processes(["--config=test"], space, planned=10, budget=budget, folder=tmp_path)
    result = measure(Setting({"network.rewritten": ["last"], "bucket_cap_mb": 50.0}), 60)
    assert (result.rates["FULL"], result.fault) == ([100.0] * 5, "")
    command = launched.commands[-1]
    assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert command[5:8] == [str(TOP / "train.py"), "--config=test", "--enable_benchy"]
    assert {'--set=network.rewritten=["last"]', "--set=bucket_cap_mb=50.0"} <= set(command)
    # At 100 samples/s: a tenth of 100 s, and the first run's 0.24 s, for 6 trials of FULL and 4 of each of the others.
    full = [settings["FULL"] for settings in launched.settings]
    assert full[0] == {"batches": 1, "trials": 1, "warmup_trials": 1}
    assert full[1] == {"batches": round(10.24 / (14 / 100) / 8), "trials": 5, "warmup_trials": 1}
    assert measure(Setting({"enable_jit": True}, graph=True), 60).fault == warning
    assert str(TOP / "train_graph.py") in launched.commands[-1]
    assert len(launched.commands) == 3, "the pace is measured once"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`tuning(*flags)`: the command line for config 'test' in a folder with a copy of the shipped file."""
    shutil.copy(TOP / "config" / "UNet.yaml", tmp_path)
    monkeypatch.chdir(TOP)
    return lambda *flags: [f"--yaml_config={tmp_path / 'UNet.yaml'}", f"--output={tmp_path}", "--config=test", *flags]


def test_the_winner_is_written_as_a_config_with_its_record(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tune, "run_group", Launched(lambda command: 130.0 if "--set=channels_last=true" in command else 100.0)
    )
    changes = {"seed": 7, "device": "cpu", "expdir": "/elsewhere", "train_path": str(tmp_path / "none.h5")}
    tune.main(tuning(*(f"--set={key}={value}" for key, value in changes.items()), "--ranks=2"))
    printed = capsys.readouterr()
    assert re.search(r"^ +\d+ channels_last=true .* kept$", printed.out, re.MULTILINE)
    gain = "tuned is 1.30 times test: FULL 100.0 (100.0 to 100.0) -> 130.0 (130.0 to 130.0) samples/s (2 runs of each, "
    assert gain in printed.out
    for part in ("the HDF5 files are not there", "they need a GPU", "global_batch_size stays 8, 4 a rank"):
        assert part in printed.out, "what is not tried is reported"
    assert "left: channels_last=true: 130.0 samples/s, kept" in printed.err
    tuned, start = (load(str(tmp_path / "UNet.yaml"), name) for name in ("tuned", "test"))
    assert tuned == start.model_copy(update={**changes, "channels_last": True})
    header = (tmp_path / "tuned.yaml").read_text().split("tuned:\n")[0]
    assert all(line.startswith("# ") for line in header.splitlines())
    for part in ("benchmarks.tune --yaml_config", "today, node: 2 × a device", gain, "with train.py"):
        assert part in header
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert (record["changes"], record["script"], record["gain"]) == ({"channels_last": True}, "train.py", 1.3)
    tried = dict.fromkeys(trial["part"] for trial in record["trials"] if trial["part"] != "threads")  # needs more cores
    assert list(tried) == ["start", "memory_format", "compile", "rewrites", "buckets", "compare"]
    assert record["provenance"]["command"].startswith("python -m benchmarks.tune")


def test_larger_batches_are_tried_only_on_request(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    launched = Launched(lambda command: 200.0 if "--set=local_batch_size=16" in command else 100.0)
    monkeypatch.setattr(tune, "run_group", launched)
    tune.main(tuning("--only=batch"))
    assert not any("local_batch_size" in flag for command in launched.commands for flag in command)
    tune.main(tuning("--only=batch", "--local_batch_sizes", "16", "32", "--overwrite", "--ranks=2"))
    output = capsys.readouterr().out
    assert "another batch changes the training" in output
    assert "tuned is 2.00 times test" in output
    tuned = load(str(tmp_path / "UNet.yaml"), "tuned")
    assert (tuned.global_batch_size, tuned.local_batch_size) == (32, None), "holds on any number of ranks"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--only=threads,loaders"], "unknown part 'loaders'; known: loader, threads, "),
        (["--minutes=nan"], "'nan' is no number of minutes"),
        (["--ranks=3"], "global_batch_size 8 is not divisible by 3 ranks"),
        (["--local_batch_sizes", "128"], "Nsamples 64 is less than global_batch_size 128"),
        (["--set=sed=1"], "unknown key sed; did you mean seed?"),
        (["--name=../tuned"], "--name '../tuned' must be a plain name"),
        (["--name=UNet"], "would replace "),
        (["--name=demo"], "has a config demo already, which would be found first"),
        (["--name=old"], "old.yaml exists; give another --name, or --overwrite to replace it"),
        (["--output=/none"], "no such directory: /none"),
        (["--minute=3"], "unrecognized arguments: --minute=3; see python -m benchmarks.tune --help"),
        (["RANK"], "start benchmarks.tune once, not on every rank"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], says: str
) -> None:
    launched = Launched()
    monkeypatch.setattr(tune, "run_group", launched)
    (tmp_path / "old.yaml").write_text("old: {}\n")
    if flags == ["RANK"]:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
            monkeypatch.setenv(name, value)
        flags = []
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning(*flags))
    line = capsys.readouterr().err
    assert (stop.value.code, line.count("\n"), launched.commands) == (2, 1, [])
    assert line.startswith("error: ")
    assert says in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["UNet.yaml", "old.yaml"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, None])
def test_a_search_without_a_result_writes_nothing(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: type[BaseException] | None
) -> None:
    """Neither an interrupted search nor one in which nothing runs leaves files behind."""

    def interrupted(*arguments: Any) -> int:
        assert error is not None
        raise error

    broken = Launched(lambda command: 0, "error: no such file: x.h5; make it\n")
    monkeypatch.setattr(tune, "run_group", interrupted if error else broken)
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning("--only=threads"))
    if error is None:
        assert stop.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == "error: nothing to tune, the config does not run here: no such file: x.h5; make it"
    assert [path.name for path in tmp_path.iterdir()] == ["UNet.yaml"]


@pytest.mark.slow
def test_a_search_with_real_trainings_ends_in_a_config_that_trains(
    tmp_path: Path, tuning: Any, data_flags: list[str], run_forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "MEASURED_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(tune, "run_group", run_forked)
    runs = tmp_path / "runs"
    tune.main(tuning(*data_flags, "--only=memory_format", "--minutes=1000", f"--set=expdir={runs}"))
    assert not runs.exists(), "trials leave nothing behind"
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert [trial["part"] for trial in record["trials"][:2]] == ["start", "memory_format"]
    assert not any(trial["fault"] for trial in record["trials"])
    assert all(trial["medians"]["FULL"] > 0 for trial in record["trials"])
    assert record["provenance"]["versions"]["torch"]
    train.main([f"--yaml_config={tmp_path / 'UNet.yaml'}", "--config=tuned", "--num_epochs=1"])
    assert (runs / "tuned" / "1GPU" / "00" / "checkpoints" / "best" / "weights.pt").exists()
