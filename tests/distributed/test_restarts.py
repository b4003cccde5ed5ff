"""torchrun restarts its ranks after one of them was killed, and they return to their run. Real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import GENEROUS, TOP, free_port

SCRIPT = """
import os, signal, sys
import train
from utils.distributed.launch import run_script
from utils.steps.eager import EagerStep

class DyingStep(EagerStep):
    steps = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.die()

    def __call__(self, *arguments):
        self.steps += 1
        self.die()
        return super().__call__(*arguments)

    def die(self):
        moment = [int(os.environ["TORCHELASTIC_RESTART_COUNT"]), self.steps]
        if os.environ["RANK"] == "1" and moment in DEATHS[: int(os.environ["DEATHS"])]:
            os.kill(os.getpid(), signal.SIGKILL)

run_script(lambda: train.main(sys.argv[1:], DyingStep))
"""
DEATHS = [[0, 0], [1, 11]]  # start and step: before anything is written, and after the first checkpoint


@pytest.fixture
def command(tmp_path: Path, data_flags: list[str]) -> list[str]:
    """A training run that dies as often as the variable DEATHS says. torchrun's run id is `none`, its default."""
    script = tmp_path / "dying.py"
    script.write_text(SCRIPT.replace("DEATHS[", f"{DEATHS}["))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
    flags = ["--config=test", f"--set=expdir={tmp_path}", "--set=report_baselines=false", *data_flags]
    return [sys.executable, *torchrun, "--master-port={port}", str(script), *flags]


@pytest.mark.slow
def test_restarted_ranks_return_to_their_run_although_another_one_is_finished(
    command: list[str], tmp_path: Path
) -> None:
    """Two torchruns with the same run id and the same command: a restart of the second must not find the first run."""
    for number, name in ((0, "00"), (2, "00-2")):
        environment = {**os.environ, "PYTHONPATH": str(TOP), "DEATHS": str(number)}
        words = [word.format(port=free_port()) for word in command]
        ended = subprocess.run(words, cwd=TOP, env=environment, capture_output=True, text=True, timeout=GENEROUS)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count(f"Run directory: {tmp_path / 'test' / '2ranks' / name}") == 1 + number // 2
    assert ended.stderr.count("Resuming from ") == 1, "the first restart has no checkpoint yet"
    assert "after step 8" in ended.stderr
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("test/2ranks/*/summary.json")}
    assert runs.keys() == {"00", "00-2"}
    assert runs["00"]["final_loss"] == runs["00-2"]["final_loss"]
