"""A run's records: log lines, TensorBoard, metrics.jsonl, provenance. Rank 0 writes; the others hold a silent twin."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

from utils import config as configs
from utils.config import Config
from utils.distributed.world import World, hostnames, restarted
from utils.errors import UserError
from utils.files import atomic_write

RESTART_SECONDS = 60.0
LINE_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _StderrHandler(logging.StreamHandler):
    """Looks sys.stderr up at each line, so that a live display can print the line above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _LogFile(logging.FileHandler):
    """A disk that takes no line costs that line, not a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def configure_logging(is_root: bool) -> None:
    """Log lines on stderr, from rank 0; warnings and worse from every rank."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(LINE_FORMAT))
    root.addHandler(handler)
    root.setLevel(logging.INFO if is_root else logging.WARNING)


class NullLogger:
    """Records nothing: for ranks other than 0."""

    def info(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        pass

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def figure(self, name: str, figure: Any, step: int) -> None:
        pass

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class RunLogger(NullLogger):
    """out.log, logs/ (TensorBoard) and metrics.jsonl in the run directory.

    The last two go on after step `resumed`, whatever an earlier process had recorded beyond it; with None they replace
    an earlier training's. They are opened with the first scalar, so that a benchmark, or a run that fails before it
    trains, leaves those of an earlier training alone.
    """

    def __init__(self, directory: Path, resumed: int | None = None) -> None:
        self._directory = directory
        self._keep = -1 if resumed is None else resumed
        self._lock = lock(directory)
        self._handler = _LogFile(directory / "out.log")
        self._handler.setFormatter(logging.Formatter(LINE_FORMAT))
        logging.getLogger().addHandler(self._handler)
        self._started = time.time()
        self._failed = False

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._directory / "logs"
        _outlive_last_second(folder)
        # purge_step: points of an earlier run from there on are hidden, not mixed with these.
        return SummaryWriter(str(folder), purge_step=self._keep + 1)

    @cached_property
    def _metrics(self) -> IO[str]:
        path = self._directory / "metrics.jsonl"
        kept = [line for line in _lines(path) if line.endswith("\n") and _step(line) <= self._keep]
        with atomic_write([path]) as (partial,):
            partial.write_text("".join(kept), encoding="utf-8")
        return open(path, "a", buffering=1, encoding="utf-8")

    def info(self, text: str) -> None:
        """One log line."""
        logging.getLogger().info(text)

    def warning(self, text: str) -> None:
        """One log line that should not be missed."""
        logging.getLogger().warning(text)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Those that are no numbers (NaN, infinity) are left out: JSON has none."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **finite}
        with self._outlasting_the_disk():
            self._metrics.write(json.dumps(record) + "\n")
        with self._outlasting_the_disk():  # by itself: TensorBoard's writer refuses all that comes after a fault
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """A process that is killed after this loses no point before it."""
        with self._outlasting_the_disk():
            if "_writer" in vars(self):
                self._writer.flush()

    @contextlib.contextmanager
    def _outlasting_the_disk(self) -> Iterator[None]:
        """No training ends for want of its curves: one warning, and on without those points."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self.warning(f"Cannot record scalars in {self._directory}: {error.strerror or error}; training goes on")
            self._failed = True

    def figure(self, name: str, figure: Any, step: int) -> None:
        """A matplotlib figure, into TensorBoard."""
        with self._outlasting_the_disk():
            self._writer.add_figure(name, figure, step)

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        """The config and the final results, for TensorBoard's HPARAMS page.

        With `step` one after the last, a run that is resumed replaces them instead of adding to them.
        """
        from torch.utils.tensorboard.summary import hparams

        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in configs.flatten(config).items()
        }
        with self._outlasting_the_disk():
            # add_hparams would open a second run beside this one: the summaries go into this one.
            file_writer = self._writer._get_file_writer()
            for summary in hparams(plain, dict(results)):
                file_writer.add_summary(summary)
            for name, value in results.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        for opened in ("_writer", "_metrics"):
            if opened in vars(self):  # a cached property that was never asked for has opened nothing
                with self._outlasting_the_disk():
                    getattr(self, opened).close()
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
        self._lock.close()


def _outlive_last_second(folder: Path) -> None:
    """TensorBoard reads a run's files in the order of their names, which tell the second: the new one comes last."""
    seconds = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in folder.glob("events.*")]
    last = max((int(found[1]) for found in seconds if found), default=0)
    time.sleep(min(max(0.0, last + 1 - time.time()), 2.0))  # a clock far behind another node's is not waited for


def read_records(path: Path) -> list[dict[str, Any]]:
    """What can be read of a metrics.jsonl: a full disk may have cut lines."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _step(line: str) -> float:
    """Of a record; infinite for a line that a killed process left half written."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def lock(directory: Path) -> IO[str]:
    """Keeps a second run out of the directory for as long as the returned file is open; ends with the process."""
    file = open(directory / ".lock", "w")  # noqa: SIM115
    # What is left of a job before its restart may take a moment to end.
    deadline = time.monotonic() + (RESTART_SECONDS if restarted() else 0)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                line = f"another run is writing to {directory}; give this one a --run_num of its own"
                raise UserError(line) from None
            time.sleep(0.5)
        except OSError:
            return file  # some parallel file systems have no locks
        else:
            return file


def run_directory(config: Config, name: str, run_num: str, world_size: int) -> Path:
    """<expdir>/<config>/<ranks>GPU/<run_num>, as the original lays them out."""
    return Path(config.expdir) / name / f"{world_size}GPU" / run_num


def open_run(
    config: Config, name: str, directory: Path, world: World, resumed: int | None = None, complete: bool = False
) -> NullLogger:
    """Makes the run directory with config.yaml and provenance.json, and opens the logs; UserError where it cannot.

    `resumed`: the step after which the training resumes; `complete`: nothing is left to train, so the files of the
    process that trained stay.
    """
    record = provenance(world)
    logs = NullLogger()
    with world.raise_together():
        if world.is_root:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                logs = RunLogger(directory, resumed)
                if complete and (directory / "provenance.json").exists():  # not so where --resume named another run
                    return logs
                # The global batch says it all: on another number of ranks, the local one would change it.
                resolved = config.model_copy(update={"local_batch_size": None})
                (directory / "config.yaml").write_text(configs.to_yaml(resolved, name))
                path = directory / "provenance.json"
                if resumed is not None:
                    record["earlier"] = _earlier(path)
                path.write_text(json.dumps(record, indent=2) + "\n")
            except OSError as error:
                raise UserError(
                    f"cannot write to the run directory {directory}: {error.strerror or error}; "
                    f"choose another with --set expdir=DIR"
                ) from None
    return logs


def _earlier(path: Path) -> list[dict[str, Any]]:
    """What made the parts of a training before this one, oldest first."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        return [*before.pop("earlier", []), before]
    except (OSError, ValueError, AttributeError):
        return []


def provenance(world: World) -> dict[str, Any]:
    """What made a result: command, commit, versions, machines. Every rank calls it."""
    hosts = hostnames(world)
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": _git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hostnames": hosts,
        "world_size": world.size,
        "launcher": world.launch.launcher,
        "device": device_name(world.device),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of python, torch and what it stands on."""
    import h5py
    import numpy as np

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def _git_commit() -> str:
    """The checkout's commit, with '-dirty' where files differ; 'unknown' outside a checkout."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent.parent),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty",
        "--exclude=*",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()
