"""Collectives, joint errors, and the end of the process group."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from utils.distributed import world as worlds
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.launch import Launch
from utils.distributed.rendezvous import Meeting
from utils.distributed.world import World, connect
from utils.errors import LocalError, Stopped, UserError

# --- several ranks -------------------------------------------------------------------------------------------------


def test_a_single_rank_needs_no_process_group() -> None:
    with connect("cpu") as world:
        assert not dist.is_initialized()
        assert (world.rank, world.size, world.is_root, world.is_node_leader) == (0, 1, True, True)
        assert world.gather_json("a") == ["a"]
        assert world.gather(torch.arange(3)).tolist() == [[0, 1, 2]]
        assert world.sum(torch.tensor(2.0)) == 2
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


class CreatesFile:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


def test_code_that_a_stranger_sends_in_the_place_of_a_rank_is_not_executed(tmp_path: Path, monkeypatch) -> None:
    """A rank is any process that reaches the port."""
    data = pickle.dumps(CreatesFile(tmp_path / "created"))
    answers = [torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8).unsqueeze(0)]
    monkeypatch.setattr(World, "gather", lambda *_: answers.pop(0))
    with pytest.raises(ValueError, match="decode"):
        World(Launch("test"), torch.device("cpu")).gather_json(None)
    assert os.listdir(tmp_path) == []


def test_the_frames_of_a_joint_error_are_freed_with_it() -> None:
    """They may hold device memory. They once were in a reference cycle."""
    freed: list[weakref.ref] = []

    def load() -> None:
        values = torch.zeros(1)
        freed.append(weakref.ref(values))
        raise UserError("no room")

    gc.disable()
    try:
        with pytest.raises(UserError), World(Launch("test"), torch.device("cpu")).raise_together():
            load()
        assert freed[0]() is None
    finally:
        gc.enable()


def test_a_value_that_json_cannot_carry_is_refused_before_it_is_sent() -> None:
    world = World(Launch("test"), torch.device("cpu"))
    with pytest.raises(TypeError, match="PosixPath is not JSON serializable"):
        world.gather_json(Path("a"))
    assert world.gather_json((math.inf, {"a": None})) == [[math.inf, {"a": None}]]  # a list, as on several ranks


FAILURES = [{}, {1: "user"}, dict.fromkeys(range(4), "common"), {1: "user", 2: "user"}, {2: "bug"}, {}]


def call_all_methods(world: World) -> tuple[dict[str, Any], list[str]]:
    return exchange(world), raise_on_some_ranks(world, FAILURES)


def test_collectives_and_joint_errors() -> None:
    for rank, (values, raised) in enumerate(run_ranks(call_all_methods, 4)):
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


# --- the end -------------------------------------------------------------------------------------------------------


class Step:
    """Stand-in for a step with CUDA graphs, in a reference cycle."""

    def __init__(self) -> None:
        self.cycle = self


@pytest.mark.parametrize(
    ("error", "leaves"), [(None, 1), (Stopped(), 1), (UserError("bad"), 1), (LocalError("bad"), 0)], ids=repr
)
def test_the_step_is_released_before_the_process_group_is_destroyed(
    monkeypatch, error: BaseException | None, leaves: int
) -> None:
    """NCCL would wait forever for its CUDA graphs, which an error's frames or a reference cycle may keep alive."""
    alive: list[bool] = []
    seen: list[weakref.ref] = []

    def hold(step: Step) -> None:
        seen.append(weakref.ref(step))
        if error is not None:
            raise error

    monkeypatch.setattr(dist, "destroy_process_group", lambda: alive.append(seen[0]() is not None))
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), worlds._leaving_group():
        hold(Step())
    assert alive == [False] * leaves


@pytest.mark.parametrize(
    ("wanted", "device", "shared", "backends"),
    [
        (True, "cuda", False, "cpu:gloo,cuda:nccl"),
        (False, "cuda", False, "gloo"),
        (True, "cuda", True, "gloo"),
        (True, "cpu", False, "gloo"),
    ],
)
def test_nccl_is_used_only_to_exchange_gradients_between_gpus(
    monkeypatch, wanted: bool, device: str, shared: bool, backends: str
) -> None:
    class Connected(Exception): ...

    heartbeat = Heartbeat(0)

    def init(found: str, **options: Any) -> None:
        assert found == backends
        assert heartbeat._hang_seconds == worlds.DEFAULT_TIMEOUTS.rendezvous, "the start is limited"
        raise Connected

    launch = Launch("test", world_size=2)
    monkeypatch.setattr(worlds, "read_launch", lambda: launch)
    meeting = Meeting(dist.HashStore(), torch.device(device), shared)
    monkeypatch.setattr(worlds, "rendezvous", lambda *_: meeting)
    monkeypatch.setattr(worlds, "Heartbeat", lambda *_: heartbeat)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Connected), connect(nccl=wanted):
        pass
