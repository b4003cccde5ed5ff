"""The launchers of tests/soak.py: plain processes, torchrun and srun, each with the ranks of the same run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from processes import (
    ONE_THREAD,
    TOP,
    context,
    free_port,
    has_ended,
    rank_variables,
    ranks_of_torchrun,
    wait_until,
)
from slurm_cluster import Job, private_cluster

RANKS = 2
AGENT = "agent"  # a victim: the process of torchrun


def rank_main(variables: dict[str, str], flags: list[str], log: str, steps: int | None) -> None:
    """Runs one rank as a launcher would; the rank kills itself after `steps` steps, if given."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(TOP)
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes with it ignored
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


class Plain:
    """Starts of a training run as processes without a launcher, from a server that has imported the program."""

    def __init__(self, flags: list[str], log: Path, ranks: int = RANKS) -> None:
        self._flags, self._log, self._starts, self._number = flags, log, 0, ranks
        self._processes: list[BaseProcess] = []

    def start(self, steps: Mapping[int | str, int]) -> None:
        """Starts all ranks; a rank in `steps` kills itself after that number of steps."""
        self._starts += 1
        port, ranks = free_port(), range(self._number)
        arguments = [
            (rank_variables(rank, len(ranks), port), self._flags, str(self._path(rank)), steps.get(rank))
            for rank in ranks
        ]
        self._processes = [context().Process(target=rank_main, args=each, daemon=True) for each in arguments]
        for process in self._processes:
            process.start()

    def _path(self, rank: int) -> Path:
        return self._log.with_suffix(f".{self._starts}.{rank}")

    def text(self) -> str:
        """The output of this start."""
        paths = [self._path(rank) for rank in range(self._number)]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def running(self) -> dict[int | str, int]:
        """The process ids of the ranks that run, and of the launcher if it can be a victim."""
        return {rank: process.pid or 0 for rank, process in enumerate(self._processes) if process.is_alive()}

    def has_ended(self) -> bool:
        """True if no process of the run is left."""
        return not self.running()

    def settle(self, victims: Sequence[int | str], running: Mapping[int | str, int]) -> list[int]:
        """Waits for the consequences of a kill; returns the exit codes. `running` is from before the kill."""
        return self.wait()

    def wait(self) -> list[int]:
        """Waits for the end of all processes; returns exit codes, 0 for success."""
        wait_until(self.has_ended, lambda: f"end of ranks {list(self.running())}; see {self._path(0)}")
        return [process.exitcode or 0 for process in self._processes]


LauncherFactory = Callable[[list[str], Path], Plain]  # of flags and log


class _Command(Plain, ABC):
    """Starts of a training run by the command of a launcher."""

    def __init__(
        self, flags: list[str], log: Path, command: list[str], environment: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__(flags, log)
        self._command = [*command, "train.py", *flags]
        self._environment = {**environment, **ONE_THREAD}
        self._process: subprocess.Popen[bytes] | None = None
        self._start_of_text = 0
        self._ranks: set[int] = set()  # process ids

    def start(self, steps: Mapping[int | str, int]) -> None:
        self._ranks.clear()
        with open(self._log, "ab") as log:
            self._start_of_text = log.tell()
            self._process = subprocess.Popen(
                self._command, cwd=TOP, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def text(self) -> str:
        return self._log.read_bytes()[self._start_of_text :].decode(errors="replace")

    def _is_active(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @abstractmethod
    def _find_ranks(self) -> dict[int, int]:
        """Rank -> process id of the ranks that run."""

    def running(self) -> dict[int | str, int]:
        ranks = self._find_ranks()
        self._ranks |= set(ranks.values())
        return {**ranks}

    def has_ended(self) -> bool:
        self.running()
        return not self._is_active() and all(map(has_ended, self._ranks))

    def wait(self) -> list[int]:
        wait_until(self.has_ended, lambda: f"end of {self._ranks}; see {self._log}")
        assert self._process is not None
        return [self._process.returncode]


class Torchrun(_Command):
    """torchrun, which restarts the ranks after one of them was killed."""

    def __init__(self, flags: list[str], log: Path) -> None:
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
        super().__init__(flags, log, [sys.executable, "-m", "torch.distributed.run", *options])

    def start(self, steps: Mapping[int | str, int]) -> None:
        if not self._is_active():
            super().start(steps)

    def _find_ranks(self) -> dict[int, int]:
        return ranks_of_torchrun(self._process.pid) if self._process else {}

    def running(self) -> dict[int | str, int]:
        agent: dict[int | str, int] = {AGENT: self._process.pid} if self._process and self._is_active() else {}
        return {**super().running(), **agent}

    def settle(self, victims: Sequence[int | str], running: Mapping[int | str, int]) -> list[int]:
        if AGENT in victims:
            return self.wait()
        old = {pid for name, pid in running.items() if name != AGENT}
        wait_until(
            lambda: self.has_ended() or all(map(has_ended, old)),
            lambda: f"restart of ranks after the kill of {victims}; see {self._log}",
        )
        self._start_of_text = self._log.stat().st_size
        return []


class Srun(_Command):
    """srun with one rank on each of the two nodes of a job."""

    def __init__(self, flags: list[str], log: Path, job: Job) -> None:
        options = [f"--jobid={job.number}", f"--nodes={RANKS}", f"--ntasks={RANKS}", "-u", "-K1"]
        shell = ["bash", "-c", 'source ./export_DDP_vars.sh && exec "$@"', "_", sys.executable]
        super().__init__(flags, log, ["srun", *options, *shell], job.cluster.environment)
        self._job = job

    def start(self, steps: Mapping[int | str, int]) -> None:
        self._environment["MASTER_PORT"] = str(free_port())
        super().start(steps)

    def _find_ranks(self) -> dict[int, int]:
        ranks = {}
        for rank in range(RANKS):
            for pid in self._job.processes(RANK=str(rank)):  # also commands that the rank runs, such as git
                with contextlib.suppress(OSError):  # it has ended
                    if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        ranks[rank] = pid
        return ranks


@contextlib.contextmanager
def open_launcher(name: str) -> Iterator[LauncherFactory]:
    """Yields the factory of a launcher; for srun, starts a Slurm and a job, or raises Unavailable."""
    if name == "srun":
        with private_cluster() as cluster:
            options = [f"--nodes={RANKS}", "--ntasks-per-node=1", "--time=1-0", "--partition=high"]
            command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep infinity"]
            job = Job(cluster, cluster.run(*command).strip(), Path("/dev/null"))
            wait_until(lambda: job.state == "RUNNING", lambda: "the start of the job")
            yield partial(Srun, job=job)
    else:
        yield {"plain": Plain, "torchrun": Torchrun}[name]
