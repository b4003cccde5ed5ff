"""How networks are trained. Predictions and evaluations are in `analysis`, the simulator in `simulation`."""

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

__version__ = "0.1.0"  # also in pyproject.toml and CITATION.cff
STARTED = time.perf_counter()  # of this process

# Entry scripts import this package first, and none of its programs works without these.
_missing = [name for name in ("torch", "numpy", "pydantic", "yaml") if importlib.util.find_spec(name) is None]
if _missing:
    _names = "PyTorch" if _missing[0] == "torch" else " and ".join(_missing)
    _remedy = "run make install, then source .venv/bin/activate, or load the cluster's module for PyTorch"
    sys.stderr.write(f"error: {_names} is not installed: {sys.executable} does not find it; {_remedy}\n")
    raise SystemExit(2)

# Ctrl-C while modules are imported. Python ends itself by SIGINT afterward, which shells report as exit code 130.
sys.excepthook = lambda kind, *rest: (
    sys.stderr.write("interrupted\n") if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest)
)

# libgomp reads these when PyTorch is imported, which entry scripts do after this package. It would bind the main thread
# to one core, and so all threads that it starts. torchrun is bound already: its ranks get the cores of its parent back.
_bound = [name for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY") if os.environ.pop(name, "")]
if _bound and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    with contextlib.suppress(OSError):
        _parent = Path(f"/proc/{os.getppid()}/status").read_text().split("PPid:")[1].split()[0]
        os.sched_setaffinity(0, os.sched_getaffinity(int(_parent)))

# By default a thread that waits for the others of an operation spins for 300,000 rounds, which take milliseconds. If
# another program uses one of the cores, that happens at every operation.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def version_line() -> str:
    import torch  # takes a second; other users of this module may not need it

    commit, python = git_commit(), platform.python_version()
    return f"nbody-unet {__version__}, commit {commit}, torch {torch.__version__}, Python {python}"


def git_commit() -> str:
    """The checkout's commit, with '-dirty' if files differ; outside a checkout GIT_COMMIT, or 'unknown'."""
    root = Path(__file__).resolve().parents[1]
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    # Hooks set GIT_DIR and others, and a directory above an unpacked archive may be another project's checkout.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        top, commit = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True, env=env
            ).stdout.strip()
            for words in (["rev-parse", "--show-toplevel"], describe)
        )
    except (OSError, subprocess.SubprocessError):
        top = commit = ""
    return commit if top and root.samefile(top) else os.environ.get("GIT_COMMIT") or "unknown"
