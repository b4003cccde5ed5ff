"""Training runs that a benchmark starts as child processes: all of their processes end, and errors are one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.common import REPOSITORY

# torchrun gives its ranks, which have process groups of their own, this long to end before it kills them.
GRACE_SECONDS = 40.0


def launcher(ranks: int) -> list[str]:
    """The words before the script's name in a command that starts `ranks` ranks on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def failure_of(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, limit: float | None = None
) -> str:
    """Runs the command in the repository, with its output in `log`; returns why it failed, or an empty string."""
    with open(log, "wb") as file:
        code = run_group(command, {**os.environ, **(environment or {})}, file, limit, REPOSITORY)
    return failure_reason(code, log.read_text(encoding="utf-8", errors="replace"), limit or 0)


def run_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    limit: float | None = None,
    directory: Path | None = None,
) -> int | None:
    """The command's exit code, or None after `limit` seconds; all processes that it started have ended by then."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(None if limit is None else max(limit, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure_reason(code: int | None, output: str, limit: float = 0) -> str:
    """One line from what the processes wrote; empty if the exit code is 0."""
    if code == 0:
        return ""
    if code is None:
        return f"stopped after {limit:.0f} s"
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in output.splitlines()]
    reported = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception)(:|$)", line)]
    raised = [line for line in raised if "ChildFailedError" not in line]  # torchrun raises it for any failed rank
    signals = re.findall(r"Signal \d+ \((SIG\w+)\)", output)
    if code < 0:
        signals.append(signal.Signals(-code).name)
    ended = f"ended by {signals[0]}" if signals else f"exit code {code}"
    if signals[:1] == ["SIGKILL"]:
        ended += ", possibly because memory ran out"
    return (reported or raised or [ended])[0]
