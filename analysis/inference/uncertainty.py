"""Standard deviations of predictions: their spread under symmetries and over networks, calibrated on a volume."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, build_predictor
from utils.config.channels import SIDES
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, read_json, to_json
from utils.run.checkpoint import file_digest
from utils.volumes.values import check_sample

FILE = "uncertainty.json"  # next to the weights: calibrations by networks, options and volume
WINDOWS = 3  # per side of the part of the volume on which predictions are calibrated
CHOSEN = "window", "overlap", "symmetries", "precision", "no_calibration", "not_periodic"  # options that count
BINS, UPDATES = 1000, 500  # of the fit

log = logging.getLogger(__name__)


def fit(squares: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and floors [C]: with factor · variance + floor, squared errors [C, cells] are most likely, if Gaussian.

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


def predict_part(
    networks: Sequence[TrainedNetwork], path: str, options: InferenceOptions, world: World
) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances of the networks' predictions of a part of a volume, and its targets, [C, x, y, z]."""
    config = networks[0].config
    source, target = (networks[0].open_field(path, side) for side in SIDES)
    for field in (source, target):
        check_sample(path, field.name, field.values, config.allow_physical_values)
    predictor = build_predictor(networks[0], source, options, world, networks[1:], spread=True)
    x, y, z = (slice(0, min(cells, WINDOWS * predictor.grid.x.window)) for cells in source.shape)
    means, variances = predictor.predict_box((x, y, z)).predicted.chunk(2)
    return means, variances, torch.from_numpy(np.array(target.box(x, y, z))).to(world.device)


def _read(path: Path, key: str, channels: int) -> dict[str, Any]:
    """The calibrations in a file; empty, with a warning, if it is damaged or has another form."""
    try:
        stored = dict(read_json(path))
        if key in stored:
            torch.tensor([stored[key][name] for name in ("factors", "floors")]).view(2, channels)
            Path(stored[key]["volume"])
        return stored
    except (ValueError, TypeError, LookupError, RuntimeError):
        log.warning("%s is ignored: it is damaged; calibrating again", path)
    except OSError:  # missing, or not readable
        pass
    return {}


def calibration(
    weights: Sequence[Path], networks: Sequence[TrainedNetwork], volume: str, options: InferenceOptions, world: World
) -> dict[str, Any]:
    """The `fit` on a volume ("": that of the validation), from FILE next to the weights, or measured, on all ranks."""
    path, key, stored = weights[0].with_name(FILE), "", dict[str, Any]()
    with world.raise_together():
        if world.is_root:
            chosen = [getattr(options, name) for name in CHOSEN]
            given = volume and [str(Path(volume).resolve()), Path(volume).exists() and Path(volume).stat().st_mtime_ns]
            key = json.dumps([*map(file_digest, weights), *chosen, given])
            stored = _read(path, key, networks[0].config.N_out_channels)
    if known := world.broadcast(stored.get(key)):
        log.info("The standard deviations were calibrated on %s before", known["volume"])
        return known
    volume = volume or networks[0].config.paths("val_path")[0]
    with world.raise_together():
        if not Path(volume).exists():
            missing = f"{path} has no standard deviations for these networks and options, and {volume} does not exist"
            raise UserError(f"{missing}; name a volume with targets: --uncertainty VOLUME.h5")
        log.info("Calibrating the standard deviations on %s", volume)
        world.pulse.enter("prediction")
        # On all ranks, so that none waits for another.
        means, variances, target = predict_part(networks, volume, options, world)
        factors, floors = fit((means - target).square().flatten(1), variances.flatten(1))
    measured = {"factors": factors.tolist(), "floors": floors.tolist(), "volume": str(Path(volume).resolve())}
    measured = world.broadcast(measured)
    if world.is_root:
        with suppress(OSError), atomic_write([path]) as (partial,):  # a read-only directory has none
            partial.write_text(to_json({**stored, key: measured}), encoding="utf-8")
    return measured
