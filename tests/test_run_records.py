"""What a run writes: log lines, curves, config and provenance."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from log_lines import messages
from processes import TOP

import train
from utils import cli
from utils.config import load
from utils.optim.schedules import build_schedule

SHIPPED = str(TOP / "config" / "UNet.yaml")


class Trained(NamedTuple):
    """A training run of config 'test'."""

    flags: list[str]
    stdout: str
    stderr: str
    directory: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Trained:
    expdir = tmp_path_factory.mktemp("trained")
    flags = ["--config=test", *data_flags, f"--set=expdir={expdir}", "--run_num=first", "--set=use_cache=None"]
    flags += ["--set=report_pictures=true"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(TOP)
        patched.setattr(sys, "argv", ["train.py", *flags])
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            train.main()
    return Trained(flags, stdout.getvalue(), stderr.getvalue(), expdir / "test" / "1ranks" / "first")


def test_training_logs_the_lines_of_the_tutorial(trained: Trained) -> None:
    log = (trained.directory / "out.log").read_text()
    lines = messages(log)
    number = r"\d+(\.\d+)?(e-\d+)?"
    loss = r"  Avg train loss=\d\.\d{6}"
    validation = rf"  Avg val loss=\d\.\d{{6}}  Total validation time: {number} sec"
    expected = ["Before training:", validation]
    for epoch in (1, 2):
        line = rf"Time taken for epoch {epoch} is {number} sec, avg {number} samples/sec"
        expected += [line, loss, validation]
    expected.append("DONE ---- rank 0")
    logged = [line for line in lines if re.match("Time taken|  Avg|Before|DONE", line)]
    assert len(logged) == len(expected)
    for message, pattern in zip(logged, expected, strict=True):
        assert re.fullmatch(pattern, message)
        assert message in trained.stderr, "the terminal shows the lines of the log file"
    assert lines[-1] == "DONE ---- rank 0"
    dump = next(index for index, line in enumerate(lines) if line.startswith("Config test"))
    assert dump < lines.index(logged[0])
    assert "  num_epochs: 2 (default 10)" in log
    assert "Traceback" not in trained.stderr
    assert trained.stdout == ""


def test_training_records_the_curves_of_the_tutorial(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags, directory = trained.flags, trained.directory
    events = EventAccumulator(str(directory / "logs"))
    events.Reload()

    def curve(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    schedule = build_schedule(load(SHIPPED, "test", cli.parse(flags).overrides).for_world(1))
    assert list(curve("Loss/train")) == list(curve("Loss/valid")) == [0, 8, 16]
    assert curve("Learning Rate") == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(curve("Avg iters per sec")) == [8, 16]
    log = (directory / "out.log").read_text()
    for name, word in (("Loss/train", "train"), ("Loss/valid", "val")):
        logged = [float(value) for value in re.findall(rf"  Avg {word} loss=(\S+)", log)]
        assert list(curve(name).values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"lr_schedule.start_lr" in hparams
    assert b"optimizer.eps" not in hparams, "it has its default value"
    assert b"train_path" not in hparams, "it changes no result"
    assert events.Scalars("hparam/final loss")[0].value == pytest.approx(curve("Loss/valid")[16])
    assert events.Tags()["images"] == ["Slices", "Slices, largest error"]


def test_training_records_its_config_and_provenance(trained: Trained) -> None:
    flags, directory = trained.flags, trained.directory
    config = load(str(directory / "config.yaml"), "test")
    assert config == load(SHIPPED, "test", cli.parse(flags).overrides)
    assert list(yaml.safe_load((directory / "config.yaml").read_text())) == ["test"]
    record = json.loads((directory / "provenance.json").read_text())
    assert record["command"] == ["train.py", *flags]
    assert record["hostnames"] == [socket.gethostname()]
    assert record["world_size"] == 1
    assert record["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["git_commit"])
