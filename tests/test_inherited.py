"""What a program inherits from its surroundings does no harm: terminals, settings of OpenMP, repositories, threads."""

import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import TOP

from utils import git_commit
from utils.distributed.signals import StopSignals

WORK = """
import sys, time
from pathlib import Path
from utils.errors import one_line_errors
from utils.progress import Progress
with one_line_errors(), Progress("working", 3) as progress:
    progress.advance()
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    progress.advance()
    print("text")
Path(sys.argv[2]).touch()
"""


def test_work_continues_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """The progress bar could not be drawn, and ended a run before its validation and its checkpoint."""
    closed, done = tmp_path / "closed", tmp_path / "done"
    master, slave = pty.openpty()
    command = [sys.executable, "-c", WORK, str(closed), str(done)]
    process = subprocess.Popen(command, cwd=TOP, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    while b"working" not in os.read(master, 4096):
        pass
    os.close(master)
    closed.touch()
    assert process.wait(60) == 0
    assert done.exists()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    lines = "from utils.errors import one_line_errors\nwith one_line_errors(): print(*['x' * 999] * 999, sep=chr(10))"
    head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-c", lines]
    process = subprocess.run(command, cwd=TOP, stdout=head.stdin, stderr=subprocess.PIPE, timeout=60, check=True)
    assert process.stderr == b""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity of processes")
def test_omp_proc_bind_does_not_bind_all_threads_to_one_core() -> None:
    code = "import os, utils, torch; print(*sorted(os.sched_getaffinity(0)))"
    settings = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0"}
    usable = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    environment = {**os.environ, **settings}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=TOP, env=environment, text=True).split() == usable
    # torchrun, here another program, was bound before it started the rank.
    bound = "import os, subprocess, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    bound += "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    environment["TORCHELASTIC_RUN_ID"] = "none"
    command = [sys.executable, "-c", bound, code]
    assert subprocess.check_output(command, cwd=TOP, env=environment, text=True).split() == usable


def test_the_commit_is_that_of_the_projects_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", other], check=True)
    subprocess.run(["git", "-C", other, *identity, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    own = git_commit()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook
    assert git_commit() == own
    # Unpacked from an archive, inside another checkout.
    (other / "project").mkdir()
    shutil.copytree(TOP / "utils", other / "project" / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "import utils; print(utils.git_commit())"]
    environment = {**os.environ, "GIT_COMMIT": "given"}
    output = subprocess.check_output(command, cwd=other / "project", env=environment, text=True)
    assert output.strip() == "given"


def test_another_thread_than_the_main_one_catches_no_signals(caplog: pytest.LogCaptureFixture) -> None:
    """Python refused to set the handlers: train.main ended with a traceback in the threads of a sweep."""
    received: list[object] = []

    def work() -> None:
        with StopSignals() as signals:
            received.append(signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert received == [None]
    assert "Not in the main thread" in caplog.text
