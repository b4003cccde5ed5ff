"""The loop: order of events, what is logged when, and how often the host waits for the device."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

from networks import build_loss, build_network, initialise
from utils.checkpoint import NoCheckpoint
from utils.config import Optimizer
from utils.data import Loaders
from utils.data.feeder import Batch
from utils.data.native import NativeLoader
from utils.data.plan import SamplePlan
from utils.data.volumes import open_volume
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.logs import SilentLogs
from utils.metrics import LossRecorder
from utils.optim import build_optimizer
from utils.profiling import NoProfiler
from utils.schedule import CosineSchedule
from utils.steps.eager import EagerStep
from utils.trainer import Trainer

ALONE = World(Launch("test"), torch.device("cpu"))
STEPS, EPOCHS, BATCH = 5, 3, 2
SPLITS = ("train", "valid")


class RecordedStep:
    """A step whose loss is scripted; notes every call."""

    def __init__(self, bad_step: int | None = None) -> None:
        self.network = nn.Linear(1, 1)
        self.gradient_norm = torch.tensor(2.0)
        self.rates: list[float] = []
        self.events: list[str] = []
        self._bad_step = bad_step

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        self.events.append("step")
        self.rates.append(rate)
        return torch.tensor(float("nan") if len(self.rates) == self._bad_step else 1.0 / len(self.rates))

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.events.append(f"warm up on {float(inputs.mean())}")
        time.sleep(0.1)

    def describe(self) -> list[str]:
        return [f"described after {len(self.rates)} steps"]

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.events.append("evaluate")
        self.network(inputs.flatten()[:1])
        return inputs.mean()

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class CountingLoader:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.epochs = batches, []

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_batch: int = 0):
        self.epochs.append(epoch)
        yield from self.batches[first_batch:]

    def close(self) -> None:
        pass


class KeptLogs(SilentLogs):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.points: list[tuple[int, dict]] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def scalars(self, values, step: int) -> None:
        self.points.append((step, dict(values)))

    def curve(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.points if name in values}


class KeptCheckpoint(NoCheckpoint):
    def __init__(self) -> None:
        self.saved: list[dict] = []

    def save(self, network: nn.Module, **record) -> None:
        self.saved.append(record)


def batch(value: float, size: int = BATCH) -> Batch:
    return Batch(torch.full((size, 1, 1, 1, 1), value), torch.zeros(size, 1, 1, 1, 1))


def make(step: RecordedStep, log_interval: int = 2) -> tuple[Trainer, KeptLogs, KeptCheckpoint, Loaders]:
    # The last validation batch is smaller: its loss counts by its samples.
    loaders = Loaders(
        CountingLoader([batch(7.0), *[batch(8.0)] * (STEPS - 1)]), CountingLoader([batch(1.0, 2), batch(4.0, 1)])
    )
    logs, checkpoint = KeptLogs(), KeptCheckpoint()
    trainer = Trainer(
        step=step,
        loaders=loaders,
        schedule=CosineSchedule(1.0, 0.0, 0, STEPS * EPOCHS),
        world=ALONE,
        logs=logs,
        checkpoint=checkpoint,
        profiler=NoProfiler(),
        num_epochs=EPOCHS,
        global_batch_size=BATCH,
        log_interval=log_interval,
    )
    return trainer, logs, checkpoint, loaders


def test_order_of_events() -> None:
    step = RecordedStep()
    trainer, _, _, loaders = make(step)
    trainer.fit()
    untrained = ["evaluate"] * 3  # one training batch and the validation set
    assert step.events == untrained + ["warm up on 7.0"] + (["step"] * STEPS + ["evaluate"] * 2) * EPOCHS
    assert loaders.train.epochs == [0, 0, 1, 2], "the first training batch is looked at before training"
    assert loaders.valid.epochs == [0] * (EPOCHS + 1)


def test_rates_follow_the_schedule_to_its_end() -> None:
    step = RecordedStep()
    trainer, logs, _, _ = make(step)
    trainer.fit()
    assert step.rates == [trainer.schedule(number) for number in range(STEPS * EPOCHS)]
    assert step.rates[-1] == 0.0
    assert logs.curve("Learning Rate") == {0: 1.0, **{s: trainer.schedule(s - 1) for s in (5, 10, 15)}}


def test_losses_are_logged_at_step_0_and_after_each_epoch() -> None:
    trainer, logs, checkpoint, _ = make(RecordedStep())
    result = trainer.fit()
    assert logs.curve("Loss/valid") == {step: pytest.approx(2.0) for step in (0, 5, 10, 15)}
    train = logs.curve("Loss/train")
    assert train[0] == pytest.approx(7.0)
    assert train[5] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5)
    assert train[15] == pytest.approx(sum(1 / n for n in range(11, 16)) / 5)
    assert set(logs.curve("Avg iters per sec")) == {5, 10, 15}
    assert [record["step"] for record in checkpoint.saved] == [5, 10, 15]
    assert (result.steps, result.initial_loss, result.final_loss) == (15, pytest.approx(2.0), pytest.approx(2.0))


def test_log_lines_are_the_contracts() -> None:
    trainer, logs, _, _ = make(RecordedStep())
    trainer.fit()
    text = "\n".join(logs.lines)
    assert (
        len(re.findall(r"^Time taken for epoch [123] is \d+\.\d+(?:e-\d+)? sec, avg \d+\.\d+ samples/sec$", text, re.M))
        == 3
    )
    assert len(re.findall(r"^  Avg train loss=\d+\.\d{6}$", text, re.M)) == 3
    intervals = [line for line in logs.lines if re.match(r"epoch \d/3, step", line)]
    assert len(intervals) == 9
    for line in intervals:
        found = re.search(r"([\d.e+]+) samples/s, ([\d.e-]+) TFLOP/s a rank, ", line)
        assert found
        # A batch of two passes once through a linear layer of one weight that needs no gradient of its inputs.
        assert float(found[2]) == pytest.approx(float(found[1]) * 4 / BATCH / 1e12, rel=0.01)
    assert len(logs.curve("Step/TFLOP per sec per rank")) == 9
    assert len(re.findall(r"^  Avg val loss=2\.000000$", text, re.M)) == 4
    assert len(re.findall(r"^  Total validation time: \S+ sec$", text, re.M)) == 4


def test_the_warm_up_is_timed_by_itself_before_the_first_epoch() -> None:
    trainer, logs, _, _ = make(RecordedStep())
    trainer.fit()
    (place,) = (index for index, line in enumerate(logs.lines) if line.startswith("Warm-up"))
    found = re.fullmatch(r"Warm-up, first forward and backward pass: (\d+\.\d{3}) sec", logs.lines[place])
    assert found
    assert float(found[1]) >= 0.1
    assert "validation time" in logs.lines[place - 1], "the untrained losses come first"
    assert logs.lines[place + 1] == "described after 2 steps"
    assert logs.lines[place + 2].startswith("epoch 1/3, step 2/5")
    assert sum(line.startswith("described") for line in logs.lines) == 1
    epoch = next(line for line in logs.lines if line.startswith("Time taken for epoch 1"))
    assert float(epoch.split()[6]) < 0.1, "its time is not in it"


class ColdStep(EagerStep):
    """Without a warm-up."""

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        pass


def test_training_is_bit_for_bit_the_one_without_a_warm_up(volume_file, tmp_path) -> None:
    volume = open_volume(volume_file(tmp_path / "box.h5"), (4, 5))
    curves, ends = [], []
    for kind in (ColdStep, EagerStep):
        trainer, logs, _, _ = make(RecordedStep(), log_interval=1)
        loaders = [NativeLoader(volume, SamplePlan(STEPS * BATCH, 16, 8, split=s), batch_size=BATCH) for s in SPLITS]
        network = build_network("unet", 8, width=4, scales=2)
        initialise(network, torch.Generator().manual_seed(0), scale=0.1)
        optimizer = build_optimizer(Optimizer(), network.parameters(), 0.01)
        trainer.loaders, trainer.step = Loaders(*loaders), kind(network, build_loss("l1"), optimizer, ALONE)
        trainer.schedule = lambda _: 0.01
        trainer.fit()
        curves.append([logs.curve(name) for name in ("Step/loss", "Step/gradient norm", "Loss/valid")])
        ends.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]))
        for loader in loaders:
            loader.close()
    assert len(curves[0][0]) == STEPS * EPOCHS
    assert curves[0] == curves[1]
    assert torch.equal(*ends)


def test_the_device_is_read_once_per_interval(monkeypatch) -> None:
    reads = []
    original = LossRecorder.read
    monkeypatch.setattr(LossRecorder, "read", lambda self: (reads.append(1), original(self))[1])
    trainer, logs, _, _ = make(RecordedStep(), log_interval=2)
    trainer.fit()
    assert len(reads) == EPOCHS * 3, "five steps are two whole intervals and a rest"
    assert set(logs.curve("Step/loss")) == {2, 4, 5, 7, 9, 10, 12, 14, 15}
    assert set(logs.curve("Step/gradient norm").values()) == {2.0}
    for name in ("Step/samples per sec", "Step/data wait fraction"):
        assert len(logs.curve(name)) == 9


@pytest.mark.parametrize(("bad_step", "taken"), [(1, 2), (8, 9), (15, 15)])
def test_training_stops_at_a_loss_that_is_no_number(bad_step: int, taken: int) -> None:
    step = RecordedStep(bad_step)
    trainer, _, checkpoint, _ = make(step)
    with pytest.raises(UserError, match=f"loss is nan at step {bad_step} on rank 0, learning rate") as caught:
        trainer.fit()
    assert f"{trainer.schedule(bad_step - 1):.3e}" in str(caught.value)
    assert len(step.rates) == taken, "at the end of the interval at the latest"
    assert all(record["step"] < bad_step for record in checkpoint.saved)
