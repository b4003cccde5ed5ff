"""All measurements that need a GPU, in a few minutes: `make bench-gpu`.

python -m benchmarks.gpu                 about 8 minutes on one GPU; results in benchmarks/results/<gpu>/
python -m benchmarks.gpu --minutes 4     the most important parts first; parts without time left are listed
python -m benchmarks.gpu --parts loaders tests
python -m benchmarks.gpu --draw DIR      write the page and the plot of existing results again

It needs torch, numpy, h5py, pyyaml, pydantic and tensorboard, and creates its data. Results are written after every
part: a run that is cut short keeps them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, convolutions, ladder, ladder_report, ledger, loaders, peaks
from benchmarks.convolutions import scales
from benchmarks.ladder import Machine
from benchmarks.processes import run_group
from utils.cli import positive
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.runs.provenance import provenance

# The parts in order of importance, and the largest share of the total time of each. Unused time goes to the next ones.
PARTS = {
    "peaks": 1.0,
    "ladder": 0.42,
    "comparisons": 0.08,
    "ledger": 0.04,
    "convolutions": 0.15,
    "loaders": 0.08,
    "tests": 1.0,
}
SMALL_BATCH = 16  # launching kernels may take longer than running them


class Run:
    """Runs the parts; a failed one is reported, and the next one runs."""

    def __init__(self, options: argparse.Namespace, world: World, directory: Path) -> None:
        self.options, self.world, self.directory = options, world, directory
        self.deadline = time.perf_counter() + 60 * options.minutes
        self.results: dict[str, Any] = {
            "provenance": provenance(world),
            "settings": common.settings(options),
            "seconds": {},
            "skipped": {},
        }
        self.machine = Machine(options, world)

    def run(self) -> None:
        with closing(self.machine):
            for name in self.options.parts:
                started = time.perf_counter()
                left = self.deadline - started
                if left <= 0:
                    self.skip(name, "no time left")
                    continue
                sys.stderr.write(f"== {name}, {left:.0f} s left\n")
                try:
                    result = getattr(self, name)(min(left, 60 * self.options.minutes * PARTS[name]))
                    if result is not None:
                        self.results[name] = result
                except Exception as error:
                    traceback.print_exc()
                    self.skip(name, f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
                self.results["seconds"][name] = time.perf_counter() - started
                self.machine.free()
                write(self.results, self.directory, with_plot=False)
        write(self.results, self.directory)

    def skip(self, name: str, reason: str) -> None:
        self.results["skipped"][name] = reason
        sys.stderr.write(f"skipped: {name}: {reason}\n")

    # --- the parts -----------------------------------------------------------------------------------------------

    def peaks(self, budget: float) -> dict[str, Any]:
        return peaks.measure(self.world.device, min(1.0, budget / 12))

    def ladder(self, budget: float) -> list[dict[str, Any]]:
        def note(entries: list[dict[str, Any]]) -> None:
            self.results["ladder"] = entries
            write(self.results, self.directory, with_plot=False)

        steps = ladder.GPU_STEPS if self.world.device.type == "cuda" else ladder.CPU_STEPS
        results = ladder.climb(self.machine, steps, time.perf_counter() + budget, note)
        for entry in results:
            if "skipped" in entry or "failed" in entry:
                self.skip(f"ladder: {entry['name']}", entry.get("skipped") or f"failed: {entry['failed']}")
        return results

    def best(self) -> Mapping[str, Any] | None:
        """The best step of the ladder at the requested batch size: larger batches are separate steps."""
        entries = [entry for entry in self.results.get("ladder", []) if not entry["name"].startswith("batch ")]
        return ladder_report.best_of(entries)

    def best_state(self) -> dict[str, Any]:
        """Its config changes, and whether it uses a CUDA graph."""
        best = self.best()
        if best is None:
            raise UserError("no step of the ladder was measured")
        return best["state"]

    def comparisons(self, budget: float) -> dict[str, Any] | None:
        """Alternating trials in one process: a CUDA graph and the eager step, the best and the original's best."""
        best, results = self.best_state(), {}
        measured = [entry for entry in self.results["ladder"] if "state" in entry]
        original = next((entry for entry in measured if entry["name"] == ladder.ORIGINAL_BEST), measured[0])
        end = time.perf_counter() + budget
        pairs = {}
        if original["state"] != best:
            pairs["best and original's best"] = {original["name"]: original["state"], "best": best}
        if self.world.device.type == "cuda":
            for batch in (self.options.batch, SMALL_BATCH):
                changes = {**best["changes"], "local_batch_size": batch}
                pair = {
                    "eager": {"changes": changes, "graph": False},
                    "CUDA graph": {"changes": changes, "graph": True},
                }
                pairs[f"CUDA graph and eager, batch {batch}"] = pair
        for name, pair in pairs.items():
            if time.perf_counter() > end:
                self.skip(name, "no time left")
                continue
            results[name] = ladder.compare(self.machine, pair)
            self.machine.free()
        return results or None

    def ledger(self, budget: float) -> dict[str, Any]:
        """Breakdown of the time of the best training's step."""
        built = ladder.prepare(self.machine, **self.best_state())
        built.batches.close()
        return ledger.measure(built.synthetic, self.world.device, steps=10)

    def convolutions(self, budget: float) -> dict[str, Any]:
        options = self.options
        measured = self.results.get("peaks", {}).get("matmul_tflops", {})
        known = {name: values["median"] for name, values in measured.items() if name in convolutions.DTYPES}
        network = {"width": options.width, "scales": scales(options.crop)}
        return convolutions.measure(self.world.device, options.batch, options.crop, budget, peaks=known, **network)

    def loaders(self, budget: float) -> dict[str, Any]:
        """Throughput of the loaders, and the gather kernel's share of a step."""
        workers, batches = min(8, torch.get_num_threads()), self.options.loader_batches
        sizes = {"workers": workers, "batches": batches, "epoch_batches": 64, "trials": 2, "settle": 1.0}
        options = argparse.Namespace(**vars(self.options), **sizes)
        self.machine.close()  # its loaders also hold the volume
        # The plain DataLoader's many processes would still work while others are timed.
        results = loaders.throughput(options, with_plain=self.world.device.type != "cuda")
        if self.world.device.type == "cuda":
            seconds = loaders.gather_seconds(options)
            results["gather kernel"] = {"seconds per batch": seconds}
            if best := self.best():
                step = self.options.batch / best["SYNTHETIC"]["median"]
                results["gather kernel"]["share of the best training's step"] = seconds / step
        return results

    def tests(self, budget: float) -> dict[str, Any] | None:
        """`pytest -m gpu` in a separate process: compares the fast paths with the plain ones."""
        if importlib.util.find_spec("pytest") is None:
            self.skip("tests", "pytest is not installed")
            return None
        self.machine.close()
        selection = self.options.tests or ["-m", "gpu"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
        command += ["--continue-on-collection-errors", *selection]
        output = self.directory / "tests.txt"
        with open(output, "wb") as log:
            code = run_group(command, os.environ, log, budget, common.REPOSITORY)
        ended = "cut off: no time left" if code is None else f"exit code {code}"
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return {"command": command[1:], "ended": ended, "summary": lines[-1] if lines else "", "failed": failed}


# --- the report ------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any], directory: Path, with_plot: bool = True) -> None:
    """results.json, README.md and ladder.png, each atomically; if the plot fails, the other files are still written."""
    directory.mkdir(parents=True, exist_ok=True)
    if with_plot and any("SYNTHETIC" in entry for entry in results.get("ladder", [])):
        results["skipped"].pop("ladder.png", None)
        try:
            title = f"{results['provenance']['device']}, batch {results['settings']['batch']}"
            ladder_report.draw(results["ladder"], title, directory / "ladder.png")
        except Exception as error:
            results["skipped"]["ladder.png"] = f"{error}; python -m benchmarks.gpu --draw DIR"
    common.write_text(directory / "results.json", json.dumps(results, indent=1) + "\n")
    common.write_text(directory / "README.md", markdown(results))


def markdown(results: dict[str, Any]) -> str:
    """All results as a page."""
    made = results["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    parts = [
        f"# {made['device']}\n\n`{' '.join(made['command'])}`, commit {made['git_commit']}, {made['date']}, "
        f"{sum(results['seconds'].values()):.0f} s; {versions}."
    ]
    writers: dict[str, tuple[str, Callable[[Any], str]]] = {
        "peaks": ("Upper bounds", peaks.markdown),
        "ladder": ("Ladder", lambda entries: _ladder(entries, results.get("peaks", {}).get("matmul_tflops", {}))),
        "comparisons": ("Comparisons in alternating trials", _comparisons),
        "ledger": ("Breakdown of the best training's step", ledger.markdown),
        "convolutions": ("Convolutions", convolutions.markdown),
        "loaders": ("Loaders", _loaders),
        "tests": ("Tests", _tests),
        "skipped": ("Not measured", lambda skipped: "\n".join(f"- {name}: {why}" for name, why in skipped.items())),
    }
    parts += [f"## {title}\n\n{text(results[name])}" for name, (title, text) in writers.items() if results.get(name)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _ladder(entries: list[dict[str, Any]], peak: dict[str, Any]) -> str:
    text = ladder_report.markdown(entries, {name: value["median"] for name, value in peak.items()})
    commands = "\n".join(f"- {entry['name']}: `{entry['command']}`" for entry in entries)
    return (
        "Each step of the ladder changes one option of the best before it; median and range. Its command, with "
        f"`--enable_benchy`:\n\n{text}\n{commands}"
    )


def _comparisons(pairs: dict[str, Any]) -> str:
    rows = []
    for name, pair in pairs.items():
        for side, values in pair.items():
            ratio = values.get("ratio to the first")
            rows.append((f"{name}: {side}", f"{values['median']:.4g}", common.ranged(ratio, ".3f") if ratio else ""))
    return common.table(("pair", "samples/s", "ratio to the first, median (range)"), rows)


def _loaders(results: dict[str, Any]) -> str:
    rows = []
    for name, values in results.items():
        other = ", ".join(f"{key} {value:.3g}" for key, value in values.items() if "median" not in values)
        rows.append((name, other or common.ranged(values)))
    return common.table(("loader", "samples/s, median (range)"), rows)


def _tests(result: dict[str, Any]) -> str:
    failed = "".join(f"\n- {line}" for line in result["failed"])
    return f"`{' '.join(result['command'])}`: {result['ended']}; {result['summary']}{failed}"


def main() -> None:
    parser = common.Parser(__doc__)
    ladder.add_options(parser)
    parser.set_defaults(output=None)
    parser.add_argument("--minutes", type=common.positive_float, default=8.0, help="time limit (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    parser.add_argument("--loader_batches", type=positive, default=20, help="timed batches per trial of a loader")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="write page and plot of DIR/results.json again")
    parser.add_argument("--rehearse", action="store_true", help="run all parts on a CPU, as a test")
    parser.add_argument("--tests", nargs="+", metavar="PYTEST_ARGUMENT", help="replaces -m gpu")
    with one_line_errors():
        options = parser.parse_args()
        if options.draw:
            write(common.read_json(options.draw / "results.json", "benchmarks.gpu", ("provenance",)), options.draw)
            print(f"written: {options.draw}")
            return
        world = common.this_machine()
        if world.device.type != "cuda" and not options.rehearse:
            raise UserError("torch sees no CUDA device; on a CPU run make bench-cpu")
        name = re.sub(r"[^a-z0-9]+", "-", provenance(world)["device"].lower()).strip("-")  # such as nvidia-h200
        run = Run(options, world, options.output or common.RESULTS / name)
        ladder.settle(options)  # counts as the run's time
        run.run()
        print((run.directory / "README.md").read_text())
        print(f"written: {run.directory}")


if __name__ == "__main__":
    main()
