"""The directory of a run: its lock, config.yaml and provenance.json."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.config import Config
from utils.distributed.devices import uses_gpus
from utils.distributed.launch import restarted
from utils.distributed.locks import LockedFile, is_locked, open_locked
from utils.distributed.world import World
from utils.files import atomic_write
from utils.provenance import provenance, read_provenance
from utils.runs.choice import LOCK, Choice, is_free, run_directory_errors
from utils.runs.data_record import data_changes, data_record
from utils.runs.logger import FROM_SCRATCH, ConsoleLogger, LoggedRun, Logger, NullLogger, Resumed, RunLogger
from utils.training.checkpoint import FOLDER, saved_steps
from utils.training.loggers import build_loggers

CONFIG_LINES, LONGEST_VALUE = 15, 80  # of the configuration in the log; a value's length in characters
RESTART_SECONDS = 60.0  # for which a restarted job waits until the processes of its predecessor have ended


def run_directory(config: Config, name: str, run_num: str, ranks: int) -> Path:
    """The first directory of a run number: <expdir>/<config>/<ranks>GPU/<run_num>, as in the original.

    On CPUs <ranks>ranks takes the place of <ranks>GPU.
    """
    return Path(config.expdir) / name / f"{ranks}{'GPU' if uses_gpus(config.device) else 'ranks'}" / run_num


class RunDirectory:
    """A run directory for the duration of a `with` block, in which rank 0 holds its lock; every rank enters the block.

    The block gets rank 0's choice, on other ranks only its `path` and `resume`. Nothing in the directory may be changed
    without the lock. It is created if it does not exist, and removed again if nothing has been written to it, so that
    bad input leaves no directory.
    """

    def __init__(self, choose: Callable[[], Choice], world: World) -> None:
        self._choose, self._world = choose, world
        self._choice: Choice | None = None
        self._lock: LockedFile | None = None
        self._created: list[Path] = []  # the directory and its parents, innermost first

    def __enter__(self) -> Choice:
        with self._world.raise_together():
            if self._world.is_root:
                try:
                    self._claim()
                except BaseException:
                    self._leave()
                    raise
        path, resume = self._world.gather_json(self._choice and [str(self._choice.path), self._choice.resume])[0]
        self._world.heartbeat.folder = Path(path)
        return self._choice or Choice(Path(path), resume)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(OSError):
            if isinstance(error, KeyboardInterrupt) and self._choice and saved_steps(self._choice.path / FOLDER):
                command = "the same command" + (" without --resume=no" if self._choice.resume == "no" else "")
                error.args = (f"the last checkpoint is kept, and {command} continues from it (kill -TERM saves first)",)
        self._leave()

    def _claim(self) -> None:
        """Chooses again under the lock, since the process that held it may have finished or begun the run."""
        while True:
            self._choice = choice = self._choose()
            with run_directory_errors(choice.path):
                if choice.newest is not None and is_locked(choice.newest / LOCK):
                    _lock(choice.newest).close()
                self._created = [path for path in (choice.path, *choice.path.parents) if not path.exists()]
                choice.path.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(choice.path)
            if self._choose() == choice:
                break
            self._leave()
        for warning in choice.warnings:
            logging.getLogger().warning(warning)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock is not None and self._created and is_free(self._created[0]):
                (self._created[0] / LOCK).unlink()
        if self._lock is not None:
            self._lock.close()
        with contextlib.suppress(OSError):
            for path in self._created:
                path.rmdir()  # fails unless it is empty
        self._lock, self._created = None, []


def _lock(directory: Path) -> LockedFile:
    fault = f"another run is writing to {directory}; give this one a --run_num of its own"
    return open_locked(directory / LOCK, fault, RESTART_SECONDS if restarted() else 0.0)


def describe_config(config: Config, name: str, given: Collection[str]) -> str:
    """The keys that differ from the defaults, in at most 15 lines; first those `given` on the command line."""
    changed, defaults = configs.differences(config), configs.flatten(Config())
    if "local_batch_size" not in given:
        changed.pop("local_batch_size", None)  # it follows from the global batch size and the number of ranks
    keys = sorted(changed, key=lambda key: not any(f"{key}.".startswith(f"{each}.") for each in given))
    shown = keys if len(keys) < CONFIG_LINES else keys[: CONFIG_LINES - 2]
    lines = [f"  {key}: {_value(changed[key])} (default {_value(defaults[key])})" for key in shown]
    if len(shown) < len(keys):
        where = "" if config.enable_benchy else ", in config.yaml"  # a benchmark writes none
        lines.append(f"  and {len(keys) - len(shown)} more{where}")
    title = "keys that differ from the defaults:" if keys else "all keys have their default values"
    return "\n".join([f"Configuration {name}, {title}", *lines])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def open_run(config: Config, name: str, chosen: Choice, world: World, resumed: Resumed | None = None) -> Logger:
    """Writes config.yaml and provenance.json to the run directory, and returns this rank's logger.

    If nothing is left to train, the files of the process that trained it stay. A benchmark writes nothing. Every rank
    calls it; raises UserError if the directory cannot be written.
    """
    record, directory = {**provenance(world), **chosen.record}, chosen.path
    with world.raise_together():
        if not world.is_root:
            return NullLogger()
        logging.getLogger().debug("Configuration %s:\n%s", name, configs.to_yaml(config, name))
        if config.enable_benchy:
            return ConsoleLogger()
        with run_directory_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            changes = []
            if resumed is None or not resumed.complete:
                changes = _write_records(config, name, directory, record, resumed is not None)
            run = LoggedRun(directory, resumed or FROM_SCRATCH, config.model_dump(), record)
            logger = RunLogger(run, build_loggers(config.loggers, run))
        for line in changes:
            logger.warning(line)
        return logger


def _write_records(config: Config, name: str, directory: Path, record: dict[str, Any], resumes: bool) -> list[str]:
    """Writes both files; returns a line for each data file that differs from that of the training that resumes."""
    # Only the global batch: with another number of ranks the local one would change it.
    portable = config.model_copy(update={"local_batch_size": None})
    path = directory / "provenance.json"
    record["data"] = data_record(config)
    if resumes:
        record["earlier"] = _earlier(path)
        if record["earlier"]:
            record["origin"] = record["earlier"][-1].get("origin")
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
