"""Operations of a training step, and the bytes that it moves outside its convolutions, counted without a GPU.

python -m benchmarks.cost                       sets of options of benchmarks/step.py, and a prediction of their speed
python -m benchmarks.cost --sets A --set ema_decay=0.999     one set, after a change of the config

A step runs on tensors without data (FakeTensorMode) that pass as CUDA tensors. Each operation counts its operands and
results once, however often it reads them; views cost nothing, and of a broadcast operand only its storage counts.
Triton kernels are not run: their tensors count. Convolutions are counted separately. A tensor that cuDNN would have to
copy to another layout first counts as a copy. Large tensors [N, C, D, H, W] that are not in channels-last order are
listed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import nadam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import common
from benchmarks.step import SETS
from utils import config as configs
from utils.cli import read_changes
from utils.config import Config
from utils.data.loaders.base import Batch, memory_format
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim.soap import Soap
from utils.steps import annotate, build
from utils.steps.eager import EagerStep
from utils.steps.flops import training_flops

CPU = torch.device("cpu")
LARGE = 2**25  # bytes of a tensor whose layout is checked
PHASES = ("forward", "backward", "optimizer")
COUNTED = ("float16", "bfloat16", "channels last", "F", "A", "EMA", "tail", "D", "E")
# Of an H200: its measured matmul peak in FLOP/s, the share of it that convolutions may reach, and bytes/s of a copy.
MATMUL, SHARES, COPY = 790e12, (0.50, 0.65, 0.80), 4.3e12
# Zeros are written to the whole result before a part of it is copied.
FILLED = ("constant_pad_nd", "slice_backward", "select_backward")
# They write their first argument without reading it.
WRITERS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
# What the kernels of networks/kernels.py store; they load their other tensors.
STORED = {
    "bias_activation": ("y", "copy"),
    "activation_backward": ("x_gradient", "partial"),
    "l1": ("partial",),
    "l1_backward": ("outputs_gradient",),
    "tail_l1": ("blocks_gradient", "loss_partial", "bias_partial"),
}


@dataclass
class Operation:
    """All calls of an operation in a phase; bytes in total."""

    phase: str
    name: str
    calls: int = 0
    read: int = 0
    written: int = 0


def size(x: torch.Tensor) -> int:
    """Bytes of the elements; those of a broadcast axis count once."""
    return x.element_size() * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def is_channels_last(x: torch.Tensor) -> bool:
    """True for 5 axes if channels are adjacent, then columns, rows and planes, of any pitch.

    The axes are N, C, D, H, W, or N, D, H, W, C, where D, H and W are equal.
    """
    moved = x.shape[1] == x.shape[2] == x.shape[3] != x.shape[4]
    axes = (0, 1, 2, 3, 4) if moved else (0, 2, 3, 4, 1)
    strides = [x.stride(axis) for axis in axes if x.shape[axis] > 1]
    return strides == sorted(strides, reverse=True) and (x.shape[axes[-1]] == 1 or x.stride(axes[-1]) == 1)


def distinct(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the values, each view once."""
    found = {}
    for x in tensors:
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()] = x
    return list(found.values())


Rows = dict[tuple[str, str], Operation]


class Trace(TorchDispatchMode):
    """Counts what runs inside it, in the phases that the step announces to the profiler.

    layouts: large tensors in another order than channels-last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Rows = {}
        self.convolutions: Rows = {}
        self.layouts: dict[str, None] = {}
        self._phase: str | None = None

    def total(self, *phases: str) -> int:
        """Bytes of the operations of some phases, or of all."""
        return sum(row.read + row.written for row in self.operations.values() if row.phase in (phases or PHASES))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("networks::"):
            # The mode is entered again for the operations of which a custom operator consists.
            with self, torch.no_grad():
                return OPDEFS[name]._init_fn(*args, **kwargs)
        # PyTorch's fused optimizers have no implementation for tensors without data, and only change their operands.
        result = None if name.startswith("_fused_") else func(*args, **kwargs)
        if name in ("convolution", "convolution_backward"):
            return self._convolution(name, args, result)
        if not name.startswith(("empty", "new_empty")):
            self._operation(name, func._schema.arguments, args, kwargs, result)
        return result

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        """Takes the place of JITFunction.run."""
        name = kernel.fn.__name__
        operands = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        written = distinct(operands[key] for key in STORED[name])
        read = distinct(value for key, value in operands.items() if key not in STORED[name])
        self._add(self.operations, f"Triton {name}", read, written)

    def _operation(self, name: str, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        changed = [argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write]
        if name in ("_fused_adam_", "_fused_adamw_"):
            changed.remove("grads")  # without a scaler they are not changed, although the schema says so
        written = distinct(tree_leaves([operands.get(key) for key in changed]))
        skipped = changed if name in WRITERS else []
        read = distinct(tree_leaves([value for key, value in operands.items() if key not in skipped]))
        storages = {x.untyped_storage()._cdata for x in [*read, *written]}
        results = [x for x in distinct(tree_leaves(result)) if x.untyped_storage()._cdata not in storages]
        if written or results:  # other operations return views
            copied = read[:1] if name in FILLED and size(results[0]) > size(read[0]) else []
            self._add(self.operations, name, read, [*written, *results, *copied])

    def _convolution(self, name: str, args: Sequence[Any], result: Any) -> Any:
        """Counts a convolution, and gives its results the layout that cuDNN gives them."""
        backward = name == "convolution_backward"
        operands = args[: 3 if backward else 2]
        x, weight = operands[-2:]
        forms = [suggest_memory_format(tensor) for tensor in (x, weight)]
        form = torch.channels_last_3d if torch.channels_last_3d in forms else torch.contiguous_format
        for tensor in operands:
            if not tensor.is_contiguous(memory_format=form):
                self._add(self.operations, "copy before a convolution", [tensor], [tensor])
        results = [
            torch.empty_like(part, memory_format=form) if isinstance(part, torch.Tensor) and part.dim() == 5 else part
            for part in (result if backward else [result])
        ]
        written = [part for part in results if part is not None]
        bias = written[2:] if backward else [part for part in args[2:3] if part is not None]
        if bias:  # a separate kernel adds it, or sums its gradient
            big = args[0] if backward else results[0]
            self._add(self.operations, "bias of a convolution", [big, *bias], [] if backward else [big])
        self._add(self.convolutions, name, operands, written[:2])
        return tuple(results) if backward else results[0]

    def _add(self, table: Rows, name: str, read: Sequence[Any], written: Sequence[Any]) -> None:
        if self._phase is None:
            return
        row = table.setdefault((self._phase, name), Operation(self._phase, name))
        row.calls += 1
        row.read += sum(map(size, read))
        row.written += sum(map(size, written))
        for x in distinct([*read, *written]):
            if x.dim() == 5 and size(x) >= LARGE and not is_channels_last(x):
                text = f"{self._phase}, {name}: {x.dtype} {list(x.shape)}, strides {list(x.stride())}"
                self.layouts[text] = None


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
    """Context in which `trace` counts."""
    with trace, mock.patch.object(annotate, "named_range", trace.phase):
        yield


def count_step(config: Config) -> Trace:
    """The bytes of the config's second step: the first one also creates the optimizer's state."""
    trace = Trace()
    with fake_gpu(trace):
        step = build.step(config, World(Launch("benchmark"), CPU), build.model(config), EagerStep)
        batch = batch_of(config)
        with trace:
            step(*batch, 1e-4)
        with phases(trace):
            step(*batch, 1e-4)
    return trace


def batch_of(config: Config) -> Batch:
    """Inputs and targets, as a loader makes them."""
    form, crop, samples = memory_format(config.channels_last), config.data_size, config.local_batch_size or 0
    targets = torch.empty(samples, config.N_out_channels, *[crop] * 3, memory_format=form)
    return Batch(torch.empty(samples, config.N_in_channels, *[crop] * 3, memory_format=form), targets)


def load(name: str, changes: Mapping[str, Any]) -> Config:
    """The config of a set of options after `changes` of its keys."""
    keys = {"local_batch_size": 64, **SETS[name].changes, "device": "cpu", **changes}
    return configs.load(common.YAML, "base", keys).for_world(1)


def measure(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes and operations, and samples/s on an H200: the time of the convolutions plus that of all other bytes."""
    config = load(name, changes)
    count, batch = count_step(config), config.local_batch_size or 0
    with torch.device("meta"):
        flops = training_flops(build.network(config), torch.empty(1, config.N_in_channels, *[config.data_size] * 3))
    seconds = [batch * flops / (share * MATMUL) + count.total() / COPY for share in SHARES]
    rows = sorted(count.operations.values(), key=lambda row: -row.read - row.written)
    return {
        "batch": batch,
        "FLOP per sample": flops,
        "gigabytes": {phase: count.total(phase) / 1e9 for phase in PHASES} | {"total": count.total() / 1e9},
        "predicted samples/s": [batch / one for one in seconds],
        "operations": [asdict(row) for row in rows],
        "convolutions": [asdict(row) for row in count.convolutions.values()],
        "not channels-last": list(count.layouts) if config.channels_last else [],
    }


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per set of options, and the largest operations of each."""
    heads = ["set", "batch", *(f"GB {phase}" for phase in PHASES), "GB in all"]
    heads += [f"samples/s if convolutions reach {100 * share:.0f} %" for share in SHARES]
    rows, parts = [], []
    for name, result in results.items():
        cells = [f"{value:.2f}" for value in result["gigabytes"].values()]
        cells += [f"{rate:,.0f}" for rate in result["predicted samples/s"]]
        rows.append([f"{name}: {SETS[name].text}", result["batch"], *cells])
        operations = [
            (row["phase"], row["name"], row["calls"], f"{row['read'] / 1e9:.2f}", f"{row['written'] / 1e9:.2f}")
            for row in result["operations"]
            if row["read"] + row["written"] >= 2e8
        ]
        parts.append(common.table([f"phase of {name}", "operation", "calls", "GB read", "GB written"], operations, 2))
        parts += [f"- not channels-last: {layout}" for layout in result["not channels-last"]]
    return "\n\n".join([common.table(heads, rows), *parts])


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=COUNTED, metavar="SET", help=", ".join(SETS))
    parser.add_changes()
    options = parser.parse_args(argv)
    results = {name: measure(name, read_changes(options.changes)) for name in options.sets}
    common.publish("cost", options, {"sets": results}, markdown(results))


if __name__ == "__main__":
    common.run(main)
