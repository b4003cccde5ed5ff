"""Writes a trained network to one file that needs PyTorch and nothing of this project.

python export.py --checkpoint runs/demo/2GPU/00 --output gas.pt2

The file takes dark matter, float32 [N, 4, X, Y, Z]: density in units of the mean, velocity in km/s. It gives gas
[N, 5, X, Y, Z]: density in units of the mean, velocity in km/s, temperature in K. N is any number; X, Y and Z are
multiples of 2**scales of the network. To compute with it:

    import torch
    paint = torch.export.load("gas.pt2").module()
    gas = paint(dark_matter)  # [N, 4, X, Y, Z] -> [N, 5, X, Y, Z]

paint.to("cuda") moves it to a GPU. What is in the file, and what it was made of, is JSON in it:

    found = {"metadata.json": ""}
    torch.export.load("gas.pt2", extra_files=found)
"""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.export import Dim

from networks.physical import DENSITY_FLOOR, PhysicalNetwork
from predict import Trained, load_trained
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data.files.writer import check_target
from utils.distributed.world import Launch, World
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.inference.channels import Channel, input_channels, target_channels
from utils.runs import logger as logs
from utils.training.checkpoint import digest, weights_file

CPU = torch.device("cpu")
METADATA = "metadata.json"
UNITS = ("physical", "channel")
# Between file and network, of a channel's largest value. Rounding a density's logarithm to float32 makes about 1e-6.
LARGEST_DIFFERENCE = 1e-5

Predict = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What the command line says; the flags have these names."""

    checkpoint: str
    output: str
    format: str = "export"
    units: str = "physical"
    overwrite: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """The command; bad input ends in one line and exit code 2."""
    with one_line_errors():
        export(parse(argv))


def export(options: Options) -> None:
    """Writes the file and proves it against the network; UserError, and no file, where that cannot be."""
    target, kind = Path(options.output), FORMATS[options.format]
    check_output(target, options)
    weights = weights_file(Path(options.checkpoint))  # once: a training that goes on may have a better one by then
    trained = load_trained(str(weights), CPU)
    if options.units == "physical":
        check_units(trained.config, options.checkpoint)
    network = wrap(trained, options.units).requires_grad_(False)
    about = {**describe(trained, options), "weights_sha256": digest(weights)}
    content = kind.pack(network, trained.config, json.dumps(about, indent=2, allow_nan=False))
    try:
        with atomic_write([target]) as (partial,):
            partial.write_bytes(content)
            with open(partial, "rb") as file:
                written = kind.load(file)
            difference = largest_difference(written, trained, options.units)
            if not difference <= LARGEST_DIFFERENCE:  # NaN is none, either
                raise UserError(
                    f"what {target} would compute differs from the network by {difference:.3g} of the largest value; "
                    f"it is not written: try another --format, or another checkpoint"
                )
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {target}: {reason}; free some space or give another --output") from None
    print(
        f"wrote {target}: {shape(trained.config.N_in_channels)} -> {shape(trained.config.N_out_channels)} in "
        f"{options.units} units, X, Y and Z multiples of {block(trained.config)}; largest difference from the network "
        f"{difference:.2g} of a channel's largest value"
    )


def check_output(target: Path, options: Options) -> None:
    """UserError where the file may not be written."""
    if options.format == "export" and target.suffix != ".pt2":
        raise UserError(f"output {target} does not end in .pt2, which torch.export.load asks for; rename it")
    check_target(target, options.overwrite)
    if not target.parent.is_dir():
        raise UserError(f"there is no directory {target.parent} for the output; make it, or give another --output")


def check_units(config: Config, checkpoint: str) -> None:
    """UserError where the channels' physical values are not known."""
    unknown = [f"transform.{key}" for key, value in config.transform.model_dump().items() if value is None]
    if unknown:
        raise UserError(
            f"{checkpoint}: {', '.join(unknown)} of its config is None, so nobody knows the physical values; "
            f"give --units channel"
        )
    inputs, targets = channels(config)
    if any(channel.unit is None for channel in (*inputs, *targets)):
        raise UserError(
            f"{checkpoint}: physical values are known of N_in_channels 4 and N_out_channels 5, not of {len(inputs)} "
            f"and {len(targets)}; give --units channel"
        )


def channels(config: Config) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
    """Of input and target."""
    return (
        input_channels(config.N_in_channels, config.transform),
        target_channels(config.N_out_channels, config.transform),
    )


def wrap(trained: Trained, units: str) -> nn.Module:
    """The network for values in those units."""
    if units == "channel":
        return trained.network
    return PhysicalNetwork(trained.network, *channels(trained.config)).eval()


def block(config: Config) -> int:
    """Cells that X, Y and Z are multiples of."""
    return 2**config.scales


def shape(channel_count: int) -> str:
    return f"[N, {channel_count}, X, Y, Z]"


# --- the two formats -------------------------------------------------------------------------------------------------


def pack_program(network: nn.Module, config: Config, metadata: str) -> bytes:
    """A torch.export program for batches and boxes of any size, as the bytes of a .pt2 file."""
    cells = block(config)
    # Not 1: sizes of 1 in the example would stay 1.
    example = torch.ones(2, config.N_in_channels, 2 * cells, 2 * cells, 2 * cells)
    sizes = {axis: cells * Dim(f"blocks_{name}", min=1) for axis, name in ((2, "x"), (3, "y"), (4, "z"))}
    program = torch.export.export(
        network,
        (example,),
        dynamic_shapes=({0: Dim("batch", min=1), **sizes},),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    # What PyTorch assumed on the way goes: that no size is 1, which no operator here depends on (the comparison has
    # such sizes), and that all is on a CPU. What the sizes above demand is checked on its own.
    assumptions = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)
    for node in list(program.graph.nodes):
        if node.target in assumptions:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    program.example_inputs = None  # it would be written, too
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA: metadata})
    return buffer.getvalue()


def load_program(file: IO[bytes]) -> Predict:
    return torch.export.load(file).module()


def pack_script(network: nn.Module, config: Config, metadata: str) -> bytes:
    """A TorchScript trace, which holds no sizes, as the bytes of its file."""
    cells = block(config)
    # Two samples: with one, a group norm would have single numbers to normalise.
    example = torch.ones(2, config.N_in_channels, cells, cells, cells)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # It is deprecated; and whether other sizes change the trace, the comparison tells.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        torch.jit.save(torch.jit.trace(network, example, check_trace=False), buffer, _extra_files={METADATA: metadata})
    return buffer.getvalue()


def load_script(file: IO[bytes]) -> Predict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(file)


@dataclass(frozen=True)
class Format:
    """How a file is made of a network and read again, here and by others."""

    pack: Callable[[nn.Module, Config, str], bytes]
    load: Callable[[IO[bytes]], Predict]
    call: str


FORMATS = {
    "export": Format(pack_program, load_program, 'torch.export.load("{name}").module()'),
    "torchscript": Format(pack_script, load_script, 'torch.jit.load("{name}")'),
}


# --- what is in the file, and whether it is right --------------------------------------------------------------------


def describe(trained: Trained, options: Options) -> dict[str, Any]:
    """What the file is, how to call it and what it was made of, as JSON has it."""
    config, physical = trained.config, options.units == "physical"
    inputs, targets = channels(config)
    made = logs.provenance(World(Launch("export"), CPU))
    load = FORMATS[options.format].call.format(name=Path(options.output).name)
    return {
        "made_by": "export.py: a network that paints gas onto dark matter",
        "how_to_call": [
            "import torch",
            f"paint = {load}",
            f"gas = paint(dark_matter)  # {shape(len(inputs))} -> {shape(len(targets))}",
        ],
        "format": options.format,
        "units": options.units,
        "input": {
            "shape": shape(len(inputs)),
            "dtype": "float32",
            "sizes": f"N is any number; X, Y and Z are multiples of {block(config)}",
            "multiple_of": block(config),
            **({"density_floor_of_mean": DENSITY_FLOOR} if physical else {}),
            "channels": [_about(channel, physical) for channel in inputs],
        },
        "output": {
            "shape": shape(len(targets)),
            "dtype": "float32",
            "channels": [_about(channel, physical) for channel in targets],
        },
        # JSON has no NaN, which is the loss of a training that has not been validated.
        "checkpoint": {key: value if math.isfinite(value) else None for key, value in sorted(trained.record.items())},
        "config": configs.to_yaml(config, "trained"),
        **{key: made[key] for key in ("git_commit", "date", "versions")},
    }


def _about(channel: Channel, physical: bool) -> dict[str, str | None]:
    return {"name": channel.name, **({"unit": channel.unit} if physical else {"value": channel.formula()})}


def largest_difference(written: Predict, trained: Trained, units: str) -> float:
    """Between a file and the network itself, of a channel's largest value; NaN where either is none."""
    config, cells = trained.config, block(trained.config)
    inputs, targets = channels(config)
    generator = torch.Generator().manual_seed(0)
    # Other sizes than the examples'; some are one block, which is as small as they can be.
    fields = 0.3 * torch.randn(1, len(inputs), cells, 2 * cells, cells, generator=generator)
    with torch.inference_mode():
        if units == "channel":
            found, expected = written(fields), trained.network(fields)
        else:
            physical = _each(fields, [channel.to_physical for channel in inputs])
            physical[:, 0, :2] = 0  # empty cells
            found = written(physical)
            physical[:, 0].clamp_(min=DENSITY_FLOOR)
            expected = trained.network(_each(physical, [channel.from_physical for channel in inputs]))
            expected = _each(expected, [channel.to_physical for channel in targets])
        axes = (0, 2, 3, 4)
        # torch's max, unlike Python's, keeps a NaN.
        return float(((found - expected).abs().amax(axes) / expected.abs().amax(axes)).max())


def _each(fields: torch.Tensor, functions: Sequence[Predict]) -> torch.Tensor:
    """One function for each channel."""
    parts = fields.unbind(1)
    return torch.stack([function(part) for function, part in zip(functions, parts, strict=True)], dim=1)


# --- the command line ------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> Options:
    """Raises UserError for what it cannot read."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="a run's directory (its best one), a checkpoint's, or its weights.pt"
    )
    parser.add_argument("--output", required=True, help="file to write, named *.pt2")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="export",
        help="%(default)s: for torch.export.load; torchscript: for torch.jit.load, here and in C++",
    )
    parser.add_argument(
        "--units",
        choices=UNITS,
        default="physical",
        help="%(default)s: the transforms are in the file; channel: values as the network was trained on",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a cancelled job, too, tidies up
    main()
