"""The run directory belongs to one run at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils import config as configs
from utils import logs
from utils.distributed import Launch, World
from utils.errors import UserError

TOP = Path(__file__).parent.parent
ALONE = World(Launch("test"), torch.device("cpu"))


@pytest.fixture
def config() -> configs.Config:
    return configs.load(str(TOP / "config/UNet.yaml"), "test")


def test_two_runs_at_once_into_one_directory_the_second_is_refused(tmp_path: Path, config: configs.Config) -> None:
    first = logs.open_run(config, "test", tmp_path, ALONE)
    first.scalars({"Loss/train": 1.0}, 0)
    with pytest.raises(UserError, match=r"another run is writing to .* --run_num of its own"):
        logs.open_run(config, "test", tmp_path, ALONE)
    first.scalars({"Loss/train": 0.5}, 1)
    first.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1]
    logs.open_run(config, "test", tmp_path, ALONE).close()


def test_a_benchmark_leaves_the_records_of_an_earlier_training_alone(tmp_path: Path, config: configs.Config) -> None:
    training = logs.open_run(config, "test", tmp_path, ALONE)
    training.scalars({"Loss/train": 1.0}, 0)
    training.close()
    kept = {path: path.read_bytes() for path in (tmp_path / "metrics.jsonl", *(tmp_path / "logs").iterdir())}
    assert len(kept) == 2
    benchmark = logs.open_run(config, "test", tmp_path, ALONE)
    benchmark.line("BENCHY::SUMMARY::IO average trial throughput: 1.000 +/- 0.000")
    benchmark.close()
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_saved_config_keeps_the_global_batch_for_another_number_of_ranks(tmp_path: Path, config) -> None:
    logs.open_run(config.for_world(4), "test", tmp_path, ALONE).close()
    path = str(tmp_path / "config.yaml")
    again = configs.load(path, configs.default_name(path)).for_world(2)
    assert (again.global_batch_size, again.local_batch_size) == (8, 4)


def test_ctrl_c_is_one_line_and_exit_code_130() -> None:
    code = "from utils.errors import one_line_errors\nwith one_line_errors(): raise KeyboardInterrupt"
    result = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")
