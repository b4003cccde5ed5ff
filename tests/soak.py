"""Kills trainings at random moments, starts them again until they are done, and compares bits with one left in peace.

python tests/soak.py 100        100 kills; make soak N=100 does the same
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests")]

RANKS = 2
STEPS = 48
# A save every third step beside each epoch's: many kills come in the midst of one.
FLAGS = [
    "--config=test",
    "--num_epochs=6",
    "--set=checkpoint.every_steps=3",
    "--set=report_baselines=false",
    "--set=timeouts.rendezvous=6",
]
# A survivor ends by itself, since the ranks watch over each other; nobody else stops it here.
SURVIVORS_SECONDS = 20.0
LONGEST_SECONDS = 90.0


class Kill(NamedTuple):
    """What was done to one process group, and what came of it."""

    victims: list[int]
    inside_a_save: bool
    seconds: float  # from the kill to the end of the last survivor


def rank_main(rank: int, port: int, flags: list[str], log: str) -> None:
    """One rank, as a launcher starts it."""
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(TOP)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch

    import train
    from utils import distributed

    torch.set_num_threads(1)
    distributed.run_script(lambda: train.main(flags))


def start(flags: list[str], log: Path) -> list[BaseProcess]:
    from processes import free_port

    # New processes of an interpreter that has imported everything: a start costs half a second instead of five.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    port = free_port()
    processes = [
        context.Process(target=rank_main, args=(rank, port, flags, f"{log}.{rank}"), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    return processes


def wait(processes: list[BaseProcess], seconds: float) -> bool:
    """Whether all have ended by then."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode is not None for process in processes)


def wait_for_moment(processes: list[BaseProcess], folder: Path, longest: float, draw: random.Random) -> bool:
    """Returns at a random moment, or, every other time, in the midst of the first save after it; whether it is one."""
    moment = time.monotonic() + draw.uniform(0.0, longest)
    in_a_save = draw.random() < 0.5
    while all(process.is_alive() for process in processes):
        if time.monotonic() < moment:
            time.sleep(0.002)
        elif not in_a_save:
            return False
        elif any(folder.glob(".*.partial")):
            return True
    return False


def kill_some(processes: list[BaseProcess], inside_a_save: bool, draw: random.Random) -> Kill | None:
    """kill -9 of one rank or of all; None if they had all ended before."""
    victims = list(range(RANKS)) if draw.random() < 0.4 else [draw.randrange(RANKS)]
    alive = [victim for victim in victims if processes[victim].is_alive()]
    for victim in alive:
        pid = processes[victim].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    if not wait(processes, SURVIVORS_SECONDS):
        stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            process.kill()
        raise AssertionError(f"ranks {stuck} still ran {SURVIVORS_SECONDS:.0f} s after {victims} was killed")
    if not any(processes[victim].exitcode == -signal.SIGKILL for victim in alive):
        return None
    return Kill(alive, inside_a_save, time.monotonic() - killed)


def one_training(
    flags: list[str], directory: Path, log: Path, draw: random.Random, kills: int, longest: float
) -> list[Kill]:
    """One training to its end, killed at most so often, within so many seconds from each start."""
    done: list[Kill] = []
    while True:
        processes = start(flags, log)
        if len(done) < kills:
            inside = wait_for_moment(processes, directory / "checkpoints", longest, draw)
            kill = kill_some(processes, inside, draw)
            if kill is not None:
                done.append(kill)
                continue
        if not wait(processes, LONGEST_SECONDS):
            raise AssertionError(f"the training was not done after {LONGEST_SECONDS:.0f} s; see {log}.*")
        codes = [process.exitcode for process in processes]
        if codes != [0] * RANKS:
            raise AssertionError(f"exit codes {codes}; see {log}.*:\n" + Path(f"{log}.0").read_text()[-3000:])
        return done


def soak(kills: int, seed: int, folder: Path, tell: bool = False) -> list[Kill]:
    """So many kills, over as many trainings as it takes; AssertionError unless each ends as the one left in peace."""
    from test_resume import assert_same_training
    from volume_files import write_volume

    draw = random.Random(seed)
    train, valid = (write_volume(folder / f"{name}.h5", seed=k) for k, name in enumerate(("train", "valid"), start=1))
    flags = [*FLAGS, f"--set=train_path={train}", f"--set=val_path={valid}", "--set=device=cpu"]

    def run(name: str, kills: int, longest: float = 0.0) -> tuple[Path, list[Kill]]:
        directory = folder / name / "test" / f"{RANKS}GPU" / "00"
        own = [*flags, f"--set=expdir={folder / name}"]
        return directory, one_training(own, directory, folder / f"{name}.log", draw, kills, longest)

    run("warm", 0)  # whoever is first waits for imports
    started = time.monotonic()
    peace, _ = run("peace", 0)
    longest = time.monotonic() - started
    done: list[Kill] = []
    trainings = 0
    while len(done) < kills:
        trainings += 1
        directory, more = run(f"soak{trainings}", min(kills - len(done), 10), longest)
        done += more
        assert_same_training(peace, directory, steps=STEPS)
        if tell:
            inside = sum(kill.inside_a_save for kill in done)
            print(
                f"training {trainings}: {len(more)} kills, same bits; {len(done)} kills so far, {inside} in a save, "
                f"{sum(len(kill.victims) > 1 for kill in done)} of all ranks, survivors ended within "
                f"{max(kill.seconds for kill in done):.1f} s",
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
        soak(options.kills, seed, Path(folder), tell=True)
    print(f"{options.kills} kills: every training ended with the bits of one left in peace")


if __name__ == "__main__":
    main()
