"""Launches of Triton kernels, and their collection, so that they can be compiled before the first step."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

WARPS = 4


class Launch(NamedTuple):
    """A kernel, its arguments and its constants and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def signature(self) -> tuple[Any, ...]:
        """The launch as Triton compiles kernels for it: types, block shapes, multiples of 16, ones and constants."""
        return self.kernel, *map(_kind, self.arguments), *sorted(self.options.items())


_collected: list[Launch] | None = None


@contextlib.contextmanager
def collected() -> Iterator[list[Launch]]:
    """Context in which kernels are not launched; yields the list to which their launches are added."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = WARPS, **constants: Any) -> None:
    # Without multiply-add fusion the results equal the interpreter's. Triton 3.9 warns if the option is missing.
    options = {**constants, "num_warps": num_warps, "enable_fp_fusion": False}
    if _collected is not None:
        _collected.append(Launch(kernel, arguments, options))
    else:
        kernel[(programs,)](*arguments, **options)


def _kind(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return (argument.base.dtype, *argument.block_shape) if hasattr(argument, "block_shape") else type(argument)
