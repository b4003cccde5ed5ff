"""The directory of a run: its place, its lock, config.yaml and provenance.json."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.config import Config
from utils.distributed.launch import restarted
from utils.distributed.locks import LockedFile, open_locked
from utils.distributed.world import World
from utils.errors import os_errors_for_users
from utils.files import atomic_write
from utils.runs.data_record import data_changes, data_record
from utils.runs.logger import Logger, NullLogger, RunLogger
from utils.runs.provenance import provenance, read_provenance

LOCK = ".lock"
RESTART_SECONDS = 60.0  # for which a restarted job waits until the processes of its predecessor have ended


def run_directory(config: Config, name: str, run_num: str, world_size: int) -> Path:
    """<expdir>/<config>/<ranks>GPU/<run_num>, as in the original."""
    return Path(config.expdir) / name / f"{world_size}GPU" / run_num


class RunDirectory:
    """A run directory for the duration of a `with` block, in which rank 0 holds its lock; every rank enters the block.

    Nothing in the directory may be changed without the lock. It is created if it does not exist, and removed again if
    nothing has been written to it, so that bad input leaves no directory.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self._world = path, world
        self._lock: LockedFile | None = None
        self._created: list[Path] = []  # the directory and its parents, innermost first

    def __enter__(self) -> RunDirectory:
        with self._world.raise_together():
            if self._world.is_root:
                try:
                    self._claim()
                except BaseException:
                    self._leave()
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _claim(self) -> None:
        fault = f"another run is writing to {self.path}; give this one a --run_num of its own"
        with _os_errors(self.path):
            self._created = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(self.path / LOCK, fault, RESTART_SECONDS if restarted() else 0.0)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            if (
                self._lock is not None
                and self.path in self._created
                and set(os.listdir(self.path)) <= {LOCK, f"{LOCK}.owner"}
            ):
                (self.path / LOCK).unlink()
        if self._lock is not None:
            self._lock.close()
        with contextlib.suppress(OSError):
            for path in self._created:
                path.rmdir()  # fails unless it is empty


def open_run(
    config: Config, name: str, directory: Path, world: World, resumed: int | None = None, complete: bool = False
) -> Logger:
    """Writes config.yaml and provenance.json to the run directory, and returns this rank's logger.

    `resumed` is the step after which the training resumes. If the training is `complete`, the files of the process that
    trained it stay. Every rank calls it; raises UserError if the directory cannot be written.
    """
    record = provenance(world)
    with world.raise_together():
        if not world.is_root:
            return NullLogger()
        with _os_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            changes = []
            if not (complete and (directory / "provenance.json").exists()):  # missing after --resume of another run
                changes = _write_records(config, name, directory, record, resumed)
            logger = RunLogger(directory, resumed)
        for line in changes:
            logger.warning(line)
        return logger


def _write_records(
    config: Config, name: str, directory: Path, record: dict[str, Any], resumed: int | None
) -> list[str]:
    """Writes both files; returns a line for each data file that differs from that of the training that resumes."""
    # Only the global batch: with another number of ranks the local one would change it.
    portable = config.model_copy(update={"local_batch_size": None})
    path = directory / "provenance.json"
    record["data"] = data_record(config)
    if resumed is not None:
        record["earlier"] = _earlier(path)
    with atomic_write([directory / "config.yaml", path]) as (config_file, record_file):
        config_file.write_text(configs.to_yaml(portable, name))
        record_file.write_text(json.dumps(record, indent=2) + "\n")
    return data_changes(record["earlier"][-1].get("data"), record["data"]) if record.get("earlier") else []


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The records of the processes that trained the run before this one, oldest first."""
    if not os.path.lexists(path):  # the first start with --resume of another run
        return []
    before = read_provenance(path)
    earlier = before.pop("earlier", [])
    records = [*(earlier if isinstance(earlier, list) else []), before]
    return [record for record in records if isinstance(record, dict) and record]


def _os_errors(directory: Path) -> contextlib.AbstractContextManager[None]:
    return os_errors_for_users(f"cannot write to the run directory {directory}", "choose another with --set expdir=DIR")
