"""Kills trainings at random moments, resumes them to the end, and compares the bits with an undisturbed training.

python tests/soak.py 100        100 kills; make soak N=100 does the same
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests")]

from processes import GENEROUS, context, free_port, rank_variables  # noqa: E402 # found by the path above

RANKS = 2
# A save every third step in addition to each epoch's end: many kills hit a save.
FLAGS = [
    "--config=test",
    "--set=checkpoint.every_steps=3",
    "--set=report_baselines=false",
    "--set=timeouts.rendezvous=30",  # how long the survivors of a kill at the start wait
]


class PlannedKill(NamedTuple):
    """A planned kill: from outside after `seconds`, or by the victims themselves after `steps` steps."""

    victims: list[int]
    seconds: float = 0.0
    in_a_save: bool = False  # waits for the next save and kills during it
    steps: int | None = None


class Kill(NamedTuple):
    """An executed kill."""

    victims: list[int]
    inside_a_save: bool
    seconds: float  # from the kill to the end of the last survivor


def rank_main(rank: int, port: int, flags: list[str], log: str, steps: int | None) -> None:
    """Runs one rank as a launcher would; the rank kills itself after `steps` steps, if given."""
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(TOP)
    os.environ.update(rank_variables(rank, RANKS, port))
    import torch

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


def start(flags: list[str], log: Path, planned: PlannedKill | None) -> list[BaseProcess]:
    port = free_port()
    steps = [planned.steps if planned is not None and rank in planned.victims else None for rank in range(RANKS)]
    processes: list[BaseProcess] = [
        context().Process(target=rank_main, args=(rank, port, flags, f"{log}.{rank}", steps[rank]), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    return processes


def wait(processes: list[BaseProcess], why: str) -> None:
    """Waits until all processes have ended by themselves."""
    deadline = time.monotonic() + GENEROUS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in stuck:
        processes[rank].kill()
    assert not stuck, f"ranks {stuck} still ran after {GENEROUS:.0f} s: {why}"


def wait_for_moment(processes: list[BaseProcess], folder: Path, planned: PlannedKill) -> bool:
    """Returns at the planned moment, or earlier if a rank has ended; True if that is during a save."""
    moment = time.monotonic() + planned.seconds
    while all(process.is_alive() for process in processes):
        if time.monotonic() < moment:
            time.sleep(0.002)
        elif not planned.in_a_save:
            return False
        elif any(folder.glob(".*.partial")):
            return True
    return False


def kill_ranks(processes: list[BaseProcess], folder: Path, planned: PlannedKill) -> Kill | None:
    """Carries out a planned kill and waits for the survivors; None if all ranks had already ended."""
    inside_a_save = False
    if planned.steps is None:
        inside_a_save = wait_for_moment(processes, folder, planned)
        for victim in planned.victims:
            pid = processes[victim].pid
            if pid is not None and processes[victim].is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait(processes, f"kill of ranks {planned.victims}")
    victims = [rank for rank, process in enumerate(processes) if process.exitcode == -signal.SIGKILL]
    return Kill(victims, inside_a_save, time.monotonic() - killed) if victims else None


def one_training(flags: list[str], folder: Path, log: Path, plan: Sequence[PlannedKill] = ()) -> list[Kill]:
    """Runs one training to its end, with one planned kill after each start; returns the executed kills."""
    done: list[Kill] = []
    for planned in [*plan, None]:
        processes = start(flags, log, planned)
        if planned is not None:
            kill = kill_ranks(processes, folder, planned)
            if kill is not None:
                done.append(kill)
                continue
        wait(processes, f"the end of the training; see {log}.*")
        codes = [process.exitcode for process in processes]
        assert codes == [0] * RANKS, f"exit codes {codes}; see {log}.*:\n" + Path(f"{log}.0").read_text()[-3000:]
        break
    return done


class KillTest:
    """Trainings in one folder, each compared with an undisturbed one."""

    def __init__(self, folder: Path, epochs: int) -> None:
        from volume_files import write_volume

        self._folder, self._steps = folder, 8 * epochs
        train, valid = (write_volume(folder / f"{name}.h5", seed=k) for k, name in enumerate(("train", "valid"), 1))
        data = [f"--set=train_path={train}", f"--set=val_path={valid}", "--set=device=cpu"]
        self._flags = [*FLAGS, *data, f"--num_epochs={epochs}"]
        self._train("undisturbed")

    def _directory(self, name: str) -> Path:
        return self._folder / name / "test" / f"{RANKS}GPU" / "00"

    def _train(self, name: str, plan: Sequence[PlannedKill] = ()) -> list[Kill]:
        flags = [*self._flags, f"--set=expdir={self._folder / name}"]
        return one_training(flags, self._directory(name) / "checkpoints", self._folder / f"{name}.log", plan)

    def run(self, name: str, plan: Sequence[PlannedKill]) -> list[Kill]:
        """Returns the executed kills; AssertionError unless the result equals the undisturbed one."""
        from trainings import assert_same_training

        kills = self._train(name, plan)
        assert_same_training(self._directory("undisturbed"), self._directory(name), steps=self._steps)
        return kills


def soak(kills: int, seed: int, folder: Path, log: bool = False) -> list[Kill]:
    """Carries out that many kills at random moments, over several trainings."""
    draw, test = random.Random(seed), KillTest(folder, epochs=6)
    started = time.monotonic()
    test.run("second", [])  # the first one includes the time of imports
    longest = time.monotonic() - started

    def draw_kill() -> PlannedKill:
        victims = list(range(RANKS)) if draw.random() < 0.4 else [draw.randrange(RANKS)]
        # A resumed training is shorter: later moments would often find it finished.
        return PlannedKill(victims, draw.uniform(0.0, 0.7 * longest), draw.random() < 0.5)

    done: list[Kill] = []
    trainings = 0
    while len(done) < kills:
        trainings += 1
        more = test.run(f"soak{trainings}", [draw_kill() for _ in range(min(kills - len(done), 10))])
        done += more
        if log:
            inside = sum(kill.inside_a_save for kill in done)
            print(
                f"training {trainings}: {len(more)} kills, same bits; {len(done)} kills so far, {inside} in a save, "
                f"{sum(len(kill.victims) > 1 for kill in done)} of all ranks, survivors ended within "
                f"{max((kill.seconds for kill in done), default=0.0):.1f} s",
                flush=True,
            )
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=None, help="of moments and victims; drawn if absent")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak(options.kills, seed, Path(folder), log=True)
    print(f"{options.kills} kills: every training ended with the bits of an undisturbed one")


if __name__ == "__main__":
    main()
