"""A long training run does not need more and more memory, file descriptors or threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import GENEROUS, ONE_THREAD, TOP
from trainings import YAML, directory

# Python allocates with malloc, whose counter is exact, whereas resident memory changes by megabytes for no reason.
ALLOCATOR = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", **ONE_THREAD}
# Appends [step, bytes in use, descriptors, threads] in the middle of each epoch that follows an evaluation.
SCRIPT = """
import ctypes, gc, json, os, sys
import train
from utils.distributed.launch import run_script
from utils.steps.eager import EagerStep

mallinfo = ctypes.CDLL(None).mallinfo2  # of glibc 2.33 and later; field 4 is hblkhd, field 7 uordblks
mallinfo.restype = type("Mallinfo", (ctypes.Structure,), {"_fields_": [("fields", ctypes.c_size_t * 10)]})

class MeasuringStep(EagerStep):
    calls = 0

    def __call__(self, *arguments):
        loss = super().__call__(*arguments)
        self.calls += 1
        if self.calls % 1000 == 50:
            gc.collect()
            used = mallinfo().fields
            counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
            with open("samples", "a") as file:
                print(json.dumps([self.calls, used[4] + used[7], *counts]), file=file)
        return loss

run_script(lambda: train.main(sys.argv[1:], MeasuringStep))
"""
FLAGS = "network.width=2 network.scales=1 data_size=4 global_batch_size=2 base_batch_size=2 Nsamples=200 Nsamples_val=4"
FLAGS += " num_epochs=81 log_interval=10 checkpoint.every_steps=300 evaluation.every_epochs=10"


@pytest.mark.slow
def test_only_the_records_grow(tmp_path: Path, data_flags: list[str]) -> None:
    """8,100 steps in 81 epochs with 9 evaluations and 108 checkpoints. About 60 bytes per step are usual."""
    flags = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={tmp_path}"]
    flags += [f"--set={flag}" for flag in FLAGS.split()]
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(TOP)}
    command = [sys.executable, "-c", SCRIPT, *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=9 * GENEROUS)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    first, last = samples[2], samples[-1]  # since the third one all caches are filled
    steps, grown, descriptors, threads = (after - before for before, after in zip(first, last, strict=True))
    assert steps == 6000
    assert grown / steps < 80, samples
    assert descriptors == threads == 0, samples
    run = directory(tmp_path)
    records = [run / "metrics.jsonl", run / "out.log", *(run / "logs").iterdir()]
    assert max(path.stat().st_size for path in records) < 1000 * 8100
