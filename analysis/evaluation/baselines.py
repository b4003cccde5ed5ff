"""Baselines for a trained network: the losses of predictors without trained weights."""

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from analysis.evaluation.base import converted
from utils.config import Config
from utils.config.channels import GAS, UNKNOWN, Channels, copied_channels, known_channels
from utils.data.loaders import Batch, Loader
from utils.data.task import CLASSES, task_of
from utils.distributed.world import World

HISTOGRAM_BINS = 8192
HISTOGRAM_RANGE = (-1.5, 1.5)
PUBLISHED = known_channels("inputs", 4), known_channels("targets", 5)


def baseline_losses(config: Config, loader: Loader, loss: nn.Module, world: World) -> dict[str, float]:
    """The validation losses of the config's baselines by name. Every rank calls it."""
    if task_of(config).name == CLASSES:
        return class_frequency_loss(loader, world)
    return volume_losses(loader, loss, world, config.volume_channels)


def class_frequency_loss(loader: Loader, world: World) -> dict[str, float]:
    """Cross-entropy of predicting each class with its frequency in the validation samples."""
    labels_seen = Counter(label for batch in _batches(loader, world) for label in batch.targets.tolist())
    counts = sum((Counter(dict(part)) for part in world.gather_json([*labels_seen.items()])), Counter[int]())
    samples = counts.total()
    loss = -sum(count * math.log(count / samples) for count in counts.values()) / samples
    return {"guessing by class frequency": loss}


def volume_losses(
    loader: Loader, loss: nn.Module, world: World, channels: tuple[Channels, Channels] = PUBLISHED
) -> dict[str, float]:
    """The validation loss of two predictors that ignore the structure of the input.

    One predicts a constant for each target channel, the best one under this loss (to half a histogram bin). The other
    copies what inputs and targets share, and predicts the constant for the rest; there is none if they share nothing.
    """
    loss.eval()
    (sources, targets), copied = channels, copied_channels(*channels)
    constants = _best_constants(loss, _histograms(loader, world))
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # constant, copy, samples
    for inputs, truth, *_ in _batches(loader, world):
        constant = constants.to(truth).view(1, -1, 1, 1, 1).expand_as(truth)
        copy = constant.clone()
        for own, place in copied.items():
            copy[:, own] = converted(inputs[:, place], sources[place], targets[own])
        sums += torch.stack([loss(constant, truth), loss(copy, truth), sums.new_ones(())]) * len(truth)
    constant_sum, copy_sum, count = world.sum(sums).tolist()
    losses = {"best constant per channel": constant_sum / count}
    return losses | ({_copying(sources, [targets[own] for own in copied]): copy_sum / count} if copied else {})


def _copying(inputs: Channels, copied: Channels) -> str:
    """The name of the predictor that copies these targets from inputs, such as "copying density and velocities"."""
    if any(channel.name.startswith(UNKNOWN) for channel in (*inputs, *copied)):
        return "copying the input"
    parts = [channel.component.rsplit(" ", 1)[0] if channel.component else channel.name for channel in copied]
    names = [part.removeprefix(GAS) for part in dict.fromkeys(parts)]
    if len(names) == 1:
        return f"copying the {names[0]}"
    names = ["velocities" if name == "velocity" else name for name in names]
    return f"copying {', '.join(names[:-1])} and {names[-1]}"


def _batches(loader: Loader, world: World) -> Iterator[Batch]:
    """The batches of a pass over the validation samples, each of which is progress."""
    for batch in loader.epoch(0):
        world.pulse.advance()
        yield batch


def _histograms(loader: Loader, world: World) -> torch.Tensor:
    """Number of target values per channel and bin, [channels, bins], over all ranks; the outer bins hold the rest."""
    low, high = HISTOGRAM_RANGE
    counts = torch.zeros(1, HISTOGRAM_BINS, dtype=torch.float64)  # becomes [channels, bins] with the first batch
    for batch in _batches(loader, world):
        bins = ((batch.targets - low) * (HISTOGRAM_BINS / (high - low))).long().clamp(0, HISTOGRAM_BINS - 1)
        # Unlike histc, bincount is deterministic on a GPU.
        histograms = [torch.bincount(channel.flatten(), minlength=HISTOGRAM_BINS) for channel in bins.unbind(1)]
        counts = counts + torch.stack(histograms).double().cpu()
    return world.sum(counts.expand(max(world.gather_json(len(counts))), -1))  # some ranks may have no batch


def _best_constants(loss: nn.Module, counts: torch.Tensor) -> torch.Tensor:
    """The constant per channel that minimizes the loss of values with these histograms, by bisection of its slope."""
    low, high = HISTOGRAM_RANGE
    width = (high - low) / HISTOGRAM_BINS
    values = torch.arange(HISTOGRAM_BINS, dtype=torch.float64) * width + (low + width / 2)
    targets = values.expand_as(counts).reshape(1, len(counts), -1, 1, 1)
    lower, upper = (torch.full((len(counts),), end, dtype=torch.float64) for end in HISTOGRAM_RANGE)
    for _ in range(40):
        middle = (lower + upper) / 2
        outputs = middle.view(1, -1, 1, 1, 1).expand_as(targets).clone().requires_grad_()
        (slopes,) = torch.autograd.grad(loss(outputs, targets), outputs)
        rises = (slopes.view_as(counts) * counts).sum(1) > 0
        lower, upper = torch.where(rises, lower, middle), torch.where(rises, middle, upper)
    return lower
