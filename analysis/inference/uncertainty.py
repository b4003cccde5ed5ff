"""Standard deviations of predictions: their spread under symmetries and over networks, calibrated on a volume."""

import json
import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, build_predictor
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, read_json, to_json
from utils.run.checkpoint import file_digest
from utils.volumes.attributes import file_transform
from utils.volumes.hdf5 import FieldReader

FILE = "uncertainty.json"  # next to the weights: calibrations by the networks and options that they hold for
WINDOWS = 3  # per side of the part of the volume on which predictions are calibrated
BINS, UPDATES = 1000, 500  # of the fit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """The square of a standard deviation is factor · variance of the predictions + floor, by channel."""

    factors: list[float]
    floors: list[float]  # in squares of channel values
    volume: str  # on which they were measured

    def deviations(self, variances: np.ndarray) -> np.ndarray:
        """Standard deviations [C, x, y, z] in channel values, from variances of the same shape; float32."""
        factors, floors = (
            np.reshape(values, (-1, 1, 1, 1)).astype(np.float32) for values in (self.factors, self.floors)
        )
        return np.sqrt(factors * variances + floors)


def fit(squares: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and floors [C] with the largest Gaussian likelihood of the squared errors [C, cells], in float64.

    The updates keep both positive, and the likelihood grows with each (Févotte, Bertin & Durrieu 2009, eq. 3.5).
    """
    order = variances.argsort(dim=1)
    pairs = (values.double().gather(1, order).tensor_split(BINS, dim=1) for values in (squares, variances))
    errors, spread = (torch.stack([part.mean(dim=1) for part in parts], dim=1) for parts in pairs)  # [C, BINS]
    terms = torch.stack([spread, torch.ones_like(spread)])  # [2, C, BINS]
    scales = errors.mean(dim=1) / terms.mean(dim=2).clamp(min=1e-30) / 2  # [2, C]
    for _ in range(UPDATES):
        expected = (scales[..., None] * terms).sum(dim=0)
        ratio = (terms * errors / expected.square()).mean(dim=2) / (terms / expected).mean(dim=2).clamp(min=1e-30)
        scales = scales * ratio.sqrt()
    return scales[0], scales[1]


def measure(
    networks: Sequence[TrainedNetwork], path: str, options: InferenceOptions, world: World
) -> tuple[list[float], list[float]]:
    """Factors and floors of the networks' predictions of a part of a volume with targets."""
    config = networks[0].config
    counts = config.N_in_channels, config.N_out_channels
    source, target = (FieldReader(path, *pair) for pair in zip(config.dataset_names, counts, strict=True))
    with closing(source), closing(target):
        file_transform(config.transform, {path: source.attributes})
        predictor = build_predictor(networks[0], source, options, world, networks[1:], spread=True)
        x, y, z = (slice(0, min(cells, WINDOWS * predictor.grid.x.window)) for cells in source.shape)
        means, variances = predictor.predict_box((x, y, z)).predicted.chunk(2)
        errors = means - torch.from_numpy(np.array(target.box(x, y, z))).to(world.device)
        factors, floors = fit(errors.square().flatten(1), variances.flatten(1))
    return factors.tolist(), floors.tolist()


def calibration(
    weights: Sequence[Path], networks: Sequence[TrainedNetwork], volume: str, options: InferenceOptions, world: World
) -> Calibration:
    """The calibration for these networks and options that is stored next to the first one's weights.

    If there is none, or `volume` is given, it is measured there, by default on the validation volume of the training
    run, and stored. Every rank calls it.
    """
    path, key, stored = weights[0].with_name(FILE), "", dict[str, dict[str, list[float] | str]]()
    with world.raise_together():
        if world.is_root:
            chosen = options.window, options.overlap, options.symmetries, options.precision, options.no_calibration
            key = json.dumps([*map(file_digest, weights), *chosen])
            with suppress(OSError, ValueError):  # missing or damaged: measured again
                stored = read_json(path)
    values = world.broadcast(None if volume else stored.get(key))
    if values is None:
        volume = volume or networks[0].config.paths("val_path")[0]
        with world.raise_together():
            if not Path(volume).exists():
                raise UserError(
                    f"{path} has no calibration of standard deviations for these networks and options, and there is "
                    f"no validation volume {volume}; name one with targets: --uncertainty VOLUME.h5"
                )
            log.info("Calibrating the standard deviations on %s", volume)
            world.pulse.enter("prediction")
            # All ranks, so that none waits in a collective; the result of rank 0 is used.
            measured = Calibration(*measure(networks, volume, options, world), volume=str(Path(volume).resolve()))
        values = world.broadcast(asdict(measured))
        if world.is_root:
            with suppress(OSError), atomic_write([path]) as (partial,):  # in a read-only directory: not stored
                partial.write_text(to_json({**stored, key: values}), encoding="utf-8")
    return Calibration(**values)
