"""Signals to real training runs: all ranks save after the same step and exit with 75; the same command resumes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
from processes import TOP, Program, free_port, has_ended, rank_variables, ranks_of_torchrun, run_ranks, wait_until
from small_steps import ALONE
from trainings import directory

from utils.distributed.signals import Request, StopCoordinator, StopSignals
from utils.distributed.world import World
from utils.run import checkpoint

LONG = "--num_epochs=100000"  # runs until a signal stops it
# A signal within a second after the first one is the same signal, and an interrupted program may take 15 s to exit; a
# busy machine may need longer.
PATIENT = """
from utils.distributed import signals
from utils.distributed.launch import run_script
signals.SAME_SIGNAL_SECONDS = signals.INTERRUPT_SECONDS = 1e6
import train
run_script(train.main)
"""
Start = Callable[..., Program]


@pytest.fixture
def flags(tmp_path: Path, data_flags: list[str]) -> list[str]:
    return ["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]


@pytest.fixture
def train(start: Start, flags: list[str], tmp_path: Path) -> Start:
    """train(more flags) -> a training run without the time limits of signals, or a benchmark"""
    script, settings = tmp_path / "patient.py", tmp_path / "conf.yaml"
    script.write_text(PATIENT)
    settings.write_text("IO: {batches: 2, trials: 1000000, warmup_trials: 1}\n")
    variables = {"BENCHY_CONFIG_FILE": str(settings), "BENCHY_OUTPUT": f"{tmp_path}/x"}
    return lambda *more: start([str(script), *flags, *more], **variables)


def all_are_complete(tmp_path: Path, ranks: int = 1) -> list[int]:
    """The steps of the checkpoints, the last one first."""
    folder = directory(tmp_path, ranks) / "checkpoints"
    steps = checkpoint.saved_steps(folder)
    for step in steps:
        checkpoint.verify(checkpoint.step_directory(folder, step))
    return steps


def test_only_sigterm_and_the_named_signal_are_caught() -> None:
    handled: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    before = [signal.getsignal(number) for number in (SIGTERM, signal.SIGUSR2)]
    with StopSignals("SIGUSR2") as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: handled)
    assert signals.received is None
    assert [signal.getsignal(number) for number in (SIGTERM, signal.SIGUSR2)] == before
    with StopSignals("SIGUSR2") as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: signals.received)
    assert (signals.received, signal.set_wakeup_fd(-1)) == ("SIGUSR2", -1)


def exchange(world: World, requests: dict[int, Request]) -> list[int]:
    """The answers to a rank with these requests {step: request}."""
    coordinator, answers = StopCoordinator(world), [0]
    while answers[-1] != Request.STOP and len(answers) < 20:
        answers.append(int(coordinator.exchange(requests.get(len(answers) - 1, Request.CONTINUE))))
    coordinator.finish()
    return answers[1:]


def exchange_on_ranks(world: World) -> tuple[list[int], list[int]]:
    """Answers, and those of ranks that exchange every third step only."""
    last = world.rank == world.size - 1
    stop, save = {5: Request.STOP}, {2: Request.SAVE, 5: Request.SAVE}
    answers = exchange(world, stop if last else save if world.is_root else {})
    StopCoordinator.RANKS_PER_STEP = 1
    return answers, exchange(world, {world.rank: Request.SAVE, **({9: Request.STOP} if last else {})})


def test_all_ranks_have_the_same_answer_one_exchange_later() -> None:
    """A single rank waits for no other. Many ranks exchange every few steps, and lose no request."""
    assert exchange(ALONE, {2: Request.SAVE, 5: Request.STOP}) == [0, 0, 1, 0, 0, 2]
    expected = [0, 0, 0, 1, 0, 0, 2], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert run_ranks(exchange_on_ranks, 3) == [expected] * 3


def test_repeated_signals_still_save(train: Start, tmp_path: Path) -> None:
    """Slurm and torchrun both pass a signal on, a preemption follows a warning; also while the run exits."""
    program = train(LONG, "--set=stop_signal=SIGUSR2")
    program.wait_for("epoch 2/")
    while program.process.exitcode is None:
        program.signal(signal.SIGUSR2)
        program.signal(SIGTERM)
        time.sleep(0.02)
    assert program.end().returncode == 75, program.text
    (step,) = re.findall(r"Stopping after step (\d+): ", program.text)
    assert all_are_complete(tmp_path)[0] == int(step)
    assert not list((directory(tmp_path) / "checkpoints").glob(".*")), "no partial files"
    assert "Traceback" not in program.text


@pytest.mark.parametrize(
    ("flag", "signals", "code"),
    [
        pytest.param(LONG, {"Config test": SIGTERM}, 75, marks=pytest.mark.slow),  # before the first step
        ("--enable_benchy", {"BENCHY|Config test": SIGTERM}, 128 + SIGTERM),
        ("--num_epochs=1", {"DONE ---- rank 0": SIGTERM}, 0),  # it ended with 143
        (LONG, {"epoch 2/": SIGINT, "^interrupted; the last checkpoint is kept, and the same command": SIGINT}, 130),
    ],
)
def test_a_signal_leaves_complete_checkpoints(train: Start, tmp_path: Path, flag: str, signals: Any, code: int) -> None:
    """At the start, during the exit, to a benchmark, and Ctrl-C, which does not save."""
    program = train(flag)
    for place, number in signals.items():
        program.wait_for(place)
        program.signal(number)
    assert program.end().returncode == code, program.text
    assert "Traceback" not in program.text
    assert code == 75 or "Stopping" not in program.text
    all_are_complete(tmp_path)


STUCK = """
import os, signal, threading
from utils.distributed import signals
from utils.errors import one_line_errors
signals.INTERRUPT_SECONDS = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
with one_line_errors(), signals.StopSignals():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
    finally:
        threading.Event().wait()
"""


def test_ctrl_c_ends_a_program_that_blocks_during_its_exit() -> None:
    """An interrupt right after a lock was acquired, before the block that releases it, blocked a run forever."""
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=TOP, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_the_same_signal_again_ends_a_rank_that_waits_for_another(start: Start, flags: Any, tmp_path: Path) -> None:
    """Rank 1 is suspended, so the main thread of rank 0 waits in a collective, where Python runs no handlers."""
    port = free_port()
    waiting, suspended = (start(["train.py", *flags, LONG], **rank_variables(rank, 2, port)) for rank in range(2))
    waiting.wait_for("epoch 2/")
    suspended.signal(signal.SIGSTOP)
    waiting.signal(SIGTERM)
    waiting.wait_for("SIGTERM: saving and stopping")
    while waiting.process.exitcode is None:  # within a second it counts as the same signal
        waiting.signal(SIGTERM)
        time.sleep(0.1)
    assert waiting.end().returncode == 128 + SIGTERM
    assert waiting.text.endswith("SIGTERM again: exiting at once, without saving\n")
    assert "Stopping" not in waiting.text
    all_are_complete(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "begun"), [(SIGTERM, True), (SIGKILL, True), (SIGKILL, False)])
def test_ranks_end_with_torchrun(start: Start, flags: list[str], tmp_path: Path, number: Any, begun: bool) -> None:
    """torchrun passes SIGTERM on; the kernel signals ranks whose torchrun is killed, also before they connect."""
    torchrun = start(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *flags, LONG])
    if begun:
        torchrun.wait_for("epoch 2/")
    wait_until(lambda: len(ranks_of_torchrun(torchrun.pid)) == 2)
    ranks = ranks_of_torchrun(torchrun.pid).values()
    torchrun.signal(number)
    assert torchrun.end().returncode == (1 if number == SIGTERM else 128 + number)
    wait_until(lambda: all(map(has_ended, ranks)))
    if begun:
        assert "error: " not in torchrun.text, "the first rank that leaves causes no alarm"
        (step,) = re.findall(r"Stopping after step (\d+): (?:SIGTERM|a signal to another rank)", torchrun.text)
        assert all_are_complete(tmp_path, 2)[0] == int(step)
    else:
        assert "epoch" not in torchrun.text
