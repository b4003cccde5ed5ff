"""Networks, losses and metrics. They depend on torch only, and on Triton where it is installed.

A network maps volumes (fields on a grid) to volumes, or samples to class logits. To add a network, a loss or a metric,
write a module and add one line to the table below.
"""

from typing import Any

from torch import nn

from networks import losses
from networks.classifiers import CifarCnn, LeNet, MnistCnn, ReutersCnn
from networks.init import initialize
from networks.unet import UNet

# A network whose constructor has the option `crop` takes volumes, one that has `classes` is a classifier.
NETWORKS: dict[str, type[nn.Module]] = {
    "unet": UNet,
    "mnist_cnn": MnistCnn,
    "lenet": LeNet,
    "reuters_cnn": ReutersCnn,
    "cifar_cnn": CifarCnn,
}
# The samples that a network accepts if its constructor has the option; used in error messages.
SAMPLES = {"crop": "volumes", "classes": "labeled samples", "vocabulary": "texts"}
LOSSES: dict[str, type[losses.Loss]] = {
    "l1": losses.L1Loss,
    "mse": losses.MSELoss,
    "huber": losses.HuberLoss,
    "spectral_l1": losses.SpectralL1Loss,
    "cross_entropy": losses.CrossEntropyLoss,
}
METRICS: dict[str, losses.Metric] = {"accuracy": losses.accuracy, "top5_accuracy": losses.top5_accuracy}

__all__ = ["LOSSES", "METRICS", "NETWORKS", "build_loss", "build_network", "initialize"]


def build_network(name: str, /, **options: Any) -> nn.Module:
    """The network `name` of NETWORKS; ValueError for options that it does not have or that contradict each other.

    `conditions` are the ranges of the conditions that the network also takes, as in `UNet.condition_on`.
    """
    conditions = options.pop("conditions", ())
    samples = [option for option in SAMPLES if option in options]
    suitable = [known for known in NETWORKS if _options(NETWORKS[known]).issuperset(samples)]
    if name not in suitable:
        raise ValueError(f"network {name} cannot be used with {SAMPLES[samples[-1]]}; use {' or '.join(suitable)}")
    for option in options:
        if option not in _options(NETWORKS[name]):
            raise ValueError(f"network {name} has no option {option}; remove it")
    network = NETWORKS[name](**options)
    if conditions:
        if not isinstance(network, UNet):
            raise ValueError(f"network {name} takes no conditions; remove network.conditions")
        network.condition_on(conditions)
    return network


def build_loss(name: str, samples: str = "volumes", **options: Any) -> nn.Module:
    """The loss `name` of LOSSES; ValueError if it is of other samples, or if it does not have the options."""
    suitable = [known for known in LOSSES if LOSSES[known].targets == samples]
    if name not in suitable:
        raise ValueError(
            f"loss {name} cannot be used with {SAMPLES.get(samples, samples)}; use {' or '.join(suitable)}"
        )
    if not options.keys() <= _options(LOSSES[name]):
        unknown = ", ".join(options.keys() - _options(LOSSES[name]))
        raise ValueError(f"loss {name} has no {unknown}; remove lambda_rho, channel_weights or loss_options")
    return LOSSES[name](**options)


def _options(kind: type[nn.Module]) -> set[str]:
    """Names of the constructor's options."""
    return kind.__init__.__annotations__.keys() - {"return"}
