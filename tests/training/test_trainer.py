"""The training loop: order of events, what it logs and saves when, how it stops and resumes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from log_lines import CollectedLines
from processes import run_ranks
from torch import nn
from trainings import ALONE, CLOCKS

from utils.config import Config
from utils.data import Batch, DataSplits, Loader
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import Stopped, UserError
from utils.steps.eager import EagerStep
from utils.training import checkpoint_writer, metrics
from utils.training import trainer as trainers
from utils.training.callbacks import Evaluation, Profiler
from utils.training.checkpoint_writer import CheckpointWriter
from utils.training.loggers.base import Logger
from utils.training.metrics import LossRecorder
from utils.training.state import FitResult, TrainState
from utils.training.trainer import Trainer

STEPS, EPOCHS, BATCH = 5, 3, 2
NAN, INF = float("nan"), float("inf")


class RecordedStep(EagerStep):
    """A step whose loss is scripted, 1/n at step n, with gradient norm 2; records every call.

    `bad_steps` gives other losses and norms of some steps; `after` is called with each event's number.
    """

    probe = None

    def __init__(
        self,
        bad_steps: Mapping[int, tuple[float, float]] | None = None,
        done: int = 0,
        after: Callable[[int], None] = lambda event: None,
    ) -> None:
        self.network = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters())
        self.lrs: list[float] = []
        self.events: list[str] = []
        self.broadcasts: list[int] = []  # the numbers of events before each
        self._bad_steps, self._done, self._after = bad_steps or {}, done, after

    def _record(self, event: str) -> None:
        self.events.append(event)
        self._after(len(self.events))

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> torch.Tensor:
        self.lrs.append(lr)
        self._done += 1
        self._record("step")
        loss, self.gradient_norm = torch.tensor(self._bad_steps.get(self._done, (1.0 / self._done, 2.0)))
        return loss

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._record(f"warm up on {float(inputs.mean())}")

    def describe(self) -> list[str]:
        return [f"described after {len(self.lrs)} steps"]

    def state(self) -> dict[str, Any]:
        return {"steps": self._done}

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._record("evaluate")
        return inputs.mean()[None]

    def broadcast_buffers(self) -> None:
        self.broadcasts.append(len(self.events))


class CountingLoader(Loader):
    def __init__(self, batches: list[Batch], volumes: Sequence[str] = ("",)) -> None:
        """Volume n has the batches from n on, the last volume also the rest."""
        self.batches, self.epochs, self.volumes = batches, [], volumes

    def __len__(self) -> int:
        return len(self.batches)

    def volume_of(self, batch: int) -> int:
        return min(batch, len(self.volumes) - 1)

    def epoch(self, epoch: int, first_batch: int = 0):
        self.epochs.append(epoch)
        yield from self.batches[first_batch:]


class RecordedLogger(Logger):
    """Records the points, and the lines that the trainer logs."""

    def __init__(self) -> None:
        collected = CollectedLines("utils.training.trainer")
        self.lines, self.warnings = collected.lines, collected.warnings
        self.points: list[tuple[int, dict]] = []
        self.flushed = 0  # number of points at the last flush

    def scalars(self, values, step: int) -> None:
        self.points.append((step, dict(values)))

    def flush(self) -> None:
        self.flushed = len(self.points)

    def curve(self, name: str) -> dict[int, float]:
        found = [(step, values[name]) for step, values in self.points if name in values]
        assert len(dict(found)) == len(found), f"{name}: a point twice"
        return dict(found)


class RecordedCheckpointer(CheckpointWriter):
    """Keeps copies of the states, and the steps that were saved as the best and with `wait`."""

    def __init__(self, logger: RecordedLogger) -> None:
        self.logger = logger
        self.states: list[TrainState] = []
        self.best: list[int] = []
        self.waits: list[int] = []
        self.closed = False

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        assert self.logger.flushed == len(self.logger.points), "points reach the disk before the next checkpoint"
        assert tensors["steps"] == state.step, "the tensors after that step"
        self.states.append(copy.deepcopy(state))
        self.best += [state.step] if state.step == state.best_step else []
        self.waits += [state.step] if wait else []

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        return [state.step for state in self.states]


def skipped_steps(*steps: int) -> dict[int, tuple[float, float]]:
    return dict.fromkeys(steps, (NAN, 2.0))


def batch(value: float, size: int = BATCH) -> Batch:
    return Batch(torch.full((size, 1, 1, 1, 1), value), torch.zeros(size, 1, 1, 1, 1))


def make(
    step: RecordedStep,
    log_interval: int = 2,
    world: World = ALONE,
    validation: list[Batch] | None = None,
    signals: Signals | None = None,
    state: TrainState | None = None,
    **settings: Any,
) -> tuple[Trainer, RecordedLogger, RecordedCheckpointer, DataSplits]:
    """A trainer of three epochs; `settings` are further keys of its config."""
    # The last validation batch is smaller: its loss counts by its samples.
    valid = CountingLoader(validation or [batch(1.0, 2), batch(4.0, 1)])
    loaders = DataSplits(CountingLoader([batch(7.0), *[batch(8.0)] * (STEPS - 1)]), valid)
    logger = RecordedLogger()
    checkpointer = RecordedCheckpointer(logger)
    keys = {"num_epochs": EPOCHS, "global_batch_size": BATCH, "Nsamples": BATCH * STEPS, "log_interval": log_interval}
    keys |= {"lr_schedule": {"start_lr": 1.0, "end_lr": 0.0}, "checkpoint": {"every_minutes": None}}
    run: Any = SimpleNamespace(world=world, records=logger, checkpoint_writer=checkpointer)
    config, state = Config(**{**keys, **settings}), state or TrainState()
    trainer = Trainer(config, step, loaders, run, state, Profiler(), Evaluation(), signals or Signals())
    return trainer, logger, checkpointer, loaders


def test_order_of_events_learning_rates_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], LossRecorder.read
    monkeypatch.setattr(LossRecorder, "read", lambda self: (reads.append(len(self)), read(self))[1])
    step = RecordedStep()
    trainer, logger, checkpointer, loaders = make(step)
    result = trainer.fit()
    assert checkpointer.closed
    untrained = ["evaluate"] * 3  # one training batch and the validation set
    assert step.events == untrained + ["warm up on 7.0"] + (["step"] * STEPS + ["evaluate"] * 2) * EPOCHS
    assert step.broadcasts == [1, 9, 16, 23], "all ranks validate the network that is saved"
    assert loaders.train.epochs == [0, 0, 1, 2], "the first training batch is evaluated before training"
    assert loaders.valid.epochs == [0] * (EPOCHS + 1)
    assert step.lrs == [trainer.schedule(number) for number in range(STEPS * EPOCHS)]
    assert step.lrs[-1] == 0.0
    assert logger.curve("Learning Rate") == {
        0: trainer.schedule(0),
        **{s: trainer.schedule(s - 1) for s in (5, 10, 15)},
    }
    assert logger.curve("Loss/valid") == {step: pytest.approx(2.0) for step in (0, 5, 10, 15)}
    train = logger.curve("Loss/train")
    assert train[0] == pytest.approx(7.0)
    assert train[5] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5)
    assert train[15] == pytest.approx(sum(1 / n for n in range(11, 16)) / 5)
    assert set(logger.curve("Avg iters per sec")) == {5, 10, 15}
    states = [(state.step, state.epoch, state.batch, state.losses) for state in checkpointer.states]
    assert states == [(5, 1, 0, []), (10, 2, 0, []), (15, 3, 0, [])]
    assert (result.steps, result.initial_loss, result.final_loss) == (15, pytest.approx(2.0), pytest.approx(2.0))
    # Five steps are two intervals and a remainder; the device is read once for each, and not again for saving.
    assert [count for count in reads if count] == [2, 2, 1] * EPOCHS
    for name in ("loss", "gradient norm", "samples per sec", "data wait fraction"):
        assert set(logger.curve(f"Step/{name}")) == {2, 4, 5, 7, 9, 10, 12, 14, 15}, name
    assert logger.curve("Step/TFLOP per sec per rank") == {}, "only on a GPU"
    assert not [line for line in logger.lines if "TFLOP" in line]
    assert max(len(line) for line in logger.lines) < 140 - len("12:34:56 INFO "), "one row of a terminal"


def test_each_interval_names_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the times of one that is slow in two intervals in a row."""
    slow, read = metrics.SlowestRank(3, seconds=0.5, waiting=0.2, ratio=1.25), LossRecorder.read
    monkeypatch.setattr(LossRecorder, "read", lambda self: (read(self), setattr(self, "slowest", slow))[0])
    trainer, logger, _, _ = make(RecordedStep())
    trainer.fit()
    intervals = [line for line in logger.lines if "samples/s, " in line]
    assert len(intervals) == 9
    assert all(" %, slowest rank 3 (+25 %), " in line for line in intervals)
    assert logger.lines.count(f"  {slow}") == 8


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the loop, which only the test advances."""
    now = [1000.0]
    for module in (trainers, metrics, checkpoint_writer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(trainers, "Stopwatch", lambda: metrics.Stopwatch(started=now[0]))
    return now


def test_the_warm_up_is_timed_separately_before_the_first_epoch(clock: list[float]) -> None:
    def pass_time(event: int) -> None:
        clock[0] += {"warm up on 7.0": 5.0, "step": 1.0, "evaluate": 0.25}[step.events[-1]]

    step = RecordedStep(after=pass_time)
    trainer, logger, _, _ = make(step)
    trainer.fit()
    place = logger.lines.index("Warm-up, first forward and backward pass: 5.000 sec")
    untrained = "  Avg val loss=2.000000  Total validation time: 0.500 sec"
    assert logger.lines[place - 1] == untrained, "the untrained losses come first"
    assert logger.lines[place + 1] == "described after 2 steps"
    assert logger.lines[place + 2].startswith("epoch 1/3, step 2/5")
    assert sum(line.startswith("described") for line in logger.lines) == 1
    for epoch in (1, 2, 3):
        line = f"Time taken for epoch {epoch} is 5.000 sec, avg 2.00 samples/sec"
        assert line in logger.lines, "without the warm-up and earlier epochs"


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps"), [(None, [5, 10, 15]), (1, list(range(1, 16))), (3, [3, 5, 6, 9, 10, 12, 15])]
)
@pytest.mark.parametrize("log_interval", [1, 2, 7])
def test_a_saved_state_holds_the_logged_and_the_unlogged_losses(
    every: int | None, steps: list[int], log_interval: int
) -> None:
    """At most one save per step; each step's loss is in the saved state, as logged or as still to be logged."""
    often = {"every_steps": every, "every_minutes": None}
    trainer, logger, checkpointer, _ = make(RecordedStep(), log_interval, checkpoint=often)
    trainer.fit()
    assert checkpointer.steps == steps
    assert checkpointer.best == [], "none is better than the untrained network"
    assert checkpointer.waits == [15]
    for state in checkpointer.states:
        if state.step % STEPS == 0:
            assert (state.epoch, state.batch, state.losses, state.unlogged) == (state.step // STEPS, 0, [], [])
            continue
        first = state.epoch * STEPS
        assert state.batch == state.step - first
        latest = max((step for step in logger.curve("Step/loss") if first < step <= state.step), default=first)
        assert state.losses == pytest.approx([1 / n for n in range(first + 1, latest + 1)])
        assert state.unlogged == [(pytest.approx(1 / n), 2.0) for n in range(latest + 1, state.step + 1)]
    plain_trainer, plain, _, _ = make(RecordedStep(), log_interval)
    plain_trainer.fit()
    for name in ("Step/loss", "Loss/train", "Loss/valid"):
        assert logger.curve(name) == plain.curve(name), "saves do not change the log"


def test_memory_for_losses_is_that_of_an_epoch_whatever_the_logging_interval() -> None:
    """Fixed bug: log_interval 10**9 allocated 12 GB."""
    trainer, logger, _, _ = make(RecordedStep(), log_interval=10**9)
    assert len(trainer._recorder._values) == STEPS + 1, "and a row of times"
    trainer.fit()
    assert len(logger.curve("Step/loss")) == EPOCHS


def test_the_validation_loss_of_several_volumes_is_the_mean_of_theirs() -> None:
    """Regardless of their numbers of samples; of one volume only the loss is recorded, as the tests above show."""
    trainer, logger, checkpointer, loaders = make(
        RecordedStep(), validation=[batch(1.0, 2), batch(4.0, 1), batch(5.0, 3)]
    )
    loaders.valid.volumes = ["a", "b"]
    trainer.fit()
    steps = (0, 5, 10, 15)
    assert logger.curve("Loss/valid/a") == dict.fromkeys(steps, 1.0)
    assert logger.curve("Loss/valid/b") == dict.fromkeys(steps, 4.75)
    assert logger.curve("Loss/valid") == dict.fromkeys(steps, 2.875)
    assert checkpointer.states[-1].final_loss == 2.875
    assert logger.lines.count("  Val loss by volume: a=1.000000, b=4.750000") == len(steps)


def validated(*losses: float, state: TrainState | None = None, **settings: Any) -> tuple[Trainer, RecordedCheckpointer]:
    """A training run with these validation losses: untrained, unless it resumes from `state`, and after each epoch."""
    values, step = iter(losses), RecordedStep(done=state.step if state else 0)
    trainer, _, checkpointer, loaders = make(step, validation=[batch(0.0)], state=state, **settings)
    loaders.valid.epoch = lambda epoch, first_batch=0: (batch(value) for value in [next(values)])
    return trainer, checkpointer


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss() -> None:
    trainer, checkpointer = validated(5.0, 3.0, 4.0, 2.0)
    result = trainer.fit()
    assert checkpointer.best == [5, 15]
    found = [(state.best_loss, state.best_step, state.final_loss) for state in checkpointer.states]
    assert found == [(3.0, 5, 3.0), (3.0, 5, 4.0), (2.0, 15, 2.0)]
    assert (result.initial_loss, result.final_loss, result.best_loss) == (5.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("keys", "saved", "best"),
    [
        ({"every_epochs": 0}, [15], [15]),
        ({"every_epochs": 2}, [10, 15], [10, 15]),
        ({"every_epochs": 3}, [15], [15]),
        ({"every_epochs": 0, "every_steps": 5}, [5, 10, 15], [15]),
    ],
    ids=str,
)
def test_the_best_epoch_is_one_of_those_that_every_epochs_saves(
    keys: dict[str, int], saved: list[int], best: list[int]
) -> None:
    """The first epoch has the lowest loss. Saves for other reasons, which may depend on the time, do not count."""
    trainer, checkpointer = validated(5.0, 1.0, 3.0, 2.0, checkpoint={"every_minutes": None, **keys})
    result = trainer.fit()
    assert (checkpointer.steps, checkpointer.best, checkpointer.waits) == (saved, best, [15])
    assert (result.best_loss, result.best_step) == (2.0, 15)


@pytest.mark.parametrize("value", [NAN, INF])
def test_training_ends_at_a_non_finite_validation_loss(value: float) -> None:
    trainer, checkpointer = validated(5.0, 3.0, value)
    with pytest.raises(
        UserError, match=rf"^training stopped: the validation loss is {value} after step 10, learning rate"
    ):
        trainer.fit()
    assert checkpointer.steps == [5], "the last checkpoint is that of the epoch before"


# --- early stopping --------------------------------------------------------------------------------------------------


class RecordedEvaluation(Evaluation):
    """Records which epochs were announced as the last one."""

    def __init__(self) -> None:
        self.last: list[bool] = []

    def after_epoch(self, epoch: int, step: int, is_last: bool, stop_if_requested: Callable[[], None]) -> dict:
        self.last.append(is_last)
        return {}


@pytest.mark.parametrize(
    ("losses", "settings", "epochs", "reason"),
    [
        ((5.0, 3.0, 3.0), {"patience": 1}, 2, " for 1 epoch; the best was 3.000000 after step 5"),
        ((5.0, 6.0, 5.5), {"patience": 2}, 2, " for 2 epochs; the best was 5.000000 after step 0"),
        ((5.0, 4.0, 3.5), {"patience": 1, "min_delta": 1}, 1, " by more than 1 for 1 epoch; the best was 4.000000"),
        ((5.0, 6.0, 4.0, 4.5), {"patience": 2}, 3, None),
        ((5.0, 4.5, 3.5, 3.0), {"patience": 2, "min_delta": 1}, 3, None),
        ((5.0, 6.0, 6.0, 6.0), {"patience": 3}, 3, None),
        ((5.0, 6.0, 6.0, 6.0), {}, 3, None),
    ],
    ids=str,
)
def test_early_stopping_ends_a_training_also_if_it_was_resumed(
    losses: tuple[float, ...], settings: dict[str, Any], epochs: int, reason: str | None
) -> None:
    """After any epoch. The learning rates of the epochs that are trained are those of a complete run."""

    def end(*values: float, state: TrainState | None = None) -> tuple[Trainer, RecordedCheckpointer, FitResult]:
        trainer, checkpointer = validated(*values, state=state, early_stopping=settings)
        trainer.evaluation = RecordedEvaluation()
        return trainer, checkpointer, trainer.fit()

    trainer, checkpointer, result = end(*losses)
    assert result.steps == epochs * STEPS
    assert trainer.evaluation.last == [False] * (epochs - 1) + [True]
    assert checkpointer.waits == [epochs * STEPS]
    assert trainer.step.lrs == [trainer.schedule(number) for number in range(epochs * STEPS)]
    line = f"Early stopping after epoch {epochs}: the validation loss has not improved{reason}"
    assert sum(text.startswith(line) for text in trainer.records.lines) == (reason is not None)
    assert (result.early_stop is None) == (reason is None)
    clocks = {"seconds", "samples_per_second"}
    for number, state in enumerate(checkpointer.states, start=1):
        _, saved, resumed = end(*losses[number + 1 :], state=TrainState(**dataclasses.asdict(state)))
        assert dataclasses.replace(resumed, **{name: getattr(result, name) for name in clocks}) == result
        assert [each.step for each in saved.states] == [STEPS * epoch for epoch in range(number + 1, epochs + 1)]


def test_a_lower_patience_takes_effect_at_the_end_of_an_epoch() -> None:
    assert not TrainState(batch=2, epochs_without_improvement=5).stops_early(1)
    assert TrainState(batch=0, epochs_without_improvement=5).stops_early(1)


# --- stopping and resuming -------------------------------------------------------------------------------------------


class SignalAtEvent(Signals):
    def receive(self, event: int, when: int) -> None:
        if event == when:
            self.received = "SIGTERM"


EVENTS = 3 + (STEPS + 2) * EPOCHS + 1  # including the warm-up


def recorded(logger: RecordedLogger) -> tuple[list, list, list]:
    """Points, lines and warnings, without measured times and without lines that each process logs once."""
    points = [
        (step, {key: value for key, value in values.items() if key not in CLOCKS}) for step, values in logger.points
    ]
    reported = r"epoch ./3, step ./5: loss [^,]*|Time taken for epoch .|  Avg train loss=.*"
    return points, [match[0] for line in logger.lines if (match := re.match(reported, line))], logger.warnings


def run_in_parts(
    events: list[int], log_interval: int = 2, bad_steps: dict | None = None, **settings: Any
) -> tuple[TrainState, list[RecordedStep]]:
    """Trains to the end, stopped by a signal during the event of each number, with a new process each time.

    Asserts that everything an uninterrupted training logs is logged exactly once.
    """
    state, parts, steps = TrainState(), [], []
    for number in [*events, 0]:
        signals = SignalAtEvent()
        step = RecordedStep(bad_steps, state.step, functools.partial(signals.receive, when=number))
        before = copy.deepcopy(state)
        trainer, logger, checkpointer, _ = make(step, log_interval, signals=signals, state=before, **settings)
        parts.append(logger)
        steps.append(step)
        if number == 0:
            trainer.fit()
        else:
            with pytest.raises(Stopped):
                trainer.fit()
            stopped = [line for line in logger.lines if line.startswith("Stopping")]
            done = state.step + len(step.lrs)
            assert stopped == [f"Stopping after step {done}: SIGTERM"]
            assert checkpointer.waits == ([done] if step.lrs else []), "nothing to save before a step"
            assert all(event.startswith("warm up") for event in step.events[number:-1]), "no further step or batch"
            assert checkpointer.closed
        state = checkpointer.states[-1] if checkpointer.states else state
    trainer, whole, _, _ = make(RecordedStep(bad_steps), log_interval, **settings)
    trainer.fit()
    for found, expected in zip(zip(*map(recorded, parts), strict=True), recorded(whole), strict=True):
        assert [*itertools.chain(*found)] == expected
    return state, steps


@pytest.mark.parametrize("event", range(1, EVENTS + 1))
def test_a_training_stops_after_any_step_and_validation_batch_and_resumes(event: int) -> None:
    """Nothing is logged twice or missing; a signal in a warm-up waits for the first step."""
    state, steps = run_in_parts([event])
    assert len(steps[0].events) == {1: 2, 4: 5}.get(event, event)
    assert sum(len(step.lrs) for step in steps) == STEPS * EPOCHS
    assert (state.step, state.epoch, state.batch) == (15, 3, 0)


@pytest.mark.parametrize("log_interval", [1, 3, 5, 100])
@pytest.mark.parametrize(("every", "epochs"), [(None, 1), (1, 1), (4, 1), (None, 0), (4, 0)])
def test_many_stops_leave_the_records_of_an_uninterrupted_training(
    log_interval: int, every: int | None, epochs: int
) -> None:
    # Events of a resumed process: the evaluation of one batch, the warm-up, then steps.
    often = {"every_steps": every, "every_minutes": None, "every_epochs": epochs}
    state, _ = run_in_parts([5, 3, 3, 5, 3, 4], log_interval, checkpoint=often)
    assert state.step == STEPS * EPOCHS


def test_a_complete_training_makes_no_step() -> None:
    end, _ = run_in_parts([])
    step = RecordedStep(done=15)
    trainer, logger, checkpointer, _ = make(step, state=end)
    result = trainer.fit()
    assert (step.events, logger.lines, logger.points, checkpointer.states) == ([], [], [], [])
    assert (result.steps, result.final_loss, result.initial_loss) == (15, pytest.approx(2.0), pytest.approx(2.0))
    assert checkpointer.closed


def test_times_include_all_processes(clock: list[float]) -> None:
    state = TrainState(step=7, epoch=1, batch=2, seconds=70.0, epoch_seconds=5.0, losses=[0.5, 0.5], best_loss=2.0)
    step = RecordedStep(done=7, after=lambda event: clock.__setitem__(0, clock[0] + 1.0))
    trainer, _, checkpointer, _ = make(step, state=state)
    result = trainer.fit()
    assert result.seconds == 70.0 + 2 + 3 + 2 + 5 + 2, "one batch, the warm-up, steps and validations"
    assert [state.seconds for state in checkpointer.states] == [70.0 + 2 + 3 + 2, result.seconds]
    assert result.steps == 15


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_the_log_interval_may_change_within_an_interval(interval: int) -> None:
    """Three of four steps were made since the last line; the next line comes with the next step."""
    state = TrainState(step=3, batch=3, unlogged=[(1.0, 2.0), (0.5, 2.0), (1 / 3, 2.0)])
    trainer, logger, _, _ = make(RecordedStep(done=3), interval, state=state)
    trainer.fit()
    assert next(iter(logger.curve("Step/loss"))) == 4
    assert logger.curve("Loss/train")[5] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5)


# --- several ranks ---------------------------------------------------------------------------------------------------


def stop(world: World, cases: list[tuple[int, int]]) -> list[tuple]:
    """Results of this rank for each case: the rank that gets a signal, and the event during which it gets it."""
    answers = []
    for rank, event in cases:
        signals = SignalAtEvent()
        step = RecordedStep(after=functools.partial(signals.receive, when=event if world.rank == rank else 0))
        # Rank 0 has fewer validation batches than the last rank.
        validation = [batch(float(n + 1)) for n in range(world.rank + 1)]
        trainer, logger, checkpointer, _ = make(step, world=world, validation=validation, signals=signals)
        try:
            trainer.fit()
            how = "complete"
        except Stopped:
            how = "stopped"
        state = checkpointer.states[-1] if checkpointer.states else TrainState()
        answers.append((how, len(step.lrs), checkpointer.steps, state.step, state.batch, logger.lines[-1]))
    return answers


def skip(world: World) -> tuple:
    """Rank 1 has a bad loss at steps 3, 6, 7, 8."""
    step = RecordedStep(skipped_steps(3, 6, 7, 8) if world.rank == 1 else None)
    trainer, logger, checkpointer, _ = make(step, world=world, max_consecutive_skips=3)
    with pytest.raises(UserError) as caught:
        trainer.fit()
    return str(caught.value), logger.warnings, checkpointer.steps, trainer.state.skipped, len(step.lrs)


def on_ranks(world: World, cases: list[tuple[int, int]]) -> tuple[list[tuple], tuple]:
    return stop(world, cases), skip(world)


def signals_to(ranks: int) -> list[tuple[int, int]]:
    """A signal to the first or the last rank during each event, and one that comes too late."""
    return [*((rank, event) for rank in (0, ranks - 1) for event in range(3, 21)), (ranks - 1, 10_000)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest) -> list[tuple]:
    return run_ranks(on_ranks, request.param, signals_to(request.param))


def test_all_ranks_stop_after_the_same_step_whichever_gets_the_signal(answers: list[tuple]) -> None:
    """During any step, during a validation that other ranks have finished, and too late to matter; none hangs."""
    cases = signals_to(len(answers))
    for case, *found in zip(cases, *(answer[0] for answer in answers), strict=True):
        assert all(answer[:5] == found[0][:5] for answer in found), f"{case}: {found}"
        how, made, saved, step, _, _ = found[0]
        assert how == ("complete" if case == cases[-1] else "stopped"), case
        assert made == step, "the last save is of the last step"
        assert saved.count(step) <= 1 or step % STEPS == 0
        if how == "stopped":
            for rank, answer in enumerate(found):
                why = "SIGTERM" if rank == case[0] else "a signal to another rank"
                assert answer[5] == f"Stopping after step {made}: {why}", case


def test_all_ranks_log_the_same_skipped_updates(answers: list[tuple]) -> None:
    assert all(answer[1] == answers[0][1] for answer in answers)
    line, warnings, saved, skipped, made = answers[0][1]
    start = (
        "training stopped: 3 updates in a row were skipped, the last one at step 8: loss nan on rank 1, gradient norm "
    )
    assert line.startswith(start)
    assert [warning.split(",")[0] for warning in warnings] == [f"Step {n}: loss nan on rank 1" for n in (3, 6, 7, 8)]
    assert (saved, skipped) == ([5], 4)
    assert made == 9, "the end of the interval"


# --- skipped updates ------------------------------------------------------------------------------------------------


def test_a_skipped_update_is_logged_and_its_loss_is_not_in_the_means() -> None:
    trainer, logger, checkpointer, _ = make(RecordedStep({1: (NAN, 2.0), 4: (0.25, INF), 15: (-INF, NAN)}))
    result = trainer.fit()
    lrs = {n: f"{trainer.schedule(n - 1):.3e}" for n in (1, 4, 15)}
    assert logger.warnings == [
        f"Step 1: loss nan on rank 0, gradient norm 2.0, learning rate {lrs[1]}: update skipped (1 so far)",
        f"Step 4: loss 0.25, gradient norm inf, learning rate {lrs[4]}: update skipped (2 so far)",
        f"Step 15: loss -inf on rank 0, gradient norm nan, learning rate {lrs[15]}: update skipped (3 so far)",
    ]
    train = logger.curve("Loss/train")
    assert train[5] == pytest.approx((1 / 2 + 1 / 3 + 1 / 5) / 3)
    assert train[15] == pytest.approx(sum(1 / n for n in range(11, 15)) / 4)
    steps = logger.curve("Step/loss")
    assert (steps[2], steps[4]) == (pytest.approx(1 / 2), pytest.approx(1 / 3))
    assert math.isnan(steps[15])
    assert logger.curve("Step/skipped updates") == {2: 1, 4: 2, **dict.fromkeys((5, 7, 9, 10, 12, 14), 2), 15: 3}
    assert [(state.skipped, state.skipped_in_a_row) for state in checkpointer.states] == [(2, 0), (2, 0), (3, 1)]
    assert result.steps == 15


def test_an_epoch_without_any_update_has_no_mean() -> None:
    trainer, logger, checkpointer, _ = make(RecordedStep(skipped_steps(*range(6, 11))))
    trainer.fit()
    assert "  Avg train loss=nan" in logger.lines
    assert logger.curve("Loss/train")[15] == pytest.approx(sum(1 / n for n in range(11, 16)) / 5)
    assert [state.skipped_in_a_row for state in checkpointer.states] == [0, 5, 0]


@pytest.mark.parametrize(("first", "taken"), [(1, 4), (4, 7), (13, 15)])
def test_training_ends_after_too_many_skipped_updates_in_a_row(first: int, taken: int) -> None:
    step = RecordedStep(skipped_steps(first - 2, *range(first, 20)))
    trainer, logger, checkpointer, _ = make(step, max_consecutive_skips=3)
    with pytest.raises(
        UserError,
        match=f"^training stopped: 3 updates in a row were skipped, the last one at step {first + 2}: loss nan on ra",
    ):
        trainer.fit()
    assert len(logger.warnings) == 3 + (first > 2)
    assert len(step.lrs) == taken, "at the end of the interval at the latest"
    assert checkpointer.steps == [5] * (first > 3) + [10] * (first > 10)
    assert checkpointer.closed


@pytest.mark.parametrize("events", [[6], [5, 3], [5, 3, 3]], ids=str)
def test_skipped_updates_are_counted_across_a_resume(events: list[int]) -> None:
    """Steps 2, 3 and 5 to 8, with stops in between: the same warnings and records, and the same limit."""
    bad = skipped_steps(2, 3, 5, 6, 7, 8)
    state, _ = run_in_parts(events, 4, bad, max_consecutive_skips=5)
    assert state.skipped == 6
    with pytest.raises(UserError, match=r"^training stopped: 4 updates in a row were skipped, the last one at step 8"):
        run_in_parts(events, 4, bad, max_consecutive_skips=4)
