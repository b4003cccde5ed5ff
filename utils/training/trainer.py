"""The training loop, one for all steps, loaders and entry scripts."""

from collections.abc import Generator
from contextlib import closing

import torch

from utils.data.loaders import Batch
from utils.distributed.devices import random_numbers
from utils.distributed.signals import Request, Signals, StopCoordinator
from utils.errors import Stopped
from utils.log import once_per_job
from utils.optim.schedules import Schedule
from utils.profiling.profiler import Profiler
from utils.progress import Progress
from utils.run.open_run import Run
from utils.run.start import random_states
from utils.run.state import FitResult, TrainState
from utils.steps.annotate import annotate
from utils.steps.build import Parts
from utils.training.integrity import Integrity
from utils.training.metrics import Stopwatch, Validation, WeightedMean
from utils.training.reporter import Reporter

log = once_per_job(__name__)


class Evaluation:
    """An evaluation after the validation of each epoch; this one does nothing."""

    def after_epoch(self, epoch: int, step: int, is_last: bool) -> dict[str, float]:
        """Evaluates the network and returns scalars to log; every rank calls it.

        `epoch` is the number of the epoch that ends, counted from 1; `is_last`: no other follows. A long evaluation
        calls `world.pulse.meet` from time to time, on every rank at the same points, for stop signals.
        """
        return {}


class Trainer:
    """Trains from `state` to the last epoch; validates and logs after each epoch, saves, and stops after a signal."""

    def __init__(
        self, parts: Parts, run: Run, state: TrainState, profiler: Profiler, evaluation: Evaluation, signals: Signals
    ) -> None:
        self.config = config = run.volumes.config
        self.step, self.loaders, self.state = parts.step, parts.loaders, state
        self.world, self.records, self.checkpoint_writer = run.world, run.records, run.checkpoint_writer
        self.profiler, self.evaluation, self.signals = profiler, evaluation, signals
        self.schedule = Schedule(config)
        self.reporter = Reporter(config, parts, run, self.schedule, state)
        self.integrity = Integrity(config, parts.step, run.world)
        self._pulse, self._coordinator = self.world.pulse, StopCoordinator(self.world)
        self._process_seconds = run.process_seconds
        self._since_save = Stopwatch()
        self._save_is_due = False  # equal on all ranks; at the end of an epoch it waits for the validation

    def fit(self) -> FitResult:
        """Trains the remaining epochs; raises, on every rank, Stopped after a stop signal, UserError if it diverges."""
        with closing(self.checkpoint_writer), closing(self.profiler), self._pulse.using(stop=self._stop_if_requested):
            epochs = self.config.num_epochs
            if self.state.epoch < epochs:
                self._prepare()
            while self.state.epoch < epochs:
                self._train_epoch()
                validation = self._validate()
                self.reporter.log_epoch(validation, self.state)
                # The present state stays for now: a stop during the evaluation repeats the validation, too.
                ended = self.state.after_epoch(validation.loss)
                is_last = ended.epoch >= epochs
                every_epochs = self.config.checkpoint.every_epochs
                is_saved = is_last or (every_epochs > 0 and ended.epoch % every_epochs == 0)
                if is_saved and ended.final_loss < ended.best_loss:
                    ended.best_loss, ended.best_step = ended.final_loss, ended.step
                scores = self.evaluation.after_epoch(ended.epoch, ended.step, is_last)
                self.reporter.record_epoch(validation, scores, self.state)
                self.state = ended
                if is_saved or self._save_is_due:
                    self._save(wait=is_last)
            self._coordinator.finish()
        return self.reporter.result(self.state)

    def _prepare(self) -> None:
        """Measures the untrained network and warms the step up, before the first epoch's clock starts."""
        state = self.state
        with closing(self.loaders.train.epoch(0)) as batches:
            batch = next(batches)
            if state.step == 0:
                log.info(f"Before training: {len(self.loaders.valid)} batches of validation with the untrained network")
            train = WeightedMean(self.world)
            with random_numbers(self.world.device):  # a run that resumes has restored its generators
                train.add(self.step.evaluate(batch)[0], len(batch.inputs))
            if state.step == 0:
                validation = self._validate()
                self.reporter.log_validation(validation, state)
                state.initial_loss = state.final_loss = state.best_loss = validation.loss
                self.reporter.record_untrained(train.results()[0], validation)
            self._pulse.enter("start", state.step)  # compilers may need minutes
            clock = Stopwatch()
            if len(set(self.world.hosts)) > 1:
                self.world.check_fabric(limit=5.0)
            self.step.warm_up(batch)
            self.integrity.prepare(batch)
            self.world.barrier()  # the time of the slowest rank's compiler counts
            log.info(f"Warm-up, first forward and backward pass: {clock.seconds():.3f} sec")

    def _train_epoch(self) -> None:
        state, steps = self.state, len(self.loaders.train)
        clock, self.reporter.interval = Stopwatch(), Stopwatch()
        with (
            closing(self.loaders.train.epoch(state.epoch, state.batch)) as batches,
            Progress(f"epoch {state.epoch + 1}/{self.config.num_epochs}", steps, live_only=True) as progress,
        ):
            progress.advance(state.batch)
            while state.batch < steps:
                loss = self._train_step(batches)
                if self.reporter.after_step(loss, state):
                    self.integrity.compare(state)
                progress.advance(note=f"loss {state.losses[-1]:.5f}" if state.losses else "")
                seconds = clock.lap()
                state.step_seconds += seconds
                state.epoch_seconds += seconds
                self._stop_if_requested()
                every_steps = self.config.checkpoint.every_steps
                self._save_is_due |= every_steps is not None and state.step % every_steps == 0
                if self._save_is_due and state.batch < steps:
                    self._save()
                state.epoch_seconds += clock.lap()

    def _train_step(self, batches: Generator[Batch, None, None]) -> torch.Tensor:
        """One step: learning rate, next batch, forward, backward, update. The loss stays on the device."""
        state = self.state
        self.profiler.before_step(state.step)
        lr = self.schedule(state.step)
        self._pulse.enter("data", state.step + 1)
        with annotate("data"), self.reporter.timer.waiting():
            batch = next(batches)
        self._pulse.enter("step", state.step + 1)
        self.integrity.before_step(state.step + 1)
        with annotate("step"):
            loss = self.step(batch, lr)
        state.batch += 1
        state.step += 1
        self.integrity.after_step(batch, state.step)
        return loss

    def _validate(self) -> Validation:
        """Loss and metrics: means over a volume's samples, each counted once on any number of ranks, then over volumes.

        Logs nothing, since a training run that is stopped here validates again when it resumes.
        """
        clock = Stopwatch()
        self.step.broadcast_buffers()  # also for the evaluation after it, which does not do so
        valid, calibration = self.loaders.valid, self.step.calibration
        if calibration:
            calibration.reset()
        means = [WeightedMean(self.world, 1 + len(self.step.metrics)) for _ in valid.volumes]
        self._pulse.enter("validation", self.state.step)
        count = max(self.world.gather_json(len(valid)))  # some ranks may have fewer batches
        progress = Progress("validation", count, "batches", live_only=self.state.step > 0)  # later ones take as long
        with closing(valid.epoch(0)) as batches, progress, random_numbers(self.world.device):
            for index in range(count):
                if index < len(valid):
                    batch = next(batches)
                    means[valid.volume_of(index)].add(self.step.evaluate(batch), len(batch.inputs))
                self._pulse.meet()
                progress.advance()
        results = {name: mean.results() for name, mean in zip(valid.volumes, means, strict=True)}
        validation = Validation.of(results, [*self.step.metrics], clock.seconds())
        self.state.metrics = validation.metrics
        if calibration:
            self.state.calibration = calibration.result(self.world.sum, self.world.device)._asdict()
        return validation

    def _stop_if_requested(self) -> None:
        """Agrees on one request with all ranks, which call it at the same points; a stop saves and raises Stopped."""
        request = Request.CONTINUE
        if self.signals.received:
            request = Request.STOP
        elif self._since_save.seconds() > self.checkpoint_writer.seconds_between_saves:
            request = Request.SAVE
            self._since_save = Stopwatch()
        answer = self._coordinator.exchange(request)
        if answer is Request.STOP:
            log.info(f"Stopping after step {self.state.step}: {self.signals.received or 'a signal to another rank'}")
            if self.state.step > self.reporter.first_step:  # otherwise there is nothing to lose
                self._save(wait=True)
            with self.world.raise_together():  # otherwise a launcher may kill a rank that still writes
                self.checkpoint_writer.check()
            raise Stopped
        self._save_is_due |= answer is Request.SAVE

    def _save(self, wait: bool = False) -> None:
        """Saves a checkpoint; every rank calls it. With `wait` it returns when the checkpoint is written."""
        self.integrity.before_save(self.state.step)
        self.reporter.read_steps(self.state)
        self.integrity.compare(self.state)
        self.records.flush()
        self._pulse.enter("save", self.state.step)
        self.state.seconds, self.state.process_seconds = self.reporter.clock.seconds(), self._process_seconds()
        random = random_states(self.world)
        self.checkpoint_writer.save({**self.step.state(), "random": random}, self.state, wait=wait)
        self._since_save, self._save_is_due = Stopwatch(), False
