"""Collectives, joint errors, and the end of the process group."""

import itertools
import socket
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from log_lines import CollectedLines
from processes import run_ranks

from utils.distributed import world as worlds
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.launch import Launch
from utils.distributed.world import World, connect
from utils.errors import Stopped, UserError

# Rank -> the error that it raises.
FAILURES: list[dict[int, Exception]] = [
    {},
    {1: UserError("bad file on 1")},
    dict.fromkeys(range(4), UserError("bad file")),
    {1: UserError("bad file on 1"), 2: UserError("bad file on 2")},
    {2: KeyError("bug")},
    {},
]


def call_all_methods(world: World) -> tuple[list[Any], list[str]]:
    mine = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    values = [world.gather_json({"rank": world.rank}), world.gather(mine).tolist(), world.sum(mine).tolist()]
    values += [mine.tolist(), world.is_root, world.is_node_leader]
    # Fixed: "Tensors must be contiguous", of the one condition in a micro-batch, ended a run at its integrity check.
    values.append(world.shift(torch.arange(8.0).view(8, 1)[world.rank :: world.size]).flatten().tolist())
    world.barrier()
    raised = []
    for failures in FAILURES:
        try:
            with world.raise_together():
                if world.rank in failures:
                    raise failures[world.rank]
            raised.append("none")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return values, raised


def test_collectives_and_joint_errors() -> None:
    for rank, (values, raised) in enumerate(run_ranks(call_all_methods, 4)):
        gathered = [{"rank": peer} for peer in range(4)], [[1, 10], [2, 20], [3, 30], [4, 40]]
        mine = [rank + 1, 10 * (rank + 1)]  # the sum leaves its argument unchanged
        assert values == [*gathered, [10, 100], mine, rank == 0, rank == 0, [(rank - 1) % 4, (rank - 1) % 4 + 4]]
        bad, bug = "UserError: rank 1: bad file on 1", "UserError: rank 2: KeyError('bug')"
        assert raised == ["none", bad, "UserError: bad file", bad, "KeyError: 'bug'" if rank == 2 else bug, "none"]


@pytest.mark.parametrize(
    ("wanted", "device", "shared"),
    [(True, "cuda", False), (False, "cuda", False), (True, "cuda", True), (True, "cpu", False)],
)
def test_nccl_is_used_only_to_exchange_gradients_between_gpus(monkeypatch, wanted, device, shared) -> None:
    heartbeat = Heartbeat(worlds.DEFAULT_TIMEOUTS, Launch("test"))

    def init(backends: str, **_: Any) -> None:
        assert backends == ("cpu:gloo,cuda:nccl" if (wanted, device, shared) == (True, "cuda", False) else "gloo")
        assert heartbeat.diagnoser.hang_seconds == worlds.DEFAULT_TIMEOUTS.rendezvous, "the start is limited"
        raise Stopped

    monkeypatch.setattr(worlds, "read_launch", lambda: Launch("test", world_size=2))
    monkeypatch.setattr(worlds, "rendezvous", lambda *_: (dist.HashStore(), torch.device(device), shared))
    monkeypatch.setattr(worlds, "Heartbeat", lambda *_: heartbeat)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Stopped), connect(nccl=wanted):
        pass


def test_the_debug_level_detail_is_lowered_before_it_ends_ranks_by_a_signal(monkeypatch: Any, caplog: Any) -> None:
    """PyTorch recommends it against hangs, and its DistributedDataParallel crashed with gloo."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    before = dist.get_debug_level()
    dist.set_debug_level_from_env()
    worlds._lower_debug_level()
    assert dist.get_debug_level() == dist.DebugLevel.INFO
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in caplog.text
    dist.set_debug_level(before)


def check_fabric(world: World, slow: int | None, limit: float) -> tuple[list[str], int]:
    """The log of this rank, whose clock advances by a second, or 100, at each look, and the number of transfers."""
    log = CollectedLines("utils.distributed.world")
    clock = itertools.count(0.0, 100.0 if world.rank == slow else 1.0)
    shift = mock.Mock(side_effect=World.shift)
    with (
        mock.patch.object(worlds, "time", SimpleNamespace(perf_counter=clock.__next__)),
        mock.patch.object(World, "shift", lambda *arguments: shift(*arguments)),
    ):
        world.check_fabric(limit)
    return log.warnings + log.lines, shift.call_count


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_with_a_slow_device_and_slow_links_is_named(ranks: int) -> None:
    """By a clock that passes a hundred times as fast on it. Two ranks share their only link."""
    host, slow = socket.gethostname(), ranks - 1
    (lines, _), *others = run_ranks(check_fabric, ranks, slow, 1.0)
    assert all(own == lines for own, _ in others)
    assert f"Fabric: matrix products are slow on rank {slow} ({host}, 100.0 times the median); " in lines[0]
    named = f"Fabric: transfers are slow on rank {slow} ({host}, 100.0 times the median); "
    assert [line.startswith(named) for line in lines[1:]] == ([True, False] if ranks == 3 else [False])


def test_healthy_ranks_say_one_line_and_stop_in_time() -> None:
    """The first round always counts; after it a quarter of the limit has passed, or not."""
    for limit, transfers in ((1.0, 2), (40.0, 4)):
        for lines, count in run_ranks(check_fabric, 3, None, limit):
            assert lines == ["Fabric: 1 s per matrix product, 0.00105 GB/s between neighbors"]
            assert count == transfers
