"""Networks, losses and metrics; torch, and triton if there, is all they know.

A network is for volumes, fields on a grid to be mapped to others, or for labelled samples, to be told apart by class. A
new one is a class and a line in a table; so is a loss or a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from networks.classifiers import CifarCnn, LeNet, MnistCnn, ReutersCnn
from networks.init import initialise
from networks.losses import CrossEntropyLoss, L1Loss
from networks.metrics import METRICS, Metric
from networks.unet import UNet

VOLUME_NETWORKS: dict[str, type[nn.Module]] = {"unet": UNet}
CLASSIFIERS: dict[str, type[nn.Module]] = {
    "mnist_cnn": MnistCnn,
    "lenet": LeNet,
    "reuters_cnn": ReutersCnn,
    "cifar_cnn": CifarCnn,
}
NETWORKS = {**VOLUME_NETWORKS, **CLASSIFIERS}
VOLUME_LOSSES: dict[str, Callable[..., nn.Module]] = {"l1": L1Loss}
LABEL_LOSSES: dict[str, Callable[..., nn.Module]] = {"cross_entropy": CrossEntropyLoss}
LOSSES = {**VOLUME_LOSSES, **LABEL_LOSSES}

__all__ = [
    "CLASSIFIERS",
    "LABEL_LOSSES",
    "LOSSES",
    "METRICS",
    "NETWORKS",
    "VOLUME_LOSSES",
    "VOLUME_NETWORKS",
    "build_loss",
    "build_metrics",
    "build_network",
    "initialise",
]

Choice = TypeVar("Choice")


def build_network(name: str, crop: int | None = None, /, **options: Any) -> nn.Module:
    """The network `name`; ValueError for options that it does not have, or that do not fit.

    `crop`, the cells of a side, is an option of networks for volumes like the others, and may be given by name, too.
    """
    network = _choose(NETWORKS, "network", name)
    if crop is not None:
        options["crop"] = crop
    for option, samples, table in (("crop", "volumes", VOLUME_NETWORKS), ("classes", "labelled samples", CLASSIFIERS)):
        if option in options and name not in table:
            raise ValueError(f"network {name} does not take {samples}; choose one of {', '.join(table)}")
    # A constructor's annotations name its options.
    known = [option for option in network.__init__.__annotations__ if option != "return"]
    for option in options:
        if option not in known:
            raise ValueError(f"network {name} has no option {option}; it has {', '.join(known)}")
    return network(**options)


def build_loss(name: str, is_classification: bool = False, **options: Any) -> nn.Module:
    """The loss `name`, of volumes or of labelled samples; ValueError where it is of the others."""
    loss, fitting = _choose(LOSSES, "loss", name), LABEL_LOSSES if is_classification else VOLUME_LOSSES
    if name not in fitting:
        samples = "labelled samples" if is_classification else "volumes"
        raise ValueError(f"loss {name} does not take {samples}; choose one of {', '.join(fitting)}")
    return loss(**options)


def build_metrics(names: Sequence[str], is_classification: bool = True) -> list[Metric]:
    """The metrics of these names; they are all of labelled samples."""
    if names and not is_classification:
        raise ValueError(f"metrics {', '.join(names)} do not take volumes; set metrics=[]")
    return [_choose(METRICS, "metric", name) for name in names]


def _choose(table: Mapping[str, Choice], kind: str, name: str) -> Choice:
    if name not in table:
        raise ValueError(f"unknown {kind} {name}; known: {', '.join(table)}")
    return table[name]
