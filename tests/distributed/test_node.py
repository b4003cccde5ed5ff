"""What the ranks of a node share: CPU cores, and locked files."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TOP

from utils import files
from utils.distributed import threads
from utils.distributed.threads import cpu_limit, is_set_by_user, physical_cores, share
from utils.distributed.world import connect
from utils.files import is_locked, open_locked


@pytest.mark.parametrize(
    ("cores", "limit", "expected"),
    [
        ([range(6)] * 3, math.inf, [2, 2, 2]),
        ([range(2)] * 4, math.inf, [1] * 4),  # more ranks than cores
        ([range(4), range(2, 6)], math.inf, [3, 3]),  # bound by the launcher
        ([range(64)] * 4, 8.0, [2] * 4),  # a container
    ],
)
def test_the_cores_of_a_node_are_divided_among_its_ranks(cores, limit, expected) -> None:
    everywhere = [("there", list(range(3)), math.inf), *(("here", list(usable), limit) for usable in cores)]
    assert [share(everywhere, rank) for rank in range(len(everywhere))] == [3, *expected]


def test_the_one_thread_that_torchrun_sets_is_not_the_users() -> None:
    two, alone = ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": size} for size in "21")
    for variables in ({}, {"OMP_NUM_THREADS": ""}, {**two, "OMP_NUM_THREADS": "1"}):
        assert not is_set_by_user(variables), variables
    set_to_one = {"OMP_NUM_THREADS": "1"}
    for variables in (set_to_one, {"MKL_NUM_THREADS": "1"}, {**two, "OMP_NUM_THREADS": "2"}, {**alone, **set_to_one}):
        assert is_set_by_user(variables), variables
    assert is_set_by_user({**two, **set_to_one, "MKL_NUM_THREADS": "1"})


def test_a_run_uses_its_share_unless_the_user_has_set_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: [10**6, 10**6 + 1])
    with connect("cpu"):
        assert torch.get_num_threads() == 1, "set in tests/conftest.py"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name)
    with connect("cpu"):
        assert torch.get_num_threads() == 2


def test_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3", "4-5", "4-5")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(threads, "usable_cpus", lambda: [1, 2, 3, 4, 5, 6])
    assert physical_cores(tmp_path) == [0, 1, 4, 6]


def test_the_limit_of_a_control_group_and_those_above_it_counts(tmp_path: Path) -> None:
    proc, job = tmp_path / "proc", tmp_path / "cgroup" / "job"
    (proc / "self").mkdir(parents=True)
    (job / "step").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:name=systemd:/other\n0::/job/step\n")
    (job / "step" / "cpu.max").write_text("max 100000\n")
    assert cpu_limit(proc, job.parent) == math.inf
    (job / "cpu.max").write_text("150000 100000\n")
    assert cpu_limit(proc, job.parent) == 1.5


def test_waiting_threads_of_pytorch_hardly_spin() -> None:
    """libgomp, PyTorch's OpenMP library, prints its settings when it is loaded, after `utils` has set them."""
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    command = [sys.executable, "train.py", "--version"]
    done = subprocess.run(command, env=env, cwd=TOP, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT" not in done.stderr or "GOMP_SPINCOUNT = '1000'" in done.stderr


def test_without_locks_a_warning_asks_for_one_process_at_a_time(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with open_locked(tmp_path / ".lock", "locked"):
        assert not is_locked(tmp_path / ".lock")
    (line,) = caplog.messages
    assert f"The file system of {tmp_path / '.lock'} has no locks (No locks available): " in line
