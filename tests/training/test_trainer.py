"""The training loop: order of events, what it logs and saves when, how it stops and resumes."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import nn
from trainings import CLOCKS

from utils.data import Loaders
from utils.data.loaders.prefetcher import Batch
from utils.distributed.signals import NullSignals
from utils.distributed.world import Launch, World
from utils.errors import Stopped, UserError
from utils.optim.schedules import CosineSchedule
from utils.profiling.profiler import NullProfiler
from utils.runs.logger import NullLogger
from utils.steps import Step
from utils.training import metrics
from utils.training import trainer as trainers
from utils.training.checkpoint import NullCheckpointer, TrainState
from utils.training.metrics import LossRecorder
from utils.training.trainer import SaveOften, Trainer

ALONE = World(Launch("test"), torch.device("cpu"))
STEPS, EPOCHS, BATCH = 5, 3, 2
NAN, INF = float("nan"), float("inf")


class RecordedStep(Step):
    """A step whose loss is scripted, 1/n at step n, and its gradient's norm 2; notes every call.

    `bad_steps` have the losses and norms given there; `after` is called with each event's number.
    """

    probe = None

    def __init__(
        self,
        bad_steps: Mapping[int, tuple[float, float]] | None = None,
        done: int = 0,
        after: Callable[[int], None] = lambda event: None,
    ) -> None:
        self.network = nn.Linear(1, 1)
        self.rates: list[float] = []
        self.events: list[str] = []
        self._bad_steps, self._done, self._after = bad_steps or {}, done, after

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._after(len(self.events))

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        self.rates.append(rate)
        self._done += 1
        self._note("step")
        loss, self.gradient_norm = torch.tensor(self._bad_steps.get(self._done, (1.0 / self._done, 2.0)))
        return loss

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._note(f"warm up on {float(inputs.mean())}")

    def describe(self) -> list[str]:
        return [f"described after {len(self.rates)} steps"]

    def state(self) -> dict[str, Any]:
        return {"steps": self._done}

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._note("evaluate")
        self.network(inputs.flatten()[:1])
        return inputs.mean()[None]


class CountingLoader:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.epochs = batches, []

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_batch: int = 0):
        self.epochs.append(epoch)
        yield from self.batches[first_batch:]


class KeptLogs(NullLogger):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.points: list[tuple[int, dict]] = []
        self.flushed = 0  # points that were there at the last flush
        self.info, self.warning = self.lines.append, self.warnings.append

    def scalars(self, values, step: int) -> None:
        self.points.append((step, dict(values)))

    def flush(self) -> None:
        self.flushed = len(self.points)

    def curve(self, name: str) -> dict[int, float]:
        found = [(step, values[name]) for step, values in self.points if name in values]
        assert len(dict(found)) == len(found), f"{name}: a point twice"
        return dict(found)


class KeptSaving(NullCheckpointer):
    """Keeps positions as they were, and the steps of what was saved as the best and as the last chance."""

    def __init__(self, logs: KeptLogs) -> None:
        self.logs = logs
        self.positions: list[TrainState] = []
        self.best: list[int] = []
        self.last_chances: list[int] = []
        self.closed = False

    def save(self, state: Mapping[str, Any], position: TrainState, *, is_best: bool, last_chance: bool) -> None:
        assert self.logs.flushed == len(self.logs.points), "points reach the disk before the checkpoint after them"
        assert state["steps"] == position.step, "the state of after that step"
        self.positions.append(copy.deepcopy(position))
        self.best += [position.step] if is_best else []
        self.last_chances += [position.step] if last_chance else []

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        return [position.step for position in self.positions]


def left_out(*steps: int) -> dict[int, tuple[float, float]]:
    return dict.fromkeys(steps, (NAN, 2.0))


def batch(value: float, size: int = BATCH) -> Batch:
    return Batch(torch.full((size, 1, 1, 1, 1), value), torch.zeros(size, 1, 1, 1, 1))


def make(
    step: RecordedStep,
    log_interval: int = 2,
    world: World = ALONE,
    validation: list[Batch] | None = None,
    **options: Any,
) -> tuple[Trainer, KeptLogs, KeptSaving, Loaders]:
    # The last validation batch is smaller: its loss counts by its samples.
    valid = CountingLoader(validation or [batch(1.0, 2), batch(4.0, 1)])
    loaders = Loaders(CountingLoader([batch(7.0), *[batch(8.0)] * (STEPS - 1)]), valid)
    logs = KeptLogs()
    saving = KeptSaving(logs)
    trainer = Trainer(
        step=step,
        loaders=loaders,
        schedule=CosineSchedule(peak=1.0, end=0.0, warmup_steps=0, total_steps=STEPS * EPOCHS),
        world=world,
        logs=logs,
        saving=saving,
        profiler=NullProfiler(),
        num_epochs=EPOCHS,
        global_batch_size=BATCH,
        log_interval=log_interval,
        **options,
    )
    return trainer, logs, saving, loaders


def test_order_of_events_rates_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], LossRecorder.read
    monkeypatch.setattr(LossRecorder, "read", lambda self: (reads.append(len(self)), read(self))[1])
    step = RecordedStep()
    trainer, logs, saving, loaders = make(step)
    result = trainer.fit()
    assert saving.closed
    untrained = ["evaluate"] * 3  # one training batch and the validation set
    assert step.events == untrained + ["warm up on 7.0"] + (["step"] * STEPS + ["evaluate"] * 2) * EPOCHS
    assert loaders.train.epochs == [0, 0, 1, 2], "the first training batch is looked at before training"
    assert loaders.valid.epochs == [0] * (EPOCHS + 1)
    assert step.rates == [trainer.schedule(number) for number in range(STEPS * EPOCHS)]
    assert step.rates[-1] == 0.0
    assert logs.curve("Learning Rate") == {0: 1.0, **{s: trainer.schedule(s - 1) for s in (5, 10, 15)}}
    assert logs.curve("Loss/valid") == {step: pytest.approx(2.0) for step in (0, 5, 10, 15)}
    train = logs.curve("Loss/train")
    assert train[0] == pytest.approx(7.0)
    assert train[5] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5)
    assert train[15] == pytest.approx(sum(1 / n for n in range(11, 16)) / 5)
    assert set(logs.curve("Avg iters per sec")) == {5, 10, 15}
    positions = [(at.step, at.epoch, at.batch, at.losses) for at in saving.positions]
    assert positions == [(5, 1, 0, []), (10, 2, 0, []), (15, 3, 0, [])]
    assert (result.steps, result.initial_loss, result.final_loss) == (15, pytest.approx(2.0), pytest.approx(2.0))
    # Five steps are two whole intervals and a rest; the device is read once for each, and not again by saving.
    assert [count for count in reads if count] == [2, 2, 1] * EPOCHS
    for name in ("loss", "gradient norm", "samples per sec", "TFLOP per sec per rank", "data wait fraction"):
        assert set(logs.curve(f"Step/{name}")) == {2, 4, 5, 7, 9, 10, 12, 14, 15}, name


def test_format_of_the_log_lines() -> None:
    trainer, logs, _, _ = make(RecordedStep())
    trainer.fit()
    for pattern, count in (
        (r"Time taken for epoch [123] is \d+\.\d+(?:e-\d+)? sec, avg \d+\.\d+ samples/sec", 3),
        (r"  Avg train loss=\d+\.\d{6}", 3),
        (r"  Avg val loss=2\.000000", 4),
        (r"  Total validation time: \S+ sec", 4),
    ):
        assert sum(re.fullmatch(pattern, line) is not None for line in logs.lines) == count, pattern
    intervals = [line for line in logs.lines if re.match(r"epoch \d/3, step", line)]
    assert len(intervals) == 9
    for line in intervals:
        found = re.search(r"([\d.e+]+) samples/s, ([\d.e-]+) TFLOP/s a rank, ", line)
        assert found
        # A batch of two passes once through a linear layer of one weight that needs no gradient of its inputs.
        assert float(found[2]) == pytest.approx(float(found[1]) * 4 / BATCH / 1e12, rel=0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The loop's clock, which only the test sets forward."""
    now = [1000.0]
    for module in (trainers, metrics):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(trainers, "Stopwatch", lambda: metrics.Stopwatch(started=now[0]))
    return now


def test_the_warm_up_is_timed_by_itself_before_the_first_epoch(clock: list[float]) -> None:
    def pass_time(event: int) -> None:
        clock[0] += {"warm up on 7.0": 5.0, "step": 1.0, "evaluate": 0.25}[step.events[-1]]

    step = RecordedStep(after=pass_time)
    trainer, logs, _, _ = make(step)
    trainer.fit()
    place = logs.lines.index("Warm-up, first forward and backward pass: 5.000 sec")
    assert logs.lines[place - 1] == "  Total validation time: 0.500 sec", "the untrained losses come first"
    assert logs.lines[place + 1] == "described after 2 steps"
    assert logs.lines[place + 2].startswith("epoch 1/3, step 2/5")
    assert sum(line.startswith("described") for line in logs.lines) == 1
    assert "Time taken for epoch 1 is 5.000 sec, avg 2.00 samples/sec" in logs.lines, "without the warm-up"


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, [5, 10, 15]),
        (1, list(range(1, 16))),
        (2, [2, 4, 5, 6, 8, 10, 12, 14, 15]),
        (3, [3, 5, 6, 9, 10, 12, 15]),
    ],
)
@pytest.mark.parametrize("log_interval", [1, 2, 4, 7])
def test_a_position_holds_what_was_logged_before_it(every: int | None, steps: list[int], log_interval: int) -> None:
    """Saves come once a step at most, and each step's loss is in its position: as logged, or as still to be logged."""
    trainer, logs, saving, _ = make(RecordedStep(), log_interval, save_often=SaveOften(every))
    trainer.fit()
    assert saving.steps == steps
    assert saving.best == [], "none is better than the untrained network"
    assert saving.last_chances == [15]
    for at in saving.positions:
        if at.step % STEPS == 0:
            assert (at.epoch, at.batch, at.losses, at.interval) == (at.step // STEPS, 0, [], [])
            continue
        first = at.epoch * STEPS
        assert at.batch == at.step - first
        latest = max((step for step in logs.curve("Step/loss") if first < step <= at.step), default=first)
        assert at.losses == pytest.approx([1 / n for n in range(first + 1, latest + 1)])
        assert at.interval == [(pytest.approx(1 / n), 2.0) for n in range(latest + 1, at.step + 1)]
    plain_trainer, plain, _, _ = make(RecordedStep(), log_interval)
    plain_trainer.fit()
    for name in ("Step/loss", "Loss/train", "Loss/valid"):
        assert logs.curve(name) == plain.curve(name), "saves change nothing of what is logged"


def validated(*losses: float) -> tuple[Trainer, KeptSaving]:
    """A training with these validation losses: of the untrained network, and after each epoch."""
    values = iter(losses)
    trainer, _, saving, loaders = make(RecordedStep(), validation=[batch(0.0)])
    loaders.valid.epoch = lambda epoch, first_batch=0: (batch(value) for value in [next(values)])
    return trainer, saving


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss() -> None:
    trainer, saving = validated(5.0, 3.0, 4.0, 2.0)
    result = trainer.fit()
    assert saving.best == [5, 15]
    found = [(at.best_loss, at.best_step, at.final_loss) for at in saving.positions]
    assert found == [(3.0, 5, 3.0), (3.0, 5, 4.0), (2.0, 15, 2.0)]
    assert (result.initial_loss, result.final_loss, result.best_loss) == (5.0, 2.0, 2.0)


@pytest.mark.parametrize("value", [NAN, INF])
def test_training_ends_at_a_non_finite_validation_loss(value: float) -> None:
    trainer, saving = validated(5.0, 3.0, value)
    with pytest.raises(UserError, match=rf"^the validation loss is {value} after step 10, learning rate"):
        trainer.fit()
    assert saving.steps == [5], "the epoch before is the last checkpoint"


# --- stopping and resuming -------------------------------------------------------------------------------------------


class SignalAtEvent(NullSignals):
    def receive(self, event: int, when: int) -> None:
        if event == when:
            self.received = "SIGTERM"


EVENTS = 3 + (STEPS + 2) * EPOCHS + 1  # the warm-up, too


def record(logs: KeptLogs) -> tuple[list, list, list]:
    """Points, lines and warnings, without measured times and without what each process logs once."""
    points = [
        (step, {key: value for key, value in values.items() if key not in CLOCKS}) for step, values in logs.points
    ]
    reported = r"epoch ./3, step ./5: loss [^,]*|Time taken for epoch .|  Avg train loss=.*"
    return points, [match[0] for line in logs.lines if (match := re.match(reported, line))], logs.warnings


def run_in_parts(
    events: list[int], log_interval: int = 2, bad_steps: dict | None = None, **options: Any
) -> tuple[TrainState, list[RecordedStep]]:
    """A training that is stopped in the event of each number, each time in a new process, and then left to end.

    All of it is logged once: what an unstopped training logs.
    """
    position, parts, steps = TrainState(), [], []
    for number in [*events, 0]:
        signals = SignalAtEvent()
        step = RecordedStep(bad_steps, position.step, functools.partial(signals.receive, when=number))
        before = copy.deepcopy(position)
        trainer, logs, saving, _ = make(step, log_interval, signals=signals, position=before, **options)
        parts.append(logs)
        steps.append(step)
        if number == 0:
            trainer.fit()
        else:
            with pytest.raises(Stopped):
                trainer.fit()
            stopped = [line for line in logs.lines if line.startswith("Stopping")]
            done = position.step + len(step.rates)
            assert stopped == [f"Stopping after step {done}: SIGTERM"]
            assert saving.last_chances == ([done] if done else []), "nothing to save before the first step"
            assert all(event.startswith("warm up") for event in step.events[number:-1]), "no further step or batch"
            assert saving.closed
        position = saving.positions[-1] if saving.positions else position
    trainer, whole, _, _ = make(RecordedStep(bad_steps), log_interval, **options)
    trainer.fit()
    for found, expected in zip(zip(*map(record, parts), strict=True), record(whole), strict=True):
        assert [*itertools.chain(*found)] == expected
    return position, steps


@pytest.mark.parametrize("event", range(1, EVENTS + 1))
def test_a_training_stops_after_any_step_and_validation_batch_and_resumes(event: int) -> None:
    """Nothing is logged twice or missing; a signal in a warm-up waits for the first step."""
    position, steps = run_in_parts([event])
    assert len(steps[0].events) == {1: 2, 4: 5}.get(event, event)
    assert sum(len(step.rates) for step in steps) == STEPS * EPOCHS
    assert (position.step, position.epoch, position.batch) == (15, 3, 0)


@pytest.mark.parametrize("log_interval", [1, 3, 5, 100])
@pytest.mark.parametrize("often", [SaveOften(), SaveOften(1), SaveOften(4)], ids=str)
def test_many_stops_leave_the_records_of_an_unstopped_training(log_interval: int, often: SaveOften) -> None:
    # Events of a resumed process: a look at a batch, the warm-up, then steps.
    position, _ = run_in_parts([5, 3, 3, 5, 3, 4], log_interval, save_often=often)
    assert position.step == STEPS * EPOCHS


def test_a_training_that_is_complete_makes_no_step() -> None:
    end, _ = run_in_parts([])
    step = RecordedStep(done=15)
    trainer, logs, saving, _ = make(step, position=end)
    result = trainer.fit()
    assert (step.events, logs.lines, logs.points, saving.positions) == ([], [], [], [])
    assert (result.steps, result.final_loss, result.initial_loss) == (15, pytest.approx(2.0), pytest.approx(2.0))
    assert saving.closed


def test_times_are_those_of_all_processes(clock: list[float]) -> None:
    position = TrainState(step=7, epoch=1, batch=2, seconds=70.0, epoch_seconds=5.0, losses=[0.5, 0.5], best_loss=2.0)
    step = RecordedStep(done=7, after=lambda event: clock.__setitem__(0, clock[0] + 1.0))
    trainer, _, saving, _ = make(step, position=position)
    result = trainer.fit()
    assert result.seconds == 70.0 + 2 + 3 + 2 + 5 + 2, "a look at a batch, the warm-up, steps, and validations"
    assert [at.seconds for at in saving.positions] == [70.0 + 2 + 3 + 2, result.seconds]
    assert result.steps == 15


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_the_log_interval_may_change_in_mid_interval(interval: int) -> None:
    """Three steps had been made since the last line, of four; the next line comes with the next step."""
    position = TrainState(step=3, batch=3, interval=[(1.0, 2.0), (0.5, 2.0), (1 / 3, 2.0)])
    trainer, logs, _, _ = make(RecordedStep(done=3), interval, position=position)
    trainer.fit()
    assert next(iter(logs.curve("Step/loss"))) == 4
    assert logs.curve("Loss/train")[5] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5)


# --- several ranks ---------------------------------------------------------------------------------------------------


def stop(world: World, cases: list[tuple[int, int]]) -> list[tuple]:
    """What this rank did in each case: the rank and the event in which the signal comes to it."""
    answers = []
    for rank, event in cases:
        signals = SignalAtEvent()
        step = RecordedStep(after=functools.partial(signals.receive, when=event if world.rank == rank else 0))
        # Rank 0 has a validation batch less than the last one has.
        validation = [batch(float(n + 1)) for n in range(world.rank + 1)]
        trainer, logs, saving, _ = make(step, world=world, validation=validation, signals=signals)
        try:
            trainer.fit()
            how = "complete"
        except Stopped:
            how = "stopped"
        position = saving.positions[-1] if saving.positions else TrainState()
        answers.append((how, len(step.rates), saving.steps, position.step, position.batch, logs.lines[-1]))
    return answers


def skip(world: World) -> tuple:
    """Rank 1 has a bad loss at steps 3, 6, 7, 8."""
    step = RecordedStep(left_out(3, 6, 7, 8) if world.rank == 1 else None)
    trainer, logs, saving, _ = make(step, world=world, max_consecutive_skips=3)
    with pytest.raises(UserError) as caught:
        trainer.fit()
    return str(caught.value), logs.warnings, saving.steps, trainer.at.skipped, len(step.rates)


def on_ranks(world: World, cases: list[tuple[int, int]]) -> tuple[list[tuple], tuple]:
    return stop(world, cases), skip(world)


def signals_to(ranks: int) -> list[tuple[int, int]]:
    """A signal to the first or the last rank in each event, and one that comes too late."""
    return [*((rank, event) for rank in (0, ranks - 1) for event in range(3, 21)), (ranks - 1, 10_000)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest) -> list[tuple]:
    return run_ranks(on_ranks, request.param, signals_to(request.param))


def test_ranks_stop_after_the_same_step_whichever_the_signal_comes_to(answers: list[tuple]) -> None:
    """In any step, in a validation that other ranks have finished, and too late to matter; none hangs."""
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


def test_all_ranks_report_a_skipped_update_alike(answers: list[tuple]) -> None:
    assert all(answer[1] == answers[0][1] for answer in answers)
    line, warnings, saved, skipped, made = answers[0][1]
    start = "no update for 3 steps in a row, the last is step 8: loss nan on rank 1, gradient norm 2.0, "
    assert line.startswith(start)
    assert [warning.split(",")[0] for warning in warnings] == [f"Step {n}: loss nan on rank 1" for n in (3, 6, 7, 8)]
    assert (saved, skipped) == ([5], 4)
    assert made == 9, "the end of the interval"


# --- skipped updates ------------------------------------------------------------------------------------------------


def test_a_step_without_an_update_is_reported_and_not_in_the_means() -> None:
    trainer, logs, saving, _ = make(RecordedStep({1: (NAN, 2.0), 4: (0.25, INF), 15: (-INF, NAN)}))
    result = trainer.fit()
    rates = {n: f"{trainer.schedule(n - 1):.3e}" for n in (1, 4, 15)}
    assert logs.warnings == [
        f"Step 1: loss nan on rank 0, gradient norm 2.0, learning rate {rates[1]}: no update (left out so far: 1)",
        f"Step 4: loss 0.25, gradient norm inf, learning rate {rates[4]}: no update (left out so far: 2)",
        f"Step 15: loss -inf on rank 0, gradient norm nan, learning rate {rates[15]}: no update (left out so far: 3)",
    ]
    train = logs.curve("Loss/train")
    assert train[5] == pytest.approx((1 / 2 + 1 / 3 + 1 / 5) / 3)
    assert train[15] == pytest.approx(sum(1 / n for n in range(11, 15)) / 4)
    steps = logs.curve("Step/loss")
    assert (steps[2], steps[4]) == (pytest.approx(1 / 2), pytest.approx(1 / 3))
    assert math.isnan(steps[15])
    assert logs.curve("Step/updates left out") == {2: 1, 4: 2, **dict.fromkeys((5, 7, 9, 10, 12, 14), 2), 15: 3}
    assert [(at.skipped, at.skipped_in_a_row) for at in saving.positions] == [(2, 0), (2, 0), (3, 1)]
    assert result.steps == 15


def test_an_epoch_without_any_update_has_no_mean() -> None:
    trainer, logs, saving, _ = make(RecordedStep(left_out(*range(6, 11))))
    trainer.fit()
    assert "  Avg train loss=nan" in logs.lines
    assert logs.curve("Loss/train")[15] == pytest.approx(sum(1 / n for n in range(11, 16)) / 5)
    assert [at.skipped_in_a_row for at in saving.positions] == [0, 5, 0]


@pytest.mark.parametrize(("first", "taken"), [(1, 4), (4, 7), (13, 15)])
def test_training_ends_after_too_many_steps_in_a_row_without_an_update(first: int, taken: int) -> None:
    step = RecordedStep(left_out(first - 2, *range(first, 20)))
    trainer, logs, saving, _ = make(step, max_consecutive_skips=3)
    with pytest.raises(
        UserError, match=f"^no update for 3 steps in a row, the last is step {first + 2}: loss nan on ra"
    ):
        trainer.fit()
    assert len(logs.warnings) == 3 + (first > 2)
    assert len(step.rates) == taken, "at the end of the interval at the latest"
    assert saving.steps == [5] * (first > 3) + [10] * (first > 10)
    assert saving.closed


@pytest.mark.parametrize("events", [[6], [5, 3], [5, 3, 3]], ids=str)
def test_skipped_updates_are_counted_across_a_resume(events: list[int]) -> None:
    """Steps 2, 3 and 5 to 8, stopped in between: the same warnings and records, and the same limit."""
    bad = left_out(2, 3, 5, 6, 7, 8)
    position, _ = run_in_parts(events, 4, bad, max_consecutive_skips=5)
    assert position.skipped == 6
    with pytest.raises(UserError, match=r"^no update for 4 steps in a row, the last is step 8"):
        run_in_parts(events, 4, bad, max_consecutive_skips=4)
