"""Trains a network: python train.py --config=NAME, or with several ranks under torchrun, srun or mpiexec.

Each rank runs this program. See README.md for the flags, and docs/architecture.md for the way of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from utils import build, cli
from utils import config as configs
from utils.config import Config
from utils.config.overview import describe_config
from utils.distributed.launch import run_script
from utils.distributed.signals import NullSignals, Signals, StopSignals
from utils.distributed.world import World, connect
from utils.errors import one_line_errors
from utils.evaluation.end_of_run import compare_and_draw
from utils.log import configure_logging
from utils.profiling.memory import out_of_memory_for_users
from utils.profiling.profiler import build_profiler
from utils.steps.eager import EagerStep
from utils.training.callbacks import Callbacks
from utils.training.run import Run, run_request
from utils.training.trainer import Trainer

log = logging.getLogger("utils.training")


def main(argv: Sequence[str] | None = None, step_class: type[EagerStep] = EagerStep) -> None:
    """Trains; bad input ends with one line and exit code 2, a stop signal with exit code 75."""
    with one_line_errors():
        options = cli.parse(argv)
        config = configs.load(options.yaml_config, options.config, options.overrides)
        if options.preflight is not None:
            build.run_preflight(options, config, step_class)
            return
        signals: Signals = NullSignals() if config.enable_benchy else StopSignals(config.stop_signal)
        run_identity, nccl = build.identity(config, options), not config.noddp
        with signals, connect(config.device, config.timeouts, run_identity, nccl=nccl) as world:
            configure_logging(world.rank)
            with out_of_memory_for_users():
                config = build.resolve(config, world)
                step_class.check(world, build.step_options(config))
                log.info(describe_config(config, options.config, options.overrides))
                build.log_notes(build.backends(config, world.device), [], world)
                run = build.run_benchmark if config.enable_benchy else train
                run(options, config, world, step_class, signals)


def train(options: cli.Options, config: Config, world: World, step_class: type[EagerStep], signals: Signals) -> None:
    """One training run, from its directory to its summary. Every rank calls it."""
    model, volume = build.model(config), build.evaluation_volume(config, world)
    with Run.open(run_request(config, options, world), world) as run:
        if reason := run.nothing_to_do:
            log.info("Run directory: %s", run.directory)
            log.warning(reason)
            log.info("DONE ---- rank %d", world.rank)
            return
        with build.loaders(config, world) as loaders, build.step(config, world, model, step_class) as step:
            loaders.train.attach(step.pending_work)
            notes = [*loaders.notes, *step.notes, *build.options_without_effect(config, world)]
            build.log_notes(notes, loaders.warnings, world)
            state = run.restore(step)
            profiler = build_profiler(config, world, run.directory)
            evaluation = build.evaluation(config, volume, step, run)
            callbacks = Callbacks(run.logger, run.checkpointer, profiler, evaluation, signals)
            result = Trainer(config, step, loaders, world, state, callbacks).fit()
            run.finish(result, *compare_and_draw(config, step, loaders, run, result))


if __name__ == "__main__":
    run_script(main)
