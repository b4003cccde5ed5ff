"""The search for the fastest setting: what it keeps, what it refuses, how it ends in time, and what it writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from benchmarks import tune
from benchmarks.tune import KEPT, PARTS, Budget, Found, Processes, Result, Setting, Space, Trial, search
from utils.config import Config, load, validate
from utils.errors import UserError

TOP = Path(__file__).resolve().parents[2]
SHIPPED = TOP / "config" / "UNet.yaml"


# --- the search ----------------------------------------------------------------------------------------------------


class Machine:
    """Settings' samples/s as a table says, and a clock that only its trials move."""

    def __init__(self, rates: Mapping[str, Any], seconds: float = 10.0) -> None:
        """`rates`: by the changes' letters, '' for the start; a rate, trials, a fault, or a list with one a run."""
        self.rates, self.seconds, self.now = rates, seconds, 0.0
        self.runs: list[str] = []
        self.limits: list[float] = []

    def clock(self) -> float:
        return self.now

    def measure(self, setting: Setting, limit: float) -> Result:
        name = "".join(sorted(setting.changes))
        told = self.rates[name]
        if isinstance(told, list):
            told = told[min(self.runs.count(name), len(told) - 1)]
        self.runs.append(name)
        self.limits.append(limit)
        if told == "hangs":
            self.now += limit
            return Result(limit, fault=f"stopped: not done after {limit:.0f} s")
        self.now += self.seconds
        if isinstance(told, str):
            return Result(self.seconds, fault=told)
        trials = told if isinstance(told, tuple) else (told,) * 5
        return Result(self.seconds, {"IO": trials, "SYNTHETIC": trials, "FULL": trials})


def parts(letters: str) -> dict[str, Callable[[Setting], list[Setting]]]:
    """One part a letter: try to switch it on."""

    def candidate(letter: str) -> Callable[[Setting], list[Setting]]:
        return lambda setting: [setting.change({letter: True})]

    return {letter: candidate(letter) for letter in letters}


def find(machine: Machine, letters: str, seconds: float = 1000.0) -> Found:
    return search(parts(letters), machine.measure, Budget(seconds, machine.clock))


def test_what_is_faster_is_kept_and_built_upon() -> None:
    machine = Machine({"": 100.0, "a": 90.0, "b": 120.0, "bc": 150.0, "bcd": 140.0})
    found = find(machine, "abcd")
    assert machine.runs == ["", "a", "b", "bc", "bcd", "", "bc", "", "bc"]
    assert [trial.verdict for trial in found.trials[1:5]] == ["slower", KEPT, KEPT, "slower"]
    assert (found.best.setting.changes, found.gain, len(found.pairs)) == ({"b": True, "c": True}, 1.5, 2)
    assert found.untried == []


@pytest.mark.parametrize(
    ("trials", "verdict"),
    [
        ((99.0, 101.5, 101.5, 101.5, 103.0), "within the noise"),
        ((100.5, 101.5, 101.5, 101.5, 103.0), KEPT),  # every trial beats the median
        ((90.0, 102.5, 102.5, 102.5, 110.0), KEPT),  # by more than 2 %
        ((100.0,) * 5, "slower"),
        ((90.0, 99.0, 99.0, 200.0, 300.0), "slower"),
    ],
)
def test_a_winner_beats_the_noise(trials: tuple[float, ...], verdict: str) -> None:
    found = find(Machine({"": (95.0, 100.0, 100.0, 100.0, 130.0), "a": trials}), "a")
    assert found.trials[1].verdict == verdict


def test_nothing_faster_leaves_the_start_without_a_comparison() -> None:
    machine = Machine({"": 100.0, "a": 99.0, "b": "no device memory left"})
    found = find(machine, "ab")
    assert found.best is found.start
    assert (found.gain, machine.runs) == (1.0, ["", "a", "b"])


def test_a_trial_that_fails_is_a_row_and_the_search_goes_on() -> None:
    found = find(Machine({"": 100.0, "a": "no device memory left", "b": 110.0}), "ab")
    assert [trial.verdict for trial in found.trials[1:3]] == ["no device memory left", KEPT]
    assert found.best.setting.changes == {"b": True}


def test_lucky_winner_that_the_comparison_does_not_confirm_is_dropped() -> None:
    """Never worse than the start: what drifted in between favoured the candidate."""
    found = find(Machine({"": [80.0, 100.0, 100.0], "a": [90.0, 95.0, 96.0]}), "a")
    assert found.trials[1].verdict == KEPT
    assert found.best is found.start
    assert found.gain == 1.0
    assert "in the comparison nothing was faster than demo" in tune.conclusion(found, "demo", "tuned")


@pytest.mark.parametrize("best", [[130.0, "broken"], [130.0, 130.0, "broken"]])
def test_winner_that_fails_when_it_runs_again_is_dropped(best: list[Any]) -> None:
    found = find(Machine({"": 100.0, "a": best}), "a")
    assert found.best is found.start
    assert [trial.result.fault for trial in found.trials].count("broken") >= 1, "and the table shows it"


@pytest.mark.parametrize(("second", "kept"), [(100.5, True), (99.5, False)])
def test_small_gain_counts_if_every_pair_has_it(second: float, kept: bool) -> None:
    found = find(Machine({"": 100.0, "a": [130.0, 101.0, second]}), "a")
    assert (found.best is not found.start) == kept
    assert found.gain == pytest.approx(1.0 if not kept else 1.0075)


def test_comparison_goes_without_a_run_of_the_start_that_fails() -> None:
    found = find(Machine({"": [100.0, "broken", 104.0], "a": [130.0, 120.0, 130.0]}), "a")
    assert (found.best.setting.changes, found.gain, len(found.pairs)) == ({"a": True}, 1.25, 1)


def test_gain_is_of_the_runs_in_turn() -> None:
    found = find(Machine({"": [50.0, 100.0, 100.0], "a": [200.0, 110.0, 110.0]}), "a")
    assert found.gain == pytest.approx(1.1)
    assert (
        "1.10 times demo: FULL 100.0 (100.0 to 100.0) -> 110.0 (110.0 to 110.0) samples/s (2 runs of each, in turn"
        in tune.conclusion(found, "demo", "tuned")
    )


def test_start_that_does_not_run_is_rescued_by_the_first_part() -> None:
    found = find(Machine({"": "NVIDIA DALI is not installed", "a": 100.0, "ab": 120.0}), "ab")
    assert (found.best.setting.changes, found.gain) == ({"a": True, "b": True}, None)
    assert "demo does not run here (NVIDIA DALI is not installed); tuned does" in tune.conclusion(
        found, "demo", "tuned"
    )


def test_start_that_nothing_rescues_ends_with_its_reason() -> None:
    machine = Machine({"": "no such file", "a": "no such file", "ab": 1.0})
    with pytest.raises(UserError, match="does not run here: no such file"):
        find(machine, "ab")
    assert machine.runs == ["", "a"], "the rest would fail alike"


@pytest.mark.parametrize("seconds", [5, 10, 25, 35, 45, 55, 61, 75, 200])
@pytest.mark.parametrize("second", [120.0, 90.0, "hangs", "broken"])
def test_the_search_ends_in_time_with_a_result(seconds: float, second: Any) -> None:
    machine = Machine({"": 100.0, "a": second, "b": 130.0, "ab": 140.0})
    found = find(machine, "ab", seconds)
    assert machine.now <= max(seconds, 10)
    assert len(found.untried) + sum(trial.part in "ab" for trial in found.trials) == 2
    assert found.gain is not None
    assert found.gain >= 1
    if found.best is not found.start:
        assert found.pairs, "time for a comparison is kept free"


def test_one_trial_does_not_take_the_time_of_the_others() -> None:
    machine = Machine({"": 100.0, "a": "hangs", "b": 130.0})
    found = find(machine, "ab", 200)
    assert machine.limits[1] == 50, "a quarter of all"
    assert (found.trials[1].verdict, found.best.setting.changes) == ("stopped: not done after 50 s", {"b": True})


def test_without_time_for_a_comparison_the_gain_says_so() -> None:
    machine = Machine({"": 100.0, "a": 130.0})

    def slower_and_slower(setting: Setting, limit: float) -> Result:
        result = machine.measure(setting, limit)
        machine.seconds = 45
        return result

    found = search(parts("a"), slower_and_slower, Budget(60, machine.clock))
    assert (list(found.pairs), found.gain) == ([], 1.3)
    assert "no time was left to measure them in turn" in tune.conclusion(found, "demo", "tuned")


# --- what is tried -------------------------------------------------------------------------------------------------


def changes(part: str, space: Space, setting: Setting | None = None) -> list[Mapping[str, Any]]:
    return [candidate.changes for candidate in PARTS[part](space, setting or Setting())]


def space_of(ranks: int = 1, on_gpu: bool = False, cores: int = 4, **values: Any) -> Space:
    loaders = ("lowmem", "inmem", "resident")
    return Space(validate(values, "test").for_world(ranks), ranks, cores, on_gpu, loaders)


def test_the_cpu_is_spared_what_only_a_gpu_has() -> None:
    space = space_of(data_loader_config="inmem")
    assert changes("loader", space) == [{"data_loader_config": "lowmem"}, {"data_loader_config": "resident"}]
    assert changes("threads", space) == [{"num_data_workers": 1}, {"num_data_workers": 4}]
    assert changes("memory_format", space) == [{"channels_last": True}]
    assert changes("compile", space) == [{"enable_jit": True}]
    assert {tuple(change["network.rewritten"]) for change in changes("rewrites", space)} == {
        ("down1", "last"),
        ("down1",),
        ("last",),
    }
    assert not any(changes(part, space) for part in ("fused", "graph", "batch", "buckets"))


def test_a_gpu_and_ranks_add_to_it() -> None:
    space = space_of(ranks=2, on_gpu=True)
    assert changes("fused", space) == [{"fused_pointwise": True, "channels_last": True}]
    assert [setting.graph for setting in PARTS["graph"](space, Setting())] == [True]
    assert [change["bucket_cap_mb"] for change in changes("buckets", space)] == [10.0, 50.0, 100.0]
    assert changes("buckets", space_of(ranks=2, noddp=True)) == []


def test_switches_that_are_on_are_tried_off() -> None:
    space = space_of(on_gpu=True, channels_last=True, fused_pointwise=True, enable_jit=True)
    assert changes("memory_format", space) == [{"channels_last": False, "fused_pointwise": False}]
    assert changes("fused", space) == [{"fused_pointwise": False}]
    assert changes("compile", space) == [{"enable_jit": False}]


def test_parts_without_effect_are_left_out() -> None:
    synthetic = space_of(data_loader_config="synthetic")
    assert changes("loader", synthetic) == changes("threads", synthetic) == []
    resident = Setting({"data_loader_config": "resident"})
    assert changes("threads", space_of(on_gpu=True), resident) == []
    assert len(changes("threads", space_of(), resident)) == 2, "on the CPU it has threads"


def test_candidates_keep_what_was_found_before() -> None:
    before = Setting({"num_data_workers": 4}, graph=True)
    (after,) = PARTS["memory_format"](space_of(), before)
    assert after == Setting({"num_data_workers": 4, "channels_last": True}, graph=True)
    assert tune.describe(after, before) == "channels_last=true"
    assert tune.describe(after, Setting()) == "num_data_workers=4 channels_last=true CUDA graph"


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    config = validate({"train_path": nowhere, "device": "cpu"}, "test").for_world(1)
    space, notes = tune.look_around(config, 1, ())
    text = "\n".join(notes)
    assert space.loaders == []
    for part in ("lowmem, inmem, resident", "dali-lowmem", "they need a GPU", "global_batch_size stays 64, 64 a rank"):
        assert part in text
    assert "changes the training, and with it the learning rate" in tune.look_around(config, 1, (8,))[1][-1]


# --- a trial -------------------------------------------------------------------------------------------------------


class Launched:
    """Stands for `run_group`: notes what would be started and writes what --enable_benchy would."""

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


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Processes, Launched]]:
    def build(launched: Launched, **values: Any) -> tuple[Processes, Launched]:
        monkeypatch.setattr(tune, "run_group", launched)
        space = space_of(**values)
        return Processes(["--config=test"], space, planned=10, budget=Budget(100), folder=tmp_path), launched

    return build


def test_the_command_is_the_users_own(processes: Any) -> None:
    measure, launched = processes(Launched(), ranks=2, global_batch_size=8)
    measure(Setting({"network.rewritten": ["last"], "bucket_cap_mb": 50.0, "data_loader_config": "inmem"}), 60)
    command = launched.commands[-1]
    assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert command[5:8] == [str(TOP / "train.py"), "--config=test", "--enable_benchy"]
    assert {'--set=network.rewritten=["last"]', "--set=bucket_cap_mb=50.0", '--set=data_loader_config="inmem"'} <= set(
        command
    )
    measure, launched = processes(Launched())
    measure(Setting(graph=True), 60)
    assert launched.commands[-1][:2] == [sys.executable, str(TOP / "train_graph.py")]


def test_trials_are_scaled_to_the_time_there_is(processes: Any, tmp_path: Path) -> None:
    measure, launched = processes(Launched(), global_batch_size=8)
    result = measure(Setting(), 60)
    quick, scaled = launched.settings
    assert quick["FULL"] == {"batches": 1, "trials": 1, "warmup_trials": 1}
    # A tenth of 100 s for 6 trials of FULL and 4 of both others, at 100 samples/s.
    assert scaled["FULL"] == {"batches": round(10 / (14 / 100) / 8), "trials": 5, "warmup_trials": 1}
    assert result.rates["FULL"] == [100.0] * 5
    measure(Setting({"local_batch_size": 64}, graph=True), 60)
    assert len(launched.settings) == 3, "the pace is set once"
    assert launched.settings[-1]["FULL"] == {"batches": 1, "trials": 5, "warmup_trials": 4}
    assert launched.settings[-1]["SYNTHETIC"]["warmup_trials"] == 12, "a graph is recorded after eleven steps"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_compiler_that_was_gone_without_has_failed(processes: Any) -> None:
    warning = "root - WARNING - torch.compile failed, going on without it: no C++ compiler\n"
    measure, _ = processes(Launched(output=warning))
    fault = "torch.compile failed, going on without it: no C++ compiler"
    assert measure(Setting({"enable_jit": True}), 60).fault == fault
    assert measure(Setting(), 60).fault == "", "a config that asks for it runs all the same"


@pytest.mark.parametrize(
    ("code", "output", "says"),
    [
        (0, "error: of no consequence", ""),
        (None, "", "stopped: not done after 30 s"),
        (2, "INFO - x\nerror: no device memory left; lower it\n", "no device memory left; lower it"),
        (1, "[rank1]: Traceback\n[rank1]: torch.AcceleratorError: bad\nnoise", "torch.AcceleratorError: bad"),
        (1, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n", "exit code 1"),
        (1, "ChildFailedError:\n Signal 9 (SIGKILL) received by PID 3", "ended by SIGKILL, as where memory runs out"),
        (-11, "", "ended by SIGSEGV"),
        (3, "", "exit code 3"),
    ],
)
def test_why_a_trial_failed_is_one_line(code: int | None, output: str, says: str) -> None:
    assert tune.why_it_failed(code, output, 30) == says


FAMILY = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(folder / "pids").write_text(f"{child.pid}")
time.sleep(60)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int]) -> bool:
    for _ in range(50):
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("by", ["time", "ctrl-c"])
def test_whatever_ends_a_trial_ends_all_its_processes(tmp_path: Path, by: str) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, "-c", FAMILY, str(tmp_path)]
    with open(tmp_path / "log", "wb") as log:
        if by == "time":
            assert tune.run_group(command, os.environ, log, 2.0) is None
        else:
            # A shell has what it runs in the background ignore Ctrl-C, the tests, too.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                tune.run_group(command, os.environ, log, 60.0)
    assert wait_until_gone([int(pids.read_text())])


@pytest.mark.slow
def test_torchruns_ranks_end_with_it(tmp_path: Path) -> None:
    """They lie in process groups of their own."""
    script = tmp_path / "rank.py"
    script.write_text(f"import os, time; open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close(); time.sleep(60)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with open(tmp_path / "log", "wb") as log:
        assert tune.run_group(command, os.environ, log, 10.0) is None
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert wait_until_gone(pids)


# --- what comes out ------------------------------------------------------------------------------------------------


def test_the_file_says_what_made_it_and_reads_back(tmp_path: Path) -> None:
    space = space_of(ranks=2, on_gpu=True, global_batch_size=8)
    setting = Setting({"channels_last": True, "local_batch_size": 16}, graph=True)
    result = Result(1.0, {"FULL": [2.0]})
    start, best = Trial("start", Setting(), "", result), Trial("batch", setting, "", result, KEPT)
    found = Found(start, best, [start, best], [], 1.5)
    config = space.config.model_copy(update=dict(setting.changes))
    text = tune.tuned_yaml(found, config, space, "fast", ["Written by: tune --set 'a=\nb: c'"])
    header, body = text.split("fast:\n")
    assert header.splitlines() == [
        "# Written by: tune --set 'a= b: c'",
        "# Changed: channels_last false -> true, local_batch_size 4 -> 16",
        "# Run it with train_graph.py, the step as a CUDA graph",
    ]
    (tmp_path / "fast.yaml").write_text(text)
    read = load(str(tmp_path / "fast.yaml"), "fast")
    assert (read.global_batch_size, read.local_batch_size, read.channels_last) == (32, None, True)
    assert len(body.splitlines()) >= len(Config.model_fields)


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`tuning(*flags)`: the command line for config 'test' of a folder that holds a copy of the shipped file."""
    shutil.copy(SHIPPED, tmp_path / "UNet.yaml")
    monkeypatch.chdir(TOP)
    return lambda *flags: [f"--yaml_config={tmp_path / 'UNet.yaml'}", f"--output={tmp_path}", "--config=test", *flags]


def faster_with_channels_last(command: list[str]) -> float:
    return 130.0 if "--set=channels_last=true" in command else 100.0


def test_table_config_and_record_are_written(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "run_group", Launched(faster_with_channels_last))
    tune.main(tuning("--set=seed=7", "--only=memory_format,compile", "--set=expdir=/elsewhere"))
    printed = capsys.readouterr()
    assert "  1 channels_last=true" in printed.out
    assert (
        "tuned is 1.30 times test: FULL 100.0 (100.0 to 100.0) -> 130.0 (130.0 to 130.0) samples/s (2 runs of each, "
        in printed.out
    )
    assert "global_batch_size stays 8, 8 a rank" in printed.out
    assert "left: channels_last=true: 130.0 samples/s, kept" in printed.err
    config, start = load(str(tmp_path / "UNet.yaml"), "tuned"), load(str(tmp_path / "UNet.yaml"), "test")
    assert config == start.model_copy(update={"channels_last": True, "seed": 7, "expdir": "/elsewhere"})
    header = (tmp_path / "tuned.yaml").read_text().split("tuned:\n")[0]
    for part in ("benchmarks.tune --yaml_config", "today, node: 1 × a device", "Gain: tuned is 1.30", "with train.py"):
        assert part in header
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert (record["changes"], record["script"], record["gain"]) == ({"channels_last": True}, "train.py", 1.3)
    assert [trial["part"] for trial in record["trials"]] == ["start", "memory_format", "compile", *["compare"] * 4]
    assert record["provenance"]["command"].startswith("python -m benchmarks.tune")


def test_larger_batches_are_tried_on_request_alone(tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    launched = Launched(lambda command: 200.0 if "--set=local_batch_size=16" in command else 100.0)
    monkeypatch.setattr(tune, "run_group", launched)
    tune.main(tuning("--only=batch"))
    assert not any("local_batch_size" in flag for command in launched.commands for flag in command)
    tune.main(tuning("--only=batch", "--local_batch_sizes", "16", "32", "--overwrite"))
    output = capsys.readouterr().out
    assert "another batch changes the training" in output
    assert "tuned is 2.00 times test" in output


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_search_writes_nothing(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(*arguments: Any) -> int:
        raise error

    monkeypatch.setattr(tune, "run_group", interrupted)
    with pytest.raises(SystemExit):
        tune.main(tuning())
    assert [path.name for path in tmp_path.iterdir()] == ["UNet.yaml"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config=tset"], "unknown config tset in "),
        (["--only=threads,loaders"], "unknown part 'loaders'; known: loader, threads, "),
        (["--minutes=0"], "'0' is no number of minutes"),
        (["--minutes=nan"], "'nan' is no number of minutes"),
        (["--minutes=soon"], "'soon' is no number of minutes"),
        (["--ranks=0"], "'0' is no number of at least 1"),
        (["--ranks=3"], "global_batch_size 8 is not divisible by 3 ranks"),
        (["--local_batch_sizes", "128"], "Nsamples 64 is less than global_batch_size 128"),
        (["--local_batch_sizes", "0"], "'0' is no number of at least 1"),
        (["--local_batch_sizes", "4", "--keep_batch"], "not allowed with argument"),
        (["--set=seed"], "--set seed: expected key=value"),
        (["--set=sed=1"], "unknown key sed; did you mean seed?"),
        (["--name=../tuned"], "--name '../tuned' must be a plain name"),
        (["--name=.tuned"], "--name '.tuned' must be a plain name"),
        (["--name=UNet"], "would replace "),
        (["--name=demo"], "has a config demo already, which would be found first"),
        (["--name=old"], "old.yaml exists; give another --name, or --overwrite to replace it"),
        (["--output=/none"], "no such directory: /none"),
        (["--yaml_config=/none.yaml"], "cannot read yaml_config /none.yaml"),
        (["--minute=3"], "unrecognized arguments: --minute=3; see python -m benchmarks.tune --help"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], says: str
) -> None:
    launched = Launched()
    monkeypatch.setattr(tune, "run_group", launched)
    (tmp_path / "old.yaml").write_text("old: {}\n")
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning(*flags))
    line = capsys.readouterr().err
    assert (stop.value.code, line.count("\n"), launched.commands) == (2, 1, [])
    assert line.startswith("error: ")
    assert says in line
    assert (tmp_path / "old.yaml").read_text() == "old: {}\n"


def test_a_config_that_does_not_run_is_one_line(
    tmp_path: Path, tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tune, "run_group", Launched(lambda command: 0, "error: no such file: x.h5; make it\n"))
    with pytest.raises(SystemExit) as stop:
        tune.main(tuning("--only=threads"))
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: nothing to tune, the config does not run here: no such file: x.h5; make it"
    assert not (tmp_path / "tuned.yaml").exists()


def test_several_ranks_are_refused(tuning: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        tune.main(tuning())
    assert "start benchmarks.tune once, not on every rank" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_search_ends_in_a_config_that_trains(
    tmp_path: Path, tuning: Any, data_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tune, "MEASURED_SECONDS", (0.2, 0.5))
    tune.main(tuning(*data_flags, "--only=threads,memory_format", "--minutes=1.5", f"--set=expdir={tmp_path / 'runs'}"))
    printed = capsys.readouterr()
    assert not (tmp_path / "runs").exists(), "trials leave nothing behind"
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert record["trials"][0]["medians"]["FULL"] > 0, printed.err
    assert [trial["part"] for trial in record["trials"] if trial["part"] == "memory_format"] == ["memory_format"]
    assert not any(trial["fault"] for trial in record["trials"])
    assert record["provenance"]["versions"]["torch"]
    train.main([f"--yaml_config={tmp_path / 'UNet.yaml'}", "--config=tuned", "--num_epochs=1"])
    assert (tmp_path / "runs" / "tuned" / "1GPU" / "00" / "checkpoints" / "best" / "weights.pt").exists()


@pytest.mark.slow
def test_two_real_ranks_are_measured(tmp_path: Path, data_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOP)
    monkeypatch.setattr(tune, "MEASURED_SECONDS", (0.2, 0.5))
    config = load(str(SHIPPED), "test").for_world(2)
    arguments = [f"--yaml_config={SHIPPED}", "--config=test", *data_flags]
    measure = Processes(arguments, Space(config, ranks=2), planned=10, budget=Budget(60), folder=tmp_path)
    result = measure(Setting({"bucket_cap_mb": 50.0}), 120)
    assert result.fault == ""
    assert set(result.rates) == {"IO", "SYNTHETIC", "FULL", "NO-COMM"}
    assert result.provenance["world_size"] == 2
    assert "device is cuda, but torch sees no CUDA device" in measure(Setting({"device": "cuda"}), 120).fault
