"""Version and commit of this program."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from utils import __version__


def version_line() -> str:
    """The versions of this program, PyTorch and Python in one line."""
    import torch  # takes a second; other users of this module may not need it

    commit, python = git_commit(), platform.python_version()
    return f"nbody-unet {__version__}, commit {commit}, torch {torch.__version__}, Python {python}"


def git_commit() -> str:
    """The checkout's commit, with '-dirty' if files differ; outside a checkout GIT_COMMIT, or 'unknown'."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT") or "unknown"
    return result.stdout.strip()
