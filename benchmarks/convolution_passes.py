"""The U-Net's convolutions, and the passes of each as separate calls, for benchmarks/convolutions.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from networks import build_network
from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d

# From the most valuable to the least: what the budget does not cover is skipped.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
FORMATS = {"NDHWC": torch.channels_last_3d, "NCDHW": torch.contiguous_format}
NAMES = ("layer", "version", "pass", "dtype", "format")

Calls = dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Layer:
    """A convolution of the network for one sample; shapes are [C, D, H, W], the weight's as in torch."""

    name: str
    transposed: bool
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    needs_input_gradient: bool

    @property
    def flops(self) -> int:
        """FLOP of one pass over one sample: two per weight and cell of the smaller grid."""
        return 2 * math.prod(self.weight_shape) * math.prod((self.output_shape, self.input_shape)[self.transposed][1:])

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", *(["input gradient"] if self.needs_input_gradient else []), "weight gradient")


@dataclass(frozen=True)
class Job:
    """Measurements on the same tensors."""

    layer: Layer
    dtype: str
    format: str
    version: str = "plain"  # or "space-to-depth"

    @property
    def passes(self) -> tuple[str, ...]:
        # The gradients of a space-to-depth layer share their rearrangement, so they are one pass.
        return self.layer.passes if self.version == "plain" else ("forward", "backward")

    def flops(self, name: str) -> int:
        """FLOP per sample of the plain layer's pass."""
        return self.layer.flops * (len(self.layer.passes) - 1 if name == "backward" else 1)

    def names(self, name: str) -> dict[str, str]:
        """The values that identify a row."""
        return dict(zip(NAMES, (self.layer.name, self.version, name, self.dtype, self.format), strict=True))


def read_layers(crop: int, **network: Any) -> list[Layer]:
    """The network's convolutions in the order of the forward pass; nothing is computed."""
    layers: list[Layer] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            assert isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
            layers.append(
                Layer(
                    name=name,
                    transposed=module.transposed,
                    input_shape=tuple(inputs[0].shape[1:]),
                    output_shape=tuple(output.shape[1:]),
                    weight_shape=tuple(module.weight.shape),
                    stride=tuple(module.stride),
                    padding=tuple(int(side) for side in module.padding),
                    dilation=tuple(module.dilation),
                    output_padding=tuple(module.output_padding),
                    groups=module.groups,
                    needs_input_gradient=inputs[0].requires_grad,
                )
            )

        return hook

    with torch.device("meta"):
        built = build_network("unet", crop, **network)
        channels = 0
        for name, module in built.named_modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                channels = channels or module.in_channels
                module.register_forward_hook(record(name))
        built(torch.empty(1, channels, crop, crop, crop))
    return layers


def plan(layers: Sequence[Layer], dtypes: Iterable[str], formats: Iterable[str]) -> list[Job]:
    """All jobs, the most informative first: dtype by dtype, and in each format the largest layers."""
    formats = list(formats)
    largest = sorted(layers, key=lambda layer: layer.flops, reverse=True)
    jobs = []
    for dtype in dtypes:
        for format in formats:
            jobs += [Job(layer, dtype, format) for layer in largest]
            jobs += [Job(layer, dtype, format, "space-to-depth") for layer in (layers[0], layers[-1])]
    return jobs


def calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The job's passes by name."""
    return (_plain_calls if job.version == "plain" else _space_to_depth_calls)(job, device, batch)


def _plain_calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The passes as autograd calls them, each separately, without bias."""
    layer = job.layer
    draw = random_tensors(job, device)
    inputs = draw((batch, *layer.input_shape))
    weight = draw(layer.weight_shape, 0.02)
    gradient = draw((batch, *layer.output_shape))
    where = (layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(inputs, weight, None, *where)

    def backward(mask: list[bool]) -> torch.Tensor:
        gradients = torch.ops.aten.convolution_backward(gradient, inputs, weight, None, *where, mask)
        return gradients[mask.index(True)]

    return {
        "forward": torch.no_grad()(forward),
        "input gradient": lambda: backward([True, False, False]),
        "weight gradient": lambda: backward([False, True, False]),
    }


def _space_to_depth_calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The module that replaces the layer, with all its rearrangements."""
    layer = job.layer
    draw = random_tensors(job, device)
    # Without a bias, as in the plain layer's passes; on the meta device no weights are drawn.
    with torch.device("meta"):
        module: Any = (DepthToSpaceConvTranspose3d if layer.transposed else SpaceToDepthConv3d)(
            layer.input_shape[0],
            layer.output_shape[0],
            layer.weight_shape[2:],
            stride=layer.stride,
            padding=layer.padding,
            bias=False,
            dtype=DTYPES[job.dtype],
        )
    module = module.to_empty(device=device).to(memory_format=FORMATS[job.format])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(tuple(parameter.shape), 0.02))
    inputs = draw((batch, *layer.input_shape)).requires_grad_(layer.needs_input_gradient)
    wanted = [*([inputs] if layer.needs_input_gradient else []), *module.parameters()]
    output = module(inputs)
    gradient = draw(tuple(output.shape))

    def forward() -> torch.Tensor:
        return module(inputs)

    def backward() -> torch.Tensor:
        # The first gradient, of the inputs or of the only weight, shows the memory format.
        return torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]

    return {"forward": torch.no_grad()(forward), "backward": backward}


def random_tensors(job: Job, device: torch.device) -> Callable[..., torch.Tensor]:
    """draw(shape, scale=1): normally distributed values in the job's dtype and format."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, dtype=DTYPES[job.dtype], device=device, generator=generator)
        return values.mul_(scale).contiguous(memory_format=FORMATS[job.format])

    return draw


def scales(crop: int) -> int:
    """The full network's number of scales, or as many as the crop can be halved."""
    return min(6, (crop & -crop).bit_length() - 1)
