"""Initial weights of a network, drawn from a given generator."""

import math

import torch
from torch import nn

from networks.film import Film

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d, nn.Linear)


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
        elif isinstance(module, LAYERS):
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
