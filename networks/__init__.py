"""Networks, losses and metrics. They depend on torch only, and on Triton where it is installed.

A network maps volumes (fields on a grid) to volumes, or samples to class logits. To add a network, a loss or a metric,
write a module and add one line to the table below.
"""

import math
from typing import Any

import torch
from torch import nn

from networks import losses
from networks.classifiers import CifarCnn, LeNet, MnistCnn, ReutersCnn
from networks.film import Film
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
    "cross_entropy": losses.CrossEntropyLoss,
}
INITIALIZED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d, nn.Linear)
METRICS: dict[str, losses.Metric] = {"accuracy": losses.accuracy, "top5_accuracy": losses.top5_accuracy}

__all__ = ["LOSSES", "METRICS", "NETWORKS", "build_loss", "build_network", "initialize"]


def build_network(name: str, /, **options: Any) -> nn.Module:
    """The network `name` of NETWORKS; ValueError for options that it does not have or that contradict each other."""
    conditions = options.pop("conditions", ())  # the ranges of those that the network also takes
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


@torch.no_grad()
def initialize(
    network: nn.Module, generator: torch.Generator, conv_init: str = "normal", scale: float = 0.02, bias: float = 0.0
) -> None:
    """Draws the weights of convolutions, linear layers and embeddings.

    normal   N(0, scale²) as in DCGAN (Radford et al. 2016), with constant biases
    default  torch's own: uniform within ±1 / √fan_in, also for biases; embeddings N(0, 1)
    glorot   uniform within ±√(6 / (fan_in + fan_out)) (Glorot & Bengio 2010), with constant biases; embeddings uniform
             within ±0.05, as in Keras

    Norms keep weight 1 and bias 0, and the layers of a Film keep what its constructor has set.
    """
    kept = {layer for film in network.modules() if isinstance(film, Film) for layer in film.modules()}
    for module in network.modules():
        if module in kept:
            continue
        if isinstance(module, nn.Embedding):
            if conv_init == "glorot":
                module.weight.uniform_(-0.05, 0.05, generator=generator)
            else:
                module.weight.normal_(0.0, scale if conv_init == "normal" else 1.0, generator=generator)
        elif isinstance(module, INITIALIZED):
            weight, biases = module.weight, module.bias
            bound = weight[0].numel() ** -0.5
            if conv_init == "glorot":
                # The first two axes are inputs and outputs, in either order. The others are the kernel.
                bound = math.sqrt(6 / ((weight.shape[0] + weight.shape[1]) * weight[0, 0].numel()))
            if conv_init == "normal":
                weight.normal_(0.0, scale, generator=generator)
            else:
                weight.uniform_(-bound, bound, generator=generator)
            if biases is not None and conv_init == "default":
                biases.uniform_(-bound, bound, generator=generator)
            elif biases is not None:
                biases.fill_(bias)


def build_loss(name: str, samples: str = "volumes", **options: Any) -> nn.Module:
    """The loss `name` of LOSSES; ValueError if it is of other samples, or if it does not have the options."""
    suitable = [known for known in LOSSES if LOSSES[known].targets == samples]
    if name not in suitable:
        samples = SAMPLES.get(samples, samples)
        raise ValueError(f"loss {name} cannot be used with {samples}; use {' or '.join(suitable)}")
    if not options.keys() <= _options(LOSSES[name]):
        unknown = ", ".join(options.keys() - _options(LOSSES[name]))
        raise ValueError(f"loss {name} has no {unknown}; remove lambda_rho, channel_weights or loss_options")
    return LOSSES[name](**options)


def _options(kind: type[nn.Module]) -> set[str]:
    return kind.__init__.__annotations__.keys() - {"return"}
