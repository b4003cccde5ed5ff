"""The training loop: one for every entry point, step and loader."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from utils.data import Loaders
from utils.data.loaders.prefetcher import Batch
from utils.distributed.signals import NullSignals, Request, StopCoordinator, StopSignals
from utils.distributed.world import World
from utils.errors import Stopped, UserError
from utils.evaluation.callback import NullEvaluation
from utils.profiling.flops import counted
from utils.profiling.profiler import NullProfiler, annotate
from utils.progress import Progress, format_duration
from utils.runs.logger import NullLogger
from utils.steps import Step
from utils.training.checkpoint import NullCheckpointer, TrainState
from utils.training.metrics import LossRecorder, StepRecord, Stopwatch, WeightedMean
from utils.training.noise_scale import NoiseScale
from utils.training.resume import random_state


@dataclass(frozen=True)
class FitResult:
    """What a training came to; losses are of the validation crops."""

    steps: int
    initial_loss: float
    final_loss: float
    best_loss: float
    samples_per_second: float  # of the last epoch, all ranks, without validation
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # of the validation samples, in the end
    noise_scale: str | None = None  # in a sentence, where it was measured


@dataclass(frozen=True)
class SaveOften:
    """When to save beside the end of each epoch."""

    every_steps: int | None = None
    every_minutes: float | None = None


class Trainer:
    """Trains epoch by epoch, on from `position`; validates, logs and saves after each, and stops when it is told to."""

    def __init__(
        self,
        *,
        step: Step,
        loaders: Loaders,
        schedule: Callable[[int], float],
        world: World,
        logs: NullLogger,
        saving: NullCheckpointer,
        profiler: NullProfiler,
        num_epochs: int,
        global_batch_size: int,
        log_interval: int,
        signals: StopSignals | None = None,
        position: TrainState | None = None,
        save_often: SaveOften | None = None,
        max_consecutive_skips: int = 10,
        metrics: Sequence[str] = (),
        evaluation: NullEvaluation | None = None,
    ) -> None:
        """`metrics` are the names of what `step.evaluate` returns after the loss."""
        self.step, self.loaders, self.schedule = step, loaders, schedule
        self.world, self.logs, self.saving, self.profiler = world, logs, saving, profiler
        self.num_epochs, self.global_batch_size, self.log_interval = num_epochs, global_batch_size, log_interval
        self.signals, self.save_often = signals or NullSignals(), save_often or SaveOften()
        self.max_consecutive_skips = max_consecutive_skips
        self.at = position or TrainState()
        self.metrics, self.evaluation = metrics, evaluation or NullEvaluation()
        probe = step.probe
        self._noise = NoiseScale(global_batch_size / probe.parts, global_batch_size, self.at.noise) if probe else None
        self._recorder = LossRecorder(log_interval, world)
        self._agreement = StopCoordinator(world)
        self._rate = 0.0
        self._teraflops = 0.0  # of training on one sample
        self._described = False
        self._first_step = self.at.step
        self._started = self._saved = time.perf_counter()
        self._seconds_before = self.at.seconds

    def fit(self) -> FitResult:
        """The rest of the training.

        Raises Stopped, on every rank, after a signal, and UserError where too many updates in a row are left out.
        """
        self._started = self._saved = time.perf_counter()
        with closing(self.saving), closing(self.profiler):
            if self.at.epoch < self.num_epochs:
                self._prepare()
            while self.at.epoch < self.num_epochs:
                self._train_epoch()
                self._finish_epoch()
            self._agreement.close()
        at = self.at
        seconds = self._seconds()
        return FitResult(
            at.step,
            at.initial_loss,
            at.final_loss,
            at.best_loss,
            at.samples_per_second,
            seconds,
            dict(at.metrics),
            self._noise.sentence() if self._noise else None,
        )

    def _prepare(self) -> None:
        """The curves' left ends; and what is paid once is paid, and timed, before the first epoch's clock starts."""
        with closing(self.loaders.train.epoch(0)) as batches:
            batch = next(batches)
            train = WeightedMean(self.world)
            with counted(self.step.network) as flops:
                train.add(self.step.evaluate(*batch)[0], len(batch.inputs))
            self._teraflops = flops.training / len(batch.inputs) / 1e12
            if self.at.step == 0:
                self._measure_untrained(train)
            self.world.watch.at("start", self.at.step)  # compilers take their time
            started = time.perf_counter()
            self.step.warm_up(*batch)
            self.world.barrier()  # a rank's compiler may take longer than another's
            seconds = time.perf_counter() - started
            self.logs.info(f"Warm-up, first forward and backward pass: {seconds:.3f} sec")

    def _measure_untrained(self, train: WeightedMean) -> None:
        """Both losses before the first update."""
        self.logs.info("Before training:")
        at = self.at
        at.initial_loss = at.final_loss = at.best_loss = self._validate()
        losses = {"Loss/train": train.results()[0], "Loss/valid": at.initial_loss, **self._valid_metrics()}
        self.logs.scalars({**losses, "Learning Rate": self.schedule(0)}, 0)

    def _train_epoch(self) -> None:
        """What is left of one pass over the epoch's plan."""
        at, steps = self.at, len(self.loaders.train)
        watch, interval = Stopwatch(), Stopwatch()
        title = f"epoch {at.epoch + 1}/{self.num_epochs}"
        with (
            closing(self.loaders.train.epoch(at.epoch, at.batch)) as batches,
            Progress(title, steps, silent=not self.world.is_root, live_only=True) as progress,
        ):
            progress.advance(at.batch)
            while at.batch < steps:
                self._train_step(batches, interval)
                if len(at.interval) + len(self._recorder) >= self.log_interval or at.batch == steps:
                    self._log_interval(interval, f"{title}, step {at.batch}/{steps}")
                    interval = Stopwatch()
                progress.advance(note=f"loss {at.losses[-1]:.5f}" if at.losses else "")
                at.epoch_seconds += watch.lap()
                self._end_step(at.batch == steps)

    def _train_step(self, batches: Generator[Batch, None, None], interval: Stopwatch) -> None:
        at, watch = self.at, self.world.watch
        self.profiler.before_step(at.step)
        watch.at("data", at.step + 1)
        with annotate("data"):
            asked = time.perf_counter()
            inputs, targets = next(batches)
            interval.waited += time.perf_counter() - asked
        watch.at("step", at.step + 1)
        self._rate = self.schedule(at.step)
        with annotate("step"):
            loss = self.step(inputs, targets, self._rate)
        probe = self.step.probe
        self._recorder.record(loss, self.step.gradient_norm, None if probe is None else probe.square)
        at.batch += 1
        at.step += 1
        interval.steps += 1

    def _end_step(self, ends_epoch: bool) -> None:
        """Between two steps is where ranks stop and save, all of them between the same two."""
        wish = self._agree()
        due = self.save_often.every_steps is not None and self.at.step % self.save_often.every_steps == 0
        if (due or wish is Request.SAVE) and not ends_epoch:  # then it follows, with the validation's loss
            self._save()

    def _agree(self) -> Request:
        """What all ranks do now; does not return if that is to stop."""
        wish, minutes = Request.GO_ON, self.save_often.every_minutes
        if self.signals.received:
            wish = Request.STOP
        elif self.world.is_root and minutes is not None and time.perf_counter() - self._saved > 60 * minutes:
            wish, self._saved = Request.SAVE, time.perf_counter()
        answer = self._agreement.ask(wish)
        if answer is Request.STOP:
            why = self.signals.received or "a signal to another rank"
            self.logs.info(f"Stopping after step {self.at.step}: {why}")
            if self.at.step > 0:
                self._save(last_chance=True)
            self.world.barrier()  # a launcher that sees one rank end may stop the one that still writes
            raise Stopped
        return answer

    def _save(self, is_best: bool = False, last_chance: bool = False) -> None:
        """Every rank calls it; only the first one writes."""
        self._read()
        self.logs.flush()
        self.world.watch.at("save", self.at.step)
        self.at.seconds = self._seconds()
        random = self.world.gather_objects(random_state(self.world.device))
        state = {**self.step.state(), "random": random}
        self.saving.save(state, self.at, is_best=is_best, last_chance=last_chance)
        self._saved = time.perf_counter()

    def _seconds(self) -> float:
        """Of the whole training, with that of the processes before this one."""
        return self._seconds_before + time.perf_counter() - self._started

    def _finish_epoch(self) -> None:
        """Loss and speed of the epoch, validation, checkpoint."""
        at, steps = self.at, len(self.loaders.train)
        mean = sum(at.losses) / len(at.losses) if at.losses else math.nan
        at.samples_per_second = steps * self.global_batch_size / at.epoch_seconds
        told = (
            f"Time taken for epoch {at.epoch + 1} is {at.epoch_seconds:.3f} sec, "
            f"avg {at.samples_per_second:.2f} samples/sec",
            f"  Avg train loss={mean:.6f}",
        )
        valid = self._validate(told)
        judged = self.evaluation.after_epoch(at, self._seconds(), self._agree)
        rate = self.schedule(at.step - 1)
        self.logs.scalars({"Avg iters per sec": steps / at.epoch_seconds, "Learning Rate": rate}, at.step)
        self.logs.scalars({"Loss/train": mean, "Loss/valid": valid, **self._valid_metrics(), **judged}, at.step)
        at.final_loss, is_best = valid, valid < at.best_loss
        if is_best:
            at.best_loss, at.best_step = valid, at.step
        at.epoch, at.batch, at.losses, at.epoch_seconds = at.epoch + 1, 0, [], 0.0
        self._save(is_best, last_chance=at.epoch == self.num_epochs)

    def _read(self) -> list[StepRecord]:
        """The steps since the last read, into `interval`; those without an update are told of and counted."""
        at, records = self.at, self._recorder.read()
        for number, record in enumerate(records, start=at.step - len(records) + 1):
            at.interval.append((record.loss, record.gradient_norm))
            if record.updated:
                at.skipped_in_a_row = 0
                if self._noise is not None:
                    self._noise.add(record.part_square, record.gradient_norm**2)
                    at.noise = self._noise.sums
                continue
            at.skipped, at.skipped_in_a_row = at.skipped + 1, at.skipped_in_a_row + 1
            where = "" if record.bad_rank is None else f" on rank {record.bad_rank}"
            what = (
                f"loss {record.loss}{where}, gradient norm {record.gradient_norm}, "
                f"learning rate {self.schedule(number - 1):.3e}"
            )
            self.logs.warning(f"Step {number}: {what}: no update (left out so far: {at.skipped})")
            if at.skipped_in_a_row >= self.max_consecutive_skips:
                raise UserError(
                    f"no update for {at.skipped_in_a_row} steps in a row, the last is step {number}: {what}: training "
                    f"stops; check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
                )
        return records

    def _log_interval(self, interval: Stopwatch, title: str) -> None:
        """The one read per interval, and what is told of it."""
        self._read()
        at = self.at
        records, at.interval = [StepRecord(*record) for record in at.interval], []
        losses = [record.loss for record in records if record.updated]
        at.losses += losses
        if not self._described:
            for line in self.step.describe():
                self.logs.info(line)
            self._described = True
        speed = interval.steps * self.global_batch_size / interval.seconds()
        teraflops = speed * self._teraflops / self.world.size
        mean, norm = sum(losses) / len(losses) if losses else math.nan, records[-1].gradient_norm
        wait = interval.wait_fraction()
        rest = self.num_epochs * len(self.loaders.train) - at.step
        remaining = rest / (at.step - self._first_step) * (time.perf_counter() - self._started)
        self.logs.info(
            f"{title}: loss {mean:.6f}, {speed:.1f} samples/s, {teraflops:.3g} TFLOP/s a rank, "
            f"rate {self._rate:.2e}, gradient norm {norm:.3g}, data wait {100 * wait:.0f} %, "
            f"{format_duration(remaining)} left"
        )
        self.logs.scalars(
            {
                "Step/loss": mean,
                "Step/gradient norm": norm,
                "Step/samples per sec": speed,
                "Step/TFLOP per sec per rank": teraflops,
                "Step/data wait fraction": wait,
                "Step/learning rate": self._rate,
                **({"Step/updates left out": at.skipped} if at.skipped else {}),
                **(self._noise.scalars() if self._noise else {}),
            },
            at.step,
        )

    def _validate(self, told_before: tuple[str, ...] = ()) -> float:
        """Mean loss over all validation crops, each counted once, whatever the number of ranks.

        Nothing is told before it is over: a training that is stopped in it goes on by doing it again.
        """
        started = time.perf_counter()
        mean = WeightedMean(self.world, 1 + len(self.metrics))
        self.step.broadcast_buffers()
        valid = self.loaders.valid
        with closing(valid.epoch(0)) as batches:
            for index in range(max(self.world.gather_objects(len(valid)))):  # some ranks may have one batch less
                self.world.watch.at("validation", self.at.step)
                if index < len(valid):
                    inputs, targets = next(batches)
                    mean.add(self.step.evaluate(inputs, targets), len(inputs))
                self._agree()
        loss, *metrics = mean.results()
        self.at.metrics = dict(zip(self.metrics, metrics, strict=True))
        told = [f"  Avg val {name.replace('_', ' ')}={value:.4f}" for name, value in self.at.metrics.items()]
        for line in (*told_before, f"  Avg val loss={loss:.6f}", *told):
            self.logs.info(line)
        self.logs.info(f"  Total validation time: {time.perf_counter() - started:.3f} sec")
        if not math.isfinite(loss):
            raise UserError(
                f"the validation loss is {loss} after step {self.at.step}, learning rate "
                f"{self.schedule(max(self.at.step - 1, 0)):.3e}: training "
                f"stops; check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
            )
        return loss

    def _valid_metrics(self) -> dict[str, float]:
        """The last validation's, under TensorBoard's names."""
        return {f"{name.capitalize().replace('_', ' ')}/valid": value for name, value in self.at.metrics.items()}
