"""The log lines and curves of a run are those of the tutorial."""

import re
from pathlib import Path
from typing import Any

import pytest
from log_lines import messages
from trainings import TOP, YAML, curves

import train
from utils import cli
from utils.config import load
from utils.optim.schedules import Schedule


def test_training_records_the_curves_of_the_tutorial(tmp_path: Path, data_flags: list[str], monkeypatch: Any) -> None:
    """A page of 113 hyperparameters showed the first five by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--run_num=first"]
    flags += ["--set=use_cache=None", "--set=report_pictures=true"]
    monkeypatch.chdir(TOP)
    monkeypatch.setattr("sys.argv", ["train.py", *flags])
    train.main()
    directory = tmp_path / "test/1ranks/first"
    points = {tag: dict(points) for tag, points in curves(directory).items()}
    schedule = Schedule(load(YAML, "test", cli.parse(flags).overrides).for_world(1))
    assert list(points["Loss/train"]) == list(points["Loss/valid"]) == [0, 8, 16]
    assert points["Learning Rate"] == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(points["Avg iters per sec"]) == [8, 16]
    log = (directory / "out.log").read_text()
    assert messages(log)[-1] == "DONE ---- rank 0"
    for name, word in (("Loss/train", "train loss="), ("Loss/valid", "val loss=")):
        line = rf"  Avg {word}(\d\.\d{{6}})" + r"  Total validation time: [\d.]+ sec" * word.startswith("val")
        logged = [float(value) for value in re.findall(f"{line}$", log, re.MULTILINE)]
        assert list(points[name].values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    assert list(points["hparam/final loss"].values()) == pytest.approx([points["Loss/valid"][16]])
    events = EventAccumulator(str(directory / "logs")).Reload()
    assert events.Tags()["images"] == ["Slices", "Slices, largest error"]
    content = events.PluginTagToContent("hparams")["_hparams_/experiment"]
    shown = [(not info.differs, info.name) for info in HParamsPluginData.FromString(content).experiment.hparam_infos]
    first = {"lr_schedule.start_lr", "optimizer.name", "network.width", "global_batch_size", "num_epochs"}
    assert {name for _, name in sorted(shown)[:5]} == first
    assert not {"optimizer.eps", "train_path"} & {name for _, name in shown}, "a default, and no effect on results"
