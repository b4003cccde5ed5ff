"""The directory of a run: which one a command uses, its only writer, its records, and what --resume=no removes."""

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import pytest
from processes import run_ranks
from trainings import ALONE, YAML, killed, names
from volume_files import write_volume

from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data.loaders import open_volumes
from utils.distributed.launch import lasting_jobs
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import BLOCKS, HEAD, open_locked
from utils.run import checkpoint, provenance
from utils.run import open_run as runs
from utils.run.checkpoint import step_directory
from utils.run.choice import RunRequest, choose, run_request
from utils.run.directory import RunDirectory
from utils.run.open_run import Run
from utils.run.provenance import command, data_changes, data_record
from utils.steps import build
from utils.volumes.opened import Volumes


def config(**changes: Any) -> Config:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load(YAML, "test", dotted).for_world(1)


TEST = config()
SIZE = build.model_size(TEST)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return tmp_path / "test" / "1ranks" / "00"


def save(path: Path, config: Config, step: int = 16, **more: float) -> None:
    weights = {"network": {}, "config": config.model_dump(), "step": step}
    state = {"step": step, "epoch": step // 8, "best_step": step, **more}
    training = {"optimizer": {}, "scaler": {}, "random": [], "state": state}
    checkpoint.write(step_directory(path / "checkpoints", step), weights, training)


@pytest.fixture
def run(first: Path) -> Callable[..., Path]:
    """run(number, finished=True, config=…, jobs=…): leaves the directory of a run as a training run would."""

    def leave(number: int, finished: bool = True, config: Config = TEST, tag: str = "00", **record: Any) -> Path:
        path = first.with_name("00" if number == 1 else f"00-{number}")
        save(path, config)
        (path / "config.yaml").write_text(configs.to_yaml(config.model_copy(update={"local_batch_size": None}), "test"))
        record = {"run_num": tag, "jobs": [], "origin": None, "command": command(), **record}
        (path / "provenance.json").write_text(json.dumps(record))
        if finished:
            (path / "summary.json").write_text(json.dumps({"steps": 16}))
        return path

    return leave


def request(first: Path, config: Config = TEST, **options: Any) -> RunRequest:
    return RunRequest(config, "test", RunDirectory(first), **options)


def chosen(first: Path, **options: Any) -> tuple[str, str]:
    choice = choose(request(first, **options))
    return choice.directory.path.name, choice.reason


def name_of(first: Path, **options: Any) -> str:
    return chosen(first, **options)[0]


@pytest.mark.parametrize("resume", [None, "auto", "no", "/other/00"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_restarted_job_returns_to_its_run(first: Path, run: Any, resume: str | None, finished: bool) -> None:
    """Regardless of its state, flags and config, which may have been edited; also if other jobs have continued it."""
    run(1, finished=finished, jobs=["slurm 7"])
    run(2, finished=False, jobs=["slurm 8"], earlier=[{"jobs": ["slurm 9"], "command": command()}])
    for job, name in (("slurm 7", "00"), ("slurm 8", "00-2"), ("slurm 9", "00-2")):
        choice = choose(request(first, config(seed=3), resume=resume, restarted=(job,)))
        assert (choice.directory.path.name, choice.reason) == (name, "")
        assert choice.resume == (None if resume == "no" else resume), "a restart removes nothing"
    assert name_of(first, resume="no", restarted=("slurm 10",)) == "00"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["config.yaml", "provenance.json"])
def test_a_file_system_that_fails_does_not_start_another_run(first: Path, run: Any, name: str, error: int) -> None:
    """A fixed bug: an unfinished run whose files could not be read counted as one with another config."""
    run(1, finished=False)
    assert name_of(first) == "00"
    read = Path.read_text

    def fail(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == name:
            raise OSError(error, os.strerror(error), str(path))
        return read(path, *arguments, **options)

    with mock.patch.object(Path, "read_text", fail), pytest.raises((UserError, OSError), match=os.strerror(error)):
        name_of(first)
    (first / name).write_text("[")
    assert name_of(first) == ("00-2" if name == "config.yaml" else "00")


def test_an_unfinished_run_of_other_data_is_not_continued(first: Path, run: Any) -> None:
    """A fixed bug: all paths were neutral. They are for the same data, and for a file that has changed in place."""
    data = {"train_path": {provenance.DIGEST: "one"}, "val_path": {provenance.DIGEST: "two"}}
    run(1, finished=False, data=data)
    changed = {**data, "train_path": {provenance.DIGEST: "three"}}
    assert chosen(first, config=config(train_path="moved.h5"), data=data) == ("00", "")
    assert chosen(first, data=changed) == ("00", "")
    choice = chosen(first, config=config(train_path="other.h5"), data=changed)
    assert choice == ("00-2", "00 differs in train_path; --resume would use it")
    linked = {**data, "train_path: source 0": {provenance.DIGEST: "other"}}  # fixed: it was not compared
    assert name_of(first, config=config(train_path="moved.h5"), data=linked) == "00-2"
    listed = {"train_path[0]": changed["train_path"], "train_path[1]": data["train_path"], "val_path": data["val_path"]}
    assert name_of(first, config=config(train_path=["other.h5", "train.h5"]), data=listed) == "00-2"


def test_resume_no_uses_the_first_directory_and_resume_the_newest_run_or_the_given_one(first: Path, run: Any) -> None:
    assert name_of(first, resume="no") == "00"
    run(1, finished=False)
    run(2)
    for given in (TEST, config(num_epochs=5), config(seed=3)):
        assert chosen(first, resume="no", config=given) == ("00", "")
        assert chosen(first, resume="auto", config=given) == ("00-2", "")
        assert chosen(first, resume=str(first), config=given) == ("00", "")
    assert name_of(first, resume=str(first / "checkpoints" / "step_00000016")) == "00-3"
    assert name_of(first, resume=str(first.with_name("other"))) == "00-3"


def test_resume_refuses_the_newest_run_if_it_is_on_other_ranks(first: Path, run: Any) -> None:
    """A fixed bug: --resume looked at the runs on the same number of ranks only, and started from scratch."""
    for seconds, number in ((3, 1), (2, 2)):
        os.utime(run(number, jobs=["slurm 7"], finished=False) / "checkpoints", (seconds, seconds))
    others = [first.parents[1] / name for name in ("2ranks/00", "1GPU/00", "2ranks/00-2", "copy/00", "2ranks/01")]
    for seconds, other in enumerate(others[:3]):
        os.utime(shutil.copytree(first, other) / "checkpoints", (seconds, seconds))
    for other in others[3:]:
        os.utime(shutil.copytree(first, other) / "checkpoints", (9, 9))  # no runs of this config and run number
    assert name_of(first, resume="auto") == "00-2", "the newest one is here"
    os.utime(others[2] / "checkpoints", (4, 4))
    with pytest.raises(UserError, match=f"^--resume: the newest run is {others[2]}, .* --resume={others[2]}$"):
        choose(request(first, resume="auto"))
    with pytest.raises(UserError, match=f"--resume={others[2]} --set=global_batch_size=8$"):
        choose(request(first, config(global_batch_size=16), resume="auto"))
    assert name_of(first, resume="auto", restarted=("slurm 7",)) == "00-2"
    assert name_of(first, resume=str(others[2])) == "00-3"
    shutil.rmtree(others[2] / "checkpoints")
    assert name_of(first, resume="auto") == "00-2", "without a checkpoint, --resume=DIR could not continue it"


def test_only_an_unfinished_idle_run_with_an_equal_config_is_continued(first: Path, run: Any) -> None:
    run(1, finished=False)
    run(2, finished=False, config=config(enable_amp=True))
    run(3)
    assert chosen(first) == ("00", "")
    assert chosen(first, config=config(enable_amp=True)) == ("00-2", "")
    assert name_of(first, config=config(num_epochs=5)) == "00-4"
    with open_locked(first / ".lock", "locked"):
        assert name_of(first) == "00-4"


def test_any_other_command_uses_the_next_free_directory_for_a_reason(first: Path, run: Any) -> None:
    """--resume without a run is no error, because a job script may give it at each start."""
    assert chosen(first) == ("00", "")
    assert chosen(first, resume="auto") == ("00", "--resume has found no run to resume")
    run(1)
    assert chosen(first) == ("00-2", "00 is finished; --resume would use it")
    assert "00 is finished and differs in network.width; " in chosen(first, config=config(network__width=5))[1]
    with open_locked(first / ".lock", "locked"):
        assert chosen(first) == ("00-2", "00 is being trained by another process")
    (run(2, finished=False) / "config.yaml").write_text("")
    assert chosen(first) == ("00-3", "00-2 differs in config.yaml; --resume would use it")
    run(10)
    assert chosen(first) == ("00-11", "00-10 is finished; --resume would use it"), "10 is more than 2"


def test_settings_that_change_neither_result_nor_speed_do_not_count(first: Path, run: Any) -> None:
    """Fixed: an interrupted rung of the tutorial's ladder was continued with the loader of the next one."""
    run(1, finished=False)
    neutral = {"train_path": "/elsewhere.h5", "local_batch_size": 8, "checkpoint__every_steps": 3}
    assert name_of(first, config=config(**neutral)) == "00"
    speed = {"num_data_workers": 7, "data_loader_config": "dali-lowmem", "enable_manual_profiling": True}
    changes = {"global_batch_size": 4, "seed": 1, "bucket_cap_mb": 100.0, **speed}
    for key, value in {**changes, "lr_schedule__start_lr": 0.1, "resident_dtype": "float16"}.items():
        assert name_of(first, config=config(**{key: value})) == "00-2", key


def test_weights_and_other_runs_are_part_of_what_a_run_is(first: Path, run: Any) -> None:
    """A run that began with --init_from is not continued by a command without it, nor with other weights."""
    run(1, finished=False, origin="--init_from=/weights.pt")
    assert chosen(first, init_from="/weights.pt") == ("00", "")
    for options in ({}, {"init_from": "/others.pt"}):
        assert chosen(first, **options) == ("00-2", "00 differs in --init_from; --resume would use it")
    run(2, finished=False, origin="--resume=/other/00")
    assert name_of(first, resume="/other/00") == "00-2"
    assert name_of(first, resume="/another/00") == "00-3"


def test_each_command_of_a_restarted_job_returns_to_its_own_run(first: Path, run: Any, monkeypatch: Any) -> None:
    """A job script with two runs that was requeued during the second one, and one before its second began."""
    run(1, jobs=["slurm 7"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--enable_amp"])
    assert name_of(first, restarted=("slurm 7",)) == "00-2"
    run(2, finished=False, jobs=["slurm 7"])
    assert name_of(first, restarted=("slurm 7",)) == "00-2"
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    assert name_of(first, restarted=("slurm 7",)) == "00"


def test_names_of_a_job_last_across_restarts() -> None:
    """Two torchruns have the same run id, none, but not the same directory of logs."""
    logs = "/tmp/torchelastic_a/none_x"
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": f"{logs}/attempt_0/1/error.json"}
    again = {**agent, "TORCHELASTIC_ERROR_FILE": f"{logs}/attempt_1/0/error.json", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert lasting_jobs({}) == ([], [])
    assert lasting_jobs(agent) == (["torchrun none_x"], [])
    assert lasting_jobs(again) == (["torchrun none_x"],) * 2
    assert lasting_jobs({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}) == ([], [])
    assert lasting_jobs({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_ERROR_FILE": ""}) == (["torchrun a"], [])
    requeued = {**agent, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert lasting_jobs(requeued) == (["slurm 7", "torchrun none_x"], ["slurm 7"])
    assert lasting_jobs({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}) == (["slurm 7"], [])


def test_the_second_directory_of_a_run_and_the_task_of_an_array_stay_apart(first: Path, run: Any) -> None:
    """submit_pm.sh gives task 2 of an array the run number 00-2. A directory in which no run has begun is free."""
    run(1)
    task = run(2, finished=False, tag="00-2")
    assert name_of(first) == "00-3"
    assert name_of(first, resume="auto") == "00"
    assert name_of(task) == "00-2"
    run(2, finished=False, tag="00")
    assert name_of(first) == "00-2"
    for resume in (None, "auto", "no"):
        assert name_of(task, resume=resume) == "00-2-2", "the run of another run number is never replaced"
    assert chosen(task) == ("00-2-2", "00-2 belongs to another run")
    shutil.rmtree(task)
    task.mkdir()
    (task / ".lock").touch()
    assert name_of(first) == "00-2"
    (task / "notes.txt").touch()
    assert name_of(first) == "00-3"


def opened(first: Path, **options: Any) -> contextlib.AbstractContextManager[Run]:
    volumes = Volumes(options.get("config", TEST), "hdf5")
    return Run.open(request(first, data=data_record(volumes, ALONE), **options), volumes, ALONE)


def begin(first: Path, **options: Any) -> None:
    """Begins a run that is killed at once."""
    with opened(first, **options) as run:
        run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))


def begin_and_die(first: Path, renamed: int) -> None:
    """Begins a run; is killed while it writes its records, once `renamed` of them have their names."""
    replace, calls = os.replace, iter(range(9))
    os.replace = lambda *names: replace(*names) if next(calls) < renamed else os.kill(os.getpid(), signal.SIGKILL)
    begin(first)


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_kill_while_the_first_records_are_written_leaves_the_directory_free(first: Path, renamed: int) -> None:
    """Fixed: the same command started in another one."""
    killed(begin_and_die, first, renamed)
    assert any(name.endswith(".partial") for name in names(first))
    assert chosen(first) == ("00", "")
    begin(first)
    (first / "out.log").write_text("early")
    begin(first, config=configs.load(YAML, "test").for_world(4))
    assert (first / "out.log").read_text().startswith("early"), "a run without a checkpoint keeps its log"
    assert names(first) == [".lock", "config.yaml", "out.log", "provenance.json"]
    again = configs.load(str(first / "config.yaml"), "test").for_world(2)
    assert (again.global_batch_size, again.local_batch_size) == (8, 4), "for another number of ranks"


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("options", [{"resume": "auto"}, {"resume": "no"}, {"restarted": ("slurm 7",)}], ids=str)
def test_a_run_that_is_being_trained_is_refused_and_not_touched(
    first: Path, run: Any, finished: bool, options: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(runs, "RESTART_SECONDS", 0.1)
    run(1, finished, jobs=["slurm 7"])
    (first / "checkpoints" / ".step_00000020.abc.partial").mkdir()  # of a save in progress
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    with open_locked(first / ".lock", "locked"):
        with pytest.raises(UserError, match=rf"^another run is writing to {first}; .*--run_num"):
            opened(first, **options).__enter__()
        assert names(first.parent) == ["00"]
    (first / ".lock").unlink()
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    with opened(first, **options) as again:
        assert again.directory.path == first


def test_runs_that_start_at_once_use_different_directories(first: Path) -> None:
    """Before the first one has begun, and while it is trained; directories that were not used are removed."""
    with opened(first) as first_run, opened(first) as second_run:
        assert [run.directory.path.name for run in (first_run, second_run)] == ["00", "00-2"]
        assert ALONE.heartbeat.log == second_run.directory.log, "for the line about a hang"
        with pytest.raises(UserError, match=r"^another run is writing to "):  # A fixed bug: it tried again and again.
            opened(first, resume="no").__enter__()
        first_run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))
        with opened(first) as three:
            assert three.directory.path.name == "00-3"
    assert names(first.parent) == ["00"]
    with opened(first) as again:
        assert again.directory.path == first, "it is idle and unfinished"
    with opened(first.with_name("01")):
        pass
    assert names(first.parent) == ["00"]


def test_a_restarted_job_waits_for_the_end_of_its_predecessor(first: Path, run: Any) -> None:
    run(1)
    predecessor = open_locked(first / ".lock", "locked")
    threading.Timer(0.1, predecessor.close).start()
    with opened(first, resume="no", restarted=("slurm 7",)):
        assert predecessor.closed


def test_a_restarted_job_ends_if_another_has_its_run(first: Path, run: Any, monkeypatch: Any, caplog: Any) -> None:
    """Fixed: it ended with exit code 2, although nothing was lost."""
    monkeypatch.setattr(runs, "RESTART_SECONDS", 0.1)
    run(1, jobs=["slurm 7"])
    record = json.loads((first / "provenance.json").read_text())
    (first / "provenance.json").write_text(json.dumps({**record, "jobs": ["slurm 8"], "earlier": [record]}))
    with open_locked(first / ".lock", "locked"), opened(first, restarted=("slurm 7",)) as again:
        assert again is None
    assert any(line.startswith("Nothing to do: another job") for line in caplog.messages)


def open_on_ranks(world: World, first: str) -> list[Any]:
    """Rank 0 decides; the request of the others leads elsewhere."""
    wanted = request(Path(first if world.is_root else "/nowhere/00"), resume="no")
    with Run.open(wanted, Volumes(TEST, "hdf5"), world) as run:
        return [str(run.directory), run.choice.resume]


def test_all_ranks_follow_rank_0(first: Path) -> None:
    assert run_ranks(open_on_ranks, 2, str(first)) == [[str(first), "no"]] * 2


def test_the_origin_of_a_run_and_its_jobs_outlast_its_processes(first: Path, tmp_path: Path) -> None:
    """The second process was started with --resume alone; the command of the first still finds its run."""
    save(tmp_path / "source", TEST)
    weights = str(tmp_path / "source" / "checkpoints" / "step_00000016")
    begin(first, init_from=weights, jobs=("slurm 7",))
    save(first, TEST, 8)
    (first / "summary.json").touch()
    begin(first, resume="auto", jobs=("slurm 8",))
    assert not (first / "summary.json").exists(), "a run that resumes is not finished"
    begin(first, resume="auto", jobs=("slurm 9",))
    assert name_of(first, init_from=weights) == "00"
    assert name_of(first) == "00-2"
    for job in ("slurm 7", "slurm 8", "slurm 9"):
        assert name_of(first, restarted=(job,)) == "00"
    record = json.loads((first / "provenance.json").read_text())
    assert [earlier["jobs"] for earlier in record["earlier"]] == [["slurm 7"], ["slurm 8"]]
    assert all("earlier" not in earlier for earlier in record["earlier"])


def test_a_run_that_resumes_another_one_compares_its_kernels_and_data(first: Path, caplog: Any) -> None:
    """And keeps its own origin. Records of earlier versions lack the kernels."""
    begin(first)
    save(first, TEST, 8)
    path, elsewhere = first / "provenance.json", first.parent / "other" / "00"
    record = json.loads(path.read_text())
    layers = ["down1", "down2", "up2", "last", "loss"]
    assert record["kernels"] == dict.fromkeys(layers, "torch (there is no CUDA device)")
    record["kernels"]["last"], record["origin"] = "cudnn", "weights"
    path.write_text(json.dumps(record))
    begin(elsewhere, resume=str(first))
    assert any("last: cudnn before, torch now" in line for line in caplog.messages)
    written = json.loads((elsewhere / "provenance.json").read_text())
    assert "earlier" not in written
    assert written["origin"] != "weights"


def test_goodput_is_the_share_of_steps_in_the_time_of_all_processes(first: Path, monkeypatch: Any) -> None:
    """A fixed bug: the time came from dates of files and the clock, which a copy, a failed start and NTP change."""
    for seconds in (100, 300, 0):  # killed, so that their steps are lost; the last one before its first record
        monkeypatch.setattr(runs, "STARTED", time.perf_counter() - seconds)
        with opened(first) as run:
            run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))
            if seconds:
                run.records.scalars({"Step/loss": 1.0}, 1)
        for file in first.iterdir():
            os.utime(file, (0, time.time() + 9e5))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(runs, "STARTED", time.perf_counter() - 200)
    with opened(first) as run:
        run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))
        assert run.goodput(150.0) == pytest.approx(150 / 600, rel=0.2)
        assert run.goodput(0.0) == 0


def test_ctrl_c_says_what_is_kept(first: Path) -> None:
    """A fixed bug: without a checkpoint it said nothing."""

    def interrupt(*steps: int) -> None:
        with opened(first):
            for step in steps:
                save(first, TEST, step)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="nothing is kept, and the same command starts again"):
        interrupt()
    with pytest.raises(KeyboardInterrupt, match="the last checkpoint is kept, and the same command"):
        interrupt(8)


def test_goodput_of_a_run_without_its_records(first: Path, monkeypatch: Any) -> None:
    """A fixed bug: it was above 100 %. The checkpoint has the time of the processes; another run's does not count."""
    save(first, TEST, 8, process_seconds=400.0, step_seconds=300.0)
    monkeypatch.setattr(runs, "STARTED", time.perf_counter() - 200)
    for path, resume, expected in ((first.with_name("01"), str(first), 0.0), (first, "auto", 0.5)):
        with opened(path, resume=resume) as run:
            state = run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))
            assert run.goodput(state.step_seconds) == pytest.approx(expected, rel=0.2)


def test_a_kill_before_the_link_to_the_best_checkpoint_moves_loses_nothing(first: Path) -> None:
    """A fixed bug: the link stayed behind, and the best checkpoint was removed. Evaluations of later epochs go."""
    for step in (8, 16):
        save(first, TEST, step)
    (first / "evaluation").mkdir()
    for step in (16, 24):
        (first / "evaluation" / f"step_{step:08d}.npz").touch()
    (first / "checkpoints" / "best").symlink_to("step_00000008")
    step_directory(first / "checkpoints", 16).rename(first / "checkpoints" / ".step_00000016.replaced")
    begin(first, resume="auto")
    assert os.readlink(first / "checkpoints" / "best") == "step_00000016"
    assert names(first / "evaluation") == ["step_00000016.npz"]


WRITTEN = ["config.yaml", "evaluation/step_00000008.npz", "logs/events.out.tfevents.1"]
WRITTEN += ["loss_curves.png", "metrics.jsonl", "out.log", "provenance.json", "report.html", "slices.png", "wandb/id"]
WRITTEN += ["slices_largest_error.png", "top_operations.txt", "trace.json.gz", "summary.json"]
WRITTEN += ["checkpoints/.step_00000009.12.partial/weights.pt"]


@pytest.fixture
def recorded(first: Path, run: Any) -> Path:
    """A run directory with all that a run may write, and two files of the user."""
    run(1)
    for path in (first / name for name in (*WRITTEN, "notes.txt", "plots/mine.png")):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(path.name)
    return first


def test_resume_no_removes_what_a_run_has_written_and_nothing_else(recorded: Path) -> None:
    """Report, traces and old event files once stayed; TensorBoard showed old hyperparameters with the new loss."""
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    with opened(recorded, resume="no", config=config(seed=3)) as run:
        assert all(path.read_bytes() == content for path, content in before.items()), "only once it begins"
        run.restore(build.Parts(SIZE, mock.Mock(), mock.Mock()))
    assert names(recorded) == [".lock", "config.yaml", "notes.txt", "out.log", "plots", "provenance.json"]
    assert "seed: 3" in (recorded / "config.yaml").read_text()


def test_an_interrupted_removal_is_completed_by_the_next_start(recorded: Path, monkeypatch: Any) -> None:
    """Fixed: the same command without --resume=no left a half-removed run, and --resume continued it."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin(recorded, resume="no")
    assert {"checkpoints", "metrics.jsonl", "provenance.json"} <= set(names(recorded))
    assert name_of(recorded) == name_of(recorded, resume="auto") == "00"
    with opened(recorded, resume="auto") as run:
        assert run.start.path is None
    begin(recorded)
    assert names(recorded) == [".lock", "config.yaml", "notes.txt", "out.log", "plots", "provenance.json"]


def volumes(folder: Path) -> dict[str, str]:
    """Keys of config 'test' for a training run on volumes of their own."""
    folder.mkdir()
    seeds = {"train_path": 1, "val_path": 2}
    return {key: str(write_volume(folder / f"{key}.h5", seed=seed)) for key, seed in seeds.items()}


def change_one_value(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["Hydro"][-1, -1, -1, -1] += 1


def test_a_resumed_run_warns_about_changed_data(first: Path, tmp_path: Path, caplog: Any) -> None:
    """It once continued silently on a file that had been replaced."""
    paths = volumes(tmp_path / "data")
    given, valid = config(**paths), Path(paths["val_path"])
    begin(first, config=given)
    change_one_value(valid)
    for _ in range(2):
        save(first, given, 8)
        begin(first, config=given, resume="auto")
    change_one_value(valid)
    begin(first, config=given, resume="no")
    (warning,) = [line for line in caplog.messages if " differs from " in line]
    assert warning == f"val_path {valid} differs from the data of the run that resumes: other content"


def error_in_own_directory(world: World, folder: str) -> str:
    """The error of a run that opens relative paths in a directory of its own for each rank."""
    os.chdir(Path(folder, str(world.rank)))
    given = config(train_path="train_path.h5", val_path="val_path.h5")
    try:
        run_request(cli.parse(["--config=test"]), Volumes(given, "hdf5"), world)
        return ""
    except UserError as error:
        return str(error)


def test_ranks_that_see_different_data_at_one_path_are_refused(tmp_path: Path) -> None:
    """Fixed: each rank trained on its own file. Rank 2 has no validation file, which its loader would report."""
    for rank in range(3):
        paths = volumes(tmp_path / str(rank))
    os.remove(paths["val_path"])
    assert run_ranks(error_in_own_directory, 3, str(tmp_path)) == [""] * 3
    for rank in (1, 2):
        change_one_value(tmp_path / str(rank) / "train_path.h5")
    for error in run_ranks(error_in_own_directory, 3, str(tmp_path)):
        start = "train_path train_path.h5 is another file on ranks 1, 2 than on rank 0: other content; use a path at "
        assert error.startswith(start)
    assert not (tmp_path / "run").exists()


def test_only_files_that_the_loader_reads_are_recorded(tmp_path: Path) -> None:
    paths = volumes(tmp_path / "data")
    npy = {f"{split}_path_npy_{field}": paths["val_path"] for split in ("train", "val") for field in ("data", "label")}
    for loader, keys in {"dali-lowmem": paths | npy, "lowmem": paths, "synthetic": {}}.items():
        given = config(data_loader_config=loader, **paths, **npy)
        assert data_record(open_volumes(given), ALONE).keys() == keys.keys(), loader
    several = config(**paths | {"train_path": [*paths.values()]})
    assert data_record(open_volumes(several), ALONE).keys() == {"train_path[0]", "train_path[1]", "val_path"}


def test_a_large_file_is_sampled_up_to_its_end(tmp_path: Path) -> None:
    """A 39 GB file costs as little as this one: a change anywhere in the first MiB or in the last block is noticed."""
    path, size = tmp_path / "train.h5", 2**35
    sparse = config(train_path=str(path), val_path=str(tmp_path / "none.h5"))
    records = []
    for place in (0, HEAD + 1, HEAD - 1, size - 1, size // BLOCKS):
        with path.open("wb") as file:
            file.truncate(size)
            file.seek(place)
            file.write(b"x" if place else b"")
        records.append(data_record(open_volumes(sparse), ALONE))
    assert records[0].keys() == {"train_path"}, "files that the loader does not need may be missing"
    assert [bool(data_changes(records[0], record)) for record in records[1:]] == [False, True, True, True]
