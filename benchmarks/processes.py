"""Trainings that a benchmark starts as processes of their own: ended whole, and failing in one line."""

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

STOPPED = "stopped: not done"
# torchrun gives its ranks, which are no members of its process group, this long to end, and kills them then.
GRACE_SECONDS = 40.0


def launcher(ranks: int) -> list[str]:
    """What a script and its arguments follow, for so many ranks on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def run_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    limit: float | None = None,
    directory: Path | None = None,
) -> int | None:
    """The command's exit code, or None where the time was up; whatever ends the wait ends all that it started."""
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


def why_it_failed(code: int | None, output: str, limit: float = 0) -> str:
    """In one line, from what the processes wrote; empty where they did not fail."""
    if code == 0:
        return ""
    if code is None:
        return f"{STOPPED} after {limit:.0f} s"
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in output.splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception)(:|$)", line)]
    raised = [line for line in raised if "ChildFailedError" not in line]  # torchrun's, for whatever its ranks had
    killed = re.findall(r"Signal \d+ \((SIG\w+)\)", output)
    if code < 0:
        killed.append(signal.Signals(-code).name)
    ended = f"ended by {killed[0]}" if killed else f"exit code {code}"
    if killed[:1] == ["SIGKILL"]:
        ended += ", as where memory runs out"
    return (told or raised or [ended])[0]
