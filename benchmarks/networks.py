"""Other ways to end the U-Net, each trained for the same time, by error, power spectra and Lyman-alpha flux.

python -m benchmarks.networks

The last layer of `unet` doubles the grid with a strided transposed convolution, which leaves a pattern of two cells.
Compared with it, on the boxes and with the recipe of the demo: `smooth_unet`; sub-pixel and resize convolutions; a
convolution at full resolution that also reads the input; and a prediction of the difference from the input's density
and velocity. One thread trains each network for as long as `unet` needs for --steps steps, according to the CPU seconds
per step that are measured first. Runs and step counts are kept in --runs: an interrupted study resumes. Spreads
are standard deviations over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import common
from benchmarks.convergence import spread
from benchmarks.processes import failure_of
from networks import NETWORKS
from networks.fused import NEGATIVE_SLOPE
from networks.layers import ConvTranspose3d
from networks.unet import UNet
from utils import config as configs
from utils.cli import positive
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.training.choice import run_directory
from utils.training.loggers.base import read_records

ROUNDS = 9  # timed steps of each network; the fastest third is averaged
EPOCHS = 2
CONFIG = "demo"
WAVENUMBERS = (1.0, 2.0, 3.0)  # h/Mpc; beyond, the target has no power
FIELDS = ("log density", "velocity", "log temperature")
SCALARS = {
    "L1": "Evaluation/L1",
    "R² density": "Evaluation/R2 gas density",
    "R² temperature": "Evaluation/R2 temperature",
    "R² divergence": "Evaluation/R2 velocity divergence",
}


# --- the networks ----------------------------------------------------------------------------------------------------


class SubPixelConv3d(nn.Conv3d):
    """A convolution whose channels [C, 2, 2, 2] become the cells of a block."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        blocks = super().forward(input).unflatten(1, (-1, 2, 2, 2))
        return blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class SubPixelUNet(UNet):
    """`last` is a sub-pixel convolution."""

    def _output_layer(self, before: int, after: int, space_to_depth: bool) -> nn.Conv3d:
        return SubPixelConv3d(before, 8 * after, 3, padding=1)


class ResizeUNet(UNet):
    """A convolution to fewer channels, trilinear interpolation, and `last`, a convolution at full resolution."""

    def _output_layer(self, before: int, after: int, space_to_depth: bool) -> nn.Conv3d:
        self.reduce = nn.Conv3d(before, after, 1)
        return nn.Conv3d(after, after, 3, padding=1)

    def output(self, x: torch.Tensor, precise: torch.Tensor | None = None) -> torch.Tensor:
        return super().output(F.interpolate(self.reduce(x), scale_factor=2.0, mode="trilinear"))


class SkipUNet(UNet):
    """A convolution at full resolution reads the last layer's four channels and the input."""

    def __init__(self, in_channels: int, out_channels: int, width: int, scales: int, crop: int) -> None:
        super().__init__(in_channels, out_channels, width, scales, crop=crop)
        self.mix = nn.Conv3d(4 + in_channels, out_channels, 3, padding=1)

    def _output_layer(self, before: int, after: int, space_to_depth: bool) -> nn.ConvTranspose3d:
        return ConvTranspose3d(before, 4, 4, stride=2, padding=1)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(self.last(self.before_last(fields)[0]), NEGATIVE_SLOPE)
        return torch.tanh(self.mix(torch.cat([x, fields], 1)))


class ResidualUNet(UNet):
    """The prediction is added to the input's density and velocity."""

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        x = self.last(self.before_last(fields)[0])
        return torch.tanh(torch.cat([x[:, :4] + fields[:, :4], x[:, 4:]], 1))


VARIANTS: dict[str, type[UNet]] = {
    "unet": UNet,
    "smooth_unet": NETWORKS["smooth_unet"],  # type: ignore[dict-item]
    "sub-pixel": SubPixelUNet,
    "resize": ResizeUNet,
    "full-resolution skip": SkipUNet,
    "residual": ResidualUNet,
}


# --- training runs ---------------------------------------------------------------------------------------------------


def seconds_per_step(names: Sequence[str]) -> dict[str, float]:
    """CPU seconds of a training step of each network, in turn, with one thread."""
    torch.set_num_threads(1)
    world = World(Launch("benchmark"), torch.device("cpu"))
    steps: dict[str, EagerStep] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        config = configs.load(common.YAML, CONFIG, {"network.name": name, "device": "cpu"}).for_world(1)
        steps[name] = build.step(config, world, build.model(config))
    sides = [config.data_size] * 3
    channels = config.N_in_channels, config.N_out_channels
    inputs, targets = (torch.randn(config.global_batch_size or 0, each, *sides) / 3 for each in channels)
    for number in range(ROUNDS + 2):
        for name, step in steps.items():
            started = time.process_time()
            step(inputs, targets, 1e-4)
            if number > 1:
                seconds[name].append(time.process_time() - started)
    return {name: sorted(values)[ROUNDS // 3] for name, values in seconds.items()}


def train(options: argparse.Namespace) -> None:
    """Trains and evaluates one network; a child process runs it."""
    import evaluate
    import train

    torch.set_num_threads(1)
    name, steps, seed = options.train[0], *map(int, options.train[1:])
    changes = {
        "network.name": name,
        "seed": seed,
        "Nsamples": steps * 8 // EPOCHS,
        "num_epochs": EPOCHS,
        "expdir": str(options.runs.absolute()),
        "log_noise_scale": False,
        "report_baselines": False,
        "report_pictures": False,
    }
    run_num = training_name(name, steps, seed)
    flags = [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
    train.main([f"--config={CONFIG}", f"--run_num={run_num}", "--resume=no", *flags])
    config = configs.load(common.YAML, CONFIG, changes).for_world(1)
    directory = run_directory(config, CONFIG, run_num, 1)
    output = options.runs / f"{run_num}.evaluation"
    evaluate.main([f"--checkpoint={directory}", f"--input={config.val_path}", f"--output={output}", "--overwrite"])
    losses = [record["Loss/valid"] for record in read_records(directory / "metrics.jsonl") if "Loss/valid" in record]
    found = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    result = {"loss": losses[-1], "scalars": found["scalars"], "spectra": found["spectra"]}
    common.write_text(options.runs / f"{run_num}.json", json.dumps(result))


def training_name(name: str, steps: int, seed: int) -> str:
    return f"{name.replace(' ', '_')}-{steps}steps-seed{seed}"


def result_of(name: str, steps: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a training run; UserError with the reason if it fails."""
    path = options.runs / f"{training_name(name, steps, seed)}.json"
    if not path.exists():
        sys.stderr.write(f"{name}, seed {seed}, {steps} steps\n")
        flags = [f"--runs={options.runs}", f"--output={options.output}", "--train", name, str(steps), str(seed)]
        command = [sys.executable, "-m", "benchmarks.networks", *flags]
        reason = failure_of(command, path.with_suffix(".log"), {"OMP_NUM_THREADS": "1"})
        if reason:
            raise UserError(f"the run of {name}, seed {seed}, failed: {reason}; see {path.with_suffix('.log')}")
    return json.loads(path.read_text(encoding="utf-8"))


# --- the report ------------------------------------------------------------------------------------------------------


def measures(result: dict[str, Any]) -> dict[str, float]:
    """The figures that are compared."""
    found = {"validation loss": result["loss"], **{name: result["scalars"][key] for name, key in SCALARS.items()}}
    for field in FIELDS:
        spectra = result["spectra"][field]
        for wanted in WAVENUMBERS:
            nearest = min(range(len(spectra["k (h/Mpc)"])), key=lambda i: abs(spectra["k (h/Mpc)"][i] - wanted))
            found[f"P ratio of {field}, k = {wanted:g} h/Mpc"] = spectra["P ratio"][nearest]
    for key, value in result["scalars"].items():
        if "flux P1D ratio" in key and key.endswith("prediction"):
            found[key.removeprefix("Evaluation/").removesuffix(", prediction")] = value
    return found


def markdown(found: dict[str, Any]) -> str:
    """A row per measure, a column per network."""
    names = list(found)
    rows: list[list[object]] = [
        ["CPU seconds per step", *(f"{found[name]['seconds per step']:.3f}" for name in names)],
        ["steps", *(found[name]["steps"] for name in names)],
    ]
    for measure in found[names[0]]["measures"]:
        values = [found[name]["measures"][measure] for name in names]
        rows.append([measure, *(common.plus_minus(value, ".3g") for value in values)])
    return common.table(["", *names], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--seeds", type=positive, default=2, help="training runs of each network (%(default)s)")
    text = "training steps of unet (%(default)s); the other networks train for the same time"
    parser.add_argument("--steps", type=positive, default=400, help=text)
    directory = common.REPOSITORY / "runs" / "networks"
    parser.add_argument("--runs", type=Path, default=directory, help="directory of the training runs (%(default)s)")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    with mock.patch.dict(NETWORKS, VARIANTS):
        if options.train:
            train(options)
        else:
            compare(options)


def compare(options: argparse.Namespace) -> None:
    options.runs.mkdir(parents=True, exist_ok=True)
    times = options.runs / "seconds_per_step.json"
    if not times.exists():
        common.write_text(times, json.dumps(seconds_per_step(list(VARIANTS))))
    seconds = json.loads(times.read_text(encoding="utf-8"))
    steps = {name: round(options.steps * seconds["unet"] / seconds[name]) // EPOCHS * EPOCHS for name in VARIANTS}
    if not all(steps.values()):
        raise UserError(f"--steps {options.steps} is less than {EPOCHS} steps of the slowest network; raise it")
    results = {
        (name, seed): result_of(name, steps[name], seed, options) for seed in range(options.seeds) for name in VARIANTS
    }
    found: dict[str, Any] = {}
    for name in VARIANTS:
        own = [measures(results[name, seed]) for seed in range(options.seeds)]
        figures = {measure: spread([each[measure] for each in own]) for measure in own[0]}
        found[name] = {"steps": steps[name], "seconds per step": seconds[name], "measures": figures}
    result = {"settings": {**common.settings(options), "config": CONFIG}, "networks": found}
    common.publish("networks", result, options.output, markdown(found))


if __name__ == "__main__":
    with one_line_errors():
        main()
