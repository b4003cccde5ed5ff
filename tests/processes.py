"""Starts processes from a server that has imported the program, so that a start needs a fork but no imports.

run_ranks(function, 2)              calls a function on ranks that are connected by gloo
run(["train.py", "--config=test"])  runs an entry script as its own process: exit code, stdout, stderr

The server runs no torch operation before it forks: torch's thread pools do not survive a fork.
"""

import contextlib
import multiprocessing
import os
import queue
import random
import re
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TOP = Path(__file__).parent.parent
# Under torchrun OMP_NUM_THREADS=1 alone does not count.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GENEROUS = 300.0  # seconds: a limit for a hang, not an expectation
Variables = Mapping[str, str] | None
_CONTEXT = multiprocessing.get_context("forkserver")
_STARTING = threading.Lock()
_RANDOM = random.SystemRandom()


def context() -> ForkServerContext:
    """The server's context; the first call starts the server."""
    with _STARTING:
        _CONTEXT.set_forkserver_preload(["preload"])
        path = os.pathsep.join([str(TOP), str(TOP / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Python before 3.12.8 does not use its sys.path for the server's imports.
        with mock.patch.dict(os.environ, {**ONE_THREAD, "PYTHONPATH": path}):
            forkserver.ensure_running()
    return _CONTEXT


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):  # with SO_REUSEADDR
        return True
    return False


def free_port() -> int:
    """A free port below the range of ephemeral ports, which begins at 32768."""
    return next(port for port in iter(lambda: _RANDOM.randrange(20000, 30000), None) if is_free(port))


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, device: str = "cpu") -> list[Any]:
    """[function(world, *arguments) of rank 0, of rank 1, …]; `function` belongs to a module and is no lambda."""
    server = context()
    results: Any = server.Queue()
    port = free_port()
    processes = [
        server.Process(target=_rank, args=(function, rank, world_size, port, arguments, device, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}

    def all_have_answered() -> bool:
        with contextlib.suppress(queue.Empty):
            while len(answers) < world_size:
                answers.update([results.get(timeout=0.1)])
        return len(answers) == world_size

    try:
        wait_until(
            all_have_answered,
            what=lambda: f"{answers.keys()} of {world_size} ranks; exit codes {[rank.exitcode for rank in processes]}",
            alive=lambda: all(processes[rank].exitcode is None for rank in {*range(world_size)} - answers.keys()),
        )
        for process in processes:
            process.join(GENEROUS)
        assert all(process.exitcode is not None for process in processes), "a rank hangs during its exit"
    finally:
        for process in processes:
            process.kill()
    failed = {rank: answer for rank, (good, answer) in answers.items() if not good}
    assert not failed, "\n".join(failed.values())
    return [answers[rank][1] for rank in range(world_size)]


def _rank(function: Any, rank: int, size: int, port: int, arguments: tuple, device: str, results: Any) -> None:
    import torch

    from utils.config.sections import TimeoutsConfig
    from utils.distributed.world import connect

    os.environ.update(rank_variables(rank, size, port))
    torch.set_num_threads(1)
    try:
        with connect(device, TimeoutsConfig(rendezvous=GENEROUS)) as world:
            try:
                answer = (True, function(world, *arguments))
            except BaseException:
                # Caught here: otherwise it would stop the other ranks, which have their own answers.
                answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    except BaseException:
        answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    results.put((rank, answer))


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets for one rank on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


def start_ranks(arguments: Sequence[Any], count: int, folder: Path) -> "list[Program]":
    """Starts the ranks of an entry script, whose output goes to `folder`."""
    port = free_port()
    environments = ({**os.environ, **rank_variables(rank, count, port)} for rank in range(count))
    return [Program(arguments, folder / f"rank{rank}", environment=own) for rank, own in enumerate(environments)]


def ranks_of_torchrun(agent: int) -> dict[int, int]:
    """Rank -> process id of the processes that torchrun with this process id has started."""
    ranks = {}
    with contextlib.suppress(OSError):  # it has ended
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            match = re.search(rb"\0RANK=(\d+)\0", Path("/proc", child, "environ").read_bytes())
            if match:
                ranks[int(match[1])] = int(child)
    return ranks


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


class Completed(NamedTuple):
    """Result of a process. The exit code is that of a shell: 128 + N after signal N."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """A running entry script. Its output is in `<output>.out` and `<output>.err`."""

    def __init__(self, arguments: Sequence[Any], output: Path, cwd: Path = TOP, environment: Variables = None) -> None:
        """`arguments` follow `python` on a command line: a script, or -m and a module, and their arguments."""
        self.stdout_path, self.stderr_path = output.with_suffix(".out"), output.with_suffix(".err")
        for path in (self.stdout_path, self.stderr_path):
            path.write_text("")  # the process may be killed before it does so
        variables = {**ONE_THREAD, **(os.environ if environment is None else environment)}
        words = [str(argument) for argument in arguments]
        self.process = context().Process(
            target=_script, args=(words, str(self.stdout_path), str(self.stderr_path), str(cwd), variables)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def text(self) -> str:
        """The output so far, stdout first."""
        return "".join(path.read_text(errors="replace") for path in (self.stdout_path, self.stderr_path))

    def signal(self, number: int) -> None:
        """Sends a signal; has no effect if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_for(self, pattern: str) -> None:
        """Returns when the output matches the pattern; AssertionError if the process ends before."""
        wait_until(
            lambda: re.search(pattern, self.text, re.MULTILINE),
            lambda: f"{pattern!r} in:\n{self.text}",
            alive=lambda: self.process.exitcode is None,
        )

    def end(self) -> Completed:
        self.process.join(GENEROUS)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {GENEROUS:.0f} s:\n{self.text}")
        stdout, stderr = (path.read_text(errors="replace") for path in (self.stdout_path, self.stderr_path))
        return Completed(128 - code if code < 0 else code, stdout, stderr)

    def kill(self) -> None:
        """Ends the process, even if it is suspended; has no effect if it has ended."""
        self.process.kill()
        self.process.join(GENEROUS)


def run(arguments: Sequence[str | Path], output: Path, cwd: Path = TOP, environment: Variables = None) -> Completed:
    return Program(arguments, output, cwd, environment).end()


def wait_until(
    condition: Callable[[], Any],
    what: Callable[[], str] = lambda: "the condition",
    alive: Callable[[], bool] = lambda: True,
) -> None:
    """Returns when the condition holds; AssertionError after GENEROUS seconds, or if `alive` becomes false before."""
    deadline = time.monotonic() + GENEROUS
    while not condition():
        ended = not alive()
        if ended and condition():
            return
        assert not ended, f"ended without {what()}"
        assert time.monotonic() < deadline, f"not within {GENEROUS:.0f} s: {what()}"
        time.sleep(0.02)


def _script(words: list[str], stdout: str, stderr: str, cwd: str, variables: dict[str, str]) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    # A shell starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    code: Any = 0
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path.insert(0, cwd if is_module else str(Path(cwd, words[0]).parent))
    try:
        if is_module:
            sys.modules.pop(words[1], None)  # runpy warns about modules that are already imported
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(cwd, words[0])), run_name="__main__")
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)
