"""A trace of a step that refuses operations for which the host must wait for the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from step_trace import Trace
from torch.utils._pytree import tree_leaves

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


class WaitingTrace(Trace):
    """Raises HostWaits for the first of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.startswith("networks::"):
            refuse_to_wait(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)
