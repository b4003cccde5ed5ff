"""Compares a predicted volume with the true one: errors, distributions, spectra; each rank counts its own planes."""

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.base import LOG_DENSITY, Bins, Compared, converted
from analysis.evaluation.results import DIVERGENCE, SPECTRA, Distribution, Results, Spectrum, spectrum_names
from analysis.evaluation.statistics import STATISTICS
from analysis.modes import PowerBins
from analysis.slabs import ReadPlanes, Slabs
from utils.config.channels import GAS, VELOCITY_UNIT, Channel, copied_channels, velocity_places

DIVERGENCE_BINS = 160
DIVERGENCE_SIGMAS = 8.0  # standard deviations of the target on either side


def errors(compared: Compared) -> dict[str, Any]:
    """L1 of each channel, that of the input with the same quantity (NaN if there is none), and R²."""
    slabs, inputs, targets = compared.slabs, compared.inputs, compared.targets
    copied = copied_channels(inputs, targets)
    # The target in one cell: a large mean would hide the variance.
    shift = _plane(compared.fields.target, len(targets), 0, slabs)[:, :1, :1].double()
    # Σ|p − t|, Σ(p − t)², Σ(t − shift), Σ(t − shift)²; Σ|input − t|
    sums = torch.zeros(5, len(targets), dtype=torch.float64, device=slabs.world.device)
    sums[4, [place for place in range(len(targets)) if place not in copied]] = math.nan
    with slabs.world.raise_together():
        for piece in slabs.pieces():
            values = (read(slice(None), piece).unbind(1) for read in compared.fields)
            # Plane by plane: the sums do not depend on the pieces, and temporaries are small.
            for source, predicted, target in zip(*values, strict=True):
                error, shifted = predicted - target, target - shift
                parts = error.abs(), error.square(), shifted, shifted.square()
                sums[:4] += torch.stack([part.sum((1, 2), dtype=torch.float64) for part in parts])
                if copied:
                    given = [converted(source[place], inputs[place], targets[own]) for own, place in copied.items()]
                    difference = torch.stack(given) - target[[*copied]]
                    sums[4, [*copied]] += difference.abs().sum((1, 2), dtype=torch.float64)
    cells = math.prod(slabs.shape)
    absolute, square, shifted_sum, shifted_square, copied_sum = slabs.world.sum(sums).cpu().numpy()
    measured = r2(square, shifted_square - shifted_sum**2 / cells)
    return {"l1": absolute / cells, "copied_l1": copied_sum / cells, "r2": measured}


def distribution(
    compared: Compared, reads: Sequence[ReadPlanes], place: int, channel: Channel, bins: Bins
) -> Distribution:
    """Histograms of prediction and target, which `reads` return as `channel` at this place."""
    number = len(bins.edges) - 1

    def count(planes: slice) -> Tensor:
        sides = (read(slice(place, place + 1), planes) for read in reads)
        return torch.stack([bins.places(values).flatten().bincount(minlength=number) for values in sides])

    predicted, target = compared.total((2, number), count).astype(np.int64)
    return Distribution(bins.edges, predicted, target, channel.unit, channel.is_log)


def complete_fields(compared: Compared) -> dict[str, Any]:
    """Comparisons of complete fields of prediction and target, as Results has them; NaN without such a field.

    Spectra are computed for density, ln(density), ln(temperature), velocity (sum over its components) and velocity
    divergence of the gas. Each other vector has one, and each other channel, of its natural logarithm or its value.
    A rank stores its planes of one field of prediction and target at a time.
    """
    targets, reads, world = compared.targets, compared.fields[1:], compared.slabs.world
    names, velocity = spectrum_names(targets), velocity_places(targets, GAS)
    results: dict[str, Any] = {"spectra": {}, "distributions": {}, "divergence_r2": math.nan, "mass_ratio": math.nan}
    bins, sums = PowerBins(compared.slabs, compared.cell or 1.0), dict[str, Any]()

    def transform(name: str, fields: list[Tensor]) -> None:
        world.pulse.advance()  # the transforms of a large volume take long
        sums[name] = sums.get(name, 0) + bins.sums(fields)[:, 0]
        world.pulse.meet()

    if velocity:
        fields = [_divergence(compared, read, velocity) for read in reads]
        results |= _compare_divergences(compared, fields)
        transform(DIVERGENCE, fields)
    # The components of a vector in the order x, y, z, in which their powers are added.
    for place in sorted(range(len(targets)), key=lambda place: targets[place].component or targets[place].name):
        transform(names[place], [compared.stored(read, place) for read in reads])
        if names[place] == LOG_DENSITY:
            fields = [compared.stored(read, place, is_exponential=True) for read in reads]
            masses = torch.stack([values.sum(dtype=torch.float64) for values in fields])
            results["mass_ratio"] = float(torch.divide(*world.sum(masses)))
            transform("density", fields)
    k, modes, order = bins.k[0], bins.modes[0], [*SPECTRA, *names]
    for name in sorted(sums, key=order.index):
        powers = world.sum(sums[name]).cpu().numpy() * (bins.volume / modes)
        results["spectra"][name] = Spectrum(k, modes, *powers)
    return results


def _divergence(compared: Compared, read: ReadPlanes, places: Sequence[int]) -> Tensor:
    """The divergence of a vector in the own planes [n, Y, Z], with the same bits on any number of ranks.

    It uses central differences, (v(x + 1) − v(x − 1)) / 2 cells per axis, which do not ring at shocks; they damp waves
    of a few cells' length in prediction and target alike.
    """
    slabs, out, (x, *_) = compared.slabs, compared.slabs.empty(), places

    def planes(place: int, some: slice) -> Tensor:
        values = read(slice(place, place + 1), some)[0] * compared.targets[place].scale
        return (values + compared.targets[place].center) / (2 * (compared.cell or 1.0))

    with slabs.world.raise_together():
        edges = torch.zeros(2, *slabs.shape[1:], device=out.device)
        if slabs.count:
            for edge, plane in zip(edges, (slabs.planes.start, slabs.planes.stop - 1), strict=True):
                edge.copy_(planes(x, slice(plane, plane + 1))[0])
    before, behind = slabs.neighbors(*edges)
    with slabs.world.raise_together():
        out.zero_()
        out[:1] -= before
        for piece in slabs.pieces():
            components = zip(*(planes(place, piece) for place in places), strict=True)
            for plane, (along_x, along_y, along_z) in enumerate(components, slabs.local(piece).start):
                for values, axis in ((along_y, 0), (along_z, 1)):
                    out[plane] += values.roll(-1, axis) - values.roll(1, axis)
                if plane:
                    out[plane - 1] += along_x
                out[plane + 1 : plane + 2] -= along_x
        out[-1:] += behind
    return out


def _compare_divergences(compared: Compared, stored: Sequence[Tensor]) -> dict[str, Any]:
    """R² of the divergence of prediction and target, and its distribution."""
    slabs, sums = compared.slabs, torch.zeros(2, dtype=torch.float64, device=stored[0].device)
    for plane, true in zip(*stored, strict=True):
        sums[0] += (plane - true).square().sum(dtype=torch.float64)
        sums[1] += true.square().sum(dtype=torch.float64)  # its mean is zero: the field is periodic
    residual, variance = slabs.world.sum(sums).cpu().numpy()
    edge = DIVERGENCE_SIGMAS * math.sqrt(variance / math.prod(slabs.shape)) or 1.0
    edge = float(Context(2, ROUND_CEILING).create_decimal_from_float(edge))  # bins do not depend on last bits
    slope = DIVERGENCE_BINS / (2 * edge)
    bins = Bins(np.linspace(-edge, edge, DIVERGENCE_BINS + 1), slope, slope * edge)
    channel = Channel("velocity divergence", f"{VELOCITY_UNIT} per {'cell' if compared.cell is None else 'Mpc/h'}")
    measured = distribution(compared, [slabs.stored(values[None]) for values in stored], 0, channel, bins)
    return {"divergence_r2": float(r2(residual, variance)), "distributions": {channel.name: measured}}


def r2(residual: Any, variance: Any) -> Any:
    """1 − Σ(prediction − target)² / Σ(target − mean)²; NaN if the target is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, 1 - residual / variance, np.nan)


@torch.no_grad()
def volume_statistics(compared: Compared, metadata: Mapping[str, Any]) -> Results:
    """Compares a volume with the target; undefined values are NaN. Every rank calls it and gets the same results."""
    inputs, targets, fields, slabs = compared.inputs, compared.targets, compared.fields, compared.slabs
    by_channel = errors(compared)
    slabs.world.pulse.meet()
    distributions = {
        channel.name: distribution(compared, fields[1:], place, channel, Bins.of(channel))
        for place, channel in enumerate(targets)
    }
    complete = complete_fields(compared)
    computed = {}
    for name, statistic in STATISTICS.items():
        computed[name] = statistic.compute(compared)
        slabs.world.pulse.meet()
    reads = {"input": (fields.inputs, inputs), "target": (fields.target, targets)}
    reads["predicted"] = fields.predicted, targets
    planes = {name: _plane(read, len(part), slabs.shape[0] // 2, slabs) for name, (read, part) in reads.items()}
    return Results(
        channels=tuple(targets),
        input_channels=tuple(inputs),
        cell=compared.cell,
        distributions=distributions | complete.pop("distributions"),
        slices={name: plane.cpu().numpy() for name, plane in planes.items()},
        metadata=dict(metadata),
        statistics={name: result for name, result in computed.items() if result is not None},
        **by_channel,
        **complete,
    )


def _plane(read: ReadPlanes, channels: int, plane: int, slabs: Slabs) -> Tensor:
    """A plane of a field, [C, Y, Z], on every rank."""
    values = torch.zeros(channels, *slabs.shape[1:], device=slabs.world.device)
    with slabs.world.raise_together():
        if slabs.planes.start <= plane < slabs.planes.stop:
            values.copy_(read(slice(None), slice(plane, plane + 1))[:, 0])
    return slabs.world.sum(values)
