"""The eager step in all its modes: update, warm-up, skipped updates, gradient exchange, saved state."""

from __future__ import annotations

import re
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
    refusing_to_wait,
    small_network,
    snapshot,
    step_that_skips,
    world_on,
)
from torch import nn

from utils.distributed.world import World
from utils.optim.optimizers import OPTIMIZERS
from utils.steps.eager import EagerStep

CHANGES: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
    "lamb": {"weight_decay": 0.1},
    "soap": {"precondition_frequency": 2},
}
SETTINGS = {name: {"name": name, **CHANGES.get(name, {})} for name in OPTIMIZERS}
MODES: list[dict[str, Any]] = [
    {},
    {"accumulation_steps": 4},
    {"clip_grad_norm": 0.1, "accumulation_steps": 2},
    {"enable_amp": True},
    {"enable_amp": True, "precision": "float16"},
]


def test_one_step_is_forward_backward_clip_and_update_at_the_given_learning_rate() -> None:
    step, plain = make_step(), make_step()
    inputs, targets = batch()
    loss = step(inputs, targets, LR)
    expected = plain._trained(inputs, targets)
    gradients = torch.autograd.grad(expected, list(plain.network.parameters()))
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(flat_parameters(step), flat_parameters(plain) - LR * flat, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(step.gradient_norm, flat.norm())
    clipped = make_step(clip_grad_norm=1e-3)
    start = flat_parameters(clipped)
    clipped(inputs, targets, LR)
    torch.testing.assert_close(clipped.gradient_norm, step.gradient_norm, msg="the norm before clipping")
    assert float((flat_parameters(clipped) - start).norm()) == pytest.approx(LR * 1e-3, rel=1e-2)


def test_bfloat16_trains_close_to_float32() -> None:
    full, half = make_step("adam"), make_step("adam", enable_amp=True)
    losses = [(float(full(*batch(), LR)), float(half(*batch(), LR))) for _ in range(10)]
    assert losses[-1][0] < 0.9 * losses[0][0]
    for exact, rounded in losses:
        assert rounded == pytest.approx(exact, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.network.parameters())
    assert not half._scaler.is_enabled()


def test_float16_halves_its_scale_at_an_overflow_and_saves_it(tmp_path) -> None:
    """The saved state includes the scale and the number of finite steps since its last change. Norms are unscaled."""
    exact = make_step("adam")
    first, second = (make_step("adam", enable_amp=True, precision="float16") for _ in range(2))
    exact(*batch(), LR)
    before, scale = flat_parameters(first), first._scaler.get_scale()
    first(*bad_batch("inf in targets"), LR)
    assert torch.equal(flat_parameters(first), before)
    assert first._scaler.get_scale() == scale / 2
    for number in range(3):
        first(*batch(number), LR)
        if number == 0:
            assert float(first.gradient_norm) == pytest.approx(float(exact.gradient_norm), rel=0.02)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second._scaler.state_dict() == first._scaler.state_dict()
    assert second._scaler.state_dict()["_growth_tracker"] == 3


def test_evaluation_changes_nothing_and_returns_the_loss_of_the_predictions() -> None:
    step = make_step()
    before = flat_parameters(step)
    inputs, targets = batch()
    loss = step.evaluate(inputs, targets)[0]
    assert float(loss) == pytest.approx(float((step.predict(inputs) - targets).abs().mean()), rel=1e-6)
    assert torch.equal(flat_parameters(step), before)
    assert all(parameter.grad is None for parameter in step.network.parameters())


# --- warm-up ---------------------------------------------------------------------------------------------------------


class Changeable(nn.Module):
    """A network that in training mode updates running statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 5, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm3d(6), nn.Dropout(0.3)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(fields)))))


def make_changeable(optimizer: str = "adam", world: World = ALONE, **options: Any) -> EagerStep:
    torch.manual_seed(0)
    return make_step(SETTINGS[optimizer], world=world, network=Changeable(), **options)


def train(step: EagerStep, warm: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Losses, norms, weights, optimizer state and random state after three steps."""
    torch.manual_seed(1)
    if warm:
        step.warm_up(*batch(seed))
    results = {}
    for number in range(3):
        results[f"loss {number}"] = step(*batch(seed + number), LR)
        results[f"norm {number}"] = step.gradient_norm
    scale = torch.tensor(step._scaler.get_scale())
    return {**results, **snapshot(step), "random state": torch.get_rng_state(), "scale": scale}


@pytest.mark.parametrize(("optimizer", "options"), [*(("adam", mode) for mode in MODES), ("sgd", MODES[2])], ids=str)
def test_a_warm_up_changes_no_bit_of_the_training(optimizer: str, options: dict[str, Any]) -> None:
    cold, warm = (train(make_changeable(optimizer, **options), warm) for warm in (False, True))
    assert not torch.equal(cold["loss 0"], cold["loss 2"])
    assert differing(cold, warm) == []


@DEVICES
@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_warm_up_runs_forward_and_backward_like_a_step(options: dict[str, Any], device: str) -> None:
    step = make_changeable(world=world_on(device), **options)
    inputs, targets = (part.to(device) for part in batch())
    passes: list[Any] = []
    step.network.last.register_forward_hook(
        lambda module, inputs, output: passes.append((output.dtype, output.shape, module.training))
    )
    step.network.first.weight.register_hook(lambda gradient: passes.append("backward"))
    step.warm_up(inputs, targets)
    assert device == "cpu" or torch.cuda.current_stream().query(), "the device must have finished"
    assert not step.optimizer.state
    assert all(parameter.grad is None for parameter in step.network.parameters())
    warm = list(passes)
    passes.clear()
    step(inputs, targets, LR)
    assert len(passes) == 2 * options.get("accumulation_steps", 1)
    assert warm == passes


# --- skipped updates -------------------------------------------------------------------------------------------------

# Under L1, NaN in the targets alone has gradient 0.
BAD_VALUES = ["nan in targets", "all targets nan", "inf in targets", "nan in inputs", "-inf in inputs"]


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
                assert not step_that_skips(disturbed, *bad_batch(how)).isfinite()
            losses = [step(*batch(number), LR) for step in (undisturbed, disturbed)]
            assert torch.equal(*losses)
            assert torch.isfinite(losses[0])
            assert differing(snapshot(undisturbed), snapshot(disturbed)) == [], (options, how)
        assert not torch.equal(flat_parameters(disturbed), start)


class InfiniteGradient(nn.Module):
    """A finite loss whose gradients are not finite."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - outputs.detach()).abs().sqrt().sum() + 1.0


def test_a_non_finite_gradient_alone_skips_the_update() -> None:
    step = make_step("adam", loss=InfiniteGradient())
    before = flat_parameters(step)
    assert float(step(*batch(), LR)) == 1.0
    assert not step.gradient_norm.isfinite()
    assert torch.equal(flat_parameters(step), before)


# --- data parallel ---------------------------------------------------------------------------------------------------

WARM_UP_CASES: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"accumulation_steps": 2, "enable_amp": True, "disable_broadcast_buffers": True},
    {"noddp": True},
]
SKIP_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "nan in targets"),
    # The bad sample is not in the last micro-batch, after which gradients are exchanged.
    ({"accumulation_steps": 4}, "nan in targets"),
    ({"static_graph": True}, "all targets nan"),
    ({"gradient_compression": "bfloat16"}, "-inf in inputs"),
    ({"enable_amp": True, "precision": "float16"}, "nan in targets"),
]


def on_ranks(world: World) -> dict[str, list[Any]]:
    answers: dict[str, list[Any]] = {name: [] for name in ("start", "described", "warm-up", "skipped")}
    for ddp in ("torch", "manual"):
        network = small_network("batch")
        for tensor in network.state_dict().values():
            tensor.fill_(world.rank + 7)
        make_step(world=world, network=network, ddp=ddp)
        answers["start"] += [float(tensor.double().mean()) for tensor in network.state_dict().values()]

    for options in ({"bucket_cap_mb": 0.005}, {"gradient_compression": "bfloat16"}, {"noddp": True}):
        step = make_step(world=world, **options)
        for number in range(3):
            step(*batch(10 * world.rank + number), LR)
        answers["described"].append((step.describe(), float(flat_parameters(step).norm())))

    step = make_step("adam", world=world, network=small_network("batch"), ema_decay=0.9, bucket_cap_mb=0.005)
    for number in range(3):
        step(*batch(10 * world.rank + number), LR)
    step.broadcast_buffers()
    answers["same"] = [*flat_parameters(step).tolist(), float(step.evaluate(*batch(99))[0])]
    with step.no_sync():
        step(*batch(world.rank), LR)
    answers["apart"] = flat_parameters(step).tolist()
    step(*batch(world.rank), LR)
    answers["exchanged again"] = float(step.gradient_norm)

    for options in WARM_UP_CASES:
        steps = [make_changeable("sgd", world, bucket_cap_mb=0.001, **options) for _ in range(2)]
        cold, warm = (train(step, kind, seed=10 * world.rank) for step, kind in zip(steps, (False, True), strict=True))
        answers["warm-up"].append((differing(cold, warm), warm["first.weight"].flatten().tolist()))

    for options, how in SKIP_CASES:
        settings = SETTINGS["sgd" if options else "adam"]
        undisturbed, disturbed = (make_step(settings, world=world, bucket_cap_mb=0.005, **options) for _ in range(2))
        for step in (undisturbed, disturbed):
            fix_scale(step, 64.0)
        for number in range(3):
            step_that_skips(disturbed, *(bad_batch(how) if world.rank == 1 else batch(50)))
            for step in (undisturbed, disturbed):
                step(*batch(10 * world.rank + number), LR)
        left = differing(snapshot(undisturbed), snapshot(disturbed))
        answers["skipped"].append((left, flat_parameters(disturbed).tolist()))
    return answers


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Any]]]:
    return run_ranks(on_ranks, 2)


def test_all_ranks_start_with_the_parameters_and_buffers_of_rank_0(ranks) -> None:
    assert set(ranks[0]["start"] + ranks[1]["start"]) == {7.0}


def test_the_log_describes_the_gradient_buckets(ranks) -> None:
    first, second = (rank["described"] for rank in ranks)
    (how, line), norm = first[0]
    assert how == "Step: no autocast"
    found = re.fullmatch(r"DistributedDataParallel: gradient buckets of ([\d., ]+) MB, sent as float32", line)
    assert found
    sizes = [float(size) for size in found[1].split(", ")]
    assert len(sizes) > 1
    total = sum(parameter.numel() for parameter in small_network().parameters()) * 4 / 1e6
    assert sum(sizes) == pytest.approx(total, rel=0.01)
    found = re.fullmatch(r"DistributedDataParallel: gradient buckets of ([\d.]+) MB, sent as bfloat16", first[1][0][1])
    assert found
    assert float(found[1]) == pytest.approx(total, rel=0.01)
    assert len(first[2][0]) == 1, "no gradients are exchanged"
    for index in (0, 1):
        assert first[index][1] == second[index][1], "all ranks have the same rounded gradients"
    assert first[1][1] == pytest.approx(norm, rel=1e-3)
    assert first[1][1] != norm, "rounding to bfloat16 must change the result"


def test_ranks_have_the_same_average_and_running_statistics_and_diverge_under_no_sync(ranks) -> None:
    assert ranks[0]["same"] == ranks[1]["same"]
    assert ranks[0]["apart"] != ranks[1]["apart"]
    assert ranks[0]["exchanged again"] == ranks[1]["exchanged again"]


def test_a_warm_up_changes_no_bit_of_the_training_on_ranks(ranks) -> None:
    for options, one, other in zip(WARM_UP_CASES, *(rank["warm-up"] for rank in ranks), strict=True):
        assert one[0] == other[0] == [], options
        assert (one[1] == other[1]) is not options.get("noddp", False), "ranks must still exchange gradients"


def test_a_bad_loss_on_one_rank_skips_the_update_on_all(ranks) -> None:
    """The bad steps change nothing, every rank reports a non-finite norm, and the run ends like one without them."""
    for case, one, other in zip(SKIP_CASES, *(rank["skipped"] for rank in ranks), strict=True):
        assert one[0] == other[0] == [], case
        assert one[1] == other[1], case
        assert torch.isfinite(torch.tensor(one[1])).all()


# --- state -----------------------------------------------------------------------------------------------------------


def test_state_that_does_not_fit_is_refused() -> None:
    step, other = make_step("adam"), make_step("sgd")
    state = make_step("adam").state()
    name = next(iter(state["network"]))
    with pytest.raises(ValueError, match=rf"^size mismatch for {name}: "):
        step.load_state({**state, "network": {**state["network"], name: torch.zeros(1)}})
    with pytest.raises(ValueError, match=rf"^Missing key.*{name}"):
        step.load_weights({key: value for key, value in state["network"].items() if key != name})
    with pytest.raises(ValueError, match=r"^Unexpected key.*extra"):
        step.load_weights({**state["network"], "extra": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^its optimizer is SGD, this run's is Adam"):
        step.load_state(other.state())


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_amp": True},
        {"enable_amp": True, "precision": "float16"},
        {"accumulation_steps": 2, "clip_grad_norm": 0.1},
        {"log_noise_scale": True, "accumulation_steps": 2},
        {"ema_decay": 0.99},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_step_never_waits_for_the_device_not_even_to_skip_an_update(optimizer: str, options: dict[str, Any]) -> None:
    step = make_step(SETTINGS[optimizer], world=world_on("cuda"), **options)
    if not getattr(step.optimizer, "_step_supports_amp_scaling", False):
        pytest.skip("the host waits for apex's optimizer")
    fix_scale(step, 1024.0)
    good = [part.cuda() for part in batch()]
    step(*good, LR)
    for how in BAD_VALUES:
        bad, before = [part.cuda() for part in bad_batch(how)], snapshot(step)
        for pair, changes in ((bad, 0), (good, len(before))):
            with refusing_to_wait("cuda"):
                step(*pair, LR)
            assert bool(step.gradient_norm.isfinite()) is (pair is good)
            assert len(differing(snapshot(step), before)) == changes
