"""Benchmark mode (`--enable_benchy`): how fast is the input alone, the step alone, and both together.

IO reads batches and throws them away; SYNTHETIC trains on one batch again and again; FULL trains on real batches;
NO-COMM, where several ranks exchange gradients, is SYNTHETIC without that exchange. All in samples/s of all ranks.
The settings are in benchy-conf.yaml, or the file that BENCHY_CONFIG_FILE names.
"""

from __future__ import annotations

import contextlib
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
from utils.data.loaders.prefetcher import Batch
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write
from utils.profiling.flops import counted, matmul_peak
from utils.progress import Progress
from utils.runs.logger import NullLogger
from utils.steps import Step

DEFAULT_SETTINGS = Path(__file__).parent.parent.parent / "benchy-conf.yaml"


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


def read_settings(world: World) -> Settings:
    """Of the file that BENCHY_CONFIG_FILE names, else the shipped one; BENCHY_OUTPUT overrides the output's name.

    Every rank calls it; UserError, too, where the first one could not write the output in the end.
    """
    settings = _read()
    with world.raise_together():
        if world.is_root:
            path = Path(settings.output)
            if path.is_dir() or settings.output.endswith("/"):
                raise UserError(f"cannot write {settings.output}: it is a directory; set BENCHY_OUTPUT to a file")
            if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
                raise UserError(f"cannot write {settings.output}: {path.parent} is no directory that can be written to")
    return settings


def _read() -> Settings:
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
    if not name.endswith(".json") and not os.path.isdir(name):
        name += ".json"
    return settings.model_copy(update={"output": name})


class Benchmark:
    """Measures with the objects a training would use; all ranks take part."""

    def __init__(
        self,
        *,
        step: Step,
        loader: Loader,
        world: World,
        logs: NullLogger,
        rate: float,
        global_batch_size: int,
        settings: Settings,
        dtype: torch.dtype = torch.float32,
        exchanges: bool = False,
        peak_seconds: float = 1.0,
    ) -> None:
        """`dtype` is what products are computed in; `exchanges` tells whether ranks send each other gradients."""
        self._step, self._loader, self._world, self._logs = step, loader, world, logs
        self._rate, self._samples, self._settings = rate, global_batch_size, settings
        self._dtype, self._exchanges, self._peak_seconds = dtype, exchanges, peak_seconds

    def run(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """All trials; logs the summary lines and writes the JSON file on rank 0."""
        peak = self._measure_peak()
        endless = self._endless()
        fixed = Batch(*(part.clone() for part in next(endless)))
        with counted(self._step.network) as flops:
            self._step.evaluate(*fixed)
        flops_per_sample = flops.training / len(fixed.inputs)
        settings = self._settings
        plan: dict[str, tuple[Trials, Callable[[], object]]] = {
            "IO": (settings.IO, lambda: next(endless)),
            "SYNTHETIC": (settings.SYNTHETIC, lambda: self._step(*fixed, self._rate)),
            "FULL": (settings.FULL, lambda: self._step(*next(endless), self._rate)),
        }
        if self._exchanges:  # last: it leaves each rank with parameters of its own
            plan["NO-COMM"] = plan["SYNTHETIC"]
        results: dict[str, Any] = {
            "provenance": provenance,
            "unit": "samples/s",
            "global_batch_size": self._samples,
            "ranks": self._world.size,
            "flops_per_sample": flops_per_sample,
            "matmul_peak": peak,
        }
        total = sum(trials.warmup_trials + trials.trials for trials, _ in plan.values())
        with Progress("benchmark", total, "trials", silent=not self._world.is_root) as progress:
            for name, (trials, action) in plan.items():
                apart = self._step.no_sync() if name == "NO-COMM" else contextlib.nullcontext()
                with apart:
                    rates = self._trials(name, trials, action, progress)
                results[name] = {**_summary(rates[trials.warmup_trials :]), "settings": trials.model_dump()}
                if name != "IO":
                    teraflops = results[name]["median"] * flops_per_sample / self._world.size / 1e12
                    results[name]["TFLOP/s a rank"] = teraflops
                    results[name]["share of matmul peak"] = teraflops / peak["TFLOP/s"]
        endless.close()
        for line in self._step.describe():
            self._logs.info(line)
        for name in plan:
            self._tell(name, results[name])
        if "NO-COMM" in plan:
            lost = 1 - results["SYNTHETIC"]["median"] / results["NO-COMM"]["median"]
            results["communication overhead"] = lost
            self._logs.info(f"BENCHY::SUMMARY::NO-COMM communication overhead: {100 * lost:.1f} % of SYNTHETIC's time")
        self._write(results)
        return results

    def _tell(self, name: str, result: dict[str, Any]) -> None:
        line = f"BENCHY::SUMMARY::{name}"
        mean, spread = result["mean"], result["stdev"]
        self._logs.info(f"{line} average trial throughput: {mean:.3f} +/- {spread:.3f}")
        text = f"median {result['median']:.3f} samples/s, range {result['min']:.3f} to {result['max']:.3f}"
        if "TFLOP/s a rank" in result:
            share = 100 * result["share of matmul peak"]
            text += f"; {result['TFLOP/s a rank']:.3g} TFLOP/s a rank, {share:.1f} % of the matmul peak"
        self._logs.info(f"{line} {text}")

    def _write(self, results: dict[str, Any]) -> None:
        path = self._settings.output
        with self._world.raise_together():
            if self._world.is_root:
                try:
                    with atomic_write([Path(path)]) as (partial,):
                        partial.write_text(json.dumps(results, indent=2) + "\n")
                except OSError as error:
                    raise UserError(f"cannot write {path}: {error.strerror}; set BENCHY_OUTPUT") from None
        self._logs.info(f"Benchmark results: {path}")

    def _measure_peak(self) -> dict[str, Any]:
        """TFLOP/s of a matrix product on each rank's device, of all ranks at once, and their mean."""
        self._world.barrier()
        peak = matmul_peak(self._world.device, self._dtype, self._peak_seconds) / 1e12
        peaks = self._world.gather_objects(peak)
        name = str(self._dtype).removeprefix("torch.")
        if self._world.device.type == "cuda" and name == "float32" and torch.backends.cuda.matmul.allow_tf32:
            name = "float32 as TF32"
        mean = statistics.fmean(peaks)
        self._logs.info(f"Matmul peak, {name}: {mean:.4g} TFLOP/s a rank")
        return {"dtype": name, "TFLOP/s": mean, "TFLOP/s of each rank": peaks}

    def _trials(self, name: str, trials: Trials, action: Callable[[], object], progress: Progress) -> list[float]:
        rates = []
        for number in range(trials.warmup_trials + trials.trials):
            rates.append(self._trial(action, trials.batches))
            kind = "warm-up, " if number < trials.warmup_trials else ""
            progress.advance(note=f"{name}: {kind}{rates[-1]:.1f} samples/s")
        return rates

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


def _summary(rates: list[float]) -> dict[str, Any]:
    return {
        "trials": rates,
        "mean": statistics.fmean(rates),
        "stdev": statistics.pstdev(rates),
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
    }
