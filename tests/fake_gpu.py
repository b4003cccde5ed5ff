"""A training step without a GPU, on tensors without data that pass as CUDA tensors; Triton kernels are not run.

Operations for which the host must wait for the device are refused. Large tensors [N, C, D, H, W] that are not in
channels-last order are listed.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from networks.ops.launch import Launch, collected
from utils.config import Config
from utils.data.loaders.base import Batch, memory_format
from utils.optim.soap import Soap

CPU = torch.device("cpu")
LARGE = 2**25  # bytes of a tensor whose layout is checked
# Their implementations read a status that the device returns.
CHECKED = ("_linalg_check_errors", "_linalg_eigh", "linalg_eigh", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_svd")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostWaits(RuntimeError):
    """An operation for which the host must wait for the device, which a CUDA graph cannot record."""


def refuse_to_wait(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises HostWaits for an operation whose result or shape the host computes from values on the device."""
    name = func._schema.name.removeprefix("aten::")
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if name in INDEXING:  # a mask is first converted to positions
        waits = any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor))
    elif name == "_to_copy":
        waits = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    elif name in ("copy_", "_foreach_copy_"):
        waits = len({x.device.type for x in operands}) > 1
    else:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        waits = not tags.isdisjoint(func.tags) or name in CHECKED
    if waits:
        raise HostWaits(f"{name} of {[(x.dtype, list(x.shape), x.device) for x in operands[:3]]}")


def is_channels_last(x: torch.Tensor) -> bool:
    """True for [N, C, D, H, W] if channels are adjacent, then columns, rows and planes, of any pitch."""
    strides = [x.stride(axis) for axis in (0, 2, 3, 4, 1) if x.shape[axis] > 1]
    return strides == sorted(strides, reverse=True) and (x.shape[1] == 1 or x.stride(1) == 1)


class Trace(TorchDispatchMode):
    """Refuses to wait. layouts: large tensors in another order than channels-last. optimizers: fused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, None] = {}
        self.optimizers: set[str] = set()

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
        refuse_to_wait(func, args, kwargs)
        if name.startswith("_fused_"):  # PyTorch's fused optimizers do not support tensors without data
            self.optimizers.add(name)
            return None
        result = func(*args, **kwargs)
        checked = func.namespace == "aten" and not func.is_view
        for x in tree_leaves((args, result)) if checked else []:
            is_large = isinstance(x, torch.Tensor) and x.dim() == 5 and x.numel() * x.element_size() >= LARGE
            if is_large and not is_channels_last(x):
                self.layouts[f"{name}: {x.dtype} {list(x.shape)}, strides {list(x.stride())}"] = None
        return result


class FakeTensors(FakeTensorMode):
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
def fake_gpu(device: torch.device = CPU) -> Iterator[list[Launch]]:
    """Tensors made inside have no data; yields the list of launches of Triton kernels.

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
        launches = stack.enter_context(collected())
        stack.enter_context(FakeTensors())
        yield launches


def batch_of(config: Config) -> Batch:
    form, crop, samples = memory_format(config.channels_last), config.data_size, config.local_batch_size or 0
    targets = torch.empty(samples, config.N_out_channels, *[crop] * 3, memory_format=form)
    return Batch(torch.empty(samples, config.N_in_channels, *[crop] * 3, memory_format=form), targets)
