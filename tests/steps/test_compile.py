"""Compiled steps train like plain ones, compile in the first epoch only, and run uncompiled if the compiler fails."""

import functools
import logging
import os
import shutil
from unittest import mock

import pytest
import torch
from processes import run_ranks
from small_steps import LR, batch, make_step
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from trainings import directory, metrics

import train
from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.steps import compile as compilers
from utils.steps.compile import Compiled
from utils.steps.eager import EagerStep
from utils.training.trainer import Trainer


def why_no_compiler() -> str | None:
    """The reason why torch.compile cannot run on this CPU, or None."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        return "no C++ compiler, which torch.compile needs on a CPU"
    if " " in torch.__file__:
        return "torch.compile cannot link its C++ code to a torch in a path with a space"
    return None


needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


def losses(step: EagerStep, seed: int = 0) -> list[float]:
    return [float(step(batch(seed + number), LR)) for number in range(2)]


def trained_on_ranks(world: World) -> list[list[float]]:
    """PyTorch's compiler asserts that DDP's first bucket, of 1 MB, is the smallest; here it is not."""
    steps = [make_step(world=world, bucket_cap_mb=0.01, enable_jit=compiled) for compiled in (False, True)]
    return [losses(step, 10 * world.rank) for step in steps]


@pytest.mark.slow
@needs_compiler
def test_compiled_ranks_with_small_buckets_exchange_gradients() -> None:
    answers = run_ranks(trained_on_ranks, 2)
    for plain, compiled in answers:
        assert compiled == pytest.approx(plain, rel=1e-5)
    assert answers[0][0] != pytest.approx(losses(make_step()), rel=1e-6), "the other rank's samples must count"


def test_the_compilers_warnings_are_logged_once_and_not_on_each_rank(monkeypatch) -> None:
    compiler = logging.getLogger("torch._dynamo")
    monkeypatch.setattr(compiler, "level", compiler.level)
    for rank in (0, 1):
        Compiled(nn.Identity(), rank)
        assert compiler.getChild("a_module").isEnabledFor(logging.WARNING) == (rank == 0)


def test_a_failing_compiler_gives_one_warning_and_the_plain_step(monkeypatch, caplog) -> None:
    """An error of the network itself is not blamed on the compiler."""
    caplog.set_level("WARNING")  # a training run in this process may have set another one
    fails = mock.Mock(side_effect=TorchDynamoException("no C++ compiler\nmore lines"))
    monkeypatch.setattr(compilers.torch, "compile", lambda module: fails)
    step = make_step(enable_jit=True)
    assert losses(step) == losses(make_step())
    assert caplog.messages == ["torch.compile failed, the step runs without it: no C++ compiler"]
    assert not step.compiled
    assert step.describe() == ["Step: no autocast, not compiled: torch.compile failed"]
    monkeypatch.setattr(compilers.torch, "compile", lambda module: module)
    inputs, targets = batch()
    with pytest.raises(RuntimeError, match="channels"):
        make_step(enable_jit=True)(Batch(inputs[:, :3], targets), LR)
    with pytest.raises(AssertionError, match="itself"):
        Compiled(mock.Mock(spec=nn.Module, side_effect=AssertionError("from the module itself")))(inputs)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])])
def test_compiled_runs_follow_plain_ones_and_compile_in_one_epoch(backend, tmp_path, data_flags, monkeypatch) -> None:
    """Two epochs with validation. The default, inductor, spends 15 s in the C++ compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # other tests compile at the same time
    torch._dynamo.reset()
    monkeypatch.setattr(compilers.torch, "compile", functools.partial(torch.compile, backend=backend))
    graphs: list[int] = []
    plain = Trainer._train_epoch

    def count(trainer: Trainer) -> None:
        plain(trainer)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(Trainer, "_train_epoch", count)
    curves = []
    for more in ([], ["--enable_jit"]):
        graphs.clear()
        counters.clear()
        folder = tmp_path / str(len(curves))
        train.main(["--config=test", *more, *data_flags, f"--set=expdir={folder}", "--set=report_baselines=false"])
        records = metrics(directory(folder))
        curves.append([record["Loss/valid"] for record in records if "Loss/valid" in record])
        assert (graphs[0] > 0) == bool(more)
        assert graphs == [graphs[0]] * 2
    assert len(curves[0]) == 3
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
