"""Programs as child processes: none of their processes outlives them."""

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import GENEROUS

from benchmarks.common import Parser, failure_of, launcher

OPEN = "import os, sys; pipe = os.open(os.environ['PIPE'], os.O_WRONLY); os.write(pipe, b'ready')"
SLEEPER = f"{OPEN}; import time; time.sleep({10 * GENEROUS})"
FAMILY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FAMILY}"


def wait_for(pipe: int, text: bytes) -> None:
    """Reads this text; without a text, waits until every process that could write has ended."""
    received = b""
    while received != text or not text:
        assert select.select([pipe], [], [], GENEROUS)[0], f"still running, and wrote only {received!r}"
        piece = os.read(pipe, 1)
        if not piece:
            return
        received += piece


@pytest.mark.parametrize(
    ("program", "ranks", "stop"),
    [(FAMILY, 1, True), (STUBBORN, 1, False), (SLEEPER, 2, False)],  # torchrun's ranks have process groups of their own
    ids=["SIGTERM", "time limit, SIGTERM ignored", "time limit, torchrun"],
)
def test_all_processes_end_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, ranks: int, stop: bool
) -> None:
    """Neither a time limit nor a signal to the benchmark leaves children behind, even if they ignore SIGTERM."""
    os.mkfifo(tmp_path / "pipe")
    reader, writer = (os.open(tmp_path / "pipe", flag) for flag in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY))
    wait, waited = subprocess.Popen.wait, []

    def wait_for_both(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not waited:
            waited.append(timeout)
            wait_for(reader, b"ready" * 2)
            if stop:
                os.kill(os.getpid(), signal.SIGTERM)
        return wait(self, GENEROUS if timeout is None else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_both)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    Parser("").parse_args([])
    (tmp_path / "script.py").write_text(program)
    command, grace = [*launcher(ranks), str(tmp_path / "script.py")], 0.0 if program == STUBBORN else 40.0
    options: Any = {} if stop else {"limit": 0.0, "grace": grace}
    try:
        with pytest.raises(SystemExit) if stop else contextlib.nullcontext():
            reason = failure_of(command, tmp_path / "log", {"PIPE": str(tmp_path / "pipe")}, **options)
            assert reason == "stopped after 0 s"
        os.close(writer)
        wait_for(reader, b"")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
