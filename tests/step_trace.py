"""A trace of a training step without a GPU: its operations, the bytes that they move, and the layout of their tensors.

A step runs on tensors without data (FakeTensorMode) that pass as CUDA tensors. Each operation counts its operands and
results once, however often it reads them; views cost nothing, and of a broadcast operand only its storage counts.
Triton kernels are not run: their tensors count. Of cuDNN's convolutions count only the copies of operands in another
layout. Large tensors [N, C, D, H, W] that are not in channels-last order are listed.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.config import Config
from utils.data.loaders.base import Batch, memory_format
from utils.optim.soap import Soap
from utils.steps import annotate

CPU = torch.device("cpu")
LARGE = 2**25  # bytes of a tensor whose layout is checked
# They write their first argument without reading it.
WRITERS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
# The arguments that Triton kernels write; they read the others. All kernels that networks/ launches are here.
WRITTEN = {
    # networks/kernels.py
    "bias_activation": ("y",),
    "activation_backward": ("x_gradient", "partial"),
    "l1": ("partial",),
    "l1_backward": ("outputs_gradient",),
    "tail_l1": ("blocks_gradient", "loss_partial", "bias_partial"),
    # networks/strided_kernels.py
    "gather": ("out", "partial"),
    "scatter": ("out",),
    "weight_gradient": ("out",),
    "sum_splits": ("out",),
    # networks/block_kernels.py
    "rows_to_blocks": ("out", "sums"),
    "blocks_to_rows": ("out",),
    "block_weight_gradient": ("out",),
}


def size(x: torch.Tensor) -> int:
    """Bytes of the elements; those of a broadcast axis count once."""
    return x.element_size() * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def is_channels_last(x: torch.Tensor) -> bool:
    """True for [N, C, D, H, W] if channels are adjacent, then columns, rows and planes, of any pitch."""
    strides = [x.stride(axis) for axis in (0, 2, 3, 4, 1) if x.shape[axis] > 1]
    return strides == sorted(strides, reverse=True) and (x.shape[1] == 1 or x.stride(1) == 1)


def distinct(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the values, each view once."""
    tensors: dict[Any, torch.Tensor] = {}
    for x in values:
        if isinstance(x, torch.Tensor):
            tensors.setdefault((x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()), x)
    return list(tensors.values())


def memory(argument: Any) -> Any:
    """An argument of a kernel; for a TensorDescriptor all memory of its base, of which the base may be a view."""
    base = getattr(argument, "base", None)
    if base is None:
        return argument
    return base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)


class Trace(TorchDispatchMode):
    """Counts what runs inside it, in the phases that the step announces to the profiler.

    read, written: bytes by phase and operation. layouts: large tensors in another order than channels-last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[tuple[str, str]] = Counter()
        self.written: Counter[tuple[str, str]] = Counter()
        self.layouts: dict[str, None] = {}
        self._phase: str | None = None

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
        if name in ("conv3d", "conv_transpose3d"):  # in inference mode they arrive whole
            with self:
                return func.decompose(*args, **kwargs)
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
        if name not in WRITTEN:
            raise LookupError(f"kernel {name} is unknown; add the arguments that it writes to WRITTEN")
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        operands = {key: memory(value) for key, value in given.items()}
        written = distinct(operands[key] for key in WRITTEN[name])
        self._add(f"Triton {name}", distinct([*written, *operands.values()])[len(written) :], written)

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
            self._add(name, read, [*written, *results])

    def _convolution(self, name: str, args: Sequence[Any], result: Any) -> Any:
        """Gives the results the layout that cuDNN gives them."""
        backward = name == "convolution_backward"
        operands = args[: 3 if backward else 2]
        forms = [suggest_memory_format(tensor) for tensor in operands[-2:]]
        form = torch.channels_last_3d if torch.channels_last_3d in forms else torch.contiguous_format
        copied = [tensor for tensor in operands if not tensor.is_contiguous(memory_format=form)]
        self._add("copy before a convolution", copied, copied)
        results = [
            torch.empty_like(part, memory_format=form) if isinstance(part, torch.Tensor) and part.dim() == 5 else part
            for part in (result if backward else [result])
        ]
        self._check(name, [*operands, *results])
        return tuple(results) if backward else results[0]

    def _add(self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        if self._phase is not None:
            self.read[self._phase, name] += sum(map(size, read))
            self.written[self._phase, name] += sum(map(size, written))
            self._check(name, [*read, *written])

    def _check(self, name: str, operands: Sequence[Any]) -> None:
        for x in distinct(operands):
            if self._phase is not None and x.dim() == 5 and size(x) >= LARGE and not is_channels_last(x):
                text = f"{self._phase}, {name}: {x.dtype} {list(x.shape)}, strides {list(x.stride())}"
                self.layouts[text] = None


class FakeTensors(FakeTensorMode):
    """Tensors without data."""

    avoid_device_init = True  # torch.tensor() makes its values on the host

    def __deepcopy__(self, memo: object) -> "FakeTensors":
        return self  # a copied network belongs to the same mode


def to(module: nn.Module, device: torch.device | None = None, memory_format: Any = None) -> nn.Module:
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


def batch_of(config: Config) -> Batch:
    """Inputs and targets, as a loader makes them."""
    form, crop, samples = memory_format(config.channels_last), config.data_size, config.local_batch_size or 0
    targets = torch.empty(samples, config.N_out_channels, *[crop] * 3, memory_format=form)
    return Batch(torch.empty(samples, config.N_in_channels, *[crop] * 3, memory_format=form), targets)
