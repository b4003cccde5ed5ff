"""The U-Net's convolutions, and the passes of each as separate calls, for benchmarks/convolutions.py."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from networks import build_network
from networks.unet import SPACE_TO_DEPTH

# From the most valuable to the least: what the budget does not cover is skipped.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
FORMATS = {"NDHWC": torch.channels_last_3d, "NCDHW": torch.contiguous_format}
NAMES = ("layer", "version", "pass", "dtype", "format")

Calls = dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Layer:
    """A convolution of the network, a module on the meta device; shapes of one sample, [C, D, H, W]."""

    name: str
    version: str  # plain or space-to-depth
    module: nn.Conv3d | nn.ConvTranspose3d
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    needs_input_gradient: bool

    @property
    def flops(self) -> int:
        """FLOP of one pass over one sample: two per weight and cell of the smaller grid."""
        cells = (self.output_shape, self.input_shape)[self.module.transposed][1:]
        return 2 * self.module.weight.numel() * math.prod(cells)

    @property
    def passes(self) -> tuple[str, ...]:
        if self.version == "space-to-depth":
            return ("forward", "backward")  # the gradients share their rearrangement, so they are one pass
        return ("forward", *(["input gradient"] if self.needs_input_gradient else []), "weight gradient")


@dataclass(frozen=True)
class Job:
    """Measurements on the same tensors."""

    layer: Layer
    dtype: str
    format: str

    def flops(self, name: str) -> int:
        """FLOP per sample of a pass; a space-to-depth layer counts like the plain one."""
        return self.layer.flops * (1 + self.layer.needs_input_gradient if name == "backward" else 1)

    def names(self, name: str) -> dict[str, str]:
        """The values that identify a row."""
        return dict(zip(NAMES, (self.layer.name, self.layer.version, name, self.dtype, self.format), strict=True))


def read_layers(crop: int, space_to_depth: Sequence[str] = (), **network: Any) -> list[Layer]:
    """The network's convolutions in the order of the forward pass; nothing is computed."""
    layers: list[Layer] = []

    def record(name: str, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        version = "space-to-depth" if name in space_to_depth else "plain"
        shapes = inputs[0].shape[1:], output.shape[1:]
        layers.append(Layer(name, version, module, *map(tuple, shapes), inputs[0].requires_grad))

    with torch.device("meta"):
        built = build_network("unet", crop, space_to_depth=space_to_depth, **network)
        hooks = [
            module.register_forward_hook(functools.partial(record, name))
            for name, module in built.named_modules()
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
        ]
        built(torch.empty(1, built.get_submodule("down1").in_channels, crop, crop, crop))
    for hook in hooks:
        hook.remove()
    return layers


def plan(crop: int, dtypes: Iterable[str], formats: Sequence[str], **network: Any) -> list[Job]:
    """All jobs, the most informative first: dtype by dtype, and in each format the largest layers."""
    layers = sorted(read_layers(crop, **network), key=lambda layer: layer.flops, reverse=True)
    rewritten = read_layers(crop, list(SPACE_TO_DEPTH), **network)
    layers += [layer for layer in rewritten if layer.name in SPACE_TO_DEPTH]
    return [Job(layer, dtype, format) for dtype in dtypes for format in formats for layer in layers]


def calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The job's passes by name: the layer without bias, and its gradients as autograd computes them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, dtype=DTYPES[job.dtype], device=device, generator=generator)
        return values.mul_(scale).contiguous(memory_format=FORMATS[job.format])

    layer = job.layer
    module = copy.deepcopy(layer.module)
    module.bias = None
    module.weight = nn.Parameter(draw(module.weight.shape, 0.02))
    inputs = draw((batch, *layer.input_shape)).requires_grad_(layer.needs_input_gradient)
    output = module(inputs)
    gradient = draw(output.shape)
    sources = {"input gradient": [inputs], "weight gradient": [module.weight], "backward": [inputs, module.weight]}

    def backward(name: str) -> torch.Tensor:
        """The first gradient, which shows the memory format."""
        wanted = [tensor for tensor in sources[name] if tensor.requires_grad]
        return torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]

    found = {name: functools.partial(backward, name) for name in layer.passes[1:]}
    return {"forward": torch.no_grad()(functools.partial(module, inputs)), **found}


def scales(crop: int) -> int:
    """The full network's number of scales, or as many as the crop can be halved."""
    return min(6, (crop & -crop).bit_length() - 1)
