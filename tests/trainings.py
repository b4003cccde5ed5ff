"""Training runs of config 'test', their run directories, and the comparison of two of them bit for bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import GENEROUS, TOP, context

import predict
import train
from utils.distributed.launch import Launch
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.run import checkpoint, tags
from utils.run.checkpoint import BEST
from utils.steps.eager import EagerStep

YAML = str(TOP / "config" / "UNet.yaml")
ALONE = World(Launch("test"), torch.device("cpu"))
STEPS = 16  # of config test: two epochs of eight
# Measured times, which differ from run to run.
CLOCKS = {"seconds", tags.ITERATIONS_PER_SECOND, tags.STEP_SAMPLES_PER_SECOND, tags.STEP_TFLOPS_PER_RANK}
CLOCKS |= {tags.STEP_DATA_WAIT, tags.STEP_SLOWEST_RANK}


def train_on(world: World, flags: list[str], step_class: type = EagerStep, signals: Signals | None = None) -> None:
    """Trains in this process, which is one rank."""
    options = train.cli.parse([f"--yaml_config={YAML}", *flags])
    config = train.configs.load(options.yaml_config, options.config, options.overrides)
    train.run(options, train.open_volumes(config.for_world(world.size)), world, step_class, signals or Signals())


def predict_on(world: World, flags: list[str]) -> None:
    """Predicts in this process, which is one rank."""
    predict.predict(predict.parse(flags), world, Signals())


def killed(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a process of its own, which it ends with SIGKILL."""
    process = context().Process(target=function, args=arguments)
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == -signal.SIGKILL


def directory(expdir: Path | str, ranks: int = 1, run_num: str = "00") -> Path:
    return Path(expdir) / "test" / f"{ranks}ranks" / run_num


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def last(run: Path) -> checkpoint.Checkpoint:
    saved = checkpoint.load_newest(run / "checkpoints")
    assert saved is not None
    return saved


def best(run: Path) -> str | None:
    """The checkpoint that the link `best` names; None if no epoch has lowered the loss."""
    link = run / "checkpoints" / BEST
    return link.readlink().name if link.is_symlink() else None


def metrics(run: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl without measured times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in records]


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_equal(first: Any, second: Any, name: str = "") -> None:
    """Asserts that nested dictionaries and lists of tensors are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, name
        assert torch.equal(first, second), name
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), name
        for key in first:
            assert_equal(first[key], second[key], f"{name}/{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), name
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_equal(*pair, f"{name}/{index}")
    else:
        assert first == second, name


def assert_same_training(whole: Path, parts: Path, steps: int = STEPS) -> None:
    """Asserts that both ended with the same bits, the same records, each once, and the same best checkpoint."""
    ends = [last(run) for run in (whole, parts)]
    assert ends[0].state.step == steps
    for end in ends:
        for clock in ("seconds", "epoch_seconds", "process_seconds", "step_seconds", "samples_per_second"):
            setattr(end.state, clock, 0.0)
            end.training["state"][clock] = 0.0
        end.weights["config"]["expdir"] = ""
    assert_equal(ends[0].weights, ends[1].weights)
    assert_equal(ends[0].training, ends[1].training)
    assert metrics(whole) == metrics(parts)
    expected, resumed = curves(whole), curves(parts)
    assert expected.keys() == resumed.keys()
    for tag, points in expected.items():
        assert [step for step, _ in points] == [step for step, _ in resumed[tag]], f"{tag}: lost or double points"
        if tag not in CLOCKS:
            assert points == resumed[tag], tag
    assert best(whole) == best(parts)
