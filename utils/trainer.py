"""The training loop: one for every entry point, step and loader."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from utils.checkpoint import NoCheckpoint
from utils.data import Loaders
from utils.data.feeder import Batch
from utils.distributed import World
from utils.errors import UserError
from utils.flops import counted
from utils.logs import SilentLogs
from utils.metrics import LossRecorder, NonFiniteLoss, Stopwatch, WeightedMean
from utils.profiling import NoProfiler, annotate
from utils.progress import Progress, format_duration
from utils.steps import Step


@dataclass(frozen=True)
class FitResult:
    """What a training came to; losses are of the validation crops."""

    steps: int
    initial_loss: float
    final_loss: float
    best_loss: float
    samples_per_second: float  # of the last epoch, all ranks, without validation
    seconds: float


class Trainer:
    """Trains epoch by epoch; validates, logs and saves after each."""

    def __init__(
        self,
        *,
        step: Step,
        loaders: Loaders,
        schedule: Callable[[int], float],
        world: World,
        logs: SilentLogs,
        checkpoint: NoCheckpoint,
        profiler: NoProfiler,
        num_epochs: int,
        global_batch_size: int,
        log_interval: int,
    ) -> None:
        self.step, self.loaders, self.schedule = step, loaders, schedule
        self.world, self.logs, self.checkpoint, self.profiler = world, logs, checkpoint, profiler
        self.num_epochs, self.global_batch_size, self.log_interval = num_epochs, global_batch_size, log_interval
        self.steps_done = 0
        self._rate = 0.0
        self._teraflops = 0.0  # of training on one sample
        self._described = False
        self._started = time.perf_counter()

    def fit(self) -> FitResult:
        """The whole training; raises UserError, on every rank, at the first loss that is no number."""
        self._started = time.perf_counter()
        with closing(self.loaders.train.epoch(0)) as batches:
            batch = next(batches)
            initial = best = final = self._measure_untrained(batch)
            self._warm_up(batch)
        speed = 0.0
        with closing(self.profiler):  # a profile is written, too, of a training that fails
            for epoch in range(self.num_epochs):
                train_loss, speed = self._train_epoch(epoch)
                final = self._validate()
                best = min(best, final)
                self.logs.scalars({"Loss/train": train_loss, "Loss/valid": final}, self.steps_done)
                with self.world.agreed():
                    self.checkpoint.save(self.step.network, epoch=epoch + 1, step=self.steps_done, valid_loss=final)
        return FitResult(self.steps_done, initial, final, best, speed, time.perf_counter() - self._started)

    def _measure_untrained(self, batch: Batch) -> float:
        """Both losses before the first update: the curves' left ends."""
        self.logs.line("Before training:")
        train = WeightedMean(self.world)
        with counted(self.step.network) as flops:
            train.add(self.step.evaluate(*batch), len(batch.inputs))
        self._teraflops = flops.training / len(batch.inputs) / 1e12
        initial = self._validate()
        self.logs.scalars({"Loss/train": train.result(), "Loss/valid": initial, "Learning Rate": self.schedule(0)}, 0)
        return initial

    def _warm_up(self, batch: Batch) -> None:
        """What is paid once is paid, and timed, before the first epoch's clock starts."""
        started = time.perf_counter()
        self.step.warm_up(*batch)
        self.world.barrier()  # a rank's compiler may take longer than another's
        seconds = time.perf_counter() - started
        self.logs.line(f"Warm-up, first forward and backward pass: {seconds:.3f} sec")

    def _train_epoch(self, epoch: int) -> tuple[float, float]:
        """One pass over the epoch's plan; returns the mean loss and samples/s."""
        batches = self.loaders.train.epoch(epoch)
        steps = len(self.loaders.train)
        recorder = LossRecorder(self.log_interval, self.world)
        losses: list[float] = []
        watch, interval = Stopwatch(), Stopwatch()
        title = f"epoch {epoch + 1}/{self.num_epochs}"
        with Progress(title, steps, silent=not self.world.is_root, live_only=True) as progress:
            for done in range(1, steps + 1):
                self.profiler.before_step(self.steps_done)
                with annotate("data"):
                    asked = time.perf_counter()
                    inputs, targets = next(batches)
                    interval.waited += time.perf_counter() - asked
                self._rate = self.schedule(self.steps_done)
                with annotate("step"):
                    loss = self.step(inputs, targets, self._rate)
                recorder.record(loss, self.step.gradient_norm)
                self.steps_done += 1
                if recorder.full or done == steps:
                    losses += self._log_interval(recorder, interval, title, done, steps)
                    interval = Stopwatch()
                progress.advance(note=f"loss {losses[-1]:.5f}" if losses else "")
        batches.close()
        mean, seconds = sum(losses) / len(losses), watch.seconds()
        speed = steps * self.global_batch_size / seconds
        self.logs.line(f"Time taken for epoch {epoch + 1} is {seconds:.3f} sec, avg {speed:.2f} samples/sec")
        self.logs.line(f"  Avg train loss={mean:.6f}")
        self.logs.scalars({"Avg iters per sec": steps / seconds, "Learning Rate": self._rate}, self.steps_done)
        return mean, speed

    def _log_interval(
        self, recorder: LossRecorder, interval: Stopwatch, title: str, done: int, steps: int
    ) -> list[float]:
        """The one read per interval, and what is told of it."""
        try:
            losses, norms = recorder.read()
        except NonFiniteLoss as error:
            step = self.steps_done + error.steps_ago
            raise error.explained(step + 1, self.schedule(step)) from None
        if not self._described:
            for line in self.step.describe():
                self.logs.line(line)
            self._described = True
        speed = len(losses) * self.global_batch_size / interval.seconds()
        teraflops = speed * self._teraflops / self.world.size
        mean, wait = sum(losses) / len(losses), interval.wait_fraction()
        rest = (self.num_epochs * steps - self.steps_done) / max(self.steps_done, 1)
        remaining = rest * (time.perf_counter() - self._started)
        self.logs.line(
            f"{title}, step {done}/{steps}: loss {mean:.6f}, {speed:.1f} samples/s, {teraflops:.3g} TFLOP/s a rank, "
            f"rate {self._rate:.2e}, gradient norm {norms[-1]:.3g}, data wait {100 * wait:.0f} %, "
            f"{format_duration(remaining)} left"
        )
        self.logs.scalars(
            {
                "Step/loss": mean,
                "Step/gradient norm": norms[-1],
                "Step/samples per sec": speed,
                "Step/TFLOP per sec per rank": teraflops,
                "Step/data wait fraction": wait,
                "Step/learning rate": self._rate,
            },
            self.steps_done,
        )
        return losses

    def _validate(self) -> float:
        """Mean loss over all validation crops, each counted once, whatever the number of ranks."""
        started = time.perf_counter()
        mean = WeightedMean(self.world)
        for inputs, targets in self.loaders.valid.epoch(0):
            mean.add(self.step.evaluate(inputs, targets), len(inputs))
        loss = mean.result()
        self.logs.line(f"  Avg val loss={loss:.6f}")
        self.logs.line(f"  Total validation time: {time.perf_counter() - started:.3f} sec")
        if not math.isfinite(loss):
            raise UserError(
                f"the validation loss is {loss} after step {self.steps_done}, learning rate {self._rate:.3e}: training "
                f"stops; check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
            )
        return loss
