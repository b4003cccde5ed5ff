"""The running mean of the weights: what it is, that it is what a training is judged by, saves and goes on with."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

import train
from networks import build_loss, build_network, initialise
from utils import checkpoint, cli
from utils import config as configs
from utils.checkpoint import FOLDER, place
from utils.config import Optimizer
from utils.distributed import Launch, World
from utils.ema import Average
from utils.optim import build_optimizer
from utils.steps.eager import EagerStep, StepOptions
from utils.stopping import NoSignals

YAML = str(Path(__file__).parent.parent / "config" / "UNet.yaml")
ALONE = World(Launch("test"), torch.device("cpu"))
RATE = 0.01
YES, NO = torch.tensor(True), torch.tensor(False)


def changed(network: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def values(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


# --- the mean itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.999])
def test_the_mean_is_the_written_out_one(decay: float) -> None:
    """In double precision with numpy; the first updates forget sooner than `decay` says."""
    network = nn.Linear(3, 2)
    average = Average(network, decay)
    expected = values(network).double().numpy()
    for t in range(40):
        changed(network, t)
        average.update(YES)
        kept = min(decay, (1 + t) / (10 + t))
        expected = kept * expected + (1 - kept) * values(network).double().numpy()
        np.testing.assert_allclose(values(average.network).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_once_warm_it_is_torchs_own() -> None:
    network, decay = nn.Linear(3, 2), 0.1  # (1 + t) / (10 + t) is never less
    average = Average(network, decay)
    other = AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    other.update_parameters(network)  # its first one copies
    for number in range(10):
        changed(network, number)
        average.update(YES)
        other.update_parameters(network)
        torch.testing.assert_close(values(average.network), values(other.module))


def test_an_update_that_was_not_made_leaves_mean_and_count() -> None:
    network = nn.Linear(3, 2)
    average, undisturbed = Average(network, 0.9), Average(network, 0.9)
    for number in range(5):
        changed(network, number)
        for _ in range(number):
            before = values(average.network)
            average.update(NO)
            assert torch.equal(values(average.network), before)
        for one in (average, undisturbed):
            one.update(YES)
    assert torch.equal(values(average.network), values(undisturbed.network))
    assert int(average.state()["average"]["updates"]) == 5


def test_memory_formats_stay() -> None:
    network = nn.Conv3d(4, 8, 3).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    average = Average(network, 0.9)
    average.update(YES)
    assert next(average.network.parameters()).stride() == network.weight.stride()


# --- in a step -------------------------------------------------------------------------------------------------------


def make(decay: float | None = 0.9, norm: str = "batch", world: World = ALONE, **options: Any) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2, norm=norm)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    built = build_optimizer(Optimizer(), network.named_parameters(), RATE)
    return EagerStep(network, build_loss("l1"), built, world, StepOptions(ema_decay=decay, **options))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 4, 8, 8, 8, generator=generator), torch.rand(4, 5, 8, 8, 8, generator=generator)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


MODES: list[dict[str, Any]] = [
    {},
    {"accumulation_steps": 2, "clip_grad_norm": 0.1},
    {"enable_amp": True, "precision": "float16"},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_training_is_the_one_without_and_what_is_used_is_its_mean(options: dict[str, Any]) -> None:
    plain, step = make(None, **options), make(0.9, **options)
    mean = copy.deepcopy(plain.network)
    for number in range(5):
        losses = [one(*batch(number), RATE) for one in (plain, step)]
        assert torch.equal(*losses)
        kept = min(0.9, (1 + number) / (10 + number))
        with torch.no_grad():
            for own, trained in zip(mean.parameters(), plain.network.parameters(), strict=True):
                own.mul_(kept).add_(trained, alpha=1 - kept)
    mean.load_state_dict({**plain.network.state_dict(), **dict(mean.named_parameters())})  # today's running statistics
    torch.testing.assert_close(step.network.state_dict(), mean.state_dict(), rtol=1e-5, atol=1e-7)
    inputs, targets = batch(9)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=options.get("enable_amp", False)):
        expected = mean.eval()(inputs)
    torch.testing.assert_close(step.predict(inputs), expected, rtol=1e-5, atol=1e-6)
    loss = float((expected - targets).abs().mean())
    assert float(step.evaluate(inputs, targets)) == pytest.approx(loss, rel=1e-5)
    assert float(plain.evaluate(inputs, targets)) != pytest.approx(loss, rel=1e-3)
    assert torch.equal(plain(*batch(5), RATE), step(*batch(5), RATE)), "validating has changed nothing"


def test_a_step_without_numbers_leaves_it() -> None:
    step, undisturbed = make(norm="none"), make(norm="none")
    for number in range(3):
        inputs, targets = batch(50)
        targets[1, 2, 3, 4, 5] = float("nan")
        before = {name: value.clone() for name, value in step.network.state_dict().items()}
        assert not step(inputs, targets, RATE).isfinite()
        assert_same(step.network.state_dict(), before)
        for one in (step, undisturbed):
            one(*batch(number), RATE)
    assert_same(step.network.state_dict(), undisturbed.network.state_dict())


def test_a_warm_up_leaves_it() -> None:
    step = make()
    before = copy.deepcopy(step.state())
    step.warm_up(*batch())
    assert_same(step.state()["network"], before["network"])
    assert int(step.state()["average"]["updates"]) == 0


def test_without_it_a_state_is_as_it_was() -> None:
    step = make(None)
    assert step.state().keys() == {"network", "optimizer", "scaler"}
    assert step.network is step._bare.network


@pytest.mark.parametrize("decay", [0.9, None], ids=["averaging on", "no longer averaging"])
def test_a_step_goes_on_with_the_trained_weights(decay: float | None, tmp_path: Path) -> None:
    """Bit for bit; also where the mean is switched off in between: what is used is then what is trained."""
    first = make()
    for number in range(3):
        first(*batch(number), RATE)
    torch.save(first.state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(state["network"], first.network.state_dict())
    second = make(decay)
    second.load_state(state)
    for number in range(3, 6):
        assert torch.equal(first(*batch(number), RATE), second(*batch(number), RATE))
    assert_same(second._bare.network.state_dict(), first._bare.network.state_dict())
    expected = first if decay else first._bare
    assert_same(second.network.state_dict(), expected.network.state_dict())


def test_an_average_begins_at_the_weights_of_a_training_without_one() -> None:
    first, second, fresh = make(None), make(), make()
    for number in range(3):
        first(*batch(number), RATE)
    second.load_state(first.state())
    fresh.load_weights(first.network.state_dict())
    for step in (second, fresh):
        assert_same(step.network.state_dict(), first.network.state_dict())
        assert_same(step._bare.network.state_dict(), first.network.state_dict())
        assert int(step.state()["average"]["updates"]) == 0
    assert not fresh._optimizer.state


def test_weights_in_between_start_the_mean_anew() -> None:
    step, source = make(), make(None)
    for number in range(3):
        step(*batch(number), RATE)
        source(*batch(number + 10), RATE)
    step.load_weights(source.network.state_dict())
    assert_same(step.network.state_dict(), source.network.state_dict())
    assert int(step.state()["average"]["updates"]) == 0


@pytest.mark.parametrize("options", [{}, {"enable_jit": True, "compiler": "torchscript"}], ids=str)
def test_weights_of_channels_count_in_training_alone(options: dict[str, Any]) -> None:
    """The loss that a step validates with is the plain one, however training weighs it, before and after steps."""
    weights = [5.0, 1.0, 1.0, 1.0, 1.0]
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    built = build_optimizer(Optimizer(), network.named_parameters(), RATE)
    step = EagerStep(network, build_loss("l1", weights=weights), built, ALONE, StepOptions(**options))
    inputs, targets = batch()
    step.warm_up(inputs, targets)
    for _ in range(2):
        differences = (step.predict(inputs) - targets).abs().mean(dim=(0, 2, 3, 4))
        assert float(step.evaluate(inputs, targets)) == pytest.approx(float(differences.mean()), rel=1e-6)
        weighted = float((differences * torch.tensor(weights)).sum() / sum(weights))
        assert float(step(inputs, targets, RATE)) == pytest.approx(weighted, rel=1e-6)
        assert weighted != pytest.approx(float(differences.mean()), rel=1e-3)


# --- in a training ---------------------------------------------------------------------------------------------------


class RecordingStep(EagerStep):
    """Keeps what it trained, as it was in the end."""

    last: EagerStep

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        RecordingStep.last = self


def run(flags: list[str]) -> EagerStep:
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", "--set=report_baselines=false", *flags])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    train.run(options, config, ALONE, RecordingStep, NoSignals())
    return RecordingStep.last


def test_a_checkpoint_holds_the_mean_and_new_trainings_start_from_it(tmp_path: Path, data_flags: list[str]) -> None:
    flags = [*data_flags, f"--set=expdir={tmp_path}"]
    step = run([*flags, "--set=ema_decay=0.9"])
    saved = checkpoint.load(place(tmp_path / "test" / "1GPU" / "00" / FOLDER, 16))
    assert_same(saved.weights["network"], step.network.state_dict())
    assert_same(saved.training["average"]["trained"], dict(step._bare.network.named_parameters()))
    assert int(saved.training["average"]["updates"]) == 16
    assert not torch.equal(values(step.network), values(step._bare.network))
    source = tmp_path / "test" / "1GPU" / "00"
    for number, more in enumerate([[], ["--set=ema_decay=0.9"]]):
        own = [f"--run_num=own{number}", f"--init_from={source}", "--num_epochs=1", *more]
        run([*flags, *own])
        untrained, *_ = (source.parent / f"own{number}" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(untrained)["Loss/valid"] == saved.position.final_loss, "as that training was judged"


@pytest.mark.parametrize(("before", "after"), [("0.9", "null"), ("null", "0.9")])
def test_it_may_be_switched_on_or_off_in_between(
    tmp_path: Path, data_flags: list[str], before: str, after: str
) -> None:
    """The weights that are trained end as in a training that never stopped."""
    flags = [*data_flags, f"--set=expdir={tmp_path}"]
    whole = values(run([*flags, "--run_num=whole", f"--set=ema_decay={before}"])._bare.network)
    # The schedule of two epochs, stopped after the first.
    run([*flags, f"--set=ema_decay={before}", "--set=checkpoint.keep_last=9"])
    folder = tmp_path / "test" / "1GPU" / "00" / FOLDER
    shutil.rmtree(place(folder, 16))
    step = run([*flags, f"--set=ema_decay={after}"])
    assert torch.equal(values(step._bare.network), whole)
    assert torch.equal(values(step.network), whole) == (after == "null")


def on_ranks(world: World) -> tuple[list[float], list[float]]:
    step = make(world=world, bucket_cap_mb=0.005)
    for number in range(3):
        step(*batch(10 * world.rank + number), RATE)
    step.share_buffers()
    return values(step.network).tolist(), [float(step.evaluate(*batch(99)))]


def test_ranks_have_the_same_mean() -> None:
    one, other = run_ranks(on_ranks, 2)
    assert one == other
