"""A process of its own that draws: matplotlib holds the interpreter's lock, which the heartbeat of a rank needs.

It starts with the first call and ends with this process. It imports neither PyTorch nor the caller's main module, and
only it imports matplotlib.
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from analysis.evaluation.results import Results
from utils.errors import UserError

_calls: queue.SimpleQueue[tuple[Future[bytes], tuple[Any, ...]]] = queue.SimpleQueue()


def submit(function: Callable[..., bytes], *arguments: Any) -> Future[bytes]:
    """The PNG file of a function below. The future raises what the function raises; UserError if the process ends."""
    future: Future[bytes] = Future()
    _calls.put((future, (function, *arguments)))
    _start_thread()
    return future


def draw(results: Results) -> dict[str, Future[bytes]]:
    """The pictures for which the results have data, by name."""
    return {name: submit(picture, name, results) for name in results.pictures}


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_make_calls, name="drawing", daemon=True).start()  # the end of this process does not wait


def _make_calls() -> None:
    """Makes one call at a time, in their order."""
    # The process inherits this: a signal to the whole job or terminal is for the caller, which waits for pictures.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        future, call = _calls.get()
        process, connection = _drawing_process()
        try:
            connection.send(call)
            answer = connection.recv()
        except (EOFError, OSError):
            _drawing_process.cache_clear()
            answer = UserError(f"the process that draws was ended, with exit code {process.wait()}")
        (future.set_exception if isinstance(answer, Exception) else future.set_result)(answer)


@functools.cache
def _drawing_process() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "analysis.evaluation.drawing", str(theirs.fileno())]
    with theirs:
        return subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]), ours


def _serve(connection: Connection) -> None:
    """Answers calls until the caller has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, *arguments = connection.recv()
            try:
                answer = function(*arguments)
            except Exception as error:  # also one of a file, such as a style that cannot be read
                answer = error
            connection.send(answer)


def picture(name: str, *arguments: Any) -> bytes:
    """A picture of an evaluation by its name, or one of a training run: "crop" by draw_slices, or "loss_curves"."""
    from analysis.evaluation import figures

    of_run: dict[str, Callable[..., Any]] = {"crop": figures.draw_slices, "loss_curves": figures.loss_curves}
    return figures.encode_png(of_run[name](*arguments) if name in of_run else figures.draw(name, *arguments))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
