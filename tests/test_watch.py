"""Watchdog: if a rank dies, fails or hangs, all ranks end, with one line that names it; nothing else ends them."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import GENEROUS, context, free_port, rank_variables, wait_until

from utils import errors, hub
from utils import watch as watching
from utils.distributed import World, connect, run_script
from utils.errors import EXIT_HANG, LocalError, Stopped, UserError, one_line_errors
from utils.hub import Member, Verdict, decide, describe

HANG = 5.0  # seconds; for the stories in which a rank hangs, or all are suspended
NEVER = 2 * GENEROUS  # so that a busy machine makes no rank look hung


# --- the decision --------------------------------------------------------------------------------------------------


def members(*places: tuple[str, int], silent: int | None = None, since: float = 0.0) -> dict[int, Member]:
    """Ranks that have been at these places since `since`; all but the silent one were heard of at 100 s."""
    numbers = {phase: number for number, phase in enumerate(hub.PHASES)}
    return {
        rank: Member(f"node{rank}", since if rank == silent else 100.0, since, (step, numbers[phase], 1))
        for rank, (phase, step) in enumerate(places)
    }


STEP, DATA, SAVE, START = ("step", 18), ("data", 18), ("save", 17), ("start", 0)


@pytest.mark.parametrize(
    ("places", "silent", "rank", "message"),
    [
        ([STEP, DATA, STEP], None, 1, "at step 18 (data) for 60 s, the others wait for it at step 18 (step); its sta"),
        ([STEP, STEP, STEP], None, 0, "at step 18 (step) for 60 s, and so do all others; its stacks are above; exit"),
        ([STEP, DATA, STEP], 2, 2, "at step 18 (step) for 60 s; it does not answer: stopped, or its machine is gone"),
        ([DATA], None, 0, "at step 18 (data) for 60 s; its stacks are above; exit code 76"),
        ([STEP, SAVE, STEP], None, None, ""),  # slow storage, for which the others wait
        ([START, STEP], None, None, ""),
    ],
)
def test_the_rank_that_all_wait_for_hangs_unless_it_saves_or_starts(
    places: list[tuple[str, int]], silent: int | None, rank: int | None, message: str
) -> None:
    where = members(*places, silent=silent, since=40.0)
    assert decide(where, [], 99.9, 60) is None
    verdict = decide(where, [], 100.1, 60)
    if rank is None:
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.message.startswith(f"error: rank {rank} (host node{rank}) hangs {message}")
        assert verdict == Verdict(rank, verdict.message, EXIT_HANG, hang=True)
    assert decide(where, [], 1e9, 0) is None, "0 is never"


def test_no_rank_hangs_while_one_reports_from_the_same_place() -> None:
    where = members(DATA, STEP, since=40.0)
    where[1].hear([18, 2, 2], 50.0)
    assert decide(where, [], 101, 60) is None


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


CLOSED = RuntimeError("[/__w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")


@pytest.mark.parametrize(
    ("error", "kind", "text", "code"),
    [
        (ValueError("wrong\nin two lines"), "failed", "ValueError: wrong", 1),
        (OSError("Connection reset by peer"), "failed", "OSError: Connection reset by peer", 1),
        (CLOSED, "consequence", f"RuntimeError: {CLOSED}", 1),
        (dist.DistBackendError("NCCL error"), "consequence", "DistBackendError: NCCL error", 1),
        (caused(KeyError("x"), CLOSED), "consequence", "KeyError: 'x'", 1),
        (UserError("bad\nfile"), "agreed", "bad file", 2),
        (LocalError("full"), "failed", "", 2),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt", 130),
    ],
)
def test_a_lost_peer_is_a_consequence_and_other_errors_are_causes(
    error: BaseException, kind: str, text: str, code: int
) -> None:
    assert describe(error) == (kind, text, code)


# --- real ranks ----------------------------------------------------------------------------------------------------


def reduce_for_ever(world: World) -> None:
    """What a training does: the ranks wait for each other at every step."""
    while True:
        world.watch.at("data", 17)
        world.watch.at("step", 17)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.01)


def reduce_but(world: World, exception: int, act: Callable[[], Any]) -> None:
    """One rank acts after a few steps; the others wait for it in a collective."""
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
    if world.rank == exception:
        world.watch.at("data", 17)
        act()
    reduce_for_ever(world)


def signal_myself(world: World, folder: Path, number: int) -> None:
    """Once the ranks that are to report it have heard that this one is at step 18."""
    by = (1, 2) if world.rank == 0 else (0,)
    wait_until(lambda: world.watch.at("data", 18) or all((folder / f"{rank} heard of step 18").exists() for rank in by))
    os.kill(os.getpid(), number)


def fail(error: BaseException) -> None:
    raise error


def rank_2_is_killed(world: World, folder: Path) -> None:
    reduce_but(world, 2, lambda: signal_myself(world, folder, signal.SIGKILL))


def rank_0_is_killed(world: World, folder: Path) -> None:
    reduce_but(world, 0, lambda: signal_myself(world, folder, signal.SIGKILL))


def rank_1_raises(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: fail(RuntimeError("wrong\nin two lines")))


def rank_2_raises_after_the_others_lost_it(world: World, folder: Path) -> None:
    """As when what is done on the way out takes the process group down: the others' errors come first."""
    hub.WAITS["consequence"] = GENEROUS

    def end() -> None:
        dist.destroy_process_group()
        wait_until(lambda: len(list(folder.glob("lost by *"))) == 2)
        raise ValueError("the cause")

    try:
        reduce_but(world, 2, end)
    except RuntimeError:
        (folder / f"lost by {world.rank}").touch()
        raise


def rank_1_has_an_error_of_its_own(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: fail(LocalError("no device memory left")))


def all_have_the_same_error(world: World, folder: Path) -> None:
    errors.GRACE_SECONDS = 1.0
    fail(UserError("the loss is nan"))


def rank_2_has_an_error_that_all_should_have(world: World, folder: Path) -> None:
    errors.GRACE_SECONDS = 1.0
    reduce_but(world, 2, lambda: fail(UserError("bad file")))


def rank_1_hangs(world: World, folder: Path) -> None:
    reduce_but(world, 1, lambda: time.sleep(GENEROUS))


def rank_2_is_suspended(world: World, folder: Path) -> None:
    reduce_but(world, 2, lambda: signal_myself(world, folder, signal.SIGSTOP))


def rank_0_is_suspended(world: World, folder: Path) -> None:
    reduce_but(world, 0, lambda: signal_myself(world, folder, signal.SIGSTOP))


def lone_rank_hangs(world: World, folder: Path) -> None:
    world.watch.at("data", 3)
    time.sleep(GENEROUS)


def all_are_interrupted(world: World, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GENEROUS)


def all_are_stopped(world: World, folder: Path) -> None:
    fail(Stopped())


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
        world.watch.at("step", 1)
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
    hear = Member.hear

    def hear_and_record(member: Member, place: tuple[int, int, int], now: float) -> None:
        hear(member, place, now)
        if place[0] == 18:
            (folder / f"{rank} heard of step 18").touch()

    Member.hear = hear_and_record

    def main() -> None:
        with one_line_errors(), connect("cpu", GENEROUS, GENEROUS, hang) as world:
            world.barrier()  # one that left before all have met would be missed
            globals()[name](world, folder)

    run_script(main)


class Story:
    """Ranks of which something happens to one or all."""

    def __init__(self, name: str, folder: Path, size: int = 3) -> None:
        self.name, self.folder = name, folder
        hang = HANG if re.search("hang|suspended", name) else NEVER
        arguments = (size, free_port(), hang, folder)
        self.ranks = [context().Process(target=rank_main, args=(name, rank, *arguments)) for rank in range(size)]
        for rank in self.ranks:
            rank.start()

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            os.kill(rank.pid, number)

    def end(self) -> tuple[list[int | None], str]:
        """The ranks' exit codes, None for one that was suspended, and their output."""
        suspended = re.match(r"rank_(\d)_is_suspended", self.name)
        expected = [rank for number, rank in enumerate(self.ranks) if not suspended or number != int(suspended[1])]
        try:
            for rank in expected:
                rank.join(GENEROUS)
            codes = [rank.exitcode for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.join(GENEROUS)
        return codes, (self.folder / "output").read_text()


GONE = r"ended without a word, last seen at step 18 \(data\): killed, .*"
SILENT = r"hangs at step 18 .* for 5 s; it does not answer: .*"
# Story -> exit codes, the line, the number of tracebacks
ENDED_BY_A_CAUSE: dict[str, tuple[list[int | None], str, int]] = {
    "rank_2_is_killed": ([1, 1, -9], rf"rank 2 \(host .*\) {GONE}", 0),
    "rank_0_is_killed": ([-9, 1, 1], rf"rank 0 \(host .*\) {GONE}", 0),
    "rank_1_raises": ([1, 1, 1], r"rank 1 \(host .*\) failed at step 17 \(data\): RuntimeError: wrong; the .*", 1),
    "rank_2_raises_after_the_others_lost_it": ([1, 1, 1], r"rank 2 .* failed at .*: ValueError: the cause; .*", 1),
    "rank_1_has_an_error_of_its_own": ([2, 2, 2], "no device memory left", 0),
    "all_have_the_same_error": ([2, 2, 2], "the loss is nan", 0),
    "rank_2_has_an_error_that_all_should_have": ([2, 2, 2], r"rank 2 .* failed at step 17 .*: bad file; .*", 0),
    "rank_2_is_suspended": ([76, 76, None], rf"rank 2 .* {SILENT}", 0),
    "rank_0_is_suspended": ([None, 76, 76], rf"rank 0 .* {SILENT}", 0),
}
HANGING = {
    "rank_1_hangs": ("rank 1 (host {}) hangs at step 17 (data)", ", the others wait for it at step 17"),
    "lone_rank_hangs": ("rank 0 (host {}) hangs at step 3 (data)", "; its stacks are above; exit code 76"),
}
QUIET = {"all_are_stopped": [75] * 3, "rank_2_ends_after_rank_0": [0] * 3}
AT_A_TIME = 7  # they mostly wait

Endings = dict[str, tuple[list[int | None], str]]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """Name of a story -> exit codes and output of its ranks."""
    names, found = [*ENDED_BY_A_CAUSE, *HANGING, *QUIET, "all_are_interrupted"], {}
    for start in range(0, len(names), AT_A_TIME):
        some = names[start : start + AT_A_TIME]
        running = [Story(name, tmp_path_factory.mktemp(name), size=1 if "lone" in name else 3) for name in some]
        found.update({story.name: story.end() for story in running})
    return found


@pytest.mark.parametrize("name", ENDED_BY_A_CAUSE)
def test_all_ranks_end_with_one_line_that_names_the_cause(endings: Endings, name: str) -> None:
    codes, output = endings[name]
    expected, line, tracebacks = ENDED_BY_A_CAUSE[name]
    assert codes == expected, output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    assert re.fullmatch(f"error: {line}", lines[0]), output
    assert output.count("Traceback") == tracebacks, output
    assert tracebacks or output == lines[0] + "\n"


@pytest.mark.parametrize("name", HANGING)
def test_a_rank_that_hangs_shows_its_stacks(endings: Endings, name: str) -> None:
    codes, output = endings[name]
    where, others = HANGING[name][0].format(socket.gethostname()), HANGING[name][1]
    assert codes == [EXIT_HANG] * len(codes), output
    lines = output.splitlines()
    assert lines[0] == f"{where}; its threads:"
    assert lines[-1].startswith(f"error: {where} for {HANG:g} s{others}")
    assert output.count("error: ") == 1
    assert f" in {name}\n" in output


@pytest.mark.parametrize("name", QUIET)
def test_a_regular_end_and_an_agreed_stop_raise_no_alarm(endings: Endings, name: str) -> None:
    assert endings[name] == (QUIET[name], "")


def test_an_interrupt_of_all_ranks_is_reported_once(endings: Endings) -> None:
    codes, output = endings["all_are_interrupted"]
    assert codes == [130] * 3
    assert output == "interrupted\n" or re.fullmatch("error: rank [12] .*KeyboardInterrupt.*\n", output)


def test_a_suspended_job_does_not_hang(tmp_path: Path) -> None:
    story = Story("all_are_suspended_for_a_while", tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("rank * steps"))) == 3)
    story.signal(signal.SIGSTOP)
    time.sleep(HANG + 1)  # the length of the suspension
    story.signal(signal.SIGCONT)
    (tmp_path / "resumed").touch()
    assert story.end() == ([0, 0, 0], "")
