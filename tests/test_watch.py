"""Whatever happens to one of several ranks, all end soon, with one line that names it; and nothing else ends them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils import hub
from utils import watch as watching
from utils.errors import EXIT_HANG, LocalError, Stopped, UserError
from utils.hub import Event, Member, Verdict, decide, describe
from utils.watch import Watch, join

HANG = 2.5  # seconds; more than the gap by which a suspended job is known


# --- the decision --------------------------------------------------------------------------------------------------


def members(*places: tuple[str, int], silent: int | None = None, since: float = 0.0) -> dict[int, Member]:
    """Ranks that all have been where they are since `since`; all but the silent one were heard of at 100 s."""
    numbers = {phase: number for number, phase in enumerate(hub.PHASES)}
    return {
        rank: Member(f"node{rank}", since if rank == silent else 100.0, since, (step, numbers[phase], 1))
        for rank, (phase, step) in enumerate(places)
    }


WHERE = members(("step", 17), ("step", 17), ("data", 17), since=99.0)
DIED, FAILED = Event("died", 1, 100.3), Event("failed", 2, 100.2, "ValueError: wrong")
CONSEQUENCES = [Event("consequence", 0, 100.1, "RuntimeError: gone"), Event("consequence", 1, 100.0, "gone, too")]
AGREED = [Event("agreed", rank, 100.0, "bad file", 2) for rank in range(3)]


@pytest.mark.parametrize(
    ("events", "waits", "rank", "message"),
    [
        (
            [DIED],
            0.0,
            1,
            "error: rank 1 (host node1) ended without a word, last seen at step 17 (step): killed, out of memory ",
        ),
        (
            [*CONSEQUENCES, FAILED, DIED],
            0.0,
            1,
            "error: rank 1 (host node1) ended without a word, last seen at step 17 (step)",
        ),
        (
            [*CONSEQUENCES, FAILED],
            1.0,
            2,
            "error: rank 2 (host node2) failed at step 17 (data): ValueError: wrong; the",
        ),
        ([*AGREED[:2], FAILED], 1.0, 2, "error: rank 2 (host node2) failed at step 17 (data): ValueError: wrong; the"),
        (CONSEQUENCES, 2.0, 1, "error: rank 1 (host node1) failed at step 17 (step): gone, too; the others end, too"),
        ([AGREED[1]], 5.0, 1, "error: rank 1 (host node1) failed at step 17 (step): bad file; the others end, too"),
        (AGREED[:2], 5.0, 0, ""),  # rank 0 tells of it itself, as does any rank of an error of its own
        ([Event("failed", 2, 100.0, "", 2)], 1.0, 2, ""),
        ([Event("failed", rank, 100.0, "KeyboardInterrupt", 130) for rank in (2, 1, 0)], 1.0, 0, ""),
    ],
)
def test_the_likeliest_cause_is_chosen_after_likelier_ones_had_their_time(
    events: list[Event], waits: float, rank: int, message: str
) -> None:
    kind = min((event.kind for event in events), key=list(hub.WAITS).index)
    cause = next(event for event in events if (event.rank, event.kind) == (rank, kind))
    assert waits == 0 or decide(WHERE, events, cause.time + waits - 0.01, 10) is None
    verdict = decide(WHERE, events, cause.time + waits + 0.01, 10)
    assert verdict is not None
    assert (verdict.rank, verdict.code, verdict.hang) == (rank, cause.code, False)
    assert verdict.message.startswith(message)
    assert bool(verdict.message) == bool(message)


STEP, DATA, SAVE, START, VALIDATION = ("step", 18), ("data", 18), ("save", 17), ("start", 0), ("validation", 17)


@pytest.mark.parametrize(
    ("places", "silent", "rank", "message"),
    [
        (
            [STEP, DATA, STEP],
            None,
            1,
            "at step 18 (data) for 60 s, the others wait for it at step 18 (step); its stacks",
        ),
        (
            [STEP, STEP, VALIDATION],
            None,
            2,
            "at step 17 (validation) for 60 s, the others wait for it at step 18 (step);",
        ),
        (
            [STEP, STEP, STEP],
            None,
            0,
            "at step 18 (step) for 60 s, and so do all others; its stacks are above; exit code",
        ),
        (
            [STEP, STEP, STEP],
            2,
            2,
            "at step 18 (step) for 60 s; it does not answer: stopped, or its machine is gone; e",
        ),
        ([STEP, DATA, STEP], 2, 2, "at step 18 (step) for 60 s; it does not answer"),
        ([DATA], None, 0, "at step 18 (data) for 60 s; its stacks are above; exit code 76"),
        ([STEP, SAVE, STEP], None, None, ""),  # slow storage, for which the others wait
        ([STEP, SAVE, STEP], 1, None, ""),
        ([START, STEP], None, None, ""),
        ([], None, None, ""),
    ],
)
def test_the_rank_that_all_wait_for_hangs(
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


def test_a_rank_that_has_left_or_that_goes_on_does_not_hang() -> None:
    for places in ((DATA, STEP), (STEP, STEP)):
        where = members(*places, since=40.0)
        where[1].changed = 50.0
        assert decide(where, [], 101, 60) is None, "rank 1 is just back from where it took its time, say"
    where = members(DATA, STEP, since=40.0)
    where[0].left, where[0].changed = True, 50.0
    assert decide(where, [], 101, 60) is None, "rank 1 may be about to leave"
    where[0].changed = 40.0
    verdict = decide(where, [], 101, 60)
    assert verdict is not None
    assert verdict.rank == 1


def test_reports_at_the_same_place_are_progress() -> None:
    member = Member("node", 0.0, 0.0)
    member.hear([3, 3, 7], 10.0)
    member.hear([3, 3, 7], 20.0)
    assert (member.heard, member.changed) == (20.0, 10.0)
    member.hear([3, 3, 8], 30.0)
    assert member.changed == 30.0


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


CLOSED = RuntimeError(
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
)
SLOW = RuntimeError("[/__w/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv")


@pytest.mark.parametrize(
    ("error", "kind", "text", "code"),
    [
        (ValueError("wrong\nin two lines"), "failed", "ValueError: wrong", 1),
        (RuntimeError(), "failed", "RuntimeError", 1),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "failed",
            "OutOfMemoryError: CUDA out of memory. Tried",
            1,
        ),
        (OSError("Connection reset by peer"), "failed", "OSError: Connection reset by peer", 1),
        (CLOSED, "consequence", f"RuntimeError: {CLOSED}", 1),
        (SLOW, "consequence", f"RuntimeError: {SLOW}", 1),
        (dist.DistBackendError("NCCL error"), "consequence", "DistBackendError: NCCL error", 1),
        (
            dist.DistNetworkError("Failed to recv, got 0 bytes"),
            "consequence",
            "DistNetworkError: Failed to recv, got 0 b",
            1,
        ),
        (caused(KeyError("x"), CLOSED), "consequence", "KeyError: 'x'", 1),
        (UserError("bad\nfile"), "agreed", "bad file", 2),
        (LocalError("full"), "failed", "", 2),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt", 130),
    ],
)
def test_exceptions_are_told_from_consequences(error: BaseException, kind: str, text: str, code: int) -> None:
    described = describe(error)
    assert (described[0], described[2]) == (kind, code)
    assert described[1].startswith(text)
    assert bool(text) == bool(described[1])


# --- real ranks ----------------------------------------------------------------------------------------------------


def reduce_for_ever(watch: Watch, step: int = 17) -> None:
    """What a training does: the ranks wait for each other at every step."""
    while True:
        watch.at("data", step)
        watch.at("step", step)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.01)


def reduce_but(watch: Watch, rank: int, exception: int, act: Callable[[], Any]) -> None:
    """One rank acts after a while; the others wait for it in a collective."""
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
    if rank == exception:
        watch.at("data", 17)
        act()
    reduce_for_ever(watch)


def signal_myself(watch: Watch, by: int) -> None:
    for _ in range(25):  # until all have heard where this rank is
        watch.at("data", 17)
        time.sleep(0.1)
    os.kill(os.getpid(), by)


def fail(error: BaseException) -> None:
    raise error


def rank_2_is_killed(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 2, lambda: signal_myself(watch, signal.SIGKILL))


def rank_0_is_killed(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 0, lambda: signal_myself(watch, signal.SIGKILL))


def rank_1_raises(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 1, lambda: fail(RuntimeError("wrong\nin two lines")))


def rank_2_raises_after_it_closed_its_connections(watch: Watch, rank: int, store: dist.Store) -> None:
    """As when what was done on the way out took the process group down: the others' errors come first."""

    def end() -> None:
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the cause")

    reduce_but(watch, rank, 2, end)


def all_lose_each_other(watch: Watch, rank: int, store: dist.Store) -> None:
    fail(RuntimeError(f"gloo: rank {rank} lost a peer"))


def rank_1_has_an_error_of_its_own(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 1, lambda: fail(LocalError("no device memory left")))


def all_agree(watch: Watch, rank: int, store: dist.Store) -> None:
    fail(UserError("the loss is nan"))


def rank_2_should_have_agreed(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 2, lambda: fail(UserError("bad file")))


def rank_1_hangs_in_data(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 1, lambda: time.sleep(100))


def rank_2_stops(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 2, lambda: signal_myself(watch, signal.SIGSTOP))


def rank_0_stops(watch: Watch, rank: int, store: dist.Store) -> None:
    reduce_but(watch, rank, 0, lambda: signal_myself(watch, signal.SIGSTOP))


def lone_rank_hangs(watch: Watch, rank: int, store: dist.Store) -> None:
    watch.at("data", 3)
    time.sleep(100)


def all_are_interrupted(watch: Watch, rank: int, store: dist.Store) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal_myself(watch, signal.SIGINT)


def rank_2_is_late(watch: Watch, rank: int, store: dist.Store) -> None:
    time.sleep(5 if rank == 2 else 0)


def rank_2_is_too_late_for_rank_0(watch: Watch, rank: int, store: dist.Store) -> None:
    watching.LEAVING_SECONDS = 0.5
    time.sleep(4 if rank == 2 else 0)


def all_exit_with_a_code(watch: Watch, rank: int, store: dist.Store) -> None:
    sys.exit(75)


def all_are_stopped(watch: Watch, rank: int, store: dist.Store) -> None:
    fail(Stopped())


def some_take_long_where_they_may(watch: Watch, rank: int, store: dist.Store) -> None:
    """Staging and saving, with the others waiting in a timed phase."""
    for phase, step in (("start", 0), ("save", 1)):
        watch.at(phase, step)
        if rank == 1:
            time.sleep(HANG + 1.5)
        watch.at("data", step + 1)
        dist.all_reduce(torch.ones(8))


def strangers_call(watch: Watch, rank: int, store: dist.Store) -> None:
    _, address, port, token = json.loads(store.get("watch"))
    hello = {"at": [0, 0, 0], "rank": 1, "host": "x"}
    says = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\x00\n" * 3000,
        b"x" * 100_000,
        b"[" * 3000 + b"\n",
        json.dumps({**hello, "token": "wrong"}).encode() + b"\n",
        json.dumps({**hello, "token": "ä"}).encode() + b"\n",
        json.dumps({**hello, "token": 5}).encode() + b"\n",
        json.dumps({**hello, "token": token, "rank": 3}).encode() + b"\n",
        json.dumps({**hello, "token": token, "rank": "1"}).encode() + b"\n",
        json.dumps({**hello, "token": token}).encode() + b"\n",  # that rank is there already
        b'{"verdict": [0, "", 1, false]}\n{"bye": true}\n',
    ]
    strangers = []
    for said in [*says, *[b""] * 200]:
        stranger = socket.create_connection((address, port))
        strangers.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall(said)
    for step in range(30):
        watch.at("step", step)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        strangers[len(says)].sendall(b"x")
        assert strangers[len(says)].recv(1) == b"", "the oldest of too many has to go"


def all_are_suspended_for_a_while(watch: Watch, rank: int, store: dist.Store) -> None:
    ends = time.monotonic() + HANG + 5
    going = torch.ones(1)
    while going:
        watch.at("step", 1)
        going.fill_(time.monotonic() < ends)
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
        time.sleep(0.05)


def sixty_four_ranks_come_and_leave(watch: Watch, rank: int, store: dist.Store) -> None:
    """Threads of one process do, whose exit code would tell of an alarm."""
    shared, late = dist.HashStore(), []

    def one_rank(number: int) -> None:
        own = join(number, 64, "127.0.0.1", shared, HANG)
        time.sleep(number * 7 % 64 * 0.03)
        if number:
            late.append(number)
        own.leave()
        if not number:
            late.append(number)

    threads = [threading.Thread(target=one_rank, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(late) == 64
    assert late[-1] == 0, "rank 0 stays to the end"


def rank_main(name: str, rank: int, size: int, folder: Path) -> None:
    """One rank as run_script, one_line_errors and connect make it."""
    output = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    code, watch = 0, Watch(0)
    try:
        store = dist.FileStore(str(folder / "store"), size)
        store.set_timeout(timedelta(seconds=30))
        watch = join(rank, size, "127.0.0.1", store, HANG, join_seconds=3 if name == "rank_2_does_not_join" else 30)
        if size > 1:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
            dist.all_reduce(torch.ones(1))  # one that left before all have met would be missed
        globals()[name](watch, rank, store)
        watch.leave()
    except (SystemExit, Stopped) as stop:
        code = 75 if watch.failed(stop) else watch.exit_code
    except BaseException as error:
        code = describe(error)[2]
        if not watch.failed(error):
            code = watch.exit_code
        elif isinstance(error, KeyboardInterrupt):
            os.write(2, b"interrupted\n" if rank == 0 else b"")
        elif not isinstance(error, UserError):
            traceback.print_exc()
        elif rank == 0 or isinstance(error, LocalError):
            os.write(2, f"error: {error}\n".encode())
        else:
            time.sleep(1)
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Ending:
    """How the ranks ended, what they wrote, and how long they took."""

    codes: list[int]
    output: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


CONTEXT = multiprocessing.get_context("forkserver")
ONE_AT_A_TIME = threading.Lock()  # starting one process also looks at how all others are


def run(name: str, folder: Path, size: int = 3, ranks: int | None = None) -> Ending:
    """Starts the ranks of a story and sees them end, at the latest after 25 s."""
    processes = [CONTEXT.Process(target=rank_main, args=(name, rank, size, folder)) for rank in range(ranks or size)]
    started = time.monotonic()
    with ONE_AT_A_TIME:
        for process in processes:
            process.start()
    if name == "all_are_suspended_for_a_while":
        for by, seconds in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, HANG + 2)):
            time.sleep(seconds)
            for process in processes:
                os.kill(process.pid, by)
    while time.monotonic() < started + 25:
        time.sleep(0.05)
        with ONE_AT_A_TIME:
            codes: list[Any] = [process.exitcode for process in processes]
        if all(code is not None or name == f"rank_{rank}_stops" for rank, code in enumerate(codes)):
            break
    seconds = time.monotonic() - started
    for rank, process in enumerate(processes):
        if codes[rank] is None:
            os.kill(process.pid, signal.SIGKILL)
            codes[rank] = "killed"
    return Ending(codes, (folder / "output").read_text(), seconds)


STORIES: dict[str, dict[str, int]] = {
    **{name: {} for name, value in list(globals().items()) if getattr(value, "__annotations__", {}).get("store")},
    "rank_2_does_not_join": {"ranks": 2},
    "lone_rank_hangs": {"size": 1},
    "sixty_four_ranks_come_and_leave": {"size": 1},
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ending]]:
    """All stories, some at a time since they mostly wait; a process that has torch already is forked for the ranks."""
    places = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(places))
        CONTEXT.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()
    with ThreadPoolExecutor(6) as pool:
        futures: dict[str, Future[Ending]] = {
            name: pool.submit(run, name, tmp_path_factory.mktemp(name), **sizes) for name, sizes in STORIES.items()
        }
        yield lambda name: futures[name].result()


Endings = Callable[[str], Ending]


@pytest.mark.parametrize(
    ("name", "codes", "line", "tracebacks"),
    [
        (
            "rank_2_is_killed",
            [1, 1, -9],
            r"rank 2 \(host .*\) ended without a word, last seen at step 17 \(data\): killed, .*",
            0,
        ),
        (
            "rank_0_is_killed",
            [-9, 1, 1],
            r"rank 0 \(host .*\) ended without a word, last seen at step 17 \(data\): killed, .*",
            0,
        ),
        ("rank_1_raises", [1, 1, 1], r"rank 1 \(host .*\) failed at step 17 \(data\): RuntimeError: wrong; the .*", 1),
        (
            "rank_2_raises_after_it_closed_its_connections",
            [1, 1, 1],
            r"rank 2 \(host .*\) failed at step 17 \(data\): ValueError: the cause; the others end, too",
            1,
        ),
        (
            "all_lose_each_other",
            [1, 1, 1],
            r"rank \d \(host .*\) failed at step 0 \(start\): RuntimeError: gloo: .*",
            1,
        ),
        ("rank_1_has_an_error_of_its_own", [2, 2, 2], "no device memory left", 0),
        ("all_agree", [2, 2, 2], "the loss is nan", 0),
        ("rank_2_should_have_agreed", [2, 2, 2], r"rank 2 \(host .*\) failed at step 17 \(data\): bad file; the .*", 0),
        ("rank_2_stops", [76, 76, "killed"], r"rank 2 .* hangs at step 17 \(data\) .* it does not answer: .*", 0),
        ("rank_0_stops", ["killed", 76, 76], r"rank 0 .* hangs at step 17 \(data\) .* it does not answer: .*", 0),
        ("rank_2_does_not_join", [2, 2], "of 3 ranks, 2 did not come within 3 s; see what they say, or whether .*", 0),
    ],
)
def test_all_end_with_one_line(endings: Endings, name: str, codes: list[Any], line: str, tracebacks: int) -> None:
    ending = endings(name)
    assert ending.codes == codes, ending.output
    assert len(ending.errors) == 1, ending.output
    assert re.fullmatch(f"error: {line}", ending.errors[0])
    assert ending.output.count("Traceback") == tracebacks
    assert tracebacks or ending.output == ending.errors[0] + "\n"
    assert ending.seconds < 15


@pytest.mark.parametrize(
    ("name", "codes", "where", "others"),
    [
        (
            "rank_1_hangs_in_data",
            [76] * 3,
            "rank 1 (host {}) hangs at step 17 (data)",
            ", the others wait for it at step 17",
        ),
        ("lone_rank_hangs", [76], "rank 0 (host {}) hangs at step 3 (data)", "; its stacks are above; exit code 76"),
    ],
)
def test_a_rank_that_hangs_shows_its_stacks(
    endings: Endings, name: str, codes: list[int], where: str, others: str
) -> None:
    ending, where = endings(name), where.format(socket.gethostname())
    assert ending.codes == codes, ending.output
    lines = ending.output.splitlines()
    assert lines[0] == f"{where}; its threads:"
    assert lines[-1].startswith(f"error: {where} for {HANG:g} s{others}")
    assert ending.errors == lines[-1:]
    assert f" in {name}\n" in ending.output
    assert ending.seconds < 15


@pytest.mark.parametrize(
    "name",
    [
        "rank_2_is_late",
        "rank_2_is_too_late_for_rank_0",
        "some_take_long_where_they_may",
        "strangers_call",
        "all_are_suspended_for_a_while",
    ],
)
def test_nothing_ends_a_regular_run(endings: Endings, name: str) -> None:
    ending = endings(name)
    assert (ending.codes, ending.output) == ([0, 0, 0], "")


@pytest.mark.parametrize("name", ["all_exit_with_a_code", "all_are_stopped"])
def test_an_end_that_the_program_means_is_its_own_business(endings: Endings, name: str) -> None:
    ending = endings(name)
    assert (ending.codes, ending.output) == ([75] * 3, "")


def test_an_interrupt_is_told_of_once(endings: Endings) -> None:
    ending = endings("all_are_interrupted")
    assert ending.codes == [130] * 3
    assert ending.output == "interrupted\n" or re.fullmatch("error: rank [12] .*KeyboardInterrupt.*\n", ending.output)


def test_64_ranks_leave_without_alarm(endings: Endings) -> None:
    ending = endings("sixty_four_ranks_come_and_leave")
    assert (ending.codes, ending.output) == ([0], "")


def test_rank_0s_watch_out_of_reach_is_said_in_a_line() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store.set("watch", json.dumps(["node", "127.0.0.1", port, "token"]))
    with pytest.raises(
        LocalError, match=r"^rank 1 of 2 could not reach rank 0's watch \(.*\); check that MASTER_ADDR "
    ):
        join(1, 2, "127.0.0.1", store, 10)
