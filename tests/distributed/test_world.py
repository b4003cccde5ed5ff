"""Launchers' environments, devices of ranks, collectives, joint errors, and exits."""

from __future__ import annotations

import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import GENEROUS, TOP, free_port, rank_variables, run, run_ranks

from utils.distributed import world as worlds
from utils.distributed.devices import choose_device, choose_devices
from utils.distributed.launch import Launch, read_launch
from utils.distributed.rendezvous import store_of_this_start
from utils.distributed.world import LARGEST_JSON, OTHER_PROGRAM, World, connect
from utils.errors import LocalError, Stopped, UserError, launched_rank, one_line_errors

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SLURM_STEP = {
    "SLURM_JOB_ID": "3003",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NODELIST": "nid[000001-000004]",
    "SLURM_STEP_NODELIST": "nid[000003-000004]",
}


# --- the launcher's environment ------------------------------------------------------------------------------------

BATCH_SCRIPT = {key: value for key, value in SLURM_STEP.items() if "STEP" not in key}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("single process", 0, 0, 1)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, Launch("torchrun", 5, 1, 8, "node1", 29400)),
        # export_DDP_vars.sh sets these inside a Slurm step; they take precedence over Slurm's own.
        ({**SLURM_STEP, **TORCHRUN, "RANK": "2"}, Launch("environment", 2, 1, 8, "node1", 29400)),
        (SLURM_STEP, Launch("slurm", 5, 1, 8, "nid000003", 15000 + 3003 * 7 % 15000)),
        (
            {**SLURM_STEP, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"},
            Launch("slurm", 5, 1, 8, "elsewhere", 1234),
        ),
        ({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1"}, Launch("slurm", 5, 1, 8, "127.0.0.1", 15000 + 3003 * 7 % 15000)),
        # A batch script also has SLURM_PROCID=0 and SLURM_NTASKS=16, but no other ranks.
        ({**BATCH_SCRIPT, "SLURM_PROCID": "0"}, Launch("single process")),
    ],
)
def test_the_launcher_is_found_from_the_environment(environment: dict[str, str], launch: Launch) -> None:
    assert read_launch(environment) == launch


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (TORCHRUN, {"LOCAL_RANK": None}, "incomplete: LOCAL_RANK missing"),
        (TORCHRUN, {"MASTER_ADDR": ""}, "incomplete: MASTER_ADDR missing"),
        (SLURM_STEP, {"SLURM_LOCALID": None}, "incomplete: SLURM_LOCALID missing"),
        (TORCHRUN, {"RANK": "8"}, "inconsistent: rank 8 .* of 8"),
        (TORCHRUN, {"LOCAL_RANK": "8"}, r"inconsistent: rank 5 \(local 8\) of 8"),
        (TORCHRUN, {"RANK": "five"}, "RANK must be an integer, not 'five'"),
        (TORCHRUN, {"MASTER_PORT": "99999"}, "MASTER_PORT must be between 1 and 65535, not 99999"),
    ],
)
def test_an_incomplete_or_inconsistent_environment_is_rejected(
    base: dict[str, str], changes: dict[str, str | None], message: str
) -> None:
    environment = {name: value for name, value in {**base, **changes}.items() if value is not None}
    with pytest.raises(LocalError, match=message):
        read_launch(environment)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"SLURM_PROCID": "3"}, 0),
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, 3),
        ({"RANK": "1", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, 1),
        ({"RANK": "x"}, 0),
    ],
)
def test_rank_is_known_before_the_ranks_meet(monkeypatch: Any, environment: dict[str, str], rank: int) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == rank


@pytest.mark.parametrize(
    ("rank", "error", "printed"), [(0, UserError, True), (1, UserError, False), (1, LocalError, True)]
)
def test_rank_0_prints_errors_of_all_ranks_and_the_others_wait(
    monkeypatch: Any, capsys: Any, rank: int, error: type[UserError], printed: bool
) -> None:
    """torchrun stops all ranks when one exits: if rank 1 exited first, no rank would print the line."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise error("wrong\nin two lines")
    assert stop.value.code == 2
    assert capsys.readouterr().err == ("error: wrong in two lines\n" if printed else "")
    assert bool(waited) != printed


def run_threads(rank: Callable[[int], None], size: int) -> None:
    """Calls rank(0), rank(1), … at the same time."""
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=GENEROUS)


# --- the device ----------------------------------------------------------------------------------------------------


def test_the_local_rank_chooses_among_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Slurm's --gpus-per-task=1 each rank sees a single device, number 0."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for devices, local_rank, chosen in ((4, 3, 3), (1, 3, 0), (4, 5, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        for name in ("auto", "cuda"):
            assert choose_device(name, local_rank) == current.pop() == torch.device("cuda", chosen)
        assert choose_device("cpu", local_rank) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu", 0) == choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(UserError, match="device is cuda, but PyTorch finds no CUDA device; use --set device=cpu"):
        choose_device("cuda", 0)
    assert not current


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu", "cpu", "cpu"], None),
        (["cuda:0", "cuda:1", "cuda:0"], None),
        (["cuda", None, "cuda"], "^rank 1: no device$"),
        ([None, None], "^no device$"),
        (
            ["cuda", "cuda", "cpu"],
            "^rank 2 finds no CUDA device, but rank 0 does; use --set device=cpu, or exclude the node of rank 2",
        ),
    ],
)
def test_all_ranks_raise_if_their_devices_differ_in_kind(
    monkeypatch: pytest.MonkeyPatch, devices: list[str | None], message: str | None
) -> None:
    """With 'auto' a rank without a GPU would otherwise wait for the others in another backend, forever."""

    def choose(name: str, local_rank: int) -> torch.device:
        kind = devices[local_rank]
        if kind is None:
            raise UserError("no device")
        return torch.device(kind)

    monkeypatch.setattr("utils.distributed.devices.choose_device", choose)
    monkeypatch.setattr("utils.distributed.devices._identity", lambda device: str(device).replace(":", " "))
    size, port, timeout = len(devices), free_port(), timedelta(seconds=GENEROUS)
    server = dist.TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False)
    found: dict[int, Any] = {}

    def rank_chooses(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
        try:
            found[rank] = choose_devices("auto", Launch("test", rank, rank, size), store)
        except UserError as error:
            found[rank] = error

    run_threads(rank_chooses, size)
    del server
    if message is None:
        shared = devices.count("cuda:0") > 1  # several ranks on one CPU are normal
        assert found == {rank: (torch.device(kind), shared) for rank, kind in enumerate(devices) if kind}
    else:
        assert len({str(error) for error in found.values()}) == 1
        with pytest.raises(UserError, match=message):
            raise found[0]


@pytest.mark.parametrize("late", [0, 2])
def test_a_restart_by_torchrun_reads_nothing_of_the_previous_start(late: int) -> None:
    """The agent's store survives a restart: ranks that were faster than rank 0 connected to dead ranks."""
    size, port, timeout = 3, free_port(), timedelta(seconds=GENEROUS)
    server = dist.TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False)

    def start(name: str) -> list[str]:
        found, called = [""] * size, [threading.Event() for _ in range(size)]

        def rank(number: int) -> None:
            store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
            if number == late:
                for other in set(range(size)) - {late}:
                    called[other].wait(GENEROUS)
            called[number].set()
            store = store_of_this_start(store, number, size, GENEROUS)
            if number == 0:
                store.set("address", name)
            found[number] = store.get("address").decode()

        run_threads(rank, size)
        return found

    for name in ("first", "second", "third"):
        assert start(name) == [name] * size
    del server


def test_a_start_without_all_ranks_times_out() -> None:
    server = dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError):  # no rank has ever called
        store_of_this_start(server, 0, 2, GENEROUS)
    server.set("call of rank 1", "of an earlier start")
    with pytest.raises(TimeoutError, match="not all ranks have connected"):
        store_of_this_start(server, 0, 2, 0.3)


# --- several ranks -------------------------------------------------------------------------------------------------


def test_a_single_rank_needs_no_process_group() -> None:
    with connect("cpu") as world:
        assert not dist.is_initialized()
        assert (world.rank, world.size, world.is_root, world.is_node_leader) == (0, 1, True, True)
        assert world.gather_json("a") == ["a"]
        assert world.gather(torch.arange(3)).tolist() == [[0, 1, 2]]
        assert world.sum(torch.tensor(2.0)) == 2
        assert world.node == ((0,), 0, None)
        world.broadcast_on_node(torch.tensor(2.0))
        world.barrier()
        with pytest.raises(UserError, match=r"^wrong$"), world.raise_together():
            raise UserError("wrong")
        with pytest.raises(KeyError), world.raise_together():
            raise KeyError("not a UserError")


def exchange(world: World) -> dict[str, Any]:
    mine = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    results = {
        "objects": world.gather_json({"rank": world.rank}),
        "gathered": world.gather(mine).tolist(),
        "sum": world.sum(mine).tolist(),
        "mine": mine.tolist(),
        "roles": (world.is_root, world.is_node_leader),
    }
    world.barrier()
    return results


def raise_on_some_ranks(world: World, failures: list[dict[int, str]]) -> list[str]:
    """For each {rank: kind of failure}: the error that this rank raises."""
    raised = []
    for failing in failures:
        try:
            with world.raise_together():
                if failing.get(world.rank) == "user":
                    raise UserError(f"bad file on {world.rank}")
                if failing.get(world.rank) == "common":
                    raise UserError("bad file")
                if failing.get(world.rank) == "bug":
                    raise KeyError("bug")
            raised.append("none")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


# The host and local rank of each rank, and the resulting nodes {ranks: source}.
PLACEMENTS: list[tuple[str, list[int], dict[tuple[int, ...], int]]] = [
    ("aaaa", [0, 1, 2, 3], {(0, 1, 2, 3): 0}),
    ("abab", [1, 0, 0, 1], {(0, 2): 2, (1, 3): 1}),
    ("aaba", [0, 1, 5, 2], {(0, 1, 3): 0, (2,): 2}),
]
Place = tuple[tuple[int, ...], int, float, bool]


def use_nodes(world: World) -> list[Place]:
    """For each placement: ranks and source of this rank's node, result of a broadcast, whether the node has a group."""
    answers = []
    for hosts, local_ranks, _ in PLACEMENTS:
        socket.gethostname = lambda hosts=hosts: hosts[world.rank]
        placed = World(replace(world.launch, local_rank=local_ranks[world.rank]), world.device)
        number = torch.tensor([float(world.rank)], dtype=torch.float16)
        placed.broadcast_on_node(number)
        node = placed.node
        own_group = node.group is not None and node.group is not dist.group.WORLD
        answers.append((node.ranks, node.source, number.item(), own_group))
        assert placed.node is node, "groups are made once"
    return answers


class CreatesFile:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


def receive_from_stranger(world: World, answers: list[tuple[int, bytes]]) -> list[str]:
    """Rank 1 sends each size and bytes instead of an answer; rank 0 returns its errors."""
    errors = []
    for size, data in answers:
        if world.rank == 0:
            with pytest.raises(LocalError) as error:
                world.gather_json("own")
            errors.append(str(error.value))
            continue
        common = int(world.gather(torch.tensor(size)).max())
        if common <= LARGEST_JSON:
            world.gather(torch.frombuffer(bytearray(data.ljust(common, b"\0")), dtype=torch.uint8))
    return errors


def test_code_that_a_stranger_sends_in_the_place_of_a_rank_is_not_executed(tmp_path: Path) -> None:
    """Rank 1 is any process that reaches the port."""
    contents = [pickle.dumps(CreatesFile(tmp_path / "created")), b"\xff", b"", b"[" * 100_000]
    answers = [(len(content), content) for content in contents] + [(2**40, b""), (-1, b"")]
    errors, _ = run_ranks(receive_from_stranger, 2, answers)
    assert os.listdir(tmp_path) == []
    assert len(errors) == len(answers)
    for error in errors:
        assert error == f"rank 1 sent something other than a JSON value; {OTHER_PROGRAM}"


def test_a_value_that_json_cannot_carry_is_refused_before_it_is_sent() -> None:
    world = World(Launch("test"), torch.device("cpu"))
    with pytest.raises(TypeError, match="PosixPath is not JSON serializable"):
        world.gather_json(Path("a"))
    with pytest.raises(ValueError, match="too large to exchange"):
        world.gather_json("a" * LARGEST_JSON)
    assert world.gather_json((math.inf, {"a": None})) == [[math.inf, {"a": None}]]  # a list, as on several ranks


FAILURES = [{}, {1: "user"}, dict.fromkeys(range(4), "common"), {1: "user", 2: "user"}, {2: "bug"}, {}]


def call_all_methods(world: World) -> tuple[dict[str, Any], list[str], list[Place]]:
    return exchange(world), raise_on_some_ranks(world, FAILURES), use_nodes(world)


def test_collectives_joint_errors_and_broadcasts_on_nodes() -> None:
    """The source of a node is its local rank 0, else its first rank; groups are created only for several nodes."""
    for rank, (values, raised, places) in enumerate(run_ranks(call_all_methods, 4)):
        assert values == {
            "objects": [{"rank": other} for other in range(4)],
            "gathered": [[1, 10], [2, 20], [3, 30], [4, 40]],
            "sum": [10, 100],
            "mine": [rank + 1, 10 * (rank + 1)],  # the sum leaves its argument unchanged
            "roles": (rank == 0, rank == 0),
        }
        assert raised == [
            "none",
            "UserError: rank 1: bad file on 1",
            "UserError: bad file",
            "UserError: rank 1: bad file on 1",
            "KeyError: 'bug'" if rank == 2 else "UserError: rank 2: KeyError('bug')",
            "none",
        ]
        for (_, _, nodes), place in zip(PLACEMENTS, places, strict=True):
            ranks = next(ranks for ranks in nodes if rank in ranks)
            assert place == (ranks, nodes[ranks], nodes[ranks], 1 < len(ranks) < 4)


def test_a_rank_without_the_others_prints_one_line(tmp_path: Path) -> None:
    """Rank 1 prints it itself, because there may be no rank 0."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(
        "from utils.config.schema import TimeoutsConfig\nfrom utils.distributed.world import connect\n"
        "from utils.errors import one_line_errors\n"
        "with one_line_errors(), connect('cpu', TimeoutsConfig(rendezvous=1)): pass"
    )
    code, _, error = run([script], tmp_path / "rank", environment={**os.environ, **rank_variables(1, 2, port)})
    assert code == 2
    (line,) = (line for line in error.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: rank 1 of 2 could not connect to the other ranks at 127.0.0.1:{port} (")
    assert "Traceback" not in error


# --- exit ---------------------------------------------------------------------------------------------------------

ENDING = """
import os, sys
from utils.distributed.launch import run_script
class Last:
    def __del__(self): os.write(1, b" shut down")
sys.modules["last"] = Last()
def main(): {}
run_script(main)
"""


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("sys.exit()", (0, "", "")),
        ("sys.exit('a reason')", (1, "", "a reason\n")),
        ("print('lost', end=''); raise ValueError('broken')", (1, "lost", "ValueError: broken\n")),
    ],
)
def test_one_of_several_ranks_exits_with_its_code_and_all_its_output(
    tmp_path: Path, ending: str, expected: tuple[int, str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.format(ending))
    variables = {**os.environ, **rank_variables(1, 2, 1234)}
    code, output, error = run([script], tmp_path / "rank", environment=variables)
    assert (code, output) == expected[:2]
    assert error.endswith(expected[2])
    assert bool(error) is bool(expected[2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_of_several_ranks_skips_the_interpreters_shutdown(ranks: int) -> None:
    """A thread of the process group may abort the process there."""
    environment = {**os.environ, **rank_variables(ranks - 1, ranks, 1234), "PYTHONPATH": str(TOP)}
    command = [sys.executable, "-c", ENDING.format("print('done', end=''); sys.exit(75)")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout == "done" + (" shut down" if ranks == 1 else "")


class Step:
    """Stand-in for a step with CUDA graphs."""


@pytest.mark.parametrize(("error", "leaves"), [(Stopped(), 1), (UserError("bad"), 1), (LocalError("bad"), 0)])
def test_an_error_releases_the_step_before_the_process_group_is_destroyed(
    monkeypatch, error: BaseException, leaves: int
) -> None:
    """NCCL would wait forever for the step's CUDA graphs, which the error's frames keep alive."""
    alive: list[bool] = []
    seen: list[weakref.ref] = []

    def stop_while_holding(step: Step) -> None:
        seen.append(weakref.ref(step))
        raise error

    monkeypatch.setattr(dist, "destroy_process_group", lambda: alive.append(seen[0]() is not None))
    with pytest.raises(type(error)), worlds._leaving_group():
        stop_while_holding(Step())
    assert alive == [False] * leaves
