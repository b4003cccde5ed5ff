"""Baselines for a trained network: the losses of predictors that learn nothing."""

from __future__ import annotations

import math
from collections import Counter

import torch

from utils.data import Loader
from utils.distributed.world import World

HISTOGRAM_BINS = 8192
HISTOGRAM_RANGE = (-1.5, 1.5)


def class_frequency_loss(loader: Loader, world: World) -> dict[str, float]:
    """Cross-entropy of predicting each class with its frequency in the validation samples."""
    own: Counter[int] = Counter()
    for _, labels in loader.epoch(0):
        own.update(labels.tolist())
    gathered = world.gather_json([*own.items()])
    counts: Counter[int] = sum((Counter(dict(each)) for each in gathered), Counter())
    samples = counts.total()
    loss = -sum(count * math.log(count / samples) for count in counts.values()) / samples
    return {"guessing by class frequency": loss}


def volume_losses(loader: Loader, world: World) -> dict[str, float]:
    """Mean absolute difference over the validation crops of two predictors that ignore the structure of the input.

    One predicts the median of each target channel, the best constant under this loss (to half a histogram bin). The
    other copies the input's density and velocities, and predicts the median for channels that the input lacks.
    """
    medians = _medians(loader, world)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # constant, copy, elements
    for inputs, targets in loader.epoch(0):
        constant = medians.to(targets).view(1, -1, 1, 1, 1).expand_as(targets)
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
    counts = torch.zeros(1, HISTOGRAM_BINS, dtype=torch.float64)  # becomes [channels, bins] with the first batch
    for _, targets in loader.epoch(0):
        channels = targets.clamp(low, high).unbind(1)
        histograms = [torch.histc(channel, HISTOGRAM_BINS, low, high) for channel in channels]
        counts = counts + torch.stack(histograms).double().cpu()
    channel_count = max(world.gather_json(len(counts)))
    total = world.sum(counts.expand(channel_count, -1))  # some ranks may have no batch
    cumulative = total.cumsum(1)
    bins = (cumulative < cumulative[:, -1:] / 2).sum(1)
    return low + (bins + 0.5) * (high - low) / HISTOGRAM_BINS
