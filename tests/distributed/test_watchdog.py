"""Watchdog: if a rank dies, fails or hangs, all ranks stop with one line that names it; nothing else stops them."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import GENEROUS, context, free_port, rank_variables, wait_until

from utils import errors
from utils.config.sections import TimeoutsConfig
from utils.distributed import watchdog as watchdogs
from utils.distributed.diagnosis import Event, Phase, RankStatus, decide, describe, find_absent
from utils.distributed.launch import run_script
from utils.distributed.watchdog import ProcessGroupWatchdog
from utils.distributed.world import World, connect
from utils.errors import EXIT_HANG, LocalError, UserError, one_line_errors

HANG = 10.0  # seconds; for the scenarios in which a rank hangs, or all are suspended
NEVER = 2 * GENEROUS  # so that no rank seems to hang on a busy machine


# --- the diagnosis -------------------------------------------------------------------------------------------------

STEP: tuple[Phase, int] = ("step", 18)
DATA: tuple[Phase, int] = ("data", 18)


def statuses(*positions: tuple[Phase, int], silent: int | None = None) -> dict[int, RankStatus]:
    """Ranks at these positions since 40 s; the last heartbeat of all but the silent one was at 100 s."""
    return {
        rank: RankStatus(f"node{rank}", 40.0 if rank == silent else 100.0, 40.0, phase=phase, step=step, heartbeat=1)
        for rank, (phase, step) in enumerate(positions)
    }


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (statuses(STEP, DATA, STEP), "rank 1 (host node1) hangs at step 18 (data) for 60 s, the others wait for it"),
        (
            statuses(STEP, STEP),
            "rank 0 (host node0) hangs at step 18 (step) for 60 s, and so do all others; its stacks",
        ),
        (statuses(STEP, DATA, STEP, silent=2), "rank 2 (host node2) hangs at step 18 (step) for 60 s; no heartbeat: "),
    ],
)
def test_the_rank_that_all_others_wait_for_hangs(ranks: dict[int, RankStatus], message: str) -> None:
    assert decide(ranks, [], 99.9, 60) is None
    diagnosis = decide(ranks, [], 100.1, 60)
    assert diagnosis is not None
    assert diagnosis.message.startswith(f"error: {message}")
    assert diagnosis.code == EXIT_HANG


def test_no_rank_hangs_during_a_save_or_with_progress_or_without_a_limit() -> None:
    assert decide(statuses(STEP, ("save", 17)), [], 150, 60) is None, "slow storage, for which the other ranks wait"
    assert decide(statuses(STEP, ("save", 17), silent=1), [], 150, 60) is None, "a write may hold the GIL"
    assert decide(statuses(DATA, STEP), [], 1e9, 0) is None
    ranks = statuses(DATA, STEP)
    report = {"heartbeat": 2, "state": "running", "step": 18, "phase": "step", "calls": 1}
    ranks[1].update(report, 50.0)
    assert decide(ranks, [], 101, 60) is None


def test_a_rank_without_a_first_heartbeat_is_named() -> None:
    ranks = statuses(STEP, ("start", 0))
    assert find_absent(ranks, 1000, 60) is None
    ranks[1].heartbeat = 0
    assert find_absent(ranks, 159, 60) is None
    diagnosis = find_absent(ranks, 161, 60)
    assert diagnosis is not None
    assert diagnosis.message.startswith("error: no heartbeat from rank 1 within 60 s of the start; ")
    assert diagnosis.code == 2


def test_a_lost_peer_is_a_consequence_and_other_errors_are_causes() -> None:
    """The cause may be reported last, if the rank that failed has closed its connections before."""
    assert describe(OSError("Connection reset by peer"), 3) == Event("failed", 3, "OSError: Connection reset by peer")
    assert describe(KeyboardInterrupt(), 3) == Event("failed", 3, "KeyboardInterrupt", 130)
    assert describe(dist.DistBackendError("NCCL error"), 3)[:3] == ("consequence", 3, "DistBackendError: NCCL error")
    error = KeyError("x")
    error.__cause__ = RuntimeError("[/__w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    assert describe(error, 3) == Event("consequence", 3, "KeyError: 'x'")
    lost = Event("consequence", 0, "RuntimeError: Connection closed", time=100.0)
    assert decide(statuses(STEP, DATA), [lost], 101.9, 60) is None
    cause = Event("failed", 1, "ValueError: the cause", time=101.0)
    diagnosis = decide(statuses(STEP, DATA), [lost, cause], 102.1, 60)
    assert diagnosis is not None
    assert (diagnosis.rank, diagnosis.code) == (1, 1)
    assert "ValueError: the cause" in diagnosis.message


# --- real ranks ----------------------------------------------------------------------------------------------------


def reduce_but(world: World, exception: int, act: Callable[[], Any]) -> None:
    """The ranks wait for each other at every step, as in a training; the exception acts after a few steps."""
    for step in itertools.count():
        world.watchdog.progress("data", 17)
        if step == 5 and world.rank == exception:
            act()
        world.watchdog.progress("step", 17)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.01)


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def fail(error: BaseException) -> None:
    raise error


def rank_2_is_killed(world: World, folder: Path) -> None:
    reduce_but(world, 2, lambda: signal_myself(signal.SIGKILL))


def rank_0_is_killed(world: World, folder: Path) -> None:
    reduce_but(world, 0, lambda: signal_myself(signal.SIGKILL))


def rank_1_raises(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: fail(RuntimeError("wrong\nin two lines")))


def rank_1_has_a_local_error(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: fail(LocalError("no device memory left")))


def all_have_the_same_error(world: World, folder: Path) -> None:
    errors.GRACE_SECONDS = 1.0
    fail(UserError("the loss is nan"))


def rank_1_hangs(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: time.sleep(GENEROUS))


def rank_0_is_suspended(world: World, folder: Path) -> None:
    """Once the others have read that it trains."""
    update, watchdog = RankStatus.update, world.watchdog
    assert isinstance(watchdog, ProcessGroupWatchdog)

    def update_and_record(status: RankStatus, report: dict[str, Any], now: float) -> None:
        update(status, report, now)
        if status is watchdog._statuses[0] and report["step"] == 17:
            (folder / f"{world.rank} read").touch()

    def suspend() -> None:
        def is_read() -> bool:
            watchdog.progress("data", 17)
            return all((folder / f"{rank} read").exists() for rank in (1, 2))

        wait_until(is_read)
        signal_myself(signal.SIGSTOP)

    RankStatus.update = update_and_record  # type: ignore[assignment, method-assign]
    reduce_but(world, 0, suspend)


def rank_1_is_suspended(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: signal_myself(signal.SIGSTOP))


def suspend_early(name: str, rank: int, folder: Path) -> None:
    """Suspends the rank that the scenario names during the rendezvous or before its first heartbeat."""
    start = ProcessGroupWatchdog.start

    def start_or_suspend(watchdog: ProcessGroupWatchdog) -> None:
        if f"rank_{rank}" not in name:
            start(watchdog)
            (folder / f"{rank} started").touch()
        else:
            wait_until(lambda: len(list(folder.glob("* started"))) == 2)
            signal_myself(signal.SIGSTOP)

    if "rendezvous" not in name:
        ProcessGroupWatchdog.start = start_or_suspend  # type: ignore[method-assign]
    elif f"rank_{rank}" in name:
        ProcessGroupWatchdog.__init__ = lambda *_: signal_myself(signal.SIGSTOP)  # type: ignore[method-assign]


def rank_1_is_suspended_before_its_first_heartbeat(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: None)


rank_0_is_suspended_before_its_first_heartbeat = rank_1_is_suspended_before_its_first_heartbeat
rank_0_is_suspended_in_the_rendezvous = rank_1_is_suspended_before_its_first_heartbeat


def single_rank_hangs(world: World, folder: Path) -> None:
    world.watchdog.progress("data", 3)
    time.sleep(GENEROUS)


def rank_2_ends_after_rank_0(world: World, folder: Path) -> None:
    """Rank 0 waits for the last rank, but not forever."""
    watchdogs.LEAVING_SECONDS = 0.5
    pids = world.gather_json(os.getpid())
    if world.rank == 2:
        status = Path(f"/proc/{pids[0]}/status")
        wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())
        time.sleep(3 * watchdogs.TICK)  # in which an alarm would stop it


def all_are_suspended_for_a_while(world: World, folder: Path) -> None:
    """As by `scontrol suspend`; then they continue for some time, in which an alarm would stop them."""
    resumed, end = folder / "resumed", 0.0
    going = torch.ones(1)
    while going:
        world.watchdog.progress("step", 1)
        if not end and resumed.exists():
            end = time.monotonic() + 6 * watchdogs.TICK
        going.fill_(not end or time.monotonic() < end)
        dist.all_reduce(going, op=dist.ReduceOp.MAX)
        (folder / f"rank {world.rank} steps").touch()
        time.sleep(0.02)


def rank_main(name: str, rank: int, size: int, port: int, hang: float, folder: Path) -> None:
    """One rank of a program, as the entry scripts run it."""
    output = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(rank_variables(rank, size, port))
    torch.set_num_threads(1)
    timeouts = TimeoutsConfig(rendezvous=GENEROUS, collective=GENEROUS, hang=hang)
    if re.search("first_heartbeat|rendezvous", name):
        timeouts = TimeoutsConfig(rendezvous=HANG, collective=GENEROUS)
        suspend_early(name, rank, folder)

    def main() -> None:
        with one_line_errors(), connect("cpu", timeouts) as world:
            world.watchdog.folder = folder
            globals()[name](world, folder)

    run_script(main)


class Scenario:
    """Ranks of which something happens to one or all."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, size = name, folder, 1 if "single" in name else 3
        hang = HANG if re.search("hang|suspended", name) else NEVER
        arguments = (size, free_port(), hang, folder)
        self.ranks = [context().Process(target=rank_main, args=(name, rank, *arguments)) for rank in range(size)]
        suspended = re.match(r"rank_(\d)_is_suspended", name)
        self.waits_for = [each for rank, each in enumerate(self.ranks) if not suspended or rank != int(suspended[1])]
        for rank in self.ranks:
            rank.start()

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            os.kill(rank.pid, number)

    def end(self) -> tuple[list[int | None], str]:
        """The exit codes of the ranks, None for one that is suspended, and their output."""
        try:
            for rank in self.waits_for:
                rank.join(GENEROUS)
            codes = [rank.exitcode for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.join(GENEROUS)
        # gloo of PyTorch 2.8 reports each group on stdout.
        return codes, re.sub(r"\[Gloo\] Rank .*\n", "", (self.folder / "output").read_text())


DIED = r"died, last seen at step \d+ \(\w+\): killed, .*"
STACKS = r"(?s)rank {} \(host .*\) hangs at step {} \(data\); its threads:\n.* in {}\n.*"
TRACEBACK = r"(?s)Traceback(?!.*Traceback).*"
FILES = r"the last collectives of each rank are in /.*/flight_recorder_rank\*.json\n"
SILENT = r"rank {} .* hangs at step {} for 10 s.*; no heartbeat: .*"
ABSENT = r"no heartbeat from rank {} within 10 s of the start; .*"
STORE_WARNINGS = r"(?s)(\[.*)?"  # PyTorch's, of a rank that uses the store while rank 0 dies
NO_ANSWER = r"rank \d of 3 could not connect to the other ranks at 127.0.0.1:\d+ \(.*\); .*"
# Scenario -> exit codes, the line without its "error: ", all other output
EXPECTED: dict[str, tuple[list[int | None], str, str]] = {
    # Those that take until a time limit first: they run at the same time.
    "rank_0_is_suspended": ([None, 76, 76], SILENT.format(0, r"17 .*"), FILES),
    "rank_1_is_suspended": ([76, None, 76], SILENT.format(1, r"\d+ .*"), FILES),
    # One of the other ranks may have left the rendezvous before rank 0 stopped; the line of the last one is enough.
    "rank_0_is_suspended_in_the_rendezvous": ([None, 2, 2], rf"({NO_ANSWER}\nerror: )?{NO_ANSWER}", STORE_WARNINGS),
    "rank_0_is_suspended_before_its_first_heartbeat": ([None, 2, 2], ABSENT.format(0), ""),
    "rank_1_is_suspended_before_its_first_heartbeat": ([2, None, 2], ABSENT.format(1), ""),
    "rank_1_hangs": (
        [76, 76, 76],
        r"rank 1 .* hangs at step 17 \(data\) for 10 s, the others wait for it at step 17 .*",
        STACKS.format(1, 17, "rank_1_hangs") + FILES,
    ),
    "single_rank_hangs": (
        [76],
        r"rank 0 .* hangs at step 3 \(data\) for 10 s; its stacks are above; exit code 76",
        STACKS.format(0, 3, "single_rank_hangs"),
    ),
    "rank_2_is_killed": ([1, 1, -9], rf"rank 2 \(host .*\) {DIED}", ""),
    "rank_0_is_killed": ([-9, 1, 1], rf"rank 0 \(host .*\) {DIED}", STORE_WARNINGS),
    "rank_1_raises": ([1, 1, 1], r"rank 1 \(host .*\) failed at step 17 \(data\): RuntimeError: wrong; .*", TRACEBACK),
    "rank_1_has_a_local_error": ([2, 2, 2], "no device memory left", ""),
    "all_have_the_same_error": ([2, 2, 2], "the loss is nan", ""),
    "rank_2_ends_after_rank_0": ([0, 0, 0], "", ""),
}
AT_A_TIME = 7  # they mostly sleep

Ends = dict[str, tuple[list[int | None], str, Path]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Name of a scenario -> exit codes, output and folder of its ranks."""
    names, found = list(EXPECTED), {}
    for start in range(0, len(names), AT_A_TIME):
        running = [Scenario(name, tmp_path_factory.mktemp(name)) for name in names[start : start + AT_A_TIME]]
        found.update({scenario.name: (*scenario.end(), scenario.folder) for scenario in running})
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_stop_and_one_line_names_the_cause(ends: Ends, name: str) -> None:
    codes, output, _ = ends[name]
    expected, line, rest = EXPECTED[name]
    assert codes == expected, output
    lines = output.splitlines(keepends=True)
    errors = [line for line in lines if line.startswith("error: ")]
    assert re.fullmatch(line, "".join(errors).removeprefix("error: ").rstrip()), output
    assert re.fullmatch(rest, "".join(line for line in lines if line not in errors)), output


def test_the_collectives_of_all_ranks_show_which_one_hangs(ends: Ends) -> None:
    _, output, folder = ends["rank_1_hangs"]
    assert f"are in {folder}/flight_recorder_rank*.json\n" in output
    recorded = [json.loads((folder / f"flight_recorder_rank{rank}.json").read_text())["gloo"] for rank in range(3)]
    last = [found["entries"][-1]["collective_seq_id"] for found in recorded]
    assert last[0] == last[2] == last[1] + 1, "rank 1 has not called the last all-reduce"
    assert not list(ends["single_rank_hangs"][2].glob("*.json")), "a single process has no collectives"


def test_a_suspended_job_does_not_hang(tmp_path: Path) -> None:
    scenario = Scenario("all_are_suspended_for_a_while", tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("rank * steps"))) == 3)
    scenario.signal(signal.SIGSTOP)
    time.sleep(HANG + 1)  # the length of the suspension
    scenario.signal(signal.SIGCONT)
    (tmp_path / "resumed").touch()
    assert scenario.end() == ([0, 0, 0], "")
