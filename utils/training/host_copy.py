"""Copies of the training state in host memory, so that they can be written while training continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class HostCopy:
    """Copies nested dictionaries and lists of tensors into host memory, which the next copy reuses."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any | None:
        """Returns a copy of the state; None if the network's tensors are not finite.

        On a GPU the copies are made in the order of the current stream; they are complete after `wait`.
        """
        tensors = list(state["network"].values())
        # NaN and infinity are always among the extremes; on a CPU isfinite() takes twenty times as long.
        real = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        finite = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in real]
        # Read before the copies are queued, so that the host waits for training alone.
        if finite and not torch.stack(finite).all():
            return None
        copied = self._map(state, "")
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copied

    def wait(self) -> None:
        """Returns when the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _map(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._map(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._map(item, f"{name}/{index}") for index, item in enumerate(value)]
        return value

    def _copy(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or _layout(buffer) != _layout(tensor):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
