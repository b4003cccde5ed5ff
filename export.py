"""Exports a trained network to one file that needs PyTorch and nothing of this project.

python export.py --checkpoint runs/demo/2ranks/00 --output gas.pt2

The file takes dark matter, float32 [N, 4, X, Y, Z]: density in units of the mean, velocity in km/s. It returns gas
[N, 5, X, Y, Z]: density in units of the mean, velocity in km/s, temperature in K. N is any number; X, Y and Z are
multiples of 2**scales of the network. A network with conditions takes them as a second argument, float32 [N, K]. To
use it:

    import torch
    predict = torch.export.load("gas.pt2").module()
    gas = predict(dark_matter)  # [N, 4, X, Y, Z] -> [N, 5, X, Y, Z]

predict.to("cuda") moves it to a GPU. The file describes itself in JSON, with the version of its format under "format":

    metadata = {"metadata.json": ""}
    torch.export.load("gas.pt2", extra_files=metadata)
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.inference.export import KNOWN, ExportedNetwork, without_directories
from analysis.inference.trained_network import NO_CALIBRATION, TrainedNetwork
from utils import cli
from utils import config as configs
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import check_target
from utils.log import configure_logging
from utils.run.checkpoint import file_digest, weights_file
from utils.run.provenance import provenance


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Exports a network; invalid input is reported in one line, with exit code 2, and no file is written."""
    configure_logging(0)
    options = build_parser().parse_args(argv)
    target, cpu = Path(options.output), choose_device("cpu", 0)
    if target.suffix != ".pt2":
        raise UserError(f"output {target} does not end in .pt2, which torch.export.load requires; rename it")
    check_target(target, options.overwrite)
    weights = weights_file(Path(options.checkpoint)).resolve()  # once: a run in progress may move its best checkpoint
    trained = TrainedNetwork.load(weights, cpu, calibrated=not options.no_calibration)
    exported = ExportedNetwork.of(trained, options.units)
    record = provenance(World(Launch("export"), cpu))
    metadata = {
        **exported.describe(target.name),
        "checkpoint": trained.record,
        "config": configs.dump({"trained": without_directories(trained.config.model_dump())}),
        **{key: value for key in KNOWN if (value := getattr(trained.known, key))},
        **{key: record[key] for key in ("git_commit", "date", "versions")},
        "weights_sha256": file_digest(weights),
    }
    with os_errors_for_users(f"cannot write {target}", "give another --output"):
        print(exported.write(target, metadata))


def build_parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    cli.add_checkpoint_option(parser, required=True)
    parser.add_argument("--output", required=True, help="file to write, named *.pt2")
    text = "%(default)s: the file contains the transforms; channel: values as in training"
    parser.add_argument("--units", choices=("physical", "channel"), default="physical", help=text)
    parser.add_argument("--no_calibration", action="store_true", help=NO_CALIBRATION)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a canceled job removes partial files
    main()
