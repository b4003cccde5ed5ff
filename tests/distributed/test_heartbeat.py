"""Heartbeat: if a rank is gone, fails or hangs, all ranks end with one line that names it; nothing else ends them."""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from log_lines import messages
from processes import GENEROUS, context, free_port, has_ended, rank_variables, wait_until

from utils import errors as user_errors
from utils.config.sections import TimeoutsConfig
from utils.distributed import heartbeat as heartbeats
from utils.distributed.diagnosis import TICK, Diagnoser, Diagnosis
from utils.distributed.heartbeat import Heartbeat, ReportStore
from utils.distributed.launch import Launch, run_script
from utils.distributed.pulse import Phase, Report
from utils.distributed.world import World, connect
from utils.errors import EXIT_HANG, LocalError, UserError, one_line_errors
from utils.progress import Progress

HANG = 10.0  # seconds; for the scenarios in which a rank hangs or is suspended
NEVER = 2 * GENEROUS  # so that no rank seems to hang on a busy machine


class Reports:
    """Reports of ranks in the store of rank 0, which reads them at any time."""

    def __init__(self, size: int, hang: float = 60.0, silence: float = 30.0) -> None:
        self.diagnoser = Diagnoser(0, size, TimeoutsConfig(hang=hang, silence=silence))
        self.store = ReportStore(self.diagnoser.ranks, Launch("test", world_size=size))
        self.reports = [Report(f"node{rank}") for rank in range(size)]

    def write(self, rank: int, phase: Phase = "step", step: int = 18, **more: Any) -> None:
        last = self.reports[rank]
        calls = last.calls + ((last.step, last.phase) != (step, phase))
        report = last._replace(**{"phase": phase, "step": step, "beat": last.beat + 1, "calls": calls, **more})
        self.reports[rank] = report
        self.store.write(rank, report)

    def diagnosis_after(self, seconds: float) -> Diagnosis | None:
        """Rank 0 reads a slice of the reports, `seconds` after the start."""
        _, self.read, is_lost = self.store.read(reads_all=self.diagnoser.is_lost)
        self.diagnoser.add(seconds, self.read, is_lost)
        return self.diagnoser.cause(seconds)


STEP: tuple[Phase, int, int] = ("step", 18, 7)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([STEP, ("data", 18, 7), STEP], r"rank 1 \(host node1\) hangs at step 18 \(data\) for 60 s; the others wait"),
        ([STEP, STEP, ("step", 18, 6)], r"rank 2 \(host node2\) hangs at step 18 \(step\) for 60 s; the others wait"),
        ([STEP, STEP], r"rank 0 \(host node0\) hangs at step 18 \(step\) for 60 s; exit code 76"),
    ],
)
def test_the_rank_furthest_behind_hangs(positions: list[tuple[Phase, int, int]], message: str) -> None:
    """In every phase; within one step, the number of collectives tells ranks apart."""
    reports = Reports(len(positions))
    for seconds, hangs in ((40, False), (70, False), (99.9, False), (100.1, True)):
        for rank, (phase, step, collectives) in enumerate(positions):
            reports.write(rank, phase, step, collectives=collectives)
        cause = reports.diagnosis_after(seconds)
        assert (cause is not None) == hangs, cause
    assert cause is not None
    assert re.match(message, cause.line)
    assert (cause.hangs, cause.code) == (True, EXIT_HANG)


def test_progress_of_any_rank_or_no_limit_is_no_alarm() -> None:
    """A rank without progress may wait for another one, which evaluates or writes, or whose progress bar advances."""
    for hang, calls in ((60, range(9)), (0, [0] * 9)):
        reports = Reports(2, hang)
        for number, call in enumerate(calls):
            reports.write(0)
            reports.write(1, "prediction", calls=call)
            assert reports.diagnosis_after(25 * number) is None
    silent = Reports(2, hang=0, silence=0)
    silent.write(1)
    for seconds in (0, 9999):
        silent.write(0)
        assert silent.diagnosis_after(seconds) is None
    heartbeat = Heartbeat(TimeoutsConfig(), Launch("test"))
    heartbeat._now = 30.0
    with Progress("reading", 2, live_only=True) as bar:
        bar.advance()
        heartbeat._note_progress()
    assert heartbeat._own[1] == 30


def test_a_late_report_of_earlier_progress_is_no_step_back() -> None:
    """A rank among many reports seconds after its progress, when another one has made more."""
    reports = Reports(2)
    reports.write(0)
    reports.diagnosis_after(50)
    reports.write(1, idle=40.0)
    for seconds, hangs in ((60, False), (100, False), (115, True)):
        reports.write(0)
        reports.write(1)
        assert (reports.diagnosis_after(seconds) is not None) == hangs


def test_a_rank_that_is_gone_does_not_hang() -> None:
    """Fixed: a rank that was killed while the group was constructed "hung" if `rendezvous` was not above `silence`."""
    reports = Reports(2, hang=20)
    reports.write(0)
    assert reports.diagnosis_after(0) is None
    reports.write(0)
    assert "rank 1 (host unknown) sends no heartbeat for 21 s, last seen at step 0" in str(reports.diagnosis_after(21))


@pytest.mark.parametrize(("event", "limit"), [("silent", 30), ("lost", 2)])
@pytest.mark.parametrize("end", [80, 89, 111])
def test_rank_0_of_4096_notices_within_the_limit_and_one_report(event: str, limit: float, end: int) -> None:
    """Fixed: up to two more intervals of 8 s passed. Rank 3000 ends in one of the ticks, when others report."""
    reports = Reports(4096, hang=0)
    reports.write(4095, state="left")
    for tick in range(400):
        for rank in range(tick % 32, 4095, 32):
            if rank != 3000 or tick < end:
                reports.write(rank, step=tick)
        if event == "lost" and tick == end:
            reports.write(5, state="lost a peer")
        cause = reports.diagnosis_after(tick * TICK)
        assert event == "lost" or len(reports.read) == 512 / 4
        if cause is not None:
            break
    assert cause is not None
    assert (cause.hangs, cause.rank, cause.code) == (False, 3000, EXIT_HANG)
    assert limit - 8 <= (tick - end) * TICK <= limit + 8 + TICK


def reduce_but(exception: int, act: Callable[[], Any], world: World) -> None:
    """The ranks wait for each other at every step, as in a training run; the exception acts after a few steps."""
    for step in itertools.count():
        world.pulse.enter("data", 17)
        if step == 5 and world.rank == exception:
            act()
        world.pulse.enter("step", 17)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.01)


def send(rank: int, number: int) -> Callable[[World], None]:
    return partial(reduce_but, rank, lambda: os.kill(os.getpid(), number))


def fail(error: Exception) -> None:
    raise error


def hang(phase: Phase, step: int, world: World) -> None:
    world.pulse.enter(phase, step)
    if world.rank == 0:
        time.sleep(GENEROUS)
    world.barrier()


def rank_1_hangs(world: World) -> None:
    reduce_but(1, lambda: time.sleep(GENEROUS), world)


def rank_2_ends_after_rank_0(world: World) -> None:
    """Rank 0 waits for the last rank, but not forever."""
    heartbeats.LEAVING_SECONDS = 5.0
    pids = world.gather_json(os.getpid())
    if world.rank == 2:
        wait_until(lambda: has_ended(pids[0]))
        time.sleep(3 * TICK)  # in which an alarm would stop it


def single_is_suspended_for_a_while(world: World) -> None:
    """As by `scontrol suspend` or Ctrl-Z; then it continues for some time, in which an alarm would stop it."""
    heartbeats.FAILING_SECONDS = 0.0  # faulthandler's clock would go on
    time.sleep(4 * TICK)  # in which the heartbeat notices all progress so far
    subprocess.Popen(["bash", "-c", f"sleep {HANG + 1}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(6 * TICK)


def rank_1_hangs_while_it_leaves(world: World) -> None:
    if world.rank == 1:
        dist.destroy_process_group = lambda: time.sleep(GENEROUS)


def rank_1_hangs_with_the_gil(world: World) -> None:
    heartbeats.FAILING_SECONDS = 2.0
    time.sleep(2.0)  # in which the heartbeat arms its timer
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(int(GENEROUS))
    world.barrier()


GONE = r"rank {} \(host .*\) {}, last seen at step \d+ \(\w+\): killed, suspended, or its machine gone\? .* 76"
SILENT = r"sends no heartbeat for \d+ s"
HANGS = r"rank {} .* hangs at step {} \({}\) for 10 s; {}.*"
WAIT = "the others wait for it; "
STACKS = r"(?s)(rank \d \(host .*?\):\n.*?in .*?\n){{{}}}"
TRACEBACK = r"(?s)Traceback(?!.*Traceback).*"
STORE_WARNINGS = r"(?s)(\[.*)?"
FAILED = r"rank 1 \(host .*\) failed at step 17 \(data\): RuntimeError: wrong; .*"
WRONG, LOCAL = RuntimeError("wrong\nin two lines"), LocalError("no memory left")
# What the ranks do; their exit codes, None for one that is suspended; the line after "error: "; and all other output.
Scenario = tuple[Callable[[World], None], list[int | None], str, str]
SUSPENDED: Scenario = send(0, signal.SIGSTOP), [None, 76, 76], GONE.format(0, r"does not answer for \d+ s"), ""
SCENARIOS: dict[str, Scenario] = {
    # Those that take until a time limit first: they run at the same time.
    "rank_0_is_suspended": SUSPENDED,
    # Fixed: the others ended with stacks and exit code 1, without a line.
    "rank_0_is_suspended_without_a_limit_of_silence": SUSPENDED,
    "rank_1_is_suspended": (send(1, signal.SIGSTOP), [76, None, 76], GONE.format(1, SILENT), ""),
    "single_is_suspended_for_a_while": (single_is_suspended_for_a_while, [0], "", ""),
    # Fixed: they ran on without end.
    "rank_1_hangs_while_it_leaves": (
        rank_1_hangs_while_it_leaves,
        [0, 76],
        HANGS.format(1, 0, "start", "exit"),
        STACKS.format(1),
    ),
    "rank_1_hangs_with_the_gil": (
        rank_1_hangs_with_the_gil,
        [76, 1],
        HANGS.format(1, 0, "start", WAIT),
        r"(?s)rank 0 .*Timeout \(0:00:12\)!.*in rank_1_hangs_with_the_gil.*",
    ),
    # Fixed: all ranks waited without end.
    "rank_0_hangs_in_its_end": (partial(hang, "end", 17), [76] * 3, HANGS.format(0, 17, "end", WAIT), STACKS.format(3)),
    "rank_1_hangs": (rank_1_hangs, [76] * 3, HANGS.format(1, 17, "data", WAIT), STACKS.format(3)),
    "single_rank_hangs": (partial(hang, "data", 3), [76], HANGS.format(0, 3, "data", "exit"), STACKS.format(1)),
    "rank_2_is_killed": (send(2, signal.SIGKILL), [76, 76, -9], GONE.format(2, SILENT), ""),
    "rank_0_is_killed": (send(0, signal.SIGKILL), [-9, 76, 76], GONE.format(0, "has ended"), STORE_WARNINGS),
    "rank_1_raises": (partial(reduce_but, 1, partial(fail, WRONG)), [1, 1, 1], FAILED, TRACEBACK),
    "rank_1_has_a_local_error": (partial(reduce_but, 1, partial(fail, LOCAL)), [2, 2, 2], "no memory left", ""),
    "all_have_the_same_error": (lambda world: fail(UserError("the loss is nan")), [2] * 3, "the loss is nan", ""),
    "rank_2_ends_after_rank_0": (rank_2_ends_after_rank_0, [0, 0, 0], "", ""),
}


def rank_main(name: str, rank: int, size: int, port: int, folder: Path) -> None:
    """One rank of a program, as the entry scripts run it."""
    output = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(rank_variables(rank, size, port))
    torch.set_num_threads(1)
    hang = HANG if re.search("hang|for_a_while|without_a_limit", name) else NEVER
    silence = 0.0 if "without_a_limit" in name else HANG if re.search("suspended|silence", name) else 30.0
    timeouts = TimeoutsConfig(rendezvous=GENEROUS, hang=hang, silence=silence)
    user_errors.GRACE_SECONDS = 1.0

    def main() -> None:
        with one_line_errors(), connect("cpu", timeouts) as world:
            world.heartbeat.log = folder / "out.log"
            SCENARIOS[name][0](world)

    run_script(main)


def start(name: str, folder: Path) -> list[Any]:
    size, port = len(SCENARIOS[name][1]), free_port()
    ranks = [context().Process(target=rank_main, args=(name, rank, size, port, folder)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return ranks


def end(name: str, ranks: list[Any], folder: Path) -> tuple[list[int | None], str]:
    """The exit codes of the ranks, None for one that is suspended, and their output."""
    for rank, code in zip(ranks, SCENARIOS[name][1], strict=True):
        rank.join(0 if code is None else GENEROUS)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join(GENEROUS)
    # gloo of PyTorch 2.8 reports each group on stdout.
    return codes, re.sub(r"\[Gloo\] Rank .*\n", "", (folder / "output").read_text())


Ends = dict[str, tuple[list[int | None], str, Path]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Name of a scenario -> exit codes, output and folder of its ranks."""
    results: Ends = {}
    folders = {name: tmp_path_factory.mktemp(name) for name in SCENARIOS}
    (folders["rank_1_hangs"] / "out.log").touch()
    for names in (list(SCENARIOS)[:7], list(SCENARIOS)[7:13], list(SCENARIOS)[13:]):
        running = {name: start(name, folders[name]) for name in names}
        results.update({name: (*end(name, ranks, folders[name]), folders[name]) for name, ranks in running.items()})
    return results


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_stop_and_one_line_names_the_cause(ends: Ends, name: str) -> None:
    codes, output, _ = ends[name]
    _, expected, line, rest = SCENARIOS[name]
    assert codes == expected, output
    lines = output.splitlines(keepends=True)
    errors = [line for line in lines if line.startswith("error: ")]
    assert re.fullmatch(line, "".join(errors).removeprefix("error: ").rstrip()), output
    assert re.fullmatch(rest, "".join(line for line in lines if line not in errors)), output


def test_log_and_stacks_of_all_ranks_show_which_one_hangs(ends: Ends) -> None:
    """Fixed: the line was on the terminal only. Without a log, as in a prediction, none is created."""
    _, output, folder = ends["rank_1_hangs"]
    (line,) = messages((folder / "out.log").read_text())
    assert f"error: {line}\n" in output
    stacks = {int(text[0]): text for text in re.split(r"^rank ", output, flags=re.MULTILINE)[1:]}
    assert [rank for rank, text in stacks.items() if "in rank_1_hangs" in text and "all_reduce" not in text] == [1]
    assert os.listdir(ends["single_rank_hangs"][2]) == ["output"], "no log"
