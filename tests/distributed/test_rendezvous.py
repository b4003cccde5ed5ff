"""Ranks of a start find each other; those of other starts, strangers and late ranks are kept out. Devices of ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import GENEROUS, Program, free_port, is_free, rank_variables, run_ranks, wait_until

from utils.distributed import rendezvous
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch
from utils.distributed.rendezvous import identify, meet
from utils.distributed.world import World
from utils.errors import LocalError, UserError

TIMEOUT = timedelta(seconds=GENEROUS)
IDENTITY = {"config": "a", "number of ranks": "3"}


def run_threads(rank: Callable[[int], None], size: int) -> None:
    """Calls rank(0), rank(1), … at the same time."""
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=GENEROUS)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that no rank holds, like that of torchrun's agent."""
    number = free_port()
    server = dist.TCPStore("127.0.0.1", number, None, True, TIMEOUT, wait_for_workers=False)
    yield number
    del server


def client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)


def meet_others(port: int, rank: int, size: int, seconds: float, identity: dict[str, str]) -> dist.Store:
    return meet(client(port), "cpu", Launch("test", rank, rank, size), seconds, identity).store


Rank = tuple[int, dict[str, str]]  # number and identity of a process


def start_ranks(port: int, ranks: list[Rank], seconds: float = GENEROUS) -> list[Any]:
    """The name of the start, or the error, of each process."""
    found: list[Any] = [None] * len(ranks)

    def process(number: int) -> None:
        rank, identity = ranks[number]
        try:
            store = meet_others(port, rank, int(identity["number of ranks"]), seconds, identity)
            if rank == 0:
                store.set("name", "of one start")
            found[number] = store.get("name").decode()
        except (UserError, OSError, dist.DistError) as error:
            found[number] = error

    run_threads(process, len(ranks))
    return found


# --- the ranks of a start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 2])
def test_a_restart_by_torchrun_reads_nothing_of_the_previous_start(port: int, late: int) -> None:
    """The agent's store survives a restart: ranks that were faster than rank 0 connected to dead ranks."""
    size = 3

    def start(name: str) -> list[str]:
        found, called = [""] * size, [threading.Event() for _ in range(size)]

        def rank(number: int) -> None:
            if number == late:
                for other in set(range(size)) - {late}:
                    called[other].wait(GENEROUS)
            called[number].set()
            # The program may have been edited since the previous start.
            store = meet_others(port, number, size, GENEROUS, {"program": name})
            if number == 0:
                store.set("address", name)
            found[number] = store.get("address").decode()

        run_threads(rank, size)
        return found

    for name in ("first", "second", "third"):
        assert start(name) == [name] * size


def test_a_start_without_all_ranks_times_out(port: int) -> None:
    with pytest.raises(TimeoutError, match=r"^nothing from rank 1, 2$"):
        meet_others(port, 0, 3, 0.3, IDENTITY)
    with pytest.raises(TimeoutError, match=r"^no answer from rank 0$"):
        meet_others(port, 1, 3, 0.3, IDENTITY)


def test_a_rank_of_another_run_is_refused(port: int) -> None:
    """The ranks of two runs with the same port trained together."""
    other = {**IDENTITY, "config": "b", "run directory": "/runs/b"}
    root, refused, right = start_ranks(port, [(0, IDENTITY), (1, other), (2, IDENTITY)], 5.0)
    assert re.search(
        r"rank 1 .* differs in config \(b, not a\), run directory \(/runs/b, not none\).*MASTER_PORT", str(root)
    )
    assert type(root) is UserError  # printed by rank 0
    assert (type(refused), str(refused)) == (LocalError, str(root)), "printed in the output of the other run, too"
    assert str(right) == str(root)


def test_two_processes_with_one_rank_are_never_in_the_same_start(port: int) -> None:
    """Rank 1 of another start of the same command: one of the two is accepted, the other one has no answer."""
    ranks = [(0, IDENTITY), (1, IDENTITY), (1, IDENTITY), (2, IDENTITY)]
    root, *ones, two = start_ranks(port, ranks, 3.0)
    if root == "of one start":
        assert two == root
        accepted, rejected = ones if ones[0] == root else ones[::-1]
        assert (accepted, str(rejected)) == (root, "no answer from rank 0")


def test_a_late_rank_has_no_answer(port: int) -> None:
    """Neither a second rank 1 nor rank 3 of a larger run, which rank 0 has not compared."""
    assert start_ranks(port, [(rank, IDENTITY) for rank in range(3)]) == ["of one start"] * 3
    with pytest.raises(TimeoutError, match="no answer from rank 0"):
        meet_others(port, 1, 3, 0.3, IDENTITY)
    with pytest.raises(LocalError, match=r"rank 3 .* differs in number of ranks \(4, not 3\)"):
        meet_others(port, 3, 4, 0.3, {**IDENTITY, "number of ranks": "4"})


def test_the_identity_covers_the_command_and_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=a"])
    first = identify(Launch("slurm", 3, 1, 8), {"config": "c"})
    assert first == {**first, "config": "c", "number of ranks": "8"}
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=b"])
    second = identify(Launch("slurm", 3, 1, 8), {"config": "c"})
    assert {name for name, text in second.items() if text != first[name]} == {"command line"}


# --- processes -----------------------------------------------------------------------------------------------------


CONNECTING = """
from utils.config.sections import TimeoutsConfig
from utils.distributed.signals import StopSignals
from utils.distributed.world import connect
from utils.errors import one_line_errors
with one_line_errors(), StopSignals() as signals:
    {before}
    with connect("cpu", TimeoutsConfig(rendezvous={seconds})):
        print("connected")
"""


@pytest.fixture
def connecting(tmp_path: Path) -> Callable[..., list[str]]:
    """connecting(seconds, before='') -> the words of a program that connects within this time"""

    def write(seconds: float, before: str = "pass") -> list[str]:
        script = tmp_path / "connecting.py"
        script.write_text(CONNECTING.format(seconds=seconds, before=before))
        return [str(script)]

    return write


def errors(text: str) -> list[str]:
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_trainings_with_one_port_do_not_mix(
    start: Callable[..., Program], data_flags: list[str], tmp_path: Path
) -> None:
    """Rank 0 of one training run and rank 1 of another one trained together, and both exited with code 0."""
    common = ["train.py", "--config=test", *data_flags]
    port = free_port()
    ranks = [
        start([*common, f"--set=expdir={tmp_path / name}"], **rank_variables(rank, 2, port))
        for rank, name in enumerate("ab")
    ]
    for rank in ranks:
        assert rank.end().returncode == 2, rank.text
        (line,) = errors(rank.text)
        assert line.startswith("error: rank 1 belongs to another run than rank 0: it differs in config (")
        assert f"run directory ({tmp_path}/b/test/00, not {tmp_path}/a/test/00)" in line
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_rank_without_the_others_prints_one_line(
    start: Callable[..., Program], connecting: Callable[..., list[str]]
) -> None:
    """Rank 1 prints it itself, because there may be no rank 0. A silent listener at its port held it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [free_port(), silent.getsockname()[1]]
        programs = [start(connecting(1), **rank_variables(1, 2, port)) for port in ports]
        for port, program in zip(ports, programs, strict=True):
            assert program.end().returncode == 2, program.text
            (line,) = errors(program.text)
            assert line.startswith(f"error: rank 1 of 2 could not connect to the other ranks at 127.0.0.1:{port} (")


def test_a_port_in_use_ends_rank_0_at_once(start: Callable[..., Program], connecting: Callable[..., list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = start(connecting(2 * GENEROUS), **rank_variables(0, 2, listener.getsockname()[1]))
        assert program.end().returncode == 2, program.text
    (line,) = errors(program.text)
    assert re.search("Address already in use .* that no other run uses MASTER_PORT", line)


@pytest.mark.parametrize("early", [False, True])
def test_a_stop_signal_ends_the_rendezvous(
    start: Callable[..., Program], connecting: Callable[..., list[str]], early: bool
) -> None:
    """It was ignored until the rendezvous timeout. The signal may also come right before the rendezvous."""
    port, before = free_port(), "import os; os.kill(os.getpid(), 15)" if early else "pass"
    program = start(connecting(2 * GENEROUS, before), **rank_variables(0, 2, port))
    if not early:
        wait_until(lambda: not is_free(port), alive=lambda: program.process.exitcode is None)
        program.signal(signal.SIGTERM)
    assert program.end().returncode == 75, program.text
    assert program.text == "SIGTERM: stopping before all ranks have connected\n"


def test_ranks_that_pytorch_would_let_wait_forever_are_refused(
    start: Callable[..., Program], connecting: Callable[..., list[str]]
) -> None:
    port, recorder = free_port(), {"TORCH_FR_BUFFER_SIZE": "abc"}
    ranks = [start(connecting(GENEROUS), **rank_variables(rank, 2, port), **recorder) for rank in range(2)]
    assert [rank.end().returncode for rank in ranks] == [2, 2]
    (line,) = errors("".join(rank.text for rank in ranks))
    assert line.startswith("error: the environment variable TORCH_FR_BUFFER_SIZE is 'abc'; unset it")


# --- addresses -----------------------------------------------------------------------------------------------------


def listening_addresses(world: World) -> tuple[list[str], str]:
    """The local addresses, in the kernel's notation, at which the process listens; gloo's network interface."""
    dist.all_reduce(torch.ones(1))
    opened = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            opened.add(os.readlink(entry))
        except OSError:
            continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in opened]
    return [line[1].split(":")[0] for line in listening], os.environ["GLOO_SOCKET_IFNAME"]


def test_ranks_of_a_single_node_listen_on_the_loopback_only() -> None:
    """Other machines could read and write the store of ranks whose MASTER_ADDR was 127.0.0.1."""
    for rank, (addresses, interface) in enumerate(run_ranks(listening_addresses, 2)):
        assert len(addresses) >= (2 if rank == 0 else 1), "the store and gloo"
        assert set(addresses) == {"0100007F"}
        assert interface == "lo", "otherwise gloo listens at the address of the host's name"


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
    ("devices", "expected"),
    [
        (["cpu", "cpu", "cpu"], "separate devices"),
        (["GPU 0", "GPU 1"], "separate devices"),
        (["GPU 0", "GPU 1", "GPU 0"], "shared GPUs"),
        (["GPU 0", None, "GPU 2"], "rank 1: no device"),
        ([None, None], "no device"),
        (
            ["GPU 0", "GPU 1", "cpu"],
            "rank 2 finds no CUDA device, but rank 0 does; use --set device=cpu, or exclude the node of rank 2",
        ),
    ],
)
def test_all_ranks_know_whether_their_devices_fit(
    monkeypatch: pytest.MonkeyPatch, port: int, devices: list[str | None], expected: str
) -> None:
    """NCCL refuses two ranks on one GPU. A rank without a GPU would wait for the others in another backend, forever."""

    def choose(name: str, local_rank: int) -> torch.device:
        if devices[local_rank] is None:
            raise UserError("no device")
        return torch.device("cuda", local_rank)

    monkeypatch.setattr(rendezvous, "choose_device", choose)
    monkeypatch.setattr(rendezvous, "device_identity", lambda device: devices[device.index])
    monkeypatch.setattr(rendezvous, "REFUSAL_SECONDS", 0.0)  # the store is not that of rank 0
    size, found = len(devices), dict[int, str]()

    def rank(number: int) -> None:
        try:
            meeting = meet(client(port), "auto", Launch("test", number, number, size), GENEROUS, {})
            found[number] = "shared GPUs" if meeting.shared else "separate devices"
        except UserError as error:
            found[number] = str(error)

    run_threads(rank, size)
    assert found == dict.fromkeys(range(size), expected)
