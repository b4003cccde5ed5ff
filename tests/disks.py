"""Small file systems that a test can fill; mounting them requires root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a tmpfs of `size` (200k, 2m) on a new folder; skips the test if that is not permitted."""
    folder.mkdir(parents=True)
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        reason = subprocess.run(command, capture_output=True, text=True).stderr.strip()
    except OSError as error:
        reason = str(error)
    if not os.path.ismount(folder):
        pytest.skip(f"cannot mount a file system ({reason})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: log files in it may still be open


def fill(folder: Path) -> Path:
    """Fills the disk to the last byte; returns the file that occupies it."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path
