"""The tests that need a GPU: `pytest -m gpu`, a part of benchmarks/gpu.py."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import common, ladder
from benchmarks.processes import run_group

PROCESSES = 4


def run(left: float, output: Path, record: Callable[[str, dict[str, Any]], None]) -> None:
    """Runs each file in a process of its own, so that a failure of the device ends one file only.

    left: seconds for all files.
    output: file for what the tests print.
    record: called with a file's name and result, one at a time.
    """
    if not ladder.importable("pytest"):
        raise RuntimeError("pytest is not installed")
    deadline, lock = time.perf_counter() + left, threading.Lock()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(b"")

    def run_file(path: Path) -> None:
        started = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
        with tempfile.TemporaryFile() as log:
            code = run_group([*command, str(path)], os.environ, log, deadline - started, common.REPOSITORY)
            log.seek(0)
            text = log.read()
        lines = text.decode(errors="replace").strip().splitlines()
        result = {
            "ended": "cut off: no time left" if code is None else f"exit code {code}",
            "seconds": time.perf_counter() - started,
            "summary": lines[-1] if lines else "",
            "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        }
        with lock, open(output, "ab") as all_output:
            all_output.write(text)
            record(path.name, result)

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(run_file, test_files()))


def test_files() -> list[Path]:
    """The files with tests for a GPU, the largest first, so that no process is left with a long one at the end."""
    files = (common.REPOSITORY / "tests").rglob("test_*.py")
    marked = [path for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    return sorted(marked, key=lambda path: -path.stat().st_size)
