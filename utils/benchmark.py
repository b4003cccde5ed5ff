"""Benchmark mode (`--enable_benchy`): how fast is the input alone, the step alone, and both together.

IO reads batches and throws them away; SYNTHETIC trains on one batch again and again; FULL trains on real batches.
The settings are in benchy-conf.yaml, or the file that BENCHY_CONFIG_FILE names.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError

from utils.config import Section, parse_value
from utils.data import Loader
from utils.data.feeder import Batch
from utils.distributed import World
from utils.errors import UserError
from utils.logs import SilentLogs
from utils.steps import Step

DEFAULT_SETTINGS = Path(__file__).parent.parent / "benchy-conf.yaml"


class Trials(Section):
    """`warmup_trials` come first and do not count."""

    batches: Annotated[int, Field(ge=1)] = 30
    trials: Annotated[int, Field(ge=1)] = 5
    warmup_trials: Annotated[int, Field(ge=0)] = 1


class Settings(Section):
    """What benchy-conf.yaml may hold."""

    IO: Trials = Trials()
    SYNTHETIC: Trials = Trials()
    FULL: Trials = Trials()
    output: str = "benchy.json"


def read_settings() -> Settings:
    """Of the file that BENCHY_CONFIG_FILE names, else the shipped one; BENCHY_OUTPUT overrides the output's name."""
    path = Path(os.environ.get("BENCHY_CONFIG_FILE", DEFAULT_SETTINGS))
    try:
        values = parse_value(path.read_text(encoding="utf-8"), str(path)) or {}
        if not isinstance(values, dict):
            raise UserError(f"{path} must map IO, SYNTHETIC, FULL and output to their settings")
        settings = Settings.model_validate(values)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read BENCHY_CONFIG_FILE {path}: {reason}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    name = os.environ.get("BENCHY_OUTPUT")
    if not name:
        return settings
    return settings.model_copy(update={"output": name if name.endswith(".json") else f"{name}.json"})


class Benchmark:
    """Measures with the objects a training would use; all ranks take part."""

    def __init__(
        self,
        *,
        step: Step,
        loader: Loader,
        world: World,
        logs: SilentLogs,
        rate: float,
        global_batch_size: int,
        settings: Settings,
    ) -> None:
        self._step, self._loader, self._world, self._logs = step, loader, world, logs
        self._rate, self._samples, self._settings = rate, global_batch_size, settings

    def run(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """All trials; logs the summary lines and writes the JSON file on rank 0."""
        endless = self._endless()
        fixed = Batch(*(part.clone() for part in next(endless)))
        actions: dict[str, Callable[[], object]] = {
            "IO": lambda: next(endless),
            "SYNTHETIC": lambda: self._step(*fixed, self._rate),
            "FULL": lambda: self._step(*next(endless), self._rate),
        }
        results: dict[str, Any] = {"provenance": provenance, "global_batch_size": self._samples, "unit": "samples/s"}
        for name, action in actions.items():
            trials: Trials = getattr(self._settings, name)
            rates = [self._trial(action, trials.batches) for _ in range(trials.warmup_trials + trials.trials)]
            counted = rates[trials.warmup_trials :]
            results[name] = {
                "trials": counted,
                "mean": statistics.fmean(counted),
                "stdev": statistics.pstdev(counted),
                "settings": trials.model_dump(),
            }
        endless.close()
        for name in actions:
            mean, spread = results[name]["mean"], results[name]["stdev"]
            self._logs.line(f"BENCHY::SUMMARY::{name} average trial throughput: {mean:.3f} +/- {spread:.3f}")
        with self._world.agreed():
            if self._world.is_root:
                try:
                    Path(self._settings.output).write_text(json.dumps(results, indent=2) + "\n")
                except OSError as error:
                    raise UserError(
                        f"cannot write {self._settings.output}: {error.strerror}; set BENCHY_OUTPUT"
                    ) from None
        self._logs.line(f"Benchmark results: {self._settings.output}")
        return results

    def _endless(self) -> Generator[Batch, None, None]:
        epoch = 0
        while True:
            yield from self._loader.epoch(epoch)
            epoch += 1

    def _trial(self, action: Callable[[], object], batches: int) -> float:
        """Samples/s of all ranks; the slowest rank's time counts."""
        self._world.barrier()
        self._wait_for_device()
        started = time.perf_counter()
        for _ in range(batches):
            action()
        self._wait_for_device()
        seconds = torch.tensor(time.perf_counter() - started, device=self._world.device)
        return batches * self._samples / float(self._world.gather(seconds).max())

    def _wait_for_device(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
