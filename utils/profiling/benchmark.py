"""Benchmark mode (`--enable_benchy`): the throughput of the loader, of the step, and of both together.

IO reads batches and discards them. SYNTHETIC trains on the same batch repeatedly. FULL trains on loaded batches.
NO-COMM, if several ranks exchange gradients, is SYNTHETIC without that exchange. All are in samples/s over all ranks.
The settings are in benchy-conf.yaml, or in the file named by the environment variable BENCHY_CONFIG_FILE.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from utils.cli import Options
from utils.config import Config, describe_config, parse_value, validate_section
from utils.config.sections import Section
from utils.data import Batch, Loader, open_loaders
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write
from utils.optim.schedules import build_schedule
from utils.profiling.memory import reserved_bytes
from utils.profiling.timing import matmul_tflops, peak_caveat, summary, synchronize
from utils.progress import Progress
from utils.provenance import provenance
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.steps.flops import training_flops

log = logging.getLogger(__name__)

DEFAULT_SETTINGS = Path(__file__).parents[2] / "benchy-conf.yaml"
PEAK_SECONDS = 1.0  # duration of the measurement of the matmul peak


class Trials(Section):
    """The size of one measurement. Warm-up trials run first and are discarded."""

    batches: Annotated[int, Field(ge=1)] = 30
    trials: Annotated[int, Field(ge=1)] = 5
    warmup_trials: Annotated[int, Field(ge=0)] = 1


Plan = dict[str, tuple[Trials, Callable[[], object]]]  # what is measured, by name


class Settings(Section):
    """The keys of benchy-conf.yaml."""

    IO: Trials = Trials()
    SYNTHETIC: Trials = Trials()
    FULL: Trials = Trials()
    output: str = "benchy.json"


def read_settings(world: World) -> Settings:
    """The settings of the file BENCHY_CONFIG_FILE, or of the shipped one; BENCHY_OUTPUT replaces the output's name.

    Every rank calls it. Raises UserError if the settings are invalid or rank 0 could not write the output later.
    """
    path = Path(os.environ.get("BENCHY_CONFIG_FILE", DEFAULT_SETTINGS))
    settings = validate_section(Settings, parse_value(path.read_text(encoding="utf-8"), str(path)) or {}, str(path))
    name = os.environ.get("BENCHY_OUTPUT") or settings.output
    output = Path(name if name.endswith(".json") else f"{name}.json")
    with world.raise_together():
        if world.is_root:
            if output.is_dir():
                raise UserError(f"cannot write {name}: it is a directory; set BENCHY_OUTPUT to a file")
            if not output.parent.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {name}: {output.parent} is not a writable directory; set BENCHY_OUTPUT")
    return settings.model_copy(update={"output": str(output)})


class Benchmark:
    """Measures the step and the loader of a training run. All ranks take part."""

    def __init__(self, config: Config, step: EagerStep, loader: Loader, world: World, settings: Settings) -> None:
        self._step, self._loader, self._world = step, loader, world
        self._settings, self._batch_size, self._lr = settings, config.global_batch_size, build_schedule(config).peak
        self._dtype = getattr(torch, config.precision) if config.enable_amp else torch.float32  # of matrix products
        self._exchanges_gradients = world.size > 1 and not config.noddp

    def run(self) -> dict[str, Any]:
        """Runs all trials, logs the summary lines and writes the JSON file on rank 0; returns its content."""
        peak = self._measure_peak()
        batches = self._batches()
        fixed = Batch(*(part.clone() for part in next(batches)))
        settings, lr = self._settings, self._lr
        plan: Plan = {
            "IO": (settings.IO, lambda: next(batches)),
            "SYNTHETIC": (settings.SYNTHETIC, lambda: self._step(*fixed, lr)),
            "FULL": (settings.FULL, lambda: self._step(*next(batches), lr)),
        }
        if self._exchanges_gradients:  # last, because the ranks' parameters differ afterward
            plan["NO-COMM"] = plan["SYNTHETIC"]
        results: dict[str, Any] = {
            "provenance": provenance(self._world),
            "unit": "samples/s",
            "global_batch_size": self._batch_size,
            "ranks": self._world.size,
            "flops_per_sample": training_flops(self._step.network, fixed.inputs),
            "matmul_peak": peak,
        }
        results |= self._measure(plan, results["flops_per_sample"], peak["TFLOP/s"])
        batches.close()
        if "NO-COMM" in plan:
            results["communication overhead"] = 1 - results["SYNTHETIC"]["median"] / results["NO-COMM"]["median"]
        self._log(results, list(plan))
        self._write(results)
        return results

    def _measure(self, plan: Plan, flops_per_sample: float, peak: float) -> dict[str, Any]:
        """The result of each measurement of the plan."""
        results: dict[str, Any] = {}
        total = sum(trials.warmup_trials + trials.trials for trials, _ in plan.values())
        with Progress("benchmark", total, "trials") as progress:
            for name, (trials, action) in plan.items():
                exchange = self._step.no_sync() if name == "NO-COMM" else contextlib.nullcontext()
                with exchange:
                    rates = self._trials(name, trials, action, progress)
                moments = {"mean": statistics.fmean(rates), "stdev": statistics.pstdev(rates)}
                results[name] = {**summary(rates), **moments, "settings": trials.model_dump()}
                if name != "IO":
                    teraflops = results[name]["median"] * flops_per_sample / self._world.size / 1e12
                    results[name]["TFLOP/s per rank"] = teraflops
                    results[name]["share of matmul peak"] = teraflops / peak
        return results

    def _trials(self, name: str, trials: Trials, action: Callable[[], object], progress: Progress) -> list[float]:
        """Samples/s of each trial, without the warm-up trials."""
        rates = []
        for number in range(trials.warmup_trials + trials.trials):
            rates.append(self._trial(action, trials.batches))
            kind = "warm-up, " if number < trials.warmup_trials else ""
            progress.advance(note=f"{name}: {kind}{rates[-1]:.1f} samples/s")
        return rates[trials.warmup_trials :]

    def _trial(self, action: Callable[[], object], batches: int) -> float:
        """Samples/s over all ranks, by the time of the slowest rank."""
        self._world.barrier()
        synchronize(self._world.device)
        started = time.perf_counter()
        for _ in range(batches):
            action()
        synchronize(self._world.device)
        seconds = torch.tensor(time.perf_counter() - started, device=self._world.device)
        return batches * self._batch_size / float(self._world.gather(seconds).max())

    def _batches(self) -> Generator[Batch, None, None]:
        """The batches of one epoch after another, without end."""
        for epoch in itertools.count():
            yield from self._loader.epoch(epoch)

    def _measure_peak(self) -> dict[str, Any]:
        """TFLOP/s of a matrix product, measured on all ranks at the same time, and the mean over the ranks."""
        self._world.barrier()
        # The best of many trials: other programs on the machine only slow it down.
        best = max(matmul_tflops(self._world.device, self._dtype, PEAK_SECONDS))
        peaks = self._world.gather_json(best)
        name = str(self._dtype).removeprefix("torch.")
        if self._world.device.type == "cuda" and name == "float32" and torch.backends.cuda.matmul.allow_tf32:
            name = "float32 as TF32"
        mean = statistics.fmean(peaks)
        log.info(f"Matmul peak, {name}: {mean:.4g} TFLOP/s per rank")
        return {"dtype": name, "TFLOP/s": mean, "TFLOP/s of each rank": peaks}

    def _log(self, results: dict[str, Any], names: list[str]) -> None:
        for line in self._step.describe():
            log.info(line)
        for name in names:
            line, result = f"BENCHY::SUMMARY::{name}", results[name]
            log.info(f"{line} average trial throughput: {result['mean']:.3f} +/- {result['stdev']:.3f}")
            text = f"median {result['median']:.3f} samples/s, range {result['min']:.3f} to {result['max']:.3f}"
            if "TFLOP/s per rank" in result:
                share, teraflops = result["share of matmul peak"], result["TFLOP/s per rank"]
                text += f"; {teraflops:.3g} TFLOP/s per rank, {100 * share:.1f} % of the matmul peak"
                text += f" ({peak_caveat(share)})" if share > 1 else ""
            log.info(f"{line} {text}")
        if "NO-COMM" in names:
            lost = 100 * results["communication overhead"]
            log.info(f"BENCHY::SUMMARY::NO-COMM communication overhead: {lost:.1f} % of SYNTHETIC's time")

    def _write(self, results: dict[str, Any]) -> None:
        path = self._settings.output
        with self._world.raise_together():
            if self._world.is_root:
                with atomic_write([Path(path)]) as (partial,):
                    partial.write_text(json.dumps(results, indent=2) + "\n")
        log.info(f"Benchmark results: {path}")


def run(options: Options, config: Config, world: World, step_class: type[EagerStep]) -> None:
    """Measures the step and the training loader. Every rank calls it."""
    settings, modules, reserve = read_settings(world), build.model(config), reserved_bytes(config, world)
    with open_loaders(config, world, reserve) as loaders, build.step(config, world, modules, step_class) as step:
        log.info(describe_config(config, options.config))
        build.log_settings(config, step, world)
        Benchmark(config, step, loaders.train, world, settings).run()
    log.info("DONE ---- rank %d", world.rank)
