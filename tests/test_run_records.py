"""What a run writes: log lines, curves, config and provenance."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import messages
from trainings import TOP, YAML, curves

import train
from utils import cli
from utils.config import load
from utils.optim.schedules import Schedule


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> tuple[list[str], Path]:
    """The flags of a training run of config 'test', and its directory."""
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path_factory.mktemp('trained')}", "--run_num=first"]
    flags += ["--set=use_cache=None", "--set=report_pictures=true"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(TOP)
        patched.setattr("sys.argv", ["train.py", *flags])
        train.main()
    (directory,) = Path(flags[-4].partition("=expdir=")[2]).glob("test/1ranks/first")
    return flags, directory


def test_training_logs_the_lines_of_the_tutorial(trained: Any) -> None:
    log = (trained[1] / "out.log").read_text()
    lines = messages(log)
    number = r"\d+(\.\d+)?(e-\d+)?"
    validation = rf"  Avg val loss=\d\.\d{{6}}  Total validation time: {number} sec"
    expected = [r"Before training: \d+ batches of validation with the untrained network", validation]
    for epoch in (1, 2):
        line = rf"Time taken for epoch {epoch} is {number} sec, avg {number} samples/sec"
        expected += [line, r"  Avg train loss=\d\.\d{6}", validation]
    expected.append("DONE ---- rank 0")
    logged = [line for line in lines if re.match("Time taken|  Avg|Before|DONE", line)]
    for message, pattern in zip(logged, expected, strict=True):
        assert re.fullmatch(pattern, message)
    assert lines[-1] == "DONE ---- rank 0"
    assert log.index("Config test") < log.index("  num_epochs: 2 (default 10)") < log.index("Before training")


def test_training_records_the_curves_of_the_tutorial(trained: Any) -> None:
    """A page of 113 hyperparameters showed the first five by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    flags, directory = trained
    points = {tag: dict(points) for tag, points in curves(directory).items()}
    schedule = Schedule(load(YAML, "test", cli.parse(flags).overrides).for_world(1))
    assert list(points["Loss/train"]) == list(points["Loss/valid"]) == [0, 8, 16]
    assert points["Learning Rate"] == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(points["Avg iters per sec"]) == [8, 16]
    log = (directory / "out.log").read_text()
    for name, word in (("Loss/train", "train"), ("Loss/valid", "val")):
        logged = [float(value) for value in re.findall(rf"  Avg {word} loss=(\S+)", log)]
        assert list(points[name].values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    assert list(points["hparam/final loss"].values()) == pytest.approx([points["Loss/valid"][16]])
    events = EventAccumulator(str(directory / "logs")).Reload()
    assert events.Tags()["images"] == ["Slices", "Slices, largest error"]
    content = events.PluginTagToContent("hparams")["_hparams_/experiment"]
    shown = [(not info.differs, info.name) for info in HParamsPluginData.FromString(content).experiment.hparam_infos]
    first = {"lr_schedule.start_lr", "optimizer.name", "network.width", "global_batch_size", "num_epochs"}
    assert {name for _, name in sorted(shown)[:5]} == first
    assert not {"optimizer.eps", "train_path"} & {name for _, name in shown}, "a default, and no effect on results"


def test_training_records_its_config_and_provenance(trained: Any) -> None:
    flags, directory = trained
    config = load(str(directory / "config.yaml"), "test")
    assert config == load(YAML, "test", cli.parse(flags).overrides)
    record = json.loads((directory / "provenance.json").read_text())
    assert record["command"] == ["train.py", *flags]
    assert (record["hostnames"], record["world_size"]) == ([socket.gethostname()], 1)
    assert record["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["git_commit"])
