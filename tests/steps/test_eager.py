"""The eager step in all its modes: update, warm-up, skipped updates, gradient exchange, saved state."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from processes import run_ranks
from small_steps import (
    ALONE,
    LR,
    bad_batch,
    batch,
    differing,
    flat_parameters,
    make_step,
    small_network,
    snapshot,
    step_that_skips,
    world_on,
)
from torch import nn

from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.optim.optimizers import OPTIMIZERS
from utils.steps.eager import EagerStep

# Of these, each optimizer uses what it has.
SETTINGS = {
    name: {"name": name, "momentum": 0.9, "weight_decay": 0.1, "precondition_frequency": 1} for name in OPTIMIZERS
}
MODES: list[dict[str, Any]] = [
    {},
    {"accumulation_steps": 4},
    {"clip_grad_norm": 0.1, "accumulation_steps": 2},
    {"enable_amp": True},
    {"enable_amp": True, "precision": "float16"},
]


def test_one_step_is_forward_backward_clip_and_update_at_the_given_learning_rate() -> None:
    step, plain, clipped = make_step(), make_step(), make_step(clip_grad_norm=1e-3)
    start = flat_parameters(plain)
    loss = step(batch(), LR)
    expected = plain._trained(*batch())
    gradients = torch.autograd.grad(expected, list(plain.network.parameters()))
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    assert not step.evaluate(batch()).requires_grad
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(flat_parameters(step), start - LR * flat, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(step.gradient_norm, flat.norm())
    clipped(batch(), LR)
    torch.testing.assert_close(clipped.gradient_norm, step.gradient_norm, msg="the norm before clipping")
    assert float((flat_parameters(clipped) - start).norm()) == pytest.approx(LR * 1e-3, rel=1e-2)


def make_changeable(world: World = ALONE, **options: Any) -> EagerStep:
    """Its network updates running statistics and draws random numbers in training mode."""
    torch.manual_seed(0)
    first, last = nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 5, 3, padding=1)
    network = nn.Sequential(first, nn.BatchNorm3d(6), nn.ReLU(), nn.Dropout(0.3), last)
    return make_step("adam", world=world, network=network, **options)


@DEVICES
@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_warm_up_runs_forward_and_backward_like_a_step(options: dict[str, Any], device: str) -> None:
    step = make_changeable(world_on(device), **options)
    on_device = Batch(*(part.to(device) for part in batch()))
    passes: list[Any] = []
    step.network[-1].register_forward_hook(lambda *call: passes.append((call[-1].dtype, len(call[-1]))))
    step.network[0].weight.register_hook(lambda gradient: passes.append(step.network.training))
    step.warm_up(on_device)
    assert device == "cpu" or torch.cuda.current_stream().query(), "the device must have finished"
    assert not step.optimizer.state
    assert all(parameter.grad is None for parameter in step.network.parameters())
    warm = list(passes)
    passes.clear()
    step(on_device, LR)
    parts, dtype = options.get("accumulation_steps", 1), options.get("precision", "bfloat16")
    dtype = getattr(torch, dtype) if "enable_amp" in options else torch.float32
    assert warm == passes == [(dtype, 4 // parts), True] * parts


# Under L1, NaN in the targets alone has gradient 0.
BAD_VALUES = ["nan in targets", "nan in all targets", "inf in targets", "nan in inputs", "-inf in inputs"]


def fix_scale(step: EagerStep, scale: float) -> None:
    """Fixes the gradient scale, so that steps can be compared."""
    step._scaler.load_state_dict({**step._scaler.state_dict(), "scale": scale, "backoff_factor": 1.0})


@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_non_finite_step_changes_nothing(optimizer: str) -> None:
    """At the first step and at a later one; bit for bit, including the optimizer's step count."""
    for index, options in enumerate(MODES):
        # Over all optimizers, every mode is tested with every kind of bad value.
        how = BAD_VALUES[(list(SETTINGS).index(optimizer) + index) % len(BAD_VALUES)]
        undisturbed, disturbed = (make_step(SETTINGS[optimizer], **options) for _ in range(2))
        start = flat_parameters(disturbed)
        for step in (undisturbed, disturbed):
            fix_scale(step, 1024.0)
        for number in range(4):
            if number in (0, 2):
                assert not step_that_skips(disturbed, bad_batch(how)).isfinite()
            assert torch.equal(undisturbed(batch(number), LR), disturbed(batch(number), LR))
            assert differing(snapshot(undisturbed), snapshot(disturbed)) == [], (options, how)
        assert not torch.equal(flat_parameters(disturbed), start)


def assert_apart(world: World, step: EagerStep) -> None:
    """Asserts that the other rank has other parameters."""
    norm = flat_parameters(step).double().norm()
    assert float(world.sum(norm)) != 2 * float(norm)


def all_start_with_the_weights_of_rank_0(world: World) -> Any:
    for ddp in ("torch", "manual"):
        network = small_network("batch")
        for tensor in network.state_dict().values():
            tensor.fill_(world.rank + 7)
        make_step(world=world, network=network, ddp=ddp)
        assert all(bool((tensor == 7).all()) for tensor in network.state_dict().values())
    return True


def gradients_are_sent_in_buckets_which_the_log_describes(world: World) -> Any:
    norms = []
    for cap in (0.005, 25.0):
        step = make_step(world=world, bucket_cap_mb=cap)
        for number in range(3):
            step(batch(10 * world.rank + number), LR)
        norms.append(float(flat_parameters(step).norm()))
        line = re.fullmatch(r"Dist.*: gradient buckets of ([\d., ]+) MB", step.describe()[1])
        assert line
        sizes = [float(size) for size in line[1].split(", ")]
        assert (len(sizes) > 1) == (cap < 1)
        assert sum(sizes) == pytest.approx(4e-6 * len(flat_parameters(step)), rel=0.01)
    assert make_step(world=world, noddp=True).describe() == ["Step: no autocast"]
    return norms


def averages_and_statistics_are_equal_and_weights_differ_without_exchange(world: World) -> Any:
    step = make_step("adam", world=world, network=small_network("batch"), ema_decay=0.9, bucket_cap_mb=0.005)
    for number in range(3):
        step(batch(10 * world.rank + number), LR)
    step.broadcast_buffers()
    same = [*flat_parameters(step).tolist(), float(step.evaluate(batch(99))[0])]
    step.sync = False
    step(batch(world.rank), LR)
    step.sync = True
    assert_apart(world, step)
    step(batch(world.rank), LR)
    return [*same, float(step.gradient_norm)]


def a_warm_up_changes_no_bit_of_the_training(world: World) -> Any:
    same = []
    for options in (
        {},
        {"accumulation_steps": 2, "enable_amp": True, "disable_broadcast_buffers": True, "ema_decay": 0.9},
        {"noddp": True, "enable_amp": True, "precision": "float16"},
    ):
        results = []
        for warm in (False, True):
            step = make_changeable(world, bucket_cap_mb=0.001, **options)
            torch.manual_seed(1)
            if warm:
                step.warm_up(batch(10 * world.rank))
            values = {f"loss {number}": step(batch(10 * world.rank + number), LR) for number in range(3)}
            values |= {"norm": step.gradient_norm, "scale": torch.tensor(step._scaler.get_scale())}
            results.append({**values, **snapshot(step), "random state": torch.get_rng_state()})
        assert differing(*results) == [], options
        if "noddp" in options:
            assert_apart(world, step)
        else:
            same.append(flat_parameters(step).tolist())
    return same


def a_bad_loss_on_one_rank_skips_the_update_on_all(world: World) -> Any:
    """The bad steps change nothing, every rank sees a non-finite norm, and the run ends like one without them."""
    same = []
    for options, how in (
        ({}, "nan in targets"),
        # The bad sample is not in the last micro-batch, after which gradients are exchanged.
        ({"accumulation_steps": 4}, "nan in targets"),
        ({"disable_broadcast_buffers": True, "ema_decay": 0.9}, "nan in all targets"),
        ({"bucket_cap_mb": 25.0}, "-inf in inputs"),
        ({"enable_amp": True, "precision": "float16"}, "nan in targets"),
    ):
        settings = SETTINGS["sgd" if options else "adam"]
        undisturbed, disturbed = (
            make_step(settings, world=world, **{"bucket_cap_mb": 0.005, **options}) for _ in range(2)
        )
        for step in (undisturbed, disturbed):
            fix_scale(step, 64.0)
        for number in range(3):
            step_that_skips(disturbed, bad_batch(how) if world.rank == 1 else batch(50))
            for step in (undisturbed, disturbed):
                step(batch(10 * world.rank + number), LR)
        assert differing(snapshot(undisturbed), snapshot(disturbed)) == [], options
        assert flat_parameters(disturbed).isfinite().all()
        same.append(flat_parameters(disturbed).tolist())
    return same


@pytest.mark.parametrize(
    "check",
    [
        all_start_with_the_weights_of_rank_0,
        gradients_are_sent_in_buckets_which_the_log_describes,
        averages_and_statistics_are_equal_and_weights_differ_without_exchange,
        a_warm_up_changes_no_bit_of_the_training,
        a_bad_loss_on_one_rank_skips_the_update_on_all,
    ],
)
def test_on_two_ranks(check: Callable[[World], Any]) -> None:
    first, second = run_ranks(check, 2)
    assert first == second
