"""Runs a function on several real ranks: separate processes joined by gloo, as a launcher would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from utils import distributed


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    """[function(world, *arguments) of rank 0, of rank 1, …]; `function` is a module's own, not a lambda."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, arguments, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=timeout) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    failed = {rank: answer for rank, (good, answer) in answers.items() if not good}
    assert not failed, "\n".join(failed.values())
    return [answers[rank][1] for rank in range(world_size)]


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, arguments: tuple, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        with distributed.connect(device="cpu", rendezvous_seconds=60, collective_seconds=60) as world:
            try:
                answer = (True, function(world, *arguments))
            except BaseException:
                # Not let out: it would end the other ranks, which have answers of their own.
                answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    except BaseException:
        answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    results.put((rank, answer))
