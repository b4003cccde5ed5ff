"""Losses of predictors that learn nothing, to compare a trained network with."""

from __future__ import annotations

import math

import torch

from utils.data import Loader
from utils.distributed.world import World

HISTOGRAM_BINS = 8192
HISTOGRAM_RANGE = (-1.5, 1.5)


def class_frequency_loss(loader: Loader, world: World) -> dict[str, float]:
    """Cross-entropy of predicting each class with its frequency in the validation samples."""
    counts: dict[int, int] = {}
    for _, labels in loader.epoch(0):
        for label in labels.tolist():
            counts[label] = counts.get(label, 0) + 1
    total: dict[int, int] = {}
    for part in world.gather_objects(counts):
        for label, count in part.items():
            total[label] = total.get(label, 0) + count
    samples = sum(total.values())
    loss = -sum(count * math.log(count / samples) for count in total.values()) / samples
    return {"guessing by class frequency": loss}


def volume_losses(loader: Loader, world: World) -> dict[str, float]:
    """Mean absolute difference over the validation crops of two predictors that ignore the structure of the input.

    One predicts each target channel's median, the best constant under this loss (to half a histogram bin). The other
    copies the input's density and velocities, and predicts that constant for channels that the input lacks.
    """
    medians = _medians(loader, world)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # constant, copy, elements
    for inputs, targets in loader.epoch(0):
        constant = medians.to(targets.dtype).view(1, -1, 1, 1, 1).expand_as(targets)
        shared = min(inputs.shape[1], targets.shape[1])
        copy = torch.cat([inputs[:, :shared], constant[:, shared:]], dim=1)
        sums[0] += (constant - targets).abs().sum(dtype=torch.float64)
        sums[1] += (copy - targets).abs().sum(dtype=torch.float64)
        sums[2] += targets.numel()
    constant_sum, copy_sum, count = world.sum(sums).tolist()
    return {"best constant per channel": constant_sum / count, "copying density and velocities": copy_sum / count}


def _medians(loader: Loader, world: World) -> torch.Tensor:
    """Median per target channel, from histograms summed over the ranks; shape [channels]."""
    low, high = HISTOGRAM_RANGE
    counts: torch.Tensor | None = None
    channels = 0
    for _, targets in loader.epoch(0):
        channels = targets.shape[1]
        histograms = [
            torch.histc(targets[:, channel].clamp(low, high), HISTOGRAM_BINS, low, high) for channel in range(channels)
        ]
        part = torch.stack(histograms).double()
        counts = part if counts is None else counts + part
    # A rank without a validation batch takes part in the sum, too.
    channels = max(world.gather_objects(channels))
    total = world.sum(torch.zeros(channels, HISTOGRAM_BINS, device=world.device).double() if counts is None else counts)
    cumulative = total.cumsum(1)
    bins = (cumulative < cumulative[:, -1:] / 2).sum(1)
    return low + (bins + 0.5) * (high - low) / HISTOGRAM_BINS
