"""The best checkpoint: kept, linked and found whenever the process that saves it is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from log_lines import other_lines
from processes import GENEROUS, context, run, run_ranks
from trainings import YAML, NoWaiting, assert_same_training, directory

import train
from utils.config import Config
from utils.distributed.world import World
from utils.errors import UserError
from utils.steps.eager import EagerStep
from utils.training import checkpointer as checkpointers
from utils.training.checkpoint import (
    BEST,
    FOLDER,
    TRAINING,
    WEIGHTS,
    saved_steps,
    step_directory,
    weights_file,
    write,
)
from utils.training.checkpointer import AsyncCheckpointer
from utils.training.resume import Start
from utils.training.state import TrainState

KILLED = 9
# Validation losses by the number of steps: the second epoch is the best.
LOSSES = {0: 5.0, 8: 3.0, 16: 1.0, 24: 2.0, 32: 4.0}


class ScriptedStep(EagerStep):
    """A step whose validation losses are LOSSES; `done` steps were made by earlier processes."""

    done: ClassVar[int] = 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        ScriptedStep.done += 1
        return super().__call__(*arguments)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.full_like(super().evaluate(inputs, targets), LOSSES.get(self.done, 9.0))


def train_until(flags: list[str], done: int, function: str, call: int, log: str) -> None:
    """Trains after `done` steps; ends the process without any cleanup at a call of a function that saves."""
    real, calls = getattr(checkpointers, function, None) or getattr(AsyncCheckpointer, function), []

    def end(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            os._exit(KILLED)
        real(*arguments)

    setattr(checkpointers if hasattr(checkpointers, function) else AsyncCheckpointer, function, end)
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    NoWaiting().install()
    ScriptedStep.done = done
    train.main(flags, ScriptedStep)


@pytest.fixture
def trained(tmp_path: Path, data_flags: list[str]) -> Callable[..., tuple[int, str]]:
    """trained(name, done, function, call): a training run of four epochs -> (exit code, log)."""

    def start(name: str, done: int = 0, function: str = "prune", call: int = 0) -> tuple[int, str]:
        flags = [f"--yaml_config={YAML}", "--config=test", *data_flags, "--set=report_baselines=false"]
        flags += ["--num_epochs=4", "--set=checkpoint.keep_last=1", f"--set=expdir={tmp_path / name}"]
        log = tmp_path / f"{name}.log"
        process = context().Process(target=train_until, args=(flags, done, function, call, str(log)))
        process.start()
        process.join(GENEROUS)
        assert process.exitcode is not None
        return process.exitcode, log.read_text()

    return start


@pytest.mark.parametrize(("call", "step"), [(1, 8), (2, 16)])
def test_a_kill_before_the_link_moves_loses_no_best_checkpoint(
    tmp_path: Path, trained: Any, call: int, step: int
) -> None:
    """A fixed bug: the link stayed behind; predictions used a worse checkpoint, and the best one was removed."""
    whole, parts = directory(tmp_path / "whole"), directory(tmp_path / "parts")
    assert trained("whole")[0] == 0
    assert trained("parts", 0, "update_symlink", call)[0] == KILLED
    linked = os.readlink(parts / FOLDER / BEST) if os.path.lexists(parts / FOLDER / BEST) else None
    assert linked == {8: None, 16: "step_00000008"}[step], "the epoch before is the best"
    assert weights_file(parts) == weights_file(parts / FOLDER / BEST) == step_directory(parts / FOLDER, step) / WEIGHTS
    assert trained("parts", step)[0] == 0
    assert_same_training(whole, parts, steps=32)
    assert saved_steps(parts / FOLDER) == saved_steps(whole / FOLDER) == [32, 16]
    assert weights_file(parts) == step_directory(parts / FOLDER, 16) / WEIGHTS


# --- readers ---------------------------------------------------------------------------------------------------------


def make(folder: Path, steps: dict[int, int], link: int | None = None) -> Path:
    """Checkpoints that record a best step each."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, best_step in steps.items():
        weights = {"network": {"weight": torch.full((3,), float(step))}, "config": {}, "best_step": best_step}
        training = {"optimizer": {}, "scaler": {}, "random": [], "state": {"step": step, "best_step": best_step}}
        write(step_directory(folder, step), weights, training)
    if link is not None:
        (folder / BEST).symlink_to(step_directory(folder, link).name)
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_a_run_directory_stands_for_its_best_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    folder = make(run / FOLDER, {8: 8, 16: 16, 24: 16}, link=8)
    assert weights_file(run) == step_directory(folder, 16) / WEIGHTS
    (step_directory(folder, 24) / TRAINING).unlink()
    assert weights_file(run) == step_directory(folder, 16) / WEIGHTS, "weights do not need the rest"
    assert not caplog.records
    cut(step_directory(folder, 24) / WEIGHTS)
    cut(step_directory(folder, 16) / WEIGHTS)
    assert weights_file(run) == step_directory(folder, 8) / WEIGHTS
    assert caplog.text.count("is skipped: weights.pt is damaged") == 2, "not without a warning"


def test_a_best_checkpoint_whose_save_failed_is_replaced_by_the_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed bug: after one failed save, readers found no best checkpoint and suggested a worse one than the link."""
    run, real = tmp_path / "run", checkpointers.write
    folder = run / FOLDER
    run.mkdir()

    def write_or_fail(target: Path, *content: Any) -> None:
        if target == step_directory(folder, 16):
            raise OSError(28, "No space left on device")
        real(target, *content)

    monkeypatch.setattr(checkpointers, "write", write_or_fail)
    checkpointer = AsyncCheckpointer(folder, Config(checkpoint={"keep_last": 1}), {})
    for step, best_step in ((8, 8), (16, 16), (24, 16), (32, 16)):
        content = {"network": {"weight": torch.zeros(3)}, "optimizer": {}, "scaler": {}, "random": []}
        checkpointer.save(content, TrainState(step=step, best_step=best_step), wait=True)
    assert saved_steps(folder) == [32, 8]
    for path in (run, folder / BEST):
        caplog.clear()
        assert weights_file(path) == step_directory(folder, 8) / WEIGHTS
        (line,) = caplog.messages
        assert (
            line == f"The best checkpoint, {step_directory(folder, 16)}, is missing; using {step_directory(folder, 8)}"
        )
    (folder / BEST).unlink()
    with pytest.raises(UserError, match=r"step_00000016 is missing; give another checkpoint, for example .*32$"):
        weights_file(run)


def test_a_copy_of_the_best_checkpoint_alone_is_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "run" / FOLDER, {8: 8})
    step_directory(folder, 8).rename(folder / BEST)
    assert weights_file(tmp_path / "run") == folder / BEST / WEIGHTS


class LoadedWeights:
    """A step that keeps the weights it loads."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights


def start_from(world: World, runs: list[str]) -> float:
    """A weight that this rank has loaded with --init_from; each rank finds another run there."""
    step: Any = LoadedWeights()
    Start({}, runs[world.rank]).restore(step, world)
    return float(step.weights["weight"][0])


def test_all_ranks_start_from_the_same_weights(tmp_path: Path) -> None:
    """A fixed bug: each rank looked for the best checkpoint, which a run in progress may replace meanwhile."""
    for step in (8, 16):
        make(tmp_path / str(step) / FOLDER, {step: step})
    assert run_ranks(start_from, 2, [str(tmp_path / str(step)) for step in (8, 16)]) == [8.0, 8.0]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ({8: 0, 16: 0}, "has no best checkpoint: no epoch so far has lowered the validation loss"),
        ({16: 16, 24: 12}, "has no best checkpoint: HERE/step_00000012 is missing; give another checkpoint"),  # no link
        ({}, "no usable checkpoint in HERE; give a run directory, a checkpoint directory, or a weights.pt"),
    ],
    ids=str,
)
def test_a_run_without_its_best_checkpoint_is_one_line(tmp_path: Path, steps: dict[int, int], reason: str) -> None:
    folder = make(tmp_path / "run" / FOLDER, steps, link=8)
    for path in (folder.parent, folder / BEST):
        with pytest.raises(UserError) as caught:
            weights_file(path)
        assert reason.replace("HERE", str(folder)) in str(caught.value)
    if steps:
        assert f"for example the last one, {step_directory(folder, max(steps))}" in str(caught.value)
    end = run(["export.py", f"--checkpoint={folder.parent}", f"--output={tmp_path / 'out.pt2'}"], tmp_path / "program")
    assert (end.returncode, other_lines(end.stderr)) == (2, [f"error: {caught.value}"])
