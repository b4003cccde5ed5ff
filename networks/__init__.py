"""Networks, losses and metrics. They depend on torch only, and on Triton where it is installed.

A network maps volumes (fields on a grid) to volumes, or samples to class logits. To add a network, a loss or a metric,
write a module and add one line to the table below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from networks.classifiers import CifarCnn, LeNet, MnistCnn, ReutersCnn
from networks.init import initialise
from networks.losses import CrossEntropyLoss, L1Loss, Loss
from networks.metrics import Metric, accuracy, top5_accuracy
from networks.unet import UNet

# A network whose constructor has the option `crop` takes volumes, one that has `classes` is a classifier.
NETWORKS: dict[str, type[nn.Module]] = {
    "unet": UNet,
    "mnist_cnn": MnistCnn,
    "lenet": LeNet,
    "reuters_cnn": ReutersCnn,
    "cifar_cnn": CifarCnn,
}
# What a network does not take if it lacks one of these options, for errors.
SAMPLES = {"crop": "volumes", "shape": "labelled samples", "classes": "labelled samples", "vocabulary": "texts"}
LOSSES: dict[str, type[Loss]] = {
    "l1": L1Loss,
    "cross_entropy": CrossEntropyLoss,
}
# All metrics are for classification.
METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "top5_accuracy": top5_accuracy,
}

__all__ = ["LOSSES", "METRICS", "NETWORKS", "build_loss", "build_metrics", "build_network", "initialise"]

Choice = TypeVar("Choice")


def build_network(name: str, crop: int | None = None, /, **options: Any) -> nn.Module:
    """The network `name`; ValueError for options that it does not have or that contradict each other.

    `crop`, the cells per side of a volume, may be given by position or by name.
    """
    network = _choose(NETWORKS, "network", name)
    if crop is not None:
        options["crop"] = crop
    for option in options:
        suitable = [other for other, kind in NETWORKS.items() if option in _options(kind)]
        if name not in suitable:
            what = SAMPLES.get(option, f"option {option}")
            remedy = f"choose one of {', '.join(suitable)}" if suitable else "remove it"
            raise ValueError(f"network {name} does not take {what}; {remedy}")
    return network(**options)


def build_loss(name: str, is_classification: bool = False, **options: Any) -> nn.Module:
    """The loss `name`; ValueError if it does not compare what the dataset holds, classes or fields."""
    loss = _choose(LOSSES, "loss", name)
    if loss.is_classification != is_classification:
        samples = "labelled samples" if is_classification else "volumes"
        suitable = [other for other in LOSSES if LOSSES[other].is_classification == is_classification]
        raise ValueError(f"loss {name} does not take {samples}; choose one of {', '.join(suitable)}")
    return loss(**options)


def build_metrics(names: Sequence[str], is_classification: bool = True) -> list[Metric]:
    """The metrics of these names; ValueError if there are any but the dataset has no classes."""
    if names and not is_classification:
        raise ValueError(f"metrics {', '.join(names)} do not take volumes; set metrics=[]")
    return [_choose(METRICS, "metric", name) for name in names]


def _options(network: type[nn.Module]) -> list[str]:
    return [option for option in network.__init__.__annotations__ if option != "return"]


def _choose(table: Mapping[str, Choice], kind: str, name: str) -> Choice:
    if name not in table:
        raise ValueError(f"unknown {kind} {name}; known: {', '.join(table)}")
    return table[name]
