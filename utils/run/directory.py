"""The names of the files in the directory of a run, and those that a run writes."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.distributed.flight_recorder import RECORD
from utils.files import read_json, recover
from utils.log import warn_once

CLOCK = ("step", "seconds")  # keys of each line of metrics.jsonl
# Types of keys of provenance.json on which later runs rely. Other programs write files of this name, too.
PROVENANCE = {"run_num": str, "command": list, "jobs": list, "earlier": list, "data": dict, "convolutions": dict}
UNREADABLE = "{} is ignored: it is damaged, or was not written by this version of the program"


class RunDirectory:
    """The files of a run by what they hold. utils/run/checkpoint.py names those in `checkpoints`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock, self.config, self.log = path / ".lock", path / "config.yaml", path / "out.log"
        self.provenance, self.summary = path / "provenance.json", path / "summary.json"
        self.checkpoints, self.evaluations = path / "checkpoints", path / "evaluation"
        self.metrics, self.tensorboard, self.wandb = path / "metrics.jsonl", path / "logs", path / "wandb"
        self.loss_curves, self.report = path / "loss_curves.png", path / "report.html"
        self.slices, self.error_slices = path / "slices.png", path / "slices_largest_error.png"
        self.removal = path / ".removal"  # while the run is being removed
        self.learning_rate = path / "learning_rate.png"  # the preflight's plot

    def __str__(self) -> str:
        return str(self.path)

    def profile(self, suffix: str) -> tuple[Path, Path]:
        """The trace and the table of operations, for several ranks with a suffix."""
        return self.path / f"trace{suffix}.json.gz", self.path / f"top_operations{suffix}.txt"

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"step_{step:08d}.npz"

    def written(self) -> list[Path]:
        """All that a run has written here; --resume=no removes it, and nothing else."""
        paths = [self.summary, self.config, self.checkpoints, self.metrics, self.tensorboard, self.log]
        paths += [self.evaluations, self.report, self.wandb, self.loss_curves, self.path / "slices*.png"]
        paths += [*self.profile("*"), self.path / RECORD.format("*"), self.provenance]
        return [file for path in paths for file in sorted(self.path.glob(path.name))]

    @property
    def is_free(self) -> bool:
        """True if no run has begun here, or its removal was interrupted, which the next start completes.

        A process that was killed may have left hidden files, or the first record; one that hung before its first step
        the last collectives; a preflight its plot.
        """
        if not self.path.is_dir():
            return not os.path.lexists(self.path)
        collectives = (file.name for file in self.path.glob(RECORD.format("*")))
        remains = {self.provenance.name, self.learning_rate.name, *collectives}
        return self.removal.exists() or all(name.startswith(".") or name in remains for name in os.listdir(self.path))

    @property
    def title(self) -> str:
        """The end of the path: config, ranks and run_num."""
        return "/".join(self.path.parts[-3:])

    @property
    def has_checkpoints(self) -> bool:
        return any(self.checkpoints.glob("step_*"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, each with a step and numbers; a kill or a full disk may have truncated some.

        Lines of another form are ignored, with a warning if all are.
        """
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and all(isinstance(record.get(key), int | float) for key in CLOCK):
                    records.append(record)
        if lines and not records:
            warn_once(UNREADABLE.format(self.metrics))
        return records

    def read_summary(self) -> dict[str, Any]:
        return _read_record(self.summary, {})

    def read_provenance(self) -> dict[str, Any]:
        return _read_record(self.provenance, PROVENANCE)

    def evaluated_steps(self) -> list[int]:
        """Steps of the evaluations during training, in ascending order."""
        names = [path.stem[5:] for path in self.evaluations.glob("step_*.npz")]
        return sorted(int(name) for name in names if name.isdecimal())

    def remove_evaluations_after(self, step: int) -> None:
        """Removes the evaluations after the step at which a run resumes; -1 removes all of them."""
        if self.evaluations.is_dir():
            recover(self.evaluations)
        for later in self.evaluated_steps():
            if later > step:
                self.evaluation(later).unlink(missing_ok=True)


def _read_record(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file, and with a warning if it or a key has another type."""
    value: Any = None
    with contextlib.suppress(ValueError):
        value = read_json(path) if path.exists() else {}
    if isinstance(value, dict) and all(isinstance(value.get(key, kind()), kind) for key, kind in types.items()):
        return value
    warn_once(UNREADABLE.format(path))
    return {}
