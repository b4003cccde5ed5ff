"""Benchmark mode (`--enable_benchy`; docs/performance.md): the throughput of loader, step, and both together."""

import contextlib
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasChoices, Field

from utils.cli import Options
from utils.config import Config, describe_config, parse_value, validate_section
from utils.config.sections import Section
from utils.data.loaders import Batch
from utils.distributed.devices import synchronize
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, to_json
from utils.optim.schedules import Schedule
from utils.profiling.profiler import nsys_capture
from utils.progress import Progress
from utils.run.provenance import provenance
from utils.steps import build
from utils.steps.build import Parts
from utils.steps.eager import EagerStep
from utils.volumes.opened import Volumes

log = logging.getLogger(__name__)

DEFAULT_SETTINGS = Path(__file__).parents[2] / "benchy-conf.yaml"
# Settings of the tutorial that have no counterpart here.
WITHOUT_EFFECT = ("report_freq", "exit_after_tests", "profiler_mode", "use_distributed_barrier")


class Trials(Section):
    """The size of one measurement. Warm-up trials run first and are discarded. The second names are the tutorial's."""

    run_benchmark: bool = True
    batches: Annotated[int, Field(ge=1, validation_alias=AliasChoices("batches", "nbatches"))] = 30
    trials: Annotated[int, Field(ge=1, validation_alias=AliasChoices("trials", "ntrials"))] = 5
    warmup_trials: Annotated[int, Field(ge=0, validation_alias=AliasChoices("warmup_trials", "nwarmup"))] = 1


class Settings(Section):
    """The keys of benchy-conf.yaml."""

    IO: Trials = Trials()
    SYNTHETIC: Annotated[Trials, Field(validation_alias=AliasChoices("SYNTHETIC", "synthetic"))] = Trials()
    FULL: Annotated[Trials, Field(validation_alias=AliasChoices("FULL", "full"))] = Trials()
    output: str = "benchy.json"


def read_settings(world: World) -> Settings:
    """The settings of the file BENCHY_CONFIG_FILE or of the shipped one, with BENCHY_OUTPUT; every rank calls it."""
    path = Path(os.environ.get("BENCHY_CONFIG_FILE", DEFAULT_SETTINGS))
    values = _translate(parse_value(path.read_text(encoding="utf-8"), str(path)) or {}, str(path))
    settings = validate_section(Settings, values, str(path))
    name = os.environ.get("BENCHY_OUTPUT") or settings.output
    output = Path(name if name.endswith(".json") else f"{name}.json")
    with world.raise_together():
        if world.is_root and (output.is_dir() or not output.parent.is_dir()):
            raise UserError(f"cannot write {output}; set BENCHY_OUTPUT to a file in an existing directory")
    return settings.model_copy(update={"output": str(output)})


def _translate(values: Any, name: str) -> Any:
    """The values of a settings file, without the tutorial's section `global`; logs those of it without effect."""
    if not isinstance(values, dict) or not isinstance(values.get("global"), dict):
        return values
    common = values.pop("global")
    unused = [key for key in WITHOUT_EFFECT if common.pop(key, None) is not None]
    if unused:
        log.info("%s: %s have no effect here", name, ", ".join(unused))
    if {"output_dir", "output_filename"} & common.keys():
        directory, file = common.pop("output_dir", None), common.pop("output_filename", None)
        common["output"] = os.path.join(str(directory or "."), str(file or "benchy.json"))
    return {**common, **values}


class Benchmark:
    """Measures the step and the loader of a training run. All ranks take part."""

    def __init__(self, config: Config, parts: Parts, world: World, settings: Settings) -> None:
        self._step, self._loader, self._world = parts.step, parts.loaders.train, world
        self._flops = parts.size.flops
        self._settings, self._batch_size, self._lr = settings, config.global_batch_size, Schedule(config).peak
        self._exchanges_gradients = world.size > 1 and not config.noddp

    def run(self) -> None:
        """Runs all trials, logs the summary lines and writes the JSON file, with benchy's keys, on rank 0."""
        for line in self._step.describe():
            log.info(line)
        settings, lr, path = self._settings, self._lr, Path(self._settings.output)
        with contextlib.closing(self._batches()) as batches:
            fixed = Batch(*(part.clone() for part in next(batches)))
            results: dict[str, Any] = {
                "provenance": provenance(self._world),
                "unit": "samples/s",
                "global_batch_size": self._batch_size,
                "nranks": self._world.size,
                "flops_per_sample": self._flops,
            }
            actions: dict[str, Callable[[], object]] = {
                "IO": lambda: next(batches),
                "SYNTHETIC": lambda: self._step(fixed, lr),
                "FULL": lambda: self._step(next(batches), lr),
            }
            with nsys_capture(self._world, "the benchmark"):
                for name, action in actions.items():
                    trials = getattr(settings, name)
                    if trials.run_benchmark:
                        results[name] = self._measure(name, trials, action)
            if self._exchanges_gradients and "SYNTHETIC" in results:  # last: the ranks' parameters differ afterward
                self._step.sync = False
                alone = results["NO-COMM"] = self._measure("NO-COMM", settings.SYNTHETIC, actions["SYNTHETIC"])
                lost = results["communication overhead"] = 1 - results["SYNTHETIC"]["median"] / alone["median"]
                log.info(f"BENCHY::SUMMARY::NO-COMM communication overhead: {100 * lost:.1f} % of SYNTHETIC's time")
        with self._world.raise_together():
            if self._world.is_root:
                with atomic_write([path]) as (partial,):
                    partial.write_text(to_json(results, indent=None))  # one line, as the tutorial's plots read it
        log.info("Benchmark results: %s", path)

    def _measure(self, name: str, trials: Trials, action: Callable[[], object]) -> dict[str, Any]:
        """Samples/s of each trial, without the warm-up trials, and their statistics."""
        rates = []
        with Progress(f"benchmark {name}", trials.warmup_trials + trials.trials, "trials") as progress:
            for number in range(trials.warmup_trials + trials.trials):
                rates.append(self._trial(action, trials.batches))
                kind = "warm-up, " if number < trials.warmup_trials else ""
                progress.advance(note=f"{kind}{rates[-1]:.1f} samples/s")
        rates = rates[trials.warmup_trials :]
        mean, stdev = statistics.fmean(rates), statistics.pstdev(rates)
        result: dict[str, Any] = {"trial_throughput": rates, "mean": mean, "stdev": stdev, "n": len(rates)}
        result |= {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
        result["settings"] = trials.model_dump()
        text = f"median {result['median']:.3f} samples/s, range {result['min']:.3f} to {result['max']:.3f}"
        if self._flops and name != "IO":
            result["TFLOP/s per rank"] = result["median"] * self._flops / self._world.size / 1e12
            if self._world.device.type == "cuda":
                text += f"; {result['TFLOP/s per rank']:.3g} TFLOP/s per rank"
        log.info(f"BENCHY::SUMMARY::{name} average trial throughput: {mean:.3f} +/- {stdev:.3f}")
        log.info(f"BENCHY::SUMMARY::{name} {text}")
        return result

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
        for epoch in itertools.count():
            yield from self._loader.epoch(epoch)


def run(options: Options, volumes: Volumes, world: World, step_class: type[EagerStep]) -> None:
    """Measures the step and the training loader. Every rank calls it."""
    config, settings = volumes.config, read_settings(world)
    with build.assemble(volumes, world, step_class) as parts:
        log.info(describe_config(config, options.yaml_config, options.config))
        build.log_settings(config, world)
        Benchmark(config, parts, world, settings).run()
    log.info("DONE ---- rank %d", world.rank)
