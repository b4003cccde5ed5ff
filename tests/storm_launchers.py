"""The launchers of tests/soak.py: plain processes, torchrun, and srun on two nodes of a real Slurm.

Each one starts two ranks of the same run, gives the process ids of those that run, and waits for their end.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import torch
from processes import GENEROUS, ONE_THREAD, TOP, context, free_port, rank_variables, wait_until

sys.path[:0] = [str(TOP), str(TOP / "tests" / "slurm")]
from slurm_cluster import NODES, Cluster, free_ports  # noqa: E402 # found by the path above

RANKS = 2
AGENT = "agent"  # a victim: the process of torchrun
MARK = "SOAK_MARK"  # a variable that identifies the processes of one training run


class Launcher(Protocol):
    """Starts of one training run."""

    def start(self, steps: Mapping[int, int]) -> None:
        """Starts all ranks; a rank in `steps` kills itself after that number of steps."""

    def text(self) -> str:
        """The output of this start."""
        return ""

    def running(self) -> dict[int | str, int]:
        """The process ids of the ranks that run, and of the launcher if it can be a victim."""
        return {}

    def has_ended(self) -> bool:
        """True if no process of the run is left."""
        return True

    def settle(self, victims: Sequence[int | str], running: Mapping[int | str, int]) -> list[int]:
        """Waits for the consequences of a kill; returns the exit codes. `running` is from before the kill."""
        return self.wait()

    def wait(self) -> list[int]:
        """Waits for the end of all processes; returns exit codes, 0 for success."""
        return []


# --- plain processes -------------------------------------------------------------------------------------------------


def rank_main(rank: int, port: int, flags: list[str], log: str, steps: int | None) -> None:
    """Runs one rank as a launcher would; the rank kills itself after `steps` steps, if given."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(TOP)
    os.environ.update(rank_variables(rank, RANKS, port))
    import train
    from utils.distributed.launch import run_script
    from utils.steps.eager import EagerStep

    class DyingStep(EagerStep):
        calls = 0

        def __call__(self, *arguments: torch.Tensor | float) -> torch.Tensor:
            loss = super().__call__(*arguments)
            self.calls += 1
            if self.calls == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

    torch.set_num_threads(1)
    run_script(lambda: train.main(flags, DyingStep))


class Plain(Launcher):
    """Two processes without a launcher, from a server that has imported the program."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self._flags, self._log, self._starts = flags, log, 0
        self._processes: list[BaseProcess] = []

    def start(self, steps: Mapping[int, int]) -> None:
        self._starts += 1
        port = free_port()
        self._processes = [
            context().Process(
                target=rank_main, args=(rank, port, self._flags, str(self._path(rank)), steps.get(rank)), daemon=True
            )
            for rank in range(RANKS)
        ]
        for process in self._processes:
            process.start()

    def _path(self, rank: int) -> Path:
        return self._log.with_suffix(f".{self._starts}.{rank}")

    def text(self) -> str:
        paths = [self._path(rank) for rank in range(RANKS)]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def running(self) -> dict[int | str, int]:
        return {rank: each.pid or 0 for rank, each in enumerate(self._processes) if each.is_alive()}

    def has_ended(self) -> bool:
        return not self.running()

    def wait(self) -> list[int]:
        deadline = time.monotonic() + GENEROUS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = self.running()
        for process in self._processes:
            process.kill()
        assert not stuck, f"ranks {list(stuck)} still ran after {GENEROUS:.0f} s; see {self._path(0)}"
        return [each.exitcode or 0 for each in self._processes]


# --- launchers with a command ----------------------------------------------------------------------------------------


class _Command(Launcher):
    """A launcher with a command of its own; its processes are found by a variable of their environment."""

    def __init__(self, flags: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self._train, self._log = ["train.py", *flags], log
        self._mark = f"{log}-{time.time_ns()}"
        self._environment = {**environment, MARK: self._mark, **ONE_THREAD}
        self._process: subprocess.Popen[bytes] | None = None
        self._start_of_text = 0
        self._others: set[str] = set()  # processes that are older than this training run

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """The command line that starts all ranks."""

    def start(self, steps: Mapping[int, int]) -> None:
        assert not steps
        self._others = self._others or set(os.listdir("/proc"))
        with open(self._log, "ab") as log:
            self._start_of_text = log.tell()
            self._process = subprocess.Popen(
                self._command(), cwd=TOP, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def text(self) -> str:
        return self._log.read_bytes()[self._start_of_text :].decode(errors="replace")

    def _found(self) -> dict[int, str]:
        """Process id -> RANK, or an empty text, of all processes of this training run."""
        found = {}
        for name in set(os.listdir("/proc")) - self._others:
            with contextlib.suppress(OSError):  # the process has ended
                variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
                if f"{MARK}={self._mark}".encode() in variables:
                    rank = [each[5:].decode() for each in variables if each.startswith(b"RANK=")]
                    is_rank = rank and b"train.py" in Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                    found[int(name)] = rank[0] if is_rank else ""
        return found

    def running(self) -> dict[int | str, int]:
        return {int(rank): pid for pid, rank in self._found().items() if rank}

    def has_ended(self) -> bool:
        if self._process is None or self._process.poll() is None or self._found():
            return False
        time.sleep(0.1)
        return not self._found()  # again: a process that replaces its program has no environment for a moment

    def wait(self) -> list[int]:
        assert self._process is not None
        wait_until(self.has_ended, lambda: f"end of {self._found()}; see {self._log}")
        return [self._process.returncode]

    def kill(self) -> None:
        """Ends what a failed comparison left."""
        for pid in self._found():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Torchrun(_Command):
    """torchrun, which restarts the ranks after one of them was killed."""

    def _command(self) -> list[str]:
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *self._train]

    def start(self, steps: Mapping[int, int]) -> None:
        if self._process is None or self._process.poll() is not None:
            super().start(steps)

    def running(self) -> dict[int | str, int]:
        ranks = super().running()
        assert self._process is not None
        agent: dict[int | str, int] = {AGENT: self._process.pid} if self._process.poll() is None else {}
        return {**ranks, **agent}

    def settle(self, victims: Sequence[int | str], running: Mapping[int | str, int]) -> list[int]:
        if AGENT in victims:
            return self.wait()
        old = {pid for name, pid in running.items() if name != AGENT}
        wait_until(
            lambda: self.has_ended() or not old & set(self._found()),
            lambda: f"restart of ranks after the kill of {victims}; see {self._log}",
        )
        self._start_of_text = self._log.stat().st_size
        return []


class Srun(_Command):
    """srun with one rank on each of two nodes, within one allocation."""

    def __init__(self, flags: list[str], log: Path, cluster: Cluster, job: str) -> None:
        super().__init__(flags, log, cluster.environment)
        self._job = job

    def start(self, steps: Mapping[int, int]) -> None:
        self._environment["MASTER_PORT"] = str(free_port())
        super().start(steps)

    def _command(self) -> list[str]:
        options = [f"--jobid={self._job}", f"--nodes={RANKS}", f"--ntasks={RANKS}", "--unbuffered", "-K1"]
        shell = 'source ./export_DDP_vars.sh; exec "$@"'
        return ["srun", *options, "bash", "-c", shell, "_", sys.executable, *self._train]


@contextlib.contextmanager
def allocation() -> Iterator[tuple[Cluster, str] | None]:
    """A cluster of two nodes and a job that holds both; None, and a line, where Slurm cannot be installed."""
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        print("srun: skipped, a private Slurm needs root and Debian's packages", flush=True)
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # slurm.conf allows no spaces in paths
    folder.chmod(0o755)
    cluster = Cluster(folder / "cluster", free_ports(1 + NODES))
    try:
        up = cluster.script("up")
        if up.returncode != 0:
            print(f"srun: skipped, {up.stdout.strip()}", flush=True)
            yield None
            return
        wanted = [f"--nodes={RANKS}", "--ntasks-per-node=1", "--time=1-0", "--partition=high", "--output=/dev/null"]
        yield cluster, cluster.run("sbatch", "--parsable", *wanted, "--wrap=sleep infinity").strip()
    finally:
        cluster.script("down")
        shutil.rmtree(folder, ignore_errors=True)


def build(name: str, flags: list[str], log: Path, slurm: tuple[Cluster, str] | None) -> Plain | Torchrun | Srun:
    """The launcher of that name; srun needs what `allocation` yields."""
    if name == "plain":
        return Plain(flags, log)
    if name == "torchrun":
        return Torchrun(flags, log, os.environ)
    assert slurm is not None
    return Srun(flags, log, *slurm)
