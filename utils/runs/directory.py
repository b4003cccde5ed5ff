"""The directory of a run: its place, its lock, config.yaml and provenance.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from utils import config as configs
from utils.config import Config
from utils.distributed.launch import restarted
from utils.distributed.world import World
from utils.errors import os_errors_for_users
from utils.files import open_locked
from utils.runs.logger import Logger, NullLogger, RunLogger
from utils.runs.provenance import provenance

RESTART_SECONDS = 60.0


def run_directory(config: Config, name: str, run_num: str, world_size: int) -> Path:
    """<expdir>/<config>/<ranks>GPU/<run_num>, as in the original."""
    return Path(config.expdir) / name / f"{world_size}GPU" / run_num


def open_run(
    config: Config, name: str, directory: Path, world: World, resumed: int | None = None, complete: bool = False
) -> Logger:
    """Creates the run directory with config.yaml and provenance.json, and returns this rank's logger.

    `resumed` is the step after which the training resumes. If the training is `complete`, the files of the process that
    trained it stay. Every rank calls it; raises UserError if the directory cannot be written.
    """
    record = provenance(world)
    with world.raise_together():
        if not world.is_root:
            return NullLogger()
        remedy = "choose another with --set expdir=DIR"
        with os_errors_for_users(f"cannot write to the run directory {directory}", remedy):
            directory.mkdir(parents=True, exist_ok=True)
            logger = RunLogger(directory, lock(directory), resumed)
            if not (complete and (directory / "provenance.json").exists()):  # missing after --resume of another run
                _write_records(config, name, directory, record, resumed)
        return logger


def _write_records(config: Config, name: str, directory: Path, record: dict[str, Any], resumed: int | None) -> None:
    # Only the global batch: with another number of ranks the local one would change it.
    portable = config.model_copy(update={"local_batch_size": None})
    (directory / "config.yaml").write_text(configs.to_yaml(portable, name))
    path = directory / "provenance.json"
    if resumed is not None:
        record["earlier"] = _earlier(path)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The records of the processes that trained the run before this one, oldest first."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        return [*before.pop("earlier", []), before]
    except (OSError, ValueError, AttributeError):
        return []


def lock(directory: Path) -> IO[bytes]:
    """Locks the directory against a second run until the returned file is closed or the process ends."""
    fault = f"another run is writing to {directory}; give this one a --run_num of its own"
    # Processes of a job that was restarted may take a moment to end.
    return open_locked(directory / ".lock", fault, RESTART_SECONDS if restarted() else 0.0)
