"""Evaluates a predicted volume whose true gas is known: errors, spectra, distributions, and a report.

python evaluate.py --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5 --output evaluation
srun -n 8 python evaluate.py --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5 --output evaluation
python evaluate.py --checkpoint runs/study/1ranks/0? --input data/held_out_?.h5 --output evaluation
python evaluate.py --prediction gas.h5 --input data/demo_val.h5 --output evaluation

The output directory holds report.html, its pictures, evaluation.json (scalars, spectra and provenance) and
evaluation.npz (all results as arrays). Several checkpoints or inputs: each pair has such a directory in it, and
report.html and summary.json hold means and standard deviations over the boxes and over the networks. The Lyman-alpha
flux needs a file that states redshift, cosmology and box size.
"""

import itertools
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.evaluation import report, tables
from analysis.evaluation.volume import INPUT, NOT_PERIODIC, OUTPUT, VolumeFields, config_of_files, open_fitted
from analysis.inference.sliding_window import SlidingWindowPredictor
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, add_inference_options, build_predictor
from analysis.lyman_alpha.setup import FluxOptions, add_flux_options, take_flux_options
from utils import cli
from utils.distributed.devices import out_of_memory_for_users
from utils.distributed.launch import run_script
from utils.distributed.world import World, connect
from utils.errors import UserError, one_line_errors
from utils.log import configure_logging
from utils.run.checkpoint import load_weights
from utils.run.provenance import provenance

Opened = tuple[VolumeFields, SlidingWindowPredictor | None, dict[str, Any]]  # the latter is the report's metadata


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """The command line; the flags have the same names."""

    input: list[str]
    output: str
    checkpoint: list[str] | None = None
    prediction: str | None = None
    overwrite: bool = False
    flux: FluxOptions = field(default_factory=FluxOptions)


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates; invalid input is reported in one line, with exit code 2."""
    options, one_line = parse(argv), out_of_memory_for_users("lower --batch_size or --window")
    with connect(options.device, nccl=True) as world, one_line:
        configure_logging(world.rank)
        evaluate(options, world)


def evaluate(options: Options, world: World) -> None:
    """Evaluates each network, or a predicted file, on each box, and writes the reports. Every rank calls it."""
    output, record, checkpoints = Path(options.output), provenance(world), options.checkpoint or [""]
    folders = (Path(*names) for names in itertools.product(_names(checkpoints), _names(options.input)))
    pairs = dict(zip(itertools.product(checkpoints, options.input), folders, strict=True))
    with world.raise_together():
        if len({*pairs.values()}) < len(pairs):
            raise UserError("two of the paths give a directory of the same name; rename one, or evaluate one by one")
        outputs = dict.fromkeys([output, *(output / folder for folder in pairs.values())])
        report.check_directories([*outputs], options.overwrite)
    weights, channels, evaluations = dict[str, str](), dict[Any, str](), list[dict[str, Any]]()
    for predicts in (False, True) if len(pairs) > 1 else (True,):  # all pairs are checked before the first prediction
        for (checkpoint, path), folder in pairs.items():
            # A training run that is still running moves its best checkpoint.
            fields, predictor, metadata = _open(weights.get(checkpoint, checkpoint), path, options, world)
            with closing(fields):
                weights[checkpoint] = metadata.get("checkpoint", "")
                channels[fields.config.volume_channels[1]] = f"{checkpoint} on {path}"
                if len(channels) > 1:
                    places = " and ".join(channels.values())
                    raise UserError(f"the channels or transforms of {places} differ; evaluate them one by one")
                if not predicts:
                    continue
                fields.inputs.periodic &= not options.not_periodic
                results = fields.evaluate(predictor, metadata, world, options.flux)
            report.write_report(output / folder, results, record, world)
            known = {"checkpoint": checkpoint, "input": path, "report": str(folder / report.PAGE)}
            evaluations.append({**known, "notes": tables.notes(results.metadata), "scalars": results.scalars()})
    if len(pairs) > 1:
        report.write_summary(output, evaluations, record, world)


def _names(paths: Sequence[str]) -> list[str]:
    """Names of directories for several paths, from what differs between them; empty for a single one."""
    places = [Path(os.path.abspath(path.removesuffix(".h5"))) for path in paths]
    common = os.path.commonpath([place.parent for place in places])
    return ["-".join(place.relative_to(common).parts) if len(paths) > 1 else "" for place in places]


def _open(checkpoint: str, path: str, options: Options, world: World) -> Opened:
    """Opens a box, and a network or else the predicted file; UserError if they do not fit. Every rank calls it."""
    weights, content = load_weights(checkpoint, world) if checkpoint else (None, None)
    with world.raise_together():
        trained = TrainedNetwork.load(weights, world.device, content, not options.no_calibration) if weights else None
        config = trained.config if trained else config_of_files(path, str(options.prediction))
        fields = VolumeFields(path, options.prediction, config)
        predictor = build_predictor(trained, fields.inputs, options, world) if trained else None
        if options.flux.fitted_on:
            open_fitted(options.flux.fitted_on, config, fields.inputs).close()
        source: dict[str, Any] = {"prediction": options.prediction}
        if trained and predictor:
            box, source = fields.inputs, {"density_factor": None, **trained.record, "checkpoint": str(weights)}
            source |= {"input_use": trained.use_of(box), "input_differences": trained.differences(box)}
            source |= {"windows": predictor.grid.describe(), "symmetries": options.symmetries, "loss": config.loss}
        elif fields.prediction and "checkpoint" in fields.prediction.attributes:  # predict.py has written it
            stated = fields.prediction.attributes.get
            source |= {"density_factor": stated("checkpoint_density_factor")}
            source |= {key: stated(key) for key in ("input_use", "input_differences")}
    note = {} if fields.periodic and not options.not_periodic else {"note": NOT_PERIODIC}
    return fields, predictor, {"input": path, **note, **source}


def build_parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    cli.add_checkpoint_option(source, nargs="+")
    source.add_argument("--prediction", help=f"HDF5 file with the predicted {OUTPUT}, as predict.py writes it")
    parser.add_argument("--input", required=True, nargs="+", help=f"HDF5 files with {INPUT} and the true {OUTPUT}")
    parser.add_argument("--output", required=True, help="directory of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace the report in that directory")
    add_inference_options(parser)
    add_flux_options(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; raises UserError if it is wrong."""
    arguments = vars(build_parser().parse_args(argv))
    options = Options(flux=take_flux_options(arguments), **arguments)
    of_network = "window", "overlap", "batch_size", "precision", "symmetries", "no_calibration"
    if options.prediction and len(options.input) > 1:
        raise UserError("--prediction is that of one box; give one --input")
    places = [Path(path).resolve() for path in (*options.input, *(options.checkpoint or [str(options.prediction)]))]
    if repeated := [place for place in places if places.count(place) > 1]:
        raise UserError(f"{repeated[0]} is given twice; give each path once")
    for name in of_network if options.prediction else ():
        if getattr(options, name) != getattr(InferenceOptions, name):
            raise UserError(f"--{name} has no effect on a stored prediction; remove it, or give --checkpoint")
    return options


if __name__ == "__main__":
    run_script(main)
