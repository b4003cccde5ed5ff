"""The files of the evaluations during training: one per evaluated step, in a folder of the run directory."""

from __future__ import annotations

from pathlib import Path

from utils.files import recover

FOLDER = "evaluation"
FILES = "step_*.npz"


def path_of_step(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.npz"


def remove_after(folder: Path, step: int) -> None:
    """Removes the evaluations after the step at which a run resumes; -1 removes all of them."""
    if folder.is_dir():
        recover(folder)
    for path in folder.glob(FILES):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink(missing_ok=True)
