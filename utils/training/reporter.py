"""The training loop's log lines and scalars: of steps, logging intervals and epochs."""

import math
from collections.abc import Mapping, Sequence

import torch

from utils.config import Config
from utils.errors import UserError
from utils.log import once_per_job
from utils.optim.schedules import Schedule
from utils.progress import format_duration
from utils.run import tags
from utils.run.open_run import Run
from utils.run.state import FitResult, TrainState
from utils.steps.build import Parts
from utils.training.metrics import LossRecorder, StepRecord, StepTimer, Stopwatch, Validation
from utils.training.noise_scale import NoiseScale

log = once_per_job(__name__)

REMEDY = "check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
MOST_SKIPS_IN_A_ROW = 10  # then training stops
START_REMEDY = "check the data with --preflight, and the initial weights (weight_init, --init_from)"


class Reporter:
    """Logs and records the loop's progress, also in the trainer's state; reads the device per interval and save."""

    def __init__(self, config: Config, parts: Parts, run: Run, schedule: Schedule, state: TrainState) -> None:
        step, steps = parts.step, len(parts.loaders.train)  # steps: of an epoch
        self.config, self.step, self.schedule, self.steps = config, step, schedule, steps
        self.world, self.records, self._run = run.world, run.records, run
        trained = (value for group in step.optimizer.param_groups for value in group["params"] if value.requires_grad)
        self.timer = StepTimer(next(trained), self.world.device)
        self.teraflop_per_sample = parts.size.flops / 1e12 if self.world.device.type == "cuda" else 0.0  # 0: not logged
        self.first_step = state.step
        part, probe = (config.local_batch_size or 0) // config.accumulation_steps, step.probe
        self._noise = NoiseScale(part, part * probe.parts, state.noise) if probe else None
        self._recorder = LossRecorder(min(config.log_interval, steps), self.world, self.timer)
        self.interval, self.clock = Stopwatch(), Stopwatch()
        self.clock.started -= state.seconds  # as if this process had trained all steps

    def after_step(self, loss: torch.Tensor, state: TrainState) -> bool:
        """Records a step, without waiting for the device. If it is the last one of an interval, logs that: True."""
        self._recorder.record(loss, self.step.gradient_norm, *([self.step.probe.square] if self.step.probe else []))
        self.interval.steps += 1
        if len(state.unlogged) + len(self._recorder) >= self.config.log_interval or state.batch == self.steps:
            self._log_interval(state)
            self.interval = Stopwatch()
            return True
        return False

    def read_steps(self, state: TrainState) -> None:
        """Reads the steps since the last read; logs skipped updates, and raises UserError after too many in a row."""
        records = self._recorder.read()
        for number, record in enumerate(records, start=state.step - len(records) + 1):
            state.unlogged.append((record.loss, record.gradient_norm))
            if record.updated:
                state.skipped_in_a_row = 0
                if self._noise is not None:
                    self._noise.add(record.part_norm_squared, record.gradient_norm**2)
            else:
                self._count_skipped_update(number, record, state)

    def _count_skipped_update(self, number: int, record: StepRecord, state: TrainState) -> None:
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        rank = "" if record.non_finite_rank is None else f" on rank {record.non_finite_rank}"
        lr = self.schedule(number - 1)
        values = f"loss {record.loss}{rank}, gradient norm {record.gradient_norm}, learning rate {lr:.3e}"
        remedy = f"; {REMEDY}" if state.skipped == 1 else ""
        log.warning(f"Step {number}: {values}: update skipped ({state.skipped} so far){remedy}")
        if state.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
            skips = f"{state.skipped_in_a_row} updates in a row were skipped, the last one at step {number}"
            raise UserError(f"training stopped: {skips}: {values}; {REMEDY}")

    def _log_interval(self, state: TrainState) -> None:
        self.read_steps(state)
        interval, waited, self.timer.waited = self.interval, self.timer.waited, 0.0
        state.step_seconds -= waited
        records, state.unlogged = [StepRecord(*record) for record in state.unlogged], []
        losses = [record.loss for record in records if record.updated]
        state.losses += losses
        if interval.steps == state.step - self.first_step:  # this process's first interval
            for line in self.step.describe():
                log.info(line)
        scalars = {
            tags.STEP_LOSS: _mean(losses),
            tags.STEP_GRADIENT_NORM: records[-1].gradient_norm,
            tags.STEP_SAMPLES_PER_SECOND: interval.steps * self.config.global_batch_size / interval.seconds(),
            tags.STEP_DATA_WAIT: min(1.0, waited / max(interval.seconds(), 1e-9)),
            tags.STEP_LEARNING_RATE: self.schedule(state.step - 1),
        }
        speed = scalars[tags.STEP_SAMPLES_PER_SECOND]
        remaining = (self.config.num_epochs * self.steps - state.step) * interval.seconds() / interval.steps
        teraflops, slowest = "", self._recorder.slowest
        slow = f"{slowest}, " if slowest else ""
        if self.teraflop_per_sample:
            rate = scalars[tags.STEP_TFLOPS_PER_RANK] = speed * self.teraflop_per_sample / self.world.size
            teraflops = f"{rate:.3g} TFLOP/s per rank, "
        log.info(
            f"epoch {state.epoch + 1}/{self.config.num_epochs}, step {state.batch}/{self.steps}: "
            f"loss {scalars[tags.STEP_LOSS]:.6f}, {speed:.1f} samples/s, {teraflops}"
            f"lr {scalars[tags.STEP_LEARNING_RATE]:.2e}, gradient norm {scalars[tags.STEP_GRADIENT_NORM]:.3g}, "
            f"data wait {100 * scalars[tags.STEP_DATA_WAIT]:.0f} %, {slow}{format_duration(remaining)} left"
        )
        scalars |= {tags.STEP_SLOWEST_RANK: slowest.ratio} if slowest else {}
        if state.skipped:
            scalars[tags.STEP_SKIPPED_UPDATES] = state.skipped
        scalars |= self._noise.scalars() if self._noise else {}
        self.records.scalars(scalars, state.step)

    def log_epoch(self, validation: Validation, state: TrainState) -> None:
        """Logs training loss, speed and validation; UserError if the validation loss is not finite."""
        seconds = state.epoch_seconds
        speed = state.samples_per_second = self.steps * self.config.global_batch_size / seconds
        log.info(f"Time taken for epoch {state.epoch + 1} is {seconds:.3f} sec, avg {speed:.2f} samples/sec")
        log.info(f"  Avg train loss={_mean(state.losses):.6f}")
        self.log_validation(validation, state)

    def record_untrained(self, train_loss: float, validation: Validation) -> None:
        losses = {tags.TRAIN_LOSS: train_loss, **validation.scalars()}
        self.records.scalars({**losses, tags.LEARNING_RATE: self.schedule(0)}, 0)

    def record_epoch(self, validation: Validation, scores: Mapping[str, float], state: TrainState) -> None:
        """Records the scalars of the epoch; `scores` are those of the evaluation."""
        speed, lr = self.steps / state.epoch_seconds, self.schedule(state.step - 1)
        self.records.scalars({tags.ITERATIONS_PER_SECOND: speed, tags.LEARNING_RATE: lr}, state.step)
        self.records.scalars({tags.TRAIN_LOSS: _mean(state.losses), **validation.scalars(), **scores}, state.step)

    def log_validation(self, validation: Validation, state: TrainState) -> None:
        """Logs the losses and metrics of a validation; UserError if its loss is not finite."""
        metrics = "".join(f"  Avg val {name.replace('_', ' ')}={x:.4f}" for name, x in validation.metrics.items())
        log.info(f"  Avg val loss={validation.loss:.6f}{metrics}  Total validation time: {validation.seconds:.3f} sec")
        if validation.volumes:
            log.info(f"  Val loss by volume: {', '.join(f'{name}={x:.6f}' for name, x in validation.volumes.items())}")
        if not math.isfinite(validation.loss):
            step = state.step
            rate = f", learning rate {self.schedule(step - 1):.3e}" if step else ", the untrained network"
            fault = f"training stopped: the validation loss is {validation.loss} after step {step}{rate}"
            raise UserError(f"{fault}; {REMEDY if step else START_REMEDY}")

    def result(self, state: TrainState) -> FitResult:
        """The result of the run; logs the noise scale, and raises UserError if all updates were skipped."""
        if state.skipped == state.step > 0:
            raise UserError(f"training failed: all {state.step} updates were skipped, nothing was learned; {REMEDY}")
        if self._noise is not None and (sentence := self._noise.sentence()):
            log.info(sentence)
        equal = ("initial_loss", "final_loss", "best_loss", "best_step", "samples_per_second")
        return FitResult(
            **{name: getattr(state, name) for name in equal},
            steps=state.step,
            seconds=self.clock.seconds(),
            metrics=dict(state.metrics),
            noise_scale=self._noise.result if self._noise else None,
            skipped_updates=state.skipped,
            goodput=self._run.goodput(state.step_seconds),
        )


def _mean(losses: Sequence[float]) -> float:
    """Mean of the losses; NaN if there are none, because every update was skipped."""
    return sum(losses) / len(losses) if losses else math.nan
