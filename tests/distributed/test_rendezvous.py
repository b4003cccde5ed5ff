"""Ranks of a start find each other; those of other starts, strangers and late ranks are kept out. Devices of ranks."""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from utils.distributed.rendezvous import meet
from utils.distributed.world import World
from utils.errors import UserError

TIMEOUT = timedelta(seconds=GENEROUS)
IDENTITY = {"config": "a", "number of ranks": "3"}
THREE = [(rank, IDENTITY) for rank in range(3)]
NAME = "of one start"


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that no rank holds, like that of torchrun's agent."""
    number = free_port()
    server = dist.TCPStore("127.0.0.1", number, None, True, TIMEOUT, wait_for_workers=False)
    yield number
    del server


def start_ranks(port: int, ranks: list[tuple[int, Any]], seconds: float = GENEROUS, name: str = NAME) -> list[Any]:
    """For each rank with its identity, the name that rank 0, which begins last, gives to the start, or the error."""
    called = threading.Semaphore(0)

    def answer(rank: int, identity: Any) -> Any:
        client = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
        for _ in ranks[1:] if rank == 0 else []:
            called.acquire()
        called.release()
        try:
            launch = Launch("test", rank, rank, int(identity["number of ranks"]))
            store, _, shared = meet(client, "auto", launch, seconds, identity)
            if rank == 0:
                store.set("name", name)
            return store.get("name").decode() + " on shared GPUs" * shared
        except (UserError, OSError, dist.DistError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [*threads.map(answer, *zip(*ranks, strict=True))]


def test_a_restart_by_torchrun_reads_nothing_of_the_previous_start(port: int) -> None:
    """The agent's store survives a restart: ranks that were faster than rank 0 connected to dead ranks."""
    for name in ("first", "second", "third"):
        # The program may have been edited since the previous start.
        ranks = [(rank, {**IDENTITY, "program": name}) for rank in range(3)]
        assert start_ranks(port, ranks, name=name) == [name] * 3


def test_ranks_without_the_others_or_too_late_have_no_answer(port: int) -> None:
    """Nor do a second rank 1 and rank 3 of a larger run, which rank 0 has not compared."""
    for rank, message in ((0, "nothing from ranks 1, 2"), (1, "no answer from rank 0")):
        (error,) = start_ranks(port, THREE[rank : rank + 1], 0.3)
        assert (type(error), str(error)) == (TimeoutError, message)
    assert start_ranks(port, THREE) == [NAME] * 3
    second, larger = start_ranks(port, [THREE[1], (3, {**IDENTITY, "number of ranks": "4"})], 0.3)
    assert str(second) == "no answer from rank 0"
    assert re.search(r"rank 3 .* differs in number of ranks \(4, not 3\)", str(larger))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["cpu", "cpu", "cpu"], NAME),
        (["GPU 0", "GPU 1", "GPU 0"], f"{NAME} on shared GPUs"),
        (["GPU 0", None, "GPU 2"], "rank 1: no device"),
        (
            ["GPU 0", "GPU 1", "cpu"],
            "rank 2 finds no CUDA device, but rank 0 does; use --set device=cpu, or exclude the node of rank 2",
        ),
    ],
)
def test_all_ranks_know_whether_their_devices_fit(monkeypatch: Any, port: int, devices: Any, expected: str) -> None:
    """NCCL refuses two ranks on one GPU. A rank without a GPU would wait for the others in another backend, forever."""

    def choose(name: str, local_rank: int) -> torch.device:
        if devices[local_rank] is None:
            raise UserError("no device")
        return torch.device("cuda", local_rank)

    monkeypatch.setattr(rendezvous, "choose_device", choose)
    monkeypatch.setattr(rendezvous, "device_identity", lambda device: devices[device.index])
    monkeypatch.setattr(rendezvous, "REFUSAL_SECONDS", 0.0)  # the store is not that of rank 0
    size = len(devices)
    answers = start_ranks(port, [(rank, {"number of ranks": str(size)}) for rank in range(size)])
    assert list(map(str, answers)) == [expected] * size


CONNECTING = """
import os, sys
from utils.config.sections import TimeoutsConfig
from utils.distributed.signals import StopSignals
from utils.distributed.world import connect
from utils.errors import one_line_errors
with one_line_errors(), StopSignals() as signals:
    if "early" in sys.argv:
        os.kill(os.getpid(), 15)
    with connect("cpu", TimeoutsConfig(rendezvous=float(sys.argv[1]))):
        print("connected")
"""
Start = Callable[..., Program]


@pytest.fixture
def connecting(start: Start, tmp_path: Path) -> Start:
    """connecting(rank, port, seconds, …) -> a program, one of two ranks, that connects within this time"""
    script = tmp_path / "connecting.py"
    script.write_text(CONNECTING)
    return lambda rank, port, *words: start([str(script), *map(str, words)], **rank_variables(rank, 2, port))


def the_error(program: Program) -> str:
    """The only error line of a program that ends with exit code 2."""
    assert program.end().returncode == 2, program.text
    assert "Traceback" not in program.text
    (line,) = [line for line in program.text.splitlines() if line.startswith("error: ")]
    return line


def test_trainings_with_one_port_do_not_mix(start: Start, data_flags: list[str], tmp_path: Path) -> None:
    """Rank 0 of one training run and rank 1 of another one trained together, and both exited with code 0."""
    port, ranks = free_port(), []
    for rank, name in enumerate("ab"):
        flags = ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path / name}"]
        ranks.append(start(flags, **rank_variables(rank, 2, port)))
    for line in map(the_error, ranks):
        assert line.startswith("error: rank 1 belongs to another run than rank 0: it differs in config (")
        assert f"run directory ({tmp_path}/b/test/00, not {tmp_path}/a/test/00), command line (" in line
    assert not {"a", "b"} & set(os.listdir(tmp_path))


def test_a_rank_without_the_others_prints_one_line(connecting: Start) -> None:
    """Rank 1 prints it itself; a silent listener at its port held it. A port in use ends rank 0 at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        used = silent.getsockname()[1]
        ranks = {port: connecting(1, port, 1) for port in (free_port(), used)}
        for port, rank in ranks.items():
            message = f"error: rank 1 of 2 could not connect to the other ranks at 127.0.0.1:{port} ("
            assert the_error(rank).startswith(message)
        line = the_error(connecting(0, used, 2 * GENEROUS))
    assert re.search("Address already in use .* that no other run uses MASTER_PORT", line)


@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_stop_signal_ends_the_rendezvous(connecting: Start, moment: str) -> None:
    """It was ignored until the rendezvous timeout. The signal may also come right before the rendezvous."""
    port = free_port()
    program = connecting(0, port, 2 * GENEROUS, moment)
    if moment == "late":
        wait_until(lambda: not is_free(port), alive=lambda: program.process.exitcode is None)
        program.signal(signal.SIGTERM)
    assert program.end().returncode == 75, program.text
    assert program.text == "SIGTERM: stopping before all ranks have connected\n"


def listening_addresses(world: World) -> tuple[list[str], str]:
    """The local addresses, in the kernel's notation, at which the process listens; gloo's network interface."""
    dist.all_reduce(torch.ones(1))
    opened = " ".join(os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in opened]
    return [line[1].split(":")[0] for line in listening], os.environ["GLOO_SOCKET_IFNAME"]


def test_ranks_of_a_single_node_listen_on_the_loopback_only() -> None:
    """Other machines could read and write the store of ranks whose MASTER_ADDR was 127.0.0.1."""
    for rank, (addresses, interface) in enumerate(run_ranks(listening_addresses, 2)):
        assert len(addresses) >= (2 if rank == 0 else 1), "the store and gloo"
        assert set(addresses) == {"0100007F"}
        assert interface == "lo", "otherwise gloo listens at the address of the host's name"


def test_the_local_rank_chooses_among_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Slurm's --gpus-per-task=1 each rank sees a single device, number 0."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for devices, local_rank, chosen in ((4, 3, 3), (1, 3, 0), (4, 5, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert choose_device("auto", local_rank) == current.pop() == torch.device("cuda", chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == torch.device("cpu")
