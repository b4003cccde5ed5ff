"""A run's records: log lines, TensorBoard, metrics.jsonl, provenance. Rank 0 writes; the others hold a silent twin."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

from utils import config as configs
from utils.config import Config
from utils.distributed import World, hostnames
from utils.errors import UserError

LINE_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _StderrHandler(logging.StreamHandler):
    """Looks sys.stderr up at each line, so that a live display can print the line above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


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


class SilentLogs:
    """Records nothing: for ranks other than 0."""

    def line(self, text: str) -> None:
        pass

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        pass

    def figure(self, name: str, figure: Any, step: int) -> None:
        pass

    def hparams(self, config: Config, results: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class RunLogs(SilentLogs):
    """out.log, logs/ (TensorBoard) and metrics.jsonl in the run directory.

    The last two replace an earlier training's: they are opened with the first scalar, so that a benchmark, or a run
    that fails before it trains, leaves those of an earlier training alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = _lock(directory)
        self._handler = logging.FileHandler(directory / "out.log")
        self._handler.setFormatter(logging.Formatter(LINE_FORMAT))
        logging.getLogger().addHandler(self._handler)
        self._started = time.time()

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: curves of an earlier run in the same directory are hidden, not mixed with these.
        return SummaryWriter(str(self._directory / "logs"), purge_step=0)

    @cached_property
    def _metrics(self) -> IO[str]:
        return open(self._directory / "metrics.jsonl", "w", buffering=1, encoding="utf-8")

    def line(self, text: str) -> None:
        """One log line."""
        logging.getLogger().info(text)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **values}
        self._metrics.write(json.dumps(record) + "\n")

    def figure(self, name: str, figure: Any, step: int) -> None:
        """A matplotlib figure, into TensorBoard."""
        self._writer.add_figure(name, figure, step)

    def hparams(self, config: Config, results: Mapping[str, float]) -> None:
        """The config beside the final results, for TensorBoard's HPARAMS page."""
        from torch.utils.tensorboard.summary import hparams

        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in configs.flatten(config).items()
        }
        # add_hparams would open a second run beside this one: the summaries go into this one.
        file_writer = self._writer._get_file_writer()
        for summary in hparams(plain, dict(results)):
            file_writer.add_summary(summary)
        for name, value in results.items():
            self._writer.add_scalar(name, value)

    def close(self) -> None:
        for opened in ("_writer", "_metrics"):
            if opened in vars(self):  # a cached property that was never asked for has opened nothing
                getattr(self, opened).close()
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
        self._lock.close()


def _lock(directory: Path) -> IO[str]:
    """Keeps a second run out of the directory for as long as the returned file is open; ends with the process."""
    file = open(directory / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"another run is writing to {directory}; give this one a --run_num of its own") from None
    except OSError:
        pass  # some parallel file systems have no locks
    return file


def run_directory(config: Config, name: str, run_num: str, world_size: int) -> Path:
    """<expdir>/<config>/<ranks>GPU/<run_num>, as the original lays them out."""
    return Path(config.expdir) / name / f"{world_size}GPU" / run_num


def open_run(config: Config, name: str, directory: Path, world: World) -> SilentLogs:
    """Makes the run directory with config.yaml and provenance.json, and opens the logs; UserError where it cannot."""
    record = provenance(world)
    logs = SilentLogs()
    with world.agreed():
        if world.is_root:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                logs = RunLogs(directory)
                # The global batch says it all: on another number of ranks, the local one would change it.
                resolved = config.model_copy(update={"local_batch_size": None})
                (directory / "config.yaml").write_text(configs.to_yaml(resolved, name))
                (directory / "provenance.json").write_text(json.dumps(record, indent=2) + "\n")
            except OSError as error:
                raise UserError(
                    f"cannot write to the run directory {directory}: {error.strerror or error}; "
                    f"choose another with --set expdir=DIR"
                ) from None
    return logs


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
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()
