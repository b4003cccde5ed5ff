"""Programs as child processes: none of their processes outlives them, and a failure is reported in one line."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from processes import GENEROUS

from benchmarks.common import Parser, failure_of, failure_reason, launcher

OPEN = "import os, sys; pipe = os.open(os.environ['PIPE'], os.O_WRONLY); os.write(pipe, b'ready')"
SLEEPER = f"{OPEN}; import time; time.sleep({10 * GENEROUS})"
FAMILY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FAMILY}"
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}


def wait_for(pipe: int, text: bytes) -> None:
    """Reads this text; without a text, waits until every process that could write has ended."""
    found = b""
    while found != text or not text:
        assert select.select([pipe], [], [], GENEROUS)[0], f"still running, and wrote only {found!r}"
        piece = os.read(pipe, 1)
        if not piece:
            return
        found += piece


@pytest.mark.parametrize(
    ("program", "ranks", "by"),
    [
        *((FAMILY, 1, name) for name in SIGNALS),
        (STUBBORN, 1, "time limit"),
        (SLEEPER, 2, "time limit"),  # torchrun's ranks are in process groups of their own
    ],
    ids=[*SIGNALS, "SIGTERM ignored", "torchrun"],
)
def test_all_processes_end_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, ranks: int, by: str
) -> None:
    """Neither a time limit nor a signal to the benchmark leaves children behind, even if they ignore SIGTERM."""
    os.mkfifo(tmp_path / "pipe")
    reader, writer = (os.open(tmp_path / "pipe", flag) for flag in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY))
    wait, waited = subprocess.Popen.wait, []

    def wait_for_both(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not waited:
            waited.append(timeout)
            wait_for(reader, b"ready" * 2)
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
    command, log = [*launcher(ranks), str(tmp_path / "script.py")], tmp_path / "log"
    environment = {"PIPE": str(tmp_path / "pipe")}
    try:
        if by in SIGNALS:
            with pytest.raises(KeyboardInterrupt if by == "Ctrl-C" else SystemExit):
                failure_of(command, log, environment)
        else:
            grace = 0.0 if program == STUBBORN else 40.0
            assert failure_of(command, log, environment, limit=0.0, grace=grace) == "stopped after 0 s"
        os.close(writer)
        wait_for(reader, b"")
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
        (1, "ChildFailedError:\n Signal 9 (SIGKILL) received by PID 3", "ended by SIGKILL"),
    ],
)
def test_a_failure_is_reported_in_one_line(code: int | None, output: str, says: str) -> None:
    assert failure_reason(code, output, 30) == says
