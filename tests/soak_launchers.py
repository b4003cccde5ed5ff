"""The runs of tests/soak.py, by launcher: plain processes, torchrun and srun."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from processes import ONE_THREAD, TOP, Program, free_port, has_ended, ranks_of_torchrun, start_ranks, wait_until
from slurm_cluster import Job, private_cluster
from trainings import directory

from utils.run.checkpoint import saved_steps

RANKS = 2
AGENT = -1  # a victim, in place of a rank: the process of torchrun
START, BETWEEN, SAVE, END = "start", "between saves", "save", "end"
TRAINS, WRITES_SUMMARY = "Warm-up, first forward", "The summary of this run is missing"  # lines of the log


class Plain:
    """A training run in a folder of its own, started without a launcher by a server that has imported the program."""

    def __init__(self, flags: list[str], ranks: int, folder: Path) -> None:
        self.directory, self._log = directory(folder, ranks), folder.with_suffix(".log")
        self._flags, self._starts, self._size = [*flags, f"--set=expdir={folder}"], 0, ranks
        self._programs: list[Program] = []

    def saved(self) -> list[int]:
        return saved_steps(self.directory / "checkpoints")

    def is_saving(self) -> bool:
        return any((self.directory / "checkpoints").glob(".*.partial"))

    def has_summary(self) -> bool:
        return (self.directory / "summary.json").exists()

    def phase(self, last_step: int | None = None) -> str:
        text = self.text()
        if TRAINS not in text and WRITES_SUMMARY not in text:
            return START
        if last_step in self.saved():
            return END
        return SAVE if self.is_saving() else BETWEEN

    def start(self) -> None:
        self._starts += 1
        folder = self._log.with_name(f"{self._log.stem} {self._starts}")
        folder.mkdir()
        self._programs = start_ranks(["train.py", *self._flags], self._size, folder)

    def text(self) -> str:
        return "".join(program.text for program in self._programs)

    def running(self) -> dict[int, int]:
        """The process ids of the ranks that run, and of the launcher if it can be a victim."""
        return {rank: program.pid for rank, program in enumerate(self._programs) if program.process.is_alive()}

    def has_ended(self) -> bool:
        return not self.running()

    def wait(self, victims: Collection[int] = (), running: Mapping[int, int] | None = None) -> list[int]:
        """Waits for the consequences of a kill, or the end; returns exit codes. `running` is from before the kill."""
        return [program.end().returncode for program in self._programs]


RunFactory = Callable[[list[str], int, Path], Plain]  # of flags, number of ranks and folder


class Command(Plain):
    """Starts by torchrun, which restarts the ranks after one of them was killed, or by srun on the nodes of a job."""

    def __init__(self, flags: list[str], ranks: int, folder: Path, job: Job | None = None) -> None:
        super().__init__(flags, ranks, folder)
        options = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
        self._job, command, self._environment = job, [sys.executable, "-m", *options], {**os.environ, **ONE_THREAD}
        if job is not None:
            options = [f"--jobid={job.number}", f"--nodes={ranks}", f"--ntasks={ranks}", "-u", "-K1"]
            command = ["srun", *options, "bash", "-c", 'source ./export_DDP_vars.sh && exec "$@"', "_", sys.executable]
            self._environment = {**job.cluster.environment, **ONE_THREAD}
        self._command = [*command, "train.py", *self._flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._start_of_text = 0
        self._pids: set[int] = set()  # of ranks

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return  # torchrun has restarted the ranks
        self._pids.clear()
        environment = {**self._environment, "MASTER_PORT": str(free_port())}
        with open(self._log, "ab") as log:
            self._start_of_text = log.tell()
            self._process = subprocess.Popen(
                self._command, cwd=TOP, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def text(self) -> str:
        return self._log.read_bytes()[self._start_of_text :].decode(errors="replace")

    def running(self) -> dict[int, int]:
        if self._process is None:
            return {}
        if self._job is None:
            running = ranks_of_torchrun(self._process.pid)
        else:
            ranks = {rank: self._job.processes(RANK=str(rank)) for rank in range(self._size)}
            running = {rank: min(pids) for rank, pids in ranks.items() if pids}  # later ones are of git, for example
        self._pids |= set(running.values())
        if self._job is None and self._process.poll() is None:
            running[AGENT] = self._process.pid
        return running

    def has_ended(self) -> bool:
        self.running()
        return self._process is None or (self._process.poll() is not None and all(map(has_ended, self._pids)))

    def wait(self, victims: Collection[int] = (), running: Mapping[int, int] | None = None) -> list[int]:
        if self._job is not None or running is None or AGENT in victims:
            wait_until(self.has_ended, lambda: f"end of {self._pids}; see {self._log}")
            return [self._process.returncode] if self._process else []
        old = [pid for rank, pid in running.items() if rank != AGENT]
        wait_until(lambda: self.has_ended() or all(map(has_ended, old)), lambda: f"restart of ranks; see {self._log}")
        self._start_of_text = self._log.stat().st_size
        return []


@contextlib.contextmanager
def open_launcher(name: str) -> Iterator[RunFactory]:
    """Yields the factory of a launcher; for srun, starts a Slurm and a job, or raises Unavailable."""
    if name == "srun":
        with private_cluster() as cluster:
            options = [f"--nodes={RANKS}", "--ntasks-per-node=1", "--time=1-0", "--partition=high"]
            command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep infinity"]
            job = Job(cluster, cluster.run(*command).strip(), Path("/dev/null"))
            wait_until(lambda: job.state == "RUNNING", lambda: "the start of the job")
            yield partial(Command, job=job)
    else:
        yield {"plain": Plain, "torchrun": Command}[name]
