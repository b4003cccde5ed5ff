"""The calls of benchmarks/gpu.py: their parts in order of importance, and what each costs."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common, convolutions, gpu_report, gpu_tests, ladder, ledger, loaders, peaks, rungs
from benchmarks.convolutions import scales
from benchmarks.ladder import Machine
from benchmarks.processes import failure_of
from benchmarks.rungs import BEST, FASTEST, FURTHER, GPU_RUNGS, HISTORY, OTHERS, TUTORIAL, VARIANTS, Rung
from utils.cli import positive
from utils.distributed.world import World
from utils.errors import EXIT_RESUMABLE, UserError, one_line_errors
from utils.provenance import device_name, provenance

# Assumed seconds, rather too many than too few: a part starts only if it should end in time.
IMPORTS = 10.0
VOLUME = 20.0
PEAKS = 5.0
CONVOLUTIONS = 60.0
SEARCH = 30.0  # by cuDNN, of the fastest algorithms for a new batch size, type or layout
COMPILATION = 60.0
TRIALS = 10.0  # of a rung
ALONE = 20.0 + 2 * SEARCH + TRIALS  # imports, loading, a longer search, and trials in another process
LOADERS = 60.0
TESTS = 240.0
WRITING = 10.0  # of the results, at the end

BY_GPU = common.RESULTS / "<gpu>"  # stands for the directory with the name of the GPU
SMALL_BATCH = 16  # launching kernels may take longer than running them
ENDED = "the process ended during this part"

State = dict[str, Any]  # arguments of ladder.prepare


class Part(NamedTuple):
    """A part of a call. `action` gets the seconds that are left, and stores its result."""

    name: str
    action: Callable[[float], None]
    seconds: float = 0.0  # assumed, without those of `states`
    states: Callable[[], Sequence[State]] = tuple  # the states that it builds


Perform = Callable[[Part, float, float], None]  # a part, the seconds that are left, and those that it needs


class Call:
    """One call: its parts, and the results so far. `started` identifies it, and is when its time began to run."""

    def __init__(self, options: argparse.Namespace, world: World, directory: Path, started: float) -> None:
        self.options, self.world, self.directory, self.started = options, world, directory, started
        self.path = directory / (f"call{options.call}.json" if not options.rungs else "rungs.json")
        self.results: dict[str, Any] = self._written() or {
            "started": started,
            "provenance": provenance(world),
            "settings": common.settings(options),
            "seconds": {},
            "skipped": {},
            "rungs": [],
        }
        self.machine = Machine(options, world)
        self.searched: set[tuple[Any, ...]] = set()  # what cuDNN has searched algorithms for
        self.earlier = self._earlier_rungs()

    def _written(self) -> dict[str, Any]:
        """The results of this call's earlier process, which a fault has ended."""
        with suppress(UserError):
            results = common.read_json(self.path, "benchmarks.gpu", ("started",))
            return results if results["started"] == self.started else {}
        return {}

    def _earlier_rungs(self) -> list[dict[str, Any]]:
        """The rungs of call 1, of which later calls use the fastest."""
        path = self.directory / "call1.json"
        if self.path == path or not path.exists():
            return []
        return list(common.read_json(path, "benchmarks.gpu", ("rungs",))["rungs"])

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Performs the parts within the time limit."""
        deadline = self.started + 60 * self.options.minutes
        # A part that hangs must not use up more time than the call has. What is measured is already written.
        faulthandler.dump_traceback_later(max(deadline - time.perf_counter(), 1), exit=True, file=2)
        try:
            with closing(self.machine):
                self.run_parts(time.perf_counter, deadline, self.perform)
            gpu_report.write(self.results, self.path)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def dry_run(self) -> str:
        """The parts that the call would reach at the assumed costs, with the seconds of their start and end."""
        now, rows = IMPORTS, []

        def pass_time(part: Part, left: float, needed: float) -> None:
            nonlocal now
            rows.append((part.name, f"{now:.0f}", f"{now + needed:.0f}"))
            now += needed

        self.run_parts(lambda: now, 60 * self.options.minutes, pass_time)
        rows += [(name, "not reached", "") for name in self.results["skipped"]]
        return common.table(("part", "starts after s", "ends after s"), rows)

    def run_parts(self, clock: Callable[[], float], deadline: float, perform: Perform) -> None:
        """Performs each part that should end in time and that no earlier process has tried."""
        tried = {*self.results["seconds"], *self.results["skipped"]}
        for part in self.parts():
            if part.name in tried:
                continue
            left, needed = deadline - WRITING - clock(), part.seconds + self.assumed(part.states())
            if needed > left:
                self.skip(part.name, f"no time left: it needs about {needed:.0f} s, {max(left, 0):.0f} s are left")
                continue
            perform(part, left, needed)
            self.searched.update(map(self.search_key, part.states()))

    def perform(self, part: Part, left: float, needed: float) -> None:
        """Runs a part and writes the results so far. Ends the process if the device cannot be used afterward: then
        benchmarks/gpu.py starts another one."""
        sys.stderr.write(f"== {part.name}, {left:.0f} s left\n")
        started, skipped = time.perf_counter(), self.results["skipped"]
        skipped[part.name] = ENDED  # in the file if this process crashes
        self.attempt("page", self.write)
        self.attempt(part.name, lambda: part.action(left))
        self.results["seconds"][part.name] = time.perf_counter() - started
        if skipped[part.name] == ENDED:
            del skipped[part.name]
        self.attempt("page", self.write)
        if not self.attempt(f"device after {part.name}", self.machine.free):
            self.attempt("page", self.write)
            os._exit(EXIT_RESUMABLE)  # at once: closing what uses the device may crash or hang

    def attempt(self, name: str, action: Callable[[], None]) -> bool:
        """Calls `action`; a failure is reported, and the result is False."""
        try:
            action()
            return True
        except Exception as error:
            traceback.print_exc()
            self.skip(name, f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
            return False

    def write(self) -> None:
        gpu_report.write(self.results, self.path, with_plot=False)

    def skip(self, name: str, reason: str) -> None:
        self.results["skipped"][name] = reason
        if not self.options.dry_run:
            sys.stderr.write(f"skipped: {name}: {reason}\n")

    # --- the parts of each call --------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        files = self.options.data, self.options.valid_data
        seconds = 0.0 if all(path.exists() for path in files) else VOLUME
        volume = Part("volume", lambda left: ladder.make_files(self.options), seconds)
        matmul = Part("peaks", self.peaks, PEAKS)
        if self.options.rungs:
            return [volume, matmul, *(self.rung(GPU_RUNGS[key]) for key in self.options.rungs)]
        if self.options.call == 1:
            return [
                matmul,
                Part("convolutions", self.first_convolutions, CONVOLUTIONS),
                volume,
                *map(self.rung, BEST),
                Part("best", self.best, TRIALS, lambda: [self.fastest()["state"]]),
                *map(self.rung, FURTHER),
            ]
        if self.options.call == 2:
            return [Part("tests", self.tests, TESTS)]
        return [
            matmul,
            volume,
            *map(self.rung, VARIANTS),
            Part("loaders", self.loaders, LOADERS),
            *map(self.rung, HISTORY),
            *self.comparisons(),
            *map(self.rung, OTHERS),
            Part("convolutions", self.convolutions, CONVOLUTIONS),
        ]

    def assumed(self, states: Sequence[State]) -> float:
        """Seconds to build and measure training runs."""
        new = {self.search_key(state) for state in states} - self.searched
        compiled = [state for state in states if state["changes"].get("enable_jit")]
        return TRIALS * len(states) + SEARCH * len(new) + COMPILATION * len(compiled)

    def search_key(self, state: State) -> tuple[Any, ...]:
        """Training runs with the same key have the same convolutions."""
        changes = state["changes"]
        return (
            changes.get("local_batch_size", self.options.batch),
            changes.get("precision") if changes.get("enable_amp") else changes.get("tf32", True),
            changes.get("channels_last", False),
            tuple(changes.get("network.space_to_depth", [])),
        )

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The rungs of this call and, after them, those of call 1."""
        return [*self.results["rungs"], *self.earlier]

    def fastest(self) -> dict[str, Any]:
        """The fastest rung at one batch size; A, if none was measured."""
        unmeasured = {"name": BEST[0].name, "state": rungs.state_of(BEST[0])}
        return dict(rungs.best_of(self.entries, FASTEST) or unmeasured)

    def rung(self, rung: Rung) -> Part:
        """Measures one rung."""
        apart = rung.alone and not self.options.rungs

        def measure(left: float) -> None:
            entry = self.in_process(rung, left) if apart else ladder.measure_rung(self.machine, rung, self.entries)
            self.results["rungs"].append(entry)
            if "SYNTHETIC" not in entry:
                self.skip(rung.name, entry.get("skipped") or f"failed: {entry['failed']}")

        if apart:
            return Part(rung.name, measure, ALONE)
        if rung.package is not None and not ladder.importable(rung.package):
            return Part(rung.name, measure)
        return Part(rung.name, measure, states=lambda: [rungs.state_of(rung, self.entries)])

    def in_process(self, rung: Rung, left: float) -> dict[str, Any]:
        """Measures a rung in a process of its own, where cuDNN has searched nothing yet."""
        self.machine.close()
        options = self.options
        command = [sys.executable, "-m", "benchmarks.gpu", "--rungs", rung.key, f"--output={self.directory.absolute()}"]
        names = ("batch", "crop", "width", "box", "valid_box", "seconds", "warmup_steps")
        command += [f"--{name}={getattr(options, name)}" for name in names]
        command += [f"--data={options.data.absolute()}", f"--minutes={left / 60}"] + ["--rehearse"] * options.rehearse
        log = self.directory / "rungs.txt"
        unmeasured = {"name": rung.name, "command": shlex.join(command[1:])}
        if reason := failure_of(command, log, limit=left):
            return {**unmeasured, "failed": reason}
        log.unlink()
        results = common.read_json(self.directory / "rungs.json", "benchmarks.gpu", ("rungs", "skipped"))
        if not results["rungs"]:
            return {**unmeasured, "skipped": results["skipped"][rung.name]}
        return dict(results["rungs"][0])

    # --- measurements ------------------------------------------------------------------------------------------------

    def peaks(self, left: float) -> None:
        self.results["peaks"] = peaks.measure(self.world.device, 0.5)

    def first_convolutions(self, left: float) -> None:
        """Those of rungs A and B, the largest first."""
        self.convolutions(CONVOLUTIONS, ["bfloat16"], ["NDHWC"])

    def convolutions(
        self,
        left: float,
        dtypes: Sequence[str] = tuple(convolutions.DTYPES),
        formats: Sequence[str] = tuple(convolutions.FORMATS),
    ) -> None:
        options = self.options
        measured = self.results.get("peaks", {}).get("matmul_tflops", {})
        known = {name: values["median"] for name, values in measured.items() if name in convolutions.DTYPES}
        network = {"width": options.width, "scales": scales(options.crop)}
        sizes = (self.world.device, options.batch, options.crop, left)
        self.results["convolutions"] = convolutions.measure(*sizes, dtypes, formats, known, **network)

    def best(self, left: float) -> None:
        """The fastest rung: real against synthetic data in alternating trials, and the time of a step by kind."""
        best = self.fastest()
        with closing(ladder.prepare(self.machine, **best["state"])) as built:
            rates = ladder.both_rates(self.machine, built, ladder.steps_per_trial(self.machine, built), trials=5)
            rates["FULL / SYNTHETIC"] = [full / fixed for fixed, full in zip(*rates.values(), strict=True)]
            summaries = {name: common.summary(values) for name, values in rates.items()}
            result = self.results["best"] = {"name": best["name"], **summaries}
            built.batches.close()
            result["ledger"] = ledger.measure(built.synthetic, self.world.device, steps=10)

    def comparisons(self) -> list[Part]:
        """Alternating trials in one process: the tutorial's best and ours, and the eager step and a CUDA graph."""
        tutorial = GPU_RUNGS[TUTORIAL]

        def ours() -> dict[str, State]:
            best = self.fastest()
            return {"tutorial's best": rungs.state_of(tutorial), best["name"]: best["state"]}

        def graph() -> dict[str, State]:
            changes = {**rungs.state_of(BEST[0])["changes"], "local_batch_size": SMALL_BATCH}
            return {name: {"changes": changes, "graph": name == "CUDA graph"} for name in ("eager", "CUDA graph")}

        def part(name: str, states: Callable[[], dict[str, State]]) -> Part:
            def compare(left: float) -> None:
                self.results.setdefault("comparisons", {})[name] = ladder.compare(self.machine, states())

            return Part(name, compare, states=lambda: list(states().values()))

        return [
            part(f"eager step and CUDA graph, batch {SMALL_BATCH}", graph),
            part("the tutorial's best and ours", ours),
        ]

    def loaders(self, left: float) -> None:
        """Throughput of the loaders, and the gather kernel's share of a step."""
        workers, batches = min(8, torch.get_num_threads()), self.options.loader_batches
        sizes = {"workers": workers, "batches": batches, "epoch_batches": 64, "trials": 2, "settle": 1.0}
        options = argparse.Namespace(**vars(self.options), **sizes)
        self.machine.close()  # its loaders also hold the volume
        # The plain DataLoader's many processes would still work while others are timed.
        with_plain = self.world.device.type != "cuda"
        results = self.results["loaders"] = loaders.throughput(options, with_plain)
        if self.world.device.type == "cuda":
            seconds = loaders.gather_seconds(options)
            results["gather kernel"] = {"seconds per batch": seconds}
            if best := rungs.best_of(self.entries, (*FASTEST, "base")):
                step = self.options.batch / best["SYNTHETIC"]["median"]
                results["gather kernel"]["share of the fastest rung's step"] = seconds / step

    def tests(self, left: float) -> None:
        files = self.results["tests"] = {}

        def record(name: str, result: dict[str, Any]) -> None:
            files[name] = result
            self.write()

        gpu_tests.run(left, self.directory / "tests.txt", record)


def main(text: str | None, started: float) -> None:
    """`started`: time.perf_counter() when the program started."""
    parser = common.Parser(text)
    ladder.add_options(parser, batch=64, box=512, seconds=1.0, warmup_steps=30)
    parser.set_defaults(output=BY_GPU)
    parser.add_argument("--call", type=int, choices=(1, 2, 3), default=1, help="parts to run (%(default)s)")
    parser.add_argument("--rungs", nargs="+", choices=GPU_RUNGS, metavar="RUNG", help=", ".join(GPU_RUNGS))
    parser.add_argument("--minutes", type=common.positive_float, default=8.0, help="time limit (%(default)s)")
    parser.add_argument("--loader_batches", type=positive, default=20, help="timed batches per trial of a loader")
    parser.add_argument("--dry_run", action="store_true", help="print what the call would reach, and measure nothing")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write page and plot of a result again")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, as a test")
    with one_line_errors():
        options = parser.parse_args()
        if options.draw:
            gpu_report.write(common.read_json(options.draw, "benchmarks.gpu", ("provenance",)), options.draw)
            print(f"written: {options.draw.with_suffix('.md')}")
            return
        if options.rungs and options.call != 1:  # make passes --call 1
            raise UserError(f"--rungs measures these rungs alone, without --call {options.call}; remove one of the two")
        world = common.this_machine()
        if world.device.type != "cuda" and not (options.rehearse or options.dry_run):
            raise UserError("torch sees no CUDA device; on a CPU run make bench-cpu")
        ladder.check_sizes(options)
        name = re.sub(r"[^a-z0-9]+", "-", device_name(world.device).lower()).strip("-")  # such as nvidia-h200
        call = Call(options, world, common.RESULTS / name if options.output == BY_GPU else options.output, started)
        if options.dry_run:
            print(call.dry_run())
            return
        call.run()
        print(call.path.with_suffix(".md").read_text())
        print(f"written: {call.path}")
