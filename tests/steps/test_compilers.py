"""Compiled steps train as plain ones do, compile nothing after the first epoch, and do without a failing compiler."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from processes import run_ranks
from torch import nn
from torch._dynamo.utils import counters

import train
from networks import build_loss, build_network, initialise
from utils.config import Optimizer
from utils.distributed import Launch, World
from utils.optim import build_optimizer
from utils.steps import compilers
from utils.steps.compilers import Compiled, Traced
from utils.steps.eager import EagerStep, StepOptions

ALONE = World(Launch("test"), torch.device("cpu"))
RATE = 0.01


def make(world: World = ALONE, **options) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    built = build_optimizer(Optimizer(name="sgd"), network.named_parameters(), RATE)
    return EagerStep(network, build_loss("l1", lambda_rho=0.01), built, world, StepOptions(**options))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 4, 8, 8, 8, generator=generator), torch.rand(4, 5, 8, 8, 8, generator=generator)


def losses(step: EagerStep, seed: int = 0, count: int = 4) -> list[float]:
    step.warm_up(*batch(seed))
    return [float(step(*batch(seed + number), RATE)) for number in range(count)]


@pytest.mark.parametrize("options", [{}, {"enable_amp": True}, {"accumulation_steps": 2}])
def test_a_traced_step_trains_as_the_plain_one(options: dict, recwarn) -> None:
    traced = make(enable_jit=True, compiler="torchscript", **options)
    assert losses(traced) == pytest.approx(losses(make(**options)), rel=1e-3 if options.get("enable_amp") else 1e-6)
    assert traced.compiled
    assert not make(**options).compiled
    assert isinstance(traced._forward, Traced)
    assert isinstance(traced._forward._trace[0], torch.jit.ScriptModule)
    assert not [warning for warning in recwarn if "jit" in str(warning.message)]
    assert list(traced.network.state_dict()) == list(make().network.state_dict())


def ranks_losses(world: World) -> list[list[float]]:
    cases: list[dict] = [{}, {"enable_jit": True, "compiler": "torchscript"}]
    return [losses(make(world, bucket_cap_mb=0.005, **options), seed=10 * world.rank) for options in cases]


def test_a_traced_step_exchanges_gradients() -> None:
    answers = run_ranks(ranks_losses, 2)
    for plain, traced in answers:
        assert traced == pytest.approx(plain, rel=1e-6)
    assert answers[0][0] != pytest.approx(losses(make()), rel=1e-6), "the other rank's samples count"


def test_a_failing_trace_falls_back_with_one_warning(monkeypatch, caplog) -> None:
    def broken(*arguments, **options):
        raise RuntimeError("Tracing failed sanity checks!\nmore lines")

    monkeypatch.setattr(compilers.torch.jit, "trace", broken)
    step = make(enable_jit=True, compiler="torchscript")
    with caplog.at_level(logging.WARNING):
        assert losses(step) == losses(make())
    assert [record.getMessage() for record in caplog.records] == [
        "TorchScript failed, going on without it: Tracing failed sanity checks!"
    ]
    assert not step.compiled


def test_what_is_wrong_with_the_network_is_not_taken_for_a_failing_trace(caplog) -> None:
    step = make(enable_jit=True, compiler="torchscript")
    inputs, targets = batch()
    with pytest.raises(RuntimeError, match="channels"):
        step(inputs[:, :3], targets, RATE)
    assert not caplog.records


def small_buckets(world: World) -> tuple[list[float], list[float]]:
    options = {"bucket_cap_mb": 0.01}
    return losses(make(world, enable_jit=True, **options), count=2), losses(make(world, **options), count=2)


def test_buckets_below_the_first_ones_size_are_compiled_or_done_without() -> None:
    """PyTorch's compiler asserts that DDP's first bucket, of 1 MB, is the smallest."""
    for compiled, plain in run_ranks(small_buckets, 2):
        assert compiled == pytest.approx(plain, rel=1e-5)


def test_an_assertion_of_the_module_is_not_the_compilers(monkeypatch) -> None:
    class Asserting(nn.Module):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise AssertionError("of the module itself")

    monkeypatch.setattr(compilers.torch, "compile", lambda module: module)
    with pytest.raises(AssertionError, match="itself"):
        Compiled(Asserting())(torch.ones(1), torch.ones(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rewritten", [(), ("down1", "last")], ids=str)
def test_a_compiled_step_on_the_device_follows_the_plain_one(rewritten: tuple[str, ...]) -> None:
    """As the _opt configs train: bfloat16, channels last."""
    torch._dynamo.reset()
    curves = []
    for compiled in (False, True):
        network = build_network("unet", 16, width=8, scales=3, rewritten=rewritten)
        initialise(network, torch.Generator().manual_seed(0), scale=0.1)
        network.cuda().to(memory_format=torch.channels_last_3d)
        built = build_optimizer(Optimizer(name="sgd"), network.named_parameters(), RATE)
        world = World(Launch("test"), torch.device("cuda", 0))
        step = EagerStep(network, build_loss("l1"), built, world, StepOptions(enable_amp=True, enable_jit=compiled))
        generator = torch.Generator().manual_seed(1)
        pair = (torch.rand(4, channels, 16, 16, 16, generator=generator) for channels in (4, 5))
        inputs, targets = (part.cuda().contiguous(memory_format=torch.channels_last_3d) for part in pair)
        step.warm_up(inputs, targets)
        curves.append([float(step(inputs, targets, RATE)) for _ in range(6)])
        assert step.compiled is compiled
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("switches", [[], ["--enable_amp"], ["--set=accumulation_steps=2"]])
def test_nothing_is_compiled_after_the_first_epoch(tmp_path, data_flags, monkeypatch, switches) -> None:
    """Three epochs with validation, through the compiler that users get; frames and graphs are the compiler's count."""
    torch._dynamo.reset()
    compiled: list[int] = []
    plain = train.Trainer._train_epoch

    def count(trainer: train.Trainer) -> None:
        plain(trainer)
        compiled.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(train.Trainer, "_train_epoch", count)
    flags = [*data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false", "--num_epochs=3"]
    train.main(["--config=test", "--enable_jit", *flags, *switches])
    assert compiled[0] > 0
    assert compiled == [compiled[0]] * 3
    records = (tmp_path / "test/1GPU/00/metrics.jsonl").read_text().splitlines()
    assert [record for record in map(json.loads, records) if "Loss/valid" in record]
