"""Bytes that a training step moves outside its convolutions, counted without a GPU.

python -m benchmarks.traffic                                  a table by operation, largest first
python -m benchmarks.traffic --set fused_pointwise=false      the same after a change of the config

The step of a config runs on tensors without data (FakeTensorMode) that pass as CUDA tensors. Each operation counts its
operands and results once, however often it reads them; views cost nothing, and of a broadcast operand only its storage
counts. Triton kernels are not run: their tensors count, as read or written according to their source. Convolutions
are listed apart. A tensor that cuDNN would have to copy to another layout first counts as a copy. The table also lists
every large tensor [N, C, D, H, W] that is not in channels-last order.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import nadam

from benchmarks import common
from benchmarks.rungs import GPU_RUNGS
from benchmarks.traffic_trace import PHASES, Count, Trace, size
from utils import config as configs
from utils.cli import read_changes
from utils.config import Config
from utils.data.loaders.base import Batch, memory_format
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import one_line_errors
from utils.optim.soap import Soap
from utils.steps import annotate, build
from utils.steps.eager import EagerStep

CPU = torch.device("cpu")
EMA_DECAY = 0.999  # if the config has no average, of the step that is traced for its cost
# The rung A of the ladder with all that moves fewer bytes.
FASTEST = {**GPU_RUNGS["A"].changes, **GPU_RUNGS["tail"].changes}


# --- a step ----------------------------------------------------------------------------------------------------------


class FakeTensors(FakeTensorMode):
    """Tensors without data."""

    avoid_device_init = True  # torch.tensor() makes its values on the host

    def __deepcopy__(self, memo: object) -> FakeTensors:
        return self  # a copied network belongs to the same mode


def to(
    module: nn.Module, device: torch.device | None = None, memory_format: torch.memory_format | None = None
) -> nn.Module:
    """Takes the place of nn.Module.to, which fails for tensors without data."""
    for child in module.modules():
        for name, x in child._parameters.items():
            if x is not None:
                form = memory_format if x.dim() == 5 and memory_format is not None else torch.preserve_format
                child._parameters[name] = nn.Parameter(x.detach().to(device or x.device).clone(memory_format=form))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device or buffer.device)
    return module


@contextlib.contextmanager
def fake_gpu(trace: Trace, device: torch.device = CPU) -> Iterator[None]:
    """Tensors made inside have no data; `trace` takes the launches of Triton kernels.

    Those on a CPU pass as CUDA tensors; CUDA tensors need a CUDA build of torch. SOAP's bases are not renewed: it does
    that outside of CUDA graphs, and only there a step reads a value from the device.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.object(nn.Module, "to", to))
        stack.enter_context(mock.patch.object(Soap, "renew"))
        if device.type == "cpu":
            stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", True, create=True))
            stack.enter_context(mock.patch.object(nadam, "_get_capturable_supported_devices", return_value=["cpu"]))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))  # it would allocate memory there
        with contextlib.suppress(ImportError):
            from triton.runtime.jit import JITFunction

            def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
                trace.launch(kernel, *arguments, **options)

            stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(FakeTensors())
        yield


@contextlib.contextmanager
def phases(trace: Trace) -> Iterator[None]:
    """Context in which `trace` counts, and knows the lines of the code."""
    # Anomaly detection keeps them for the backward pass.
    lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with trace, mock.patch.object(annotate, "named_range", trace.phase), lines:
        yield


def count_step(config: Config) -> Count:
    """The bytes of the config's second step: the first one also creates the optimizer's state."""
    trace = Trace()
    with fake_gpu(trace):
        step = build.step(config, World(Launch("benchmark"), CPU), build.model(config), EagerStep)
        batch = batch_of(config)
        with trace:
            step(*batch, 1e-4)
        with phases(trace):
            step(*batch, 1e-4)
    return trace.count


def batch_of(config: Config) -> Batch:
    """Inputs and targets, as a loader makes them."""
    form, crop, samples = memory_format(config.channels_last), config.data_size, config.local_batch_size or 0
    targets = torch.empty(samples, config.N_out_channels, *[crop] * 3, memory_format=form)
    return Batch(torch.empty(samples, config.N_in_channels, *[crop] * 3, memory_format=form), targets)


def gathered(config: Config) -> int:
    """Bytes that the loader `resident` reads and writes for a batch."""
    cells = config.data_size**3 * (config.local_batch_size or 0)
    read = cells * (config.N_in_channels + config.N_out_channels) * getattr(torch, config.resident_dtype).itemsize
    with FakeTensors():
        return read + sum(map(size, batch_of(config)))


@dataclass(frozen=True)
class Measured:
    """A step without an average of the weights, the bytes that the average adds, and those of the loader."""

    count: Count
    average: int
    loader: int


def load(changes: Mapping[str, Any]) -> Config:
    """The config of the fastest step after `changes` of its keys."""
    return configs.load(common.YAML, "base", {**FASTEST, "device": "cpu", **changes}).for_world(1)


def measure(changes: Mapping[str, Any]) -> Measured:
    """The bytes of the fastest step after `changes`."""
    config = load({**changes, "ema_decay": None})
    count, average = count_step(config), count_step(load({"ema_decay": EMA_DECAY, **changes}))
    return Measured(count, average.total() - count.total(), gathered(config))


# --- the report ------------------------------------------------------------------------------------------------------


def gigabytes(value: int) -> str:
    return f"{value / 1e9:.2f}"


def markdown(measured: Measured) -> str:
    count = measured.count
    rows = sorted(count.operations.values(), key=lambda row: row.bytes, reverse=True)
    shown = [row for row in rows if row.bytes >= 5e6]
    parts = [[phase, gigabytes(count.total(phase))] for phase in PHASES]
    parts.append(["**all without the EMA**", f"**{gigabytes(count.total())}**"])
    parts.append(["the EMA, in addition", gigabytes(measured.average)])
    parts.append(["the gathering of a batch by the loader resident, in addition", gigabytes(measured.loader)])
    convolutions = sum(row.bytes for row in count.convolutions.values())
    parts.append(["operands and results of the convolutions, not included", gigabytes(convolutions)])
    columns = [
        [row.phase, row.name, row.place, row.calls, *map(gigabytes, (row.read, row.written, row.bytes))]
        for row in shown
    ]
    heads = ["phase", "operation", "line", "calls", "GB read", "GB written", "GB"]
    lines = [common.table(["part of a step", "GB"], parts), "", common.table(heads, columns, left=3), ""]
    lines.append(f"Large tensors that are not channels-last: {len(count.layouts) or 'none'}")
    return "\n".join([*lines, *(f"- {line}" for line in count.layouts)])


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_integers(batch=64)
    parser.add_changes()
    parser.add_argument("--name", default="traffic", help="of the result's files (%(default)s)")
    with one_line_errors():
        run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    measured = measure({"local_batch_size": options.batch, **read_changes(options.changes)})
    count = measured.count
    values = {phase: count.total(phase) for phase in PHASES}
    values |= {"total": count.total(), "EMA": measured.average, "loader": measured.loader}
    result = {
        "settings": common.settings(options),
        "gigabytes": {name: value / 1e9 for name, value in values.items()},
        "operations": [asdict(row) for row in count.operations.values()],
        "convolutions": [asdict(row) for row in count.convolutions.values()],
        "not channels-last": list(count.layouts),
    }
    common.publish(options.name, result, options.output, markdown(measured))


if __name__ == "__main__":
    main()
