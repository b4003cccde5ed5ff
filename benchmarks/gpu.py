"""Everything that a GPU has to tell, for whoever has one for a few minutes: `make bench-gpu`.

python -m benchmarks.gpu                 about 8 minutes on one GPU; results in benchmarks/results/<gpu>/
python -m benchmarks.gpu --minutes 4     what matters most first, and what there was no time for by name
python -m benchmarks.gpu --draw DIR      the table and the plot of results that are there

It needs torch, numpy, h5py, pyyaml, pydantic and tensorboard, and makes its data where it runs. What it has is written
after every part: a run that is cut short keeps its results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks import convolutions, ladder, ledger, loaders, peaks
from benchmarks.common import RESULTS, Parser, positive_float, settings, this_machine
from benchmarks.ladder import Machine
from utils.cli import positive
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.runs.logger import provenance

# Of the whole time: what each part may take at most. What one leaves, the next ones have.
SHARES = {"ladder": 0.42, "duels": 0.08, "ledger": 0.04, "convolutions": 0.15, "loaders": 0.08}
SMALL_BATCH = 16  # where launching kernels takes longer than running them, if anywhere


class Run:
    """The parts in the order of their worth; one that fails is told, and the next one goes on."""

    def __init__(self, options: argparse.Namespace, world: World, directory: Path) -> None:
        self.options, self.world, self.directory = options, world, directory
        self.started = time.perf_counter()
        self.deadline = self.started + 60 * options.minutes
        self.results: dict[str, Any] = {
            "provenance": provenance(world),
            "settings": settings(options),
            "seconds": {},
            "skipped": {},
        }
        self.machine = Machine(options, world)

    def everything(self) -> None:
        parts: dict[str, Callable[[float], Any]] = {
            "peaks": self.peaks,
            "ladder": self.ladder,
            "duels": self.duels,
            "ledger": self.ledger,
            "convolutions": self.convolutions,
            "loaders": self.loaders,
            "tests": self.tests,
        }
        with closing(self.machine):
            for name, part in parts.items():
                started = time.perf_counter()
                left = self.deadline - started
                if left <= 0:
                    self.skip(name, "no time left")
                    continue
                sys.stderr.write(f"== {name}, {left:.0f} s left\n")
                budget = min(left, 60 * self.options.minutes * SHARES.get(name, 1.0))
                try:
                    result = part(budget)
                    if result is not None:
                        self.results[name] = result
                except Exception as error:
                    traceback.print_exc()
                    self.skip(name, f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
                self.results["seconds"][name] = time.perf_counter() - started
                self.machine.free()
                self.keep()
        write(self.results, self.directory)

    def skip(self, name: str, reason: str) -> None:
        self.results["skipped"][name] = reason
        sys.stderr.write(f"skipped: {name}: {reason}\n")

    def keep(self) -> None:
        write(self.results, self.directory, plot=False)

    # --- the parts -----------------------------------------------------------------------------------------------

    def peaks(self, budget: float) -> dict[str, Any]:
        return peaks.measure(self.world.device, min(1.0, budget / 12))

    def ladder(self, budget: float) -> list[dict[str, Any]]:
        def note(rungs: list[dict[str, Any]]) -> None:
            self.results["ladder"] = rungs
            self.keep()

        rungs = ladder.GPU_RUNGS if self.world.device.type == "cuda" else ladder.CPU_RUNGS
        results = ladder.climb(self.machine, rungs, time.perf_counter() + budget, note)
        for entry in results:
            if "skipped" in entry or "failed" in entry:
                self.skip(f"rung {entry['rung']}", entry.get("skipped") or f"failed: {entry['failed']}")
        return results

    def best_rung(self) -> Mapping[str, Any] | None:
        """The best at the batch asked for: larger batches are rungs of their own."""
        return ladder.best_of([e for e in self.results.get("ladder", []) if not e["rung"].startswith("batch ")])

    def best(self) -> dict[str, Any]:
        """Config changes of the best rung, and whether it is a graph."""
        rung = self.best_rung()
        if rung is None:
            raise UserError("no rung of the ladder was measured")
        return rung["state"]

    def duels(self, budget: float) -> dict[str, Any] | None:
        """Pairs in turn, in one process: a graph against the plain step, and the best against the original's best."""
        best, results = self.best(), {}
        measured = [entry for entry in self.results["ladder"] if "state" in entry]
        original = next((entry for entry in measured if entry["rung"] == ladder.ORIGINAL_BEST), measured[0])
        end = time.perf_counter() + budget
        changes, graph = best["changes"], best["graph"]
        pairs: dict[str, dict[str, tuple[Any, bool]]] = {}
        if original["state"] != best:
            pairs["best against an earlier rung"] = {
                original["rung"]: (original["state"]["changes"], original["state"]["graph"]),
                "best": (changes, graph),
            }
        if self.world.device.type == "cuda":
            for batch in (self.options.batch, SMALL_BATCH):
                sized = {**changes, "local_batch_size": batch}
                pairs[f"graph against eager, batch {batch}"] = {"eager": (sized, False), "CUDA graph": (sized, True)}
        for name, pair in pairs.items():
            if time.perf_counter() > end:
                self.skip(name, "no time left")
                continue
            results[name] = ladder.duel(self.machine, pair)
            self.machine.free()
        return results or None

    def ledger(self, budget: float) -> dict[str, Any]:
        """Where the best rung's step spends its time."""
        best = self.best()
        built = ladder.build(self.machine, best["changes"], best["graph"], self.options.warmup_steps)
        built.batches.close()
        return ledger.measure(built.synthetic, self.world.device, steps=10)

    def convolutions(self, budget: float) -> dict[str, Any]:
        options = self.options
        measured = self.results.get("peaks", {}).get("matmul_tflops", {})
        names = list(convolutions.DTYPES)
        return convolutions.measure(
            self.world.device,
            options.batch,
            options.crop,
            names,
            budget=budget,
            peaks={name: measured[name]["median"] for name in names if name in measured},
            width=options.width,
            scales=convolutions.scales(options.crop),
        )

    def loaders(self, budget: float) -> dict[str, Any]:
        """Batches delivered, and the gather kernel's share of a step."""
        options = argparse.Namespace(
            data=self.options.data,
            crop=self.options.crop,
            batch=self.options.batch,
            workers=min(8, torch.get_num_threads()),
            plain=self.world.device.type != "cuda",  # its many processes would still be at work while others are timed
            batches=self.options.loader_batches,
            epoch_batches=64,
            trials=2,
            settle=1.0,
        )
        self.machine.close()  # its loaders hold the volume, too
        results = loaders.throughput(options)
        if self.world.device.type == "cuda":
            seconds = loaders.gather_seconds(loaders.Sources(options), options)
            told = {"seconds a batch": seconds}
            best = self.best_rung()
            if best is not None:
                step = self.options.batch / best["SYNTHETIC"]["median"]
                told["share of a step of the best rung"] = seconds / step
            results["gather kernel"] = told
        return results

    def tests(self, budget: float) -> dict[str, Any] | None:
        """`pytest -m gpu`, in a process of its own: fast paths against the plain ones."""
        if importlib.util.find_spec("pytest") is None:
            self.skip("tests", "pytest is not installed")
            return None
        self.machine.close()
        selection = self.options.tests or ["-m", "gpu"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
        command += ["--continue-on-collection-errors", *selection]
        try:
            done = subprocess.run(
                command,
                cwd=RESULTS.parents[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=budget,
            )
            output, ended = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            ended = "cut off: no time left"
        (self.directory / "tests.txt").write_text(output)
        lines = output.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return {"command": command[1:], "ended": ended, "summary": lines[-1] if lines else "", "failed": failed}


# --- telling -------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any], directory: Path, plot: bool = True) -> None:
    """results.json, README.md and ladder.png, each whole or not at all; numbers first, for they cannot be made anew."""
    directory.mkdir(parents=True, exist_ok=True)
    if plot and any("SYNTHETIC" in entry for entry in results.get("ladder", [])):
        results["skipped"].pop("ladder.png", None)
        try:
            title = f"{results['provenance']['device']}, batch {results['settings']['batch']}"
            ladder.draw(results["ladder"], title, directory / "ladder.png")
        except Exception as error:
            results["skipped"]["ladder.png"] = f"{error}; python -m benchmarks.gpu --draw DIR"
    with atomic_write([directory / "results.json"]) as (data,):
        data.write_text(json.dumps(results, indent=1) + "\n")
    with atomic_write([directory / "README.md"]) as (page,):
        page.write_text(markdown(results))


def markdown(results: dict[str, Any]) -> str:
    """All of it as a page."""
    made = results["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    seconds = sum(results["seconds"].values())
    parts = [
        f"# {made['device']}\n\n`{' '.join(made['command'])}`, commit {made['git_commit']}, {made['date']}, "
        f"{seconds:.0f} s; {versions}.\n",
    ]
    if "peaks" in results:
        parts.append("## Ceilings\n\n" + peaks.markdown(results["peaks"]))
    if results.get("ladder"):
        peak = {name: value["median"] for name, value in results.get("peaks", {}).get("matmul_tflops", {}).items()}
        commands = [f"- {entry['rung']}: `{entry['command']}`" for entry in results["ladder"]]
        text = ladder.markdown(results["ladder"], peak)
        parts.append(
            "## Ladder\n\nEach rung keeps what the best one before it had and changes one thing; median and range. Its "
            f"command, with `--enable_benchy`:\n\n{text}\n" + "\n".join(commands) + "\n"
        )
    if results.get("duels"):
        lines = ["| pair | samples/s | ratio to the first, median (range) |", "|---|---|---|"]
        for name, pair in results["duels"].items():
            for side, told in pair.items():
                ratio = told.get("ratio to the first")
                text = f"{ratio['median']:.3f} ({ratio['min']:.3f} – {ratio['max']:.3f})" if ratio else ""
                lines.append(f"| {name}: {side} | {told['median']:.4g} | {text} |")
        parts.append("## Side by side\n\n" + "\n".join(lines) + "\n")
    for name, title, tell in (
        ("ledger", "Where the best rung's step spends its time", ledger.markdown),
        ("convolutions", "Convolutions", convolutions.markdown),
    ):
        if name in results:
            parts.append(f"## {title}\n\n" + tell(results[name]))
    if "loaders" in results:
        lines = ["| loader | samples/s, median (range) |", "|---|---|"]
        for name, told in results["loaders"].items():
            if "median" in told:
                lines.append(f"| {name} | {told['median']:.4g} ({told['min']:.4g} – {told['max']:.4g}) |")
            else:
                lines.append(f"| {name} | {', '.join(f'{key} {value:.3g}' for key, value in told.items())} |")
        parts.append("## Loaders\n\n" + "\n".join(lines) + "\n")
    if "tests" in results:
        told = results["tests"]
        failed = "".join(f"\n- {line}" for line in told["failed"])
        parts.append(f"## Tests\n\n`{' '.join(told['command'])}`: {told['ended']}; {told['summary']}{failed}\n")
    if results["skipped"]:
        lines = [f"- {name}: {reason}" for name, reason in results["skipped"].items()]
        parts.append("## Not measured\n\n" + "\n".join(lines) + "\n")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def slug(name: str) -> str:
    """A device's name as a directory's: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main() -> None:
    parser = Parser(__doc__)
    ladder.add_options(parser)
    parser.set_defaults(output=None)
    parser.add_argument("--minutes", type=positive_float, default=8.0, help="for all of it")
    parser.add_argument("--loader_batches", type=positive, default=20, help="timed batches of a loader's trial")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="write the page and the plot of DIR/results.json anew")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: to see that all parts run")
    parser.add_argument("--tests", nargs="+", metavar="PYTEST_ARGUMENT", help="instead of -m gpu")
    with one_line_errors():
        options = parser.parse_args()
        if options.draw:
            path = options.draw / "results.json"
            try:
                results = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
            write(results, options.draw)
            print(f"written: {options.draw}")
            return
        world = this_machine()
        if world.device.type != "cuda" and not options.rehearse:
            raise UserError("torch sees no CUDA device; on a CPU run make bench-cpu")
        run = Run(options, world, options.output or RESULTS / slug(provenance(world)["device"]))
        ladder.settle(options)  # within the run's time
        run.everything()
        print((run.directory / "README.md").read_text())
        print(f"written: {run.directory}")


if __name__ == "__main__":
    main()
