"""The training loop, one for all steps, loaders and entry scripts."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

from utils.config import Config
from utils.data.loaders import Batch, DataSplits
from utils.distributed.signals import Request, Signals, StopCoordinator
from utils.errors import Stopped, UserError
from utils.log import once_per_job
from utils.optim.schedules import build_schedule
from utils.progress import Progress, format_duration
from utils.run import tags
from utils.run.run import Run
from utils.run.start import random_states
from utils.run.state import FitResult, TrainState
from utils.run.writer import SaveTimer
from utils.steps.annotate import annotate
from utils.steps.eager import EagerStep
from utils.steps.flops import training_flops
from utils.steps.kernels import compile_kernels
from utils.training.hooks import Evaluation, Profiler
from utils.training.metrics import LossRecorder, SlowestRank, StepRecord, StepTimer, Stopwatch, Validation, WeightedMean
from utils.training.noise_scale import NoiseScale

log = once_per_job(__name__)

REMEDY = "check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
START_REMEDY = "check the data with --preflight, and the initial weights (weight_init, --init_from)"
SLOW = 1.1  # ratio of the time of the slowest rank to the median from which on it is logged


class Trainer:
    """Trains from `state` to the last epoch; validates and logs after each epoch, saves, and stops after a signal."""

    def __init__(
        self,
        config: Config,
        step: EagerStep,
        loaders: DataSplits,
        run: Run,
        state: TrainState,
        profiler: Profiler,
        evaluation: Evaluation,
        signals: Signals,
    ) -> None:
        self.config, self.step, self.loaders, self.state = config, step, loaders, state
        self.world, self.records, self.checkpoint_writer = run.world, run.records, run.checkpoint_writer
        self.profiler, self.evaluation, self.signals = profiler, evaluation, signals
        self.schedule = build_schedule(config)
        batch, probe = config.global_batch_size, step.probe
        self._noise = NoiseScale(batch / probe.parts, batch, state.noise) if probe else None
        self._timer = StepTimer(step.optimizer.param_groups[0]["params"][0], self.world.device)
        self._recorder = LossRecorder(min(config.log_interval, len(loaders.train)), self.world, self._timer)
        self._waited = 0.0  # the timer's seconds until the last logged step
        self._slowest: SlowestRank | None = None  # of the last logging interval
        self._coordinator = StopCoordinator(self.world)
        self._save_timer = SaveTimer(config.checkpoint.every_minutes, self.world)
        self._save_is_due = False  # equal on all ranks; at the end of an epoch it waits for the validation
        self._teraflop_per_sample = 0.0
        self._first_step = state.step
        self._started = time.perf_counter() - state.seconds  # as if this process had trained all steps

    def fit(self) -> FitResult:
        """Trains the remaining epochs.

        Raises Stopped, on every rank, after a stop signal; UserError if too many updates in a row or all of them are
        skipped, or the validation loss is not finite.
        """
        with closing(self.checkpoint_writer), closing(self.profiler):
            if not self._is_complete():
                self._prepare()
            while not self._is_complete():
                self._train_epoch()
                validation = self._validate()
                self._log_epoch(validation)
                # The present state stays for now: a stop during the evaluation repeats the validation, too.
                ended = self.state.after_epoch(validation.loss, self.config.early_stopping.min_delta)
                is_last = self._is_complete(ended)
                is_saved = is_last or self._saves_after(ended.epoch)
                if is_saved:
                    ended.compare_with_best()
                scores = self.evaluation.after_epoch(ended.epoch, ended.step, is_last, self.stop_if_requested)
                self._record_epoch(validation, scores)
                self._finish_epoch(ended)
                if is_saved or self._save_is_due:
                    self._save(wait=is_last)
            self._coordinator.close()
        if self.state.skipped == self.state.step > 0:
            raise UserError(
                f"training failed: all {self.state.step} updates were skipped, nothing was learned; {REMEDY}"
            )
        return self._result()

    def _is_complete(self, state: TrainState | None = None) -> bool:
        return (state or self.state).is_complete(self.config.num_epochs, self.config.early_stopping.patience)

    # --- before the first epoch --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Measures the untrained network and warms the step up, before the first epoch's clock starts."""
        state = self.state
        with closing(self.loaders.train.epoch(0)) as batches:
            batch = next(batches)
            compile_kernels(self.config, self.world)
            train = WeightedMean(self.world)
            train.add(self.step.evaluate(batch)[0], len(batch.inputs))
            if self.world.device.type == "cuda":
                self._teraflop_per_sample = training_flops(self.step.network, *batch.network_inputs) / 1e12
            if state.step == 0:
                self._validate_untrained(train)
            self.world.heartbeat.progress("start", state.step)  # compilers may need minutes
            started = time.perf_counter()
            self.step.warm_up(batch)
            self.world.barrier()  # the time of the slowest rank's compiler counts
            seconds = time.perf_counter() - started
            log.info(f"Warm-up, first forward and backward pass: {seconds:.3f} sec")

    def _validate_untrained(self, train: WeightedMean) -> None:
        """Logs both losses before the first update."""
        log.info("Before training:")
        validation, state = self._validate(), self.state
        self._log_validation(validation)
        state.initial_loss = state.final_loss = state.best_loss = state.loss_to_beat = validation.loss
        losses = {tags.TRAIN_LOSS: train.results()[0], **validation.scalars()}
        self.records.scalars({**losses, tags.LEARNING_RATE: self.schedule(0)}, 0)

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        """Trains the remaining steps of the current epoch."""
        state, steps = self.state, len(self.loaders.train)
        clock, interval = Stopwatch(), Stopwatch()
        title = f"epoch {state.epoch + 1}/{self.config.num_epochs}"
        with (
            closing(self.loaders.train.epoch(state.epoch, state.batch)) as batches,
            Progress(title, steps, live_only=True) as progress,
        ):
            progress.advance(state.batch)
            while state.batch < steps:
                self._train_step(batches, interval)
                if len(state.unlogged) + len(self._recorder) >= self.config.log_interval or state.batch == steps:
                    self._log_interval(interval, f"{title}, step {state.batch}/{steps}")
                    interval = Stopwatch()
                progress.advance(note=f"loss {state.losses[-1]:.5f}" if state.losses else "")
                state.epoch_seconds += clock.lap()
                self._save_or_stop(ends_epoch=state.batch == steps)

    def _train_step(self, batches: Generator[Batch, None, None], interval: Stopwatch) -> None:
        """One step: learning rate, next batch, forward, backward, update. The loss stays on the device."""
        state, heartbeat = self.state, self.world.heartbeat
        self.profiler.before_step(state.step)
        lr = self.schedule(state.step)
        heartbeat.progress("data", state.step + 1)
        with annotate("data"), self._timer.waiting():
            batch = next(batches)
        heartbeat.progress("step", state.step + 1)
        with annotate("step"):
            loss = self.step(batch, lr)
        probe = self.step.probe
        self._recorder.record(loss, self.step.gradient_norm, None if probe is None else probe.square)
        state.batch += 1
        state.step += 1
        interval.steps += 1

    def _validate(self) -> Validation:
        """Loss and metrics: means over a volume's samples, each counted once on any number of ranks, then over volumes.

        Logs nothing, since a training run that is stopped here validates again when it resumes.
        """
        started = time.perf_counter()
        self.step.broadcast_buffers()
        valid = self.loaders.valid
        means = [WeightedMean(self.world, 1 + len(self.config.metrics)) for _ in valid.volumes]
        with closing(valid.epoch(0)) as batches:
            for index in range(max(self.world.gather_json(len(valid)))):  # some ranks may have fewer batches
                self.world.heartbeat.progress("validation", self.state.step)
                if index < len(valid):
                    batch = next(batches)
                    means[valid.volume_of(index)].add(self.step.evaluate(batch), len(batch.inputs))
                self.stop_if_requested()
        results = {name: mean.results() for name, mean in zip(valid.volumes, means, strict=True)}
        validation = Validation.of(results, self.config.metrics, time.perf_counter() - started)
        self.state.metrics = validation.metrics
        return validation

    def _finish_epoch(self, ended: TrainState) -> None:
        """Advances to the state of the next epoch."""
        self.state = ended
        reason = self._early_stop()
        if reason is not None:
            log.info(f"Early stopping after epoch {self.state.epoch}: {reason}")

    def _early_stop(self) -> str | None:
        """The reason why no further epoch is trained; None if the run was not stopped early."""
        state, stopping = self.state, self.config.early_stopping
        if state.epoch >= self.config.num_epochs or not state.stops_early(stopping.patience):
            return None
        margin = f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
        count = state.epochs_without_improvement
        return (
            f"the validation loss has not improved{margin} for {count} {'epoch' if count == 1 else 'epochs'}; "
            f"the best was {state.best_loss:.6f} after step {state.best_step}"
        )

    # --- logging -----------------------------------------------------------------------------------------------------

    def _log_epoch(self, validation: Validation) -> None:
        """Logs training loss, speed and validation of the epoch."""
        state = self.state
        state.samples_per_second = len(self.loaders.train) * self.config.global_batch_size / state.epoch_seconds
        log.info(
            f"Time taken for epoch {state.epoch + 1} is {state.epoch_seconds:.3f} sec, "
            f"avg {state.samples_per_second:.2f} samples/sec"
        )
        log.info(f"  Avg train loss={_mean(state.losses):.6f}")
        self._log_validation(validation)

    def _log_validation(self, validation: Validation) -> None:
        """Logs a validation; raises UserError if its loss is not finite."""
        metrics = "".join(f"  Avg val {name.replace('_', ' ')}={x:.4f}" for name, x in validation.metrics.items())
        seconds = f"Total validation time: {validation.seconds:.3f} sec"
        log.info(f"  Avg val loss={validation.loss:.6f}{metrics}  {seconds}")
        if validation.volumes:
            log.info(f"  Val loss by volume: {', '.join(f'{name}={x:.6f}' for name, x in validation.volumes.items())}")
        if not math.isfinite(validation.loss):
            step = self.state.step
            rate = f", learning rate {self.schedule(step - 1):.3e}" if step else ", the untrained network"
            raise UserError(
                f"training stopped: the validation loss is {validation.loss} after step {step}{rate}; "
                f"{REMEDY if step else START_REMEDY}"
            )

    def _record_epoch(self, validation: Validation, scores: Mapping[str, float]) -> None:
        """Records the scalars of the epoch; `scores` are those of the evaluation."""
        state = self.state
        iterations_per_second = len(self.loaders.train) / state.epoch_seconds
        lr = self.schedule(state.step - 1)
        self.records.scalars({tags.ITERATIONS_PER_SECOND: iterations_per_second, tags.LEARNING_RATE: lr}, state.step)
        losses = {tags.TRAIN_LOSS: _mean(state.losses), **validation.scalars()}
        self.records.scalars({**losses, **scores}, state.step)

    def _log_interval(self, interval: Stopwatch, title: str) -> None:
        """Reads the steps of a logging interval, the only read of the device in it, and logs them."""
        self._read_steps()
        state = self.state
        waited, self._waited = self._timer.waited - self._waited, self._timer.waited
        records, state.unlogged = [StepRecord(*record) for record in state.unlogged], []
        losses = [record.loss for record in records if record.updated]
        state.losses += losses
        if interval.steps == state.step - self._first_step:  # this process's first interval
            for line in self.step.describe():
                log.info(line)
        lr = self.schedule(state.step - 1)
        speed = interval.steps * self.config.global_batch_size / interval.seconds()
        steps = self.config.num_epochs * len(self.loaders.train)
        remaining = (steps / state.step - 1) * self._seconds()  # from the mean time per step so far
        scalars = {
            tags.STEP_LOSS: _mean(losses),
            tags.STEP_GRADIENT_NORM: records[-1].gradient_norm,
            tags.STEP_SAMPLES_PER_SECOND: speed,
            tags.STEP_DATA_WAIT: min(1.0, waited / max(interval.seconds(), 1e-9)),
            tags.STEP_LEARNING_RATE: lr,
        }
        teraflops, slowest = "", self._recorder.slowest
        slow = f"slowest rank {slowest.rank} (+{100 * (slowest.ratio - 1):.0f} %), " if slowest else ""
        if self._teraflop_per_sample:
            rate = scalars[tags.STEP_TFLOPS_PER_RANK] = speed * self._teraflop_per_sample / self.world.size
            teraflops = f"{rate:.3g} TFLOP/s per rank, "
        log.info(
            f"{title}: loss {scalars[tags.STEP_LOSS]:.6f}, {speed:.1f} samples/s, {teraflops}lr {lr:.2e}, "
            f"gradient norm {scalars[tags.STEP_GRADIENT_NORM]:.3g}, "
            f"data wait {100 * scalars[tags.STEP_DATA_WAIT]:.0f} %, {slow}{format_duration(remaining)} left"
        )
        scalars |= self._log_slowest_rank()
        if state.skipped:
            scalars[tags.STEP_SKIPPED_UPDATES] = state.skipped
        if self._noise is not None:
            scalars |= self._noise.scalars()
        self.records.scalars(scalars, state.step)

    def _log_slowest_rank(self) -> dict[str, float]:
        """The scalar about the slowest rank; logs the times of one that is slow in two intervals in a row."""
        last, slowest = self._slowest, self._recorder.slowest
        self._slowest = slowest
        if slowest is None:
            return {}
        if slowest.ratio > SLOW and last is not None and last.ratio > SLOW and last.rank == slowest.rank:
            log.info(f"  {slowest}")
        return {tags.STEP_SLOWEST_RANK: slowest.ratio}

    def _read_steps(self) -> None:
        """Reads the steps since the last read into `state.unlogged`; counts and logs skipped updates."""
        state, records = self.state, self._recorder.read()
        for number, record in enumerate(records, start=state.step - len(records) + 1):
            state.unlogged.append((record.loss, record.gradient_norm))
            if record.updated:
                state.skipped_in_a_row = 0
                if self._noise is not None:
                    self._noise.add(record.part_norm_squared, record.gradient_norm**2)
            else:
                self._count_skipped_update(number, record)

    def _count_skipped_update(self, number: int, record: StepRecord) -> None:
        """Logs a step whose update was skipped; raises UserError after too many in a row."""
        state = self.state
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        rank = "" if record.non_finite_rank is None else f" on rank {record.non_finite_rank}"
        values = (
            f"loss {record.loss}{rank}, gradient norm {record.gradient_norm}, "
            f"learning rate {self.schedule(number - 1):.3e}"
        )
        log.warning(f"Step {number}: {values}: update skipped ({state.skipped} so far)")
        if state.skipped_in_a_row >= self.config.max_consecutive_skips:
            raise UserError(
                f"training stopped: {state.skipped_in_a_row} updates in a row were skipped, the last one at step "
                f"{number}: {values}; {REMEDY}"
            )

    # --- saving and stopping -----------------------------------------------------------------------------------------

    def _save_or_stop(self, ends_epoch: bool) -> None:
        """Saves or stops if that is due; all ranks do so after the same step."""
        self.stop_if_requested()
        every_steps = self.config.checkpoint.every_steps
        self._save_is_due |= every_steps is not None and self.state.step % every_steps == 0
        if self._save_is_due and not ends_epoch:
            self._save()

    def _saves_after(self, epoch: int) -> bool:
        """True if `checkpoint.every_epochs` asks for a checkpoint at the end of this epoch, counted from 1."""
        every_epochs = self.config.checkpoint.every_epochs
        return every_epochs > 0 and epoch % every_epochs == 0

    def stop_if_requested(self) -> None:
        """Agrees on one request with all ranks, which call it at the same points; a stop saves and raises Stopped."""
        request = Request.CONTINUE
        if self.signals.received:
            request = Request.STOP
        elif self._save_timer.is_due():
            request = Request.SAVE
            self._save_timer.restart()
        answer = self._coordinator.exchange(request)
        if answer is Request.STOP:
            reason = self.signals.received or "a signal to another rank"
            log.info(f"Stopping after step {self.state.step}: {reason}")
            if self.state.step > self._first_step:  # otherwise there is nothing to lose
                self._save(wait=True)
            with self.world.raise_together():  # otherwise a launcher may kill a rank that still writes
                self.checkpoint_writer.check()
            raise Stopped
        self._save_is_due |= answer is Request.SAVE

    def _save(self, wait: bool = False) -> None:
        """Saves a checkpoint; every rank calls it. With `wait` it returns when the checkpoint is written."""
        self._read_steps()
        self.records.flush()
        self.world.heartbeat.progress("save", self.state.step)
        self.state.seconds = self._seconds()
        random = random_states(self.world)
        self.checkpoint_writer.save({**self.step.state(), "random": random}, self.state, wait=wait)
        self._save_timer.restart()
        self._save_is_due = False

    def _seconds(self) -> float:
        """Duration of the run, including earlier processes."""
        return time.perf_counter() - self._started

    def _result(self) -> FitResult:
        state = self.state
        return FitResult(
            steps=state.step,
            initial_loss=state.initial_loss,
            final_loss=state.final_loss,
            best_loss=state.best_loss,
            samples_per_second=state.samples_per_second,
            seconds=self._seconds(),
            metrics=dict(state.metrics),
            noise_scale=self._noise.sentence() if self._noise else None,
            early_stop=self._early_stop(),
            skipped_updates=state.skipped,
            best_step=state.best_step,
        )


def _mean(losses: Sequence[float]) -> float:
    """Mean of the losses; NaN if there are none, because every update was skipped."""
    return sum(losses) / len(losses) if losses else math.nan
