"""Counts the bytes that operations read and write, and lists large tensors that are not channels-last.

A part of benchmarks/traffic.py.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import common

LARGE = 2**25  # bytes of a tensor whose layout is checked
PHASES = ("forward", "backward", "optimizer")
# Zeros are written to the whole result before a part of it is copied.
FILLED = ("constant_pad_nd", "slice_backward", "select_backward")
# They write their first argument without reading it.
WRITERS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
ENGINE = Path(torch.autograd.graph.__file__)  # calls the backward pass
PROJECT = tuple(f"{common.REPOSITORY / folder}/" for folder in ("networks", "utils"))


# --- the count -------------------------------------------------------------------------------------------------------


@dataclass
class Operation:
    """All calls of an operation from one line of the code; bytes in total."""

    phase: str
    name: str
    place: str
    calls: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass
class Count:
    """Operations, convolutions, and large tensors in another order than channels-last."""

    operations: dict[tuple[str, str, str], Operation] = field(default_factory=dict)
    convolutions: dict[tuple[str, str, str], Operation] = field(default_factory=dict)
    layouts: dict[str, None] = field(default_factory=dict)

    def total(self, *phases: str) -> int:
        return sum(each.bytes for each in self.operations.values() if each.phase in (phases or PHASES))


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


class Addresses(ast.NodeVisitor):
    """The parameters of a Triton kernel that it loads from and stores to, according to its source."""

    def __init__(self, kernel: Any) -> None:
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self._origins: dict[str, set[str]] = {name: {name} for name in kernel.arg_names}
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
        for _ in range(2):  # a loop may read what its last lines assign
            self.visit(tree)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign([node.target], node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "load" or name.startswith("atomic"):
            self.loaded |= self._names(node.args[0])
        if name == "store" or name.startswith("atomic"):
            self.stored |= self._names(node.args[0])
        self.generic_visit(node)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                self._origins[node.id] = self._origins.get(node.id, set()) | self._names(value)
        self.visit(value)

    def _names(self, node: ast.AST) -> set[str]:
        """The parameters from which the value is computed, unless it is loaded."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            return set()
        own = self._origins.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return own.union(*(self._names(child) for child in ast.iter_child_nodes(node)))


addresses_of = functools.cache(Addresses)


# --- waiting for the device ------------------------------------------------------------------------------------------

# Their implementations read a status that the device returns.
CHECKED = ("_linalg_check_errors", "_linalg_eigh", "linalg_eigh", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_svd")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostWaits(RuntimeError):
    """An operation for which the host must wait for the device, which a CUDA graph cannot record."""


def refuse_to_wait(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises HostWaits for an operation whose result or shape the host computes from values on the device."""
    name = func._schema.name.removeprefix("aten::")
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    if name in INDEXING:  # a mask is first converted to positions
        waits = any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor))
    elif name == "_to_copy":
        waits = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    elif name in ("copy_", "_foreach_copy_"):
        waits = len({x.device.type for x in operands}) > 1
    else:
        waits = bool(tags) or name in CHECKED
    if waits:
        raise HostWaits(f"{name} of {[(str(x.dtype), list(x.shape), str(x.device)) for x in operands[:3]]}")


# --- the trace -------------------------------------------------------------------------------------------------------


class Trace(TorchDispatchMode):
    """Counts what runs inside it, in the phases that the step announces to the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
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
        refuse_to_wait(func, args, kwargs)
        # PyTorch's fused optimizers have no implementation for tensors without data, and only change their operands.
        result = None if name.startswith("_fused_") else func(*args, **kwargs)
        if name in ("convolution", "convolution_backward"):
            return self._convolution(name, args, result)
        if not name.startswith(("empty", "new_empty")):
            self._operation(name, func._schema.arguments, args, kwargs, result)
        return result

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        """Takes the place of JITFunction.run."""
        operands = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        addresses = addresses_of(kernel)
        written = distinct(operands.get(name) for name in addresses.stored)
        # What is neither loaded nor stored here may be loaded by a function that the kernel calls.
        only_written = addresses.stored - addresses.loaded
        read = distinct(value for name, value in operands.items() if name not in only_written)
        self._add(self.count.operations, f"Triton {kernel.fn.__name__}", read, written)

    def _operation(self, name: str, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = {each.name: value for each, value in zip(schema, args, strict=False)} | kwargs
        changed = [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
        if name == "_fused_adam_" or name == "_fused_adamw_":
            changed.remove("grads")  # without a scaler they are not changed, although the schema says so
        written = distinct(tree_leaves([operands.get(each) for each in changed]))
        skipped = changed if name in WRITERS else []
        read = distinct(tree_leaves([value for each, value in operands.items() if each not in skipped]))
        storages = {x.untyped_storage()._cdata for x in [*read, *written]}
        results = [x for x in distinct(tree_leaves(result)) if x.untyped_storage()._cdata not in storages]
        if written or results:  # other operations return views
            copied = read[:1] if name in FILLED and size(results[0]) > size(read[0]) else []
            self._add(self.count.operations, name, read, [*written, *results, *copied])

    def _convolution(self, name: str, args: Sequence[Any], result: Any) -> Any:
        """Counts a convolution, and gives its results the layout that cuDNN gives them."""
        backward = name == "convolution_backward"
        operands = args[: 3 if backward else 2]
        x, weight = operands[-2:]
        forms = [suggest_memory_format(each) for each in (x, weight)]
        form = torch.channels_last_3d if torch.channels_last_3d in forms else torch.contiguous_format
        copied = [each for each in operands if not each.is_contiguous(memory_format=form)]
        for each in copied:
            self._add(self.count.operations, "copy before a convolution", [each], [each])
        results = [
            torch.empty_like(each, memory_format=form) if isinstance(each, torch.Tensor) and each.dim() == 5 else each
            for each in (result if backward else [result])
        ]
        written = [each for each in results if each is not None]
        bias = written[2:] if backward else [each for each in args[2:3] if each is not None]
        if bias:  # a kernel apart adds it, or sums its gradient
            big = args[0] if backward else results[0]
            self._add(self.count.operations, "bias of a convolution", [big, *bias], [] if backward else [big])
        self._add(self.count.convolutions, name, operands, written[:2])
        return tuple(results) if backward else results[0]

    def _add(
        self, table: dict[tuple[str, str, str], Operation], name: str, read: Sequence[Any], written: Sequence[Any]
    ) -> None:
        if self._phase is None:
            return
        key = self._phase, name, place(skips_file=name.startswith("Triton"))
        row = table.setdefault(key, Operation(*key))
        row.calls += 1
        row.read += sum(map(size, read))
        row.written += sum(map(size, written))
        for x in distinct([*read, *written]):
            if x.dim() == 5 and size(x) >= LARGE and not is_channels_last(x):
                shape, dtype = list(x.shape), str(x.dtype).removeprefix("torch.")
                self.count.layouts[f"{key[0]}, {name} ({key[2]}): {dtype} {shape}, strides {list(x.stride())}"] = None


def place(skips_file: bool = False) -> str:
    """The line of the project that runs now; in the backward pass, the line whose gradient is computed.

    With skips_file the line that called the innermost file, which may be one that launches kernels for all others.
    """
    frame = sys._getframe(1)
    lines = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path == ENGINE:
            node: Any = torch._C._current_autograd_node()
            stack = "".join(node.metadata.get("traceback_", [])) if node is not None else ""
            lines += reversed(re.findall(r'File "([^"]*)", line (\d+)', stack))
            break
        lines.append((str(path), str(frame.f_lineno)))
        frame = frame.f_back  # type: ignore[assignment]
    own = [(file, line) for file, line in lines if file.startswith(PROJECT)]
    if skips_file:
        own = [(file, line) for file, line in own if file != own[0][0]]
    return ":".join(own[0]).removeprefix(f"{common.REPOSITORY}/") if own else ""
