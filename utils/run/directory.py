"""The names of the files in the directory of a run, and those that a run writes."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from utils.files import read_json, recover
from utils.log import warn_once


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
        self.profile = path / "trace.json.gz", path / "top_operations.txt"  # the latter: a table
        self.removal = path / ".removal"  # while the run is being removed

    def __str__(self) -> str:
        return str(self.path)

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"step_{step:08d}.npz"

    def written(self) -> list[Path]:
        """All that a run has written here; --resume=no removes it, and nothing else."""
        paths = [self.summary, self.config, self.checkpoints, self.metrics, self.tensorboard, self.log]
        paths += [self.evaluations, self.report, self.wandb, self.loss_curves, self.path / "slices*.png"]
        paths += [*self.profile, self.provenance]
        return [file for path in paths for file in sorted(self.path.glob(path.name))]

    @property
    def is_free(self) -> bool:
        """True if no run has begun here, or its removal was interrupted, which the next start completes.

        A process that was killed may have left hidden files, or the first record.
        """
        if not self.path.is_dir():
            return not os.path.lexists(self.path)
        names = [name for name in os.listdir(self.path) if name != self.provenance.name]
        return self.removal.exists() or all(name.startswith(".") for name in names)

    @property
    def title(self) -> str:
        """The end of the path: config, ranks and run_num."""
        return "/".join(self.path.parts[-3:])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, but for those that a kill or a full disk has truncated."""
        records = []
        for line in self.metrics.read_bytes().splitlines() if self.metrics.exists() else ():
            with contextlib.suppress(ValueError, TypeError):  # the latter, and texts: edited by hand
                record = {"step": None, "seconds": 0.0, **json.loads(line)}
                if isinstance(record["step"], int) and all(isinstance(x, int | float) for x in record.values()):
                    records.append(record)
        return records

    def read_provenance(self) -> dict[str, Any]:
        return self.read_record(self.provenance)

    def read_record(self, path: Path) -> dict[str, Any]:
        """The content of a JSON file; empty if there is no file, and with a warning if it is damaged."""
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # the latter two: edited by hand
            record = read_json(path) if path.exists() else {}
            if all(isinstance(part, dict) for part in (record, *record.get("earlier", ()))):
                return dict(record)
        warn_once(f"{path} is ignored: it is damaged")
        return {}

    def evaluated_steps(self) -> list[int]:
        names = [path.stem[5:] for path in self.evaluations.glob("step_*.npz")]
        return sorted(int(name) for name in names if name.isdecimal())

    def remove_evaluations_after(self, step: int) -> None:
        """Removes the evaluations after the step at which a run resumes; -1 removes all of them."""
        if self.evaluations.is_dir():
            recover(self.evaluations)
        for later in self.evaluated_steps():
            if later > step:
                self.evaluation(later).unlink(missing_ok=True)
