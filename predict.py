"""Predicts the gas of a whole N-body box with a trained network.

python predict.py --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5 --output gas.h5
srun -n 8 python predict.py --checkpoint /logs/bs64_opt/8GPU/00 --input nbody.h5 --output hydro.h5

If it is interrupted, run the same command again to resume.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from analysis.inference.layouts import DEVIATION, INPUT, OUTPUT, PHYSICAL, choose_layout, with_deviations
from analysis.inference.prediction_file import BLOCK_WINDOWS, PredictionFile, PredictionOptions
from analysis.inference.trained_network import TrainedNetwork, add_inference_options, build_predictor, differences
from analysis.inference.uncertainty import calibration
from utils import cli
from utils.data.symmetry import REFLECTIONS
from utils.distributed.devices import out_of_memory_for_users
from utils.distributed.launch import run_script
from utils.distributed.signals import Signals, StopSignals
from utils.distributed.world import World, connect
from utils.errors import UserError, one_line_errors
from utils.files import check_target
from utils.log import configure_logging, warn_once
from utils.run.checkpoint import load_weights
from utils.volumes.cross_check import START_BYTES, cross_check
from utils.volumes.snapshots import FORMATS


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Predicts; invalid input is reported in one line, with exit code 2; a stop signal ends with exit code 75."""
    options, one_line = parse(argv), out_of_memory_for_users("lower --batch_size or --window")
    with StopSignals() as signals, connect(options.device, nccl=True) as world, one_line:
        configure_logging(world.rank)
        predict(options, world, signals)


def predict(options: PredictionOptions, world: World, signals: Signals) -> None:
    """Predicts the gas of the input and writes it. Every rank calls it."""
    with world.raise_together():
        check_target(Path(options.output), options.overwrite)
    files = [load_weights(checkpoint, world) for checkpoint in options.checkpoint]
    weights = [path for path, _ in files]
    with world.raise_together():
        calibrated = not options.no_calibration
        networks = [TrainedNetwork.load(path, world.device, content, calibrated) for path, content in files]
        trained, config = networks[0], networks[0].config
        for path, network in zip(weights, networks, strict=True):
            if network.channels != trained.channels:
                raise UserError(f"channels or transforms of {path} and {weights[0]} differ; predict with one of them")
            if bool(network.record.get("density_factor")) != bool(trained.record.get("density_factor")):
                raise UserError(f"one of {path} and {weights[0]} has no calibration; give --no_calibration")
        source = trained.open_field(options.input, "inputs")
        if Path(options.output).exists() and Path(options.output).samefile(options.input):
            raise UserError(f"output {options.output} is the input; give another --output")
        layout = choose_layout(options.format, options.physical, trained.channels, source)
        predictor = build_predictor(trained, source, options, world, networks[1:], options.uncertainty is not None)
    if options.uncertainty is not None:
        measured = calibration(weights, networks, options.uncertainty, options, world)
        layout = with_deviations(layout, trained.channels[1], measured)
        if measured["volume"] == str(Path(source.path).resolve()):
            warn_once(f"{source.path} is the volume of the calibration: its coverage is right by construction")
        if others := differences(networks, source):
            text = "unless they were calibrated on such a box (docs/inference.md, Error bars)"
            warn_once(f"Standard deviations do not hold on {source.path}, {text}: {others}")
    with closing(source):
        source.periodic &= not options.not_periodic
        if not config.allow_physical_values:
            cross_check(source, [source.values], trained.channels, world, START_BYTES).log()
        PredictionFile(options, source, weights, networks, layout).write(predictor, world, signals)


def build_parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    cli.add_checkpoint_option(parser, required=True, nargs="+")
    parser.add_argument("--input", required=True, help=f"HDF5 file with {INPUT} [C, X, Y, Z]")
    parser.add_argument("--output", required=True, type=cli.hdf5_output, help=f"HDF5 file for {OUTPUT} [5, X, Y, Z]")
    parser.add_argument("--format", choices=FORMATS, default="volume", help="nyx: native_fields/…, in physical units")
    parser.add_argument("--physical", action="store_true", help=f"also write {PHYSICAL}: mean density, km/s, K")
    text = f"also write {DEVIATION}: standard deviations, calibrated on this volume with targets (that of the training "
    text += "run's validation); implies --symmetries 8"
    parser.add_argument("--uncertainty", nargs="?", const="", metavar="VOLUME", help=text)
    text = f"cells per side of the blocks that ranks predict, if they fit into memory ({BLOCK_WINDOWS} windows)"
    parser.add_argument("--block", type=cli.positive, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    add_inference_options(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> PredictionOptions:
    """Reads the command line; raises UserError if it is wrong."""
    options = PredictionOptions(**vars(build_parser().parse_args(argv)))
    if options.uncertainty is None:
        return options
    if options.format != "volume":
        raise UserError(f"--format {options.format} has no standard deviations; remove --uncertainty")
    return replace(options, symmetries=max(options.symmetries, REFLECTIONS))


if __name__ == "__main__":
    run_script(main)
