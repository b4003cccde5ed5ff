"""Compiled steps train as plain ones do, compile in the first epoch alone, and run plain where a compiler fails."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from processes import run_ranks
from small_steps import RATE, batch, differing, make_step, snapshot
from torch import nn
from torch._dynamo.utils import counters

import train
from networks import build_network, initialise
from utils.distributed.world import Launch, World
from utils.steps import compile as compilers
from utils.steps.compile import Compiled
from utils.steps.eager import EagerStep


def why_no_compiler() -> str | None:
    """What torch.compile lacks on a CPU."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        return "no C++ compiler, which torch.compile needs on a CPU"
    if " " in torch.__file__:
        return "torch.compile cannot link its C++ code to a torch in a path with a space"
    return None


needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


def losses(step: EagerStep, seed: int = 0, count: int = 4) -> list[float]:
    step.warm_up(*batch(seed))
    return [float(step(*batch(seed + number), RATE)) for number in range(count)]


def test_a_traced_step_trains_as_the_plain_one() -> None:
    traced, plain = make_step(enable_jit=True, compiler="torchscript"), make_step()
    assert losses(traced) == pytest.approx(losses(plain), rel=1e-6)
    assert (traced.compiled, plain.compiled) == (True, False)
    assert isinstance(traced._forward._trace[0], torch.jit.ScriptModule)
    assert list(traced.network.state_dict()) == list(plain.network.state_dict())


def trained_on_ranks(world: World) -> list[list[float]]:
    """PyTorch's compiler asserts that DDP's first bucket, of 1 MB, is the smallest; here it is not."""
    steps = [make_step(world=world, bucket_cap_mb=0.01, enable_jit=compiled) for compiled in (False, True)]
    return [losses(step, 10 * world.rank, 2) for step in steps]


@pytest.mark.slow
@needs_compiler
def test_compiled_ranks_with_small_buckets_exchange_gradients() -> None:
    answers = run_ranks(trained_on_ranks, 2)
    for plain, compiled in answers:
        assert compiled == pytest.approx(plain, rel=1e-5)
    assert answers[0][0] != pytest.approx(losses(make_step(), count=2), rel=1e-6), "the other rank's samples count"


class CompilerFailure(Exception):
    __module__ = "torch._inductor.exc"


@pytest.mark.parametrize("compiler", ["inductor", "torchscript"])
def test_a_failing_compiler_gives_one_warning_and_the_plain_step(compiler: str, monkeypatch, caplog) -> None:
    def broken(*arguments, **options):
        raise (CompilerFailure if compiler == "inductor" else RuntimeError)("no C++ compiler\nmore lines")

    monkeypatch.setattr(compilers.torch.jit, "trace", broken)
    monkeypatch.setattr(compilers.torch, "compile", lambda module: broken)
    step = make_step(enable_jit=True, compiler=compiler)
    with caplog.at_level(logging.WARNING):
        assert losses(step) == losses(make_step())
    name = "torch.compile" if compiler == "inductor" else "TorchScript"
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} failed, going on without it: no C++ compiler"
    ]
    assert not step.compiled
    assert step.describe() == [f"Step: no autocast, not compiled: {compiler} failed"]


class Asserting(nn.Module):
    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise AssertionError("of the module itself")


@pytest.mark.parametrize("compiler", ["inductor", "torchscript"])
def test_an_error_of_the_network_is_not_blamed_on_the_compiler(compiler: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compilers.torch, "compile", lambda module: module)
    step = make_step(enable_jit=True, compiler=compiler)
    inputs, targets = batch()
    with pytest.raises(RuntimeError, match="channels"):
        step(inputs[:, :3], targets, RATE)
    with pytest.raises(AssertionError, match="itself"):
        Compiled(Asserting())(torch.ones(1), torch.ones(1))
    assert not caplog.records


def test_a_compiled_step_skips_an_update_with_nan() -> None:
    """aot_eager runs the graphs that inductor traces, without the C++ compiler's seconds."""
    torch._dynamo.reset()
    undisturbed, disturbed = (make_step("adam", enable_jit=True) for _ in range(2))
    for step in (undisturbed, disturbed):
        step._forward._compiled = torch.compile(step._objective, backend="aot_eager")
    for number, spoilt in enumerate(("inputs", "targets")):
        inputs, targets = batch(50)
        (inputs if spoilt == "inputs" else targets)[1, 2, 3] = float("nan")
        before = snapshot(disturbed)
        disturbed(inputs, targets, RATE)
        after = snapshot(disturbed)
        assert differing({name: after[name] for name in before}, before) == []
        for step in (undisturbed, disturbed):
            step(*batch(number), RATE)
        assert differing(snapshot(disturbed), snapshot(undisturbed)) == []
    assert disturbed.compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("space_to_depth", [(), ("down1", "last")], ids=str)
def test_a_compiled_step_on_the_device_follows_the_plain_one(space_to_depth: tuple[str, ...]) -> None:
    """As the _opt configs train: bfloat16, channels last."""
    torch._dynamo.reset()
    curves = []
    for compiled in (False, True):
        network = build_network("unet", 16, width=8, scales=3, space_to_depth=space_to_depth)
        initialise(network, torch.Generator().manual_seed(0), scale=0.1)
        network.cuda().to(memory_format=torch.channels_last_3d)
        world = World(Launch("test"), torch.device("cuda", 0))
        step = make_step("sgd", world=world, network=network, enable_amp=True, enable_jit=compiled)
        generator = torch.Generator().manual_seed(1)
        pair = (torch.rand(4, channels, 16, 16, 16, generator=generator) for channels in (4, 5))
        inputs, targets = (part.cuda().contiguous(memory_format=torch.channels_last_3d) for part in pair)
        step.warm_up(inputs, targets)
        curves.append([float(step(inputs, targets, RATE)) for _ in range(6)])
        assert step.compiled is compiled
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)
    assert curves[0][-1] < curves[0][0]


@needs_compiler
def test_a_compiled_training_follows_the_plain_one_and_compiles_in_its_first_epoch_alone(
    tmp_path, data_flags, monkeypatch
) -> None:
    """Two epochs with validation, through the compiler that users get; graphs are counted by the compiler."""
    torch._dynamo.reset()
    graphs: list[int] = []
    plain = train.Trainer._train_epoch

    def count(trainer: train.Trainer) -> None:
        plain(trainer)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(train.Trainer, "_train_epoch", count)
    curves = {}
    for name, more in (("plain", []), ("compiled", ["--enable_jit"])):
        graphs.clear()
        counters.clear()
        flags = [*data_flags, f"--set=expdir={tmp_path / name}", "--set=report_baselines=false"]
        train.main(["--config=test", *more, *flags])
        records = map(json.loads, (tmp_path / name / "test/1GPU/00/metrics.jsonl").read_text().splitlines())
        curves[name] = [record["Loss/valid"] for record in records if "Loss/valid" in record]
        assert (graphs[0] > 0) == (name == "compiled")
        assert graphs == [graphs[0]] * 2
    assert len(curves["plain"]) == 3
    assert curves["compiled"] == pytest.approx(curves["plain"], rel=1e-4)
