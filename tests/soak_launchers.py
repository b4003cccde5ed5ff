"""The launchers of tests/soak.py: plain processes and torchrun, each with two ranks of the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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

RANKS = 2
AGENT = "agent"  # a victim: the process of torchrun


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


class Plain:
    """Starts of a training run as two processes without a launcher, from a server that has imported the program."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self._flags, self._log, self._starts = flags, log, 0
        self._processes: list[BaseProcess] = []

    def start(self, steps: Mapping[int | str, int]) -> None:
        """Starts all ranks; a rank in `steps` kills itself after that number of steps."""
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
        """The output of this start."""
        paths = [self._path(rank) for rank in range(RANKS)]
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


class Torchrun(Plain):
    """torchrun, which restarts the ranks after one of them was killed."""

    def __init__(self, flags: list[str], log: Path) -> None:
        super().__init__(flags, log)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_of_text = 0
        self._ranks: set[int] = set()  # process ids

    def start(self, steps: Mapping[int | str, int]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *self._flags]
        with open(self._log, "ab") as log:
            self._start_of_text = log.tell()
            self._process = subprocess.Popen(command, cwd=TOP, env={**os.environ, **ONE_THREAD}, stdout=log, stderr=log)

    def text(self) -> str:
        return self._log.read_bytes()[self._start_of_text :].decode(errors="replace")

    def running(self) -> dict[int | str, int]:
        if self._process is None or self._process.poll() is not None:
            return {}
        ranks = ranks_of_torchrun(self._process.pid)
        self._ranks |= set(ranks.values())
        return {**ranks, AGENT: self._process.pid}

    def has_ended(self) -> bool:
        return not self.running() and all(map(has_ended, self._ranks))

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

    def wait(self) -> list[int]:
        wait_until(self.has_ended, lambda: f"end of {self._ranks}; see {self._log}")
        assert self._process is not None
        return [self._process.returncode]


LAUNCHERS = {"plain": Plain, "torchrun": Torchrun}
