"""Evaluates a predicted volume whose true gas is known: errors, spectra, distributions, and a report.

python evaluate.py --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5 --output evaluation
torchrun --nproc-per-node=2 evaluate.py --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5 --output evaluation
python evaluate.py --prediction gas.h5 --input data/demo_val.h5 --output evaluation

The output directory holds report.html, its pictures, evaluation.json (scalars, spectra and provenance) and
evaluation.npz (all results as arrays). The Lyman-alpha flux needs a file that states redshift, cosmology and box size.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.evaluation import report
from analysis.evaluation.volume import INPUT, NOT_PERIODIC, OUTPUT, VolumeFields, config_of_files, open_fitted
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, add_inference_options, build_predictor
from analysis.lyman_alpha.setup import add_flux_options, take_flux_options
from utils import cli
from utils.config.sections import EvaluationConfig
from utils.distributed.devices import out_of_memory_for_users
from utils.distributed.launch import run_script
from utils.distributed.world import World, connect
from utils.errors import UserError, one_line_errors
from utils.log import configure_logging
from utils.run.checkpoint import load_weights
from utils.run.provenance import provenance


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """The command line; the flags have the same names."""

    input: str
    output: str
    checkpoint: str | None = None
    prediction: str | None = None
    overwrite: bool = False
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)  # of the flux


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates; invalid input is reported in one line, with exit code 2."""
    options, one_line = parse(argv), out_of_memory_for_users("lower --batch_size or --window")
    with connect(options.device, nccl=True) as world, one_line:
        configure_logging(world.rank)
        evaluate(options, world)


def evaluate(options: Options, world: World) -> None:
    """Evaluates a checkpoint's network or a predicted file, and writes the report. Every rank calls it."""
    with world.raise_together():
        report.check_directory(Path(options.output), options.overwrite)
    weights, content = load_weights(options.checkpoint, world) if options.checkpoint else (None, None)
    with world.raise_together():
        calibrated = not options.no_calibration
        trained = TrainedNetwork.load(weights, world.device, content, calibrated) if weights else None
        config = trained.config if trained else config_of_files(options.input, str(options.prediction))
        config = config.model_copy(update={"evaluation": options.evaluation})
        fields = VolumeFields(options.input, options.prediction, config)
        predictor = build_predictor(trained, fields.inputs, options, world) if trained else None
        if options.evaluation.fitted_on:
            open_fitted(options.evaluation.fitted_on, config).close()
    source: dict[str, Any] = {"prediction": options.prediction}
    if trained and predictor:
        source = {**trained.record, "checkpoint": str(weights), "windows": predictor.grid.describe()}
        source |= {"symmetries": options.symmetries, "loss": config.loss}
    note = {} if fields.periodic and not options.not_periodic else {"note": NOT_PERIODIC}
    metadata = {"input": options.input, **note, **source}
    with closing(fields):
        results = fields.evaluate(predictor, "predicting", metadata, world)
    report.write_report(Path(options.output), results, provenance(world), world)


def build_parser() -> cli.Parser:
    """The parser of the command line."""
    parser = cli.Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    cli.add_checkpoint_option(source, required=False)
    source.add_argument("--prediction", help=f"HDF5 file with the predicted {OUTPUT}, as predict.py writes it")
    parser.add_argument("--input", required=True, help=f"HDF5 file with {INPUT} and the true {OUTPUT}")
    parser.add_argument("--output", required=True, help="directory of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace the report in that directory")
    add_inference_options(parser)
    add_flux_options(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; raises UserError if it is wrong."""
    arguments = vars(build_parser().parse_args(argv))
    options = Options(evaluation=take_flux_options(arguments), **arguments)
    of_network = "window", "overlap", "batch_size", "precision", "symmetries", "no_calibration"
    for name in of_network if options.prediction else ():
        if getattr(options, name) != getattr(InferenceOptions, name):
            raise UserError(f"--{name} has no effect on a stored prediction; remove it, or give --checkpoint")
    return options


if __name__ == "__main__":
    run_script(main)
