"""The same command without a launcher, under torchrun and in a Slurm step gives the same losses. Real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import GENEROUS, TOP, free_port, is_free


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, volume_file) -> list[str]:
    folder = tmp_path_factory.mktemp("launchers")
    train, valid = (volume_file(folder / f"{name}.h5", seed=seed) for seed, name in enumerate(("train", "valid")))
    settings = {
        "train_path": train,
        "val_path": valid,
        "expdir": folder / "runs",
        "device": "cpu",
        "report_baselines": "false",
    }
    return ["train.py", "--config=test", *(f"--set={key}={value}" for key, value in settings.items())]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}


def valid_losses(arguments: list[str], ranks: int, run_num: str) -> list[float]:
    expdir = next(text for text in arguments if "expdir=" in text).split("expdir=")[1]
    directory = Path(expdir) / "test" / f"{ranks}GPU" / run_num
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    provenance = json.loads((directory / "provenance.json").read_text())
    assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
    return [record["Loss/valid"] for record in records if "Loss/valid" in record]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_torchrun_slurm_and_a_single_process_give_the_same_losses(arguments: list[str]) -> None:
    run = {"cwd": TOP, "capture_output": True, "text": True, "timeout": GENEROUS}
    alone = subprocess.run([sys.executable, *arguments], env=environment(), **run)
    assert alone.returncode == 0, alone.stderr
    launched = subprocess.run([*TORCHRUN, *arguments, "--run_num=torchrun"], env=environment(), **run)
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count("Avg train loss") == 2, "only rank 0 logs, once per epoch"
    # The rendezvous port is derived from the job id.
    job = str(next(number for number in range(free_port(), 2**31) if is_free(15000 + number * 7 % 15000)))
    tasks = [
        subprocess.Popen(
            [sys.executable, *arguments, "--run_num=slurm"],
            env=environment(
                SLURM_STEP_ID="0",
                SLURM_JOB_ID=job,
                SLURM_PROCID=str(task),
                SLURM_LOCALID=str(task),
                SLURM_NTASKS="2",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NODELIST="localhost",
            ),
            cwd=TOP,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    outputs = [task.communicate(timeout=GENEROUS)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    losses = valid_losses(arguments, 1, "00")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for name in ("torchrun", "slurm"):
        assert valid_losses(arguments, 2, name) == pytest.approx(losses, rel=1e-4)


def test_invalid_input_under_torchrun_gives_one_line_for_all_ranks(arguments: list[str], tmp_path: Path) -> None:
    """The error is found after the rendezvous; the only traceback is that of torchrun."""
    flags = ["--set=global_batch_size=9", f"--set=expdir={tmp_path / 'runs'}"]
    ended = subprocess.run(
        [*TORCHRUN, *arguments, *flags], cwd=TOP, env=environment(), capture_output=True, text=True, timeout=GENEROUS
    )
    assert ended.returncode != 0
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert "global_batch_size 9 is not divisible by 2 ranks; use 8" in errors[0]
    assert 'train.py", line' not in ended.stderr
    assert re.search(r"exitcode\s*: 2 ", ended.stderr), "a rank exits with code 2"
    assert not (tmp_path / "runs").exists()
