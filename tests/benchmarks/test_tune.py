"""The search for the fastest settings: the candidates that it keeps, bad input, and the files that it writes."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import train
from benchmarks import processes, tune
from utils.config import load

TOP = Path(__file__).resolve().parents[2]


class Launched:
    """Stands in for `run_group`: records what would be started, and writes what --enable_benchy would."""

    def __init__(self, rates: Callable[[list[str]], float] = lambda command: 100.0, output: str = "") -> None:
        """`rates`: samples/s by command; 0 is a training run that fails with `output`."""
        self.rates, self.output = rates, output
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Any, limit: float, _: Path) -> int:
        self.commands.append(list(command))
        settings = yaml.safe_load(Path(environment["BENCHY_CONFIG_FILE"]).read_text())
        log.write(self.output.encode())
        rate = self.rates(list(command))
        if rate == 0:
            return 2
        rates = {name: {"trials": [rate] * given["trials"]} for name, given in settings.items()}
        made = {"hostnames": ["node"], "device": "a device", "cpu_count": 2, "date": "today", "git_commit": "abc"}
        text = json.dumps({**rates, "provenance": {**made, "versions": {"torch": "2.13"}, "command": ["train.py"]}})
        Path(environment["BENCHY_OUTPUT"]).write_text(text)
        return 0


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`tuning(*flags)`: the command line for config 'test' in a folder with a copy of the shipped file."""
    shutil.copy(TOP / "config" / "UNet.yaml", tmp_path)
    monkeypatch.chdir(TOP)
    return lambda *flags: [f"--yaml_config={tmp_path / 'UNet.yaml'}", f"--output={tmp_path}", "--config=test", *flags]


def test_the_winner_is_written_as_a_config_with_its_record(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = Launched(lambda command: 130.0 if "--set=channels_last=true" in command else 100.0)
    monkeypatch.setattr(processes, "run_group", launched)
    changes = {"seed": 7, "device": "cpu", "expdir": "/elsewhere", "train_path": str(tmp_path / "none.h5")}
    tune.main(tuning(*(f"--set={key}={value}" for key, value in changes.items()), "--ranks=2"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert launched.commands[0][:5] == launcher
    assert launched.commands[0][5:7] == [str(TOP / "train.py"), f"--yaml_config={tmp_path / 'UNet.yaml'}"]
    printed = capsys.readouterr().out
    assert "tuned is 1.30 times test in FULL samples/s" in printed
    tuned, start = (load(str(tmp_path / "UNet.yaml"), name) for name in ("tuned", "test"))
    assert tuned == start.model_copy(update={**changes, "channels_last": True})
    header = (tmp_path / "tuned.yaml").read_text().split("tuned:\n")[0]
    assert all(line.startswith("# ") for line in header.splitlines())
    assert "tuned is 1.30 times test" in header
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert (record["changes"], record["gain"]) == ({"channels_last": True}, 1.3)
    assert record["provenance"]["command"].startswith("python -m benchmarks.tune")


def test_a_candidate_that_was_only_faster_by_chance_is_dropped(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is faster in the search, but slower in the final comparison, in which it alternates with the start."""
    rates = itertools.chain([130.0], itertools.repeat(99.0))
    launched = Launched(lambda command: next(rates) if "--set=channels_last=true" in command else 100.0)
    monkeypatch.setattr(processes, "run_group", launched)
    tune.main(tuning("--only", "memory_format"))
    assert "nothing was faster than test by more than noise" in capsys.readouterr().out
    assert "channels_last=true" in str(launched.commands[-1])
    assert json.loads((tmp_path / "tuned.json").read_text())["changes"] == {}


def test_a_failed_candidate_is_reported_and_the_search_continues(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def rates(command: list[str]) -> float:
        return 0.0 if '--set=data_loader_config="dali-lowmem"' in command else 100.0

    monkeypatch.setattr(processes, "run_group", Launched(rates, "error: DALI is not installed\n"))
    tune.main(tuning("--only", "loader", "memory_format"))
    trials = json.loads((tmp_path / "tuned.json").read_text())["trials"]
    assert [trial["fault"] for trial in trials if trial["fault"]] == ["DALI is not installed"]
    assert trials[-1]["changes"] == {"channels_last": True}
    assert "DALI is not installed" in capsys.readouterr().out


def test_candidates_without_time_left_are_listed(
    tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "run_group", Launched())
    now = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: next(now)))
    tune.main(tuning("--only", "compile"))
    assert "no time left for: enable_jit=true" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--only", "loaders"], "invalid choice: 'loaders' (choose from "),
        (["--ranks=3"], "global_batch_size 8 is not divisible by 3 ranks"),
        (["--set=sed=1"], "unknown key sed; did you mean seed?"),
        (["--name=old"], "old.yaml exists; give another --name, or --overwrite to replace it"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], says: str
) -> None:
    launched = Launched()
    monkeypatch.setattr(processes, "run_group", launched)
    (tmp_path / "old.yaml").write_text("old: {}\n")
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning(*flags))
    line = capsys.readouterr().err
    assert (stop.value.code, line.count("\n"), launched.commands) == (2, 1, [])
    assert line.startswith("error: ")
    assert says in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["UNet.yaml", "old.yaml"]


def test_a_search_in_which_nothing_runs_writes_nothing(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    broken = Launched(lambda command: 0, "error: no such file: x.h5; make it\n")
    monkeypatch.setattr(processes, "run_group", broken)
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning("--only", "threads"))
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: nothing to tune, the config does not run here: no such file: x.h5; make it"
    assert [path.name for path in tmp_path.iterdir()] == ["UNet.yaml"]


@pytest.mark.slow
def test_a_search_with_real_trainings_ends_in_a_config_that_trains(
    tmp_path: Path, tuning: Any, data_flags: list[str], run_forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(processes, "run_group", run_forked)
    runs = tmp_path / "runs"
    tune.main(tuning(*data_flags, "--only", "memory_format", "--minutes=1000", f"--set=expdir={runs}", "--batches=1"))
    assert not runs.exists(), "trials leave no files behind"
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert [trial["change"] for trial in record["trials"][:2]] == ["start", "channels_last=true"]
    assert not any(trial["fault"] for trial in record["trials"])
    assert all(min(trial["rates"]["FULL"]) > 0 for trial in record["trials"])
    assert record["provenance"]["versions"]["torch"]
    train.main([f"--yaml_config={tmp_path / 'UNet.yaml'}", "--config=tuned", "--num_epochs=1"])
    assert (runs / "tuned" / "1ranks" / "00" / "checkpoints" / "best" / "weights.pt").exists()
