"""The moving average of the weights: its definition, and how training evaluates, saves and resumes with it."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import LR, batch, differing, make_step, small_network, snapshot
from torch import nn
from trainings import STEPS, YAML, directory, last, metrics

import train
from networks import build_loss
from utils.run.checkpoint import Checkpoint, step_directory
from utils.steps.eager import EagerStep


def make(decay: float | None = 0.3, norm: str = "batch", **options: Any) -> EagerStep:
    return make_step("adam", network=small_network(norm), ema_decay=decay, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation_steps": 2, "clip_grad_norm": 0.1}, {"enable_amp": True, "precision": "float16"}],
    ids=str,
)
def test_averaging_leaves_training_unchanged_and_the_network_holds_the_average(options: dict[str, Any]) -> None:
    plain, step = make(None, **options), make(**options)
    assert plain.state().keys() == {"network", "optimizer", "scaler", "loss"}
    mean = copy.deepcopy(plain.network)
    for number in range(5):
        losses = [trainer(batch(number), LR) for trainer in (plain, step)]
        assert torch.equal(*losses)
        kept = min(0.3, (1 + number) / (10 + number))  # the first updates decay faster
        with torch.no_grad():
            for average, trained in zip(mean.parameters(), plain.network.parameters(), strict=True):
                average.mul_(kept).add_(trained, alpha=1 - kept)
    # The running statistics are those of the last step.
    mean.load_state_dict({**plain.network.state_dict(), **dict(mean.named_parameters())})
    torch.testing.assert_close(step.network.state_dict(), mean.state_dict(), rtol=1e-5, atol=1e-7)
    inputs, targets = batch(9)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=options.get("enable_amp", False)):
        expected = mean.eval()(inputs)
    # Weights that differ by rounding may move an activation to the next float16.
    half = "precision" in options
    torch.testing.assert_close(step.predict(inputs), expected, rtol=1e-5, atol=2e-3 if half else 1e-6)
    loss = float((expected - targets).abs().mean())
    assert float(step.evaluate(batch(9))[0]) == pytest.approx(loss, rel=1e-4 if half else 1e-5)
    assert float(plain.evaluate(batch(9))[0]) != pytest.approx(loss, rel=1e-3)
    assert torch.equal(plain(batch(5), LR), step(batch(5), LR)), "evaluation has changed nothing"


def test_an_average_starts_at_the_loaded_weights() -> None:
    """Weights of a run without an average, loaded at the start or later."""
    source, resumed, fresh, trained = make(None), make(), make(), make()
    for number in range(3):
        source(batch(number), LR)
        trained(batch(number + 10), LR)
    resumed.load_state(source.state())
    for step in (fresh, trained):
        step.load_weights(source.network.state_dict())
    for step in (resumed, fresh, trained):
        assert differing(step.network.state_dict(), source.network.state_dict()) == []
        assert differing(step._trained.network.state_dict(), source.network.state_dict()) == []
        assert int(step.state()["average"]["updates"]) == 0
    assert not fresh.optimizer.state


class Own(nn.Module):
    """A tied weight, and a buffer that each training pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Conv3d(4, 4, 1), nn.Conv3d(4, 4, 1), nn.Conv3d(4, 5, 1)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + x.detach().mean() if self.training else self.mean
        return self.last(self.second(self.first(x))) - self.mean


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        error = (outputs - targets).square().mean()
        self.scale += error.detach() if self.training else 0
        return error / self.scale


def test_networks_and_losses_of_ones_own_resume_exactly() -> None:
    """Fixed: the average became the tied weight, the replaced buffer and that of the loss were those of the start."""
    trained, resumed = (make_step("adam", network=Own(), loss=OwnLoss(), ema_decay=0.9) for _ in range(2))
    for number in range(5):
        trained(batch(number), LR)
    resumed.load_state(copy.deepcopy(trained.state()))
    losses = [[step(batch(9), LR), step.evaluate(batch())[0]] for step in (trained, resumed)]
    assert losses[0] == losses[1]
    assert differing(snapshot(trained), snapshot(resumed)) == []
    assert trained.network.mean == trained._trained.network.mean > 0


def test_channel_weights_affect_the_training_loss_only() -> None:
    several = [5.0, 1.0, 1.0, 1.0, 1.0]
    step, plain = (make_step("adam", loss=build_loss("l1", weights=values)) for values in (several, None))
    for _ in range(2):
        assert torch.equal(step.evaluate(batch())[0], plain.evaluate(batch())[0])
        assert not torch.isclose(step(batch(), 0.0), plain(batch(), 0.0), rtol=1e-3)


def trained_weights(saved: Checkpoint) -> dict[str, torch.Tensor]:
    return saved.training["average"]["trained"] if "average" in saved.training else saved.weights["network"]


@pytest.mark.parametrize(("before", "after"), [("0.9", "null"), ("null", "0.9")])
def test_averaging_may_be_switched_on_or_off(tmp_path: Path, data_flags: list[str], before: str, after: str) -> None:
    """A resumed training run ends with the weights of an uninterrupted one; --init_from starts from the average."""
    flags = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={tmp_path}"]
    flags += ["--set=report_baselines=false"]
    train.main([*flags, f"--set=ema_decay={before}", "--set=checkpoint.keep_last=9"])
    source = directory(tmp_path)
    whole = last(source)
    if before != "null":
        assert int(whole.training["average"]["updates"]) == STEPS
        for number, more in enumerate([[], ["--set=ema_decay=0.9"]]):
            train.main([*flags, f"--run_num=own{number}", f"--init_from={source}", "--num_epochs=1", *more])
            assert metrics(directory(tmp_path, run_num=f"own{number}"))[0]["Loss/valid"] == whole.state.final_loss
    shutil.rmtree(step_directory(source / "checkpoints", STEPS))
    train.main([*flags, "--resume", f"--set=ema_decay={after}"])
    resumed = last(source)
    assert differing(trained_weights(resumed), trained_weights(whole)) == []
    for saved, decay in ((whole, before), (resumed, after)):
        assert (differing(saved.weights["network"], trained_weights(saved)) == []) == (decay == "null")
