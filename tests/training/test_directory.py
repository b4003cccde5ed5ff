"""A run directory belongs to one run at a time, and a run that writes nothing leaves no directory."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
import torch
from disks import small_disk
from processes import run_ranks
from trainings import TOP
from utils.training.choice import Choice
from utils.training.directory import RunDirectory, describe_config, run_directory

from utils import config as configs
from utils.distributed.launch import Launch
from utils.distributed.locks import open_locked
from utils.distributed.world import World
from utils.errors import UserError

ALONE = World(Launch("test"), torch.device("cpu"))


def claim_path(path: Path, world: World = ALONE) -> RunDirectory:
    return RunDirectory(lambda: Choice(path), world)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("device", "has_gpus", "name"),
    [("auto", False, "4ranks"), ("auto", True, "4GPU"), ("cpu", True, "4ranks"), ("cuda", False, "4GPU")],
)
def test_run_directories_are_named_after_gpus_only_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, device: str, has_gpus: bool, name: str
) -> None:
    """A run on CPUs was once in 1GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    config = configs.validate({"device": device, "expdir": "runs"}, "demo")
    assert run_directory(config, "demo", "00", 4) == Path("runs", "demo", name, "00")


def test_the_log_shows_what_differs_from_the_defaults_and_first_what_the_user_typed() -> None:
    """It once began with all hundred keys."""
    assert describe_config(configs.validate({}, "base"), "base", []) == (
        "Configuration base, all keys have their default values"
    )
    few = {"num_epochs": 3, "network": {"width": 8}, "train_path": "/a.h5", "local_batch_size": 4}
    assert describe_config(configs.validate(few, "x"), "x", ["network", "train_path"]).splitlines() == [
        "Configuration x, keys that differ from the defaults:",
        "  train_path: /a.h5 (default /data/train.h5)",
        "  network.width: 8 (default 64)",
        "  num_epochs: 3 (default 10)",
    ]
    many = configs.load(f"{TOP}/config/UNet.yaml", "demo_opt", {"log_interval": 3, "ema_decay": 0.5})
    lines = describe_config(many, "demo_opt", ["ema_decay", "log_interval"]).splitlines()
    assert len(lines) == 15
    assert lines[1:3] == ["  ema_decay: 0.5 (default null)", "  log_interval: 3 (default 50)"]
    assert lines[-1] == f"  and {len(configs.differences(many)) - 13} more, in config.yaml"


@pytest.mark.parametrize("locks", [True, False])
def test_only_directories_that_were_created_and_not_used_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "test" / "1ranks" / "00"
    with claim_path(path):
        assert path.is_dir()
        assert ALONE.heartbeat.folder == path, "for the files after a hang"
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == []
    path.mkdir(parents=True)
    with claim_path(path):
        pass
    assert os.listdir(path) == [".lock"], "an existing directory stays, and so does its lock"
    used = path.with_name("01")
    with claim_path(used):
        (used / "out.log").touch()
    assert sorted(os.listdir(used)) == [".lock", "out.log"]


def test_a_refused_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test" / "00"
    with claim_path(path):
        with pytest.raises(UserError, match=r"^another run is writing to .*; give this one a --run_num of its own$"):
            claim_path(path).__enter__()
        assert os.listdir(path) == [".lock"]
    assert os.listdir(tmp_path) == []


def test_a_restarted_job_waits_for_the_end_of_its_predecessor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    predecessor = open_locked(tmp_path / ".lock", "locked")
    threading.Timer(0.1, predecessor.close).start()
    with claim_path(tmp_path):
        assert predecessor.closed


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    remedy = r"; choose another with --set expdir=DIR$"
    with pytest.raises(UserError, match=rf"^cannot write to the run directory .*: Not a directory{remedy}"):
        claim_path(tmp_path / "file" / "00").__enter__()
    with (
        small_disk(tmp_path / "disk", "200k,ro"),
        pytest.raises(UserError, match=rf"^cannot write to the run directory .*: Read-only file system{remedy}"),
    ):
        claim_path(tmp_path / "disk").__enter__()


def claim(world: World, path: str) -> str:
    try:
        with claim_path(Path(path), world):
            return "claimed"
    except UserError as error:
        return str(error)


def test_all_ranks_fail_if_the_first_one_does(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = run_ranks(claim, 2, str(tmp_path / "file" / "00"))
    assert first == second
    assert first.startswith("rank 0: cannot write to the run directory ")
