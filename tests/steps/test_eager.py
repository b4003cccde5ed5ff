"""The eager step: what it computes, in every mode it has."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from networks import build_loss, build_network, initialise
from utils.config import Optimizer
from utils.distributed import Launch, World
from utils.optim import OPTIMIZERS, build_optimizer
from utils.steps import eager
from utils.steps.eager import EagerStep, StepOptions

ALONE = World(Launch("test"), torch.device("cpu"))
RATE = 0.01


def make(optimizer: str = "sgd", scale: float = 0.1, **options) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=scale)
    built = build_optimizer(Optimizer(name=optimizer), network.parameters(), RATE)
    return EagerStep(network, build_loss("l1"), built, ALONE, StepOptions(**options))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 4, 8, 8, 8, generator=generator), torch.rand(4, 5, 8, 8, 8, generator=generator)


def parameters(step: EagerStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.network.parameters()])


def test_one_step_is_forward_backward_update() -> None:
    step, plain = make(), make()
    inputs, targets = batch()
    loss = step(inputs, targets, RATE)
    expected = plain._bare(inputs, targets)
    gradients = torch.autograd.grad(expected, list(plain.network.parameters()))
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(parameters(step), parameters(plain) - RATE * flat, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(step.gradient_norm, flat.norm())


def test_the_rate_is_the_one_given_with_the_step() -> None:
    step = make()
    before = parameters(step)
    step(*batch(), 0.0)
    assert torch.equal(parameters(step), before)
    step(*batch(), RATE)
    assert not torch.equal(parameters(step), before)


def test_clipping_limits_the_update_and_reports_the_norm_before_it() -> None:
    free, clipped = make(), make(clip_grad_norm=1e-3)
    start = parameters(free)
    free(*batch(), RATE)
    clipped(*batch(), RATE)
    torch.testing.assert_close(clipped.gradient_norm, free.gradient_norm)
    assert float(free.gradient_norm) > 1e-3
    assert float((parameters(clipped) - start).norm()) == pytest.approx(RATE * 1e-3, rel=1e-2)


def test_bfloat16_trains_close_to_float32() -> None:
    full, half = make("adam"), make("adam", enable_amp=True)
    losses = [(float(full(*batch(), RATE)), float(half(*batch(), RATE))) for _ in range(10)]
    assert losses[-1][0] < 0.9 * losses[0][0]
    for exact, rounded in losses:
        assert rounded == pytest.approx(exact, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.network.parameters())
    assert not half._scaler.is_enabled()


def test_float16_scales_gradients_and_skips_an_overflowing_update() -> None:
    step = make("adam", enable_amp=True, precision="float16")
    before, scale = parameters(step), step._scaler.get_scale()
    inputs, targets = batch()
    step(inputs * float("inf"), targets, RATE)
    assert torch.equal(parameters(step), before), "an update with infinite gradients must not be made"
    assert step._scaler.get_scale() < scale
    for seed in range(3):
        step(*batch(seed), RATE)
    assert not torch.equal(parameters(step), before)
    assert torch.isfinite(parameters(step)).all()


def test_float16_reports_the_unscaled_gradient_norm() -> None:
    exact, scaled = make(), make(enable_amp=True, precision="float16")
    exact(*batch(), RATE)
    scaled(*batch(), RATE)
    assert float(scaled.gradient_norm) == pytest.approx(float(exact.gradient_norm), rel=0.02)


def test_evaluation_changes_nothing_and_predictions_make_its_loss() -> None:
    step = make()
    before = parameters(step)
    inputs, targets = batch()
    loss = step.evaluate(inputs, targets)
    assert float(loss) == pytest.approx(float((step.predict(inputs) - targets).abs().mean()), rel=1e-6)
    assert torch.equal(parameters(step), before)
    assert all(parameter.grad is None for parameter in step.network.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    step = make(name, scale=0.3)
    first, *_, last = [float(step(*batch(), 0.1 if name == "sgd" else RATE)) for _ in range(20)]
    assert last < 0.95 * first


def test_fused_adam_follows_plain_adam() -> None:
    step = make("adam")
    assert step._optimizer.defaults["fused"]
    plain = make("adam")
    plain._optimizer = torch.optim.Adam(plain.network.parameters(), lr=RATE, foreach=False, fused=False)
    for seed in range(20):
        gradients = torch.randn(len(parameters(step)), generator=torch.Generator().manual_seed(seed))
        for one in (step, plain):
            nn.utils.vector_to_parameters(parameters(one), one.network.parameters())
            start = 0
            for parameter in one.network.parameters():
                parameter.grad = gradients[start : start + parameter.numel()].view_as(parameter).clone()
                start += parameter.numel()
            one._optimizer.step()
    assert float((parameters(step) - parameters(plain)).abs().max()) <= 1e-6


def test_a_failing_compiler_falls_back_to_eager_with_one_warning(monkeypatch, caplog) -> None:
    class CompilerFailure(Exception):
        __module__ = "torch._inductor.exc"

    def broken(module: nn.Module):
        def call(*arguments):
            raise CompilerFailure("no C++ compiler\nmore lines")

        return call

    monkeypatch.setattr(eager.torch, "compile", broken)
    step, plain = make(enable_jit=True), make()
    with caplog.at_level(logging.WARNING):
        losses = [step(*batch(seed), RATE) for seed in range(3)]
    assert losses == [plain(*batch(seed), RATE) for seed in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed, going on without it: no C++ compiler"
    ]


def test_an_error_of_the_network_itself_is_not_taken_for_the_compilers(monkeypatch) -> None:
    monkeypatch.setattr(eager.torch, "compile", lambda module: module)
    step = make(enable_jit=True)
    inputs, targets = batch()
    with pytest.raises(RuntimeError):
        step(inputs[:, :3], targets, RATE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"enable_amp": True}, {"enable_amp": True, "precision": "float16"}])
def test_the_step_never_waits_for_the_device(options: dict) -> None:
    world = World(Launch("test"), torch.device("cuda", 0))
    network = build_network("unet", 8, width=4, scales=2).cuda()
    built = build_optimizer(Optimizer(), network.parameters(), RATE)
    step = EagerStep(network, build_loss("l1"), built, world, StepOptions(**options))
    inputs, targets = (part.cuda() for part in batch())
    step(inputs, targets, RATE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(inputs, targets, RATE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
