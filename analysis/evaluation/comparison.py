"""Comparison of a predicted volume with the true one: errors, distributions, and all other statistics.

Each rank counts its own planes. Sums are in float64 and are added over the ranks.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.base import Bins, Compared, converted
from analysis.evaluation.fields import Fields, r2
from analysis.evaluation.results import Distribution, Results
from analysis.evaluation.statistics import STATISTICS
from analysis.slabs import ReadPlanes, SlabFields, Slabs
from utils.config.channels import Channels, copied_channels


def errors(compared: Compared) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L1 of each channel, that of the input with the same quantity (NaN if there is none), and R²."""
    slabs, inputs, targets = compared.slabs, compared.inputs, compared.targets
    device, copied = slabs.world.device, copied_channels(inputs, targets)
    # The target in one cell: a large mean would hide the variance.
    shift = _plane(compared.fields.target, len(targets), 0, slabs)[:, :1, :1].double()
    # Σ|p − t|, Σ(p − t)², Σ(t − shift), Σ(t − shift)²; Σ|input − t|
    sums = torch.zeros(4, len(targets), dtype=torch.float64, device=device)
    copied_sums = torch.zeros(len(copied), dtype=torch.float64, device=device)
    with slabs.world.raise_together():
        for piece in slabs.pieces():
            values = (read(slice(None), piece).unbind(1) for read in compared.fields)
            # Plane by plane: the sums do not depend on the pieces, and temporaries are small.
            for source, predicted, target in zip(*values, strict=True):
                error, shifted = predicted - target, target - shift
                parts = error.abs(), error.square(), shifted, shifted.square()
                sums += torch.stack([part.sum((1, 2), dtype=torch.float64) for part in parts])
                if copied:
                    pairs = copied.items()
                    given = [converted(source[place], inputs[place], targets[own]) for own, place in pairs]
                    difference = torch.stack(given) - target[[*copied]]
                    copied_sums += difference.abs().sum((1, 2), dtype=torch.float64)
    cells, total = math.prod(slabs.shape), slabs.world.sum
    absolute, square, shifted_sum, shifted_square = total(sums).cpu().numpy()
    copied_l1 = np.full(len(targets), np.nan)
    copied_l1[[*copied]] = total(copied_sums).cpu().numpy() / cells
    return absolute / cells, copied_l1, r2(square, shifted_square - shifted_sum**2 / cells)


def distribution(compared: Compared, place: int) -> Distribution:
    """Histograms of a channel of prediction and target."""
    channel, bins = compared.targets[place], Bins.of(compared.targets[place])
    number = len(bins.edges) - 1

    def count(planes: slice) -> Tensor:
        sides = (read(slice(place, place + 1), planes) for read in compared.fields[1:])
        return torch.stack([bins.places(values).flatten().bincount(minlength=number) for values in sides])

    predicted, target = compared.total((2, number), count).astype(np.int64)
    return Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)


@torch.no_grad()
def volume_statistics(
    inputs: Channels,
    targets: Channels,
    cell: float | None,
    fields: SlabFields,
    slabs: Slabs,
    metadata: Mapping[str, Any],
    deviation: ReadPlanes | None = None,
) -> Results:
    """Compares a predicted volume with the target; every rank calls it and gets the same results.

    `cell` in Mpc/h, None if unknown. Undefined values are NaN: R² of a constant target, and whatever depends on
    non-finite predictions.
    """
    compared = Compared(inputs, targets, cell, fields, slabs, deviation)
    l1, copied_l1, r2_by_channel = errors(compared)
    slabs.world.pulse.meet()
    distributions = {channel.name: distribution(compared, place) for place, channel in enumerate(targets)}
    complete = Fields(compared)
    for field in complete.needed:
        complete.add(field)
        slabs.world.pulse.meet()
    computed = {}
    for name, statistic in STATISTICS.items():
        computed[name] = statistic.compute(compared)
        slabs.world.pulse.meet()
    distributions |= {"velocity divergence": complete.divergence} if complete.divergence else {}
    reads = {"input": (fields.inputs, inputs), "target": (fields.target, targets)}
    reads["predicted"] = fields.predicted, targets
    planes = {name: _plane(read, len(part), slabs.shape[0] // 2, slabs) for name, (read, part) in reads.items()}
    return Results(
        channels=tuple(targets),
        input_channels=tuple(inputs),
        cell=cell,
        l1=l1,
        copied_l1=copied_l1,
        r2=r2_by_channel,
        spectra=complete.results(),
        distributions=distributions,
        divergence_r2=complete.divergence_r2,
        mass_ratio=complete.mass_ratio,
        slices={name: plane.cpu().numpy() for name, plane in planes.items()},
        metadata=dict(metadata),
        statistics={name: result for name, result in computed.items() if result is not None},
    )


def _plane(read: ReadPlanes, channels: int, plane: int, slabs: Slabs) -> Tensor:
    """A plane of a field, [C, Y, Z], on every rank."""
    values = torch.zeros(channels, *slabs.shape[1:], device=slabs.world.device)
    with slabs.world.raise_together():
        if slabs.planes.start <= plane < slabs.planes.stop:
            values.copy_(read(slice(None), slice(plane, plane + 1))[:, 0])
    return slabs.world.sum(values)
