"""Trains for many steps and reports what grows: memory, file descriptors, threads and records.

python tests/storm_growth.py --steps 20000 --ranks 1        about 3 minutes on one core

Each rank is a process of its own, in which Python allocates with malloc: its counter is exact, whereas resident memory
changes by megabytes for no reason.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests")]

import torch  # noqa: E402
from processes import GENEROUS, ONE_THREAD, free_port, rank_variables  # noqa: E402 # found by the path above
from volume_files import write_volume  # noqa: E402

STEPS_PER_EPOCH, EVALUATION_EPOCHS, LOG_INTERVAL = 100, 10, 10
ALLOCATOR = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", **ONE_THREAD}
RECORDS = ("metrics.jsonl", "out.log", "logs")


class Sample(NamedTuple):
    """The resources that a rank holds in the middle of an epoch."""

    step: int
    allocated: int  # bytes in use
    resident: int  # bytes
    descriptors: int
    threads: int
    records: dict[str, int]  # bytes, by file


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def allocated_bytes() -> int:
    """The bytes that malloc has handed out."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo
    info = function()
    return info.uordblks + info.hblkhd


def take_sample(step: int, run: Path) -> Sample:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    sizes = {
        name: sum(file.stat().st_size for file in ([run / name] if (run / name).is_file() else (run / name).glob("*")))
        for name in RECORDS
    }
    entries = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return Sample(step, allocated_bytes(), resident, *entries, sizes)


def rank_main(run: Path, folder: Path, flags: list[str]) -> None:
    """Trains; writes samples of the middle of each epoch that follows an evaluation to <folder>/<rank>.json."""
    import train
    from utils.distributed.launch import run_script
    from utils.steps.eager import EagerStep

    samples: list[Sample] = []

    class MeasuringStep(EagerStep):
        calls = 0

        def __call__(self, *arguments: torch.Tensor | float) -> torch.Tensor:
            loss = super().__call__(*arguments)
            self.calls += 1
            if self.calls % (EVALUATION_EPOCHS * STEPS_PER_EPOCH) == STEPS_PER_EPOCH // 2:
                samples.append(take_sample(self.calls, run))
            return loss

    torch.set_num_threads(1)

    def main() -> None:
        train.main(flags, MeasuringStep)
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(samples))

    run_script(main)


def measure(steps: int, ranks: int, folder: Path) -> list[list[Sample]]:
    """The samples of each rank, from a training run of at least that many steps."""
    volumes = [write_volume(folder / f"{name}.h5", seed=seed) for seed, name in enumerate(("train", "valid"))]
    settings = {
        "train_path": volumes[0],
        "val_path": volumes[1],
        "expdir": folder / "runs",
        "device": "cpu",
        "network.width": 2,
        "network.scales": 1,
        "data_size": 4,
        "global_batch_size": 2,
        "base_batch_size": 2,
        "Nsamples": 2 * STEPS_PER_EPOCH,
        "Nsamples_val": 4,
        "log_interval": LOG_INTERVAL,
        "checkpoint.every_steps": 300,
        "evaluation.every_epochs": EVALUATION_EPOCHS,
        "num_epochs": -(-steps // STEPS_PER_EPOCH),
    }
    flags = ["--config=test", *(f"--set={key}={value}" for key, value in settings.items())]
    run, port = folder / "runs" / "test" / f"{ranks}ranks" / "00", free_port()
    outputs = [folder / f"{rank}.json" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        with open(output.with_suffix(".log"), "wb") as log:
            command = [sys.executable, __file__, "--rank-main", str(run), str(folder), *flags]
            environment = {**os.environ, **ALLOCATOR, **rank_variables(rank, ranks, port)}
            processes.append(subprocess.Popen(command, env=environment, cwd=TOP, stdout=log, stderr=log))
    codes = [process.wait(GENEROUS + steps) for process in processes]
    assert not any(codes), f"exit codes {codes}:\n" + outputs[0].with_suffix(".log").read_text()[-3000:]
    return [[Sample(*sample) for sample in json.loads(output.read_text())] for output in outputs]


class Growth(NamedTuple):
    """Growth between the third sample, when all caches are filled, and the last one.

    PyTorch's writer keeps about 1.5 kB per checkpoint that is written to a Python file: about 20 bytes per step here.
    """

    steps: int
    bytes_per_step: float
    resident: int
    descriptors: int
    threads: int
    records_per_step: dict[str, float]


def growth(samples: list[Sample]) -> Growth:
    first, last = samples[2], samples[-1]
    steps = last.step - first.step
    return Growth(
        steps,
        (last.allocated - first.allocated) / steps,
        last.resident - first.resident,
        last.descriptors - first.descriptors,
        last.threads - first.threads,
        {name: (last.records[name] - size) / steps for name, size in first.records.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rank, samples in enumerate(measure(options.steps, options.ranks, Path(folder))):
            print(f"rank {rank}")
            for sample in samples:
                print(
                    f"  step {sample.step:>6}: {sample.allocated:>11,} bytes allocated, {sample.resident:>12,} "
                    f"resident, {sample.descriptors} descriptors, {sample.threads} threads, records {sample.records}"
                )
            found = growth(samples)
            records = ", ".join(f"{name} {size:.0f}" for name, size in found.records_per_step.items())
            print(
                f"  in {found.steps} steps: {found.bytes_per_step:.1f} bytes allocated per step, resident "
                f"{found.resident:+,} bytes, descriptors {found.descriptors:+}, threads {found.threads:+}; bytes of "
                f"records per step: {records}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-main"]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    main()
