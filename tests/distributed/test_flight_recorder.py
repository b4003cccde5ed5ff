"""Flight recorder: the last collectives of a rank in a file, also if PyTorch does not return them."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import GENEROUS, context, run_ranks

from utils.distributed import flight_recorder
from utils.distributed.world import World
from utils.errors import EXIT_HANG


def gloo(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["gloo"]


def write_after_a_sum(world: World, folder: Path) -> bool:
    world.sum(torch.ones(2, 3))
    return flight_recorder.write_collectives(folder, world.rank)


def test_the_file_names_the_collectives_of_a_rank(tmp_path: Path) -> None:
    assert run_ranks(write_after_a_sum, 2, tmp_path) == [True, True]
    for rank in range(2):
        found = gloo(tmp_path / f"flight_recorder_rank{rank}.json")
        last = found["entries"][-1]
        assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[2, 3]])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_single_process_has_no_collectives(tmp_path: Path) -> None:
    assert not flight_recorder.write_collectives(tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "entries"),
    [({}, "2000"), ({"TORCH_FR_BUFFER_SIZE": "7"}, "7"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, None)],
)
def test_the_users_number_of_entries_is_kept(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], entries: str | None
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "0")  # restored at the end
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    flight_recorder.enable()
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == entries


# --- a recorder or a disk that hangs ---------------------------------------------------------------------------------


def sleep_without_gil() -> bytes:
    time.sleep(GENEROUS)
    return b""


def sleep_with_gil() -> bytes:
    ctypes.PyDLL(None).sleep(int(GENEROUS))
    return b""


def fail() -> bytes:
    raise RuntimeError("the recorder is broken")


def write_and_exit(dump: Callable[[], bytes], folder: Path) -> None:
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    dist.is_initialized = lambda: True  # type: ignore[assignment]
    setattr(flight_recorder.c10d, flight_recorder.RECORDERS["gloo"], dump)
    written = flight_recorder.write_collectives(folder, 0, seconds=0.5)
    os._exit(0 if written else EXIT_HANG)


@pytest.mark.parametrize(("dump", "code"), [(sleep_without_gil, EXIT_HANG), (fail, EXIT_HANG), (sleep_with_gil, 1)])
def test_a_recorder_that_hangs_does_not_keep_the_process(dump: Callable[[], bytes], code: int, tmp_path: Path) -> None:
    """PyTorch waits for the recorder's lock with the GIL: then no other thread of Python runs."""
    process = context().Process(target=write_and_exit, args=(dump, tmp_path))
    process.start()
    process.join(GENEROUS / 2)
    process.kill()
    assert process.exitcode == code
    assert [path.name for path in tmp_path.iterdir()] == ["stderr"]
