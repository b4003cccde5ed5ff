"""Trains the network of a named config.

python train.py --config=demo
torchrun --nproc-per-node=4 train.py --config=short --num_epochs 3
srun -n 8 python train.py --config=bs512_opt
"""

from __future__ import annotations

from collections.abc import Sequence

from utils import build, cli
from utils import config as configs
from utils.config import Config
from utils.distributed.device_memory import out_of_memory_for_users
from utils.distributed.launch import run_script
from utils.distributed.signals import NullSignals, Signals, StopSignals
from utils.distributed.world import World, connect
from utils.errors import one_line_errors
from utils.profiling import benchmark, preflight
from utils.profiling.profiler import build_profiler
from utils.runs import summary
from utils.runs.directory import describe_config, open_run
from utils.runs.logger import configure_logging
from utils.steps.eager import EagerStep


def main(argv: Sequence[str] | None = None, step_class: type[EagerStep] = EagerStep) -> None:
    """Trains; bad input ends with one line and exit code 2, a stop signal with exit code 75."""
    with one_line_errors():
        options = cli.parse(argv)
        config = configs.load(options.yaml_config, options.config, options.overrides)
        if options.preflight is not None:
            preflight.run(options, config, step_class)
            return
        signals: Signals = NullSignals() if config.enable_benchy else StopSignals(config.stop_signal)
        run_identity, nccl = build.identity(config, options), not config.noddp
        with signals, connect(config.device, config.timeouts, run_identity, nccl=nccl) as world:
            configure_logging(world.rank)
            with out_of_memory_for_users():
                run(options, build.resolve(config, world), world, step_class, signals)


def run(options: cli.Options, config: Config, world: World, step_class: type[EagerStep], signals: Signals) -> None:
    """Builds the parts of one training, or of one benchmark, and runs it. Every rank calls it."""
    step_class.check(world, build.step_options(config))
    notes = build.backends(config, world.device)
    model = build.model(config)
    settings = benchmark.read_settings(world) if config.enable_benchy else None
    volume = build.evaluation_volume(config, world)
    with build.claim_directory(config, options, world) as chosen:
        path, start = chosen.path, build.start(config, options, chosen, world)
        profiler = build_profiler(config, world, path)
        with build.loaders(config, world) as loaders, build.step(config, world, model, step_class) as step:
            loaders.train.attach(step.pending_work)
            state = start.restore(step, world)
            if summary.has_nothing_to_do(path, start, world):
                summary.log_nothing_to_do(str(chosen), start, world)
                return
            notes += [*loaders.notes, *step.notes, *build.options_without_effect(config, world)]
            notes.append(describe_config(config, options.config, options.overrides))
            if settings is None:
                notes.insert(0, f"Run directory: {chosen}")
                notes += summary.begin_run(path, chosen.resume, start, world)
            with open_run(config, options.config, chosen, world, start.resumed) as logger:
                for line in notes:
                    logger.info(line)
                loaders.log_warnings(logger.warning)
                if settings is not None:
                    benchmark.Benchmark(config, step, loaders.train, world, logger, settings).run()
                else:
                    summary.check_checkpoints(path, start, world, config.checkpoint.keep_last)
                    callbacks = build.callbacks(config, volume, step, world, path, logger, profiler)
                    trainer = build.trainer(config, step, loaders, world, signals, callbacks, state)
                    summary.finish_run(trainer, trainer.fit(), config, path, start)
                logger.info(f"DONE ---- rank {world.rank}")


if __name__ == "__main__":
    run_script(main)
