"""Signals to real trainings: all ranks save after the same step and end with exit code 75; the same command goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from processes import free_port, run_ranks

from utils import checkpoint
from utils.checkpoint import FOLDER
from utils.distributed import World
from utils.stopping import SAME_SIGNAL_SECONDS, Agreement, NoSignals, StopSignals, Wish

TOP = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONG = "--num_epochs=100000"  # until it is told to stop
EPOCHS = 60  # a second or two


class Program:
    """A running program of one process or several; what it writes is read as it comes."""

    def __init__(self, command: Sequence[str], **variables: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        self.process = subprocess.Popen(
            command,
            cwd=TOP,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell has what it runs in the background ignore Ctrl-C, the tests, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        def told() -> bool:
            return any(re.search(pattern, line) for line in self.lines)

        with self._grown:
            self._grown.wait_for(lambda: told() or self._ended, seconds)
            assert told(), f"never said {pattern!r}:\n{self.text}"

    def end(self, seconds: float = 60) -> int:
        """Its exit code, as a shell would tell it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.text}") from None
        self._reader.join(10)
        return 128 - code if code < 0 else code


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(command, **environment) -> Program; all are gone in the end."""
    programs: list[Program] = []

    def started(command: Sequence[str], **variables: str) -> Program:
        programs.append(Program(command, **variables))
        return programs[-1]

    yield started
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            program.process.send_signal(signal.SIGCONT)
            program.process.kill()
        program.process.wait(30)


@pytest.fixture
def flags(tmp_path: Path, data_flags: list[str]) -> list[str]:
    return ["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]


def command(flags: Sequence[str], *more: str) -> list[str]:
    return [sys.executable, "train.py", *flags, *more]


def start_ranks(start: Start, command: Sequence[str], ranks: int = 2) -> list[Program]:
    """As a launcher that only sets variables."""
    port = str(free_port())
    return [
        start(command, RANK=str(n), LOCAL_RANK=str(n), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for n in range(ranks)
    ]


def run_folder(tmp_path: Path, ranks: int = 1, run_num: str = "00") -> Path:
    return tmp_path / "test" / f"{ranks}GPU" / run_num


def saved_at_the_stop(program: Program, folder: Path) -> checkpoint.Saved:
    """The checkpoint of the step that the log tells, whole; the log tells it once."""
    (step,) = re.findall(r"Stopping after step (\d+): ", program.text)
    saved = checkpoint.load(checkpoint.place(folder / FOLDER, int(step)))
    assert saved.position.step == int(step) == checkpoint.saved_steps(folder / FOLDER)[0]
    assert not list((folder / FOLDER).glob(".*")), "nothing half-written is left"
    assert "Traceback" not in program.text
    return saved


# --- the parts -------------------------------------------------------------------------------------------------------


def wait_until(holds: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """A signal that was caught is ignored ever after: not in the tests that follow."""
    before = handlers()
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_remembered(name: str) -> None:
    threads = threading.active_count()
    with StopSignals("SIGUSR1" if name == "SIGTERM" else name) as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.Signals[name])
        wait_until(lambda: signals.received)
        os.kill(os.getpid(), signal.Signals[name])  # again, so soon, it is the same one
        time.sleep(0.1)
        assert signals.received == name
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_without_a_signal_all_is_as_before() -> None:
    before, threads = handlers(), threading.active_count()
    with StopSignals() as signals:
        pass
    assert signals.received is None
    assert (handlers(), threading.active_count()) == (before, threads)


@pytest.mark.usefixtures("own_handlers")
def test_the_first_signal_is_the_reason_that_is_told() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: signals.received)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert signals.received == "SIGUSR1"


@pytest.mark.usefixtures("own_handlers")
def test_other_signals_mean_nothing() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    with StopSignals("SIGUSR1") as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: heard)
        assert signals.received is None
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


def test_no_signals_leaves_every_handler_alone() -> None:
    before = handlers()
    with NoSignals() as signals:
        assert handlers() == before
    assert signals.received is None


def ask_on_ranks(world: World) -> list[int]:
    """What is answered, where each rank wishes for something at a moment of its own."""
    wishes = {0: {2: Wish.SAVE, 5: Wish.SAVE}, world.size - 1: {5: Wish.STOP}}.get(world.rank, {})
    agreement, answers = Agreement(world), []
    for moment in range(20):
        answers.append(agreement.ask(wishes.get(moment, Wish.GO_ON)))
        if answers[-1] is Wish.STOP:
            break
    agreement.close()
    # After a regular end the process group is free for other exchanges.
    return [*map(int, answers), int(world.sum(torch.ones(())))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_have_the_same_answer_one_moment_later(ranks: int) -> None:
    # One rank alone wishes for the last rank's part, and has its answer at once.
    expected = [0, 0, 0, 0, 0, 2, 1] if ranks == 1 else [0, 0, 0, 1, 0, 0, 2, ranks]
    assert run_ranks(ask_on_ranks, ranks) == [expected] * ranks


class Late:
    """An exchange that another rank has not come to."""

    waited = False

    def wait(self) -> None:
        self.waited = True


def test_an_exchange_is_waited_for_only_when_the_next_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    from utils import stopping
    from utils.distributed import Launch

    works: list[Late] = []
    monkeypatch.setattr(stopping.dist, "all_reduce", lambda *_, async_op: works.append(Late()) or works[-1])
    agreement = Agreement(World(Launch("test", world_size=2), torch.device("cpu")))
    assert agreement.ask(Wish.GO_ON) is Wish.GO_ON
    assert [work.waited for work in works] == [False]
    agreement.ask(Wish.GO_ON)
    assert [work.waited for work in works] == [True, False]
    agreement.close()
    assert [work.waited for work in works] == [True, True]
    agreement.close()


def ask_some_times(world: World, calls: int) -> list[Wish]:
    """Each rank wishes once, for itself, at another moment; what it was answered."""
    Agreement.RANKS_A_STEP = 1
    agreement = Agreement(world)
    wishes = {world.rank: Wish.SAVE, 9: Wish.STOP if world.rank == world.size - 1 else Wish.GO_ON}
    answers = [agreement.ask(wishes.get(call, Wish.GO_ON)) for call in range(calls)]
    agreement.close()
    return answers


def test_many_ranks_exchange_every_few_steps_and_lose_no_wish() -> None:
    """As 96 ranks would: all have the same answers at the same steps."""
    answers = run_ranks(ask_some_times, 3, 18)
    assert answers[0] == answers[1] == answers[2]
    assert [answer for answer in answers[0] if answer is not Wish.GO_ON][:2] == [Wish.SAVE, Wish.STOP]


def test_a_signal_lets_a_librarys_system_call_go_on() -> None:
    """It must not fail with EINTR just when a training is to end in order."""
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    with StopSignals() as signals:
        signalled = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        answered = threading.Timer(0.6, lambda: os.write(writer, b"x"))
        signalled.start()
        answered.start()
        assert libc.read(reader, ctypes.create_string_buffer(1), 1) == 1, os.strerror(ctypes.get_errno())
        assert signals.received == "SIGUSR1"
    os.close(reader)
    os.close(writer)


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "settings"),
    [
        (signal.SIGTERM, []),
        (signal.SIGUSR1, []),
        (signal.SIGUSR2, ["--set=stop_signal=SIGUSR2"]),
    ],
)
def test_after_a_signal_the_same_command_goes_on_to_the_same_weights(
    start: Start, flags: list[str], tmp_path: Path, number: signal.Signals, settings: list[str]
) -> None:
    flags = [*flags, *settings, f"--num_epochs={EPOCHS}", "--set=log_interval=3"]
    stopped = start(command(flags))
    undisturbed = start(command(flags, "--run_num=undisturbed"))
    stopped.wait_for("epoch 3/")
    stopped.process.send_signal(number)
    assert stopped.end() == 75
    saved = saved_at_the_stop(stopped, run_folder(tmp_path))
    assert 0 < saved.position.step < 8 * EPOCHS
    stopped.wait_for(rf"step_{saved.position.step:08d} written in")
    resumed = start(command(flags))
    assert resumed.end() == 0, resumed.text
    assert undisturbed.end() == 0, undisturbed.text
    resumed.wait_for(rf"Going on from .*, after step {saved.position.step}$")
    ends = [checkpoint.newest(run_folder(tmp_path, 1, name) / FOLDER) for name in ("00", "undisturbed")]
    assert [end.position.step for end in ends if end] == [8 * EPOCHS] * 2
    one, other = (end.weights["network"] for end in ends if end)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_one_signal_that_comes_many_times_within_a_second_counts_once(
    start: Start, flags: list[str], tmp_path: Path
) -> None:
    """Slurm and torchrun both pass it on: also when the first of them has the training end within that second."""
    program = start(command(flags, LONG))
    program.wait_for("epoch 2/")
    deadline = time.monotonic() + 0.8 * SAME_SIGNAL_SECONDS
    while time.monotonic() < deadline and program.process.poll() is None:
        program.process.send_signal(signal.SIGUSR1)
        time.sleep(0.02)
    assert program.end() == 75
    saved_at_the_stop(program, run_folder(tmp_path))


def test_two_kinds_of_signals_in_a_row_still_save(start: Start, flags: list[str], tmp_path: Path) -> None:
    program = start(command(flags, LONG))
    program.wait_for("epoch 2/")
    program.process.send_signal(signal.SIGUSR1)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == 75
    saved_at_the_stop(program, run_folder(tmp_path))


@pytest.mark.slow
def test_a_signal_before_training_begins_does_no_harm(start: Start, flags: list[str], tmp_path: Path) -> None:
    """While Python still imports it ends the process; from then on it stops the training in order."""
    started = time.monotonic()
    program = start(command(flags, LONG))
    program.wait_for("Before training")
    seconds = time.monotonic() - started
    program.process.send_signal(signal.SIGTERM)
    codes = [program.end()]
    for part in (0.1, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95):
        program = start(command(flags, LONG))
        time.sleep(part * seconds)  # not to wait for anything, but to come upon everything
        program.process.send_signal(signal.SIGTERM)
        codes.append(program.end())
        assert codes[-1] in (75, 128 + signal.SIGTERM), program.text
        assert "Traceback" not in program.text
        for step in checkpoint.saved_steps(run_folder(tmp_path) / FOLDER):
            checkpoint.load(checkpoint.place(run_folder(tmp_path) / FOLDER, step))
        assert not list((run_folder(tmp_path) / FOLDER).glob(".*"))
    assert codes[:2] == [75, 128 + signal.SIGTERM]


STUCK = """
import os, signal, threading
from utils import stopping
from utils.errors import one_line_errors
stopping.INTERRUPT_SECONDS = 0.5
with one_line_errors(), stopping.StopSignals():
    lock = threading.Lock()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)
    finally:
        lock.acquire()
        lock.acquire()
"""


def test_ctrl_c_ends_a_program_that_is_stuck_on_its_way_out(start: Start) -> None:
    """An interrupt between a lock's acquisition and the block that releases it left a training waiting for ever."""
    program = start([sys.executable, "-c", STUCK])
    assert program.end() == 130
    assert program.lines == ["interrupted"]


def test_ctrl_c_ends_at_once_as_ever(start: Start, flags: list[str], tmp_path: Path) -> None:
    program = start(command(flags, LONG))
    program.wait_for("epoch 2/")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.lines[-1] == "interrupted"
    assert "Stopping" not in program.text
    for step in checkpoint.saved_steps(run_folder(tmp_path) / FOLDER):
        checkpoint.load(checkpoint.place(run_folder(tmp_path) / FOLDER, step))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_benchmark_dies_of_a_signal_as_ever(
    start: Start, flags: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    settings = tmp_path / "conf.yaml"
    settings.write_text("IO: {batches: 2, trials: 100000, warmup_trials: 1}\n")
    program = start(command(flags, "--enable_benchy"), BENCHY_CONFIG_FILE=str(settings), BENCHY_OUTPUT=f"{tmp_path}/x")
    program.wait_for("BENCHY|Configuration test")
    program.process.send_signal(number)
    assert program.end() == 128 + number
    assert "Stopping" not in program.text


# --- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]], ids=str)
def test_ranks_stop_together_whichever_is_told(
    start: Start, flags: list[str], tmp_path: Path, signalled: list[int]
) -> None:
    ranks = start_ranks(start, command(flags, LONG))
    ranks[0].wait_for("epoch 2/")
    for rank in signalled:
        ranks[rank].process.send_signal(signal.SIGUSR1)
    assert [rank.end() for rank in ranks] == [75, 75]
    saved = saved_at_the_stop(ranks[0], run_folder(tmp_path, 2))
    why = "SIGUSR1" if 0 in signalled else "a signal to another rank"
    ranks[0].wait_for(rf"Stopping after step {saved.position.step}: {why}$")
    assert len(saved.training["random"]) == 2
    assert ranks[1].lines == [] or "Stopping" not in ranks[1].text


def test_the_same_signal_again_ends_even_a_rank_that_waits_for_another(
    start: Start, flags: list[str], tmp_path: Path
) -> None:
    """Rank 1 is suspended, so rank 0's main thread waits in a collective, where Python runs no handler."""
    ranks = start_ranks(start, command(flags, LONG))
    ranks[0].wait_for("epoch 2/")
    ranks[1].process.send_signal(signal.SIGSTOP)
    counted = -1
    while counted != len(ranks[0].lines):  # until it gets no further
        counted = len(ranks[0].lines)
        time.sleep(0.5)
    ranks[0].process.send_signal(signal.SIGTERM)
    time.sleep(SAME_SIGNAL_SECONDS + 0.3)
    assert ranks[0].process.poll() is None, "the first is a wish, and it waits to be told to the others"
    sent = time.monotonic()
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].end(10) == 128 + signal.SIGTERM
    assert time.monotonic() - sent < 2.0
    assert ranks[0].lines[-1] == "SIGTERM again: ends at once, without saving"
    ranks[1].process.kill()
    ranks[1].process.send_signal(signal.SIGCONT)
    for step in checkpoint.saved_steps(run_folder(tmp_path, 2) / FOLDER):
        checkpoint.load(checkpoint.place(run_folder(tmp_path, 2) / FOLDER, step))


@pytest.mark.slow
def test_a_signal_to_torchrun_has_its_ranks_save(start: Start, flags: list[str], tmp_path: Path) -> None:
    """It passes SIGTERM on, and itself ends with exit code 1; the same command goes on."""
    program = start([*TORCHRUN, "train.py", *flags, f"--num_epochs={EPOCHS}"])
    program.wait_for("epoch 2/")
    program.process.send_signal(signal.SIGTERM)
    code = program.end()
    assert code != 0
    (step,) = re.findall(r"Stopping after step (\d+): SIGTERM", program.text)
    saved = checkpoint.load(checkpoint.place(run_folder(tmp_path, 2) / FOLDER, int(step)))
    assert saved.position.step == int(step)
    resumed = start([*TORCHRUN, "train.py", *flags, f"--num_epochs={EPOCHS}"])
    assert resumed.end() == 0, resumed.text
    resumed.wait_for(rf"Going on from .*, after step {step}$")
    assert code == 1


@pytest.mark.slow
def test_ranks_whose_torchrun_is_gone_save_and_stop(start: Start, flags: list[str], tmp_path: Path) -> None:
    """They once went on training, with nobody to watch them."""
    program = start([*TORCHRUN, "train.py", *flags, LONG])
    program.wait_for("epoch 2/")
    program.process.kill()
    program.process.wait(10)
    program._reader.join(30)  # until the last rank's end closes the pipe
    assert not program._reader.is_alive()
    (step,) = re.findall(r"Stopping after step (\d+): SIGTERM", program.text)
    checkpoint.load(checkpoint.place(run_folder(tmp_path, 2) / FOLDER, int(step)))


@pytest.mark.slow
def test_torchrun_starts_ranks_again_and_they_go_on(start: Start, flags: list[str], tmp_path: Path) -> None:
    """One is killed; the other ends by itself or by torchrun; both begin again at the newest checkpoint."""
    restarting = [*TORCHRUN, "--max-restarts=2", "train.py", *flags]
    program = start([*restarting, f"--num_epochs={EPOCHS}", "--set=checkpoint.every_steps=5"])
    program.wait_for("epoch 3/")
    children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert program.end(120) == 0, program.text
    program.wait_for(r"Going on from .*, after step \d+$")
    assert program.text.count("This training is complete") == 0
    assert program.text.count("DONE ---- rank 0") == 1
    assert checkpoint.saved_steps(run_folder(tmp_path, 2) / FOLDER)[0] == EPOCHS * 8
