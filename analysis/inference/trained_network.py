"""A trained network read from a checkpoint, and the objects that use it."""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from analysis.inference.sliding_window import SlidingWindowPredictor, forward_pass, symmetry_mean, with_conditions
from analysis.inference.window_grid import build_window_grid
from networks.calibration import Calibration
from networks.norms import ghost_batch
from utils import config as configs
from utils.cli import positive
from utils.config import Config
from utils.config.channels import GAS, SIDES, Channel, Channels, Side, density_place
from utils.data import symmetry
from utils.data.task import VOLUMES, task_of
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import sample_digest
from utils.lookup import warn_of_other_code
from utils.run.checkpoint import Weights, read_weights
from utils.steps import build
from utils.steps.eager import load_network
from utils.volumes import attributes
from utils.volumes.hdf5 import IMPORTER, FieldReader, open_field
from utils.volumes.input_statistics import OTHER_UNITS, compare

log = logging.getLogger(__name__)

DEFAULT_BATCH_SIZES = {"cpu": 4, "cuda": 32}  # windows per rank and forward pass
PRECISIONS = ("float32", "tf32", "bfloat16")
NO_CALIBRATION = "the network's own output, without the checkpoint's filter and factor of the gas density"
SYMMETRIES = (1, symmetry.REFLECTIONS, symmetry.COUNT)  # each is a group


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Options of a prediction, shared by predict.py and evaluate.py; the flags have the same names."""

    window: int | None = None
    overlap: int | None = None
    batch_size: int | None = None
    precision: str = "float32"
    symmetries: int = 1
    device: str = "auto"
    not_periodic: bool = False
    no_calibration: bool = False


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    group, devices = parser.add_argument_group("inference"), ("auto", "cpu", "cuda")
    group.add_argument("--window", type=positive, help="cells per side of one network input (the config's data_size)")
    group.add_argument("--overlap", type=int, help="cells by which neighboring windows overlap (half a window)")
    group.add_argument("--batch_size", type=positive, help="windows per rank and forward pass (4; on a GPU 32)")
    group.add_argument("--precision", choices=PRECISIONS, default="float32", help="arithmetic precision (%(default)s)")
    text = "average over 8 reflections or all 48 rotations and reflections of each window (%(default)s)"
    group.add_argument("--symmetries", type=int, choices=SYMMETRIES, default=1, help=text)
    group.add_argument("--device", choices=devices, default="auto", help="device to run on (%(default)s)")
    group.add_argument("--not_periodic", action="store_true", help="do not wrap around the faces of the box")
    group.add_argument("--no_calibration", action="store_true", help=NO_CALIBRATION)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network read from a checkpoint, in evaluation mode, with the config that made it."""

    network: nn.Module
    config: Config
    record: dict[str, Any]  # epoch, step and final_loss of the checkpoint, and its calibration if it is applied
    known: Weights  # what the checkpoint states, without the weights

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device, content: Mapping[str, Any] | None = None, calibrated: bool = True
    ) -> "TrainedNetwork":
        """Reads a weights.pt, a checkpoint's directory, or a run's best checkpoint; UserError for others.

        `content` is that of the file if it has been read. `calibrated`: the predicted gas density is filtered and has
        the mean of the target's on the validation data, if the checkpoint states its Calibration.
        """
        content = read_weights(Path(path)) if content is None else content
        config = configs.validate_section(Config, content["config"], str(path))
        for name, tensor in content["network"].items():
            if not torch.isfinite(tensor).all():
                raise UserError(f"{path}: {name} has NaN or infinite values; give another checkpoint")
        if task_of(config).name != VOLUMES:
            needed = "predict.py, evaluate.py and export.py need a network trained on volumes. docs/workloads.md shows"
            raise UserError(f"{path} holds a classifier ({config.network.name}); {needed} how to use a classifier")
        plain = {"accumulation_steps": 1, "local_batch_size": ghost_batch(config.network.norm) or 1}
        warn_of_other_code(str(path), content)
        network = build.network(config.model_copy(update=plain))
        try:
            load_network(network, content["network"])
        except ValueError as error:
            raise UserError(f"{path} does not fit network {config.network.name}, whose code differs: {error}") from None
        record = {str(key): content[key] for key in ("epoch", "step", "final_loss") if key in content}
        calibration = Calibration(*(content.get(key) for key in Calibration._fields))
        if calibrated and calibration.density_factor:
            record |= {key: value for key, value in calibration._asdict().items() if value is not None}
            _calibrate(network, calibration, config.volume_channels[1])
            text = "multiplied by %.4f%s, as measured on the validation data (--no_calibration: it is not)"
            log.info(f"Gas density is {text}", calibration.density_factor, " and filtered" * bool(calibration[0]))
        return cls(network.to(device).eval(), config, record, Weights.of({**content, "network": {}}))

    def differences(self, volume: FieldReader) -> str:
        """Redshift, cosmology and cell size that a volume and all training files state and that differ, else empty."""
        return attributes.differences_of(volume.simulation, dict(self.known.simulation))

    @property
    def channels(self) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
        return self.config.volume_channels

    def open_field(self, path: str, side: Side) -> FieldReader:
        """The inputs or targets of a file; UserError if its channels are not those of the network."""
        number = SIDES.index(side)
        return open_field(path, self.config.dataset_names[number], side, self.channels[number], "the network")

    def use_of(self, volume: FieldReader) -> str:
        """The use of a file in the training run, by content or path (attributes may have been added); else empty."""
        known, place = self.known.data, Path(volume.path).resolve()
        digests = {sample_digest(file) for file in {volume.path, volume.file}}
        for use, key in (("training", "train_path"), ("validation", "val_path")):
            if any(value in digests and name.startswith(key) for name, value in known.items()):
                return f"{use} data of the network (same content)"
            if place in [Path(file).resolve() for file in self.config.paths(key)]:
                return f"{use} data of the network (same path)"
        return ""


def differences(networks: Sequence[TrainedNetwork], volume: FieldReader) -> str:
    """Those of all networks, each once."""
    return "; ".join(dict.fromkeys(filter(None, (network.differences(volume) for network in networks))))


def _calibrate(network: nn.Module, calibration: Calibration, targets: Channels) -> None:
    place = density_place(targets, GAS)
    assert place is not None  # it was measured
    scale, center = targets[place].scale, targets[place].center

    def calibrated(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        before, density, after = outputs.float().tensor_split([place, place + 1], dim=1)  # of [N, C, D, D, D]
        return torch.cat([before, calibration.apply(density, scale, center), after], dim=1)

    network.register_forward_hook(calibrated)


def build_predictor(
    trained: TrainedNetwork,
    volume: FieldReader,
    options: InferenceOptions,
    world: World,
    others: Sequence[TrainedNetwork] = (),
    spread: bool = False,
) -> SlidingWindowPredictor:
    """Predicts `volume` window by window, as the mean of the network and of `others` with the same channels.

    `spread`: the variances of the predictions follow their means, as further channels. UserError if the windows do not
    suit the networks or the box, or if the volume does not state their conditions.
    """
    config, network, networks = trained.config, trained.config.network, (trained, *others)
    conditions = attributes.conditions_of(network, volume.path, volume.simulation)
    window = options.window or config.data_size
    divisor = math.lcm(*(model.config.window_multiple for model in networks))
    with world.raise_together():
        if world.is_root:
            for model in networks:
                attributes.warn_of_other_simulation(volume.path, volume.simulation, dict(model.known.simulation))
                scalars = attributes.conditions_of(model.config.network, volume.path, volume.simulation)
                attributes.warn_of_untrained_conditions(model.config.network, volume.path, scalars)
                if compare(model.known.input_statistics, volume.path, volume.values, config) > OTHER_UNITS:
                    fault = f"{volume.path} holds physical values, or other channels than those of the network"
                    raise UserError(f"{fault}; import the original fields: {IMPORTER} (docs/data.md, Your own files)")
            for name, value, (low, high) in zip(network.conditions, conditions, network.condition_ranges, strict=True):
                log.info("Condition %s: %.6g, trained on %.6g to %.6g", name, value, low, high)
    if window % divisor:
        raise UserError(f"--window {window} is not a multiple of {divisor}, which the network needs")
    grid = build_window_grid(volume.shape, window, options.overlap, volume.periodic and not options.not_periodic)
    batch_size = options.batch_size or DEFAULT_BATCH_SIZES[world.device.type]
    inputs, outputs = config.N_in_channels, config.N_out_channels
    predicts = []
    for model in networks:
        forward = forward_pass(model.network, options.precision, world.device, window, model.config.kernels)
        scalars = attributes.conditions_of(model.config.network, volume.path, volume.simulation)
        predicts.append(with_conditions(forward, scalars, world.device))
    predict = symmetry_mean(predicts, options.symmetries, (inputs, outputs), config.vectors, world, spread)
    return SlidingWindowPredictor(predict, volume.box, grid, (inputs, outputs * (1 + spread)), batch_size, world)
