"""A process of its own that draws: matplotlib holds the interpreter's lock, which the heartbeat of a rank needs.

It starts with the first call and ends with this process. It imports neither PyTorch nor the caller's main module, and
only it imports matplotlib.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from analysis.evaluation.results import Results
from utils.errors import UserError
from utils.volumes.channels import Channel

_calls = ThreadPoolExecutor(1, "drawing")  # one call at a time, in their order


def submit(function: Callable[..., bytes], *arguments: Any) -> Future[bytes]:
    """The PNG file of a function below. The future raises what the function raises; UserError if the process ends."""
    return _calls.submit(_call, function, *arguments)


def draw(results: Results) -> dict[str, Future[bytes]]:
    """The pictures for which the results have data, by name."""
    return {name: submit(picture, name, results) for name in results.pictures}


def _call(*call: Any) -> bytes:
    process, connection = _drawing_process()
    try:
        connection.send(call)
        answer = connection.recv()
    except (EOFError, OSError):
        _drawing_process.cache_clear()  # the next call starts another one
        fault = f"the process that draws was ended with exit code {process.wait()}"
        raise UserError(f"{fault}; run the command again, with more memory if that was the reason") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


@functools.cache
def _drawing_process() -> tuple[subprocess.Popen[bytes], Connection]:
    # Inherited: a signal that stops the job or all processes of a terminal is for the caller, which waits for pictures.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ours, theirs = Pipe()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "analysis.evaluation.drawing", str(theirs.fileno())]
    with theirs:
        return subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]), ours


def _serve(connection: Connection) -> None:
    """Answers calls until the caller has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                function, *arguments = connection.recv()
                answer = function(*arguments)
            except (EOFError, OSError):
                raise
            except Exception as error:
                answer = error
            connection.send(answer)


# --- what it draws ---------------------------------------------------------------------------------------------------


def import_matplotlib() -> bytes:
    """Draws nothing: called early, so that the first picture need not wait for it."""
    from analysis.evaluation import figures, loss_curves  # noqa: F401

    return b""


def picture(name: str, results: Results) -> bytes:
    from analysis.evaluation import figures

    return figures.encode_png(figures.draw(name, results))


def slices(
    inputs: Sequence[Channel], targets: Sequence[Channel], planes: Mapping[str, np.ndarray], title: str
) -> bytes:
    from analysis.evaluation import figures

    return figures.encode_png(figures.draw_slices(inputs, targets, planes, None, title))


def curves(records: Sequence[Mapping[str, Any]], loss: str, title: str) -> bytes:
    from analysis.evaluation import figures, loss_curves

    return figures.encode_png(loss_curves.loss_curves(records, loss, title))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
