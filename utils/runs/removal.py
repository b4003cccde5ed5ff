"""Removal of an earlier run from its directory, for a training that starts there from scratch (--resume=no).

Only files with names that this program writes are removed. After a kill in between, no training continues with a part
of the records: the newest checkpoints are removed first, and config.yaml before the last one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.errors import os_errors_for_users
from utils.evaluation import results
from utils.files import recover
from utils.training import checkpoint

FOLDERS = (checkpoint.FOLDER, "logs", results.FOLDER, "wandb")
RECORDS = (
    "metrics.jsonl",
    "logs/events.out.tfevents.*",
    "out.log",
    f"{results.FOLDER}/step_*.npz",
    "report.html",
    "loss_curves.png",
    "slices.png",
    "trace.json.gz",
    "trace_rank*.json.gz",
    "top_operations.txt",
    "top_operations_rank*.txt",
    "flight_recorder_rank*.json",
    ".profile-*",
    "wandb/id",
    "wandb/run-*",
    "wandb/offline-run-*",
    "wandb/latest-run",
    "wandb/debug*.log",
    "provenance.json",
)
TREES = ("step_", ".profile-", "run-", "offline-run-")  # what is removed with all that is in it, if it is a directory


def is_incomplete(directory: Path) -> bool:
    """True if a removal may have been interrupted: a run has its config.yaml before its records."""
    return not (directory / "config.yaml").exists()


def remove_run(directory: Path) -> list[str]:
    """Removes all that a run has written; returns a line for the log that says how much, or none.

    The caller holds the directory's lock. Raises UserError if something cannot be removed.
    """
    names, count, size = set(), 0, 0
    with os_errors_for_users(f"cannot remove the earlier run in {directory}", "remove it by hand, or change --run_num"):
        for folder in (directory, *(directory / name for name in FOLDERS)):
            recover(folder)
        for path in _written(directory):
            files = [path] if path.is_symlink() else [file for file in (path, *path.rglob("*")) if not file.is_dir()]
            count, size = count + len(files), size + sum(file.lstat().st_size for file in files)
            names.add(path.relative_to(directory).parts[0])
            _remove(path)
    for name in FOLDERS:
        with contextlib.suppress(OSError):
            (directory / name).rmdir()  # fails if it holds other files, and for a link to another file system
    if not names:
        return []
    return [f"Removed the earlier run: {count} files, {size / 1e6:.1f} MB ({', '.join(sorted(names))})"]


def _written(directory: Path) -> Iterator[Path]:
    """Everything to remove, in this order."""
    folder = directory / checkpoint.FOLDER
    steps = [checkpoint.step_directory(folder, step) for step in checkpoint.saved_steps(folder)]  # newest first
    first = [directory / "summary.json", *steps[:-1], directory / "config.yaml", *steps[-1:], folder / checkpoint.BEST]
    yield from (path for path in first if os.path.lexists(path))
    for pattern in RECORDS:
        yield from sorted(directory.glob(pattern))


def _remove(path: Path) -> None:
    """Removes a file, a link, or one of TREES; OSError for another directory."""
    if path.name.startswith(TREES) and path.is_dir() and not path.is_symlink():
        partial = path.with_name(f".{path.name.lstrip('.')}.partial")  # recover() removes it after a kill
        os.rename(path, partial)
        shutil.rmtree(partial)
    else:
        path.unlink()
