"""The least time of a training step of the U-Net on a device: for each kernel, that of its products or its bytes.

A kernel needs the longer of FLOP / rate of matrix products and bytes / rate of copies. Kernels are the passes of the
convolutions, with activation and concatenation, the loss and the optimizer; each reads and writes its values once.
"""

import statistics
from collections.abc import Iterator

import torch

from benchmarks import common
from networks.ops.plan import layers_of
from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.steps import build

HALF, FLOAT = 2, 4  # bytes
# Of the gradient's norm, and of Adam's update: gradient, weight and two moments, and again without the gradient.
ADAM = FLOAT * (1 + 4 + 3)
AVERAGE = FLOAT * 2  # read and written


def copy_rate(device: torch.device) -> float:
    """Median TB/s of repeated copies of a large tensor, read and written."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2e-12 * source.nbytes / statistics.median(common.repeat(lambda: target.copy_(source), device, 0.2))


def work(config: Config) -> Iterator[tuple[str, float, float]]:
    """Name, FLOP and bytes of each kernel of a step with the config's U-Net and local batch."""
    network, batch = build.network_without_values(config), meta_batch(config, config.local_batch_size or 1)
    value = HALF if config.enable_amp else FLOAT
    samples = len(batch.inputs)
    for name, layer in layers_of(network).items():
        coarse, fine = layer.weight.shape[:2]
        side = config.data_size >> (layer.halvings + 1)
        flops = 2.0 * layer.weight.numel() * samples * side**3
        grids = value * samples * side**3 * (coarse + 8 * fine)
        yield f"{name}, forward", flops, grids + value * layer.weight.numel()
        if name != "down1":  # nobody needs the gradient of the fields
            yield f"{name}, input gradient", flops, grids + value * layer.weight.numel()
        yield f"{name}, weight gradient", flops, grids + FLOAT * layer.weight.numel()
    yield "loss", 0.0, (FLOAT + value) * batch.targets.numel()
    parameters = sum(parameter.numel() for parameter in network.parameters())
    yield "optimizer", 0.0, parameters * (ADAM + (AVERAGE if config.ema_decay else 0) + (HALF if value == HALF else 0))


def milliseconds(config: Config, matmul: float, copies: float) -> float:
    """matmul: in TFLOP/s; copies: in TB/s."""
    return sum(1e-9 * max(flops / matmul, size / copies) for _, flops, size in work(config))
