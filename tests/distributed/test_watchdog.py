"""Watchdog: if a rank dies, fails or hangs, all ranks end, with one line that names it; nothing else ends them."""

from __future__ import annotations

import itertools
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
from utils.distributed import hub
from utils.distributed import watchdog as watching
from utils.distributed.hub import Event, RankStatus, decide, describe
from utils.distributed.world import World, connect, run_script
from utils.errors import EXIT_HANG, LocalError, UserError, one_line_errors

HANG = 10.0  # seconds; for the stories in which a rank hangs, or all are suspended
NEVER = 2 * GENEROUS  # so that a busy machine makes no rank look hung


# --- the decision --------------------------------------------------------------------------------------------------


def members(*places: tuple[str, int], silent: int | None = None) -> dict[int, RankStatus]:
    """Ranks that have been at these places since 40 s; all but the silent one were heard of at 100 s."""
    numbers = {phase: number for number, phase in enumerate(hub.PHASES)}
    return {
        rank: RankStatus(f"node{rank}", 40.0 if rank == silent else 100.0, 40.0, (step, numbers[phase], 1))
        for rank, (phase, step) in enumerate(places)
    }


STEP, DATA = ("step", 18), ("data", 18)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (members(STEP, DATA, STEP), "rank 1 (host node1) hangs at step 18 (data) for 60 s, the others wait for it"),
        (members(STEP, STEP), "rank 0 (host node0) hangs at step 18 (step) for 60 s, and so do all others; its stacks"),
        (members(STEP, DATA, STEP, silent=2), "rank 2 (host node2) hangs at step 18 (step) for 60 s; it does not answ"),
    ],
)
def test_the_rank_that_all_wait_for_hangs(where: dict[int, RankStatus], message: str) -> None:
    assert decide(where, [], 99.9, 60) is None
    verdict = decide(where, [], 100.1, 60)
    assert verdict is not None
    assert verdict.message.startswith(f"error: {message}")
    assert (verdict.code, verdict.hang) == (EXIT_HANG, True)


def test_no_rank_hangs_while_one_saves_or_reports_and_never_where_that_is_switched_off() -> None:
    assert decide(members(STEP, ("save", 17)), [], 150, 60) is None, "slow storage, for which the others wait"
    assert decide(members(DATA, STEP), [], 1e9, 0) is None
    where = members(DATA, STEP)
    where[1].hear([18, 2, 2], 50.0)
    assert decide(where, [], 101, 60) is None


def test_a_lost_peer_is_a_consequence_and_other_errors_are_causes() -> None:
    """The cause may be reported last: when what is done on the way out has taken the process group down."""
    assert describe(OSError("Connection reset by peer")) == ("failed", "OSError: Connection reset by peer", 1)
    assert describe(KeyboardInterrupt()) == ("failed", "KeyboardInterrupt", 130)
    assert describe(dist.DistBackendError("NCCL error")) == ("consequence", "DistBackendError: NCCL error", 1)
    error = KeyError("x")
    error.__cause__ = RuntimeError("[/__w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    assert describe(error) == ("consequence", "KeyError: 'x'", 1)
    lost = Event("consequence", 0, 100.0, "RuntimeError: Connection closed")
    assert decide(members(STEP, DATA), [lost], 101.9, 60) is None
    verdict = decide(members(STEP, DATA), [lost, Event("failed", 1, 101.0, "ValueError: the cause")], 102.1, 60)
    assert verdict is not None
    assert (verdict.rank, verdict.code) == (1, 1)
    assert "ValueError: the cause" in verdict.message


# --- real ranks ----------------------------------------------------------------------------------------------------


def reduce_but(world: World, exception: int, act: Callable[[], Any]) -> None:
    """The ranks wait for each other at every step, as in a training; one acts after a few steps."""
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


def rank_1_has_an_error_of_its_own(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: fail(LocalError("no device memory left")))


def all_have_the_same_error(world: World, folder: Path) -> None:
    errors.GRACE_SECONDS = 1.0
    fail(UserError("the loss is nan"))


def rank_1_hangs(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: time.sleep(GENEROUS))


def rank_0_is_suspended(world: World, folder: Path) -> None:
    """Once the others have heard that it trains."""
    hear = RankStatus.hear

    def hear_and_record(member: RankStatus, place: tuple[int, int, int], now: float) -> None:
        hear(member, place, now)
        if place[0] == 17:
            (folder / f"{world.rank} heard").touch()

    def suspend() -> None:
        wait_until(lambda: world.watchdog.progress("data", 17) or all((folder / f"{rank} heard").exists() for rank in (1, 2)))
        signal_myself(signal.SIGSTOP)

    RankStatus.hear = hear_and_record
    reduce_but(world, 0, suspend)


def lone_rank_hangs(world: World, folder: Path) -> None:
    world.watchdog.progress("data", 3)
    time.sleep(GENEROUS)


def rank_2_ends_after_rank_0(world: World, folder: Path) -> None:
    """Rank 0 waits for the last rank, but not for ever."""
    watching.LEAVING_SECONDS = 0.5
    pids = world.gather_objects(os.getpid())
    if world.rank == 2:
        status = Path(f"/proc/{pids[0]}/status")
        wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())


def all_are_suspended_for_a_while(world: World, folder: Path) -> None:
    """As by `scontrol suspend`; then they go on for some seconds, in which an alarm would end them."""
    resumed, ends = folder / "resumed", 0.0
    going = torch.ones(1)
    while going:
        world.watchdog.progress("step", 1)
        if not ends and resumed.exists():
            ends = time.monotonic() + 3 * hub.TICK
        going.fill_(not ends or time.monotonic() < ends)
        dist.all_reduce(going, op=dist.ReduceOp.MAX)
        (folder / f"rank {world.rank} steps").touch()
        time.sleep(0.02)


def rank_main(name: str, rank: int, size: int, port: int, hang: float, folder: Path) -> None:
    """One rank of a program as its entry scripts make it."""
    output = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(rank_variables(rank, size, port))
    torch.set_num_threads(1)

    def main() -> None:
        with one_line_errors(), connect("cpu", GENEROUS, GENEROUS, hang) as world:
            world.barrier()  # one that left before all have met would be missed
            globals()[name](world, folder)

    run_script(main)


class Story:
    """Ranks of which something happens to one or all."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, size = name, folder, 1 if "lone" in name else 3
        hang = HANG if re.search("hang|suspended", name) else NEVER
        arguments = (size, free_port(), hang, folder)
        self.ranks = [context().Process(target=rank_main, args=(name, rank, *arguments)) for rank in range(size)]
        self.waits_for = self.ranks[1:] if name == "rank_0_is_suspended" else self.ranks
        for rank in self.ranks:
            rank.start()

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            os.kill(rank.pid, number)

    def end(self) -> tuple[list[int | None], str]:
        """The ranks' exit codes, None for one that was suspended, and their output."""
        try:
            for rank in self.waits_for:
                rank.join(GENEROUS)
            codes = [rank.exitcode for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.join(GENEROUS)
        return codes, (self.folder / "output").read_text()


GONE = r"ended without a word, last seen at step \d+ \(\w+\): killed, .*"
STACKS = r"(?s)rank {} \(host .*\) hangs at step {} \(data\); its threads:\n.* in {}\n.*"
TRACEBACK = r"(?s)Traceback(?!.*Traceback).*"
# Story -> exit codes, the line without its "error: ", all other output
EXPECTED: dict[str, tuple[list[int | None], str, str]] = {
    "rank_2_is_killed": ([1, 1, -9], rf"rank 2 \(host .*\) {GONE}", ""),
    "rank_0_is_killed": ([-9, 1, 1], rf"rank 0 \(host .*\) {GONE}", ""),
    "rank_1_raises": ([1, 1, 1], r"rank 1 \(host .*\) failed at step 17 \(data\): RuntimeError: wrong; .*", TRACEBACK),
    "rank_1_has_an_error_of_its_own": ([2, 2, 2], "no device memory left", ""),
    "all_have_the_same_error": ([2, 2, 2], "the loss is nan", ""),
    "rank_0_is_suspended": ([None, 76, 76], r"rank 0 .* hangs at step 17 .* for 10 s; it does not answer: .*", ""),
    "rank_1_hangs": (
        [76, 76, 76],
        r"rank 1 .* hangs at step 17 \(data\) for 10 s, the others wait for it at step 17 .*",
        STACKS.format(1, 17, "rank_1_hangs"),
    ),
    "lone_rank_hangs": (
        [76],
        r"rank 0 .* hangs at step 3 \(data\) for 10 s; its stacks are above; exit code 76",
        STACKS.format(0, 3, "lone_rank_hangs"),
    ),
    "rank_2_ends_after_rank_0": ([0, 0, 0], "", ""),
}
AT_A_TIME = 7  # they mostly wait

Endings = dict[str, tuple[list[int | None], str]]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """Name of a story -> exit codes and output of its ranks."""
    names, found = list(EXPECTED), {}
    for start in range(0, len(names), AT_A_TIME):
        running = [Story(name, tmp_path_factory.mktemp(name)) for name in names[start : start + AT_A_TIME]]
        found.update({story.name: story.end() for story in running})
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_end_and_only_a_fault_is_reported_in_one_line_that_names_its_cause(
    endings: Endings, name: str
) -> None:
    codes, output = endings[name]
    expected, line, rest = EXPECTED[name]
    assert codes == expected, output
    lines = output.splitlines(keepends=True)
    errors = [line for line in lines if line.startswith("error: ")]
    assert re.fullmatch(line, "".join(errors).removeprefix("error: ").rstrip()), output
    assert re.fullmatch(rest, "".join(line for line in lines if line not in errors)), output


def test_a_suspended_job_does_not_hang(tmp_path: Path) -> None:
    story = Story("all_are_suspended_for_a_while", tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("rank * steps"))) == 3)
    story.signal(signal.SIGSTOP)
    time.sleep(HANG + 1)  # the length of the suspension
    story.signal(signal.SIGCONT)
    (tmp_path / "resumed").touch()
    assert story.end() == ([0, 0, 0], "")
