"""Training runs as child processes: none of their processes outlives them, and a failure is reported in one line."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import GENEROUS

from benchmarks.common import Parser, failure_reason, launcher, run_group

SLEEPER = f"print('ready', flush=True); import time; time.sleep({10 * GENEROUS})"
FAMILY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FAMILY}"
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}


def read(pipe: int, enough: Callable[[bytes], bool]) -> bytes:
    """Reads until there is enough, or until every process that could write has ended."""
    text = b""
    while not enough(text):
        assert select.select([pipe], [], [], GENEROUS)[0], f"still running, and wrote only {text!r}"
        piece = os.read(pipe, 4096)
        if not piece:
            break
        text += piece
    return text


@pytest.mark.parametrize(
    ("program", "ranks", "by"),
    [
        (FAMILY, 1, "time limit"),
        (FAMILY, 1, "Ctrl-C"),
        (FAMILY, 1, "SIGTERM"),
        (FAMILY, 1, "SIGHUP"),
        (STUBBORN, 1, "time limit"),
        # torchrun's ranks are in process groups of their own.
        (SLEEPER, 2, "time limit"),
    ],
    ids=["time limit", "Ctrl-C", "SIGTERM", "SIGHUP", "SIGTERM ignored", "torchrun"],
)
def test_all_processes_end_with_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, ranks: int, by: str
) -> None:
    """Neither a time limit nor a signal to the benchmark leaves children behind, even if they ignore SIGTERM."""
    reader, writer = os.pipe()
    wait, waited = subprocess.Popen.wait, []

    def wait_for_both(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not waited:
            waited.append(timeout)
            assert read(reader, lambda text: text.count(b"ready") == 2).count(b"ready") == 2
            if by in SIGNALS:
                os.kill(os.getpid(), SIGNALS[by])
        return wait(self, GENEROUS if timeout is None else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_both)
    # A shell has the programs that it runs in the background ignore Ctrl-C, which also affects the tests.
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS.values()}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    Parser("").parse_args([])
    (tmp_path / "script.py").write_text(program)
    command = [*launcher(ranks), str(tmp_path / "script.py")]
    try:
        with os.fdopen(writer, "wb") as log:
            if by in SIGNALS:
                with pytest.raises(KeyboardInterrupt if by == "Ctrl-C" else SystemExit):
                    run_group(command, os.environ, log)
            else:
                grace = 0.0 if program == STUBBORN else 40.0
                assert run_group(command, os.environ, log, limit=0.0, grace=grace) is None
        # The pipe ends once the last process that can write to it has ended.
        read(reader, lambda text: False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)


@pytest.mark.parametrize(
    ("code", "output", "says"),
    [
        (None, "", "stopped after 30 s"),
        (2, "INFO - x\nerror: no device memory left; lower it\n", "no device memory left; lower it"),
        (1, "[rank1]: Traceback\n[rank1]: torch.AcceleratorError: bad\nnoise", "torch.AcceleratorError: bad"),
        (
            1,
            "ChildFailedError:\n Signal 9 (SIGKILL) received by PID 3",
            "ended by SIGKILL",
        ),
    ],
)
def test_a_failure_is_reported_in_one_line(code: int | None, output: str, says: str) -> None:
    assert failure_reason(code, output, 30) == says
