"""A training continues an interrupted run in its directory, and otherwise starts in the next free one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from trainings import YAML
from utils.training.choice import LOCK, Choice, Request, choose
from utils.training.directory import RunDirectory, open_run

from utils import config as configs
from utils.config import Config
from utils.config.schema import NEUTRAL_KEYS
from utils.distributed.launch import Launch, lasting_jobs
from utils.distributed.locks import open_locked
from utils.distributed.world import World
from utils.errors import UserError
from utils.provenance import command
from utils.training import choice as choices
from utils.training.loggers.base import Resumed

ALONE = World(Launch("test"), torch.device("cpu"))


def config(**changes: Any) -> Config:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load(YAML, "test", dotted).for_world(1)


TEST = config()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first directory of run number 00."""
    return tmp_path / "test" / "1ranks" / "00"


@pytest.fixture
def run(first: Path) -> Callable[..., Path]:
    """run(number, finished=True, config=…, jobs=…): leaves the directory of a run as a training would."""

    def leave(number: int, finished: bool = True, config: Config = TEST, tag: str = "00", **record: Any) -> Path:
        path = first.with_name("00" if number == 1 else f"00-{number}")
        (path / "checkpoints" / "step_00000016").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(configs.to_yaml(config.model_copy(update={"local_batch_size": None}), "test"))
        record = {"run_num": tag, "jobs": [], "origin": None, "command": command(), **record}
        (path / "provenance.json").write_text(json.dumps(record))
        if finished:
            (path / "summary.json").write_text(json.dumps({"steps": 16}))
        return path

    return leave


def chosen(first: Path, *, config: Config = TEST, **request: Any) -> tuple[str, str]:
    """Name and reason of the choice."""
    choice = choose(Request(config, "test", first, **request))
    return choice.path.name, choice.reason


# --- without --resume ------------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_and_the_next_one_starts_in_a_directory_of_its_own(first: Path, run: Any) -> None:
    assert chosen(first) == ("00", "")
    run(1)
    assert chosen(first) == ("00-2", "00 is finished; --resume with more epochs would extend it")
    run(2)
    run(10)
    assert chosen(first)[0] == "00-11", "10 is more than 2"
    assert chosen(first)[1].startswith("00-10 is finished; ")


def test_the_reason_promises_only_what_resume_does(first: Path, run: Any) -> None:
    """Fixed: "--resume would continue it" stood for runs that a resume refused, or in which it had nothing to do."""
    run(1)
    fits = "; --resume continues such a run only if its checkpoint fits"
    assert chosen(first, config=config(num_epochs=1))[1] == "00 is finished; --resume with more epochs would extend it"
    assert chosen(first, config=config(num_epochs=5))[1] == "00 is finished; --resume would extend it to 5 epochs"
    wide, patient = config(network__width=5), config(early_stopping__patience=1)
    assert chosen(first, config=wide)[1] == f"00 is finished and differs in network.width{fits}"
    run(1, config=patient)
    assert chosen(first, config=patient)[1] == "00 is finished", "more epochs may not extend it"
    (first / "config.yaml").write_text("")
    assert chosen(first)[1] == f"00 is finished and has no readable config{fits}"
    run(2, finished=False)
    assert chosen(first, config=wide)[1] == f"00-2 differs in network.width{fits}"
    shutil.rmtree(first.with_name("00-2") / "checkpoints")
    assert chosen(first, config=wide)[1] == "00-2 differs in network.width and has no checkpoint"


def test_resume_without_a_run_starts_a_training_and_warns(first: Path, run: Any) -> None:
    """Fixed: it was silent. It is no error, because a job script may give --resume at each start."""
    choice = choose(Request(TEST, "test", first, "auto"))
    assert choice.warnings == (f"--resume: no run to resume in {first}; a new training starts",)
    run(1)
    assert choose(Request(TEST, "test", first, "auto")).warnings == ()


def test_only_an_unfinished_run_with_an_equal_config_is_continued(first: Path, run: Any) -> None:
    run(1, finished=False)
    run(2, finished=False, config=config(enable_amp=True))
    run(3)
    assert chosen(first) == ("00", "")
    assert chosen(first, config=config(enable_amp=True)) == ("00-2", "")
    assert chosen(first, config=config(num_epochs=5))[0] == "00-4"
    shutil.rmtree(first.with_name("00-3"))
    reason = "00-2 differs in num_epochs, enable_amp; --resume continues such a run only if its checkpoint fits"
    assert chosen(first, config=config(num_epochs=5)) == ("00-3", reason)


def test_settings_that_change_no_result_do_not_count(first: Path, run: Any) -> None:
    run(1, finished=False)
    neutral = {
        "num_data_workers": 7,
        "data_loader_config": "dali-lowmem",
        "train_path": "/elsewhere.h5",
        "expdir": "/elsewhere",
        "local_batch_size": 8,
        "checkpoint__every_steps": 3,
        "enable_manual_profiling": True,
        "timeouts__hang": 9.0,
    }
    assert chosen(first, config=config(**neutral))[0] == "00"
    for key, value in {
        "global_batch_size": 4,
        "seed": 1,
        "bucket_cap_mb": 100.0,
        "data_loader_config": "synthetic",
        "lr_schedule__start_lr": 0.1,
        "resident_dtype": "float16",
    }.items():
        assert chosen(first, config=config(**{key: value}))[0] == "00-2", key


def test_every_key_that_changes_no_result_is_a_key() -> None:
    flat = configs.flatten(config())
    assert not {key for key in NEUTRAL_KEYS if not any(name == key or name.startswith(f"{key}.") for name in flat)}


def test_weights_and_other_runs_are_part_of_what_a_run_is(first: Path, run: Any) -> None:
    """A run that began with --init_from is not continued by a command without it, nor with other weights."""
    run(1, finished=False, origin="--init_from=/weights.pt")
    assert chosen(first, init_from="/weights.pt") == ("00", "")
    reason = "00 differs in --init_from; --resume continues such a run only if its checkpoint fits"
    assert chosen(first) == chosen(first, init_from="/others.pt") == ("00-2", reason)
    run(2, finished=False, origin="--resume=/other/00")
    assert chosen(first, resume="/other/00")[0] == "00-2"
    assert chosen(first, resume="/another/00")[0] == "00-3"


def test_a_run_without_a_readable_config_is_not_continued(first: Path, run: Any) -> None:
    for content in (b"\xff\x00", b"test: {num_epochs: x}", b"other: {}", b""):
        (run(1, finished=False) / "config.yaml").write_bytes(content)
        choice = choose(Request(config(), "test", first))
        assert choice.path.name == "00-2"
        (warning,) = choice.warnings
        assert warning.startswith(f"{first} is not resumed: ")
        assert "\n" not in warning
    assert chosen(first, resume="auto")[0] == "00"


@pytest.mark.parametrize("content", ["[1]", "{", '{"jobs": 3, "earlier": [1]}', '{"jobs": [[]], "earlier": 1}'])
def test_a_run_with_damaged_provenance_belongs_to_its_name(first: Path, run: Any, content: str) -> None:
    for number in (1, 2):
        (run(number, finished=False) / "provenance.json").write_text(content)
    assert chosen(first, restarted=("slurm 7",))[0] == chosen(first)[0] == "00"
    assert chosen(first, config=config(seed=3))[0] == "00-3", "00-2 may belong to run number 00-2"


# --- names -----------------------------------------------------------------------------------------------------------


def test_the_second_directory_of_a_run_number_and_the_task_of_an_array_stay_apart(first: Path, run: Any) -> None:
    """submit_pm.sh gives task 2 of an array the run number 00-2."""
    run(1)
    run(2, finished=False, tag="00-2")
    task = first.with_name("00-2")
    assert chosen(first) == ("00-3", "00 is finished; --resume with more epochs would extend it")
    assert chosen(first, resume="auto")[0] == "00"
    assert chosen(task)[0] == "00-2"
    run(2, finished=False, tag="00")
    assert chosen(first)[0] == "00-2"
    for resume in (None, "auto", "no"):
        assert chosen(task, resume=resume)[0] == "00-2-2", "the run of another run number is never replaced"
    assert chosen(task) == ("00-2-2", "00-2 belongs to another run")


def test_a_directory_in_which_no_run_has_begun_is_free(first: Path, run: Any) -> None:
    run(1)
    first.with_name("00-2").mkdir()
    (first.with_name("00-2") / LOCK).touch()
    assert chosen(first)[0] == "00-2"
    (first.with_name("00-2") / "notes.txt").touch()
    assert chosen(first)[0] == "00-3"
    first.with_name("00-3").touch()
    first.with_name("00-04").mkdir()
    assert chosen(first)[0] == "00-4"


# --- --resume --------------------------------------------------------------------------------------------------------


def test_resume_takes_the_newest_run_whatever_its_state_and_config(first: Path, run: Any) -> None:
    assert chosen(first, resume="auto") == ("00", "")
    run(1, finished=False)
    run(2)
    for given in (config(), config(num_epochs=5), config(seed=3)):
        assert chosen(first, resume="auto", config=given) == ("00-2", "")
    assert chosen(first, resume="no")[0] == "00"


def test_resume_with_a_directory_of_the_same_run_number_continues_there(first: Path, run: Any) -> None:
    run(1)
    run(2)
    assert chosen(first, resume=str(first)) == ("00", "")
    assert chosen(first, resume=str(first / "checkpoints" / "step_00000016"))[0] == "00-3"
    assert chosen(first, resume=str(first.with_name("other")))[0] == "00-3"


# --- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [None, "auto", "no", "/other/00"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_restarted_job_returns_to_its_run(first: Path, run: Any, resume: str | None, finished: bool) -> None:
    """Whatever its state, its flags and its config, which may have been edited; also if others have continued it."""
    run(1, finished=finished, jobs=["slurm 7"])
    run(2, finished=False, jobs=["slurm 8"], earlier=[{"jobs": ["slurm 9"], "command": command()}])
    for job, name in (("slurm 7", "00"), ("slurm 8", "00-2"), ("slurm 9", "00-2")):
        assert chosen(first, resume=resume, restarted=(job,), config=config(seed=3)) == (name, "")
        assert choose(Request(config(), "test", first, resume, restarted=(job,))).resume != "no"
    if resume == "no":
        assert choose(Request(config(), "test", first, resume, restarted=("slurm 10",))).resume == "no"


def test_each_command_of_a_restarted_job_returns_to_its_own_run(first: Path, run: Any, monkeypatch: Any) -> None:
    """A job script with two trainings that was requeued during the second one, and one before its second began."""
    run(1, jobs=["slurm 7"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--enable_amp"])
    assert chosen(first, restarted=("slurm 7",))[0] == "00-2"
    run(2, finished=False, jobs=["slurm 7"])
    assert chosen(first, restarted=("slurm 7",))[0] == "00-2"
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    assert chosen(first, restarted=("slurm 7",))[0] == "00"


def test_names_of_a_job_last_across_restarts() -> None:
    """Two torchruns have the same run id, none, but not the same directory of logs."""
    agent = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_x/attempt_0/1/error.json",
    }
    assert lasting_jobs({}) == ([], [])
    assert lasting_jobs(agent) == (["torchrun none_x"], [])
    again = {**agent, "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_x/attempt_1/0/error.json"}
    again["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert lasting_jobs(again) == (["torchrun none_x"],) * 2
    assert lasting_jobs({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}) == ([], [])
    assert lasting_jobs({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_ERROR_FILE": ""}) == (["torchrun a"], [])
    requeued = {**agent, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert lasting_jobs(requeued) == (["slurm 7", "torchrun none_x"], ["slurm 7"])
    assert lasting_jobs({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}) == (["slurm 7"], [])


# --- locks -----------------------------------------------------------------------------------------------------------


def claim(first: Path, **request: Any) -> RunDirectory:
    return RunDirectory(lambda: choose(Request(config(), "test", first, **request)), ALONE)


def test_a_locked_run_is_refused_and_never_bypassed(first: Path, run: Any) -> None:
    fault = rf"^another run is writing to {first}; give this one a --run_num of its own$"
    for finished in (True, False):
        shutil.rmtree(first, ignore_errors=True)
        run(1, finished)
        with open_locked(first / LOCK, "locked"):
            for request in ({}, {"resume": "auto"}, {"resume": "no"}, {"init_from": "weights.pt"}):
                with pytest.raises(UserError, match=fault):
                    claim(first, **request).__enter__()
        assert sorted(path.name for path in first.parent.iterdir()) == ["00"]
    with claim(first) as again:
        assert again.path == first


def test_two_trainings_that_choose_the_same_new_directory(first: Path, run: Any, monkeypatch: Any) -> None:
    """The second is refused while the first holds it, and starts in the next one if the first is done with it."""
    run(1)
    with claim(first) as choice:
        assert choice.path.name == "00-2"
        with pytest.raises(UserError, match=r"^another run is writing to .*/00-2; "):
            claim(first).__enter__()
        assert choice.path.is_dir()
    lock, finished = choices_lock(), []

    def finish_another(path: Path) -> Any:
        if not finished:
            finished.append(run(2))
        return lock(path)

    monkeypatch.setattr("utils.training.directory._lock", finish_another)
    with claim(first) as choice:
        assert choice.path.name == "00-3", "chosen again under the lock"
    assert (first.with_name("00-2") / "summary.json").exists()


def choices_lock() -> Callable[[Path], Any]:
    from utils.runs import directory

    return directory._lock


def claim_on_ranks(world: World, first: str) -> tuple[str, str | None]:
    if world.is_root:
        request = Request(config(), "test", Path(first), "no")
    else:
        request = Request(config(), "test", Path("/nowhere/00"))
    with RunDirectory(lambda: choose(request), world) as choice:
        return str(choice.path), choice.resume


def test_all_ranks_follow_the_choice_of_rank_0(first: Path) -> None:
    assert run_ranks(claim_on_ranks, 2, str(first)) == [(str(first), "no")] * 2


# --- records ---------------------------------------------------------------------------------------------------------


def test_the_origin_of_a_run_and_its_jobs_outlast_its_processes(first: Path, monkeypatch: Any) -> None:
    """The second process was started with --resume alone; the command of the first still finds its run."""
    begun = choose(Request(config(), "test", first, init_from="/weights.pt", jobs=("slurm 7",)))
    open_run(config(), "test", begun, ALONE).close()
    again = choose(Request(config(), "test", first, "auto", jobs=("slurm 8",)))
    open_run(config(), "test", again, ALONE, Resumed(8)).close()
    assert chosen(first, init_from="/weights.pt")[0] == "00"
    assert chosen(first)[0] == "00-2"
    for job in ("slurm 7", "slurm 8"):
        assert chosen(first, restarted=(job,))[0] == "00"


def test_a_choice_changes_nothing(first: Path, run: Any) -> None:
    before = run(1, finished=False).stat().st_mtime_ns
    assert isinstance(choose(Request(config(), "test", first)), Choice)
    assert isinstance(choose(Request(config(), "test", first.parents[1] / "missing" / "00")), Choice)
    assert first.stat().st_mtime_ns == before
    assert [path.name for path in first.parent.iterdir()] == ["00"]
    assert choices.is_free(first.with_name("01"))
