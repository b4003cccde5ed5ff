"""Trains a network: python train.py --config=NAME, or with several ranks under torchrun, srun or mpiexec.

Each rank runs this program. See README.md for the flags, and docs/architecture.md for the way of a run.
"""

from collections.abc import Sequence

from analysis.evaluation.callback import VolumeEvaluation, evaluation_volume, report_on_run
from utils import cli, preflight
from utils import config as configs
from utils.data.loaders import open_volumes
from utils.distributed.devices import out_of_memory_for_users
from utils.distributed.launch import run_script
from utils.distributed.signals import Signals, StopSignals
from utils.distributed.world import World, connect
from utils.errors import one_line_errors
from utils.log import configure_logging, once_per_job
from utils.profiling import benchmark
from utils.profiling.profiler import build_profiler
from utils.run.choice import identity, run_request
from utils.run.open_run import Run
from utils.steps import build
from utils.steps.backends import set_backends
from utils.steps.eager import EagerStep
from utils.training.trainer import Evaluation, Trainer
from utils.volumes.opened import Volumes

log = once_per_job(__name__)


@one_line_errors()
def main(argv: Sequence[str] | None = None, step_class: type[EagerStep] = EagerStep) -> None:
    """Trains. Invalid input is reported in one line with exit code 2; a stop signal leads to exit code 75."""
    options = cli.parse(argv)
    config = configs.load(options.yaml_config, options.config, options.overrides)
    if options.preflight is not None:
        preflight.run(options, config, step_class, evaluation_volume)
        return
    signals = Signals() if config.enable_benchy else StopSignals(config.stop_signal)
    connection = connect(config.device, config.timeouts, identity(config, options), nccl=not config.noddp)
    with signals, connection as world, out_of_memory_for_users():
        configure_logging(world.rank)
        with world.raise_together():
            volumes = open_volumes(config.for_world(world.size))
        config = volumes.config
        with world.raise_together():
            build.check(config, world, step_class)
        set_backends(config, world.device)
        if config.enable_benchy:
            benchmark.run(options, volumes, world, step_class)
        else:
            run(options, volumes, world, step_class, signals)


def run(options: cli.Options, volumes: Volumes, world: World, step_class: type[EagerStep], signals: Signals) -> None:
    """One training run, from its directory to its summary. Every rank calls it."""
    config, volume = volumes.config, evaluation_volume(volumes, world)
    with Run.open(run_request(options, volumes, world), volumes, world) as run:
        if run is None or run.is_finished():
            return
        with build.assemble(volumes, world, step_class) as parts:
            state = run.restore(parts)
            log.info(configs.describe_config(config, options.yaml_config, options.config))
            build.log_settings(config, world)
            profiler = build_profiler(config, world, run.directory)
            evaluation = VolumeEvaluation(config, volume, parts, run) if volume else Evaluation()
            result = Trainer(parts, run, state, profiler, evaluation, signals).fit()
            world.pulse.enter("end")
            run.finish(result, *report_on_run(config, parts, run, result, evaluation))


if __name__ == "__main__":
    run_script(main)
